# SPDX-License-Identifier: MIT
"""Virtual environments of slow checks, made once and kept below .cache."""

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

CACHE = Path(__file__).resolve().parents[2] / ".cache"


def python_with(home: Path, *calls: tuple[str, ...]) -> Path:
    """Return the interpreter of an environment, made at the first call; else skip the test."""
    python, reason = _environment(home, calls)
    if reason:
        unavailable(reason)
    return python


def unavailable(reason: str) -> NoReturn:
    """Skip a test for what can't be had here; in CI, where all can be had, fail it."""
    if os.environ.get("CI", "").lower() not in ("", "0", "false"):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


@functools.cache
def _environment(home: Path, calls: tuple[tuple[str, ...], ...]) -> tuple[Path, str]:
    """The interpreter, and why it can't be had, if so."""
    python, done = home / "bin" / "python", home / "installed"
    if done.exists() and done.read_text() == repr(calls):
        return python, ""
    shutil.rmtree(home, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", home], check=True)
    for requirements in calls:
        pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        install = subprocess.run([*pip, *requirements], capture_output=True, text=True)
        if install.returncode:
            lines = install.stderr.strip().splitlines() or ["pip failed"]
            return python, f"{', '.join(requirements)} can't be installed: {lines[-1]}"
    done.write_text(repr(calls))
    return python, ""
