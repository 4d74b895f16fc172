# SPDX-License-Identifier: MIT
"""What every command needs of a terminal: tables, a progress bar, sizes and ages to read."""

from __future__ import annotations

__all__ = [
    "REMARK_STYLES",
    "console",
    "parse_age",
    "parse_settings",
    "parse_size",
    "print_table",
    "progress_bar",
]

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from rewrite_rules.remarks import Outcome

REMARK_STYLES = {Outcome.FIRED: "green", Outcome.REFUSED: "yellow", Outcome.NOTE: "dim"}
_SIZES = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgt", 1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}
_AGES = {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def _quantity(text: str, units: dict[str, int], expected: str) -> float:
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *([a-z]*)", text.strip().lower())
    if found is None or found[2] not in units:
        raise typer.BadParameter(f"{text!r}: {expected} is expected")
    return float(found[1]) * units[found[2]]


def parse_size(text: str) -> int:
    """Read a size as bytes: 500MB, 10GB, 1GiB."""
    return int(_quantity(text, _SIZES, "a size such as 500MB, 10GB or 1GiB"))


def parse_age(text: str) -> float:
    """Read an age as seconds: 45min, 12h, 30d, 2w."""
    return _quantity(text, _AGES, "an age such as 45min, 12h, 30d or 2w")


def parse_settings(settings: list[str] | None, param_hint: str = "--set") -> dict[str, str]:
    """Read KEY=VALUE pairs.

    Args:
        settings: The pairs; None for none.
        param_hint: Name of the option that they come from, for errors.
    """
    pairs = {}
    for item in settings or ():
        key, equals, value = item.partition("=")
        if not equals:
            raise typer.BadParameter(f"{item!r} is not KEY=VALUE", param_hint=param_hint)
        pairs[key] = value
    return pairs


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
