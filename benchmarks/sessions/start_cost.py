# SPDX-License-Identifier: MIT
"""A start from the cache beside onnxruntime on the cache's own file, in fresh processes."""

from __future__ import annotations

import statistics
from pathlib import Path

from rich.console import Console

from benchmarks.figures.bounds import Figure
from examples.smollm2 import demo
from ortplugins.measurement.measure import Candidate, SessionProcess, measure

THREADS = {"intra_op_num_threads": 2}
HEAVY = {"onnx", "onnx_ir", "onnxscript"}


def measure_start_cost(folder: Path, rounds: int) -> list[Figure]:
    """Compare interleaved starts in pairs; importing the packages is not in the time."""
    figures = []
    for model in demo.make_models(demo.WORK, Console(quiet=True)):
        ours = Candidate(
            model.path,
            settings=THREADS,
            passes=["dq_matmulnbits_fusion"],
            cache_dir=folder / "start-cost",
        )
        for source in ("built", "cache"):
            with SessionProcess() as process:
                started = process.open(ours)
            assert started.report is not None and started.report["source"] == source
        assert HEAVY.isdisjoint(started.modules)  # of the second process: a hit
        stock = Candidate(started.report["artifact"], level="disable", settings=THREADS)
        mine, its = (
            [1e3 * seconds for seconds in found.start.values]
            for found in measure([ours, stock], rounds=4 * rounds + 1)
        )
        # A start takes 150 to 300 ms, depending on what else the machine does: starts that
        # followed one another are compared.
        more = statistics.median(a - b for a, b in zip(mine, its, strict=True))
        figures.append(
            Figure(
                f"start from the cache, SmolLM2 {model.layout}",
                statistics.median(its) + more,
                statistics.median(its),
                "ms",
                bound=30,
                difference=True,
            )
        )
    return figures
