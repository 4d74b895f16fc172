# SPDX-License-Identifier: MIT
"""Gives back the heap that the start of a session left free."""

from __future__ import annotations

import contextlib
import ctypes


def trim_heap() -> None:
    """Return freed heap to the system.

    glibc only: musl and macOS give memory back by themselves, Windows has no such call.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
