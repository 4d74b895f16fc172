# SPDX-License-Identifier: MIT
"""``ortplugins tune``: which passes and session settings pay, measured on this machine."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ortplugins.cli import options as opt
from ortplugins.cli.terminal import print_table
from session_options.plan import entries_of, make_plan

if TYPE_CHECKING:
    from ortplugins.tuning.tune import Tuned

Aim = Literal["latency", "throughput", "memory", "start"]
_HEADINGS = ("change", "run", "start", "private memory", "")


def tune(
    model: opt.Model,
    hint: Aim = "latency",
    seconds: Annotated[int, typer.Option(min=0)] = 60,
    error: Annotated[float, typer.Option(min=0.0)] = 0.0,
    dims: str = "",
    samples: Path | None = None,
    format: opt.Format = "text",
) -> None:
    """Measure passes and session settings beside plain onnxruntime; write nothing.

    A session entry ortplugins.hint does the same at the first start of a session, and keeps
    the choice.

    Args:
        hint: What to optimise for.
        seconds: About how long to measure; 0 measures nothing.
        error: Allowed error, over the greatest output; 0 for twice plain onnxruntime's own.
        samples (FILE.npz): Inputs to measure with.
    """
    from ortplugins.runtime.copied_options import MALLOC_THRESHOLD_KEY

    general: dict[str, Any] = {"hint_seconds": seconds, "hint_error": error, "hint_dims": dims}
    if samples is not None:
        general["hint_samples"] = str(samples)
    opt.parse_dims(dims)
    found = tuned(model, hint, **general)
    report = found.manifest["report"]
    change = found.change
    entries = {**entries_of(change.passes, change.options), **change.settings}
    if format == "json":
        content = {"model": str(model), "hint": hint, "tried": report["tried"]}
        typer.echo(json.dumps({**content, "settings": entries}, indent=1))
        return
    print_table(_HEADINGS, map(_row, report["tried"]))
    for line in report["notes"]:
        typer.echo(line)
    if entries:
        typer.echo("\noptions = onnxruntime.SessionOptions()")
    for key, value in entries.items():
        if key == MALLOC_THRESHOLD_KEY:
            typer.echo(f"ctypes.CDLL(None).mallopt(-3, {value})  # M_MMAP_THRESHOLD")
        elif "." in key:
            typer.echo(f'options.add_session_config_entry("{key}", "{value}")')
        else:
            typer.echo(f"options.{key} = {int(value)}")


def tuned(model: Path, hint: Aim, **general: Any) -> Tuned:
    """Choose for a session with default options on the CPU."""
    import onnxruntime

    from ortplugins.optimization.request import read_request
    from ortplugins.tuning.tune import tune

    plan = make_plan((), hint=hint, **general)
    options = onnxruntime.SessionOptions()
    request = read_request(str(model), plan, options, ("CPUExecutionProvider",), None)
    with tempfile.TemporaryDirectory(prefix="ortplugins-") as folder:
        return tune(request, request.load(), Path(folder))


def _row(tried: dict[str, Any]) -> tuple[str, ...]:
    cells = []
    for figure in ("run", "start", "private"):
        ratios = tried["ratios"].get(figure)
        cells.append("{1:.2f} x ({0:.2f} to {2:.2f})".format(*ratios) if ratios else "")
    outcome = "taken" if tried["taken"] else "not taken"
    return (tried["name"], *cells, ": ".join(filter(None, (outcome, tried["why"]))))
