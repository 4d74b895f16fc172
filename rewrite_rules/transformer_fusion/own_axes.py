# SPDX-License-Identifier: MIT
"""Gives heads an axis of their own, so that all attention is read in one layout.

    Reshape(f(Reshape(x[B, H, S, D], [B * H, S, D]), ...), [B, H, S, T])    -> f(x, ...)

where f are products, Softmax, factors and masks. The same numbers are computed in the same
order; whatever else reads a value of the old shape reads a Reshape of the new one.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript import TapeBuilder

from rewrite_rules.graph.nodes import made_by, producer
from rewrite_rules.graph.parameters import constant, int_attribute
from rewrite_rules.shapes.dimensions import Dim, Dims, number
from rewrite_rules.shapes.proved_shapes import ProvedShapes
from rewrite_rules.transformer_fusion.head_layout import ints

_RANK = 4
_LAST_TWO, _LAST_TWO_OF_HEADS = (0, 2, 1), (0, 1, 3, 2)
_ELEMENTWISE = frozenset({"Add", "Div", "IsNaN", "Mul", "Sub", "Where"})


def give_heads_an_axis(model: ir.Model, graphs: Iterable[ir.Graph]) -> None:
    """Rewrite sorted graphs of a model; unused nodes stay, and the order may change."""
    facts = ProvedShapes(model, on_demand=True)
    for graph in graphs:
        heads = _HeadsApart(graph, facts)
        for node in graph if any(node.op_type == "Softmax" for node in graph) else ():
            heads.visit(node)


class _HeadsApart:
    """Computes what nodes of a sorted graph do with heads on an axis of their own.

    ``apart`` has ``[B, H, S, D]`` of each value that holds the same in another shape: with
    heads merged into the batch.
    ``made``: which values a new one stands for. ``new``: B and S of what a cache ends with.
    """

    def __init__(self, graph: ir.Graph, facts: ProvedShapes) -> None:
        self._graph, self._facts = graph, facts
        self._apart: dict[ir.Value | None, ir.Value] = {}
        self._new: dict[ir.Value, tuple[Dim, Dim]] = {}
        self._made = collections.defaultdict[ir.Value, list[ir.Value]](list)

    def visit(self, node: ir.Node) -> None:
        """Read a node, and replace what is reshaped to what is known by itself."""
        if node.domain or len(node.outputs) != 1 or node.outputs[0].is_graph_output():
            return
        if node.op_type == "Reshape":
            self._read_reshape(node)
            return
        op, out = TapeBuilder(), node.outputs[0]
        made = self._computed(op, node)
        if made is not None:
            self._apart[out] = made
            batch, heads, *rest = self._facts.dims(made, _RANK) or ((1, ()), (1, ()))
            if node.op_type == "MatMul" and heads != (1, ()):
                self._facts.note(out, (self._facts.unknowns.product((batch, heads)), *rest))
            if made.producer() is not None:
                self._made[made].append(out)
        self._graph.insert_before(node, op.nodes)

    def _read_reshape(self, node: ir.Node) -> None:
        """Note that a Reshape merges or splits axes; remove one that ends with ``apart``."""
        (source, sizes), out, facts = node.inputs, node.outputs[0], self._facts
        before, apart = self._without_past(source), self._apart.get(source)
        asked = None if before is None else _asked_sizes(node, before, facts)
        if source is None or sizes is None or before is None or asked is None:
            return
        if apart is not None and self._has_sizes(facts.dims(apart) or (), asked):
            out.replace_all_uses_with(apart)
            self._settle(apart)
            return
        merged = self._merged_axes(node, before)
        if merged is None:
            return
        made, asked = merged
        facts.note(source, made)
        facts.note(out, asked)
        self._apart[out] = source

    def _without_past(self, value: ir.Value | None) -> Dims | None:
        """Return the sizes of a value; those of a cache hold where tokens are appended."""
        dims, join = self._facts.dims(value), made_by(value, "Concat")
        if value is None or dims is None or join is None or len(dims) != _RANK:
            return dims
        new = self._facts.dims(join.inputs[-1], _RANK)
        if new is None or int_attribute(join, "axis", 0) not in (2, -2):
            return dims
        self._new[value] = new[0], new[2]
        return new[0], *dims[1:]

    def _has_sizes(self, dims: Dims, asked: Dims) -> bool:
        """Whether sizes are those that a Reshape asks for: of as many elements, if there are.

        One that differs would make them more or fewer, and so would a mask that has more.
        """
        if len(asked) != len(dims):
            return False
        fits = all(dim in self._parts(d) for dim, d in zip(asked, dims, strict=True))
        return fits or sum(a != b for a, b in zip(asked, dims, strict=True)) < 2

    def _parts(self, dim: Dim) -> tuple[Dim, ...]:
        return dim, *self._facts.unknowns.broadcast_parts(dim)

    def _merged_axes(self, node: ir.Node, before: Dims) -> tuple[Dims, Dims] | None:
        """Return ``[B, H, S, T]`` of what a Reshape merges, and what it asks for.

        What a mask was added to has the sizes of the scores in each run that gets past it: no
        fewer elements would do. Where -1 takes what is left, that says nothing: but for the
        last axis, where a product with as many values fails then.
        """
        if len(before) != _RANK:
            return None
        facts, (batch, heads, *_) = self._facts, map(self._parts, before)
        is_inferred = (-1, ()) in (facts.numbers(node.inputs[1]) or ())[:-1]
        for pair in () if is_inferred else itertools.product(batch, heads):
            asked = _asked_sizes(node, (*pair, *before[2:]), facts) or ()
            pairs = zip(asked[1:], before[2:], strict=False)
            fits = len(asked) == _RANK - 1 and all(dim in self._parts(d) for dim, d in pairs)
            if fits and facts.unknowns.product(pair) == asked[0]:
                return (*pair, *asked[1:]), asked
        asked = _asked_sizes(node, before, facts) or ()
        return (before, asked) if asked[1:] == before[2:] else None

    def _settle(self, made: ir.Value) -> None:
        """Let those that read a value with heads merged into the batch read the new one."""
        pending = [made]
        while pending:
            value = pending.pop()
            for old in self._made.pop(value, ()):
                if len(self._facts.dims(old) or ()) >= _RANK:
                    continue
                op = TapeBuilder()
                batch, heads = (op.Shape(value, start=axis, end=axis + 1) for axis in (0, 1))
                sizes = ints(op, op.Mul(batch, heads), op.Shape(value, start=2))
                merged = op.Reshape(value, sizes, allowzero=1)
                self._apart[merged] = value
                self._graph.insert_after(producer(value), op.nodes)
                old.replace_all_uses_with(merged)
            inputs = [] if (node := value.producer()) is None else node.inputs
            pending += [v for v in inputs if v is not None and v in self._made]

    def _computed(self, op: Any, node: ir.Node) -> ir.Value | None:
        """Emit what a node computes, for heads on an axis; None where that is not known."""
        read = [self._apart.get(value) for value in node.inputs]
        first, made = read[0] if read else None, None
        if node.op_type in _ELEMENTWISE and any(each is not None for each in read):
            made = self._elementwise(op, node, read)
        elif node.op_type == "MatMul" and first is not None and read[1] is not None:
            made = self._product(op, first, read[1])
        elif node.op_type == "Transpose" and first is not None and _perm(node) == _LAST_TWO:
            made = op.Transpose(first, perm=_LAST_TWO_OF_HEADS)
            if first in self._new:
                self._new[made] = self._new[first]
        elif node.op_type == "Softmax" and first is not None:
            rank = len(self._facts.dims(node.inputs[0]) or ())
            if int_attribute(node, "axis", -1) in (-1, rank - 1):
                made = op.Softmax(first, axis=-1)
        return made

    def _product(self, op: Any, left: ir.Value, right: ir.Value) -> ir.Value | None:
        """Emit a product of as many heads; where batches differ, the old one fails."""
        one, other = (self._facts.dims(value, _RANK) for value in (left, right))
        if one is None or other is None or one[1] != other[1] or number(one[1]) is None:
            return None
        if self._new.get(right, (one[0], one[2])) != (one[0], one[2]):
            return None
        made: ir.Value = op.MatMul(left, right)
        if one[1] != (1, ()):
            self._facts.note(made, (*one[:3], other[3]))
        return made

    def _elementwise(
        self, op: Any, node: ir.Node, read: Sequence[ir.Value | None]
    ) -> ir.Value | None:
        """Emit something elementwise; the other operands have to broadcast over heads."""
        facts, pairs = self._facts, list(zip(node.inputs, read, strict=True))
        old = [value for value, each in pairs if value is not None and each is not None]
        shapes = {(facts.dims(value) or ())[:-2] for value in old}
        heads = {(facts.dims(each, _RANK) or ())[:2] for _, each in pairs if each is not None}
        if len(shapes) != 1 or len(heads) != 1 or () in shapes | heads:
            return None
        keeps = facts.dims(old[0]) == facts.dims(node.outputs[0])
        if node.op_type == "Add" and keeps and any(map(_are_zeros, node.inputs)):
            return self._apart[old[0]]
        (shape,), (leading,), found = shapes, heads, list[ir.Value]()
        for value, made in pairs:
            if made is None:
                dims = facts.dims(value)
                if value is None or dims is None:
                    return None
                made = _merged(op, value, dims, number(leading[1]))
            if made is None:
                return None
            found.append(made)
        dims = facts.dims(node.outputs[0])
        if dims is not None and number(leading[1]) not in (None, 1):
            # What broadcasts to so many texts and heads is as many, or one.
            facts.note(node.outputs[0], (*shape, *dims[len(shape) :]))
        result: ir.Value = getattr(op, node.op_type)(*found)
        return result


def _merged(op: Any, value: ir.Value, dims: Dims, heads: int | None) -> ir.Value | None:
    """Emit an operand beside ``[B * H, S, T]`` for ``[B, H, S, T]``."""
    made: ir.Value | None = None
    if len(dims) < _RANK - 1 or (dims[0] == (1, ()) and len(dims) < _RANK):
        made = value
    elif len(dims) == _RANK - 1 and heads == 1:
        made = op.Unsqueeze(value, ints(op, 1))
    elif len(dims) == _RANK - 1 and heads and dims[0][0] % heads == 0:
        # Such a number broadcasts to no other: the sum fails unless it is that of the scores.
        batch = op.Div(op.Shape(value, start=0, end=1), ints(op, heads))
        sizes = ints(op, batch, heads, op.Shape(value, start=1))
        made = op.Reshape(value, sizes, allowzero=1)
    return made


def _asked_sizes(node: ir.Node, sizes: Dims, facts: ProvedShapes) -> Dims | None:
    """Return the sizes that a Reshape asks for; one that turns out 0 makes all empty."""
    target = None if node.inputs[1] is None else facts.integers(node.inputs[1])
    known = None if target is None else target.known
    if known is None:
        return None
    literal = int_attribute(node, "allowzero", 0)
    asked = [
        sizes[i] if size == (0, ()) and not literal and i < len(sizes) else size
        for i, size in enumerate(known)
    ]
    if (rest := (-1, ())) in asked:
        hole = asked.index(rest)
        others = facts.unknowns.product(asked[:hole] + asked[hole + 1 :])
        asked[hole] = facts.unknowns.quotient(facts.unknowns.product(sizes), others)
    return tuple(asked)


def _perm(node: ir.Node) -> tuple[int, ...]:
    attribute = node.attributes.get("perm")
    return () if attribute is None else tuple(attribute.as_ints())


def _are_zeros(value: ir.Value | None) -> bool:
    """Whether a value is zeros of any shape, or a number times that: torch's baddbmm."""
    node, tensor = made_by(value, "ConstantOfShape", "Expand", "Mul"), constant(value)
    if node is None:
        return tensor is not None and tensor.size == 1 and not tensor.numpy().any()
    if node.op_type == "Expand":
        return _are_zeros(node.inputs[0])
    if node.op_type == "Mul":
        factors = [constant(each) for each in node.inputs]
        finite = any(f is not None and np.isfinite(f.numpy()).all() for f in factors)
        return finite and any(map(_are_zeros, node.inputs))
    filled = node.attributes.get("value")
    return filled is None or not filled.as_tensor().numpy().any()
