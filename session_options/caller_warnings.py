# SPDX-License-Identifier: MIT
"""Warnings that point at the line of the user's program, however deep in ours they arise."""

from __future__ import annotations

import sys
import types
import warnings

_OURS = ("ortplugins", "session_options", "rewrite_rules")


def warn_caller(text: str, category: type[Warning]) -> None:
    """Issue a warning at the innermost frame that belongs to none of our packages."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and is_ours(frame):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)


def is_ours(frame: types.FrameType | None) -> bool:
    """Whether a module of this distribution runs in a frame."""
    name = None if frame is None else frame.f_globals.get("__name__")
    return str(name).partition(".")[0] in _OURS
