# SPDX-License-Identifier: MIT
"""``ortplugins report``, a page about passes on a model; ``ortplugins memory``, a chart."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ortplugins.cli import options as opt
from ortplugins.cli.terminal import console


def report(
    context: typer.Context,
    model: opt.Model,
    output: Annotated[Path, typer.Option("--output", "-o")],
    chosen: opt.ChosenPasses,
    inputs: opt.Inputs,
    facts: Annotated[Path | None, typer.Option("--json")] = None,
    measure: bool = True,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    force: bool = False,
) -> None:
    """Write a page: what fires and what does not, and what sessions gain.

    Args:
        output: The .html file to write.
        facts (FILE): Write everything as JSON, too.
        measure: Start and run sessions, with the passes and without.
        rounds (N): Processes of each kind to measure.
    """
    if not measure:
        opt.refuse_without_effect(context, "with --no-measure", "rounds")
    measured = {"measure": measure, "rounds": rounds}
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
    """Gather the facts and write the page, and the JSON if it has a path."""
    from ortplugins.html_report.facts import gather_facts
    from ortplugins.html_report.page import write_page

    opt.check_absent(output, json_output, force=force)
    facts = gather_facts(model, command=shlex.join(["ortplugins", *sys.argv[1:]]), **chosen)
    written = [output]
    if json_output is not None:
        text = json.dumps(facts, indent=1, allow_nan=False)
        json_output.write_text(text + "\n", encoding="utf-8")
        written.append(json_output)
    write_page(facts, output, json_output.name if json_output is not None else "")
    for part in ("sessions", "memory"):
        if facts[part] and "failed" in facts[part]:
            console(stderr=True).print(
                f"note: {part}: {facts[part]['failed']}", soft_wrap=True
            )
    return written


def memory(
    model: opt.Model,
    dims: str = "",
    format: opt.Format = "text",
) -> None:
    """Show what a run holds in memory, step by step, in each execution order."""
    from ortplugins.html_report.live_memory import memory_bars, order_of

    curves, notes = order_of(model, opt.parse_dims(dims))
    if format == "json":
        content = {"model": str(model), "curves": [curve.to_dict() for curve in curves]}
        typer.echo(json.dumps({**content, "notes": notes}, indent=1))
    else:
        for line in (*memory_bars(curves), *notes):
            typer.echo(line)
