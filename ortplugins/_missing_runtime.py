# SPDX-License-Identifier: MIT
"""What to say where none of the onnxruntime wheels is installed."""

from __future__ import annotations

__all__ = ["refuse_import"]

import os
import sys
from typing import NoReturn

_WHAT_TO_DO = (
    "ortplugins needs one of the onnxruntime wheels: pip install 'ortplugins[cpu]' or "
    "'ortplugins[gpu]', or the onnxruntime-* wheel of your hardware."
)


def refuse_import() -> NoReturn:
    """Say what is missing: as the command in one sentence, else in an exception.

    The package is imported before a line of the command line runs, so that only here a
    traceback can be spared those who typed ``ortplugins``.

    Raises:
        ImportError: In a program that imports the package.
        SystemExit: With status 2, in ``ortplugins`` and ``python -m ortplugins``.
    """
    if _is_the_command():
        print(_WHAT_TO_DO, file=sys.stderr)
        raise SystemExit(2)
    raise ImportError(_WHAT_TO_DO)


def _is_the_command() -> bool:
    # While Python looks for the module of -m, sys.argv does not name it yet.
    if ("-m", "ortplugins") in zip(sys.orig_argv, sys.orig_argv[1:], strict=False):
        return True
    script = os.path.basename(sys.argv[0]) if sys.argv else ""
    return script.lower().removesuffix(".exe") == "ortplugins"
