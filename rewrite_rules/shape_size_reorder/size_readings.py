# SPDX-License-Identifier: MIT
"""Where the numbers of shape computations can be read first: the analysis before the rules.

A node of sizes is read better where what is read comes earlier, or from the same value in
fewer nodes; so no reading is found twice. All is decided before any node is rewritten.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Hashable, Iterator
from typing import NamedTuple

import onnx_ir as ir

from rewrite_rules.graph.nodes import all_nodes, input_of, subgraphs
from rewrite_rules.shapes.dimensions import Dim, Dims, Shape
from rewrite_rules.shapes.node_facts import Integers
from rewrite_rules.shapes.proved_shapes import ProvedShapes
from rewrite_rules.shapes.shape_data import INTEGER_OPERATORS

# Operators that only pick what is in their first input.
_PICKS = frozenset({"Cast", "Gather", "Identity", "Reshape", "Slice", "Squeeze", "Unsqueeze"})
# Operators whose numbers are read from a value directly, where they can be.
_REREAD = frozenset({"Concat", "Gather", "Shape", "Slice", "Squeeze", "Unsqueeze"})
# Operators whose numbers may be constant.
FOLDED = _PICKS | _REREAD | {"Add", "Div", "Mul", "Size", "Sub"}
_LONG_CHAIN = 4
_SPAN_OPSET = 15


class Law(enum.Enum):
    """How numbers are read; a rule for each."""

    CONSTANT = enum.auto()  # not at all: no run can change them
    SPAN = enum.auto()  # sizes of one value side by side
    WHOLE = enum.auto()  # all sizes, of whatever rank, or the number of elements
    PICK = enum.auto()  # sizes of one value in any order


_NODES = {Law.CONSTANT: 0, Law.SPAN: 1, Law.WHOLE: 1, Law.PICK: 2}


@dataclasses.dataclass(frozen=True)
class Reading:
    """What a node's numbers are read from.

    Attributes:
        law: How, which also says in how many nodes.
        source: The value whose sizes they are; None of constants.
        axes: Of the sizes, of SPAN and PICK.
        rank: Of the source, of SPAN.
        is_scalar: Whether the node gives one number without an axis.
        constants: The numbers, of CONSTANT.
    """

    law: Law
    source: ir.Value | None = None
    axes: tuple[int, ...] = ()
    rank: int = 0
    is_scalar: bool = False
    constants: Integers | None = None

    @property
    def nodes(self) -> int:
        return _NODES[self.law]


class _Now(NamedTuple):
    """What a node's numbers depend on: the latest place, nodes from there, the value read."""

    place: int
    nodes: int = 1 + _LONG_CHAIN
    source: ir.Value | None = None


class _EarliestValues:
    """The first value of each shape, number of elements and dimension in each graph."""

    def __init__(self, model: ir.Model, shapes: ProvedShapes) -> None:
        self._shapes = shapes
        self._places: dict[ir.Value, int] = {}
        self._node_places: dict[ir.Node, int] = {}
        self._outer: dict[object, object] = {}
        self._first: dict[tuple[object, str, Shape | Dim], ir.Value] = {}
        for graph in (model.graph, *(function.graph for function in model.functions.values())):
            self._walk(graph, None)

    def place(self, value: ir.Value | None) -> int:
        """Return where a value is computed; -1 for inputs, initializers and constants."""
        return -1 if value is None else self._places.get(value, -1)

    def first(self, kind: str, size: Shape | Dim, reader: ir.Node) -> ir.Value | None:
        """Return the first value of a "shape", "count" or "dim", from the outermost graph on.

        A tensor that a subgraph newly captured would live until that has run.
        """
        scopes = []
        graph: object = reader.graph
        while graph is not None:
            scopes.append(graph)
            graph = self._outer.get(graph)
        for graph in reversed(scopes):
            found = self._first.get((graph, kind, size))
            # What comes later than what a reader reads now is no better.
            if found is not None and (graph is reader.graph or self.place(found) < 0):
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
        shape = self._shapes.shape(value)
        self._first.setdefault((graph, "shape", shape), value)
        self._first.setdefault((graph, "count", self._shapes.count(value)), value)
        if isinstance(shape, tuple):
            for dim in shape:
                if dim[1]:
                    self._first.setdefault((graph, "dim", dim), value)


