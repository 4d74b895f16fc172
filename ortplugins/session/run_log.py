# SPDX-License-Identifier: MIT
"""What the sessions below ``ortplugins run`` did, whichever process opened them."""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ortplugins.report import Report

# Handed down to the Python processes that the program starts.
PATH_VARIABLE = "ORTPLUGINS_RUN_LOG"

_WORDS = {"cache": "from the cache", "built": "built", "untouched": "unchanged"}


def record(report: Report, seconds: float) -> None:
    """Add a session to the log of the run."""
    rewrites = 0 if report.source == "untouched" else len(report.fired)
    line = json.dumps([report.source, rewrites, seconds])
    # Not created: processes may outlive the run. One write, so that lines stay whole.
    with contextlib.suppress(OSError):
        file = os.open(os.environ[PATH_VARIABLE], os.O_WRONLY | os.O_APPEND)
        try:
            os.write(file, f"{line}\n".encode())
        finally:
            os.close(file)


def summary(path: str) -> str:
    """Return one line on the sessions of a run: how many, from where, rewrites, seconds."""
    with open(path, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    if not rows:
        return "no session was opened"
    counts = Counter(source for source, _, _ in rows)
    sources = ", ".join(
        f"{counts[name]} {text}" for name, text in _WORDS.items() if counts[name]
    )
    rewrites = sum(number for _, number, _ in rows)
    seconds = max(seconds for _, _, seconds in rows)
    noun = "session" if len(rows) == 1 else "sessions"
    return (
        f"{len(rows)} {noun} ({sources}), {rewrites} rewrites, slowest start {seconds:.2f} s"
    )
