# SPDX-License-Identifier: MIT
"""What a start costs beside onnxruntime's own, in fresh processes that take turns."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.figures.bounds import Figure
from benchmarks.models.corpus import float_smollm2
from benchmarks.models.real_nets import real_nets
from benchmarks.sessions import import_time
from examples.smollm2 import demo
from ortplugins.measurement.measure import Candidate, SessionProcess, measure

THREADS = {"intra_op_num_threads": 2}
HEAVY = {"onnx", "onnx_ir", "onnxscript"}
FUSION = ("dq_matmulnbits_fusion",)
# Passes, and the bound of a first start with them over a stock start.
FIRST_STARTS = (
    (FUSION, 1.15),
    (("shape_size_reorder",), 2.0),
    (("prepacked_weights",), 5.0),
)


def measure_start_cost(folder: Path, rounds: int) -> list[Figure]:
    """Compare starts that follow one another; imports are in none but the first figure."""
    return [
        _import_time(4 * rounds),
        *_hits(folder, 4 * rounds),
        *_nothing_fires(folder, 2 * rounds),
        *_first_starts(folder, rounds),
    ]


def _import_time(rounds: int) -> Figure:
    seconds = []
    for _ in range(rounds + 1):
        with SessionProcess() as process:
            seconds.append(process.call(f"{import_time.__name__}:import_seconds"))
    median = 1e3 * statistics.median(seconds[1:])
    return Figure("import ortplugins after onnxruntime", median, unit="ms", bound=12)


def _hits(folder: Path, rounds: int) -> list[Figure]:
    figures = []
    for model in demo.make_models(demo.WORK, Console(quiet=True)):
        ours = Candidate(
            model.path, settings=THREADS, passes=FUSION, cache_dir=folder / "start-cost"
        )
        for source in ("built", "cache"):
            with SessionProcess() as process:
                started = process.open(ours)
            assert started.report is not None and started.report["source"] == source
        assert HEAVY.isdisjoint(started.modules)  # of the second process: a hit
        stock = Candidate(started.report["artifact"], level="disable", settings=THREADS)
        what = f"hit beside onnxruntime on the artifact, SmolLM2 {model.layout}"
        figures.append(_added(what, ours, stock, rounds, bound=8))
    return figures


def _nothing_fires(folder: Path, rounds: int) -> list[Figure]:
    figures = []
    for path in sorted({net.path for net in real_nets()}):
        ours = Candidate(path, passes=FUSION, cache_dir=folder / "nothing")
        what = f"second start, nothing fires, {path.parent.name}/{path.name}"
        figures.append(_added(what, ours, Candidate(path), rounds, bound=2))
    return figures


def _added(
    what: str, ours: Candidate, theirs: Candidate, rounds: int, *, bound: float
) -> Figure:
    """Return the median of the differences between starts that follow one another.

    A start takes what else the machine does lets it take, so medians of each are farther
    apart than that.
    """
    mine, its = (
        [1e3 * seconds for seconds in found.start.values]
        for found in measure([ours, theirs], rounds=rounds + 1)
    )
    more = statistics.median(a - b for a, b in zip(mine, its, strict=True))
    base = statistics.median(its)
    return Figure(what, base + more, base, "ms", bound=bound, difference=True)


def _first_starts(folder: Path, rounds: int) -> list[Figure]:
    path, _ = float_smollm2()
    stock: list[float] = []
    firsts: dict[Sequence[str], list[float]] = {passes: [] for passes, _ in FIRST_STARTS}
    for number in range(rounds + 1):
        stock.append(_start(Candidate(path, settings=THREADS)))
        for passes, seconds in firsts.items():
            cache = folder / f"first-{number}-{passes[0]}"
            ours = Candidate(path, settings=THREADS, passes=passes, cache_dir=cache)
            seconds.append(_start(ours))
    base = statistics.median(stock[1:])
    return [
        Figure(
            f"first start, SmolLM2 float, {', '.join(passes)}",
            statistics.median(firsts[passes][1:]),
            base,
            "s",
            bound=bound,
        )
        for passes, bound in FIRST_STARTS
    ]


def _start(candidate: Candidate) -> float:
    with SessionProcess() as process:
        return process.open(candidate).seconds
