# SPDX-License-Identifier: MIT
"""Chooses passes and session settings for one model on this machine, by measuring them.

All changes are measured beside plain onnxruntime first, in a few rounds. Those that may gain
are then measured again, the most promising first, each on top of what was taken before it.

Everything runs under the user's own options, in processes that take turns with the session
that they are compared with. That one runs twice, and what the two differ by is noise: a change
that gains less, or whose error is too great, is not taken.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import shutil
import statistics
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
from ortplugins.tuning.changes import Change, changes_for
from ortplugins.tuning.workloads import Workload, workloads
from rewrite_rules.graph.nodes import all_nodes
from rewrite_rules.remarks import Outcome
from session_options.keys import parse_dims
from session_options.plan import plan_from_settings

# Rounds in which all changes are measured, and the fewest and the most in which one of them is
# measured again, as the budget allows. Starts vary most.
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
# The share of the budget for all changes at once; what is left is for the promising ones.
_SHARE_OF_ALL = 0.6
# The figures that sessions are compared by, in words.
_FIGURES = {"run": "time of a run", "start": "time of a start", "private": "private memory"}
_AIMS = {"latency": "run", "throughput": "run", "memory": "private", "start": "start"}


class Tuned(NamedTuple):
    """A session with a change, or the one that was chosen with all that were taken."""

    change: Change
    model: str | Path
    settings: Mapping[str, str]  # what sessions on the model need
    manifest: dict[str, Any]  # of its artifact, as build_artifact returns it


def tune(request: BuildRequest, loaded: LoadedModel, folder: Path) -> Tuned:
    """Choose what a request's hint asks for; the empty folder gets the artifact's files.

    The report of the manifest has a row for each change that was tried.
    """
    with tempfile.TemporaryDirectory(prefix="tuning-", dir=folder) as scratch:
        search = _Search(request, loaded, Path(scratch))
        chosen, why = search.choose()
        if chosen.model != search.plain.model:
            for path in Path(chosen.model).parent.iterdir():
                shutil.move(path, folder / path.name)
    manifest, report = chosen.manifest, chosen.manifest["report"]
    return chosen._replace(
        manifest={
            **manifest,
            "session_settings": {**manifest["session_settings"], **chosen.change.settings},
            "report": {
                **report,
                "notes": [*report["notes"], f"hint {request.plan.hint}: {why}"],
                "tried": [row._asdict() for row in search.tried.values()],
            },
        }
    )


class _Search:
    """The search for what one session gains from."""

    def __init__(self, request: BuildRequest, loaded: LoadedModel, scratch: Path) -> None:
        self._request, self._given, self._scratch = request, loaded.model, scratch
        self._aim = _AIMS[request.plan.hint]
        self._began = time.monotonic()
        self._numbers = itertools.count()
        self._workloads: list[Workload] = []
        self._seconds = math.inf  # to measure a session once
        self.tried: dict[str, Tried] = {}  # by the name of the change
        self.plain = self._build_plain(loaded)  # the session without any change
        self._graphs: dict[tuple[Any, ...], Tuned | None]
        self._graphs = {_graph_key(self.plain.change): self.plain}
        # What has been taken so far, and its figures beside the plain session's.
        self._base = self.plain
        self._base_ratios = dict.fromkeys(_FIGURES, 1.0)

    def choose(self) -> tuple[Tuned, str]:
        """Return the session to open, and why."""
        changes = changes_for(
            self._request.plan.hint,
            dict(self._request.session_settings),
            frozenset(node.op_type for node in all_nodes(self._given)),
        )
        if not self._request.plan.hint_seconds:
            return self._unmeasured(changes, "hint_seconds is 0")
        if PROVIDERS_OF_OPTIONS in self._request.providers:
            return self._unmeasured(
                changes, "SessionOptions have no getter for their providers"
            )
        if self._aim == "private" and process_memory().private is None:
            return self._unmeasured(changes, "private memory is not known on this system")
        fused = self._build(changes[0])
        try:
            self._workloads = self._make_workloads(self._candidate(fused or self.plain))
            noise = self._choose_measured(fused, changes[1:])
        except UsageError as error:
            raise PassError(f"hint_dims: {error}") from error
        except (CalibrationError, ModelFileError) as error:
            return self._unmeasured(changes, str(error))
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

    def _unmeasured(self, changes: Sequence[Change], why: str) -> tuple[Tuned, str]:
        """Return the session with all that needs no measuring."""
        for change in changes:
            if change.is_safe and (item := self._build(change)) is not None:
                self._note(item.change, "")
                self._take(item)
        return self._base, f"not measured, only what is safe is taken: {why}"

    # Sessions.

    def _build_plain(self, loaded: LoadedModel) -> Tuned:
        request = self._request
        path: str | Path = request.name
        if isinstance(request.source, bytes):
            path = self._scratch / "given.onnx"
            path.write_bytes(request.source)
        folder = request.data_folder
        settings = {} if folder is None else {DATA_FOLDER_KEY: folder}
        manifest = build_artifact(request, loaded, self._scratch)
        return Tuned(Change("plain onnxruntime"), path, settings, manifest)

    def _build(self, change: Change) -> Tuned | None:
        """Build what a change makes of the base; None where it makes nothing."""
        change = self._base.change.with_change(change)
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

    def _build_graph(self, change: Change) -> Tuned | None:
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
        return Tuned(change, path, settings, manifest)

    def _candidate(self, item: Tuned) -> Candidate:
        request = self._request
        settings = {**dict(request.session_settings), **item.settings, **item.change.settings}
        given = request.provider_options
        return Candidate(
            item.model,
            item.change.name,
            settings=settings,
            providers=[(x, given[x]) if x in given else x for x in request.providers],
            custom_op_libraries=request.custom_op_libraries,
        )

    def _make_workloads(self, candidate: Candidate) -> list[Workload]:
        """Make them with a session that runs the model."""
        plan = self._request.plan
        try:
            session = open_model(
                candidate.model,
                "all",
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

    def _choose_measured(self, fused: Tuned | None, changes: Sequence[Change]) -> float:
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
            much = ratios is not None and self._gains(fused, ratios, _MUCH)
            if ratios is not None and much and self._is_exact_enough(fused):
                self._take_measured(fused, ratios)
        rest = [fused] if fused is not None and self._base is self.plain else []
        noise, promising = self._promising(self._build_all(changes, rest))
        self._take_on_top(promising)
        return 0.0 if promising else noise

    def _build_all(self, changes: Sequence[Change], built: Sequence[Tuned]) -> list[Tuned]:
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
            if self._rounds_left(sessions, _SHARE_OF_ALL) < _ROUNDS[self._aim][0]:
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

    def _promising(self, built: Sequence[Tuned]) -> tuple[float, list[Tuned]]:
        """Return the noise, and the changes that may gain, those that gain most first."""
        if len(built) < 2:
            return 0.0, list(built)
        rounds = _ROUNDS[self._aim][0]
        noise, compared = self._compare(built, rounds)
        if noise > _MAX_NOISE and self._rounds_left(len(built) + 2, _SHARE_OF_ALL) >= rounds:
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
        return noise, [item for _, item in found]

    def _take_on_top(self, promising: Sequence[Tuned]) -> None:
        """Measure each again beside what was taken before; take those that still gain."""
        _, fewest, most = _ROUNDS[self._aim]
        for number, one in enumerate(promising):
            rounds = self._rounds_left(3)
            if rounds < fewest and number:
                self._refuse(one, "there was no time to measure it again (hint_seconds)")
                continue
            item = self._build(one.change)
            if item is not None and self._is_exact_enough(item):
                share = rounds / (len(promising) - number)
                noise, compared = self._compare([item], int(min(max(share, fewest), most)))
                if compared and self._gains(*compared[0], noise):
                    self._take_measured(*compared[0])

    def _take(self, item: Tuned) -> None:
        name = item.change.name
        self.tried[name] = self.tried[name]._replace(taken=True)
        if self._base is not self.plain:
            name = f"{self._base.change.name} + {name}"
        self._base = item._replace(change=item.change._replace(name=name))

    def _take_measured(self, item: Tuned, ratios: _Ratios) -> None:
        if self._aim == "start":
            measured = self._with_runs(item, ratios)
            if measured is None:
                return
            ratios = measured
        self._take(item)
        self._base_ratios = {
            figure: ratio * ratios.median(figure)
            for figure, ratio in self._base_ratios.items()
        }

    # Figures.

    def _measure(
        self, built: Sequence[Tuned], rounds: int, workloads: Sequence[Workload] | None = None
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
        )
        if workloads is None:  # measured each time: changes may take longer than the base
            self._seconds = (time.monotonic() - began) / (len(built) * rounds)
        return found

    def _timed_workloads(self) -> list[Workload]:
        return [] if self._aim == "start" else self._workloads

    def _compare(
        self, built: Sequence[Tuned], rounds: int
    ) -> tuple[float, list[tuple[Tuned, _Ratios]]]:
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

    def _gains(self, item: Tuned, ratios: _Ratios, noise: float) -> bool:
        values = sorted(ratios.figures[self._aim])
        # One start of four may have met something else that the machine did.
        most = values[-1 - len(values) // 4]
        if statistics.median(values) > 1 - noise or most >= 1:
            self._refuse(item, f"gains less than the noise of {noise:.0%}")
            return False
        return not self._is_slower_somewhere(item, ratios, noise)

    def _is_slower_somewhere(self, item: Tuned, ratios: _Ratios, noise: float) -> bool:
        for workload, values in zip(self._timed_workloads(), ratios.runs, strict=True):
            if self._aim == "run" and min(values) > 1 + noise:
                self._refuse(item, f"is slower on workload {workload.name!r}")
                return True
        return False

    def _with_runs(self, item: Tuned, ratios: _Ratios) -> _Ratios | None:
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

    def _is_exact_enough(self, item: Tuned) -> bool:
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
        pairs = zip(self._expected, self._outputs(candidate), strict=True)
        return max((_share_apart(a, b) for a, b in pairs), default=0.0)

    @functools.cached_property
    def _expected(self) -> list[npt.NDArray[Any]]:
        plain = self._candidate(self.plain)
        settings = {**plain.settings, "graph_optimization_level": "ORT_DISABLE_ALL"}
        return self._outputs(dataclasses.replace(plain, settings=settings))

    def _outputs(self, candidate: Candidate) -> list[npt.NDArray[Any]]:
        """Run every workload without padding, where outputs mean something."""
        found: list[npt.NDArray[Any]] = []
        outputs = self._scratch / "outputs.npz"
        with SessionProcess(candidate.label) as process:
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

    def _refuse(self, item: Tuned, why: str) -> None:
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


def _share_apart(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> float:
    """Return the greatest difference as a share of the greatest number."""
    if a.shape != b.shape or a.dtype.kind not in "fc":
        return 0.0 if np.array_equal(a, b) else math.inf
    far, greatest = np.abs(a - b).max(initial=0.0), np.abs(a).max(initial=0.0)
    return float(far / greatest) if greatest and np.isfinite(far) else float(far > 0)
