# SPDX-License-Identifier: MIT
"""Packed weights in the file: start, private memory, four workers, speed, first build."""

from __future__ import annotations

import contextlib
import math
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt
from rich.console import Console

from benchmarks.figures.bounds import Figure
from benchmarks.models.int4_chain import write_chain
from examples.smollm2 import demo
from ortplugins.measurement.measure import (
    Candidate,
    SessionProcess,
    Spread,
    measure,
    write_feed,
)
from ortplugins.model_io.loading import load_model
from ortplugins.samples.made_up import MadeUpInputs
from session_options.plan import entries_of

FUSION, PACKING = "dq_matmulnbits_fusion", "prepacked_weights"
# Passes, and their options.
KINDS: dict[str, tuple[Any, ...]] = {
    "plain": (),
    "fused": ([FUSION],),
    "packed": ([FUSION, PACKING],),
    "parallel": ([FUSION, PACKING],),
}
WORKERS, RUNS = 4, 20


def measure_prepacked(folder: Path, rounds: int) -> list[Figure]:
    """Measure SmolLM2 int4 and a chain of 252 MB, every configuration interleaved."""
    smollm2 = next(
        model
        for model in demo.make_models(demo.WORK, Console(quiet=True))
        if model.layout == "axis0"
    )
    chain = folder / "chain" / "model.onnx"
    chain.parent.mkdir()
    write_chain(chain, 15, 2048, 8192, "axis0", "INT4")
    language = {
        "decode": {"batch": 1, "sequence": 1, "past": 127},
        "prefill": {"batch": 1, "sequence": 128, "past": 0},
    }
    rows = {"decode": {"rows": 1}, "prefill": {"rows": 128}}
    return [
        *_measure("SmolLM2", smollm2.path, language, folder / "a", rounds, private_bound=0.2),
        *_measure("chain of 252 MB", chain, rows, folder / "b", rounds, private_bound=0.08),
    ]


def _measure(
    name: str,
    model: Path,
    sizes: dict[str, dict[str, int]],
    cache: Path,
    rounds: int,
    private_bound: float,
) -> list[Figure]:
    def candidate(kind: str, threads: int = 2) -> Candidate:
        entries = entries_of(*KINDS[kind], cache_dir=str(cache)) if KINDS[kind] else {}
        if kind == "parallel":
            entries["session.prepack.enable_parallel"] = "1"
        return Candidate(model, kind, settings={"intra_op_num_threads": threads, **entries})

    with SessionProcess() as process:
        first_seconds = process.open(candidate("packed")).seconds
        first_peak = process.peak_private or 0
    graph = load_model(model).model.graph
    feeds = {phase: next(MadeUpInputs(graph, dims).feeds()) for phase, dims in sizes.items()}
    candidates = [candidate(kind) for kind in KINDS]
    measured = {
        phase: dict(
            zip(KINDS, measure(candidates, feed, rounds=rounds, runs=RUNS), strict=True)
        )
        for phase, feed in feeds.items()
    }
    decode = measured["decode"]
    (warm,) = measure([candidate("packed")], rounds=rounds)

    def workers(kind: str, past: int) -> float:
        dims = {**sizes["decode"], **_cache_of(sizes["decode"], past)}
        feed = next(MadeUpInputs(graph, dims).feeds())
        return _workers(candidate(kind, threads=1), feed)

    def figure(what: str, kind: str, field: str, unit: str, bound: float = math.nan) -> Figure:
        ours, theirs = (_middle(getattr(decode[of], field), unit) for of in (kind, "plain"))
        return Figure(f"{name}: {what}", ours, theirs, unit, bound)

    after = "private memory after that start"
    # A worker that has made so many tokens holds a cache of that length.
    pasts = {f"after {RUNS} tokens": (RUNS, 0.35)}
    if "past" in sizes["decode"]:
        pasts["with a cache of 128 tokens"] = (sizes["decode"]["past"], math.nan)
    return [
        figure("start from the cache", "packed", "start", "s", 0.4),
        figure(after, "packed", "started_private", "MB", private_bound),
        figure("start, packing in parallel", "parallel", "start", "s"),
        *(
            Figure(
                f"{name}: PSS of {WORKERS} workers {when}",
                workers("packed", past),
                workers("plain", past),
                "MB",
                bound,
            )
            for when, (past, bound) in pasts.items()
        ),
        *(
            Figure(
                f"{name}: {phase}, vs. no blobs",
                _middle(of["packed"].run, "ms"),
                _middle(of["fused"].run, "ms"),
                "ms",
                1.02,
            )
            for phase, of in measured.items()
        ),
        Figure(
            f"{name}: first build", first_seconds, _middle(decode["plain"].start, "s"), "s"
        ),
        Figure(
            f"{name}: private peak of a process that has it built, vs. a warm start",
            first_peak / 1e6,
            _middle(warm.peak_private, "MB"),
            "MB",
            1.1,
        ),
    ]


def _cache_of(sizes: dict[str, int], past: int) -> dict[str, int]:
    return {"past": past} if "past" in sizes else {}


def _middle(spread: Spread | None, unit: str) -> float:
    scale = {"s": 1.0, "ms": 1e3, "MB": 1e-6}[unit]
    return math.nan if spread is None else spread.median * scale


def _workers(candidate: Candidate, feed: Mapping[str, npt.NDArray[Any]]) -> float:
    """Sum of the PSS of several processes that run one model at the same time, in MB."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        file = write_feed(feed, Path(folder, "feed.npz"))
        workers = [stack.enter_context(SessionProcess()) for _ in range(WORKERS)]
        for worker in workers:
            worker.open(candidate)
            for _ in range(RUNS):
                worker.run(file)
        # While all are alive: PSS shares pages among those that are.
        texts = (Path(f"/proc/{worker.pid}/smaps_rollup").read_text() for worker in workers)
        found = (re.search(r"^Pss: +([0-9]+) kB$", text, re.MULTILINE) for text in texts)
        return sum(int(match[1]) * 1024 for match in found if match) / 1e6
