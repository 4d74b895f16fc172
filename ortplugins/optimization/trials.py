# SPDX-License-Identifier: MIT
"""Runs a model and what a pass made of it on the trials that the pass asked for."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
from numpy.typing import NDArray

from ortplugins.model_io.saving import save_with_data
from ortplugins.optimization.offline_optimizers import SLOW_OPTIMIZERS
from rewrite_rules.remarks import Trial

# Of processor time for one timed trial; a few runs of a slow model may take longer. Sessions
# of one thread, so that what else the machine does hardly counts.
_SECONDS = 0.5
_MIN_ROUNDS = 5


def find_failure(
    before: ir.Model, after: ir.Model, trials: Sequence[Trial], providers: Sequence[str]
) -> str | None:
    """Run both models; return what fails the first trial that does, None where they agree."""
    with tempfile.TemporaryDirectory(prefix="ortplugins-trials-") as name:
        folder = Path(name)
        copies = [before.clone(), after.clone()]
        # Rounded activations would differ by more than any rewrite.
        for node in (node for copy in copies for node in copy.graph.all_nodes()):
            if node.op_type == "MatMulNBits":
                node.attributes.pop("accuracy_level", None)
        paths = save_both(copies[0], copies[1], folder)
        original, expected = _run(paths[0], providers, trials)
        if not any(trial.timed for trial in trials):
            original = None  # two sessions hold the weights twice
        result, found = _run(paths[1], providers, trials)
    names = [str(value.name) for value in before.graph.outputs]
    tried = []
    results = list(zip(trials, expected, found, strict=True))
    run = [each for each in results if not each[0].optional or isinstance(each[1], list)]
    # Where the original runs none of them, nothing is known of the result.
    for trial, one, other in run or results:
        if isinstance(one, Exception):
            reason: str | None = f"the original does not run it: {_short(one)}"
        elif isinstance(other, Exception):
            reason = f"the result does not run it: {_short(other)}"
        else:
            pairs = zip(names, one, other, strict=True)
            found_in = (_difference(name, a, b, trial) for name, a, b in pairs)
            reason = next(filter(None, found_in), None)
        if reason is not None:
            return f"withdrawn after a trial on {trial.name}: {reason}"
        tried.append(trial)
    timed = [trial for trial in tried if trial.timed]
    if timed:
        share = statistics.geometric_mean(_share(original, result, trial) for trial in timed)
        if share >= 1:
            on = ", ".join(trial.name for trial in timed)
            return f"withdrawn after a trial on {on}: it takes {share:.2f} times as long"
    return None


def _share(original: Any, result: Any, trial: Trial) -> float:
    """Processor time of a trial as a share of the original's, the middle of runs in turns."""
    shares: list[float] = []
    end = time.process_time() + _SECONDS
    while len(shares) < _MIN_ROUNDS or time.process_time() < end:
        times = {}
        for session in (original, result)[:: 1 if len(shares) % 2 else -1]:
            start = time.process_time()
            session.run(None, dict(trial.feeds))
            times[session] = time.process_time() - start
        shares.append(times[result] / times[original])
    return statistics.median(shares)


def save_both(before: ir.Model, after: ir.Model, folder: Path) -> tuple[Path, Path]:
    """Save two models, weights of one name once; return their paths.

    The tensors of both point to the folder afterwards.
    """
    paths = folder / "before.onnx", folder / "after.onnx"
    save_with_data(before, paths[0])
    stored = before.graph.initializers
    for value in after.graph.initializers.values():
        twin = stored.get(str(value.name))
        if twin is not None and twin.const_value is not None:
            value.const_value = twin.const_value
    save_with_data(after, paths[1], keep_in_place=True)
    return paths


def _run(
    path: Path, providers: Sequence[str], trials: Sequence[Trial]
) -> tuple[Any, list[list[Any] | Exception]]:
    """Run a model on each trial; return its session, and outputs or what failed."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # what fails is reported by the caller
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "0")
    try:
        session = onnxruntime.InferenceSession(
            str(path),
            options,
            providers=list(providers),
            enable_fallback=0,
            disabled_optimizers=[*SLOW_OPTIMIZERS],
        )
    except Exception as error:  # onnxruntime's own classes, none of which is documented
        return None, [error] * len(trials)
    results: list[list[Any] | Exception] = []
    for trial in trials:
        try:
            results.append(session.run(None, dict(trial.feeds)))
        except Exception as error:
            results.append(error)
    return session, results


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _difference(name: str, a: NDArray[Any], b: NDArray[Any], trial: Trial) -> str | None:
    """How far the elements that count are apart, where it is too far."""
    if a.shape != b.shape:
        return f"{name!r} has shape {list(b.shape)} instead of {list(a.shape)}"
    counted = trial.compared.get(name)
    if counted is not None:
        counted = np.broadcast_to(counted, a.shape)
        a, b = a[counted], b[counted]
    same = (a == b) | ((a != a) & (b != b))
    if same.all():
        return None
    if a.dtype.kind not in "fc":
        return f"{int((~same).sum())} elements of {name!r} differ"
    wide, other = a.astype(np.float64), b.astype(np.float64)
    far = np.abs(wide[~same] - other[~same]).max()
    greatest = np.abs(wide[np.isfinite(wide)]).max(initial=0.0)
    if not far <= trial.bound * greatest:
        share = far / greatest if greatest else np.inf
        return f"{name!r} differs by {share:.1e} of its greatest, {trial.bound:.0e} is allowed"
    return None
