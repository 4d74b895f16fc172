# SPDX-License-Identifier: MIT
"""What ``pytest --ortplugins-report`` does: a line for each session and optimize() call.

The lines are those of the logger ``ortplugins``, so that sessions count that other packages
open. What runs in other processes is not seen, but for the workers of pytest-xdist.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import pytest

_KEY = "ortplugins_reports"


class ReportPlugin(logging.Handler):
    """Collects reports while tests run, and prints them at the end."""

    def __init__(self, config: pytest.Config) -> None:
        """Begin to listen."""
        super().__init__()
        self._config = config
        self._lines: list[str] = []
        self._logger = logging.getLogger("ortplugins")
        self._level_before = self._logger.level
        self._logger.addHandler(self)
        self._logger.setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the line of a session or a call; loggers below have others."""
        if record.name == self._logger.name and isinstance(record.args, tuple):
            what, _, report = record.args
            if what != "optimize()":
                what = f"session {str(what).removeprefix(os.path.join(os.getcwd(), ''))}"
            test = os.environ.get("PYTEST_CURRENT_TEST", "outside of tests")
            self._lines.append(f"{test}: {what}: {report}".replace("\n", " "))

    def pytest_unconfigure(self) -> None:
        """Leave the logger as it was."""
        self._logger.removeHandler(self)
        self._logger.setLevel(self._level_before)

    def pytest_sessionfinish(self) -> None:
        """Hand a worker's lines to the process that started it."""
        output = getattr(self._config, "workeroutput", None)
        if output is not None:
            output[_KEY] = self._lines

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """Take a worker's lines."""
        del error
        self._lines += getattr(node, "workeroutput", {}).get(_KEY, [])

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print them."""
        if hasattr(self._config, "workeroutput"):
            return
        terminalreporter.section("ortplugins")
        for line in self._lines or ["no session and no optimize() call"]:
            terminalreporter.write_line(line)
