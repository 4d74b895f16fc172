# SPDX-License-Identifier: MIT
"""Which values of a model have the same shape in every run, and which comes first.

One walk over the graph, subgraphs included, gives each value the sizes of its dimensions. They
start from what onnxruntime checks at each run: ranks and numbers in the declared shapes of the
graph's inputs, and the initializers themselves. They do not start from

- annotations of other values: nothing checks them, and onnx's shape inference keeps them where
  it knows no better (onnxruntime itself folds a Shape by a wrong annotation);
- names of dimensions: ``x[batch]`` and ``y[batch]`` may be fed with different sizes, and so
  may both dimensions of ``x[n, n]``;
- a declared rank of 0 or size of -1, which onnxruntime takes for none declared;
- declared shapes of the inputs of subgraphs, which change from one iteration to the next.
"""

from __future__ import annotations

__all__ = ["ProvedShapes"]

from collections.abc import Hashable, Mapping

import onnx_ir as ir

from rewrite_rules.graph.constants import constant, constant_ints
from rewrite_rules.graph.nodes import subgraphs
from rewrite_rules.graph.refusal import Refusal
from rewrite_rules.shapes.dimensions import Dim, Shape, Unknowns, known
from rewrite_rules.shapes.node_facts import Integers, Site
from rewrite_rules.shapes.operator_shapes import output_shapes
from rewrite_rules.shapes.shape_data import output_integers

_MALFORMED = (Refusal, IndexError, ValueError)
_MOST_INTS = 64


