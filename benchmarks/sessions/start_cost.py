# SPDX-License-Identifier: MIT
"""What a start costs beyond onnxruntime's own, in fresh processes that take turns."""

from __future__ import annotations

import os
import statistics
from pathlib import Path

from rich.console import Console

from benchmarks.figures.bounds import Figure
from benchmarks.models.corpus import float_smollm2
from benchmarks.models.real_nets import real_nets
from benchmarks.sessions.children import timed_starts
from examples.smollm2 import demo
from ortplugins.measurement.measure import Candidate, SessionProcess
from session_options.plan import entries_of

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
            seconds.append(process.call(f"{timed_starts.__name__}:import_seconds"))
    median = 1e3 * statistics.median(seconds[1:])
    return Figure("import ortplugins after onnxruntime", median, unit="ms", bound=12)


def _hits(folder: Path, rounds: int) -> list[Figure]:
    figures = []
    for model in demo.make_models(demo.WORK, Console(quiet=True)):
        entries = entries_of(FUSION, cache_dir=str(folder / "start-cost"))
        ours = Candidate(model.path, settings={**THREADS, **entries})
        for source in ("built", "cache"):
            with SessionProcess() as process:
                started = process.open(ours)
            assert started.report is not None and started.report["source"] == source
        assert HEAVY.isdisjoint(started.modules)  # of the second process: a hit
        what = f"hit vs. onnxruntime on the artifact, SmolLM2 {model.layout}"
        figures.append(_added(what, model.path, folder / "start-cost", rounds, bound=8))
    return figures


def _nothing_fires(folder: Path, rounds: int) -> list[Figure]:
    figures = []
    for path in sorted({net.path for net in real_nets()}):
        what = f"second start, nothing fires, {path.parent.name}/{path.name}"
        figures.append(_added(what, path, folder / "nothing", rounds, bound=2))
    return figures


def _added(what: str, model: Path, cache: Path, rounds: int, *, bound: float) -> Figure:
    """Return what a start takes beyond onnxruntime's constructor within it."""
    entries = entries_of(FUSION, cache_dir=str(cache), strict=True)
    found = []
    for _ in range(rounds + 1):
        with SessionProcess() as process:
            function = f"{timed_starts.__name__}:start_seconds"
            found.append(process.call(function, model=str(model), entries=entries))
    whole, native = (
        [1e3 * seconds for seconds in times] for times in zip(*found[1:], strict=True)
    )
    added = statistics.median(a - b for a, b in zip(whole, native, strict=True))
    base = statistics.median(native)
    return Figure(what, base + added, base, "ms", bound=bound, difference=True)


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
