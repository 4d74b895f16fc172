# SPDX-License-Identifier: MIT
"""Memory of a process, as Linux tells it in /proc; all figures in bytes.

private   resident memory that no file backs (RssAnon): the heap, the stacks, pages that were
          written to. Each process has its own, whatever others map. Private_Clean of
          smaps_rollup is not counted: these are pages of a mapped model that one process alone
          reads at the moment, and they are shared as soon as a second one opens it. Neither is
          it read often without slowing the process, which RssAnon, a counter, is.
resident  all of it, mapped files included (VmRSS), and the most that it ever was (VmHWM).
pss       the same, but pages that n processes share count as 1/n (smaps_rollup).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class ProcessMemory:
    """What a process holds; None for what the system does not tell."""

    private: int | None = None
    resident: int | None = None
    peak_resident: int | None = None


def process_memory(pid: int | str = "self") -> ProcessMemory:
    """Return what a process holds; nothing of one that has ended, or without /proc."""
    found = _fields(pid, "status")
    return ProcessMemory(found.get("RssAnon"), found.get("VmRSS"), found.get("VmHWM"))


def proportional_bytes(pid: int | str = "self") -> int | None:
    """Return the PSS of a process: shared pages by the number of processes that share them."""
    return _fields(pid, "smaps_rollup").get("Pss")


def _fields(pid: int | str, file: str) -> dict[str, int]:
    """Read the lines ``Name:  1234 kB``."""
    try:
        text = Path("/proc", str(pid), file).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    pairs = (line.split() for line in text.splitlines() if line.endswith(" kB"))
    return {pair[0].rstrip(":"): int(pair[1]) * 1024 for pair in pairs}