class ProvedShapes:
    """Shapes of the values of a sorted model, and of what rewrites put into it.

    Attributes:
        unknowns: The sizes that only a run tells.
    """

    def __init__(self, model: ir.Model) -> None:
        self.unknowns = Unknowns()
        self._opsets: dict[object, Mapping[str, int]] = {}
        self._shapes: dict[ir.Value, Shape] = {}
        self._integers: dict[ir.Value, Integers | None] = {}
        self._counts: dict[Shape, Dim] = {}
        self._places: dict[ir.Value, int] = {}
        self._node_places: dict[ir.Node, int] = {}
        self._outer: dict[object, object] = {}
        self._first: dict[tuple[object, Hashable], ir.Value] = {}
        self._dims: dict[tuple[object, Dim], tuple[ir.Value, int]] = {}
        self._clock = 0
        self._walk(model.graph, None, model.opset_imports)
        for function in model.functions.values():
            self._walk(function.graph, None, function.opset_imports)

    def opset(self, node: ir.Node) -> int:
        """Version of the default domain where a node stands; 0 where it isn't imported."""
        return self._opsets[node.graph].get("", 0)

    # What is known of a value

    def shape(self, value: ir.Value) -> Shape:
        """The shape of a value, a constant's too."""
        shape = self._shapes.get(value)
        if shape is None:
            tensor = constant(value)
            if tensor is None:
                shape = self.unknowns.fresh()
            else:
                shape = tuple(known(int(size)) for size in tensor.shape.numpy())
            self._shapes[value] = shape
        return shape

    def count(self, value: ir.Value) -> Dim:
        """How many elements a value has."""
        shape = self.shape(value)
        count = self._counts.get(shape)
        if count is None:
            if isinstance(shape, tuple):
                count = self.unknowns.product(shape)
            else:
                count = self.unknowns.remembered("count", shape)
            self._counts[shape] = count
        return count

    def integers(self, value: ir.Value) -> Integers | None:
        """The numbers of a small int64 tensor, as far as they are known."""
        if value not in self._integers:
            self._integers[value] = _constant_integers(value)
        return self._integers[value]

    def place(self, value: ir.Value) -> int:
        """Where a value is computed; smaller is earlier, -1 for inputs and initializers."""
        return self._places.get(value, -1)

    # Which value comes first

    def first_of_shape(self, shape: Shape, reader: ir.Node) -> ir.Value | None:
        """The first value of a shape, if a node can read it."""
        return self._first_before(("shape", shape), reader)

    def first_of_count(self, count: Dim, reader: ir.Node) -> ir.Value | None:
        """The first value of so many elements, if a node can read it."""
        return self._first_before(("count", count), reader)

    def first_of_dim(self, dim: Dim, reader: ir.Node) -> tuple[ir.Value, int] | None:
        """The first value with a dimension of a size, and which it is."""
        for graph in self._scopes(reader):
            found = self._dims.get((graph, dim))
            if found is not None and self._may_read(found[0], graph, reader):
                return found
        return None

    def add(self, value: ir.Value, integers: Integers | None, reader: ir.Node) -> None:
        """Take down a new value that holds shapes and is computed where ``reader`` is."""
        if integers is not None:
            self._shapes[value] = () if integers.scalar else (known(len(integers.numbers)),)
        self._integers[value] = integers
        self._places[value] = self._node_places[reader]
        node = value.producer()
        assert node is not None
        self._node_places[node] = self._node_places[reader]

    def _first_before(self, what: Hashable, reader: ir.Node) -> ir.Value | None:
        for graph in self._scopes(reader):
            found = self._first.get((graph, what))
            if found is not None and self._may_read(found, graph, reader):
                return found
        return None

    def _may_read(self, value: ir.Value, graph: object, reader: ir.Node) -> bool:
        """Whether a value is there and costs nothing to read.

        A body that newly captured a tensor would keep it alive until the body has run; what
        is fed lives as long as the run anyway.
        """
        place = self.place(value)
        return place < 0 or (graph is reader.graph and place < self._node_places[reader])

    def _scopes(self, reader: ir.Node) -> list[object]:
        """The graphs whose values a node can read, the outermost first."""
        scopes = []
        graph: object = reader.graph
        while graph is not None:
            scopes.append(graph)
            graph = self._outer.get(graph)
        return scopes[::-1]

    # The walk

    def _walk(self, graph: ir.Graph, outer: ir.Node | None, opsets: Mapping[str, int]) -> None:
        self._opsets[graph] = opsets
        self._outer[graph] = None if outer is None else outer.graph
        place = -1 if outer is None else self._node_places[outer]
        main = not self._node_places
        for value in graph.inputs:
            self._define(value, self._declared(value) if main else None, graph, place)
        for value in graph.initializers.values():
            self._places[value] = place
        for node in graph:
            self._node_places[node] = self._tick()
            site = Site(node, self, opsets.get(node.domain))
            for body in subgraphs(node):
                self._walk(body, node, opsets)
            shapes, place = self._output_shapes(site), self._tick()
            if node.op_type in ("Reshape", "Squeeze") and node.domain == "" and node.inputs:
                shapes = self._keep_count(node, shapes)
            for i, value in enumerate(node.outputs):
                self._define(value, shapes[i] if i < len(shapes) else None, graph, place)
            if node.outputs and node.op_type != "Constant":
                self._integers[node.outputs[0]] = self._output_integers(site)

    def _keep_count(self, node: ir.Node, shapes: list[Shape | None]) -> list[Shape | None]:
        """Elements stay as many where not even the rank of the result is known."""
        shape = shapes[0] if shapes else None
        source = node.inputs[0]
        if source is None:
            return shapes
        shape = self.unknowns.fresh() if shape is None else shape
        self._counts.setdefault(shape, self.count(source))
        return [shape]

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _declared(self, value: ir.Value) -> Shape | None:
        """The shape of an input of the main graph, as onnxruntime checks it at each run."""
        if not isinstance(value.type, ir.TensorType) or not value.shape:
            return None
        return tuple(
            known(dim) if isinstance(dim, int) and dim >= 0 else (1, (self.unknowns.fresh(),))
            for dim in value.shape
        )

    def _output_shapes(self, site: Site) -> list[Shape | None]:
        node = site.node
        if node.op_type == "If" and node.domain == "":
            return self._joined(node)
        if node.op_type == "Constant" and node.domain == "":
            return []  # looked at where it is needed
        try:
            return list(output_shapes(site))
        except _MALFORMED:
            return []

    def _output_integers(self, site: Site) -> Integers | None:
        try:
            return output_integers(site)
        except _MALFORMED:
            return None

    def _joined(self, node: ir.Node) -> list[Shape | None]:
        """The shapes of an If, where both of its subgraphs agree."""
        branches = list(subgraphs(node))
        if len(branches) != 2:
            return []
        result: list[Shape | None] = []
        for ends in zip(*(body.outputs for body in branches), strict=False):
            one, other = (self.shape(end) for end in ends)
            if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
                result.append(
                    tuple(
                        a if a == b else (1, (self.unknowns.fresh(),))
                        for a, b in zip(one, other, strict=True)
                    )
                )
            else:
                result.append(one if one == other else None)
        return result

    def _define(self, value: ir.Value, shape: Shape | None, scope: object, place: int) -> None:
        """Take down the shape of a value and whether it is the first that has it."""
        self._places[value] = place
        if shape is None:
            node = value.producer()
            if node is not None and node.op_type == "Constant":
                return
            shape = self.unknowns.fresh()
        self._shapes[value] = shape
        # A sequence, say, has no shape of its own.
        if value.type is not None and not isinstance(value.type, ir.TensorType):
            return
        self._first.setdefault((scope, ("shape", shape)), value)
        self._first.setdefault((scope, ("count", self.count(value))), value)
        if isinstance(shape, tuple):
            for axis, dim in enumerate(shape):
                if dim[1]:
                    self._dims.setdefault((scope, dim), (value, axis))


def _constant_integers(value: ir.Value) -> Integers | None:
    tensor = constant(value)
    if tensor is None or tensor.dtype is not ir.DataType.INT64:
        return None
    if len(tensor.shape) > 1 or tensor.size > _MOST_INTS:
        return None
    try:
        numbers = constant_ints(value)
    except Refusal:
        return None
    if numbers is None:
        return None
    return Integers(tuple(known(n) for n in numbers), scalar=not len(tensor.shape))
