# SPDX-License-Identifier: MIT
"""A report as workflow commands of GitHub Actions, which show as annotations of a run.

    ::warning file=model.onnx,title=refused%3A lm_head::block_size 24 has no kernel [ORP103]

GitHub shows the first 10 warnings and the first 10 notices of each step. (Format and escapes:
docs.github.com, "Workflow commands"; escapeData and escapeProperty in actions/toolkit.)
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ortplugins.reasons import with_code
from rewrite_rules.remarks import Outcome

if TYPE_CHECKING:
    from ortplugins.report import Report

_LEVELS = {Outcome.REFUSED: "warning", Outcome.FIRED: "notice"}


def annotations_of(report: Report, model: str | os.PathLike[str]) -> Iterator[str]:
    """Yield a warning for each refusal, with its code, then a notice for each rewrite."""
    for outcome, level in _LEVELS.items():
        for remark in report.remarks:
            if remark.outcome is outcome:
                title = f"{remark.pass_name} {outcome.value}: {remark.node}"
                reason = with_code(remark.reason) if level == "warning" else remark.reason
                yield annotation(level, reason, model, title)
    for note in report.notes:
        yield annotation("notice", with_code(note), model, "note")


def annotation(level: str, message: str, model: str | os.PathLike[str], title: str) -> str:
    """Return one command.

    Args:
        level: ``"error"``, ``"warning"`` or ``"notice"``.
        message: What it says.
        model: Path of the model; relative to the checkout if it lies inside it.
        title: Of the annotation.
    """
    file = _escaped_property(_in_checkout(model))
    return f"::{level} file={file},title={_escaped_property(title)}::{_escaped(message)}"


def _in_checkout(model: str | os.PathLike[str]) -> str:
    path = os.path.realpath(model)
    root = os.path.realpath(os.environ.get("GITHUB_WORKSPACE") or os.getcwd())
    try:
        inside = os.path.commonpath((path, root)) == root
    except ValueError:  # on another drive of Windows
        inside = False
    return (os.path.relpath(path, root) if inside else os.fspath(model)).replace(os.sep, "/")


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escaped_property(text: str) -> str:
    return _escaped(text).replace(":", "%3A").replace(",", "%2C")
