# SPDX-License-Identifier: MIT
"""Packages that read checkpoints, which need not be installed."""

from __future__ import annotations

import importlib
from typing import Any

from ortplugins.errors import UsageError


def package(name: str) -> Any:
    """Import a package.

    Raises:
        UsageError: If it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"checkpoints need {name}: pip install 'ortplugins[checkpoint]'"
        ) from error
