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

import dataclasses
import heapq
from collections.abc import Iterable, Sequence

import onnx_ir as ir

from rewrite_rules.graph.nodes import captures, is_constant

# In ``Node.meta``: the position of the node, or of the last that it stands for, in the file
# that onnxruntime's optimisers read. They write nodes in the order of a default session.
PLACE = "ortplugins.place"
# What PRIORITY_BASED runs as soon as it can; it does not look at domains.
_SHAPE_READERS = frozenset({"Shape", "Size"})


@dataclasses.dataclass(frozen=True)
class Dependencies:
    """What the orders of a graph depend on; nodes are positions among ``nodes``.

    Producers of a node, whose outputs it or one of its subgraphs reads, ascend, each once;
    consumers are the same edges the other way.
    """

    nodes: tuple[ir.Node, ...]
    producers: Sequence[Sequence[int]]
    consumers: Sequence[Sequence[int]]
    shape_readers: Sequence[bool]

    @classmethod
    def of(cls, graph: ir.Graph) -> Dependencies:
        """Read a graph without cycles."""
        nodes = tuple(node for node in graph if not is_constant(node))
        position = {node: index for index, node in enumerate(nodes)}
        producers: list[list[int]] = []
        consumers: list[list[int]] = [[] for _ in nodes]
        for index, node in enumerate(nodes):
            read = set()
            for value in (*node.inputs, *captures(node)):
                producer = None if value is None else value.producer()
                found = None if producer is None else position.get(producer)
                if found is not None:
                    read.add(found)
            producers.append(sorted(read))
            for found in producers[-1]:
                consumers[found].append(index)
        shape_readers = [node.op_type in _SHAPE_READERS for node in nodes]
        return cls(nodes, producers, consumers, shape_readers)

    def default(self) -> list[int]:
        """Return the order of a default session."""
        stack = [node for node in range(len(self.nodes)) if not self.consumers[node]]
        result: list[int] = []
        visited = [False] * len(self.nodes)
        while stack:
            node = stack.pop()
            if node < 0:  # all it waits for has run
                result.append(~node)
            elif not visited[node]:
                visited[node] = True
                stack.append(~node)
                stack += [
                    producer for producer in self.producers[node] if not visited[producer]
                ]
        return result

    def priority(self) -> list[int]:
        """Return the order of a session with ``PRIORITY_BASED``."""
        return self.shapes_first(range(len(self.nodes)))

    def as_exported(self) -> list[int]:
        """Return the order of the file before onnxruntime's optimisers, where they ran.

        New nodes follow what they read.
        """
        places: list[int] = []
        for node, producers in zip(self.nodes, self.producers, strict=True):
            after = max((places[producer] for producer in producers), default=0)
            places.append(node.meta.get(PLACE, after))
        return sorted(range(len(places)), key=places.__getitem__)

    def shapes_first(self, order: Iterable[int]) -> list[int]:
        """Return an order in which each Shape and Size runs as soon as it can.

        The others run as in ``order``. Of the file's, it is that of PRIORITY_BASED.
        """
        late = len(self.nodes)
        key = {n: rank + late * (not self.shape_readers[n]) for rank, n in enumerate(order)}
        waiting = [len(producers) for producers in self.producers]
        heap = [(key[node], node) for node, left in enumerate(waiting) if not left]
        heapq.heapify(heap)
        result: list[int] = []
        while heap:
            _, node = heapq.heappop(heap)
            result.append(node)
            for consumer in self.consumers[node]:
                waiting[consumer] -= 1
                if not waiting[consumer]:
                    heapq.heappush(heap, (key[consumer], consumer))
        return result
