# SPDX-License-Identifier: MIT
"""The pytest plugin's option. All else is imported where the option is given.

Outside of the package: pytest loads this in every run of an environment that ortplugins is
installed in, also where it has no onnxruntime, without which ``import ortplugins`` raises.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.getgroup("ortplugins").addoption(
        "--ortplugins-report",
        nargs="?",
        const="-",
        metavar="FILE",
        help="Tell of each session and each optimize() call of the run what was fused, and "
        "what not and why: at the end, or in FILE.",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Load the plugin where it was asked for."""
    target = config.getoption("--ortplugins-report")
    if target is None:
        return
    import pytest

    if os.path.isdir(target) or target.endswith(".py") or "::" in target:
        # argparse takes what follows for the option's value, and it would be overwritten.
        raise pytest.UsageError(
            f"--ortplugins-report would write {target!r}: give it behind the tests, or a file "
            "as --ortplugins-report=FILE"
        )
    try:
        from ortplugins.pytest_plugin import ReportPlugin
    except ImportError as error:  # no onnxruntime
        raise pytest.UsageError(f"--ortplugins-report: {error}") from error
    config.pluginmanager.register(ReportPlugin(config, target), "ortplugins-report")
