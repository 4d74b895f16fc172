# SPDX-License-Identifier: MIT
"""``ortplugins pack``: a folder for a server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.filesize import decimal

from ortplugins.cli import options as opt
from ortplugins.cli.terminal import print_report, progress_bar


def pack(
    model: opt.ModelOrFolder,
    output: Annotated[Path, typer.Option("--output", "-o")],
    chosen: opt.ChosenPasses,
    printing: opt.ReportPrinting,
    server: Annotated[Literal["genai", "triton", "plain"], typer.Option("--for")] = "plain",
    onnxruntime: str | None = None,
    force: bool = False,
) -> None:
    """Write a folder for a server: the optimised model and all that it needs.

    Args:
        output: Folder to write.
        server: Who reads the folder; plain keeps it as it is.
    """
    from ortplugins.packing.pack import pack

    with progress_bar() as bar:
        result = pack(
            model,
            output,
            server=server,
            onnxruntime_version=onnxruntime,
            overwrite=force,
            progress=bar,
            **chosen,
        )
    print_report(result.report, printing, model)
    if printing.format == "text":
        for name, size in result.files.items():
            typer.echo(f"  {name}  {decimal(size)}")
        typer.echo(f"wrote {result.path}; onnxruntime loads it")
