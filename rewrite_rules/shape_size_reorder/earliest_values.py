# SPDX-License-Identifier: MIT
"""Which value comes first in a graph, of those that have the same sizes in every run."""

from __future__ import annotations

import onnx_ir as ir

from rewrite_rules.graph.nodes import subgraphs
from rewrite_rules.shapes.dimensions import Dim, Shape
from rewrite_rules.shapes.proved_shapes import ProvedShapes


class EarliestValues:
    """The first value of each shape, number of elements and dimension in each graph.

    Args:
        model: Stays as it is; its nodes are sorted.
        shapes: What is proved of its values.
    """

    def __init__(self, model: ir.Model, shapes: ProvedShapes) -> None:
        self._shapes = shapes
        self._places: dict[ir.Value, int] = {}
        self._node_places: dict[ir.Node, int] = {}
        self._outer: dict[object, object] = {}
        self._first: dict[tuple[object, str, Shape | Dim], ir.Value] = {}
        for graph in (model.graph, *(function.graph for function in model.functions.values())):
            self._walk(graph, None)

    def place(self, value: ir.Value) -> int:
        """Return where a value is computed; -1 for inputs and initializers."""
        return self._places.get(value, -1)

    def first(self, kind: str, size: Shape | Dim, reader: ir.Node) -> ir.Value | None:
        """Return the first value of a size that a node can read, from the outermost graph on.

        A subgraph that newly captured a tensor would keep it alive until the subgraph has
        run; what is fed lives as long as the run anyway.

        Args:
            kind: What the size is: a "shape", a "count" of elements, or a "dim" of a shape.
            size: The size.
            reader: The node.
        """
        scopes = []
        graph: object = reader.graph
        while graph is not None:
            scopes.append(graph)
            graph = self._outer.get(graph)
        for graph in reversed(scopes):
            found = self._first.get((graph, kind, size))
            if found is None:
                continue
            place = self.place(found)
            if place < 0 or (graph is reader.graph and place <= self._node_places[reader]):
                return found
        return None

    def _walk(self, graph: ir.Graph, outer: ir.Node | None) -> None:
        self._outer[graph] = None if outer is None else outer.graph
        place = -1 if outer is None else self._node_places[outer]
        for value in graph.inputs:
            self._add(value, graph, place)
        for value in graph.initializers.values():
            self._places[value] = place
        for node in graph:
            self._node_places[node] = len(self._node_places)
            for subgraph in subgraphs(node):
                self._walk(subgraph, node)
            # Behind the values of its subgraphs.
            place = len(self._node_places)
            for value in node.outputs:
                self._places[value] = place
                if node.op_type != "Constant":
                    self._add(value, graph, place)

    def _add(self, value: ir.Value, graph: ir.Graph, place: int) -> None:
        self._places[value] = place
        if value.name == "":  # an output that is left out
            return
        # A sequence, say, has no shape of its own.
        if value.type is not None and not isinstance(value.type, ir.TensorType):
            return
        shape = self._shapes.shape(value)
        self._first.setdefault((graph, "shape", shape), value)
        self._first.setdefault((graph, "count", self._shapes.count(value)), value)
        if isinstance(shape, tuple):
            for dim in shape:
                if dim[1]:
                    self._first.setdefault((graph, "dim", dim), value)
