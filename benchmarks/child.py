# SPDX-License-Identifier: MIT
"""Runs a piece of Python in a process of its own and tells what it cost."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import threading
import time
from typing import Any

_INTERVAL_SECONDS = 0.002


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a child did.

    Attributes:
        result: The JSON value that it printed last.
        peak_private_mb: Greatest RssAnon seen while it ran, every 2 ms; NaN without /proc.
        seconds: Wall time, the interpreter's start included.
    """

    result: Any
    peak_private_mb: float
    seconds: float


def run_child(code: str, *args: str, env: dict[str, str] | None = None) -> Cost:
    """Run code in a fresh interpreter.

    Args:
        code: Prints one line of JSON last.
        *args: ``sys.argv[1:]`` of the child.
        env: Environment; the parent's by default.

    Raises:
        RuntimeError: If the child fails; with its error output.
    """
    start = time.perf_counter()
    child = subprocess.Popen(
        [sys.executable, "-c", code, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )
    peak = [float("nan")]
    watcher = threading.Thread(target=_watch, args=(child, peak))
    watcher.start()
    out, err = child.communicate()
    watcher.join()
    if child.returncode:
        raise RuntimeError(f"the child failed:\n{err}")
    return Cost(json.loads(out.splitlines()[-1]), peak[0], time.perf_counter() - start)


def _watch(child: subprocess.Popen[str], peak: list[float]) -> None:
    while child.poll() is None:
        try:
            with open(f"/proc/{child.pid}/status", encoding="ascii") as status:
                for line in status:
                    if line.startswith("RssAnon:"):
                        seen = int(line.split()[1]) / 1024
                        peak[0] = seen if peak[0] != peak[0] else max(peak[0], seen)
        except OSError:
            return
        time.sleep(_INTERVAL_SECONDS)
