# SPDX-License-Identifier: MIT
"""Shape and Size read the first value of the same sizes, or become constants.

    FoldNumbers  Gather(Shape(h[batch, 64]), 1)       -> 64
    ReadSpan     Shape(f(x))                          -> Shape(x)                 f keeps it
                 Slice(Shape(x), 1, 3)                -> Shape(x, start=1, end=3)   opset 15
                 Unsqueeze(Gather(Shape(x), 1), 0)    -> Shape(x, start=1, end=2)   opset 15
                 Concat(Shape(x)[0:1], Shape(x)[1:2]) -> Shape(x, start=0, end=2)   opset 15
    ReadSize     Size(f(x))                           -> Size(x)             as many elements
    PickSizes    Shape(Transpose(x, perm))            -> Gather(Shape(x), perm)
                 Gather(Shape(h[batch, 64]), 0)       -> Gather(Shape(x[batch]), 0)

``x`` is the first value in the graph of which :class:`.ProvedShapes` shows that its sizes are
the same in every run. A rule fires where what is read comes earlier, or from the same value in
fewer nodes (:mod:`.readings`); so none fires twice.

A scalar stays ``Gather(Shape(x), 1)``: ``Squeeze(Shape(x, start=1, end=2))`` takes as many
nodes, and one more Shape for each dimension that is read.

Afterwards, nodes with the same numbers become one:

    Shape(x), Shape(x)                       -> Shape(x), once
    Gather(Shape(x), 0), Gather(Shape(y), 0) -> the first, if both are the same size

A Shape that still reads a computed tensor gets a remark that says why.
"""

from __future__ import annotations

import collections
from collections.abc import Hashable
from typing import Any

import onnx_ir as ir
from onnxscript.rewriter import RewriteRuleClassBase

from rewrite_rules.graph.nodes import label, producer, subgraphs
from rewrite_rules.graph.rule_set import DispatchingRuleSet
from rewrite_rules.remarks import PassContext, Remarks
from rewrite_rules.shape_size_reorder.readings import Reading, Readings
from rewrite_rules.shapes.proved_shapes import ProvedShapes
from rewrite_rules.shapes.shape_data import INTEGER_OPERATORS

_ROOTS = ("Shape", "Size")


def simplify_shapes(model: ir.Model, context: PassContext) -> None:
    """Rewrite in place; ``context.remarks`` tells what each Shape and Size reads now.

    Names and types of the graph's outputs stay, and so do all numbers, whatever the sizes in
    a run. The graph is sorted afterwards.
    """
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
        better = Readings(model, facts).better
    if better:
        op_types = dict.fromkeys(node.op_type for node in better)
        rules = [_BetterReading.rule(kind, better, context.remarks) for kind in op_types]
        DispatchingRuleSet(rules, better.__contains__).apply_to_model(model)
        with context.remarks.at("model"):
            facts = ProvedShapes(model)
    merged = _Merge(facts, context)
    for graph in graphs:
        merged.walk(graph, collections.ChainMap())
    _explain_the_rest(graphs, facts, context)


class _BetterReading(RewriteRuleClassBase):
    """A node of one operator -> the same numbers, constant or read from the first value."""

    def __init__(self, op_type: str, better: dict[ir.Node, Reading], remarks: Remarks) -> None:
        self._op_type = op_type
        self._better = better
        self._remarks = remarks
        # The nodes before it may have other consumers.
        super().__init__(name=f"BetterReadingOf{op_type}", remove_nodes=False)

    def pattern(self, op, x):  # type: ignore[no-untyped-def]
        return getattr(op, self._op_type)(x, _allow_other_inputs=True, _outputs=["out"])

    def rewrite(self, op: Any, out: ir.Value, **_: object) -> ir.Value:
        """Emit the reading."""
        node = producer(out)
        reading = self._better[node]
        value = reading.emit(op, node.name)
        value.type = ir.TensorType(ir.DataType.INT64)
        self._remarks.fired(label(node), str(reading))
        return value


class _Merge:
    """Makes one of nodes that have the same numbers."""

    def __init__(self, facts: ProvedShapes, context: PassContext) -> None:
        self._facts = facts
        self._context = context

    def walk(self, graph: ir.Graph, seen: collections.ChainMap[Hashable, ir.Value]) -> None:
        """Merge in a graph and its subgraphs; ``seen`` has what can be read there."""
        for node in graph:
            for subgraph in subgraphs(node):
                self.walk(subgraph, seen.new_child())
            key = self._key(node)
            if key is None:
                continue
            out = node.outputs[0]
            first = seen.setdefault(key, out)
            # The name of a graph output is the caller's.
            if first is out or out.is_graph_output():
                continue
            ir.convenience.replace_all_uses_with(out, first)
            _remove_unused(node)
            if _is_root(node):
                self._context.remarks.fired(label(node), f"is {first.name!r}, its like")

    def _key(self, node: ir.Node) -> Hashable:
        """What identifies a node's numbers; None if it has none that are of use."""
        if node.domain or len(node.outputs) != 1 or not node.outputs[0].name:
            return None
        if node.op_type not in INTEGER_OPERATORS:
            return None
        out = node.outputs[0]
        integers = self._facts.integers(out)
        if integers is not None and integers.known is not None:
            return integers
        if not _is_root(node) or not node.inputs or node.inputs[0] is None:
            return None
        span = (str(node.attributes[name]) for name in sorted(node.attributes))
        return (node.op_type, self._facts.shape(node.inputs[0]), *span)


def _remove_unused(node: ir.Node) -> None:
    """Remove a node without a consumer, and the integers that were for it alone."""
    pending = [node]
    while pending:
        node = pending.pop()
        small = node.op_type in INTEGER_OPERATORS or node.op_type == "Constant"
        if not small or node.graph is None:
            continue
        if any(value.uses() or value.is_graph_output() for value in node.outputs):
            continue
        makers = [value.producer() for value in node.inputs if value is not None]
        # The first of equal Shapes reads what they all read, so that has a consumer still.
        node.graph.remove(node, safe=True)
        pending += [maker for maker in makers if maker is not None]


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
