# SPDX-License-Identifier: MIT
"""Chooses passes and session settings for one model on this machine, by measuring them.

Each change is measured alone, then the promising ones together, always beside plain
onnxruntime under the user's own options, in processes that run in turn. Plain onnxruntime is
measured twice, and what the two differ by is noise. A change that gains less than that, or
whose error is too great, is not taken.
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
import onnx_ir as ir

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
from ortplugins.optimization.build import build_artifact
from ortplugins.optimization.request import BuildRequest
from ortplugins.optimization.stages import FailedPass
from ortplugins.report import Report, Tried
from ortplugins.runtime.hidden_options import describe_model
from ortplugins.runtime.machine import machine, usable_cores
from ortplugins.runtime.process_memory import process_memory
from ortplugins.runtime.stock_session import open_model, quiet_runner
from ortplugins.runtime.temporary_settings import DATA_FOLDER_KEY
from ortplugins.tuning.changes import AND, Change, changes_for, combined
from ortplugins.tuning.workloads import Workload, workloads
from rewrite_rules.remarks import Outcome
from session_options.keys import parse_dims
from session_options.plan import plan_from_settings

# Processes of each change when it is measured alone, and the least and the most together with
# others, as the budget allows. Starts vary most.
_ROUNDS = {"run": (2, 3, 12), "private": (2, 3, 5), "start": (5, 6, 15)}
_RUNS = 20
# A process takes this besides its session.
_PROCESS_SECONDS = 0.5
# Runs of one process on one workload, and how often one is run at least.
_RUN_SECONDS, _LEAST_RUNS = 0.3, 1
# Of the machine's memory, for processes that live at the same time.
_MEMORY = 0.5
# Where onnxruntime's own error is smaller, rounding in another order is no loss.
_ROUNDING = 1e-5
# A smaller gain is not worth a change, whatever the noise.
_LEAST_GAIN = 0.02
# A gain that one round is enough to believe.
_MUCH = 0.25
# Where plain onnxruntime differs from itself by more, nothing can be said.
_MOST_NOISE = 0.25
# The share of the budget for trying changes; what is left is for taking several together.
_ALONE = 0.6
# Changes that are taken together at the most; the others gain least.
_TOGETHER = 4
# The figures in tables; of a session they are compared with plain onnxruntime's.
_WORDS = {"run": "time of a run", "start": "time of a start", "private": "private memory"}
_AIMS = {"latency": "run", "throughput": "run", "memory": "private", "start": "start"}


class Tuned(NamedTuple):
    """What was chosen.

    Attributes:
        change: The changes taken, as one.
        manifest: Of the artifact, as ``build_artifact`` returns it; its report has a row for
            everything that was tried.
    """

    change: Change
    manifest: dict[str, Any]


class _Built(NamedTuple):
    """A change, and the session that it makes."""

    change: Change
    candidate: Candidate
    manifest: dict[str, Any]


def tune(request: BuildRequest, given: ir.Model, folder: Path) -> Tuned:
    """Choose what the hint of a request asks for.

    Args:
        request: The session, with a hint in its plan.
        given: Its model, which is left as it is.
        folder: Empty; gets the files of the artifact, if there are any.

    Raises:
        MissingFileError, ModelFileError: If the model can't be used.
        PassError: If the sizes of the hint name a dimension that the model does not have.
        OSError: If the folder can't be written.
    """
    with tempfile.TemporaryDirectory(prefix="tuning-", dir=folder) as scratch:
        tuning = _Tuning(request, given, Path(scratch))
        chosen, why = tuning.search()
        model = Path(chosen.candidate.model)
        if tuning.made(model):
            for path in model.parent.iterdir():
                shutil.move(path, folder / path.name)
    report = chosen.manifest["report"]
    notes = [*report["notes"], f"hint {request.plan.hint}: {why}"]
    tried = [row._asdict() for row in tuning.tried.values()]
    settings = {**chosen.manifest["session_settings"], **chosen.change.settings}
    manifest = {
        **chosen.manifest,
        "session_settings": settings,
        "report": {**report, "notes": notes, "tried": tried},
    }
    fired = [item["name"] for item in report["passes"] if _fired(item)]
    passes = tuple(name for name in chosen.change.passes if name in fired)
    return Tuned(chosen.change._replace(passes=passes), manifest)


def _fired(report: Mapping[str, Any]) -> bool:
    return any(remark["outcome"] == Outcome.FIRED.value for remark in report["remarks"])


class _Tuning:
    """One search.

    Attributes:
        tried: What was tried, by the name of the change.
    """

    def __init__(self, request: BuildRequest, given: ir.Model, scratch: Path) -> None:
        self._request, self._given, self._scratch = request, given, scratch
        self._aim = _AIMS[request.plan.hint]
        self._began = time.monotonic()
        self._numbers = itertools.count()
        self._workloads: list[Workload] = []
        self._stock = self._base = self._plain()
        self._base_figures = dict.fromkeys(_WORDS, 1.0)
        self._seconds = math.inf
        self.tried: dict[str, Tried] = {}

    def made(self, model: Path) -> bool:
        """Whether a model was built here."""
        return model.is_relative_to(self._scratch) and self._stock.candidate.model != model

    def search(self) -> tuple[_Built, str]:
        """Return what to take, and why."""
        graphs: list[ir.Graph | ir.Function] = [self._given.graph]
        graphs += self._given.functions.values()
        fusion, *changes = changes_for(
            self._request.plan.hint,
            dict(self._request.session_settings),
            frozenset(node.op_type for graph in graphs for node in graph.all_nodes()),
        )
        fused = self._build(fusion)
        try:
            if self._aim == "private" and process_memory().private is None:
                raise MeasureError("private memory is not known on this system")
            self._workloads = self._make_workloads(fused or self._stock)
            self._begin_with(fused)
            rest = [fused] if fused is not None and self._base is not fused else []
            built = self._build_changes(changes, rest)
        except UsageError as error:
            raise PassError(f"hint_dims: {error}") from error
        except (CalibrationError, ModelFileError) as error:
            why = f"{error} (hint_samples names an .npz file)"
            return fused or self._stock, f"not measured, only what is safe is taken: {why}"
        except MeasureError as error:
            return self._stock, f"not measured, so plain onnxruntime runs: {error}"
        promising, noise = self._promising(built) if built else ([], _LEAST_GAIN)
        if noise > _MOST_NOISE:
            return self._base, (
                f"{self._base.change.name}; two equal sessions differ by {noise:.0%}, the "
                "machine is busy, so nothing else is changed"
            )
        return self._combine([item for item in promising if self._is_exact_enough(item)])

    def _begin_with(self, fusion: _Built | None) -> None:
        """Take the fusion at once where it gains much: all else is measured beside it then.

        A model whose weights plain onnxruntime does not fuse runs some ten times slower there.
        """
        if fusion is None:
            return
        plain, ours = self._measure([self._stock, fusion], rounds=1)
        if plain.failed:
            raise MeasureError(plain.failed)
        ratio = _Ratios.of(ours, plain)
        self._note(fusion.change, ours.failed, ratio)
        if ratio is None or not self._gains(fusion.change, ratio, _MUCH):
            return
        if self._is_exact_enough(fusion):
            self._take(fusion.change)
            self._base, self._base_figures = fusion, ratio.medians()

    def _plain(self) -> _Built:
        request = self._request
        path: str | Path = request.name
        if isinstance(request.source, bytes):
            path = self._scratch / "given.onnx"
            path.write_bytes(request.source)
        settings = dict(request.session_settings)
        if request.data_folder is not None:
            settings[DATA_FOLDER_KEY] = request.data_folder
        manifest = {
            "baked": False,
            "session_settings": {},
            "report": Report(source="built").to_dict(),
            "provisional": [],
            "failed": [],
            "data": {},
            "model_given": describe_model(self._given),
        }
        name = "plain onnxruntime"
        candidate = Candidate(path, name, settings=settings, providers=request.providers)
        return _Built(Change(name), candidate, manifest)

    def _make_workloads(self, runs: _Built) -> list[Workload]:
        """Make them with a session that runs the model."""
        by, plan = runs.candidate, self._request.plan
        level = "disable" if runs.manifest["baked"] else "all"
        session = open_model(by.model, level, by.providers, by.settings)
        return workloads(
            self._given,
            quiet_runner(session),
            dims=parse_dims("hint_dims", plan.hint_dims),
            samples=plan.hint_samples,
        )

    def _rehearse(self) -> float:
        """Learn how long it takes to measure a session; return its share of the memory."""
        with SessionProcess() as process:
            started = process.open(self._base.candidate)
            seconds = started.seconds + _PROCESS_SECONDS
            for number, workload in enumerate(self._timed_workloads()):
                feed = write_feed(workload.feed, self._scratch / f"feed{number}.npz")
                process.run(feed)
                seconds += max((2 + _LEAST_RUNS) * process.run(feed), _RUN_SECONDS)
        self._seconds = seconds
        memory = machine()["memory_bytes"]
        return started.private / memory if started.private and memory else 0.0

    def _build_changes(
        self, changes: Sequence[Change], built: Sequence[_Built]
    ) -> list[_Built]:
        """Build each change alone, as many as there is time, and memory, to measure.

        Args:
            changes: What to build, the most promising first.
            built: What is measured besides.
        """
        share = self._rehearse()
        budget = self._request.plan.hint_seconds
        found = list(built)
        for change in changes:
            processes = len(found) + 3  # what they are measured beside comes twice
            if self._rounds_left(processes, _ALONE) < _ROUNDS[self._aim][0]:
                self._note(change, f"there is no time for it in {budget} s (hint_seconds)")
            elif processes * share > _MEMORY:
                self._note(change, "there is no memory for one more session")
            elif (item := self._build(change)) is not None:
                found.append(item)
        return found

    def _rounds_left(self, processes: int, share: float = 1.0) -> float:
        """Return how often so many processes can be measured in a share of the budget."""
        left = share * self._request.plan.hint_seconds - (time.monotonic() - self._began)
        return left / (processes * self._seconds)

    def _timed_workloads(self) -> list[Workload]:
        return [] if self._aim == "start" else self._workloads

    def _build(self, change: Change) -> _Built | None:
        """Build what a change makes of the base; None where it makes nothing."""
        base, request = self._base, self._request
        change = combined((base.change, change))._replace(name=change.name)
        settings = {**self._stock.candidate.settings, **change.settings}
        plain = not change.passes and not change.keeps_graph
        if plain or _graph_of(change) == _graph_of(base.change):
            settings = {**base.candidate.settings, **change.settings}
            candidate = dataclasses.replace(
                base.candidate, name=change.name, settings=settings
            )
            return _Built(change, candidate, base.manifest)
        folder = self._scratch / str(next(self._numbers))
        folder.mkdir()
        try:
            manifest = build_artifact(
                _with_change(request, change),
                request.load(),
                folder,
                only_if_modified=not change.keeps_graph,
            )
        except FailedPass as error:
            self._note(change, str(error))
            return None
        path = folder / "model.onnx"
        if not path.exists():
            self._note(change, "it finds nothing to do")
            return None
        settings |= manifest["session_settings"]
        settings |= request.data_settings(manifest["data"], folder)
        if manifest["baked"]:
            settings["graph_optimization_level"] = "ORT_DISABLE_ALL"
        candidate = Candidate(
            path, change.name, settings=settings, providers=request.providers
        )
        return _Built(change, candidate, manifest)

    def _measure(self, built: Sequence[_Built], rounds: int) -> list[Measurement]:
        return measure(
            [item.candidate for item in built],
            [item.feed for item in self._timed_workloads()],
            rounds=rounds,
            runs=_RUNS,
            least_runs=_LEAST_RUNS,
            seconds=_RUN_SECONDS,
            callers=usable_cores() if self._request.plan.hint == "throughput" else 1,
            lockstep=True,
            warmed=True,
            timeout=max(60.0, self._request.plan.hint_seconds),
        )

    def _compare(
        self, built: Sequence[_Built], rounds: int
    ) -> tuple[list[_Ratios | None], float]:
        """Measure sessions beside the base.

        Returns:
            The ratios of each session, None of one that failed; and the noise: twice what two
            equal sessions differ by in a round, over the root of the number of rounds, since
            a median varies less by that.
        """
        plain, again, *found = self._measure([self._base, self._base, *built], rounds)
        control = _Ratios.of(again, plain)
        if control is None or self._aim not in control.figures:
            return [None] * len(built), math.inf
        differences = [abs(ratio - 1) for ratio in control.figures[self._aim]]
        noise = 2 * statistics.median(differences) / math.sqrt(len(differences))
        ratios = [_Ratios.of(item, plain) for item in found]
        for item, measured, ratio in zip(built, found, ratios, strict=True):
            self._note(item.change, measured.failed, ratio)
        return ratios, max(noise, _LEAST_GAIN)

    def _promising(self, built: Sequence[_Built]) -> tuple[list[_Built], float]:
        """Return the changes that may gain, those that gain most first; and the noise.

        Two rounds do not show whether a change gains little or nothing: :meth:`_combine` does.
        """
        ratios, noise = self._compare(built, _ROUNDS[self._aim][0])
        found = []
        for item, ratio in zip(built, ratios, strict=True):
            if ratio is None:
                continue
            median = statistics.median(ratio.figures[self._aim])
            if median > 1 - _LEAST_GAIN:
                self._note(item.change, f"gains less than {_LEAST_GAIN:.0%}", ratio)
            elif not self._is_slower_somewhere(item.change, ratio, noise):
                found.append((median, item))
        return [item for _, item in sorted(found, key=lambda pair: pair[0])], noise

    def _gains(self, change: Change, ratio: _Ratios, noise: float) -> bool:
        ratios = sorted(ratio.figures[self._aim])
        # One start of four may have met something else that the machine did.
        most = ratios[-1 - len(ratios) // 4]
        if statistics.median(ratios) > 1 - noise or most >= 1:
            self._note(change, f"gains less than the noise of {noise:.0%}", ratio)
            return False
        return not self._is_slower_somewhere(change, ratio, noise)

    def _is_slower_somewhere(self, change: Change, ratio: _Ratios, noise: float) -> bool:
        for workload, each in zip(self._timed_workloads(), ratio.runs, strict=True):
            if self._aim == "run" and min(each) > 1 + noise:
                self._note(change, f"is slower on workload {workload.name!r}", ratio)
                return True
        return False

    def _combine(self, promising: Sequence[_Built]) -> tuple[_Built, str]:
        """Measure the best change, the best two, and so on; return the least that is best."""
        built = list(promising[:1])
        for count in range(2, min(len(promising), _TOGETHER) + 1):
            change = combined(one.change for one in promising[:count])
            if change[1:] != combined([built[-1].change])[1:]:
                item = self._build(change)
                built += [] if item is None else [item]
        _, fewest, most = _ROUNDS[self._aim]
        rounds = int(min(max(self._rounds_left(len(built) + 2), fewest), most))
        ratios, noise = self._compare(built, rounds) if built else ([], _LEAST_GAIN)
        found = [
            (statistics.median(ratio.figures[self._aim]), item)
            for item, ratio in zip(built, ratios, strict=True)
            if ratio is not None
            and self._gains(item.change, ratio, noise)
            and self._is_exact_enough(item)
        ]
        base = self._base.change.name
        if not found:
            return self._base, f"{base}; nothing else gains"
        least = min(median for median, _ in found)
        median, chosen = next(pair for pair in found if pair[0] <= least * (1 + noise))
        for one in (*promising, chosen):
            if one.change.name in (chosen.change.name, *chosen.change.name.split(AND)):
                self._take(one.change)
        median *= self._base_figures[self._aim]
        names = chosen.change.name
        if self._base is not self._stock:
            names = AND.join(dict.fromkeys((base, names)))
        return chosen, f"{names}; {_WORDS[self._aim]} {median:.2f} x"

    def _take(self, change: Change) -> None:
        self.tried[change.name] = self.tried[change.name]._replace(taken=True)

    def _is_exact_enough(self, item: _Built) -> bool:
        allowed = self._request.plan.hint_error
        try:
            allowed = allowed or max(_ROUNDING, self._error(self._stock.candidate))
            error = self._error(item.candidate)
        except MeasureError as failed:
            self._note(item.change, str(failed))
            return False
        if error <= allowed:
            return True
        row = self.tried[item.change.name]
        why = f"its error of {error:.1e} is greater than {allowed:.1e} (hint_error)"
        self.tried[item.change.name] = row._replace(why=why)
        return False

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
        stock = self._stock.candidate
        settings = {**stock.settings, "graph_optimization_level": "ORT_DISABLE_ALL"}
        return self._outputs(dataclasses.replace(stock, settings=settings))

    def _outputs(self, candidate: Candidate) -> list[npt.NDArray[Any]]:
        """Run every workload without padding, where outputs mean something."""
        found: list[npt.NDArray[Any]] = []
        feed, outputs = self._scratch / "feed.npz", self._scratch / "outputs.npz"
        with SessionProcess(candidate.label) as process:
            process.open(candidate)
            for number, workload in enumerate(self._workloads):
                if not workload.has_padding:
                    path = feed.with_stem(f"feed{number}")
                    process.run(write_feed(workload.feed, path), outputs=outputs)
                    with np.load(outputs, allow_pickle=False) as arrays:
                        found += [arrays[f"output{index}"] for index in range(len(arrays))]
        return found

    def _note(self, change: Change, why: str, ratio: _Ratios | None = None) -> None:
        spreads = {} if ratio is None else ratio.spreads(self._base_figures)
        self.tried[change.name] = Tried(change.name, False, why, spreads)


class _Ratios(NamedTuple):
    """What a session took beside plain onnxruntime, a ratio for each round.

    Attributes:
        figures: By name: ``run``, ``start``, ``private``.
        runs: Of each workload.
    """

    figures: dict[str, tuple[float, ...]]
    runs: list[tuple[float, ...]]

    @classmethod
    def of(cls, ours: Measurement, plain: Measurement) -> _Ratios | None:
        """Return the ratios; None where one failed."""
        if ours.failed or plain.failed:
            return None
        pairs = {name: (getattr(ours, name), getattr(plain, name)) for name in _WORDS}
        return cls(
            {name: _divided(*pair) for name, pair in pairs.items() if all(pair)},
            [_divided(*pair) for pair in zip(ours.runs, plain.runs, strict=True)],
        )

    def medians(self) -> dict[str, float]:
        """Return the median of each figure, 1 for one that was not measured."""
        return {
            name: statistics.median(self.figures[name]) if name in self.figures else 1.0
            for name in _WORDS
        }

    def spreads(self, base: Mapping[str, float]) -> dict[str, list[float]]:
        """Return the least, the median and the greatest ratio of each figure.

        Args:
            base: The ratios of what they were measured beside.
        """
        return {
            name: [round(base[name] * of(ratios), 3) for of in (min, statistics.median, max)]
            for name, ratios in self.figures.items()
        }


def _divided(ours: Spread, plain: Spread) -> tuple[float, ...]:
    return tuple(a / b for a, b in zip(ours.values, plain.values, strict=True))


def _graph_of(change: Change) -> tuple[Any, ...]:
    """Return what of a change decides which graph a session gets."""
    optimizers = {k: v for k, v in change.settings.items() if k.startswith("optimization.")}
    arena = change.settings.get("enable_cpu_mem_arena") if change.passes else None
    return change.passes, dict(change.options), change.keeps_graph, optimizers, arena


def _with_change(request: BuildRequest, change: Change) -> BuildRequest:
    """Return the request of a session that differs by a change."""
    plan = plan_from_settings(change.passes, change.options)._replace(strict=True)
    optimizers = request.optimizers
    if optimizers is not None:
        entries = {key: text for key, text in change.settings.items() if "." in key}
        merged = tuple({**dict(optimizers.entries), **entries}.items())
        optimizers = optimizers._replace(entries=merged)
    arena = change.settings.get("enable_cpu_mem_arena", str(int(request.cpu_arena)))
    return request._replace(plan=plan, optimizers=optimizers, cpu_arena=arena == "1")
