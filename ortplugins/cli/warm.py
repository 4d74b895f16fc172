# SPDX-License-Identifier: MIT
"""``ortplugins warm``: cache entries built ahead of the sessions that open them."""

from __future__ import annotations

__all__ = ["app"]

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.filesize import decimal

from ortplugins.cli.options import DEFAULT_PASSES, Passes, Settings, parse_settings
from ortplugins.errors import ModelFileError
from session_options import PrepackedWeights

app = typer.Typer(add_completion=False)
_WARM_PASSES = [*DEFAULT_PASSES, PrepackedWeights.name]


@app.command()
def warm(
    models: Annotated[list[Path], typer.Argument(metavar="MODEL", help="An .onnx file.")],
    passes: Passes = _WARM_PASSES,
    settings: Settings = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            help="A cache directory that every user may read, for an image; sessions find it "
            "through ORTPLUGINS_CACHE_DIR. Else the cache that sessions here use.",
        ),
    ] = None,
    session_entries: Annotated[
        list[str] | None,
        typer.Option(
            "--session-entry",
            metavar="KEY=VALUE",
            help="An entry of the sessions' SessionOptions; repeatable.",
        ),
    ] = None,
    optimization_level: Annotated[
        str,
        typer.Option(help="Of the sessions: disable, basic, extended, layout or all."),
    ] = "all",
) -> None:
    """Build ahead what sessions on the CPU will look for in the cache."""
    from ortplugins.artifacts.warming import WarmResult, expected_bytes
    from ortplugins.artifacts.warming import warm as build

    def done(item: WarmResult) -> None:
        if item.error:
            where = "" if item.error.startswith(item.model) else f"{item.model}: "
            typer.echo(f"error: {where}{item.error}", err=True)
            return
        typer.echo(f"{item.model}: {item.report}; {decimal(item.size)} on disk")
        for note in item.notes:
            typer.echo(f"note: {note}", err=True)

    if PrepackedWeights.name in passes:
        for model in models:
            # What is wrong with a model is told when its turn comes.
            with suppress(ModelFileError, OSError):
                size = decimal(expected_bytes(model))
                typer.echo(f"{model}: may take {size} of disk with packed weights", err=True)
    results = build(
        models,
        passes,
        options=parse_settings(settings),
        output=output,
        session_entries=parse_settings(session_entries, "--session-entry"),
        optimization_level=optimization_level,
        done=done,
    )
    if any(item.error for item in results):
        raise typer.Exit(1)
