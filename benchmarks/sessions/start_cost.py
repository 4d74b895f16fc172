# SPDX-License-Identifier: MIT
"""A start from the cache beside onnxruntime on the cache's own file, in fresh processes."""

from __future__ import annotations

import statistics
from pathlib import Path

from rich.console import Console

from benchmarks.child import run_child
from benchmarks.figures.bounds import Figure
from examples.smollm2 import demo

OURS = """
import json, sys, time
import onnxruntime as ort, ortplugins
so = ort.SessionOptions()
so.intra_op_num_threads = 2
ortplugins.configure(so, ortplugins.DqMatMulNBitsFusion(), cache_dir=sys.argv[2], strict=True)
start = time.perf_counter()
s = ortplugins.InferenceSession(sys.argv[1], so, providers=["CPUExecutionProvider"])
seconds = time.perf_counter() - start
heavy = [name for name in ("onnx", "onnx_ir", "onnxscript") if name in sys.modules]
print(json.dumps([seconds, s.ortplugins_report.artifact, s.ortplugins_report.source, heavy]))
"""
STOCK = """
import json, sys, time
import onnxruntime as ort
so = ort.SessionOptions()
so.intra_op_num_threads = 2
so.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
start = time.perf_counter()
s = ort.InferenceSession(sys.argv[1], so, providers=["CPUExecutionProvider"])
print(json.dumps(time.perf_counter() - start))
"""


def measure_start_cost(folder: Path, rounds: int) -> list[Figure]:
    """Compare interleaved starts in pairs; importing the packages is not in the time."""
    figures = []
    for model in demo.make_models(demo.WORK, Console(quiet=True)):
        arguments = (str(model.path), str(folder / "start-cost"))
        _, artifact, _, _ = run_child(OURS, *arguments).result
        ours, stock = [], []
        for _ in range(4 * rounds + 1):
            seconds, _, source, heavy = run_child(OURS, *arguments).result
            assert source == "cache" and not heavy
            ours.append(1e3 * seconds)
            stock.append(1e3 * run_child(STOCK, artifact).result)
        # A start takes 150 to 300 ms, by what else the machine does: the difference is told by
        # neighbours in time.
        more = statistics.median(mine - its for mine, its in zip(ours, stock, strict=True))
        figures.append(
            Figure(
                f"start from the cache, SmolLM2 {model.layout}",
                statistics.median(stock) + more,
                statistics.median(stock),
                "ms",
                bound=30,
                difference=True,
            )
        )
    return figures
