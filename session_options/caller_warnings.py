# SPDX-License-Identifier: MIT
"""Warnings that point at the line of the user's program, however deep in ours they arise."""

from __future__ import annotations

import sys
import warnings

_OURS = ("ortplugins", "session_options", "rewrite_rules")


def warn_caller(text: str, category: type[Warning]) -> None:
    """Issue a warning at the innermost frame that belongs to none of our packages."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and _is_ours(str(frame.f_globals.get("__name__", ""))):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in _OURS
