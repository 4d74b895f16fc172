# SPDX-License-Identifier: MIT
"""What ``pytest --ortplugins-report`` does: a line for each session and optimize() call.

A session's line is what its ``ortplugins_report`` was last set to, whoever sets it, so that
sessions count that other packages create. What runs in other processes is not seen, but for
the workers of pytest-xdist.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import onnxruntime
import pytest

from ortplugins.optimization.optimize import OptimizeResult
from ortplugins.report import Report

_KEY = "ortplugins_reports"


class ReportPlugin:
    """Collects reports while tests run, and tells them at the end."""

    def __init__(self, config: pytest.Config) -> None:
        """Begin to watch."""
        self._config = config
        self._lines: list[str] = []
        self._places: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._replaced = contextlib.ExitStack()
        self._watch_sessions()
        self._watch_results()

    def pytest_unconfigure(self) -> None:
        """Leave the classes as they were."""
        self._replaced.close()

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
        """Tell."""
        if hasattr(self._config, "workeroutput"):
            return
        terminalreporter.section("ortplugins")
        for line in self._lines or ["no session and no optimize() call"]:
            terminalreporter.write_line(line)

    def _watch_sessions(self) -> None:
        def record(session: Any, name: str, value: object) -> None:
            object.__setattr__(session, name, value)
            # Our sessions keep it as a dict, those of other packages as a Report.
            if name in ("ortplugins_report", "_ortplugins_report"):
                report = session.ortplugins_report
                place = self._places.setdefault(session, len(self._lines))
                self._lines[place : place + 1] = [_line(_source(session), report)]

        self._replace(onnxruntime.InferenceSession, "__setattr__", record)

    def _watch_results(self) -> None:
        original = OptimizeResult.__init__

        def record(result: OptimizeResult, *args: Any, **kwargs: Any) -> None:
            original(result, *args, **kwargs)
            self._lines.append(_line("optimize()", result.report))

        self._replace(OptimizeResult, "__init__", record)

    def _replace(self, cls: type, name: str, method: Callable[..., None]) -> None:
        self._replaced.enter_context(mock.patch.object(cls, name, method))


def _source(session: Any) -> str:
    """Name the model that a session was asked for."""
    given = getattr(session, "_ortplugins_source", None)
    if given is None or isinstance(given, bytes):
        return "session"
    return f"session {os.fspath(given)}"


def _line(what: str, report: Report) -> str:
    test = os.environ.get("PYTEST_CURRENT_TEST", "outside of tests")
    return f"{test}: {what}: " + str(report).replace("\n", " ")
