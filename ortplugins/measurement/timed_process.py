# SPDX-License-Identifier: MIT
"""Times two models, each in a process of its own, run by run in turn.

The parent sends a line of JSON that says what to open, then ``run`` for each run. The child
answers each line by a line: what the start took, the time of a run, its memory at the end.
"""

from __future__ import annotations

__all__ = ["Timing", "main", "time_in_turn"]

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ortplugins.errors import ModelFileError
from ortplugins.runtime.child_process import child_environment
from ortplugins.samples.sources import Feed

# Runs that are not counted: buffers are allocated and pages read in the first.
_WARM_UPS = 2
# A session's threads spin for a while after a run, on the cores of the other's.
_PAUSE_SECONDS = 0.005


@dataclasses.dataclass(frozen=True)
class Timing:
    """What a model took, in a process of its own.

    Attributes:
        start_ms: Creating the session; importing onnxruntime is not in it.
        run_ms: A run, the median.
        private_mb: Private memory after the runs that the session took, 10**6 bytes; None
            where the system does not tell.
        peak_mb: Greatest resident memory of the process, mapped files included.
    """

    start_ms: float
    run_ms: float
    private_mb: float | None
    peak_mb: float | None


def time_in_turn(
    paths: Sequence[Path],
    feed: Feed,
    runs: int,
    *,
    scratch: Path,
    settings: Sequence[Mapping[str, str]],
    level: str = "all",
    providers: Sequence[Any] = ("CPUExecutionProvider",),
) -> list[Timing]:
    """Time models one after the other, again and again.

    Args:
        paths: The models.
        feed: Inputs of every run; a model is fed those that it takes.
        runs: How often each one runs.
        scratch: An existing folder.
        settings: What sessions on each model are set to, beside the level.
        level: Optimisation level, as in :data:`.LEVELS`.
        providers: Execution providers.

    Raises:
        ModelFileError: If a process fails; says how.
    """
    file = scratch / "timed-feed.npz"
    # Names of inputs may be anything; those of files in an archive not.
    arrays = {f"input{index}": array for index, array in enumerate(feed.values())}
    np.savez(file, allow_pickle=False, **arrays)
    children: list[_Child] = []
    try:
        for path, chosen in zip(paths, settings, strict=True):
            job = {
                "model": os.path.abspath(path),
                "feed": str(file),
                "names": list(feed),
                "level": level,
                "providers": list(providers),
                "settings": dict(chosen),
            }
            children.append(_Child(str(path), job))
        started = [child.ask(None) for child in children]
        times: list[list[float]] = [[] for _ in children]
        for number in range(_WARM_UPS + runs):
            for child, taken in zip(children, times, strict=True):
                time.sleep(_PAUSE_SECONDS)
                seconds = float(child.ask("run")["seconds"])
                if number >= _WARM_UPS:
                    taken.append(seconds)
        ended = [child.ask("memory") for child in children]
    finally:
        for child in children:
            child.close()
    return [
        Timing(
            start["seconds"] * 1e3,
            statistics.median(taken) * 1e3,
            _megabytes(_growth(start["before"], end["private"])),
            _megabytes(end["peak"]),
        )
        for start, taken, end in zip(started, times, ended, strict=True)
    ]


def _growth(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before


def _megabytes(size: int | None) -> float | None:
    return None if size is None else size / 1e6


class _Child:
    """A process that holds one session."""

    def __init__(self, name: str, job: Mapping[str, Any]) -> None:
        self._name = name
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-c",
                "from ortplugins.measurement.timed_process import main; main()",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=child_environment(),
            text=True,
            encoding="utf-8",
        )
        self._send(json.dumps(job))

    def ask(self, line: str | None) -> dict[str, Any]:
        """Send a line, if there is one; return the answer.

        Raises:
            ModelFileError: If the child failed or is gone.
        """
        if line is not None:
            self._send(line)
        assert self._process.stdout is not None
        text = self._process.stdout.readline()
        if not text:
            code = self._process.wait()
            raise ModelFileError(f"{self._name}: the process that timed it ended with {code}")
        answer: dict[str, Any] = json.loads(text)
        if "error" in answer:
            raise ModelFileError(f"{self._name}: {answer['error']}")
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # its last answer, or none, says why


def main() -> None:
    """Do what standard input says; the answers are the only output there."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever else prints goes to the error output

    def answer(content: Mapping[str, Any]) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    try:
        _serve(json.loads(sys.stdin.readline()), answer)
    except Exception as error:  # onnxruntime's own classes, and a model that vanished
        answer({"error": str(error)})


def _serve(job: Mapping[str, Any], answer: Any) -> None:
    from ortplugins.comparison.model_pair import open_model

    with np.load(job["feed"], allow_pickle=False) as file:
        arrays = [file[f"input{index}"] for index in range(len(job["names"]))]
    before = _memory().get("RssAnon")
    start = time.perf_counter()
    session = open_model(job["model"], job["level"], job["providers"], job["settings"])
    answer({"seconds": time.perf_counter() - start, "before": before})
    taken = {item.name for item in session.get_inputs()}
    feed = {k: v for k, v in zip(job["names"], arrays, strict=True) if k in taken}
    for line in sys.stdin:
        if line.strip() == "run":
            start = time.perf_counter()
            session.run(None, feed)
            answer({"seconds": time.perf_counter() - start})
        else:
            memory = _memory()
            answer({"private": memory.get("RssAnon"), "peak": memory.get("VmHWM")})


def _memory() -> dict[str, int]:
    """Bytes of this process by the names that Linux has for them; elsewhere the peak."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as lines:
            pairs = (line.split() for line in lines if line.startswith(("RssAnon", "VmHWM")))
            return {pair[0].rstrip(":"): int(pair[1]) * 1024 for pair in pairs}
    except OSError:
        pass
    if sys.platform == "darwin":
        import resource

        return {"VmHWM": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}
    return {}
