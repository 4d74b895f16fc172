# SPDX-License-Identifier: MIT
"""The command line in this process, which spares the second that a new one takes."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
import warnings
from unittest import mock

from ortplugins.cli import main


def ortplugins_command(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run ``ortplugins ARGUMENTS...`` and return its exit code and what it printed."""
    argv = ["ortplugins", *map(str, arguments)]
    out, errors = io.StringIO(), io.StringIO()
    code: object = None
    with (
        mock.patch.object(sys, "argv", argv),
        mock.patch.object(warnings, "formatwarning", warnings.formatwarning),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(errors),
    ):
        try:
            main()
        except SystemExit as left:
            code = left.code
    assert code is None or isinstance(code, int)
    return subprocess.CompletedProcess(argv, code or 0, out.getvalue(), errors.getvalue())
