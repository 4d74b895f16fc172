# SPDX-License-Identifier: MIT
"""Runs a model and what a pass made of it on the trials that the pass asked for.

Kernels that add up in another order differ by a bound that the trial names. Where they differ
more, :mod:`.trial_noise` says how much of it is the model's own.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import tempfile
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ortplugins.model_io.saving import save_with_data
from ortplugins.optimization.trial_noise import Apart, Noise, Outputs, apart, outputs_on
from rewrite_rules.remarks import Trial

# Of processor time for one timed trial; a few runs of a slow model may take longer. Sessions
# of one thread, so that what else the machine does hardly counts. Again where the result is
# within its own error of the bound.
_SECONDS = 0.5
_MIN_ROUNDS = 5
_MAX_TURNS = 4
# Of a median, beside that of a mean.
_MEDIAN_ERROR = 1.25
# Of the time before: what costs nothing in short texts may save a lot in long ones.
_MAX_TIME = 1.01


def find_failure(
    before: ir.Model, after: ir.Model, trials: Sequence[Trial], providers: Sequence[str]
) -> str | None:
    """Run both models; return what fails the first trial that does, None where they agree."""
    with trials_of(before, trials, providers) as original:
        return original.failure(after, {trial.name for trial in trials})


@contextlib.contextmanager
def trials_of(
    before: ir.Model, trials: Sequence[Trial], providers: Sequence[str]
) -> Iterator[OriginalOnTrials]:
    """Run a model on trials, and keep its files as long as results are compared with it."""
    with tempfile.TemporaryDirectory(prefix="ortplugins-trials-") as name:
        original = OriginalOnTrials(before, trials, providers, Path(name))
        try:
            yield original
        finally:
            original.close()


class OriginalOnTrials:
    """The model before a pass: its outputs on trials, with which results are compared."""

    def __init__(
        self, before: ir.Model, trials: Sequence[Trial], providers: Sequence[str], folder: Path
    ) -> None:
        self._providers, self._folder = providers, folder
        self._before = _exact(before)
        self._names = [str(value.name) for value in before.graph.outputs]
        self._path = folder / "before.onnx"
        save_with_data(self._before, self._path)
        self._session, found = outputs_on(self._path, providers, [t.feeds for t in trials])
        if not any(trial.timed for trial in trials):
            self._session = None  # two sessions hold the weights twice
        self._outputs = dict(zip(trials, found, strict=True))
        self._noise = Noise(self._before, self._outputs, providers, folder)
        run = {
            trial: outputs
            for trial, outputs in self._outputs.items()
            if not (trial.optional and isinstance(outputs, Exception))
        }
        # Where the original runs none of them, nothing is known of the result.
        self._counting = run or {t: o for t, o in self._outputs.items() if not t.guessed}

    def close(self) -> None:
        """Let go of the session: Windows removes no file that one maps."""
        self._session = None

    def failure(self, after: ir.Model, names: Container[str]) -> str | None:
        """Return what fails the first trial of these names; None where the models agree."""
        after = _exact(after)
        wanted = [trial for trial in self._counting if trial.name in names]
        session = None
        path = self._folder / "after.onnx"
        _save_beside(self._before, after, path)
        try:
            session, found = outputs_on(path, self._providers, [t.feeds for t in wanted])
            timed = [trial for trial in wanted if trial.timed]
            beyond: dict[Trial, Mapping[str, Apart]] = {}
            for trial, outputs in zip(wanted, found, strict=True):
                reason, differences = self._compare(trial, outputs)
                if reason is not None:
                    return _withdrawn(trial.name, reason)
                beyond[trial] = differences
            if not timed:
                session = None
            excess = self._noise.excess(beyond, after)
            if excess is not None:
                return _withdrawn(excess[0].name, excess[1])
            return self._slower(session, timed) if timed else None
        finally:
            session = None
            for file in self._folder.glob(f"{path.name}*"):
                file.unlink()

    def _compare(
        self, trial: Trial, found: Outputs | Exception
    ) -> tuple[str | None, Mapping[str, Apart]]:
        """Return why an output can't be right, else those that differ beyond the bound."""
        expected = self._counting[trial]
        if isinstance(expected, Exception):
            return f"the original does not run it: {_short(expected)}", {}
        if isinstance(found, Exception):
            return f"the result does not run it: {_short(found)}", {}
        differences = {}
        for name, a, b in zip(self._names, expected, found, strict=True):
            far = apart(a, b, trial.counted(name, a.shape))
            if far.share > trial.bound:
                differences[name] = far
        return None, differences

    def _slower(self, result: Any, timed: Sequence[Trial]) -> str | None:
        shares: list[list[float]] = [[] for _ in timed]
        share, error, turns = _MAX_TIME, 0.0, 0
        while abs(share - _MAX_TIME) <= error and turns < _MAX_TURNS:
            for trial, found in zip(timed, shares, strict=True):
                found += _shares(self._session, result, trial)
            share, error, turns = *_mean(shares), turns + 1
        if share < _MAX_TIME:
            return None
        names = ", ".join(trial.name for trial in timed)
        return _withdrawn(names, f"it takes {share:.2f} times as long")


def _withdrawn(names: str, reason: str) -> str:
    return f"withdrawn after a trial on {names}: {reason}"


def _exact(model: ir.Model) -> ir.Model:
    """A copy that rounds no activations, which would differ by more than any rewrite."""
    copy = model.clone()
    for node in copy.graph.all_nodes():
        if node.op_type == "MatMulNBits":
            node.attributes.pop("accuracy_level", None)
    return copy


def _mean(shares: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return the mean over trials of the middle of their runs, and its standard error."""
    errors = (statistics.stdev(found) / len(found) ** 0.5 for found in shares)
    mean = statistics.geometric_mean(map(statistics.median, shares))
    return mean, _MEDIAN_ERROR * math.hypot(*errors) / len(shares)


def _shares(original: Any, result: Any, trial: Trial) -> list[float]:
    """Processor times of a trial as shares of the original's, of runs in turns."""
    shares: list[float] = []
    end = time.process_time() + _SECONDS
    while len(shares) < _MIN_ROUNDS or time.process_time() < end:
        times = {}
        for session in (original, result)[:: 1 if len(shares) % 2 else -1]:
            start = time.process_time()
            session.run(None, dict(trial.feeds))
            times[session] = time.process_time() - start
        shares.append(times[result] / times[original])
    return shares


def save_both(before: ir.Model, after: ir.Model, folder: Path) -> tuple[Path, Path]:
    """Save two models, weights of one name once; return their paths.

    The tensors of both point to the folder afterwards.
    """
    paths = folder / "before.onnx", folder / "after.onnx"
    save_with_data(before, paths[0])
    _save_beside(before, after, paths[1])
    return paths


def _save_beside(before: ir.Model, after: ir.Model, path: Path) -> None:
    """Save a model in the folder of another that is saved, with whose weights it shares."""
    stored = before.graph.initializers
    for value in after.graph.initializers.values():
        twin = stored.get(str(value.name))
        if twin is not None and twin.const_value is not None:
            value.const_value = twin.const_value
    save_with_data(after, path, keep_in_place=True)


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
