# SPDX-License-Identifier: MIT
"""``ortplugins inspect`` and ``optimize``: passes over a model."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path

import typer

from ortplugins.cli import options as opt
from ortplugins.cli.terminal import print_report, progress_bar
from ortplugins.cli.tune import Aim
from session_options.presets import PRESETS


def optimize(
    context: typer.Context,
    model: opt.Model,
    output: opt.Output,
    chosen: opt.ChosenPasses,
    printing: opt.ReportPrinting,
    hint: Aim | None = None,
    onnxruntime: str | None = None,
    bake: bool = False,
    force: bool = False,
) -> None:
    """Apply passes to a model and write the result.

    Args:
        hint: Run the passes of a hint.
        bake: Run onnxruntime's own optimisers, too: for this machine, and for sessions that
            run none (ORT_DISABLE_ALL).
    """
    from ortplugins.optimization.optimize import optimize

    if hint is not None:
        opt.refuse_without_effect(context, "with --hint", "passes", "settings")
        chosen = {"passes": PRESETS[hint].passes}
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
    print_report(result.report, printing)
    if printing.format == "text":
        typer.echo(f"wrote {output}")
        for path in result.data_files:
            typer.echo(f"{output} reads {path}")
        for key, value in PRESETS[hint].settings.items() if hint else ():
            typer.echo(f"set for its sessions: {key} = {value}")


def inspect(
    model: opt.Model,
    chosen: opt.ChosenPasses,
    printing: opt.ReportPrinting,
    onnxruntime: str | None = None,
) -> None:
    """Print what passes would do to a model, and why not; write nothing.

    Of a model without quantised weights, it names all passes for speed that would fire.
    """
    from ortplugins.cli.advice import notes_on
    from ortplugins.optimization.optimize import optimize
    from ortplugins.quantization.encoders import notes_on_codes
    from ortplugins.runtime.machine import versions
    from session_options.plan import plan_from_settings

    plan = plan_from_settings(chosen["passes"], chosen["options"])
    # Passes that finish a file find out what they can do from the file that sessions get.
    finishes = any(item.takes_part_in("finish") for item in plan.passes)
    with tempfile.TemporaryDirectory(prefix="ortplugins-") as folder:
        result = optimize(
            model,
            Path(folder) / "model.onnx" if finishes else None,
            onnxruntime_version=onnxruntime,
            bake=finishes,
            **chosen,
        )
        report = result.report
        notes = [
            *report.notes,
            *notes_on(result.model, onnxruntime or versions()["onnxruntime"]),
            *notes_on_codes(result.model),
        ]
        if chosen["passes"] == opt.DEFAULT_PASSES and not (report.fired or report.refused):
            notes += _firing_passes(model, onnxruntime)
        report = dataclasses.replace(report, notes=tuple(notes))
    print_report(report, printing)


def _firing_passes(model: Path, onnxruntime: str | None) -> Iterator[str]:
    """Yield a note of each other pass for speed that fires."""
    from ortplugins.optimization.optimize import optimize

    for name in (*PRESETS["latency"].passes, "trim_padding"):
        if name not in opt.DEFAULT_PASSES:
            report = optimize(model, passes=[name], onnxruntime_version=onnxruntime).report
            if count := len(report.fired):
                yield f"pass {name} would fire (rewrites: {count})"
