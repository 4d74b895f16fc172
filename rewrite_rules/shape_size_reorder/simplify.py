# SPDX-License-Identifier: MIT
"""Shape and Size read the first value of the same sizes, or become constants.

    Gather(Shape(h[batch, 64]), 1)       -> 64
    Shape(f(x))                          -> Shape(x)                 f keeps it
    Slice(Shape(x), 1, 3)                -> Shape(x, start=1, end=3)   opset 15
    Unsqueeze(Gather(Shape(x), 1), 0)    -> Shape(x, start=1, end=2)   opset 15
    Concat(Shape(x)[0:1], Shape(x)[1:2]) -> Shape(x, start=0, end=2)   opset 15
    Size(f(x))                           -> Size(x)             as many elements
    Shape(Transpose(x, perm))            -> Gather(Shape(x), perm)
    Gather(Shape(h[batch, 64]), 0)       -> Gather(Shape(x[batch]), 0)

A node is rewritten where what is read comes earlier, or from the same value in fewer nodes; so
none is twice. All is decided before any node is rewritten. Afterwards, nodes with the same
numbers become one. A Shape that still reads a computed tensor gets a remark that says why.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Mapping

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from rewrite_rules.graph.initializers import name_apart
from rewrite_rules.graph.nodes import label, remove_unused, subgraphs
from rewrite_rules.graph.parameters import int_attribute
from rewrite_rules.remarks import PassContext, Refusal
from rewrite_rules.shapes.dimensions import Dim, Dims, Shape
from rewrite_rules.shapes.proved_shapes import ProvedShapes
from rewrite_rules.shapes.shape_data import INTEGER_OPERATORS

_ROOTS = ("Shape", "Size")
# Operators that only pick what is in their first input.
_PICKS = frozenset({"Cast", "Gather", "Identity", "Reshape", "Slice", "Squeeze", "Unsqueeze"})
# Operators whose numbers are read from a value directly, where they can be.
_REREAD = frozenset({"Concat", "Gather", "Shape", "Slice", "Squeeze", "Unsqueeze"})
_FOLDED = _PICKS | _REREAD | {"Add", "Div", "Mul", "ReduceProd", "Size", "Sub"}
_LONG_CHAIN = 4


def simplify_shapes(model: ir.Model, context: PassContext) -> None:
    """Rewrite in place and sort; all numbers stay, whatever the sizes in a run."""
    graphs = [model.graph, *(function.graph for function in model.functions.values())]
    present = {node.op_type for graph in graphs for node in graph.all_nodes()}
    if present.isdisjoint(_ROOTS):
        return
    try:
        for graph in graphs:
            graph.sort()  # what is earlier is only known then
    except ValueError as error:
        context.remarks.refused("model", f"it can't be sorted: {error}")
        return
    with context.remarks.at("model"):
        facts = ProvedShapes(model)
        better = _Readings(graphs, facts).better
    if better:
        for node, reading in better.items():
            context.remarks.fired(label(node), reading.text)
            _replace(node, reading.make())
        remove_unused(model)
        name_apart(model)
        with context.remarks.at("model"):
            facts = ProvedShapes(model)
    merged = [_merge(graph, collections.ChainMap(), facts, context) for graph in graphs]
    if any(merged):
        remove_unused(model)
    _explain_the_rest(graphs, facts, context)


# The readings


@dataclasses.dataclass(frozen=True)
class _Reading:
    """Numbers by where they come from: the latest place, nodes from there, the value read.

    ``make`` makes the nodes, the last of which gives the numbers; ``text`` is for remarks.
    """

    place: int
    nodes: int = 1 + _LONG_CHAIN
    source: ir.Value | None = None
    text: str = ""
    make: Callable[[], list[ir.Node]] = list

    @property
    def rank(self) -> tuple[int, int]:
        """The smaller the better."""
        return self.place, self.nodes


def _constant(numbers: npt.NDArray[np.int64]) -> ir.Node:
    return ir.node("Constant", [], {"value": ir.tensor(numbers)})


def _nodes(
    op_type: str,
    source: ir.Value,
    attributes: Mapping[str, int],
    picked: npt.NDArray[np.int64] | None,
) -> list[ir.Node]:
    node = ir.node(op_type, [source], attributes)
    if picked is None:
        return [node]
    axes = _constant(picked)
    gather = ir.node("Gather", [node.outputs[0], axes.outputs[0]], {"axis": 0})
    return [node, axes, gather]


def _replace(node: ir.Node, nodes: list[ir.Node]) -> None:
    """Put others in the place of a node; those that it reads may have other consumers."""
    for new in nodes:
        new.outputs[0].type = ir.TensorType(ir.DataType.INT64)
    assert node.graph is not None
    node.name, nodes[-1].name = None, node.name
    ir.convenience.replace_nodes_and_values(
        node.graph, node, [node], nodes, node.outputs, nodes[-1].outputs
    )


# For a graph: the first value of each shape, number of elements ("count") and dimension.
_Firsts = dict[tuple[str, Shape | Dim], ir.Value]


class _Readings:
    """What each node that can be read better becomes; the nodes are sorted."""

    def __init__(self, graphs: Iterable[ir.Graph], shapes: ProvedShapes) -> None:
        self._shapes = shapes
        # Where a value is computed; inputs and initializers are not there, or at -1.
        self._places: dict[ir.Value, int] = {}
        self._nodes = 0
        self._now: dict[ir.Value, _Reading] = {}
        self.better: dict[ir.Node, _Reading] = {}
        for graph in graphs:
            self._walk(graph, [], -1)

    def _walk(self, graph: ir.Graph, outer: list[_Firsts], place: int) -> None:
        scopes: list[_Firsts] = [*outer, {}]
        for value in graph.inputs:
            self._add(value, scopes[-1], place)
        for value in graph.initializers.values():
            self._places[value] = place
        for node in graph:
            place = self._nodes
            self._nodes += 1
            for subgraph in subgraphs(node):
                self._walk(subgraph, scopes, place)
            self._look_at(node, scopes)
            for value in node.outputs:  # behind the values of its subgraphs
                self._places[value] = self._nodes
                if node.op_type != "Constant":
                    self._add(value, scopes[-1], self._nodes)

    def _add(self, value: ir.Value, firsts: _Firsts, place: int) -> None:
        self._places[value] = place
        if value.name == "":  # an output that is left out
            return
        # A sequence, say, has no shape of its own.
        if value.type is not None and not isinstance(value.type, ir.TensorType):
            return
        shape = self._shapes.shape(value)
        firsts.setdefault(("shape", shape), value)
        firsts.setdefault(("count", self._shapes.count(value)), value)
        if isinstance(shape, tuple):
            for dim in shape:
                if dim[1]:
                    firsts.setdefault(("dim", dim), value)

    def _place(self, value: ir.Value) -> int:
        return self._places.get(value, -1)

    def _first(self, kind: str, size: Shape | Dim, scopes: list[_Firsts]) -> ir.Value | None:
        """Return the first value of a "shape", "count" or "dim", from the outermost graph on.

        A tensor that a subgraph newly captured would live until that has run.
        """
        for firsts in scopes:
            found = firsts.get((kind, size))
            if found is not None and (firsts is scopes[-1] or self._place(found) < 0):
                return found
        return None

    def _look_at(self, node: ir.Node, scopes: list[_Firsts]) -> None:
        out = node.outputs[0] if len(node.outputs) == 1 else None
        # A node without a consumer never mattered.
        if out is None or node.domain or node.op_type not in _FOLDED:
            return
        if not (out.uses() or out.is_graph_output()) or not node.inputs:
            return
        now = self._reads(node)
        if now is None:
            return
        found = self._find(node, now, scopes)
        if found is not None and (found.source is None or found.rank < now.rank):
            self.better[node] = now = found
        self._now[out] = now

    def _reads(self, node: ir.Node) -> _Reading | None:
        """Return what a node's numbers depend on; None where nothing is known of them."""
        if node.op_type in _ROOTS:
            source = node.inputs[0]
            return None if source is None else _Reading(self._place(source), 1, source)
        if self._shapes.integers(node.outputs[0]) is None:
            return None
        inputs = [self._now[value] for value in node.inputs if value in self._now]
        place = max((now.place for now in inputs), default=-1)
        first = self._now.get(node.inputs[0]) if node.inputs[0] is not None else None
        if node.op_type not in _PICKS or first is None:
            return _Reading(place)
        return _Reading(place, first.nodes + 1, first.source)

    def _find(self, node: ir.Node, now: _Reading, scopes: list[_Firsts]) -> _Reading | None:
        integers = self._shapes.integers(node.outputs[0])
        if integers is not None and integers.constants is not None:
            numbers = np.array(integers.constants, np.int64).reshape(integers.shape)
            text = f"constant {list(integers.constants)}"
            return _Reading(-1, 0, None, text, lambda: [_constant(numbers)])
        if node.op_type == "Size":
            assert now.source is not None
            first = self._first("count", self._shapes.count(now.source), scopes)
            return None if first is None else self._reading(first, "the size", "Size")
        dims = None if integers is None else integers.known
        if integers is None or dims is None:
            return self._find_unranked(node, now, scopes)
        scalar = not integers.shape
        if node.op_type not in _REREAD or len(integers.shape) > 1:
            return None
        sources = [] if scalar else [self._first("shape", dims, scopes)]
        sources += [self._first("dim", dim, scopes) for dim in dims]
        sources.append(now.source)
        opset = self._shapes.opset(node)
        readings = [
            self._sizes(source, dims, scalar, opset)
            for source in dict.fromkeys(sources)
            if source is not None
        ]
        found = (reading for reading in readings if reading is not None)
        return min(found, key=lambda reading: reading.rank, default=None)

    def _find_unranked(
        self, node: ir.Node, now: _Reading, scopes: list[_Firsts]
    ) -> _Reading | None:
        shape = None if now.source is None else self._shapes.shape(now.source)
        if node.op_type != "Shape" or not isinstance(shape, int):
            return None
        first = self._first("shape", shape, scopes)
        try:
            start = int_attribute(node, "start", 0) or None
            end = int_attribute(node, "end", 0) if "end" in node.attributes else None
        except Refusal:
            return None
        return None if first is None else self._span(first, start, end)

    def _sizes(
        self, source: ir.Value, dims: Dims, scalar: bool, opset: int
    ) -> _Reading | None:
        """How to read sizes from a value; None where it has not all of them."""
        shape = self._shapes.shape(source)
        if not isinstance(shape, tuple) or not set(dims) <= set(shape):
            return None
        count = len(dims)
        starts = [i for i in range(len(shape) - count + 1) if shape[i : i + count] == dims]
        if not scalar and starts and (opset >= 15 or count == len(shape)):
            end = starts[0] + count
            return self._span(source, starts[0] or None, end if end < len(shape) else None)
        axes = [shape.index(dim) for dim in dims]
        text = f"dimension{'s' * (len(axes) > 1)} {', '.join(map(str, axes))}"
        picked = np.array(axes, np.int64).reshape(() if scalar else -1)
        return self._reading(source, text, picked=picked)

    def _span(self, source: ir.Value, start: int | None, end: int | None) -> _Reading:
        text = f"dimensions {start or 0}:{'' if end is None else end}"
        ends = {"start": start, "end": end}
        given = {name: axis for name, axis in ends.items() if axis is not None}
        return self._reading(source, text if given else "the shape", attributes=given)

    def _reading(
        self,
        source: ir.Value,
        text: str,
        op_type: str = "Shape",
        attributes: Mapping[str, int] | None = None,
        picked: npt.NDArray[np.int64] | None = None,
    ) -> _Reading:
        make = functools.partial(_nodes, op_type, source, attributes or {}, picked)
        count = 1 if picked is None else 2
        text = f"reads {text} of {source.name!r}"
        return _Reading(self._place(source), count, source, text, make)


