# SPDX-License-Identifier: MIT
"""What it takes to optimise 1.34 GB of weights: the smoke check runs the source once, too."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.figures.bounds import Figure
from benchmarks.models.int4_chain import write_chain
from ortplugins.measurement.measure import SessionProcess

LAYOUTS = {
    "int4 axis 0": ("axis0", "INT4"),
    "int4 [N,K]": ("transposed", "INT4"),
    "uint4 [N,K]": ("transposed", "UINT4"),
}


def measure_large_models(folder: Path, rounds: int) -> list[Figure]:
    """Optimise 20 MatMuls of 8192 x 16384 in each layout, vs. a session on the source."""
    figures = []
    for name, (layout, storage) in LAYOUTS.items():
        source = folder / f"{layout}-{storage}" / "model.onnx"
        source.parent.mkdir()
        megabytes = write_chain(source, 10, 8192, 16384, layout, storage) / 1e6
        if hasattr(os, "sync"):  # or writing the source is part of what is measured
            os.sync()
        output = source.with_name("optimised.onnx")
        ours, stock, written = [], [], 0
        for _ in range(rounds):
            stock.append(_run("open_and_run", source=str(source)))
            ours.append(_run("optimize_file", source=str(source), output=str(output)))
            files = list(source.parent.glob("optimised*"))
            written = sum(file.stat().st_size for file in files)
            for file in files:
                file.unlink()
        what = f"optimize, {megabytes:.0f} MB {name}"
        (taken, peak), (theirs, their_peak) = map(_medians, (ours, stock))
        figures += [
            Figure.versus(f"{what}: peak vs. a session", (peak, their_peak), "MB", 1.25),
            Figure.versus(f"{what}: time vs. a session", (taken, theirs), "s", 3.0),
            Figure(f"{what}: written", written / 1e6, unit="MB"),
        ]
        for file in source.parent.iterdir():
            file.unlink()
    return figures


def _medians(runs: Sequence[tuple[float, float]]) -> list[float]:
    return [statistics.median(column) for column in zip(*runs, strict=True)]


def _run(function: str, **arguments: str) -> tuple[float, float]:
    """Call a function below in a process of its own; its seconds, and the peak in MB."""
    with SessionProcess(function) as process:
        seconds = process.call(f"{__name__}:{function}", **arguments)
        return seconds, (process.peak_private or math.nan) / 1e6


def optimize_file(_: Any, source: str, output: str) -> float:
    """Optimise a file; return the seconds."""
    import ortplugins.optimization.optimize

    start = time.perf_counter()
    ortplugins.optimize(source, output)
    return time.perf_counter() - start


def open_and_run(_: Any, source: str) -> float:
    """Open a session on a file and run it once, on 19 rows; return the seconds."""
    import onnxruntime

    start = time.perf_counter()
    session = onnxruntime.InferenceSession(source, providers=["CPUExecutionProvider"])
    (value,) = session.get_inputs()
    session.run(None, {value.name: np.ones((19, value.shape[-1]), np.float32)})
    return time.perf_counter() - start
