# SPDX-License-Identifier: MIT
"""``ortplugins optimize``: passes over a model, to a file."""

from __future__ import annotations

__all__ = ["optimize"]

from pathlib import Path
from typing import Annotated

import typer

from ortplugins.cli import options as opt
from ortplugins.cli.terminal import print_report, progress_bar


def optimize(
    model: opt.Model,
    output: opt.Output,
    chosen: opt.ChosenPasses,
    printing: opt.ReportPrinting,
    onnxruntime: opt.OnnxruntimeVersion = None,
    bake: Annotated[
        bool,
        typer.Option(
            "--bake",
            help="Run onnxruntime's own optimisers, too: for this machine, and for sessions "
            "that run none (ORT_DISABLE_ALL).",
        ),
    ] = False,
    force: opt.Force = False,
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
            onnxruntime_version=onnxruntime,
            bake=bake,
            overwrite=force,
            progress=bar,
            **chosen,
        )
    print_report(result.report, printing, model)
    written = [output]
    if page is not None:
        written += write_report(model, page, force=force, result=result, **chosen)
    if printing.format == "text":
        for path in written:
            typer.echo(f"wrote {path}")