class SizeReadings:
    """What each node of sizes that can be read better is read from; the nodes are sorted."""

    def __init__(self, model: ir.Model, shapes: ProvedShapes) -> None:
        self._shapes = shapes
        self._earliest = _EarliestValues(model, shapes)
        self._divisors = _divisors(model)
        self._now: dict[ir.Value, _Now] = {}
        self.better: dict[ir.Node, Reading] = {}
        for graph in (model.graph, *(function.graph for function in model.functions.values())):
            self._walk(graph)

    def _walk(self, graph: ir.Graph) -> None:
        for node in graph:
            for subgraph in subgraphs(node):
                self._walk(subgraph)
            out = node.outputs[0] if len(node.outputs) == 1 else None
            # A node without a consumer never mattered.
            if out is None or node.domain or node.op_type not in FOLDED:
                continue
            if not (out.uses() or out.is_graph_output()) or not node.inputs:
                continue
            now = self._reads(node)
            if now is None:
                continue
            found = self._find(node, now)
            if found is not None:
                self.better[node] = found
                now = _Now(self._earliest.place(found.source), found.nodes, found.source)
            self._now[out] = now

    def _reads(self, node: ir.Node) -> _Now | None:
        """Return what a node's numbers depend on; None where nothing is known of them."""
        if node.op_type in ("Shape", "Size"):
            source = node.inputs[0]
            return None if source is None else _Now(self._earliest.place(source), 1, source)
        inputs = [self._now[value] for value in node.inputs if value in self._now]
        place = max((now.place for now in inputs), default=-1)
        first = self._now.get(node.inputs[0]) if node.inputs[0] is not None else None
        if node.op_type not in _PICKS or first is None:
            return _Now(place)
        return _Now(place, first.nodes + 1, first.source)

    def _find(self, node: ir.Node, now: _Now) -> Reading | None:
        integers = self._shapes.integers(node.outputs[0])
        if integers is not None and integers.constants is not None:
            is_divisor = node.outputs[0] in self._divisors
            return None if is_divisor else Reading(Law.CONSTANT, constants=integers)
        if integers is None or integers.known is None or node.op_type == "Size":
            return self._find_whole(node, now)
        dims, is_scalar = integers.known, not integers.shape
        if node.op_type not in _REREAD or len(integers.shape) > 1:
            return None
        sources = [] if is_scalar else [self._earliest.first("shape", dims, node)]
        sources += [self._earliest.first("dim", dim, node) for dim in dims]
        sources.append(now.source)
        readings = [
            reading
            for source in dict.fromkeys(sources)
            if source is not None
            for reading in self._of(source, dims, is_scalar, self._shapes.opset(node))
        ]
        best = min(readings, key=self._order, default=None)
        return best if best and self._order(best) < (now.place, now.nodes) else None

    def _find_whole(self, node: ir.Node, now: _Now) -> Reading | None:
        """Return what a Size reads, or a Shape of which not even the rank is known."""
        if node.op_type not in ("Shape", "Size") or now.source is None:
            return None
        if node.op_type == "Shape":
            first = self._earliest.first("shape", self._shapes.shape(now.source), node)
        else:
            first = self._earliest.first("count", self._shapes.count(now.source), node)
        if first is None or self._earliest.place(first) >= now.place:
            return None
        return Reading(Law.WHOLE, first)

    def _of(
        self, source: ir.Value, dims: Dims, is_scalar: bool, opset: int
    ) -> Iterator[Reading]:
        """How to read sizes from a value: those that lie side by side take one node."""
        shape = self._shapes.shape(source)
        if not isinstance(shape, tuple) or not set(dims) <= set(shape):
            return
        rank, count = len(shape), len(dims)
        starts = [i for i in range(rank - count + 1) if shape[i : i + count] == dims]
        if is_scalar or not starts or (opset < _SPAN_OPSET and count < rank):
            axes = tuple(shape.index(dim) for dim in dims)
            yield Reading(Law.PICK, source, axes, is_scalar=is_scalar)
        else:
            yield Reading(Law.SPAN, source, tuple(range(starts[0], starts[0] + count)), rank)

    def _order(self, reading: Reading) -> tuple[int, int]:
        return self._earliest.place(reading.source), reading.nodes


def _divisors(model: ir.Model) -> set[ir.Value]:
    """Return what a division that need not run divides by, and what that comes from.

    Constants are folded whether the branch runs or not, and by 0 no session opens.
    """
    pending = [
        value
        for node in all_nodes(model)
        if node.op_type in ("Div", "Mod") and node.graph is not model.graph
        for value in node.inputs[1:2]
        if value is not None
    ]
    found = set(pending)
    for value in pending:  # grows
        maker = value.producer()
        read = () if maker is None else maker.inputs
        new = [each for each in read if each is not None and each not in found]
        found.update(new)
        pending += new
    return found


def equal_numbers(model: ir.Model, facts: ProvedShapes) -> dict[ir.Node, ir.Value]:
    """Return the nodes whose numbers an earlier value has, with that value."""
    found: dict[ir.Node, ir.Value] = {}

    def walk(graph: ir.Graph, seen: collections.ChainMap[Hashable, ir.Value]) -> None:
        for node in graph:
            for subgraph in subgraphs(node):
                walk(subgraph, seen.new_child())
            if (key := _numbers(node, facts)) is None:
                continue
            first = seen.setdefault(key, node.outputs[0])
            # The name of a graph output is the caller's.
            if first is not node.outputs[0] and not node.outputs[0].is_graph_output():
                found[node] = first

    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        walk(graph, collections.ChainMap())
    return found


def _numbers(node: ir.Node, facts: ProvedShapes) -> Hashable:
    """What identifies a node's numbers; None if it has none that are of use."""
    if node.domain or len(node.outputs) != 1 or not node.outputs[0].name:
        return None
    if node.op_type not in INTEGER_OPERATORS:
        return None
    integers = facts.integers(node.outputs[0])
    if integers is not None and integers.known is not None:
        return integers
    source = input_of(node, 0)
    if node.op_type not in ("Shape", "Size") or source is None:
        return None
    span = (str(node.attributes[name]) for name in sorted(node.attributes))
    return (node.op_type, facts.shape(source), *span)
