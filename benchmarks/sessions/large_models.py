# SPDX-License-Identifier: MIT
"""Peak private memory and speed on more weights than a process should hold."""

from __future__ import annotations

import math
import os
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.figures.bounds import Figure
from benchmarks.models.int4_chain import write_chain
from ortplugins.measurement.measure import SessionProcess

LAYOUTS = {
    "int4 axis 0": ("axis0", "INT4"),
    "int4 [N,K]": ("transposed", "INT4"),
    "uint4 [N,K]": ("transposed", "UINT4"),
}


def measure_large_models(folder: Path, rounds: int) -> list[Figure]:
    """Optimise 20 MatMuls of 8192 x 16384 in each layout, to a file and to a cache."""
    figures = []
    for name, (layout, storage) in LAYOUTS.items():
        source = folder / f"{layout}-{storage}" / "model.onnx"
        source.parent.mkdir()
        megabytes = write_chain(source, 10, 8192, 16384, layout, storage) / 1e6
        if hasattr(os, "sync"):  # or writing the source is part of what is measured
            os.sync()
        output = source.with_name("optimised.onnx")
        what = f"optimize, {megabytes:.0f} MB {name}"
        costs, written = [], 0
        for _ in range(rounds):
            costs.append(_run("optimize_file", source=str(source), output=str(output)))
            files = list(source.parent.glob("optimised*"))
            written = sum(file.stat().st_size for file in files)
            for file in files:
                file.unlink()
        peak = max(peak for _, peak in costs)
        bound = 150 if storage == "UINT4" else 250
        figures.append(Figure(f"{what}: peak", peak, unit="MB", bound=bound))
        figures.append(Figure(f"{what}: written", written / 1e6, unit="MB"))
        seconds = statistics.median(taken for taken, _ in costs)
        # On the right the bound: a second of 250 MB.
        figures.append(
            Figure(
                f"{what}: to 250 MB/s",
                seconds,
                megabytes / 250,
                unit="s",
                bound=1.0 if layout == "axis0" else math.nan,
            )
        )
        _, peak = _run("prepare_artifact", source=str(source), cache=str(folder / "cache"))
        what = f"first start, before the session, {megabytes:.0f} MB {name}"
        figures.append(Figure(f"{what}: peak", peak, unit="MB", bound=300))
        for file in (*source.parent.iterdir(), *(folder / "cache").rglob("*.data")):
            file.unlink()
    return figures


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


def prepare_artifact(_: Any, source: str, cache: str) -> float:
    """Do what a first start does before it opens the session; return the seconds."""
    import ortplugins
    from ortplugins.cache.artifact import Wanted
    from ortplugins.cache.build import get_or_build
    from session_options.plan import entries_of

    start = time.perf_counter()
    entries = entries_of([ortplugins.DqMatMulNBitsFusion()], cache_dir=cache)
    get_or_build(Wanted(os.path.abspath(source), entries))
    return time.perf_counter() - start
