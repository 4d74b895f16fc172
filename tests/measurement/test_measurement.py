# SPDX-License-Identifier: MIT
"""The harness that measures sessions: turns, spreads, failures, what a process holds."""

import itertools
import math
import mmap
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.dequantized_models import DequantizedMatMul

from ortplugins.measurement import measure as harness
from ortplugins.measurement.measure import (
    Candidate,
    Cost,
    MeasureError,
    Measurement,
    SessionProcess,
    Spread,
    Started,
    measure,
    side_by_side,
    write_feed,
)
from ortplugins.runtime.machine import process_memory
from session_options import enable_key
from session_options.plan import entries_of

CASE = DequantizedMatMul(64, 32, 32)
FUSION = "dq_matmulnbits_fusion"
FEED = {"x": np.ones((3, 64), np.float32)}
needs_proc = pytest.mark.skipif(process_memory().private is None, reason="no /proc")


class Recorded:
    """Stands for processes; every step takes what a script says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **seconds: Any) -> None:
        self.log: list[str] = []
        self.alive = self.most_alive = 0
        self._seconds = {name: iter(values) for name, values in seconds.items()}
        recorded = self

        class Process:
            pid, peak_private = os.getpid(), 1000

            def __init__(self, name: str, **_: Any) -> None:
                self.name = name
                recorded.alive += 1
                recorded.most_alive = max(recorded.alive, recorded.most_alive)

            def open(self, candidate: Candidate) -> Started:
                return Started(recorded.take("open", self.name), 1000, None, ())

            def run(
                self, feed: Path, *, callers: int, watched: bool = False, **_: Any
            ) -> float:
                return recorded.take("warm" if watched else "run", self.name)

            def rest(self) -> None:
                recorded.log.append(f"rest {self.name}")

            def peak_resident(self) -> int:
                return 2000

            def close(self) -> None:
                recorded.alive -= 1

        monkeypatch.setattr(harness, "SessionProcess", Process)

    def take(self, what: str, name: str) -> float:
        self.log.append(f"{what} {name}")
        return next(self._seconds[name]) if name in self._seconds else 1.0


A, B, C = (Candidate("m.onnx", name) for name in "ABC")


@pytest.mark.parametrize("lockstep", [False, True])
def test_candidates_take_turns(lockstep, monkeypatch):
    recorded, told = Recorded(monkeypatch), set[Any]()
    measure([A, B], FEED, rounds=2, runs=2, lockstep=lockstep, progress=lambda *x: told.add(x))
    turns = [(step, "rest") for step in ("open", "warm", "warm", "run", "run")]
    expected = ["open A", "rest A", "open B", "rest B"]  # these do not count
    for order in ("AB", "BA"):
        if lockstep:
            pairs = [(turn, name) for turn in turns for name in order]
        else:
            pairs = [(turn, name) for name in order for turn in turns]
        expected += [f"{step} {name}" for turn, name in pairs for step in turn]
    assert recorded.log == expected
    assert (recorded.most_alive, recorded.alive) == (2 if lockstep else 1, 0)
    assert {done for done, _, _ in told} == {*range(3 if lockstep else 6)}


def test_the_first_process_pays_for_cold_files_and_is_not_counted(monkeypatch):
    Recorded(monkeypatch, A=[9.0, 1, 1, 1], B=[3.0, 1, 1, 1])
    a, b = measure([A, B], rounds=3)
    assert (a.first_start, b.first_start) == (9, 3)
    (start, *_) = side_by_side(a, b)
    assert (start.what, start.ratio, start.differs) == ("start", 1, False)


@pytest.mark.parametrize(
    ("each", "seconds", "turns"), [(0.4, 2.0, (5, 3)), (1e-4, math.inf, (5, 10))]
)
def test_runs_end_after_the_seconds_but_not_before_three(each, seconds, turns, monkeypatch):
    """Short runs share turns, five at least."""
    recorded = Recorded(monkeypatch, A=itertools.repeat(each))
    measure([A, B], FEED, rounds=1, runs=10, seconds=seconds)
    assert (recorded.log.count("run A"), recorded.log.count("run B")) == turns


@pytest.mark.parametrize(
    ("a", "b", "differs"),
    [
        ([1.0, 2.0], [3.0, 4.0], True),
        ([3.0, 4.0], [1.0, 2.0], True),
        ([1.0, 3.0], [2.0, 4.0], False),
        ([1.0, 2.0], [2.0, 4.0], False),
        ([1.0], [2.0], None),
    ],
)
def test_a_difference_is_one_where_ranges_do_not_overlap(a, b, differs):
    cost = Cost("run", "s", Spread(tuple(a)), Spread(tuple(b)))
    assert cost.differs is differs
    assert cost.ratio == np.median(a) / np.median(b)
    started, run = Measurement(cost.a), Measurement(cost.a, cost.b)
    for pair in ((started, run), (run, started)):
        assert [item.what for item in side_by_side(*pair)] == ["start"]


def test_a_process_of_plain_onnxruntime_imports_nothing_of_ours(model_path, tmp_path):
    with SessionProcess() as process:
        started = process.open(Candidate(model_path))
    assert {"ortplugins", "session_options", "onnx", "onnx_ir"}.isdisjoint(started.modules)
    assert started.report is None
    entries = entries_of([FUSION], cache_dir=str(tmp_path / "cache"))
    ours = Candidate(model_path, settings=entries)
    for source in ("built", "cache"):
        with SessionProcess() as process:
            started = process.open(ours)
        assert started.report is not None and started.report["source"] == source


def test_settings_reach_the_session(model_path):
    settings = {
        "graph_optimization_level": "ORT_DISABLE_ALL",
        "execution_order": "PRIORITY_BASED",
        "enable_mem_pattern": "0",
        "intra_op_num_threads": 3,
        "logid": "mine",
        "session.dynamic_block_base": "4",
    }
    with SessionProcess() as process:
        process.open(Candidate(model_path, settings=settings))
        assert process.call("test_measurement:settings_of") == settings


def settings_of(session: Any) -> dict[str, Any]:
    options = session.get_session_options()
    return {
        "graph_optimization_level": options.graph_optimization_level.name,
        "execution_order": options.execution_order.name,
        "enable_mem_pattern": str(int(options.enable_mem_pattern)),
        "intra_op_num_threads": options.intra_op_num_threads,
        "logid": options.logid,
        "session.dynamic_block_base": options.get_session_config_entry(
            "session.dynamic_block_base"
        ),
    }


def slow_down(session: Any) -> int:
    """Have each run take 20 ms, the first 500; return how many were counted so far."""
    counted, session.taken = len(getattr(session, "taken", ())), []

    def run(*_: object) -> None:
        session.taken.append(len(session.taken))
        time.sleep(0.02 if session.taken[1:] else 0.5)

    session.run = run
    return counted


@pytest.mark.parametrize(
    ("callers", "seconds", "runs", "least", "most"),
    [
        (1, 0.0, 1, 0.5, 2),
        (1, 1.0, 3, 0.02, 0.2),
        (4, 0.0, 4, 0.0, 0.4),
        (4, 0.8, 30, 0.0, 0.02),
    ],
)
def test_runs_of_several_callers_share_the_time(
    callers, seconds, runs, least, most, model_path, tmp_path
):
    feed = write_feed(FEED, tmp_path / "feed.npz")
    with SessionProcess() as process:
        process.open(Candidate(model_path))
        process.call("test_measurement:slow_down")
        took = process.run(feed, seconds=seconds, callers=callers)
        counted = process.call("test_measurement:slow_down")
    assert counted >= runs if seconds else counted == runs
    assert least <= took < most


def hang(_: object) -> None:
    threading.Event().wait()


def be_killed(_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_takes_too_long_is_ended():
    with (
        SessionProcess("slow one", timeout=60) as process,
        pytest.raises(MeasureError, match=r"slow one: took more than 0\.5 s"),
    ):
        process._timeout = 0.5
        process.call("test_measurement:hang")
    assert process_memory(process.pid).private is None


def spin(_: object) -> None:
    """Keep a thread busy for a second."""
    end = time.monotonic() + 1

    def work() -> None:
        while time.monotonic() < end:
            pass

    threading.Thread(target=work, daemon=True).start()


@needs_proc
def test_a_rest_ends_when_no_thread_runs(monkeypatch):
    monkeypatch.setattr(harness, "_MAX_SPIN_SECONDS", 20)
    with SessionProcess() as process:
        start = time.monotonic()
        process.call("test_measurement:spin")
        process.rest()
        busy, start = time.monotonic() - start, time.monotonic()
        process.rest()
        idle = time.monotonic() - start
    assert 1 < busy < 10 and idle < 0.9


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL")
def test_a_process_that_dies_says_so():
    with (
        SessionProcess("m") as process,
        pytest.raises(MeasureError, match=r"m: .*ended with -9"),
    ):
        process.call("test_measurement:be_killed")


def test_one_that_fails_leaves_the_others_their_figures(model_path, tmp_path):
    (tmp_path / "no.onnx").write_text("no model")
    candidates = [
        Candidate(model_path),
        Candidate(tmp_path / "no.onnx"),
        Candidate(model_path, "neither on nor off", settings={enable_key(FUSION): "x"}),
    ]
    good, bad, unknown = measure(candidates, FEED, rounds=1, runs=1)
    assert good.run is not None and good.run.median > 0 and not good.failed
    assert bad.failed.startswith(f"{tmp_path / 'no.onnx'}: onnxruntime refuses it: [ONNX")
    assert unknown.failed.startswith("neither on nor off: ") and unknown.start is None


MEGABYTES = 40


def grow(_: object, path: str, kind: str) -> None:
    """Hold so much more: on the heap, or of a file that is mapped and read."""
    size = MEGABYTES * 10**6
    if kind == "heap":
        held: Any = b"x" * size
    else:
        with open(path, "rb") as file:
            held = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        assert sum(held[place] for place in range(0, size, 4096)) == 0
    hang.held = held  # type: ignore[attr-defined]


@needs_proc
@pytest.mark.parametrize(("kind", "private"), [("heap", MEGABYTES), ("mapped file", 0)])
def test_private_memory_is_what_no_file_backs(kind, private, tmp_path):
    path = tmp_path / "zeros"
    path.write_bytes(bytes(MEGABYTES * 10**6))
    with SessionProcess() as process:
        process.call("test_measurement:grow", path=str(path), kind="heap")  # imports are done
        process.call("test_measurement:hang_free")
        before = process_memory(process.pid)
        process.call("test_measurement:grow", path=str(path), kind=kind)
        after = process_memory(process.pid)
        peak = process.peak_private
    assert before.private is not None and after.private is not None
    assert abs((after.private - before.private) / 1e6 - private) < 4
    assert after.resident is not None and before.resident is not None
    assert (after.resident - before.resident) / 1e6 > MEGABYTES - 4
    assert peak is not None and peak > after.private - 1e6  # looked at some ms earlier


def hang_free(_: object) -> None:
    del hang.held  # type: ignore[attr-defined]
