# SPDX-License-Identifier: MIT
"""Files whose default order, a depth-first walk from the end, holds few bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import onnx_ir as ir

from rewrite_rules.graph.nodes import subgraphs
from rewrite_rules.shape_size_reorder.order.heuristics import HeuristicBytes, subtrees
from rewrite_rules.shape_size_reorder.order.memory_plan import (
    MemoryModel,
    inner_bytes,
)
from rewrite_rules.shape_size_reorder.order.onnxruntime_orders import Dependencies, ranks
from rewrite_rules.shape_size_reorder.order.search import (
    SimulatedOrder,
    memory_order,
    rearrange,
    shape_distances,
)
from rewrite_rules.shapes.concrete_shapes import ConcreteShapes


@dataclasses.dataclass(frozen=True)
class DefaultFile:
    """A file that a default session, which can't be told an order, runs well.

    Attributes:
        graph: The graph; it is as it was.
        file_order: How the nodes are to lie in the file: positions in the graph.
        runs: What a default session runs then.
        output_bytes: Bytes of the graph's outputs.
        subgraphs: The same for each body of each If, Loop and Scan.
    """

    graph: ir.Graph
    file_order: tuple[int, ...]
    runs: SimulatedOrder
    output_bytes: int
    subgraphs: tuple[DefaultFile, ...]

    def apply(self) -> None:
        """Put the nodes of the graph and of all subgraphs into the order of the file."""
        for body in self.subgraphs:
            body.apply()
        rearrange(self.graph, self.file_order)


def closest_default_order(
    graph: ir.Graph,
    wanted: Sequence[int],
    shapes: ConcreteShapes,
    parent: ir.Node | None = None,
) -> DefaultFile:
    """Find a file that a default session runs nearly as wanted; the graph stays as it is.

    A depth-first walk can't run every order: the one with the lowest peak of those that were
    tried is returned.

    Args:
        graph: The graph; each of its subgraphs gets a file order of its own, wanted being what
            :func:`memory_order` finds for it.
        wanted: Positions of all nodes as they should run.
        shapes: The shapes of its values.
        parent: The node whose body the graph is.

    Raises:
        Refusal: If the graph is not a DAG, or two nodes have an output of one name.
        ValueError: If ``wanted`` does not have every node once, after what it reads.
    """
    dependencies = Dependencies.of(graph)
    if not dependencies.is_order(wanted):
        raise ValueError(
            f"not an order of the {len(dependencies.nodes)} nodes: each has to be there "
            "once, after all that it reads"
        )
    model = MemoryModel(graph, dependencies, shapes, parent)
    files: list[DefaultFile] = []
    inner: dict[int, int] = {}
    for index, node in enumerate(dependencies.nodes):
        parts = []
        for subgraph in subgraphs(node):
            order = memory_order(subgraph, shapes, node).ours.order
            parts.append(closest_default_order(subgraph, order, shapes, node))
        files += parts
        if parts:
            inner[index] = inner_bytes(node, [(p.runs.peak, p.output_bytes) for p in parts])
    simulated = []
    for file_order in _default_files(dependencies, model, wanted):
        runs = dependencies.default(file_order)
        simulated.append((model.timeline(runs, inner), file_order, runs))
    timeline, file_order, runs = min(simulated, key=lambda item: item[0].peak)
    return DefaultFile(
        graph=graph,
        file_order=tuple(file_order),
        runs=SimulatedOrder(tuple(runs), timeline, shape_distances(dependencies, runs)),
        output_bytes=model.output_bytes(),
        subgraphs=tuple(files),
    )


def _default_files(
    dependencies: Dependencies, model: MemoryModel, wanted: Sequence[int]
) -> Iterator[list[int]]:
    """Files whose depth-first walk may come close to an order.

    Of the producers of a node, the one with the highest index runs first. So positions are
    given from the end of the file on, to the node that is to run earliest among those whose
    consumers have one; or to the one with the earliest node behind it.
    """
    count = len(dependencies.nodes)
    yield list(range(count))
    yield list(wanted)
    tensors = HeuristicBytes(dependencies, model, {})
    for order in (wanted, subtrees(tensors)):
        rank = ranks(order)
        yield dependencies.smallest_last(rank)
        earliest = list(rank)
        for node in order:
            for producer in dependencies.producers[node]:
                earliest[node] = min(earliest[node], earliest[producer])
        # Branches of one beginning are all as early: the shorter way first.
        keys = sorted(range(count), key=lambda node: (earliest[node], rank[node]))
        yield dependencies.smallest_last(ranks(keys))
