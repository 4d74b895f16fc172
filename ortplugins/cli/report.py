# SPDX-License-Identifier: MIT
"""``ortplugins report``, a page about passes on a model; ``ortplugins memory``, a chart."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated

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
    """Write an HTML page: what passes do to a model, and what sessions gain.

    Args:
        output: The .html file to write.
        facts (FILE): Also write everything as JSON, to this file.
        measure: Measure sessions, with the passes and without.
        rounds (N): Processes to measure, with the passes and without.
    """
    from ortplugins.html_report.facts import gather_facts
    from ortplugins.html_report.page import write_page
    from ortplugins.model_io.saving import check_absent

    if not measure:
        opt.refuse_without_effect(context, "with --no-measure", "rounds")
    check_absent([path for path in (output, facts) if path], force)
    command = shlex.join(["ortplugins", *sys.argv[1:]])
    found = gather_facts(
        model, measure=measure, rounds=rounds, command=command, **inputs, **chosen
    )
    if facts is not None:
        text = json.dumps(found, indent=1, allow_nan=False)
        facts.write_text(text + "\n", encoding="utf-8")
    write_page(found, output, facts.name if facts is not None else "")
    for part in ("sessions", "memory"):
        if found[part] and "failed" in found[part]:
            console(stderr=True).print(
                f"note: {part}: {found[part]['failed']}", soft_wrap=True
            )
    for path in filter(None, (output, facts)):
        typer.echo(f"wrote {path}")


def memory(
    model: opt.Model,
    dims: str = "",
    format: opt.Format = "text",
) -> None:
    """Show the live memory of a run, step by step, in each execution order."""
    from ortplugins.html_report.live_memory import memory_bars, order_of

    curves, notes = order_of(model, opt.parse_dims(dims))
    if format == "json":
        content = {"model": str(model), "curves": curves}
        typer.echo(json.dumps({**content, "notes": notes}, indent=1))
    else:
        for line in (*memory_bars(curves), *notes):
            typer.echo(line)
