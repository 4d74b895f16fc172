# SPDX-License-Identifier: MIT
"""``ortplugins tune``: which passes and session settings gain, measured on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ortplugins.cli import options as opt
from ortplugins.cli.terminal import print_table, progress_bar

if TYPE_CHECKING:
    from ortplugins.tuning import Tried

Aim = Literal["latency", "throughput", "memory", "start"]
_FIGURES = ("run", "start", "private memory after the runs")


def tune(
    model: opt.Model,
    /,
    *,
    hint: Aim = "latency",
    rounds: opt.Positive = 5,
    dims: opt.Dims = "",
    samples: Path | None = None,
    format: opt.Format = "text",
) -> None:
    """Measure passes and session settings against plain onnxruntime; write nothing.

    Args:
        hint: What to improve.
        rounds: Processes of each candidate; they take turns.
        samples: An .npz file of inputs to measure with.
    """
    from ortplugins.tuning import tune

    sizes = opt.parse_dims(dims)
    with progress_bar() as bar:
        found, best = tune(
            model, hint, rounds=rounds, dims=sizes, samples=samples, progress=bar
        )
    settings = {} if best is None else best.settings
    if format == "json":
        content = {"model": str(model), "hint": hint, "tried": [x._asdict() for x in found]}
        print(json.dumps({**content, "settings": settings}, indent=1, default=dict))
        return
    print_table(
        ("a / plain onnxruntime", "run", "start", "private memory", ""), map(_row, found)
    )
    if best is None:
        print("nothing gains")
        return
    print("\noptions = onnxruntime.SessionOptions()")
    for key, value in settings.items():
        if "." in key:
            print(f'options.add_session_config_entry("{key}", "{value}")')
        else:
            print(f"options.{key} = {int(value)}")


def _row(tried: Tried) -> tuple[str, ...]:
    cells = [f"{tried.ratios[key]:.2f} x" if key in tried.ratios else "" for key in _FIGURES]
    return (tried.name, *cells, tried.failed or ("gains" if tried.gains else ""))
