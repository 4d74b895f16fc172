# SPDX-License-Identifier: MIT
"""``ortplugins passes`` lists passes and options, ``ortplugins explain`` refusals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

import typer

import session_options
from ortplugins.cli.terminal import print_table
from ortplugins.errors import UsageError
from ortplugins.reasons import code_of, reasons
from session_options.keys import PREFIX, Option, format_value, options_of
from session_options.plan import GENERAL_OPTIONS

_HEADINGS = ("Session key", "Default", "What it does")


def passes(
    format: Annotated[Literal["text", "markdown"], typer.Option("--format")] = "text",
) -> None:
    """List the passes and their options, as session keys."""
    rows = list(_key_rows())
    if format == "markdown":
        typer.echo(f"| {' | '.join(_HEADINGS)} |\n|---|---|---|")
        for key, default, text in rows:
            shown = f"`{default}`" if default else ""
            typer.echo(f"| `{key}` | {shown} | {text.replace('|', '&#124;')} |")
    else:
        print_table(_HEADINGS, rows)


def _key_rows() -> Iterator[tuple[str, str, str]]:
    """Yield every session key of ortplugins with its default and its help."""
    for name, cls in session_options.registered_passes().items():
        yield session_options.enable_key(name), "0", f"Pass {name}: {cls.summary}."
        for spec in options_of(cls):
            yield _key_row(session_options.option_key(name, spec.name), spec)
    for spec in GENERAL_OPTIONS:
        yield _key_row(f"{PREFIX}.{spec.name}", spec)


def _key_row(key: str, spec: Option) -> tuple[str, str, str]:
    text = spec.help
    if spec.choices:
        text += f" One of: {', '.join(map(format_value, spec.choices))}."
    if spec.onnxruntime_key:
        text += f" When unset: as {spec.onnxruntime_key}."
    return key, format_value(spec.default), text


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