def _merge(
    graph: ir.Graph,
    seen: collections.ChainMap[Hashable, ir.Value],
    facts: ProvedShapes,
    context: PassContext,
) -> bool:
    """Have the first of nodes with the same numbers read for all; whether there were any.

    ``seen`` are those that can be read, by their numbers; subgraphs included.
    """
    merged = False
    for node in graph:
        for subgraph in subgraphs(node):
            merged |= _merge(subgraph, seen.new_child(), facts, context)
        key = _key(node, facts)
        if key is None:
            continue
        out = node.outputs[0]
        first = seen.setdefault(key, out)
        # The name of a graph output is the caller's.
        if first is out or out.is_graph_output():
            continue
        ir.convenience.replace_all_uses_with(out, first)
        merged = True
        if _is_root(node):
            context.remarks.fired(label(node), f"is {first.name!r}, its like")
    return merged


def _key(node: ir.Node, facts: ProvedShapes) -> Hashable:
    """What identifies a node's numbers; None if it has none that are of use."""
    if node.domain or len(node.outputs) != 1 or not node.outputs[0].name:
        return None
    if node.op_type not in INTEGER_OPERATORS:
        return None
    integers = facts.integers(node.outputs[0])
    if integers is not None and integers.known is not None:
        return integers
    if not _is_root(node) or not node.inputs or node.inputs[0] is None:
        return None
    span = (str(node.attributes[name]) for name in sorted(node.attributes))
    return (node.op_type, facts.shape(node.inputs[0]), *span)


def _is_root(node: ir.Node) -> bool:
    return node.op_type in _ROOTS and node.domain == ""


def _explain_the_rest(
    graphs: list[ir.Graph], facts: ProvedShapes, context: PassContext
) -> None:
    """Say why a Shape reads a computed tensor still."""
    for graph in graphs:
        for node in graph.all_nodes():
            if not _is_root(node) or not node.inputs or (source := node.inputs[0]) is None:
                continue
            maker = source.producer()
            if maker is None:  # nothing is earlier than an input
                continue
            unranked = isinstance(facts.shape(source), int)
            context.remarks.refused(
                label(node),
                f"{maker.op_type} {label(maker)!r} decides the "
                f"{'rank and the sizes' if unranked else 'sizes'} of {source.name!r}: nothing "
                "earlier has them in every run",
            )
