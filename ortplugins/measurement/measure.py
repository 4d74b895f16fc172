# SPDX-License-Identifier: MIT
"""Measures time and memory of sessions side by side, each session in its own process.

``compare``, ``tune``, the benchmarks and the examples use it. It makes figures comparable:

- The first process of each candidate does not count: it reads the files into the page cache,
  and with passes it builds what later ones find.
- In every round the candidates take turns, starting with another one each time, so that other
  load on the machine affects all of them.
- A figure has one value per process. Two candidates differ only if the ranges of their values
  do not overlap.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import json
import math
import os
import queue
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from ortplugins.model_io.saving import Progress
from ortplugins.runtime.child_process import child_environment, child_python
from ortplugins.runtime.machine import process_memory
from ortplugins.samples.made_up import Feed
from session_options.entries import STRICT_KEY

_SCRIPT = Path(__file__).with_name("session_process.py")
# Runs of each process that do not count: buffers are allocated, and late weights are packed.
_WARM_UPS = 2
# Length of a session's turn: short runs are repeated for this long.
_TURN_SECONDS = 0.02
# Short runs are spread over at least so many turns, as a single one may meet a busy moment.
_MIN_TURNS = 5
# After a run, the threads of a session keep spinning on the cores of the next one. Seconds to
# wait for them at most, and without /proc.
_MAX_SPIN_SECONDS, _PAUSE_SECONDS = 0.2, 0.005
# How often the memory of a process is looked at while it opens a session or warms up.
_WATCH_SECONDS = 0.002
_COSTS = (
    ("run", "run", "s"),
    ("start", "start", "s"),
    ("peak of private memory", "peak_private", "B"),
    ("private memory after the start", "started_private", "B"),
    ("private memory after the runs", "private", "B"),
    ("peak of resident memory", "peak_resident", "B"),
)


class MeasureError(RuntimeError):
    """A session could not be opened or run; the message names the candidate and the reason."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to run a model."""

    model: str | os.PathLike[str]  # the .onnx file
    name: str = ""  # in messages; by default the file's
    # SessionOptions: a name with a dot is an entry, any other an attribute, whose value may be
    # the name of an enumeration's member. Without ortplugins entries, the session is plain
    # onnxruntime's, in a process that does not import ortplugins.
    settings: Mapping[str, str | int | bool] = dataclasses.field(default_factory=dict)
    providers: Sequence[Any] = ("CPUExecutionProvider",)  # or pairs of a name and its options

    @property
    def label(self) -> str:
        """What messages call it."""
        return self.name or os.fspath(self.model)


