# SPDX-License-Identifier: MIT
"""The one analysis of shapes: which sizes are the same in every run, and which are known.

One walk over the graph, subgraphs included, gives each value the sizes of its dimensions, from
those of the graph's inputs and the operators (:mod:`.operator_shapes`, :mod:`.shape_data`).
It starts from what onnxruntime checks at each run: ranks and numbers in the declared shapes of
the graph's inputs, and the initializers. For estimates, open dimensions of inputs count as
numbers, by their names.

It does not start from annotations of other values, which nothing checks; names of
dimensions (``x[batch]`` and ``y[batch]`` may be fed with different sizes); a declared rank of
0 or size of -1, which onnxruntime takes for none declared; declared shapes of the inputs of
subgraphs, which change from one iteration to the next.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterable, Mapping

import onnx_ir as ir

from rewrite_rules.graph.nodes import captures, is_constant, subgraphs
from rewrite_rules.graph.parameters import constant, constant_ints
from rewrite_rules.remarks import Refusal
from rewrite_rules.shapes.dimensions import Dim, Dims, Shape, Unknowns, known
from rewrite_rules.shapes.node_facts import Facts, Integers, Site
from rewrite_rules.shapes.operator_shapes import output_shapes
from rewrite_rules.shapes.shape_data import output_integers

_MALFORMED = (ArithmeticError, IndexError, Refusal, ValueError)

DEFAULT_DIM = 128
"""What an open dimension counts as for estimates, unless a number is given for its name."""


class ProvedShapes(Facts):
    """Shapes of the values of a model whose nodes are sorted.

    Everything that is found holds in every run; with ``dims``, numbers of open dimensions by
    name, in runs of these sizes. Names without a number, which ``guessed`` has, count as
    :data:`DEFAULT_DIM` then. ``on_demand`` looks only at what a value that is asked for is
    computed from; else at the whole graph, and on demand at what was added since.
    ``nonempty``: what is found holds in runs that have no size of 0. ``opened``: numbers in
    declared shapes of inputs that count as unknown.
    """

    def __init__(
        self,
        model: ir.Model,
        dims: Mapping[str, int] | None = None,
        on_demand: bool = False,
        nonempty: bool = False,
        opened: Container[int] = (),
    ) -> None:
        self.unknowns = Unknowns()
        self.nonempty = nonempty
        self._numbers, self._opened = dims, opened
        self.guessed = set[str]()
        # The sizes of the model's inputs, and where they are.
        self.places: dict[int, tuple[ir.Value, int]] = {}
        if dims is not None:
            self.integer_types = ir.DataType.INT64, ir.DataType.INT32
        self._main = model.opset_imports
        self._opsets: dict[object, Mapping[str, int]] = {}
        self._shapes: dict[ir.Value, Shape] = {}
        self._integers: dict[ir.Value, Integers | None] = {}
        # What sizes meet at nodes (:attr:`.Unknowns.met`).
        self.met: dict[ir.Node, list[tuple[Iterable[Dim], Dim | None]]] = {}
        begin = self._enter if on_demand else self._walk
        begin(model.graph, model.opset_imports, main=True)
        for function in model.functions.values():
            begin(function.graph, function.opset_imports)

    def opset(self, node: ir.Node) -> int:
        """Return the version of the default domain where a node stands; 0 if not imported."""
        return self._opsets.get(node.graph, self._main).get("", 0)

    def shape(self, value: ir.Value) -> Shape:
        """Return the shape of a value or constant: equal ones are equal in every run."""
        shape = self._shapes.get(value)
        if shape is None and self._reach(value):
            shape = self._shapes[value]
        if shape is None:
            tensor = constant(value)
            if tensor is None:
                shape = self.unknowns.fresh()
            else:
                shape = tuple(known(int(size)) for size in tensor.shape.numpy())
            self._shapes[value] = shape
        return shape

    def dims(self, value: ir.Value | None, rank: int | None = None) -> Dims | None:
        """Return the dimensions of a value; None where it is not known to have ``rank``."""
        shape = 0 if value is None else self.shape(value)
        return shape if isinstance(shape, tuple) and rank in (None, len(shape)) else None

    def match(self, value: ir.Value | None, form: str, **bound: Dim) -> dict[str, Dim] | None:
        """Bind the dimensions of a value by name, ``"B H S 64"``; None where one is another.

        ``bound`` are those of other values, which a name keeps; ``_`` is any dimension.
        """
        names, found = form.split(), dict(bound)
        dims = self.dims(value, len(names))
        if dims is None:
            return None
        for name, dim in zip(names, dims, strict=True):
            wanted = known(int(name)) if name.isdigit() else found.setdefault(name, dim)
            if name != "_" and wanted != dim:
                return None
        return found

    def numbers(self, value: ir.Value | None) -> tuple[Dim | None, ...] | None:
        """Return what is known of a small int64 tensor's elements, in flat order."""
        found = None if value is None else self.integers(value)
        return None if found is None else found.numbers

    def replace(self, value: ir.Value, other: ir.Value) -> None:
        """Note that another value stands for one: it has the same shape and numbers."""
        self._shapes[other] = self.shape(value)
        self._integers[other] = self.integers(value)

    def note(self, value: ir.Value, shape: Dims) -> None:
        """Note the shape of a value, which whoever writes the node knows."""
        self._shapes[value] = shape

    def sizes(self, value: ir.Value) -> tuple[int, ...] | None:
        """Return the shape of a value as numbers; None where a dimension is not known."""
        shape = self.shape(value)
        if isinstance(shape, int) or any(dim[1] or dim[0] < 0 for dim in shape):
            return None
        return tuple(size for size, _ in shape)

    def agree(self, one: Dim, other: Dim) -> bool:
        """Whether sizes are equal if the inputs have one batch and length, on an axis each."""
        axes, others = ([self._input_axis(u) for u in dim[1]] for dim in (one, other))
        known_axes = one == other or -1 not in axes
        return known_axes and one[0] == other[0] and sorted(axes) == sorted(others)

    def _input_axis(self, unknown: int) -> int:
        """Return which axis of inputs has a size, or all that broadcast to it; else -1."""
        parts = self.unknowns.broadcast_parts((1, (unknown,)))
        places = [self.places.get(u) for part in parts for u in part[1] or (-1,)]
        axes = {-1 if place is None else place[1] for place in places}
        return axes.pop() if len(axes) == 1 else -1

    def place_in_inputs(self, dim: Dim) -> tuple[ir.Value, int] | None:
        """Return an input of the model and its axis that has a size, if any has."""
        return self.places.get(dim[1][0]) if dim[0] == len(dim[1]) == 1 else None

    def integers(self, value: ir.Value) -> Integers | None:
        """Return what is known of a small int64 tensor's elements; None for other tensors."""
        if value not in self._integers:
            self._reach(value)
        if value not in self._integers:
            self._integers[value] = _constant_integers(value, self.integer_types)
        return self._integers[value]

    # The walk

    def _walk(self, graph: ir.Graph, opsets: Mapping[str, int], main: bool = False) -> None:
        self._enter(graph, opsets, main)
        for node in graph:
            self._visit(node, opsets)

    def _enter(self, graph: ir.Graph, opsets: Mapping[str, int], main: bool = False) -> None:
        self._opsets[graph] = opsets
        for value in graph.inputs:
            self._define(value, self._declared(value, main))
        if main:
            self.places = {
                unknown: (value, axis)
                for value in graph.inputs
                for axis, dim in enumerate(self.dims(value) or ())
                for unknown in dim[1]
            }

    def _reach(self, value: ir.Value) -> bool:
        """Visit what a value is computed from; return whether its shape is noted then."""
        pending = [value.producer()]
        while pending:
            node = pending.pop()
            if node is None or is_constant(node) or node.outputs[0] in self._shapes:
                continue
            read = (v for v in (*node.inputs, *captures(node)) if v is not None)
            makers = [v.producer() for v in read if v not in self._shapes]
            missing = [
                maker for maker in makers if maker is not None and not is_constant(maker)
            ]
            if missing:
                pending += [node, *missing]
            else:
                self._visit(node, self._opsets.get(node.graph, self._main))
        return value in self._shapes

    def _visit(self, node: ir.Node, opsets: Mapping[str, int]) -> None:
        for subgraph in subgraphs(node):
            self._walk(subgraph, opsets)
        if is_constant(node):
            return  # looked at where it is needed
        site = Site(node, self, opsets.get(node.domain))
        met = len(self.unknowns.met)
        shapes: list[Shape | None] = []
        with contextlib.suppress(*_MALFORMED):
            is_if = node.op_type == "If" and node.domain == ""
            shapes = self._joined(node) if is_if else list(output_shapes(site))
        self.met[node] = self.unknowns.met[met:]
        for i, value in enumerate(node.outputs):
            self._define(value, shapes[i] if i < len(shapes) else None)
        if node.outputs:
            self._integers[node.outputs[0]] = None
            with contextlib.suppress(*_MALFORMED):
                self._integers[node.outputs[0]] = output_integers(site)

    def _define(self, value: ir.Value, shape: Shape | None) -> None:
        self._shapes[value] = self.unknowns.fresh() if shape is None else shape

    def _declared(self, value: ir.Value, main: bool) -> Shape | None:
        """Return the shape of a graph's input, as far as it is sure to have it."""
        # Of the main graph's inputs, onnxruntime checks ranks and numbers at each run.
        if not main or not isinstance(value.type, ir.TensorType) or not value.shape:
            return None
        return tuple(
            known(dim)
            if isinstance(dim, int) and dim >= 0 and dim not in self._opened
            else self._open(dim)
            for dim in value.shape
        )

    def _open(self, dim: int | ir.SymbolicDim) -> Dim:
        """Return an open dimension of an input: unknown, or the number that it counts as."""
        if self._numbers is None:
            return self.unknowns.fresh_dim()
        name = "?" if isinstance(dim, int) else dim.value or "?"
        if name not in self._numbers:
            self.guessed.add(name)
        return known(self._numbers.get(name, DEFAULT_DIM))

    def _joined(self, node: ir.Node) -> list[Shape | None]:
        """The shapes of an If, where both of its branches agree."""
        branches = list(subgraphs(node))
        if len(branches) != 2:
            return []
        result: list[Shape | None] = []
        for ends in zip(*(branch.outputs for branch in branches), strict=False):
            one, other = (self.shape(end) for end in ends)
            if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
                pairs = zip(one, other, strict=True)
                fresh = self.unknowns.fresh_dim
                result.append(tuple(a if a == b else fresh() for a, b in pairs))
            else:
                result.append(one if one == other else None)
        return result


def _constant_integers(value: ir.Value, types: tuple[ir.DataType, ...]) -> Integers | None:
    tensor, numbers = constant(value), None
    if tensor is not None and tensor.dtype in types:
        with contextlib.suppress(Refusal):
            numbers = constant_ints(value)
    if tensor is None or numbers is None:
        return None
    return Integers(tuple(known(n) for n in numbers), tuple(tensor.shape.numpy()))
