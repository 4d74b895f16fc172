# SPDX-License-Identifier: MIT
"""``ortplugins inspect`` and ``optimize``: passes over a model."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from ortplugins.cli import options as opt
from ortplugins.cli.terminal import print_report, print_table, progress_bar
from ortplugins.cli.tune import Aim
from session_options import enable_key, option_key, registered_passes
from session_options.keys import PREFIX, Option, format_value, options_of
from session_options.plan import GENERAL_OPTIONS
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
    context: typer.Context,
    chosen: opt.ChosenPasses,
    printing: opt.ReportPrinting,
    model: Annotated[Path | None, typer.Argument()] = None,
    onnxruntime: str | None = None,
) -> None:
    """Print what passes would do to a model, and why not; write nothing.

    Of a model without quantised weights, it names all passes for speed that would fire.
    Without a model, it lists the passes and their options, as session keys.
    """
    if model is None:
        names = (item.name for item in context.command.params if item.name != "format")
        opt.refuse_without_effect(context, "without a model", *filter(None, names))
        _print_keys(printing.format)
        return
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


def _print_keys(form: str) -> None:
    """Print every session key of ortplugins with its default and its help."""
    rows = [*_key_rows()]
    if form == "json":
        fields = ("key", "default", "help")
        typer.echo(json.dumps([dict(zip(fields, row, strict=True)) for row in rows], indent=1))
    else:
        print_table(("Session key", "Default", "What it does"), rows)


def _key_rows() -> Iterator[tuple[str, str, str]]:
    for name, cls in registered_passes().items():
        yield enable_key(name), "0", f"Pass {name}: {cls.summary}."
        for spec in options_of(cls):
            yield _key_row(option_key(name, spec.name), spec)
    for spec in GENERAL_OPTIONS:
        yield _key_row(f"{PREFIX}.{spec.name}", spec)


def _key_row(key: str, spec: Option) -> tuple[str, str, str]:
    text = spec.help
    if spec.choices:
        text += f" One of: {', '.join(map(format_value, spec.choices))}."
    if spec.onnxruntime_key:
        text += f" When unset: as {spec.onnxruntime_key}."
    return key, format_value(spec.default), text
