# SPDX-License-Identifier: MIT
"""What commands print: tables, reports, a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from ortplugins.cli.options import Printing
from ortplugins.report import worded
from rewrite_rules.remarks import Outcome

if TYPE_CHECKING:
    from ortplugins.report import Report

# Seconds that a step may take for the time left to be known.
_LONGEST_STEP = 600
_REMARK_STYLES = {Outcome.FIRED: "green", Outcome.REFUSED: "yellow", Outcome.NOTE: "dim"}


def console(*, stderr: bool = False) -> Console:
    """Return a console that takes every character of a name as it is."""
    # Names of nodes and tensors hold brackets and colons, which rich would take for markup.
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)


def print_table(headings: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    """Print a table; tabs and lines only where the output is not a terminal."""
    out = console()
    if not out.is_terminal:  # for other programs: nothing wrapped or padded
        for row in (headings, *rows):
            print("\t".join(row))
        return
    table = Table(box=None, pad_edge=False)
    for index, heading in enumerate(headings):
        table.add_column(heading, overflow="fold", no_wrap=index == 0)
    for row in rows:
        table.add_row(*row)
    out.print(table)


@contextmanager
def progress_bar() -> Iterator[Callable[[int, int, str], None]]:
    """Show a bar on stderr, gone afterwards and absent from pipes; yields its callback.

    The time left is that of the whole run, where the callback gets steps of it; else that of
    the stage that runs.
    """
    out = console(stderr=True)
    with Progress(
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[what]}", markup=False),
        console=out,
        speed_estimate_period=_LONGEST_STEP,
        transient=True,
        disable=not out.is_terminal,
    ) as progress:
        task = progress.add_task("", total=None, what="reading and rewriting")

        def show(done: int, total: int, name: str) -> None:
            shown = progress.tasks[0]
            if total != shown.total or done < shown.completed:
                progress.reset(task, total=total, what=name)  # another stage, another speed
            progress.update(task, completed=done, what=name)

        yield show


def print_report(report: Report, printing: Printing) -> None:
    """Print counts, refusals and notes on the model, or all remarks if verbose."""
    if printing.format == "json":
        print(report.to_json())
        return
    out = console()
    out.print(f"fired {len(report.fired)}, refused {len(report.refused)}", style="bold")
    for remark in report.remarks if printing.verbose else (*report.refused, *report.on_model):
        line = f"{remark.outcome.value:8}{remark.pass_name}: {worded(remark)}"
        out.print(line, style=_REMARK_STYLES[remark.outcome], soft_wrap=True)
    for note in report.notes:
        out.print(note, soft_wrap=True)
