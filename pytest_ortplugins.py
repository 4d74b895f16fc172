# SPDX-License-Identifier: MIT
"""The pytest plugin's option. All else is imported where the option is given.

Outside of the package: pytest loads this in every run of an environment that ortplugins is
installed in, also where it has no onnxruntime, without which ``import ortplugins`` raises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.getgroup("ortplugins").addoption(
        "--ortplugins-report",
        action="store_true",
        help="Tell at the end of each session and each optimize() call of the run what was "
        "fused, and what not and why.",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Load the plugin where it was asked for."""
    if not config.getoption("--ortplugins-report"):
        return
    import pytest

    try:
        from ortplugins.pytest_plugin import ReportPlugin
    except ImportError as error:  # no onnxruntime
        raise pytest.UsageError(f"--ortplugins-report: {error}") from error
    config.pluginmanager.register(ReportPlugin(config), "ortplugins-report")
