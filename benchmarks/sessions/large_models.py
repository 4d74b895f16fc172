# SPDX-License-Identifier: MIT
"""Peak private memory and speed on more weights than a process should hold."""

from __future__ import annotations

import math
import os
import statistics
from pathlib import Path

from benchmarks.child import run_child
from benchmarks.figures.bounds import Figure
from benchmarks.models.int4_chain import write_chain

OPTIMIZE = """
import json, sys, time
import ortplugins.optimization.optimize
start = time.perf_counter()
ortplugins.optimize(sys.argv[1], sys.argv[2])
print(json.dumps(time.perf_counter() - start))
"""
FIRST_START = """
import json, sys, time
import onnxruntime as ort, ortplugins
from ortplugins.artifacts.find_or_build import prepare
so = ort.SessionOptions()
ortplugins.configure(so, ortplugins.DqMatMulNBitsFusion(), cache_dir=sys.argv[2])
start = time.perf_counter()
prepare(sys.argv[1], ortplugins.read(so), so, ["CPUExecutionProvider"], None)
print(json.dumps(time.perf_counter() - start))
"""
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
        os.sync()  # or writing the source is part of what is measured
        output = source.with_name("optimised.onnx")
        what = f"optimize, {megabytes:.0f} MB {name}"
        costs, written = [], 0
        for _ in range(rounds):
            costs.append(run_child(OPTIMIZE, str(source), str(output)))
            files = list(source.parent.glob("optimised*"))
            written = sum(file.stat().st_size for file in files)
            for file in files:
                file.unlink()
        peak = max(cost.peak_private_mb for cost in costs)
        bound = 150 if storage == "UINT4" else 250
        figures.append(Figure(f"{what}: peak", peak, unit="MB", bound=bound))
        figures.append(Figure(f"{what}: written", written / 1e6, unit="MB"))
        seconds = statistics.median(cost.result for cost in costs)
        # On the right the bound: a second of 250 MB.
        figures.append(
            Figure(
                f"{what}: seconds beside those at 250 MB/s",
                seconds,
                megabytes / 250,
                unit="s",
                bound=1.0 if layout == "axis0" else math.nan,
            )
        )
        cost = run_child(FIRST_START, str(source), str(folder / "cache"))
        what = f"first start, before the session, {megabytes:.0f} MB {name}"
        figures.append(Figure(f"{what}: peak", cost.peak_private_mb, unit="MB", bound=300))
        for file in (*source.parent.iterdir(), *(folder / "cache").rglob("*.data")):
            file.unlink()
    return figures
