# SPDX-License-Identifier: MIT
"""What of this machine an optimised model depends on."""

from __future__ import annotations

__all__ = ["cpu_features"]

import functools
import hashlib
import platform


@functools.cache
def cpu_features() -> str:
    """Return a digest of the processor's architecture and instruction sets."""
    return hashlib.sha256(f"{platform.machine()} {_flags()}".encode()).hexdigest()[:16]


def _flags() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            # x86 says flags, Arm says Features; the first processor speaks for all.
            for line in lines:
                key, _, value = line.partition(":")
                if key.strip() in ("flags", "Features"):
                    return " ".join(sorted(value.split()))
    except OSError:
        pass  # not Linux
    try:
        # What numpy.show_runtime() prints.
        from numpy._core._multiarray_umath import __cpu_features__
    except ImportError:
        return platform.processor()
    return " ".join(sorted(name for name, present in __cpu_features__.items() if present))
