# SPDX-License-Identifier: MIT
"""``ortplugins inspect``: what passes would do to a model."""

from __future__ import annotations

__all__ = ["app"]

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from ortplugins.cli.options import (
    DEFAULT_PASSES,
    Model,
    OnnxruntimeVersion,
    Passes,
    ReportFormat,
    Settings,
    Verbose,
    parse_settings,
    refuse_without_effect,
)
from ortplugins.cli.terminal import print_report

app = typer.Typer(add_completion=False)


@app.command()
def inspect(
    context: typer.Context,
    model: Model,
    passes: Passes = DEFAULT_PASSES,
    settings: Settings = None,
    onnxruntime: OnnxruntimeVersion = None,
    check: Annotated[
        bool, typer.Option("--check", help="Exit with 1 if something is refused.")
    ] = False,
    verbose: Verbose = False,
    format: Annotated[ReportFormat, typer.Option("--format")] = ReportFormat.TEXT,
) -> None:
    """Print what would fire on a model, what would not, and why; write nothing."""
    from ortplugins.optimization.optimize import optimize
    from session_options.plan import plan_from_settings

    if format is not ReportFormat.TEXT:
        refuse_without_effect(context, f"with --format {format}", "verbose")
    options = parse_settings(settings)
    plan = plan_from_settings(passes, options)
    # Passes that finish a file find out what they can do from the file that sessions get.
    finishes = any(item.takes_part_in("finish") for item in plan.passes)
    with tempfile.TemporaryDirectory(prefix="ortplugins-") as folder:
        report = optimize(
            model,
            Path(folder) / "model.onnx" if finishes else None,
            passes=passes,
            options=options,
            onnxruntime_version=onnxruntime,
            bake=finishes,
        ).report
    print_report(report, format, verbose, model)
    if check and report.refused:
        raise typer.Exit(1)
