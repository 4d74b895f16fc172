# SPDX-License-Identifier: MIT
"""``ortplugins explain``: what a refusal means and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer

from ortplugins.errors import UsageError
from ortplugins.reasons import Reason, code_of, reasons


def explain(what: Annotated[str, typer.Argument()] = "") -> None:
    """Say what a refusal means, by its code or its text; without either, list all.

    Args:
        what ([CODE|TEXT]): ORP101, or words of a remark.
    """
    if not what:
        typer.echo("\n".join(_table()))
        return
    found = [reason for reason in reasons() if what.upper() == reason.code]
    found = found or [reason for reason in reasons() if reason.code == code_of(what)]
    found = found or [reason for reason in reasons() if what.lower() in _words(reason)]
    if not found:
        raise UsageError(
            f"no refusal has the code or the words {what!r}; without any, all follow"
        )
    for reason in found:
        typer.echo(f"{reason.code}  {reason.section}\n  {reason.advice}")
        for text in reason.texts:
            typer.echo(f"    {text}")


def _words(reason: Reason) -> str:
    return "\n".join((reason.advice, *reason.texts)).lower()


def _table() -> Iterator[str]:
    """Yield all codes as the tables of docs/troubleshooting.md."""
    section = ""
    for reason in reasons():
        if reason.section != section:
            section = reason.section
            yield from (f"\n### {section}", "", "| code | what to do |", "|---|---|")
        yield f"| `{reason.code}` | {reason.advice} |"
