# SPDX-License-Identifier: MIT
"""``ortplugins memory``: the live memory of a run, in three execution orders."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from ortplugins.cli import options as opt


def memory(
    model: opt.Model,
    dims: str = "",
    svg: Path | None = None,
    force: bool = False,
    format: opt.Format = "text",
) -> None:
    """Show what a run holds in memory, step by step, in each execution order."""
    from ortplugins.html_report.charts import memory_bars, memory_chart
    from ortplugins.html_report.live_memory import order_of

    opt.check_absent(svg, force=force)
    curves, notes = order_of(model, opt.parse_dims(dims))
    if format == "json":
        content = {"model": str(model), "curves": [curve.to_dict() for curve in curves]}
        typer.echo(json.dumps({**content, "notes": notes}, indent=1))
    else:
        for line in (*memory_bars(curves), *notes):
            typer.echo(line)
    if svg is not None:
        svg.write_text(memory_chart(curves, str(model)), encoding="utf-8")
        typer.echo(f"wrote {svg}", err=format == "json")