@dataclasses.dataclass(frozen=True)
class Spread:
    """The values of one figure, one per process."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median."""
        return statistics.median(self.values)


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Seconds and bytes of a candidate; None for what was not, or cannot be, measured.

    :mod:`.machine` defines private and resident memory.
    """

    start: Spread | None = None  # to create the session, without imports
    run: Spread | None = None  # the median per process; the geometric mean over the feeds
    runs: tuple[Spread, ...] = ()  # the same for each feed
    started_private: Spread | None = None  # after the start
    private: Spread | None = None  # after the runs
    peak_private: Spread | None = None  # the most seen up to the end of the warm-up runs
    peak_resident: Spread | None = None  # including mapped files
    first_start: float | None = None  # the start that does not count, with the build if any
    report: Mapping[str, Any] | None = None  # of a session with passes
    failed: str = ""  # the reason, if nothing was measured


@dataclasses.dataclass(frozen=True)
class Cost:
    """One figure of two measurements, side by side.

    Attributes:
        what: What was measured.
        unit: ``"s"`` or ``"B"``.
        a: The values of the first measurement.
        b: The values of the second.
    """

    what: str
    unit: str
    a: Spread
    b: Spread

    @property
    def ratio(self) -> float | None:
        """The median of a divided by that of b; None if that is 0."""
        return self.a.median / self.b.median if self.b.median else None

    @property
    def differs(self) -> bool | None:
        """Whether the ranges do not overlap; None for single values, which have no range."""
        if min(len(self.a.values), len(self.b.values)) < 2:
            return None
        return max(self.a.values) < min(self.b.values) or max(self.b.values) < min(
            self.a.values
        )


def side_by_side(a: Measurement, b: Measurement) -> list[Cost]:
    """Return the figures that both measurements have."""
    pairs = (
        (what, unit, getattr(a, field), getattr(b, field)) for what, field, unit in _COSTS
    )
    return [Cost(*pair) for pair in pairs if pair[2] is not None and pair[3] is not None]


@dataclasses.dataclass(frozen=True)
class Started:
    """What a process reports about the session that it has opened, and its memory then."""

    seconds: float
    private: int | None
    report: Mapping[str, Any] | None
    modules: tuple[str, ...]


class SessionProcess:
    """A process that holds one session; leaving its context ends it."""

    def __init__(
        self,
        name: str = "",
        *,
        timeout: float = 900.0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start the process; it imports numpy and onnxruntime.

        ``timeout`` is the number of seconds for one answer; a slower process is killed.
        """
        self._name, self._timeout = name, timeout
        self.peak_private: int | None = None  # the most bytes seen; None without /proc
        if (python := child_python("measure")) is None:
            raise MeasureError("no Python interpreter to start a process with")
        # -P: the script's own folder has modules with common names.
        self._process = subprocess.Popen(
            [python, "-P", str(_SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**child_environment("measure"), **(environment or {})},
            text=True,
            encoding="utf-8",
        )
        self.pid = self._process.pid
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self._answer("it does not start", watched=False)
        except MeasureError:
            self.close()
            raise

    def open(self, candidate: Candidate) -> Started:
        """Open the session."""
        settings = dict(candidate.settings)
        session = "onnxruntime:InferenceSession"
        if any(name.startswith("ortplugins.") for name in settings):
            session = "ortplugins:InferenceSession"
            settings[STRICT_KEY] = "1"
        job = {
            **vars(candidate),
            "model": str(Path(candidate.model).absolute()),
            "settings": settings,
            "session": session,
        }
        answer = self._ask("onnxruntime refuses it", do="open", **job)
        private = process_memory(self.pid).private
        return Started(answer["seconds"], private, answer["report"], tuple(answer["modules"]))

    def run(
        self,
        feed: Path,
        *,
        seconds: float = 0.0,
        watched: bool = False,
        callers: int = 1,
    ) -> float:
        """Run the session on inputs from :func:`write_feed`; return the seconds of a run.

        The run is repeated for ``seconds``, and the median counts. With several ``callers`` at
        the same time, it is divided by their number. Watching the memory takes time.
        """
        answer = self._ask(
            "onnxruntime failed to run it",
            watched,
            do="run",
            feed=os.path.abspath(feed),
            seconds=seconds,
            callers=callers,
        )
        return float(answer["seconds"])

    def rest(self) -> None:
        """Wait until the threads of the session sleep."""
        end = time.monotonic() + _MAX_SPIN_SECONDS
        states = [Path(folder, "stat") for folder in Path(f"/proc/{self.pid}/task").glob("*")]
        time.sleep(0 if states else _PAUSE_SECONDS)
        while any(map(_is_running, states)) and time.monotonic() < end:
            time.sleep(_WATCH_SECONDS)

    def call(self, function: str, **arguments: Any) -> Any:
        """Call ``"module:name"`` in the process with the session, or None; return its result.

        Arguments and result must be serialisable as JSON.
        """
        answer = self._ask(function, do="call", function=function, arguments=arguments)
        return answer["result"]

    def peak_resident(self) -> int | None:
        """Return the most resident memory that the process had, in bytes."""
        found = process_memory(self.pid).peak_resident
        return self._ask("peak", do="peak")["bytes"] if found is None else found

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        with contextlib.suppress(OSError), self._process:
            pass  # this closes its pipes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, what: str, watched: bool = True, **command: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        # A process that is gone gives no answer, which is noticed below.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        return self._answer(what, watched)

    def _answer(self, what: str, watched: bool) -> dict[str, Any]:
        """Wait for the answer, and meanwhile record the peak of the private memory."""
        end = time.monotonic() + self._timeout
        text = None
        while text is None:
            if watched:
                seen = process_memory(self.pid).private or 0
                self.peak_private = max(seen, self.peak_private or 0) or None
            left = max(0.0, end - time.monotonic())
            wait = min(left, _WATCH_SECONDS) if watched else left
            with contextlib.suppress(queue.Empty):
                text = self._answers.get(timeout=wait)
            if text is None and left == 0:
                self._process.kill()
                raise MeasureError(f"{self._name}: took more than {self._timeout:g} s")
        if not text:
            how = f"ended with {self._process.wait()}"
            raise MeasureError(f"{self._name}: the process that measured it {how}")
        answer: dict[str, Any] = json.loads(text)
        if "error" in answer:
            raise MeasureError(f"{self._name}: {what}: {answer['error']}")
        return answer

    def _read(self) -> None:
        """Put each line that the process writes into the queue, and "" at the end."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")


def _is_running(stat: Path) -> bool:
    """Return whether a thread is running or runnable, by its file ``stat``."""
    with contextlib.suppress(OSError):  # it has ended
        return stat.read_bytes().rpartition(b")")[2].split()[0] == b"R"
    return False


def write_feed(feed: Feed, path: Path) -> Path:
    """Write inputs for :meth:`SessionProcess.run`; return the path."""
    # Names of inputs may contain any character; names of files in an archive may not.
    arrays = {f"input{index}": array for index, array in enumerate(feed.values())}
    np.savez(path, allow_pickle=False, names=json.dumps(list(feed)), **arrays)
    return path


def measure(
    candidates: Sequence[Candidate],
    feeds: Feed | Sequence[Feed] = (),
    *,
    rounds: int = 5,
    runs: int = 10,
    min_runs: int = 3,
    seconds: float = math.inf,
    callers: int = 1,
    lockstep: bool = False,
    warmed: bool = False,
    timeout: float = 900.0,
    progress: Progress | None = None,
) -> list[Measurement]:
    """Measure candidates in turn; one that fails has a reason instead of figures.

    Args:
        candidates: What is measured.
        feeds: Inputs, one set or several; a model gets those that it has. Without any, only
            starts are measured.
        rounds: Processes of each candidate that count; one before them does not.
        runs: Timed runs per process and feed. Short runs share a turn, and their median counts
            once; they are spread over several turns, which may make them more.
        min_runs: Runs that are made in any case.
        seconds: After this time, a process begins no further run on a feed.
        callers: Threads that run a session at the same time.
        lockstep: Keep all processes of a round alive and alternate run by run, which compares
            times most closely. Otherwise there is one process at a time, which takes the least
            memory.
        warmed: Whether all files were read before, so that the first processes count, too.
        timeout: Seconds for one start or one run.
        progress: Called before each turn: turns done, all of them, and what comes.
    """
    found = [_Figures(candidate) for candidate in candidates]
    with (
        tempfile.TemporaryDirectory(prefix="ortplugins-") as folder,
        ThreadPoolExecutor() as pool,
    ):
        files = [
            write_feed(feed, Path(folder, f"feed{index}.npz"))
            for index, feed in enumerate([feeds] if isinstance(feeds, Mapping) else feeds)
        ]
        work = _Work(files, runs, min_runs, seconds, callers, timeout)
        numbers = range(0 if warmed else -1, rounds)
        for number in numbers:
            first = max(number, 0) % max(len(found), 1)
            processes = [
                _steps(item, work, counted=number >= 0)
                for item in found[first:] + found[:first]
            ]
            groups = [processes] if lockstep else [[process] for process in processes]
            for turn, group in enumerate(groups, (number - numbers.start) * len(groups)):
                if progress is not None:
                    what = f"round {number + 1} of {rounds}" if number >= 0 else "warming up"
                    progress(turn, len(numbers) * len(groups), what)
                with contextlib.ExitStack() as ended:
                    for process in group:
                        ended.callback(process.close)
                    # The first step, importing onnxruntime, is not timed: all do it at once.
                    list(pool.map(lambda process: next(process, None), group))
                    collections.deque(itertools.zip_longest(*group), maxlen=0)
    return [item.measurement() for item in found]


class _Work(NamedTuple):
    """What one process has to do; see the arguments of :func:`measure`."""

    feeds: Sequence[Path]
    runs: int
    min_runs: int
    seconds: float
    callers: int
    timeout: float


@dataclasses.dataclass
class _Figures:
    """The figures of one candidate's processes so far."""

    candidate: Candidate
    values: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    first_start: float | None = None
    report: Mapping[str, Any] | None = None
    failed: str = ""

    def note(self, **values: float | None) -> None:
        for name, value in values.items():
            if value is not None:
                self.values.setdefault(name, []).append(value)

    def measurement(self) -> Measurement:
        if self.failed:
            return Measurement(failed=self.failed)
        spreads = {name: Spread(tuple(values)) for name, values in self.values.items()}
        runs = [spreads.pop(name) for name in list(spreads) if name.startswith("run")]
        each = zip(*(spread.values for spread in runs), strict=True)
        return Measurement(
            **spreads,  # type: ignore[arg-type]
            run=Spread(tuple(map(statistics.geometric_mean, each))) if runs else None,
            runs=tuple(runs),
            first_start=self.first_start,
            report=self.report,
        )


def _steps(figures: _Figures, work: _Work, *, counted: bool) -> Generator[None, None, None]:
    """Take one process of a candidate through its steps; yield to let others take theirs."""
    if figures.failed:
        return
    try:
        process = SessionProcess(figures.candidate.label, timeout=work.timeout)
        with contextlib.closing(process):
            yield
            started = process.open(figures.candidate)
            process.rest()
            figures.report = started.report
            if not counted:
                figures.first_start = started.seconds
                return
            figures.note(start=started.seconds, started_private=started.private)
            for index, feed in enumerate(work.feeds):
                taken: list[float] = []
                for run in range(_WARM_UPS + work.runs):
                    yield
                    passed = sum(max(each, _TURN_SECONDS) for each in taken)
                    if len(taken) >= work.min_runs and passed >= work.seconds:
                        break
                    runs = sum(max(1.0, _TURN_SECONDS / each) for each in taken)
                    if len(taken) >= _MIN_TURNS and runs >= work.runs:
                        break
                    if run < _WARM_UPS:
                        process.run(feed, watched=True, callers=work.callers)
                    else:
                        took = process.run(feed, seconds=_TURN_SECONDS, callers=work.callers)
                        taken.append(took)
                    process.rest()
                figures.note(**{f"run{index}": statistics.median(taken)})
            yield
            figures.note(
                private=process_memory(process.pid).private,
                peak_private=process.peak_private,
                peak_resident=process.peak_resident(),
            )
    except MeasureError as error:
        figures.failed = str(error)
