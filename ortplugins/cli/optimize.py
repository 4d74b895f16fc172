# SPDX-License-Identifier: MIT
"""``ortplugins inspect`` and ``optimize``: passes over a model."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from ortplugins.cli import options as opt
from ortplugins.cli.terminal import print_report, print_table, progress_bar
from ortplugins.cli.tune import Aim
from session_options import enable_key, option_key, our_passes
from session_options.entries import PASSES_KEY, PREFIX
from session_options.keys import Option, format_value, options_of
from session_options.plan import GENERAL_OPTIONS
from session_options.presets import PRESETS


def optimize(
    model: opt.Model,
    /,
    *,
    output: opt.Output,
    passes: opt.Passes | None = None,
    settings: opt.Settings = (),
    hint: Aim | None = None,
    onnxruntime: opt.Version = None,
    bake: bool = False,
    force: opt.Force = False,
    printing: opt.Printing = opt.Printing(),
) -> None:
    """Apply passes to a model and write the result.

    Args:
        hint: Run the passes of a hint.
        bake: Also run onnxruntime's own optimisers: the file is then for this machine, and
            for sessions with ORT_DISABLE_ALL.
    """
    from ortplugins.optimization.optimize import optimize

    printing.check()
    if hint is not None:
        opt.refuse("with --hint", **{"pass": passes, "set": settings})
        passes = PRESETS[hint].passes
    with progress_bar() as bar:
        result = optimize(
            model,
            output,
            onnxruntime_version=onnxruntime,
            bake=bake,
            overwrite=force,
            progress=bar,
            passes=passes or opt.DEFAULT_PASSES,
            options=opt.parse_settings(settings),
        )
    print_report(result.report, printing)
    if printing.format == "text":
        print(f"wrote {output}")
        for path in result.data_files:
            print(f"{output} reads {path}")
        for key, value in PRESETS[hint].settings.items() if hint else ():
            print(f"set for its sessions: {key} = {value}")


def inspect(
    model: Annotated[Path | None, Parameter(help="An .onnx file.")] = None,
    /,
    *,
    passes: opt.Passes | None = None,
    settings: opt.Settings = (),
    onnxruntime: opt.Version = None,
    printing: opt.Printing = opt.Printing(),
) -> None:
    """Print what passes would do to a model, and why not; write nothing.

    For a model without quantised weights, name all speed passes that would fire. Without a
    model, list the passes and their options as session keys.
    """
    printing.check()
    if model is None:
        given = {"pass": passes, "set": settings, "verbose": printing.verbose}
        opt.refuse("without a model", onnxruntime=onnxruntime, **given)
        _print_keys(printing.format)
        return
    from ortplugins.optimization.optimize import optimize
    from session_options.plan import plan_from_settings

    names, options = passes or opt.DEFAULT_PASSES, opt.parse_settings(settings)
    plan = plan_from_settings(names, options)
    # Passes that finish a file find out what they can do from the file that sessions get.
    finishes = any(item.takes_part_in("finish") for item in plan.passes)
    with progress_bar() as bar, tempfile.TemporaryDirectory(prefix="ortplugins-") as folder:
        result = optimize(
            model,
            Path(folder) / "model.onnx" if finishes else None,
            onnxruntime_version=onnxruntime,
            bake=finishes,
            progress=bar,
            passes=names,
            options=options,
        )
        report = result.report
        if passes is None and not (report.fired or report.refused):
            notes = (*report.notes, *_firing_passes(model, onnxruntime))
            report = dataclasses.replace(report, notes=notes)
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
        print(json.dumps([dict(zip(fields, row, strict=True)) for row in rows], indent=1))
    else:
        print_table(("Session key", "Default", "What it does"), rows)


def _key_rows() -> Iterator[tuple[str, str, str]]:
    for name, cls in our_passes().items():
        yield enable_key(name), "0", f"Pass {name}: {cls.summary}."
        for spec in options_of(cls):
            yield _key_row(option_key(name, spec.name), spec)
    yield PASSES_KEY, "", "Passes of other packages, module:class each, with commas between."
    for spec in GENERAL_OPTIONS:
        yield _key_row(f"{PREFIX}.{spec.name}", spec)


def _key_row(key: str, spec: Option) -> tuple[str, str, str]:
    text = spec.help
    if spec.choices:
        text += f" One of: {', '.join(filter(None, map(format_value, spec.choices)))}."
    return key, format_value(spec.default), text
