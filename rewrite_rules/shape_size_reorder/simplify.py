# SPDX-License-Identifier: MIT
"""Shape and Size read the first value of the same sizes, or become constants.

    _constant  Gather(Shape(h[batch, 64]), 1)       -> 64
    _span      Shape(f(x))                          -> Shape(x)                 f keeps it
               Slice(Shape(x), 1, 3)                -> Shape(x, start=1, end=3)   opset 15
               Unsqueeze(Gather(Shape(x), 1), 0)    -> Shape(x, start=1, end=2)   opset 15
               Concat(Shape(x)[0:1], Shape(x)[1:2]) -> Shape(x, start=0, end=2)   opset 15
    _again     Size(f(x))                           -> Size(x)             as many elements
               Shape(f(x))                          -> Shape(x)            of unknown rank
    _pick      Shape(Transpose(x, perm))            -> Gather(Shape(x), perm)
               Gather(Shape(h[batch, 64]), 0)       -> Gather(Shape(x[batch]), 0)

A rule fires where what is read comes earlier, or from the same value in fewer nodes; so none
fires twice. All is decided before any node is rewritten. Afterwards, nodes with the same
numbers become one. A Shape that still reads a computed tensor gets a remark that says why.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from rewrite_rules.graph.initializers import name_apart
from rewrite_rules.graph.nodes import (
    all_nodes,
    label,
    remove_unused,
    sort_nodes,
    subgraphs,
    walk,
)
from rewrite_rules.remarks import PassContext, Refusal
from rewrite_rules.shapes.dimensions import Dim, Dims, Shape
from rewrite_rules.shapes.node_facts import Integers
from rewrite_rules.shapes.proved_shapes import ProvedShapes
from rewrite_rules.shapes.shape_data import INTEGER_OPERATORS

_ROOTS = ("Shape", "Size")
# Operators that only pick what is in their first input.
_PICKS = frozenset({"Cast", "Gather", "Identity", "Reshape", "Slice", "Squeeze", "Unsqueeze"})
# Operators whose numbers are read from a value directly, where they can be.
_REREAD = frozenset({"Concat", "Gather", "Shape", "Slice", "Squeeze", "Unsqueeze"})
_FOLDED = _PICKS | _REREAD | {"Add", "Div", "Mul", "ReduceProd", "Size", "Sub"}
_LONG_CHAIN = 4
_FLOAT8 = frozenset(dtype for dtype in ir.DataType if dtype.name.startswith("FLOAT8"))


def simplify_shapes(model: ir.Model, context: PassContext) -> None:
    """Rewrite in place and sort; all numbers stay, whatever the sizes in a run."""
    graphs = [model.graph, *(function.graph for function in model.functions.values())]
    present = {node.op_type for graph in graphs for node in walk(graph)}
    if present.isdisjoint(_ROOTS):
        return
    try:
        for graph in graphs:
            sort_nodes(graph)  # what is earlier is only known then
    except ValueError as error:
        context.remarks.refused("model", Refusal("ORP402", f"it can't be sorted: {error}"))
        return
    with context.remarks.at("model"):
        facts = ProvedShapes(model)
        better = _Readings(model, facts).better
    stand_ins: dict[ir.Value | None, ir.Value] = {}
    for node, reading in better.items():
        with context.remarks.at(label(node)):
            made = reading.make(node.name, stand_ins.get(reading.source, reading.source))
            stand_ins[node.outputs[0]] = _replace(node, made)
            context.remarks.fired(label(node), reading.text)
    if better:
        _drop_saturate(graphs)
        remove_unused(model)
        name_apart(model)
        with context.remarks.at("model"):
            facts = ProvedShapes(model)
    merged = [_merge(graph, collections.ChainMap(), facts, context) for graph in graphs]
    if any(merged):
        remove_unused(model)
    _explain_the_rest(graphs, facts, context)


def _drop_saturate(graphs: Sequence[ir.Graph]) -> None:
    """Drop an attribute of Cast that says nothing, but for types of 8 bits.

    onnxruntime's kernel refuses it. Its optimisers merge such a Cast with the next one, unless
    they fold it first, behind what has become a constant.
    """
    for graph in graphs:
        for node in walk(graph):
            to = node.attributes.get("to") if node.op_type == "Cast" else None
            if to is not None and not to.is_ref() and to.value not in _FLOAT8:
                node.attributes.pop("saturate", None)


@dataclasses.dataclass(frozen=True)
class Reading:
    """What a node becomes: the remark, and what makes the nodes, given its name.

    ``source`` is the value they read; None for a constant.
    """

    text: str
    make: Callable[[str | None, ir.Value | None], list[ir.Node]]
    source: ir.Value | None = None
    nodes: int = 1


def _constant(integers: Integers) -> Reading:
    """Numbers that no run can change."""
    array = np.array(integers.constants, np.int64).reshape(integers.shape)
    return Reading(
        f"constant {array.ravel().tolist()}",
        lambda name, _: [_constant_node(array, name)],
        nodes=0,
    )


def _again(
    op_type: str, source: ir.Value, attributes: Mapping[str, Any], what: str = ""
) -> Reading:
    """Shape or Size of another value."""
    return Reading(
        f"reads {what or 'the ' + op_type.lower()} of {source.name!r}",
        lambda name, read: [ir.node(op_type, [read], attributes, name=name)],
        source,
    )


def _span(source: ir.Value, start: int, end: int, rank: int) -> Reading:
    """Sizes that lie side by side in a shape; all of them before opset 15."""
    ends = {"start": start} if start else {}
    ends |= {"end": end} if end < rank else {}
    what = f"dimensions {start}:{ends.get('end', '')}" if ends else ""
    return _again("Shape", source, ends, what)


def _pick(source: ir.Value, axes: Sequence[int], scalar: bool) -> Reading:
    """Sizes anywhere in a shape; of one, maybe a scalar."""

    def make(name: str | None, read: ir.Value | None) -> list[ir.Node]:
        shape = ir.node("Shape", [read])
        indices = _constant_node(np.array(axes, np.int64).reshape(() if scalar else -1))
        picked = [shape.outputs[0], indices.outputs[0]]
        return [shape, indices, ir.node("Gather", picked, {"axis": 0}, name=name)]

    plural = "s" * (len(axes) > 1)
    text = f"reads dimension{plural} {', '.join(map(str, axes))} of {source.name!r}"
    return Reading(text, make, source, nodes=2)


def _constant_node(array: NDArray[np.int64], name: str | None = None) -> ir.Node:
    return ir.node("Constant", [], {"value": ir.tensor(array)}, name=name)


def _replace(node: ir.Node, made: list[ir.Node]) -> ir.Value:
    """Put nodes in the place of one; return what stands for its output."""
    for each in made:
        each.outputs[0].type = ir.TensorType(ir.DataType.INT64)
    assert node.graph is not None
    ir.convenience.replace_nodes_and_values(
        node.graph, node, [node], made, node.outputs, made[-1].outputs
    )
    return made[-1].outputs[0]


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

    def place(self, value: ir.Value) -> int:
        """Return where a value is computed; -1 for inputs and initializers."""
        return self._places.get(value, -1)

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


class _Readings:
    """What each node that can be read better becomes; the nodes are sorted."""

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
            if out is None or node.domain or node.op_type not in _FOLDED:
                continue
            if not (out.uses() or out.is_graph_output()) or not node.inputs:
                continue
            now = self._reads(node)
            if now is None:
                continue
            found = self._find(node, now)
            if found is not None:
                self.better[node] = found
                now = _Now(self._place(found), found.nodes, found.source)
            self._now[out] = now

    def _reads(self, node: ir.Node) -> _Now | None:
        """Return what a node's numbers depend on; None where nothing is known of them."""
        if node.op_type in ("Shape", "Size"):
            source = node.inputs[0]
            return None if source is None else _Now(self._earliest.place(source), 1, source)
        if self._shapes.integers(node.outputs[0]) is None:
            return None
        inputs = [self._now[value] for value in node.inputs if value in self._now]
        place = max((now.place for now in inputs), default=-1)
        first = self._now.get(node.inputs[0]) if node.inputs[0] is not None else None
        if node.op_type not in _PICKS or first is None:
            return _Now(place)
        return _Now(place, first.nodes + 1, first.source)

    def _find(self, node: ir.Node, now: _Now) -> Reading | None:
        integers = self._shapes.integers(node.outputs[0])
        if integers is not None and integers.constants is not None:
            return None if node.outputs[0] in self._divisors else _constant(integers)
        if integers is None or integers.known is None or node.op_type == "Size":
            return self._find_first(node, now)
        dims, scalar = integers.known, not integers.shape
        if node.op_type not in _REREAD or len(integers.shape) > 1:
            return None
        sources = [] if scalar else [self._earliest.first("shape", dims, node)]
        sources += [self._earliest.first("dim", dim, node) for dim in dims]
        sources.append(now.source)
        readings = [
            reading
            for source in dict.fromkeys(sources)
            if source is not None
            for reading in self._forms(source, dims, scalar, self._shapes.opset(node))
        ]
        best = min(readings, key=self._order, default=None)
        return best if best and self._order(best) < (now.place, now.nodes) else None

    def _find_first(self, node: ir.Node, now: _Now) -> Reading | None:
        """Return what a Size reads, or a Shape of which not even the rank is known."""
        if node.op_type not in _ROOTS or now.source is None:
            return None
        if node.op_type == "Shape":
            first = self._earliest.first("shape", self._shapes.shape(now.source), node)
        else:
            first = self._earliest.first("count", self._shapes.count(now.source), node)
        if first is None or self._earliest.place(first) >= now.place:
            return None
        return _again(node.op_type, first, node.attributes)

    def _forms(
        self, source: ir.Value, dims: Dims, scalar: bool, opset: int
    ) -> Iterator[Reading]:
        """How to read sizes from a value."""
        shape = self._shapes.shape(source)
        if not isinstance(shape, tuple) or not set(dims) <= set(shape):
            return
        count = len(dims)
        starts = [i for i in range(len(shape) - count + 1) if shape[i : i + count] == dims]
        if scalar or not starts or (opset < 15 and count < len(shape)):
            yield _pick(source, [shape.index(dim) for dim in dims], scalar)
        else:
            yield _span(source, starts[0], starts[0] + count, len(shape))

    def _place(self, reading: Reading) -> int:
        return -1 if reading.source is None else self._earliest.place(reading.source)

    def _order(self, reading: Reading) -> tuple[int, int]:
        return self._place(reading), reading.nodes


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
        for node in walk(graph):
            if not _is_root(node) or not node.inputs or (source := node.inputs[0]) is None:
                continue
            maker = source.producer()
            if maker is None:  # nothing is earlier than an input
                continue
            unranked = isinstance(facts.shape(source), int)
            text = (
                f"{maker.op_type} {label(maker)!r} decides the "
                f"{'rank and the sizes' if unranked else 'sizes'} of {source.name!r}: nothing "
                "earlier has them in every run"
            )
            context.remarks.refused(label(node), Refusal("ORP401", text))
