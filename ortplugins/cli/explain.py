# SPDX-License-Identifier: MIT
"""``ortplugins explain``: refusals by their codes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer

from ortplugins.errors import UsageError
from ortplugins.reasons import code_of, reasons


def explain(what: Annotated[str, typer.Argument()] = "") -> None:
    """Explain a refusal by its code or its text; without either, list all.

    Args:
        what ([CODE|TEXT]): A code such as ORP101, or words of a remark.
    """
    if not what:
        typer.echo("\n".join(_refusals()))
        return
    found = [reason for reason in reasons() if what.upper() == reason.code]
    found = found or [reason for reason in reasons() if reason.code == code_of(what)]
    found = found or [
        reason
        for reason in reasons()
        if what.lower() in "\n".join((reason.advice, *reason.texts)).lower()
    ]
    if not found:
        raise UsageError(
            f"no refusal has the code or the words {what!r}: 'ortplugins explain' lists all"
        )
    for reason in found:
        typer.echo(f"{reason.code}  {reason.section}\n  {reason.advice}")
        for text in reason.texts:
            typer.echo(f"    {text}")


def _refusals() -> Iterator[str]:
    """Yield all codes as the tables of docs/troubleshooting.md."""
    section = ""
    for reason in reasons():
        if reason.section != section:
            section = reason.section
            yield from (f"\n### {section}", "", "| code | what to do |", "|---|---|")
        yield f"| `{reason.code}` | {reason.advice} |"
