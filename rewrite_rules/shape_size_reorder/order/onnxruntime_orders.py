# SPDX-License-Identifier: MIT
"""In which order onnxruntime runs the nodes of a graph.

A node's index is its position in the file, Constant nodes left out: they become initializers
while the model is loaded. onnxruntime has two orders over these indices
(``onnxruntime/core/graph/graph.cc`` and ``graph_viewer.cc``):

    DEFAULT         reverse depth-first walk from the nodes that no node reads, the last of
                    them first; of a node's producers the one with the highest index first
    PRIORITY_BASED  Kahn's algorithm; of the nodes that are ready, Shape and Size first, then
                    the lowest index: file order with every Shape right after its producer

    a1 a2 a3 b1 b2 b3 join shape(a1) reshape      in the file
    a1 shape b1 b2 b3 a2 a3 join reshape          DEFAULT
    a1 shape a2 a3 b1 b2 b3 join reshape          PRIORITY_BASED

An If, Loop or Scan waits for what its subgraphs read from outside, too. Each subgraph has an
order of its own. Names, the order of operands and the order of graph outputs mean nothing.
Both hold for a graph that is executed as it is: nodes that onnxruntime adds while it opens the
model (optimisers, functions put in place of their calls) get the highest indices.
"""

from __future__ import annotations

__all__ = ["Dependencies"]

import dataclasses
import heapq
from collections.abc import Sequence

import onnx_ir as ir

from rewrite_rules.graph.nodes import captures, is_constant, label
from rewrite_rules.graph.refusal import Refusal

# What PRIORITY_BASED runs as soon as it can; it does not look at domains.
_SHAPE_READERS = frozenset({"Shape", "Size"})


@dataclasses.dataclass(frozen=True)
class Dependencies:
    """What the orders of a graph depend on; nodes are positions in the file.

    Attributes:
        nodes: The nodes themselves.
        producers: For each node, the nodes whose outputs it or one of its subgraphs reads,
            ascending, each once.
        consumers: The same edges the other way.
        shape_readers: Whether a node is a Shape or Size.
        constants: Positions of the Constant nodes.
    """

    nodes: tuple[ir.Node, ...]
    producers: Sequence[Sequence[int]]
    consumers: Sequence[Sequence[int]]
    shape_readers: Sequence[bool]
    constants: Sequence[int]

    @classmethod
    def of(cls, graph: ir.Graph) -> Dependencies:
        """Read a graph.

        Raises:
            Refusal: If the graph is no DAG, or two nodes have an output of one name.
        """
        nodes = tuple(graph)
        _check_names(nodes)
        position = {node: index for index, node in enumerate(nodes)}
        constants = [index for index, node in enumerate(nodes) if is_constant(node)]
        absent = set(constants)
        producers: list[list[int]] = []
        consumers: list[list[int]] = [[] for _ in nodes]
        for index, node in enumerate(nodes):
            read = set()
            for value in (*node.inputs, *captures(node)):
                producer = None if value is None else value.producer()
                found = None if producer is None else position.get(producer)
                if found is not None and found not in absent:
                    read.add(found)
            producers.append(sorted(read))
            for found in producers[-1]:
                consumers[found].append(index)
        shape_readers = [node.op_type in _SHAPE_READERS for node in nodes]
        result = cls(nodes, producers, consumers, shape_readers, constants)
        result._check_acyclic()
        return result

    def default(self, file_order: Sequence[int] | None = None) -> list[int]:
        """Return the order of a default session.

        Args:
            file_order: The nodes as another file would have them; None for this one.
        """
        rank = self._ranks(file_order)
        absent = set(self.constants)
        stack = [
            node
            for node in file_order or range(len(self.nodes))
            if not self.consumers[node] and node not in absent
        ]
        result = list(self.constants)
        visited = [False] * len(self.nodes)
        while stack:
            node = stack.pop()
            if node < 0:  # all it waits for has run
                result.append(~node)
                continue
            if visited[node]:
                continue
            visited[node] = True
            stack.append(~node)
            producers = self.producers[node]
            if rank is not None and len(producers) > 1:
                producers = sorted(producers, key=rank.__getitem__)
            stack += [producer for producer in producers if not visited[producer]]
        return result

    def priority(self, file_order: Sequence[int] | None = None) -> list[int]:
        """Return the order of a session with ``ExecutionOrder.PRIORITY_BASED``.

        Args:
            file_order: The nodes as another file would have them; None for this one.
        """
        rank = self._ranks(file_order) or range(len(self.nodes))
        late = len(self.nodes)
        return self.smallest_first(
            [
                rank[node] if first else rank[node] + late
                for node, first in enumerate(self.shape_readers)
            ]
        )

    def smallest_first(self, key: Sequence[int]) -> list[int]:
        """Return the order in which the ready node with the smallest key runs next.

        Args:
            key: A number for each node, no two alike.
        """
        absent = set(self.constants)
        waiting = [len(producers) for producers in self.producers]
        at_key = {number: node for node, number in enumerate(key)}
        heap = [
            key[node]
            for node in range(len(self.nodes))
            if not waiting[node] and node not in absent
        ]
        heapq.heapify(heap)
        result = list(self.constants)
        while heap:
            node = at_key[heapq.heappop(heap)]
            result.append(node)
            for consumer in self.consumers[node]:
                waiting[consumer] -= 1
                if not waiting[consumer]:
                    heapq.heappush(heap, key[consumer])
        return result

    def is_order(self, order: Sequence[int]) -> bool:
        """Whether every node is there once, and after all that it reads."""
        rank = {node: index for index, node in enumerate(order)}
        return sorted(order) == list(range(len(self.nodes))) and all(
            rank[producer] < rank[node]
            for node, producers in enumerate(self.producers)
            for producer in producers
        )

    def _ranks(self, file_order: Sequence[int] | None) -> list[int] | None:
        if file_order is None:
            return None
        result = [0] * len(self.nodes)
        for index, node in enumerate(file_order):
            result[node] = index
        return result

    def _check_acyclic(self) -> None:
        run = self.priority()
        if len(run) < len(self.nodes):
            left = set(range(len(self.nodes))).difference(run)
            # Each node that is left waits for another one: going back ends in a circle.
            node = min(left)
            seen: dict[int, None] = {}
            while node not in seen:
                seen[node] = None
                node = next(producer for producer in self.producers[node] if producer in left)
            circle = list(seen)[list(seen).index(node) :]
            names = ", ".join(repr(label(self.nodes[index])) for index in circle[:4])
            more = "" if len(circle) <= 4 else f" and {len(circle) - 4} more"
            raise Refusal(f"nodes {names}{more} wait for each other: the graph is no DAG")


def _check_names(nodes: Sequence[ir.Node]) -> None:
    """Refuse two values of one name, as onnxruntime does."""
    makers: dict[str, ir.Node] = {}
    for node in nodes:
        for value in node.outputs:
            if value.name and makers.setdefault(value.name, node) is not node:
                raise Refusal(
                    f"value {value.name!r} is an output of nodes "
                    f"{label(makers[value.name])!r} and {label(node)!r}: names are unique"
                )
