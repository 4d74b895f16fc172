# SPDX-License-Identifier: MIT
"""What commands print: tables, reports, a progress bar; and the sizes and ages they read."""

from __future__ import annotations

__all__ = [
    "console",
    "parse_age",
    "parse_size",
    "print_report",
    "print_table",
    "progress_bar",
]

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from ortplugins.cli.options import ReportFormat
from rewrite_rules.remarks import Outcome
from session_options import keys

if TYPE_CHECKING:
    from ortplugins.report import Report

_REMARK_STYLES = {Outcome.FIRED: "green", Outcome.REFUSED: "yellow", Outcome.NOTE: "dim"}
_AGES = {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def _quantity(text: str, units: dict[str, int], expected: str) -> float:
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *([a-z]*)", text.strip().lower())
    if found is None or found[2] not in units:
        raise typer.BadParameter(f"{text!r}: {expected} is expected")
    return float(found[1]) * units[found[2]]


def parse_size(text: str) -> int:
    """Read a size as bytes: 500MB, 10GB, 1GiB."""
    try:
        return keys.parse_size("size", text)
    except keys.OptionError as error:
        raise typer.BadParameter(str(error)) from None


def parse_age(text: str) -> float:
    """Read an age as seconds: 45min, 12h, 30d, 2w."""
    return _quantity(text, _AGES, "an age such as 45min, 12h, 30d or 2w")


def console(*, stderr: bool = False) -> Console:
    """Return a console that takes every character of a name as it is."""
    # Names of nodes and tensors hold brackets and colons, which rich would take for markup.
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)


def print_table(headings: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    """Print a table; tabs and lines only where the output is no terminal."""
    out = console()
    if not out.is_terminal:  # for other programs: nothing wrapped or padded
        for row in (headings, *rows):
            typer.echo("\t".join(row))
        return
    table = Table(box=None, pad_edge=False)
    for index, heading in enumerate(headings):
        table.add_column(heading, overflow="fold", no_wrap=index == 0)
    for row in rows:
        table.add_row(*row)
    out.print(table)


@contextmanager
def progress_bar() -> Iterator[Callable[[int, int, str], None]]:
    """Show a bar on stderr, gone afterwards and absent from pipes; yields its callback."""
    out = console(stderr=True)
    with Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[what]}", markup=False),
        console=out,
        transient=True,
        disable=not out.is_terminal,
    ) as progress:
        task = progress.add_task("", total=None, what="reading and rewriting")
        yield lambda done, total, name: progress.update(
            task, completed=done, total=total, what=name
        )


def print_report(report: Report, format: ReportFormat, verbose: bool, model: Path) -> None:
    """Print counts, then the refusals, or all remarks if ``verbose``.

    Args:
        report: What passes did.
        format: How to print it.
        verbose: Whether rewrites and notes are listed, too.
        model: Path of the model, which annotations name.
    """
    if format is ReportFormat.GITHUB:
        from ortplugins.cli.github_annotations import annotations_of

        for line in annotations_of(report, model):
            typer.echo(line)
        return
    if format is ReportFormat.JSON:
        typer.echo(report.to_json())
        return
    out = console()
    out.print(f"fired {len(report.fired)}, refused {len(report.refused)}", style="bold")
    for remark in report.remarks if verbose else report.refused:
        line = f"{remark.outcome.value:8}{remark.pass_name}: {remark}"
        out.print(line, style=_REMARK_STYLES[remark.outcome], soft_wrap=True)
    for note in report.notes:
        out.print(note, soft_wrap=True)
