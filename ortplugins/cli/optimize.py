# SPDX-License-Identifier: MIT
"""``ortplugins optimize``: passes over a model, to a file."""

from __future__ import annotations

__all__ = ["app"]

from pathlib import Path
from typing import Annotated

import typer

from ortplugins.cli.options import (
    DEFAULT_PASSES,
    Force,
    Model,
    OnnxruntimeVersion,
    Output,
    Passes,
    ReportFormat,
    Settings,
    Verbose,
    parse_settings,
    refuse_without_effect,
)
from ortplugins.cli.terminal import print_report, progress_bar

app = typer.Typer(add_completion=False)


@app.command()
def optimize(
    context: typer.Context,
    model: Model,
    output: Output,
    passes: Passes = DEFAULT_PASSES,
    settings: Settings = None,
    onnxruntime: OnnxruntimeVersion = None,
    bake: Annotated[
        bool,
        typer.Option(
            "--bake",
            help="Run onnxruntime's own optimisers, too: for this machine, and for sessions "
            "that run none (ORT_DISABLE_ALL).",
        ),
    ] = False,
    force: Force = False,
    verbose: Verbose = False,
    format: Annotated[ReportFormat, typer.Option("--format")] = ReportFormat.TEXT,
    page: Annotated[
        Path | None,
        typer.Option(
            "--report",
            metavar="FILE.html",
            help="Write a page about it, too, with sessions measured, as the command report "
            "does.",
        ),
    ] = None,
) -> None:
    """Apply passes to a model and write the result."""
    from ortplugins.cli.report import check_page, write_report
    from ortplugins.optimization.optimize import optimize

    if format is not ReportFormat.TEXT:
        refuse_without_effect(context, f"with --format {format}", "verbose")
    options = parse_settings(settings)
    if page is not None:
        check_page([page], force)
        if output.exists() and output.samefile(model):
            raise typer.BadParameter(
                "the report needs the model as it was: give another --output",
                param_hint="--report",
            )
    with progress_bar() as bar:
        result = optimize(
            model,
            output,
            passes=passes,
            options=options,
            onnxruntime_version=onnxruntime,
            bake=bake,
            overwrite=force,
            progress=bar,
        )
    print_report(result.report, format, verbose, model)
    written = [output]
    if page is not None:
        written += write_report(
            model, page, force=force, passes=passes, options=options, result=result
        )
    if format is ReportFormat.TEXT:
        for path in written:
            typer.echo(f"wrote {path}")
