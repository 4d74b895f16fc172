# SPDX-License-Identifier: MIT
"""Chooses passes and session settings for one model on this machine, by measuring them.

Changes are measured one by one first; those that may gain are then decided on in pairs, the
most promising first. Of a pair each change and both together are measured in new processes,
and the fewest changes that are as fast as any are taken, so that none is taken which the
session is as fast without. The next pair is measured beside what was taken.

Everything runs under the user's own options, in processes that take turns with the session
that they are compared with. That one runs twice, and what the two differ by is noise: a change
that gains less, or whose error is too great, is not taken.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ortplugins.errors import CalibrationError, ModelFileError, PassError, UsageError
from ortplugins.measurement.measure import (
    Candidate,
    ForkServer,
    MeasureError,
    Measurement,
    SessionProcess,
    Spread,
    measure,
    write_feed,
)
from ortplugins.model_io.loading import LoadedModel
from ortplugins.optimization.build import build_artifact
from ortplugins.optimization.request import BuildRequest
from ortplugins.optimization.stages import FailedPass
from ortplugins.report import Tried
from ortplugins.runtime.copied_options import DATA_FOLDER_KEY
from ortplugins.runtime.machine import machine, process_memory, usable_cores
from ortplugins.runtime.session_settings import PROVIDERS_OF_OPTIONS
from ortplugins.runtime.stock_session import open_model, quiet_runner
from ortplugins.tuning.changes import AND, Change, changes_for, combined
from ortplugins.tuning.workloads import Workload, workloads
from rewrite_rules.graph.nodes import all_nodes
from rewrite_rules.remarks import Outcome
from session_options.keys import parse_dims
from session_options.plan import plan_from_settings

# Rounds in which changes are measured one by one, and the fewest and the most of a pair, as
# the budget allows. Starts vary most.
_ROUNDS = {"run": (2, 3, 12), "private": (1, 2, 3), "start": (5, 6, 15)}
_RUNS = 20
# Seconds that one process runs one workload, the share of the budget that it may take, and the
# fewest runs.
_RUN_SECONDS = {"run": 0.3, "private": 0.1, "start": 0.0}
_RUN_SHARE, _MIN_RUNS = 0.01, 1
# The share of the machine's memory for processes that live at the same time.
_MEMORY = 0.5
# Where onnxruntime's own error is smaller, rounding in another order does not count.
_ROUNDING = 1e-5
# The greatest of many rounding errors varies by so much between kernels that round alike.
_LIKE_PLAIN = 2.0
# A smaller gain is not worth a change, whatever the noise.
_MIN_GAIN = 0.02
# A gain that one round is enough to believe.
_MUCH = 0.25
# A start may gain by what makes runs slower, up to this; table and note report it.
_MAX_RUN_COST = 1.5
# Where a session differs from itself by more, only what gains more than that in every round
# is looked at again.
_MAX_NOISE = 0.25
# The share of the budget for changes one by one; what is left is for pairs.
_ALONE = 0.6
# The figures that sessions are compared by, in words.
_FIGURES = {"run": "time of a run", "start": "time of a start", "private": "private memory"}
_AIMS = {"latency": "run", "throughput": "run", "memory": "private", "start": "start"}


class Tuned(NamedTuple):
    """What was chosen."""

    change: Change  # the changes taken, as one
    manifest: dict[str, Any]  # of the artifact; its report has a row for each that was tried


def tune(request: BuildRequest, loaded: LoadedModel, folder: Path) -> Tuned:
    """Choose what a request's hint asks for; the empty folder gets the artifact's files."""
    with tempfile.TemporaryDirectory(prefix="tuning-", dir=folder) as scratch:
        search = _Search(request, loaded, Path(scratch))
        chosen, why = search.choose()
        if chosen.model != search.plain.model:
            for path in Path(chosen.model).parent.iterdir():
                shutil.move(path, folder / path.name)
    manifest, report = chosen.manifest, chosen.manifest["report"]
    return Tuned(
        chosen.change,
        {
            **manifest,
            "session_settings": {**manifest["session_settings"], **chosen.change.settings},
            "report": {
                **report,
                "notes": [*report["notes"], f"hint {request.plan.hint}: {why}"],
                "tried": [row._asdict() for row in search.tried.values()],
            },
        },
    )


class _Built(NamedTuple):
    """A session that can be measured: what it changes, and the model that it opens."""

    change: Change
    model: str | Path
    settings: Mapping[str, str]  # what sessions on the model need
    manifest: dict[str, Any]  # as build_artifact returns it


class _Search:
    """The search for what one session gains from."""

    def __init__(self, request: BuildRequest, loaded: LoadedModel, scratch: Path) -> None:
        self._request, self._given, self._scratch = request, loaded.model, scratch
        self._aim = _AIMS[request.plan.hint]
        self._began = time.monotonic()
        self._numbers = itertools.count()
        self._workloads: list[Workload] = []
        self._server: ForkServer | None = None
        self._seconds = math.inf  # to measure a session once
        self.tried: dict[str, Tried] = {}  # by the name of the change
        self.plain = self._build_plain(loaded)  # the session without any change
        self._graphs: dict[tuple[Any, ...], _Built | None]
        self._graphs = {_graph_key(self.plain.change): self.plain}
        # What has been taken so far, and its figures beside the plain session's.
        self._base = self.plain
        self._base_ratios = dict.fromkeys(_FIGURES, 1.0)

    def choose(self) -> tuple[_Built, str]:
        """Return the session to open, and why."""
        fusion, *changes = changes_for(
            self._request.plan.hint,
            dict(self._request.session_settings),
            frozenset(node.op_type for node in all_nodes(self._given)),
        )
        fused = self._build(fusion)
        safe, unmeasured = fused or self.plain, "not measured, only what is safe is taken"
        if PROVIDERS_OF_OPTIONS in self._request.providers:
            return safe, f"{unmeasured}: SessionOptions have no getter for their providers"
        try:
            if self._aim == "private" and process_memory().private is None:
                raise MeasureError("private memory is not known on this system")
            self._workloads = self._make_workloads(self._candidate(safe))
            forks = sys.platform == "linux"
            with ForkServer() if forks else contextlib.nullcontext() as self._server:
                noise = self._choose_measured(fused, changes)
        except UsageError as error:
            raise PassError(f"hint_dims: {error}") from error
        except (CalibrationError, ModelFileError) as error:
            return safe, f"{unmeasured}: {error}"
        except MeasureError as error:
            return self.plain, f"not measured, so plain onnxruntime runs: {error}"
        if noise > _MAX_NOISE:
            return self._base, (
                f"{self._base.change.name}; two equal sessions differ by {noise:.0%}, the "
                "machine is busy, so nothing else is changed"
            )
        if self._base is self.plain:
            return self.plain, f"{self.plain.change.name}; nothing gains"
        figures = ("start", "run") if self._aim == "start" else (self._aim,)
        gains = [f"{_FIGURES[key]} {self._base_ratios[key]:.2f} x" for key in figures]
        return self._base, f"{self._base.change.name}; {', '.join(gains)}"

    # Sessions.

    def _build_plain(self, loaded: LoadedModel) -> _Built:
        request = self._request
        path: str | Path = request.name
        if isinstance(request.source, bytes):
            path = self._scratch / "given.onnx"
            path.write_bytes(request.source)
        folder = request.data_folder
        settings = {} if folder is None else {DATA_FOLDER_KEY: folder}
        manifest = build_artifact(request, loaded, self._scratch)
        return _Built(Change("plain onnxruntime"), path, settings, manifest)

    def _build(self, change: Change) -> _Built | None:
        """Build what a change makes of the base; None where it makes nothing."""
        change = combined((self._base.change, change))._replace(name=change.name)
        key = _graph_key(change)
        try:
            if key not in self._graphs:
                self._graphs[key] = self._build_graph(change)
        except FailedPass as error:
            self._note(change, str(error))
            return None
        built = self._graphs[key]
        if built is not None:
            change = _without_idle_passes(change, built.manifest)
            self._graphs[_graph_key(change)] = built
        if built is None or change[1:] == self._base.change[1:]:
            self._note(change, "it finds nothing to do")
            return None
        return built._replace(change=change)

    def _build_graph(self, change: Change) -> _Built | None:
        request = self._request
        folder = self._scratch / str(next(self._numbers))
        folder.mkdir()
        manifest = build_artifact(
            _with_change(request, change),
            request.load(),
            folder,
            only_if_modified=not change.keeps_graph,
        )
        path = folder / "model.onnx"
        if not path.exists():
            return None
        settings = manifest["session_settings"] | request.data_settings(
            manifest["data"], folder
        )
        if manifest["baked"]:
            settings["graph_optimization_level"] = "ORT_DISABLE_ALL"
        return _Built(change, path, settings, manifest)

    def _candidate(self, item: _Built) -> Candidate:
        request = self._request
        settings = {**dict(request.session_settings), **item.settings, **item.change.settings}
        return Candidate(
            item.model,
            item.change.name,
            settings=settings,
            providers=request.session_providers,
            custom_op_libraries=request.custom_op_libraries,
        )

    def _make_workloads(self, candidate: Candidate) -> list[Workload]:
        """Make them with a session that runs the model."""
        plan = self._request.plan
        try:
            session = open_model(
                candidate.model,
                candidate.level,
                candidate.providers,
                candidate.settings,
                candidate.custom_op_libraries,
            )
        except ModelFileError as error:
            raise ModelFileError(f"measuring processes cannot open it: {error}") from error
        try:
            return workloads(
                self._given,
                quiet_runner(session),
                dims=parse_dims("hint_dims", plan.hint_dims),
                samples=plan.hint_samples,
            )
        except ModelFileError as error:
            raise ModelFileError(f"{error} (hint_samples names an .npz file)") from error

    # What changes are decided on.

    def _choose_measured(self, fused: _Built | None, changes: Sequence[Change]) -> float:
        """Take what gains; return the noise, which may be too great to decide anything.

        The fusion is taken at once where it gains much: all else is measured beside it then. A
        model whose weights plain onnxruntime does not fuse runs some ten times slower there.
        """
        if fused is not None:
            plain, ours = self._measure([self.plain, fused], rounds=1)
            if plain.failed:
                raise MeasureError(plain.failed)
            ratios = _Ratios.of(ours, plain)
            self._note(fused.change, ours.failed, ratios)
            if ratios is not None and self._gains(fused, ratios, _MUCH):
                self._take_if_exact(fused, ratios)
        rest = [fused] if fused is not None and self._base is self.plain else []
        noise, promising = self._promising(self._build_all(changes, rest))
        self._choose_in_pairs(promising)
        return 0.0 if promising else noise

    def _build_all(self, changes: Sequence[Change], built: Sequence[_Built]) -> list[_Built]:
        """Add to what is built as many changes as there is time, and memory, to measure."""
        (measured,) = self._measure([self._base], rounds=1)
        if measured.failed:
            raise MeasureError(measured.failed)
        private, total = measured.private, machine()["memory_bytes"]
        memory = private.median / total if private and total else 0.0
        budget = self._request.plan.hint_seconds
        found = list(built)
        for change in changes:
            sessions = len(found) + 3  # what they are measured beside comes twice
            if self._rounds_left(sessions, _ALONE) < _ROUNDS[self._aim][0]:
                self._note(change, f"no time for it in {budget} s (hint_seconds)")
            elif sessions * memory > _MEMORY:
                self._note(change, "no memory for one more session")
            elif (item := self._build(change)) is not None:
                found.append(item)
        return found

    def _rounds_left(self, sessions: int, share: float = 1.0) -> float:
        """Return how often so many sessions can be measured in a share of the budget."""
        left = share * self._request.plan.hint_seconds - (time.monotonic() - self._began)
        return left / (sessions * self._seconds)

    def _promising(self, built: Sequence[_Built]) -> tuple[float, list[_Built]]:
        """Return the noise, and the changes that may gain, those that gain most first.

        A few rounds do not show whether a change gains little or nothing: pairs do.
        """
        if len(built) < 2:
            return 0.0, list(built)
        rounds = _ROUNDS[self._aim][0]
        noise, compared = self._compare(built, rounds)
        if noise > _MAX_NOISE and self._rounds_left(len(built) + 2, _ALONE) >= rounds:
            noise, compared = self._compare(built, rounds)  # load comes in bursts
        found = []
        for item, ratios in compared:
            if (median := ratios.median(self._aim)) > 1 - _MIN_GAIN:
                self._refuse(item, f"gains less than {_MIN_GAIN:.0%}")
            elif noise > _MAX_NOISE and max(ratios.figures[self._aim]) > 1 - noise:
                self._refuse(
                    item, f"one round at least gains less than the noise of {noise:.0%}"
                )
            elif not self._is_slower_somewhere(item, ratios, noise):
                found.append((median, item))
        found.sort(key=lambda pair: pair[0])
        return noise, [item for _, item in found if self._is_exact_enough(item)]

    def _choose_in_pairs(self, promising: Sequence[_Built]) -> None:
        _, fewest, most = _ROUNDS[self._aim]
        left = list(promising)
        while left:
            # Each of the two, both together, and twice what they are measured beside; the best
            # one alone where that is all there is time for.
            size = min(len(left), 2 if self._rounds_left(5) >= fewest else 1)
            rounds = self._rounds_left(2 * size + 1)
            if rounds < fewest and len(left) < len(promising):
                for item in left:
                    self._refuse(item, "there was no time to measure it again (hint_seconds)")
                return
            share = rounds / math.ceil(len(left) / 2)
            pair, left = left[:size], left[size:]
            changes = [item.change for item in pair]
            self._choose_from(changes, int(min(max(share, fewest), most)))

    def _choose_from(self, changes: Sequence[Change], rounds: int) -> None:
        """Measure one change or two, and both; take the fewest that are as fast as any."""
        built: list[_Built] = []
        for change in (*changes, *([combined(changes)] if len(changes) > 1 else ())):
            item = self._build(change)
            # One may include the other.
            if item is not None and all(item.change[1:] != one.change[1:] for one in built):
                built.append(item)
        noise, compared = self._compare(built, rounds)
        gaining = [pair for pair in compared if self._gains(*pair, noise)]
        while gaining:
            gaining.sort(key=lambda pair: pair[1].median(self._aim))
            enough = gaining[0][1].median(self._aim) * (1 + noise)
            as_fast = [pair for pair in gaining if pair[1].median(self._aim) <= enough]
            fewest = min(as_fast, key=lambda pair: pair[0].change.name.count(AND))
            if self._take_if_exact(*fewest):
                return
            gaining.remove(fewest)

    def _take_if_exact(self, item: _Built, ratios: _Ratios) -> bool:
        if not self._is_exact_enough(item):
            return False
        if self._aim == "start":
            measured = self._with_runs(item, ratios)
            if measured is None:
                return False
            ratios = measured
        name = item.change.name
        for part in {name, *name.split(AND)}:
            self.tried[part] = self.tried[part]._replace(taken=True)
        if self._base is not self.plain:
            name = AND.join((self._base.change.name, name))
        self._base = item._replace(change=item.change._replace(name=name))
        self._base_ratios = {
            figure: ratio * ratios.median(figure)
            for figure, ratio in self._base_ratios.items()
        }
        return True

    # Figures.

    def _measure(
        self, built: Sequence[_Built], rounds: int, workloads: Sequence[Workload] | None = None
    ) -> list[Measurement]:
        began = time.monotonic()
        feeds = self._timed_workloads() if workloads is None else workloads
        found = measure(
            [self._candidate(item) for item in built],
            [workload.feed for workload in feeds],
            rounds=rounds,
            runs=_RUNS,
            min_runs=_MIN_RUNS,
            seconds=min(_RUN_SECONDS[self._aim], self._request.plan.hint_seconds * _RUN_SHARE),
            callers=usable_cores() if self._request.plan.hint == "throughput" else 1,
            lockstep=True,
            warmed=True,
            timeout=max(60.0, self._request.plan.hint_seconds),
            server=self._server,
        )
        if workloads is None:  # measured anew each time: changes may take longer than the base
            self._seconds = (time.monotonic() - began) / (len(built) * rounds)
        return found

    def _timed_workloads(self) -> list[Workload]:
        return [] if self._aim == "start" else self._workloads

    def _compare(
        self, built: Sequence[_Built], rounds: int
    ) -> tuple[float, list[tuple[_Built, _Ratios]]]:
        """Measure sessions beside the base; return the noise, and what did not fail.

        Noise is twice what two equal sessions differ by in a round, over the root of the
        number of rounds: a median varies less by that.
        """
        base, again, *found = self._measure([self._base, self._base, *built], rounds)
        control = _Ratios.of(again, base)
        if control is None:
            raise MeasureError(base.failed or again.failed)
        equal = control.figures[self._aim]
        differences = [1 - min(ratio, 1 / ratio) for ratio in equal]
        noise = 2 * statistics.median(differences) / math.sqrt(len(differences))
        compared = []
        for item, measured in zip(built, found, strict=True):
            ratios = _Ratios.of(measured, base)
            self._note(item.change, measured.failed, ratios)
            if ratios is not None:
                compared.append((item, ratios))
        return max(noise, _MIN_GAIN), compared

    def _gains(self, item: _Built, ratios: _Ratios, noise: float) -> bool:
        values = sorted(ratios.figures[self._aim])
        # One start of four may have met something else that the machine did.
        most = values[-1 - len(values) // 4]
        if statistics.median(values) > 1 - noise or most >= 1:
            self._refuse(item, f"gains less than the noise of {noise:.0%}")
            return False
        return not self._is_slower_somewhere(item, ratios, noise)

    def _is_slower_somewhere(self, item: _Built, ratios: _Ratios, noise: float) -> bool:
        for workload, values in zip(self._timed_workloads(), ratios.runs, strict=True):
            if self._aim == "run" and min(values) > 1 + noise:
                self._refuse(item, f"is slower on workload {workload.name!r}")
                return True
        return False

    def _with_runs(self, item: _Built, ratios: _Ratios) -> _Ratios | None:
        """Measure the runs of what gains a start; None where they lose too much."""
        base, ours = self._measure([self._base, item], _ROUNDS["run"][1], self._workloads)
        measured = _Ratios.of(ours, base)
        if measured is None:
            self._refuse(item, base.failed or ours.failed)
            return None
        found = {**ratios.figures, "run": measured.figures["run"]}
        ratios = ratios._replace(figures=found)
        row = self.tried[item.change.name]
        self._note(item.change, row.why, ratios)
        if (ratio := ratios.median("run")) > _MAX_RUN_COST:
            self._refuse(item, f"a run takes {ratio:.2f} x, above {_MAX_RUN_COST}")
            return None
        return ratios

    def _is_exact_enough(self, item: _Built) -> bool:
        given = self._request.plan.hint_error
        allowed = given or _ROUNDING
        try:
            error = self._error(self._candidate(item))
            if error > allowed and not given:
                allowed = max(allowed, _LIKE_PLAIN * self._error_of_plain)
        except MeasureError as failed:
            self._refuse(item, str(failed))
            return False
        if error > allowed:
            self._refuse(
                item, f"its error of {error:.1e} is greater than {allowed:.1e} (hint_error)"
            )
        return error <= allowed

    @functools.cached_property
    def _error_of_plain(self) -> float:
        return self._error(self._candidate(self.plain))

    def _error(self, candidate: Candidate) -> float:
        """Return the greatest difference to ORT_DISABLE_ALL over the greatest output."""
        found = 0.0
        for a, b in zip(self._expected, self._outputs(candidate), strict=True):
            if a.dtype.kind not in "fiu" or a.shape != b.shape:
                found = max(found, 0.0 if np.array_equal(a, b) else math.inf)
            elif a.size:
                wide = a.astype(np.float64)
                far = np.abs(wide - b.astype(np.float64)).max()
                found = max(found, float(far / (np.abs(wide).max() or 1.0)))
        return math.inf if math.isnan(found) else found

    @functools.cached_property
    def _expected(self) -> list[npt.NDArray[Any]]:
        plain = self._candidate(self.plain)
        settings = {**plain.settings, "graph_optimization_level": "ORT_DISABLE_ALL"}
        return self._outputs(dataclasses.replace(plain, settings=settings))

    def _outputs(self, candidate: Candidate) -> list[npt.NDArray[Any]]:
        """Run every workload without padding, where outputs mean something."""
        found: list[npt.NDArray[Any]] = []
        outputs = self._scratch / "outputs.npz"
        with SessionProcess(candidate.label, server=self._server) as process:
            process.open(candidate)
            for number, workload in enumerate(self._workloads):
                if not workload.has_padding:
                    feed = write_feed(workload.feed, self._scratch / f"feed{number}.npz")
                    process.run(feed, outputs=outputs)
                    with np.load(outputs, allow_pickle=False) as arrays:
                        found += [arrays[f"output{index}"] for index in range(len(arrays))]
        return found

    def _note(self, change: Change, why: str, ratios: _Ratios | None = None) -> None:
        spreads = {} if ratios is None else ratios.spreads(self._base_ratios)
        self.tried[change.name] = Tried(change.name, False, why, spreads)

    def _refuse(self, item: _Built, why: str) -> None:
        """Add to its figures why a change is not taken."""
        self.tried[item.change.name] = self.tried[item.change.name]._replace(why=why)


class _Ratios(NamedTuple):
    """What a session took beside another, a ratio for each round."""

    figures: dict[str, tuple[float, ...]]  # by a key of _FIGURES
    runs: list[tuple[float, ...]]  # of each workload

    @classmethod
    def of(cls, ours: Measurement, theirs: Measurement) -> _Ratios | None:
        """Return the ratios; None where one failed."""
        if ours.failed or theirs.failed:
            return None
        pairs = {name: (getattr(ours, name), getattr(theirs, name)) for name in _FIGURES}
        return cls(
            {name: _divided(*pair) for name, pair in pairs.items() if all(pair)},
            [_divided(*pair) for pair in zip(ours.runs, theirs.runs, strict=True)],
        )

    def median(self, figure: str) -> float:
        """Return the median of a figure; 1 of one that was not measured."""
        return statistics.median(self.figures.get(figure, (1.0,)))

    def spreads(self, base: Mapping[str, float]) -> dict[str, list[float]]:
        """Return least, median and greatest of each figure, times what the base has of it."""
        return {
            name: [round(base[name] * of(ratios), 3) for of in (min, statistics.median, max)]
            for name, ratios in self.figures.items()
        }


def _divided(ours: Spread, theirs: Spread) -> tuple[float, ...]:
    return tuple(a / b for a, b in zip(ours.values, theirs.values, strict=True))


def _without_idle_passes(change: Change, manifest: Mapping[str, Any]) -> Change:
    """Return a change without the passes that did nothing, and their options."""
    fired = {
        item["name"]
        for item in manifest["report"]["passes"]
        if any(remark["outcome"] == Outcome.FIRED.value for remark in item["remarks"])
    }
    return change._replace(
        passes=tuple(name for name in change.passes if name in fired),
        options={k: v for k, v in change.options.items() if k.partition(".")[0] in fired},
    )


def _graph_key(change: Change) -> tuple[Any, ...]:
    """Return what of a change decides which graph a session gets; empty for the user's."""
    if not change.passes and not change.keeps_graph:
        return ()
    settings = change.settings.items()
    return (
        change.passes,
        frozenset(change.options.items()),
        change.keeps_graph,
        frozenset(item for item in settings if item[0].startswith("optimization.")),
        change.settings.get("enable_cpu_mem_arena"),
    )


def _with_change(request: BuildRequest, change: Change) -> BuildRequest:
    """Return the request of a session that differs by a change."""
    plan = plan_from_settings(change.passes, change.options)._replace(strict=True)
    entries = {key: text for key, text in change.settings.items() if "." in key}
    merged = tuple({**dict(request.optimizers.entries), **entries}.items())
    optimizers = request.optimizers._replace(entries=merged)
    arena = change.settings.get("enable_cpu_mem_arena", str(int(request.cpu_arena)))
    return request._replace(plan=plan, optimizers=optimizers, cpu_arena=arena == "1")
