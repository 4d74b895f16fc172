# SPDX-License-Identifier: MIT
"""What the processor is and can do: the one reader of /proc/cpuinfo."""

from __future__ import annotations

import functools
import os
import zlib

# Those that onnxruntime's kernels for quantised weights differ by.
_NOTED = ("avx2", "avx512f", "avx512_vnni", "amx_int8", "asimd", "asimddp", "i8mm")


@functools.cache
def cpu_features() -> str:
    """Return a checksum of the processor's architecture and instruction sets."""
    return f"{_architecture()} {zlib.crc32(_flags().encode()):08x}"


def processor_name() -> str:
    """Return what the processor calls itself."""
    if (name := _first_processor().get("model name")) is not None:
        return name
    import platform

    return platform.processor() or platform.machine()


def instruction_sets() -> list[str]:
    """Return the instruction sets that make a difference to kernels, of those it has."""
    flags = _flags().split()
    return [name for name in _NOTED if name in flags]


@functools.cache
def _first_processor() -> dict[str, str]:
    """Read the lines of /proc/cpuinfo, by their names: the first processor speaks for all."""
    found: dict[str, str] = {}
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                name, colon, value = line.partition(":")
                if not colon:  # the end of the first one
                    break
                found[name.strip()] = value.strip()
    except OSError:
        pass  # not Linux
    return found


def _architecture() -> str:
    if hasattr(os, "uname"):
        return os.uname().machine
    import platform  # milliseconds of a start

    return platform.machine()


def _flags() -> str:
    # x86 calls them flags, Arm Features.
    found = _first_processor()
    if flags := found.get("flags") or found.get("Features"):
        return " ".join(sorted(flags.split()))
    try:
        # What numpy.show_runtime() prints.
        from numpy._core._multiarray_umath import __cpu_features__
    except ImportError:
        return processor_name()
    return " ".join(sorted(name for name, present in __cpu_features__.items() if present))
