# SPDX-License-Identifier: MIT
"""``ortplugins report``: a page of what passes do to a model, and what that gives."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ortplugins.cli import options as opt
from ortplugins.cli.terminal import console


def report(
    context: typer.Context,
    model: opt.Model,
    output: Annotated[Path, typer.Option("--output", "-o", help="The .html file to write.")],
    chosen: opt.ChosenPasses,
    inputs: opt.Inputs,
    facts: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write everything as JSON, too."),
    ] = None,
    measure: Annotated[
        bool, typer.Option(help="Start and run sessions, with the passes and without.")
    ] = True,
    layers: Annotated[
        bool, typer.Option("--layers", help="Compare what each node computes.")
    ] = False,
    rounds: Annotated[
        int, typer.Option(metavar="N", help="Processes of each kind to measure.", min=1)
    ] = 5,
    force: opt.Force = False,
) -> None:
    """Write a page: what fires and what does not, and what sessions gain."""
    if not measure:
        opt.refuse_without_effect(context, "with --no-measure", "rounds")
    measured = {"measure": measure, "layers": layers, "rounds": rounds}
    for path in write_report(
        model, output, facts, force=force, **inputs, **chosen, **measured
    ):
        typer.echo(f"wrote {path}")


def write_report(
    model: Path,
    output: Path,
    json_output: Path | None = None,
    *,
    force: bool = False,
    **chosen: Any,
) -> list[Path]:
    """Gather the facts and write the page, and the JSON if it has a path.

    Returns:
        The files written.

    Raises:
        FileExistsError, typer.Exit: As :func:`check_page`, before anything is done.
    """
    paths = [path for path in (output, json_output) if path is not None]
    check_page(paths, force)
    from ortplugins.html_report.facts import gather_facts
    from ortplugins.html_report.page import write_page

    facts = gather_facts(model, command=shlex.join(["ortplugins", *sys.argv[1:]]), **chosen)
    if json_output is not None:
        text = json.dumps(facts, indent=1, allow_nan=False)
        json_output.write_text(text + "\n", encoding="utf-8")
    write_page(facts, output, json_output.name if json_output is not None else "")
    for part in ("sessions", "memory", "layers"):
        if facts[part] and "failed" in facts[part]:
            console(stderr=True).print(
                f"note: {part}: {facts[part]['failed']}", soft_wrap=True
            )
    return paths


def check_page(paths: Sequence[Path], force: bool) -> None:
    """Find out what would fail at the end, after the minutes that measuring takes.

    Raises:
        FileExistsError: If a file exists and ``force`` is false.
        typer.Exit: With 2 where Jinja2 is not installed.
    """
    try:
        import jinja2  # noqa: F401
    except ModuleNotFoundError:
        typer.echo("The page needs: pip install 'ortplugins[report]'", err=True)
        raise typer.Exit(2) from None
    opt.check_absent(*paths, force=force)
