# SPDX-License-Identifier: MIT
"""Which columns of a table are equal, and what moves the elements of heads: proofs for rotary.

What a graph computes from random numbers proves what it computes from all, where operators are
analytic or only move elements, and treat all rows alike. Others end the search: what they make
counts as random.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from rewrite_rules.graph.nodes import input_of, made_by
from rewrite_rules.graph.parameters import constant, constant_ints, int_attribute
from rewrite_rules.shapes.dimensions import Dims, number
from rewrite_rules.shapes.evaluator import Array, CannotEvaluate, GraphEvaluator, NodeEvaluator
from rewrite_rules.shapes.proved_shapes import ProvedShapes

_ANALYTIC = frozenset({"Add", "Cos", "Identity", "Mul", "Neg", "Sin", "Sub"})
# These move elements between columns, along one axis.
_ALONG = frozenset({"Concat", "Gather", "Slice", "Split"})
_RESHAPES = frozenset({"Reshape", "Squeeze", "Unsqueeze"})
_MAX_NODES = 64
_PREFIX = (2, 3, 5)


def moved(part: ir.Value, x: ir.Value, size: int, facts: ProvedShapes) -> tuple[Array, Array]:
    """Return random heads ``[2, 3, 5, size]``, and what the graph makes of them.

    CannotEvaluate, where it may be another thing for other numbers, batches or lengths.
    """
    heads = np.random.default_rng(size).standard_normal((*_PREFIX, size)).astype(np.float32)
    before, pending, seen = facts.dims(x, 4), [part], set[ir.Value]()
    while pending:
        value = pending.pop()
        if value is x or value in seen or constant(value) is not None:
            continue
        seen.add(value)
        node, dims = value.producer(), facts.dims(value)
        if node is None or before is None or dims is None or dims[:3] != before[:3]:
            raise CannotEvaluate(f"{value.name!r} is not made of each head of {x.name!r}")
        if len(seen) > _MAX_NODES or not _moves_in_heads(node, dims, facts):
            raise CannotEvaluate(f"{node.op_type} does more than to move elements")
        pending += _data(node)
    return heads, GraphEvaluator(facts, {x: heads}, NodeEvaluator()).array(part)


def _data(node: ir.Node) -> list[ir.Value]:
    """The inputs that a node moves or computes with, without sizes and indices."""
    count = None if node.op_type in {*_ANALYTIC, "Concat"} else 1
    return [value for value in node.inputs[:count] if value is not None]


def _moves_in_heads(node: ir.Node, dims: Dims, facts: ProvedShapes) -> bool:
    """Whether a node only moves elements or their signs within each head."""
    if node.domain:
        return False
    if node.op_type in _RESHAPES:
        return True
    if node.op_type == "Transpose":
        perm = node.attributes.get("perm")
        return perm is not None and [*perm.as_ints()][:3] == [0, 1, 2]
    if node.op_type in _ALONG:
        axes = _axes(node, facts)
        return axes is not None and min(axes) >= 3
    factors = [constant(value) for value in node.inputs]
    scales = any(tensor is not None and tensor.size == 1 for tensor in factors)
    return node.op_type in ("Identity", "Neg") or (node.op_type == "Mul" and scales)


def _axes(node: ir.Node, facts: ProvedShapes) -> set[int] | None:
    """The axes along which a node takes fixed parts; None where these are not known."""
    dims = facts.dims(node.inputs[0])
    if dims is None:
        return None
    if node.op_type == "Slice":
        if len(node.inputs) < 4 or any(
            numbers is None or None in map(number, numbers)
            for numbers in map(facts.numbers, node.inputs[1:])
        ):
            return None
        axes = constant_ints(node.inputs[3]) or []
    else:
        if node.op_type == "Gather" and constant_ints(node.inputs[1]) is None:
            return None
        axes = [int_attribute(node, "axis", 0)]
    return {axis % len(dims) for axis in axes} or None


def columns(table: ir.Value, facts: ProvedShapes) -> Array:
    """Return what a table is for random numbers: columns that are equal here always are.

    CannotEvaluate, where sizes are not known.
    """
    table = _before_rows(table, facts)
    bases, pending = dict[ir.Value, Array](), [table]
    sizes: dict[object, int] = {}
    rng = np.random.default_rng(0)
    seen = set[ir.Value]()
    while pending:
        value = pending.pop()
        if value in seen or constant(value) is not None:
            continue
        seen.add(value)
        node, dims = value.producer(), facts.dims(value)
        if node is not None and dims is not None and _keeps_columns(node, facts):
            pending += _data(node)
        elif dims is None:
            raise CannotEvaluate(f"the rank of {value.name!r} is not known")
        else:
            # Lengths that differ from each other and from 1.
            shape = [number(dim) or sizes.setdefault(dim, len(sizes) + 2) for dim in dims]
            bases[value] = rng.standard_normal(shape).astype(np.float32)
        if len(seen) > _MAX_NODES:
            raise CannotEvaluate(f"{table.name!r} depends on too much")
    return GraphEvaluator(facts, bases, NodeEvaluator()).array(table)


def _before_rows(table: ir.Value, facts: ProvedShapes) -> ir.Value:
    """Return what rows are taken of: what all of its columns have in common, theirs have."""
    while (node := made_by(table, "Slice")) is not None and node.inputs[0] is not None:
        dims, axes = facts.dims(node.inputs[0]), constant_ints(input_of(node, 3))
        if not dims or not axes or len(dims) - 1 in {axis % len(dims) for axis in axes}:
            break
        table = node.inputs[0]
    return table


def _keeps_columns(node: ir.Node, facts: ProvedShapes) -> bool:
    """Whether a node is analytic, or moves whole columns."""
    if node.domain or node.op_type in _RESHAPES or node.op_type in _ANALYTIC:
        return not node.domain
    axes = _axes(node, facts) if node.op_type in _ALONG else None
    dims = facts.dims(node.inputs[0])
    return axes is not None and dims is not None and axes == {len(dims) - 1}
