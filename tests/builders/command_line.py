# SPDX-License-Identifier: MIT
"""The command line in this process, which spares the second that a new one takes."""

import contextlib
import io
import json
import subprocess
import sys
import warnings
from typing import Any
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


def printed(*arguments: object) -> str:
    """Run a command that ends well and without a word of warning; return what it printed."""
    done = ortplugins_command(*arguments)
    assert (done.returncode, done.stderr) == (0, ""), arguments
    return done.stdout


def as_json(*arguments: object) -> Any:
    """Return what a command prints with ``--format json``."""
    return json.loads(printed(*arguments, "--format", "json"), parse_constant=_no_json)


def _no_json(text: str) -> None:
    raise AssertionError(f"{text} is not JSON")


def refused(*arguments: object) -> str:
    """Run a command that cannot be used so, and return its one sentence."""
    done = ortplugins_command(*arguments)
    assert (done.returncode, done.stdout) == (2, ""), arguments
    return done.stderr
