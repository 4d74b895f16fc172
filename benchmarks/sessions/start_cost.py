# SPDX-License-Identifier: MIT
"""What the import and a first start cost, in fresh processes that take turns."""

from __future__ import annotations

import os
import statistics
from pathlib import Path

from benchmarks.figures.bounds import Figure
from benchmarks.models.corpus import float_smollm2
from benchmarks.sessions.children import timed_starts
from ortplugins.measurement.measure import Candidate, SessionProcess
from session_options.plan import entries_of

THREADS = {"intra_op_num_threads": 2}
FUSION = ("dq_matmulnbits_fusion",)
# Passes, and the bound of a first start with them over a stock start.
FIRST_STARTS = (
    (FUSION, 1.15),
    (("shape_size_reorder",), 2.0),
    (("prepacked_weights",), 5.0),
)


def measure_start_cost(folder: Path, rounds: int) -> list[Figure]:
    """Compare first starts, and time the import; later starts are in processor_time."""
    return [_import_time(4 * rounds), *_first_starts(folder, rounds)]


def _import_time(rounds: int) -> Figure:
    seconds = []
    for _ in range(rounds + 1):
        with SessionProcess() as process:
            seconds.append(process.call(f"{timed_starts.__name__}:import_seconds"))
    median = 1e3 * statistics.median(seconds[1:])
    return Figure("import ortplugins after onnxruntime", median, unit="ms", bound=12)


def _first_starts(folder: Path, rounds: int) -> list[Figure]:
    path, _ = float_smollm2()
    figures = []
    for passes, bound in FIRST_STARTS:
        stock, firsts = [], []
        for number in range(rounds + 1):
            stock.append(_start(Candidate(path, settings=THREADS)))
            cache = str(folder / f"first-{number}-{passes[0]}")
            entries = entries_of(passes, cache_dir=cache)
            firsts.append(_start(Candidate(path, settings={**THREADS, **entries})))
        what = f"first start, SmolLM2 float, {', '.join(passes)}"
        times = (statistics.median(seconds[1:]) for seconds in (firsts, stock))
        figures.append(Figure.versus(what, times, "s", bound))
    return figures


def _start(candidate: Candidate) -> float:
    if hasattr(os, "sync"):  # what the start before it wrote is not its own
        os.sync()
    with SessionProcess() as process:
        return process.open(candidate).seconds
