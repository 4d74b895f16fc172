# SPDX-License-Identifier: MIT
"""Computes an order of the nodes of a graph that holds few bytes at a time.

Every Shape and Size runs directly after its producer, and so does the small chain of integers
that hangs on it. Of the others, several orders are made (the two native ones, and
:mod:`.heuristics`) and simulated; the best is taken.

The result is an order that onnxruntime's ``PRIORITY_BASED`` runs as it is, or what the best of
three files runs by default.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from rewrite_rules.graph.nodes import is_constant, subgraphs
from rewrite_rules.shape_size_reorder.heuristics import candidate_orders
from rewrite_rules.shape_size_reorder.memory_plan import MemoryModel, inner_bytes
from rewrite_rules.shape_size_reorder.onnxruntime_orders import ranks
from rewrite_rules.shapes.proved_shapes import ConcreteShapes

# A chain's tensors are shapes; anything larger is data.
_CHAIN_BYTES = 4096


@dataclasses.dataclass(frozen=True)
class SimulatedOrder:
    """One order and what it costs.

    Attributes:
        order: Positions of the nodes in the graph, as they run; Constant nodes don't count.
        live: Bytes held while each of them runs, int64 [nodes].
    """

    order: tuple[int, ...]
    live: npt.NDArray[np.int64]

    @property
    def peak(self) -> int:
        return _peak(self.live)


@dataclasses.dataclass(frozen=True)
class GraphOrder:
    """The order computed for a graph, beside those of onnxruntime.

    Attributes:
        file_order: How nodes are to lie in the file: positions in the graph.
        ours: How they then run, with ``ExecutionOrder.PRIORITY_BASED`` or by default.
        default, priority: What a session runs with the file as it is.
        chain_bytes: Bytes of all results of Shape, Size and the chains on them. So much, at
            most, may ours lie above the better native order, for having them early.
        unknown_values: Values whose size is a guess. Subgraphs included.
        subgraphs: The same for each subgraph, in the order of the file.
        reuse: Whether the session that runs ours reuses buffers.
    """

    graph: ir.Graph
    file_order: tuple[int, ...]
    ours: SimulatedOrder
    default: SimulatedOrder
    priority: SimulatedOrder
    chain_bytes: int
    unknown_values: tuple[str, ...]
    subgraphs: tuple[GraphOrder, ...]
    model: MemoryModel = dataclasses.field(repr=False, compare=False)
    reuse: bool = True

    def arena_bytes(self) -> int:
        """Bytes that ours takes of an arena, subgraphs left out."""
        return self.model.arena_bytes(self.ours.order, self.reuse)

    @property
    def worthwhile(self) -> bool:
        """Whether ours never holds more than either native order."""
        best = min(self.default.peak, self.priority.peak)
        return self.ours.peak <= best + self.chain_bytes

    def apply(self, *, shapes_in_front: bool = False) -> set[ir.Node]:
        """Put the nodes of the graph and of all subgraphs into the order of the file.

        Return what is in front of the others: each Shape and Size, if asked to.
        """
        bodies = (body.apply(shapes_in_front=shapes_in_front) for body in self.subgraphs)
        in_front = set().union(*bodies)
        nodes = [node for node in self.graph if not is_constant(node)]
        order = list(self.file_order)
        if shapes_in_front:
            readers = self.model.dependencies.shape_readers
            order.sort(key=lambda index: not readers[index])
            in_front.update(nodes[index] for index in order if readers[index])
        self.graph.remove(nodes)
        self.graph.extend(nodes[index] for index in order)
        return in_front


def memory_order(
    graph: ir.Graph,
    shapes: ConcreteShapes,
    parent: ir.Node | None = None,
    *,
    reuse: bool = True,
    for_default_order: bool = False,
) -> GraphOrder:
    """Compute an order with a low peak of live bytes; the graph stays as it is.

    ``parent`` is the node whose body the graph is. The session that will run ours reuses
    buffers or not, and runs the file by default or by ``PRIORITY_BASED``.
    """
    model = MemoryModel(graph, shapes, parent)
    dependencies = model.dependencies
    of_session = {"reuse": reuse, "for_default_order": for_default_order}
    bodies = {
        index: [memory_order(body, shapes, node, **of_session) for body in subgraphs(node)]
        for index, node in enumerate(dependencies.nodes)
    }
    classes, chain_bytes = _chain_classes(model)

    def inner(name: str) -> dict[int, int]:
        return {
            index: inner_bytes(
                dependencies.nodes[index],
                [(getattr(o, name).peak, o.model.output_bytes()) for o in orders],
            )
            for index, orders in bodies.items()
            if orders
        }

    def simulated(
        order: Sequence[int], inside: Mapping[int, int], reuse: bool = True
    ) -> SimulatedOrder:
        return SimulatedOrder(tuple(order), model.live(order, inside, reuse))

    def peak_of(order: Sequence[int]) -> int:
        return _peak(model.live(order, inside, reuse))

    def settle(order: Sequence[int]) -> tuple[int, ...]:
        """Move shapes and chains to where they can run first; PRIORITY_BASED runs that."""
        pairs = zip(classes, ranks(order), strict=True)
        return tuple(dependencies.smallest_first([c * len(order) + rank for c, rank in pairs]))

    inside = inner("ours")
    default = simulated(dependencies.default(), inner("default"))
    priority = simulated(dependencies.priority(), inner("priority"))
    best = settle(priority.order)
    peak = peak_of(best)
    lowest = max(map(model.needed_by, range(len(dependencies.nodes))), default=0)
    for order in itertools.chain([default.order], candidate_orders(model, inside)):
        if peak <= lowest:
            break
        settled = settle(order)
        reached = peak_of(settled)
        if reached < peak:
            best, peak = settled, reached
    runs = file_order = best
    if for_default_order:
        # As it is, as wanted, and filled from its end on with what is to run first.
        filled = tuple(dependencies.smallest_last(ranks(best)))
        runs, file_order = min(
            (
                (tuple(dependencies.default(file)), file)
                for file in (tuple(range(len(best))), best, filled)
            ),
            key=lambda pair: peak_of(pair[0]),
        )
    orders = [order for found in bodies.values() for order in found]
    unknown_values = [name for order in orders for name in order.unknown_values]
    return GraphOrder(
        graph=graph,
        file_order=file_order,
        ours=simulated(runs, inside, reuse),
        default=default,
        priority=priority,
        chain_bytes=chain_bytes + sum(order.chain_bytes for order in orders),
        unknown_values=(*model.unknown_values, *unknown_values),
        subgraphs=tuple(orders),
        model=model,
        reuse=reuse,
    )


def _peak(live: npt.NDArray[np.int64]) -> int:
    return int(live.max(initial=0))


def _chain_classes(model: MemoryModel) -> tuple[list[int], int]:
    """Return 0 for each Shape and Size, 1 for the chains on them, 2 for others; bytes of both.

    A chain is of small integers computed from nothing but shapes and constants.
    """
    dependencies, chain_bytes = model.dependencies, 0
    classes = [2] * len(dependencies.nodes)
    for index in dependencies.default():
        node = dependencies.nodes[index]
        size = sum(model.sizes[value] for value in model.makes[index])
        if dependencies.shape_readers[index]:
            classes[index] = 0
        elif (
            size <= _CHAIN_BYTES
            and dependencies.producers[index]
            and all(classes[p] < 2 for p in dependencies.producers[index])
            and all(_comes_from_node_or_file(value) for value in node.inputs)
            and not any(True for _ in subgraphs(node))
        ):
            classes[index] = 1
        else:
            continue
        chain_bytes += size
    return classes, chain_bytes


def _comes_from_node_or_file(value: ir.Value | None) -> bool:
    """Whether an input is not a tensor that the caller feeds or a graph around has."""
    return (
        value is None
        or value.producer() is not None
        or (value.is_initializer() and not value.is_graph_input())
    )
