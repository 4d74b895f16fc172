# SPDX-License-Identifier: MIT
"""Memory while a model runs: onnxruntime's two orders and ShapeSizeReorder's.

Peaks are those of the process, as the operating system tells them, above what it held when the
session was open: of the first run, and of four runs, as a server makes them. Each session has
a process of its own. ``python -m benchmarks.sessions.order_peaks [NAME]...`` prints every
model.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from benchmarks.figures.bounds import Figure
from benchmarks.models.branching_graphs import GRAPHS
from benchmarks.models.real_nets import real_nets
from ortplugins.measurement.measure import Candidate, SessionProcess, write_feed
from rewrite_rules.remarks import PassContext, Remarks
from rewrite_rules.shape_size_reorder.memory_order import GraphOrder
from rewrite_rules.shape_size_reorder.reorder import reorder
from rewrite_rules.shapes.proved_shapes import ProvedShapes
from session_options.plan import entries_of

_RUNS, _PASS, _SECONDS = "benchmarks.sessions.children.order_runs", "shape_size_reorder", 2
_ORDERS = ("DEFAULT", "PRIORITY_BASED", "ours")
_LARGE = 20_000
_NOISE_MB = 0.5


@dataclasses.dataclass(frozen=True)
class Measured:
    """One model.

    Attributes:
        name: What tables call it.
        branching: Whether it is one of :mod:`branching_graphs`.
        peaks: MB of the first run and of four runs, by order and whether the arena is on.
        slower: Time of a run vs. onnxruntime's default.
        same: Whether outputs are bit-equal.
        ordered: Whether the pass set an order.
        out_of_place: Nodes that ran at another place than the file has them at.
        late: Shapes and Sizes that lie further than directly behind their producer.
    """

    name: str
    branching: bool
    peaks: dict[tuple[str, bool], tuple[float, float]]
    slower: float
    same: bool
    ordered: bool
    out_of_place: int
    late: int

    def to_default(self, arena: bool, which: int) -> float:
        """Our peak over that of the default; ``which``: 0 of the first run, 1 of four."""
        return self.peaks["ours", arena][which] / self.peaks["DEFAULT", arena][which]

    def to_better(self, arena: bool, which: int) -> float:
        """Our peak over that of the better native order, half a megabyte being noise."""
        native = min(self.peaks[order, arena][which] for order in _ORDERS[:2])
        return (self.peaks["ours", arena][which] - _NOISE_MB) / native


def measure_order_peaks(folder: Path, rounds: int) -> list[Figure]:
    """Measure all branching graphs and real nets; tell medians and the worst."""
    found = list(_measure(folder, min(rounds, 2), ()))
    branching = [item for item in found if item.branching]
    figures = []
    for arena in (False, True):
        for which, runs in enumerate(("first run", "four runs")):
            what = f"arena {'on' if arena else 'off'}, {runs}"
            median = statistics.median(item.to_default(arena, which) for item in branching)
            figures.append(
                _ratio(f"branching graphs, {what}: median to default", median, 0.75)
            )
            for kind, items in (
                ("branching graphs", branching),
                ("real nets", [item for item in found if not item.branching]),
            ):
                worst = max(items, key=lambda item: item.to_better(arena, which))
                figures.append(
                    _ratio(
                        f"{kind}, {what} ({worst.name})",
                        worst.to_better(arena, which),
                        1.02,
                    )
                )
    slowest = max(found, key=lambda item: item.slower)
    figures.append(
        _ratio(f"worst time of a run to default ({slowest.name})", slowest.slower, 1.03)
    )
    different = sum(not item.same for item in found)
    figures.append(Figure("models whose outputs differ in any bit", different, bound=0))
    ordered = [item for item in found if item.ordered]
    figures += [
        Figure("models that got an order", len(ordered)),
        Figure("nodes that ran elsewhere", sum(i.out_of_place for i in ordered), bound=0),
        Figure(
            "Shapes not directly behind their producer", sum(i.late for i in ordered), bound=0
        ),
    ]
    figures += [_time_of(folder, shapes) for shapes in (20, 4)]
    return figures


def _ratio(what: str, value: float, bound: float) -> Figure:
    return Figure(what, value, 1.0, bound=bound)


def _measure(folder: Path, rounds: int, names: Iterable[str]) -> Iterator[Measured]:
    chosen = set(names)
    for name, path, feeds, dims in _models(folder):
        if chosen and name not in chosen:
            continue
        stored = str(folder / "feeds.npz")
        np.savez(stored, **feeds)
        sizes = ",".join(f"{symbol}={size}" for symbol, size in dims.items())

        candidate = functools.partial(_candidate, path, sizes, folder / "cache")
        peaks = {}
        for arena in (False, True):
            _call("peaks", candidate("ours", arena), feeds=stored)  # the first makes the file
            runs: dict[str, list[Any]] = {order: [] for order in _ORDERS}
            for _ in range(rounds):
                for order in _ORDERS:
                    found = _call("peaks", candidate(order, arena), feeds=stored)
                    runs[order].append(found)
            for order, results in runs.items():
                first, four = zip(*results, strict=True)
                peaks[order, arena] = statistics.median(first), statistics.median(four)
        # Addresses differ from process to process, and with them what the caches do.
        pair = candidate("DEFAULT", True, threads=1), candidate("ours", True, threads=1)
        write_feed(feeds, folder / "turns.npz")
        timed = [_ratio_of_runs(pair, folder / "turns.npz") for _ in range(2 * rounds - 1)]
        slower = statistics.median(timed)
        outputs = [_call("outputs", item, feeds=stored) for item in pair]
        same = outputs[0] == outputs[1]
        ours = candidate("ours", True)
        profiled = {"enable_profiling": True, "profile_file_prefix": str(folder / "profile")}
        ordered, out_of_place, artifact = _call(
            "executed_order",
            dataclasses.replace(ours, settings={**ours.settings, **profiled}),
            feeds=stored,
            model=str(path),
        )
        late = _late_shapes(Path(artifact)) if ordered else 0
        yield Measured(name, name in GRAPHS, peaks, slower, same, ordered, out_of_place, late)


def _models(
    folder: Path,
) -> Iterator[tuple[str, Path, dict[str, Any], dict[str, int]]]:
    for name, make in GRAPHS.items():
        path = folder / f"{name.replace(', ', '_').replace(' ', '_')}.onnx"
        model = make()
        onnx.save(model, path)
        inputs = model.graph.input
        shapes = {i.name: [d.dim_value for d in i.type.tensor_type.shape.dim] for i in inputs}
        yield name, path, {n: np.ones(s, np.float32) for n, s in shapes.items()}, {}
        path.unlink()
    for net in real_nets():
        yield net.name, net.path, net.feeds(), net.dims()


def _candidate(
    path: Path, dims: str, cache: Path, order: str, arena: bool, threads: int = 2
) -> Candidate:
    settings: dict[str, str | int] = {
        "enable_cpu_mem_arena": arena,
        "intra_op_num_threads": threads,
    }
    if order != "ours":
        return Candidate(path, settings={**settings, "execution_order": order})
    entries = entries_of([_PASS], {f"{_PASS}.dims": dims}, cache_dir=str(cache))
    return Candidate(path, settings={**settings, **entries})


def _process() -> SessionProcess:
    # Large tensors come from the system and go back to it: with glibc's growing threshold,
    # which of them stay on the heap is a matter of chance.
    return SessionProcess(environment={"MALLOC_MMAP_THRESHOLD_": "65536"})


def _call(function: str, candidate: Candidate, **arguments: str) -> Any:
    """Open a session in a process of its own to call ``children.order_runs``."""
    with _process() as process:
        process.open(candidate)
        return process.call(f"{_RUNS}:{function}", **arguments)


def _ratio_of_runs(pair: tuple[Candidate, Candidate], feed: Path) -> float:
    """Run two sessions in turn; return the second's time over the first's, the median."""
    with _process() as first, _process() as second:
        processes = first, second
        for process, candidate in zip(processes, pair, strict=True):
            process.open(candidate)
            process.run(feed)
        ratios: list[float] = []
        begin = time.perf_counter()
        while len(ratios) < 9 or time.perf_counter() - begin < _SECONDS:
            turn = processes if len(ratios) % 2 else processes[::-1]
            times = {process: process.run(feed) for process in turn}
            ratios.append(times[second] / times[first])
    return statistics.median(ratios)


def _late_shapes(path: Path) -> int:
    model = ir.load(path)
    order = GraphOrder(model.graph, ProvedShapes(model, {}))
    found = 0
    pending = [order]
    while pending:
        item = pending.pop()
        graph, ran = item.dependencies, item.priority.order
        readers = {node for node, is_reader in enumerate(graph.shape_readers) if is_reader}
        for node in readers:
            if graph.producers[node]:
                maker = graph.producers[node][0]
                between = ran[ran.index(maker) + 1 : ran.index(node)]
                found += not readers.intersection(graph.consumers[maker]).issuperset(between)
        pending += item.subgraphs
    return found


def _time_of(folder: Path, every: int) -> Figure:
    """Seconds that rules and order take on a large graph, one node in ``every`` a Shape."""
    model = ir.load(_large_graph(folder / "large.onnx", every))
    context = PassContext(Remarks("shape_size_reorder"))
    start = time.perf_counter()
    reorder(model, context, dims={})
    seconds = time.perf_counter() - start
    return Figure(f"{_LARGE} nodes, one in {every} a Shape", seconds, unit="s", bound=3)


def _large_graph(path: Path, every: int) -> Path:
    """Write residual blocks of symbolic size, whose sizes are read and used again."""
    rng = np.random.default_rng(0)
    nodes, value, earlier = [], "x", ["x"]
    names = (f"v{index}" for index in range(2 * _LARGE))
    while len(nodes) < _LARGE:
        out = next(names)
        if len(nodes) % every == 0:
            nodes.append(onnx.helper.make_node("Shape", [value], [out]))
            shaped = next(names)
            nodes.append(onnx.helper.make_node("Reshape", [value, out], [shaped]))
            out = shaped
        elif len(nodes) % 3:
            nodes.append(
                onnx.helper.make_node(("Relu", "Exp")[len(nodes) % 2], [value], [out])
            )
        else:
            other = earlier[-int(rng.integers(1, min(len(earlier), 50) + 1))]
            nodes.append(onnx.helper.make_node("Add", [value, other], [out]))
        value = out
        earlier.append(value)
    shape = ("batch", "seq", 64)
    graph = onnx.helper.make_graph(
        nodes,
        "large",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, shape)],
        [onnx.helper.make_tensor_value_info(value, onnx.TensorProto.FLOAT, None)],
    )
    onnx.save(onnx.helper.make_model(graph, ir_version=10), path)
    return path


def main(names: list[str]) -> None:
    """Print the peaks of every model."""
    print(f"{'MB: first run / four runs':32}{'':4}" + "".join(f"{o:>19}" for o in _ORDERS))
    with tempfile.TemporaryDirectory() as folder:
        for item in _measure(Path(folder), 1, names):
            for arena in (False, True):
                cells = (item.peaks[order, arena] for order in _ORDERS)
                text = "".join(f"{first:10.1f} /{four:7.1f}" for first, four in cells)
                note = f"{item.slower:6.3f} x time, {'same' if item.same else 'DIFFERS'}"
                note += f", {item.out_of_place} out of place, {item.late} Shapes late"
                note += "" if item.ordered else ", left as it was"
                print(
                    f"{item.name:32}{'on' if arena else 'off':4}{text}{note if arena else ''}",
                    flush=True,
                )
        if not names:
            for every in (20, 4):
                figure = _time_of(Path(folder), every)
                print(f"{figure.what}: {figure.ours:.2f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    main(parser.parse_args().names)
