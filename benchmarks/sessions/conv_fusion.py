# SPDX-License-Identifier: MIT
"""Costs of convolution nets with and without ConvFusion, and of OpenVINO if installed."""

from __future__ import annotations

import importlib.util
import itertools
import math
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

import ortplugins
from benchmarks.figures.bounds import Figure
from benchmarks.models.openvino_runs import beside_openvino
from benchmarks.models.rapidocr_runs import read_page
from benchmarks.models.real_nets import Net, convolution_nets
from ortplugins.measurement.measure import Candidate, measure
from session_options.plan import entries_of

_PASS = ortplugins.ConvFusion.name
# Greatest ratio of a run to plain onnxruntime; of the other nets, of all, and of starts.
_RUNS = {
    "ch_PP-OCRv4_rec_infer": 0.76,
    "ch_PP-OCRv4_det_infer": 0.75,
    "open_nsfw": 0.72,
}
_OTHERS, _MEAN, _START = 1.01, 0.85, 0.8
# Ratio to OpenVINO in float32.
_TO_OPENVINO = 1.05
# Of rapidocr's pipeline, its own work on images included.
_PAGE = 0.75
_SETTINGS = {"intra_op_num_threads": 2}
_MS = 1e3
_SECONDS = 1.0


def measure_conv_fusion(folder: Path, rounds: int) -> list[Figure]:
    """Measure runs and starts of every net with a convolution, differences and Reorder nodes.

    A net in which nothing folds runs in onnxruntime's own session: 1. One that seems to lose
    is measured again, in twice the rounds.
    """
    figures: list[Figure] = []
    runs, starts = [], []
    for net in convolution_nets():
        written = [*_written(net, folder)]
        if not written:
            runs.append(1.0)
            figures.append(Figure(f"{net.name}: as it is", 1.0, bound=_OTHERS))
            continue
        bound = _RUNS.get(net.name, _OTHERS)
        for count in (rounds, 2 * rounds):
            run, start = _beside_onnxruntime(net, folder, count, bound)
            if run.holds:
                break
        runs.append(run.compared)
        starts.append(start.compared)
        found = [run, start, *written]
        if net.name in _RUNS and importlib.util.find_spec("openvino") is not None:
            pair = beside_openvino(_ours(net, folder), net.path, net.feeds(), folder, rounds)
            what = f"{net.name}: run vs. OpenVINO"
            found.append(Figure.versus(what, pair, "ms", _TO_OPENVINO))
        for figure in found:
            print(figure.what, f"{figure.compared:.3g}", flush=True)
        figures += found
    mean = statistics.geometric_mean
    return [
        *figures,
        Figure("geometric mean of the ratios of runs", mean(runs), bound=_MEAN),
        Figure("geometric mean of the ratios of starts", mean(starts), bound=_START),
    ]


def measure_rapidocr(folder: Path, rounds: int) -> list[Figure]:
    """Measure rapidocr's own pipeline under ``ortplugins run``, and without."""
    passes = {"ours": [_PASS], "theirs": []}
    for chosen in passes.values():  # builds the entries, and is not counted
        read_page(folder / "cache", chosen)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in passes}
    for number in range(rounds):
        for name in [*passes][:: 1 if number % 2 else -1]:
            found[name].append(read_page(folder / "cache", passes[name]))

    def pair(seconds: Callable[[dict[str, Any]], float]) -> Iterator[float]:
        return (_MS * statistics.median(map(seconds, each)) for each in found.values())

    ours, theirs = ({tuple(page["text"]) for page in each} for each in found.values())
    differing = [
        line
        for texts in itertools.product(ours, theirs)
        for line in itertools.zip_longest(*texts)
        if line[0] != line[1]
    ]
    return [
        Figure.versus(
            "a page, end to end", pair(lambda page: page["seconds"][0]), "ms", _PAGE
        ),
        Figure.versus(
            "a page, processor time", pair(lambda page: page["seconds"][1]), "ms", _PAGE
        ),
        Figure.versus(
            "start of its three sessions", pair(lambda page: page["start"]), "ms", _START
        ),
        Figure("lines that read otherwise", float(len(differing)), bound=0),
    ]


def _ours(net: Net, folder: Path) -> Candidate:
    entries = entries_of([_PASS], cache_dir=str(folder / "cache"))
    return Candidate(net.path, "ours", settings={**_SETTINGS, **entries})


def _beside_onnxruntime(
    net: Net, folder: Path, rounds: int, bound: float
) -> tuple[Figure, Figure]:
    plain = Candidate(net.path, "onnxruntime", settings=_SETTINGS)
    pair = [_ours(net, folder), plain]
    found = measure(pair, net.feeds(), rounds=rounds, runs=20, seconds=_SECONDS, lockstep=True)
    run, start = (
        [_MS * spread.median if spread else math.nan for spread in spreads]
        for spreads in ([item.run for item in found], [item.start for item in found])
    )
    return (
        Figure.versus(f"{net.name}: run", run, "ms", bound),
        Figure.versus(f"{net.name}: start", start, "ms"),
    )


def _written(net: Net, folder: Path) -> Iterator[Figure]:
    """Return the greatest difference, and Reorder nodes, of the file that is written."""
    folded = folder / f"{net.name}.folded.onnx"
    result = ortplugins.optimize(net.path, folded, passes=[_PASS], overwrite=True)
    if not result.report.fired:
        return
    feed = net.feeds()
    before, after = (exact_outputs(path, feed) for path in (net.path, folded))
    worst = max(map(difference, before, after))
    yield Figure(f"{net.name}: greatest difference to ORT_DISABLE_ALL", worst)
    counts = (float(_reorders(path, folder)) for path in (folded, net.path))
    yield Figure.versus(f"{net.name}: Reorder nodes", counts)


def exact_outputs(path: Path, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Return what a model computes without onnxruntime's optimisers."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    found: list[np.ndarray] = session.run(None, feed)
    return found


def difference(before: np.ndarray, after: np.ndarray) -> float:
    """Return the greatest difference, as a share of the greatest magnitude."""
    wide = before.astype(np.float64)
    greatest = np.abs(wide).max(initial=0.0)
    return float(np.abs(wide - after).max(initial=0.0) / greatest) if greatest else 0.0


def _reorders(path: Path, folder: Path) -> int:
    """Count the changes of layout in the graph that onnxruntime makes."""
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    options.log_severity_level = 3
    ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    graph = onnx.load(folder / "optimized.onnx", load_external_data=False).graph
    return sum(node.op_type.startswith("Reorder") for node in graph.node)
