# SPDX-License-Identifier: MIT
"""``ortplugins report``: a page of what passes do to a model, and what that gives."""

from __future__ import annotations

__all__ = ["check_page", "report", "write_report"]

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ortplugins.cli.terminal import console, parse_settings
from session_options import DqMatMulNBitsFusion


def report(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="An .onnx file.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The .html file to write.")],
    passes: Annotated[
        list[str], typer.Option("--pass", metavar="NAME", help="A pass to run; repeatable.")
    ] = [DqMatMulNBitsFusion.name],  # noqa: B006 (typer copies it)
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Key: <pass>.<option>; repeatable."),
    ] = None,
    dims: Annotated[
        str,
        typer.Option(
            metavar="NAME=SIZE,...",
            help="Sizes of the inputs' symbolic dimensions; others are guessed.",
        ),
    ] = "",
    facts: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write everything as JSON, too."),
    ] = None,
    measure: Annotated[
        bool,
        typer.Option(help="Start and run sessions, plain ones beside ours."),
    ] = True,
    layers: Annotated[
        bool, typer.Option("--layers", help="Compare what each node computes.")
    ] = False,
    rounds: Annotated[
        int, typer.Option(metavar="N", help="Processes of each kind to measure.", min=1)
    ] = 3,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the files.")] = False,
) -> None:
    """Write a page: what fires and what not, and what sessions gain by it."""
    from ortplugins.cli.compare import parse_dims

    written = write_report(
        model,
        output,
        facts,
        force=force,
        passes=passes,
        options=parse_settings(settings),
        dims=parse_dims(dims),
        measure=measure,
        layers=layers,
        rounds=rounds,
    )
    for path in written:
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

    Args:
        model: The .onnx file.
        output: The page.
        json_output: The JSON.
        force: Whether the files may exist.
        **chosen: Further arguments of :func:`.gather_facts`.

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
    for path in paths:
        if path.exists() and not force:
            raise FileExistsError(f"{path}: exists; --force overwrites it")
