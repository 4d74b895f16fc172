# SPDX-License-Identifier: MIT
"""Rotary embedding, as transformers spells it.

    x * cos + Concat(-x2, x1) * sin -> RotaryEmbedding(x, cos, sin)

``x1`` and ``x2`` are the halves of a head. ``cos`` and ``sin`` stay as the graph computes or
gathers them, with each number once and a row for each token. A rotation of a part of each
head rotates the Slice that the exporter wrote. Other rotations, and cosines that are not
proved to be the same in both halves, get a remark.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript.rewriter import MatchContext, MatchResult

from rewrite_rules.graph.nodes import input_of, label, made_by, producer
from rewrite_rules.graph.parameters import constant, constant_ints, int_attribute
from rewrite_rules.graph.rule_set import matching
from rewrite_rules.remarks import Refusal
from rewrite_rules.shapes.dimensions import Dim, number
from rewrite_rules.shapes.node_facts import Site, sliced
from rewrite_rules.shapes.proved_shapes import ProvedShapes
from rewrite_rules.transformer_fusion.heads import (
    FIRST,
    FLAT,
    SPLIT,
    SPLIT_HEADS,
    Heads,
    ints,
    read_heads,
    scaled_input,
)
from rewrite_rules.transformer_fusion.layer_rule import LayerRule
from rewrite_rules.transformer_fusion.sizes import Sizes, count_query_heads, rows_are

_BY_ELEMENT = frozenset({"Cast", "Cos", "Identity", "Neg", "Sin"})


class Rotary(LayerRule):
    """``Add(Mul(x, cos), Mul(turned(x), sin)) -> RotaryEmbedding(x, cos, sin)``."""

    def pattern(self, op, x, cos, turned, sin):  # type: ignore[no-untyped-def]
        return op.Add(op.Mul(x, cos), op.Mul(turned, sin), _outputs=["out"])

    def check(  # type: ignore[override]
        self, context: MatchContext, out: ir.Value, **bound: ir.Value
    ) -> MatchResult:
        """Look at the parts of x, and at the tables."""
        with matching(self._remarks, producer(out), "rotary: ") as result:
            if not self._is_rotation(**bound):
                result.fail("it is not a rotation", out)
        return result

    def _is_rotation(
        self, x: ir.Value, cos: ir.Value, turned: ir.Value, sin: ir.Value
    ) -> bool:
        """Whether halves of ``x``, ``[B, H, S, D]``, are turned; refuse what looks like it."""
        facts, sizes = self._facts, self._facts.dims(x, 4)
        parts = made_by(turned, "Concat")
        if parts is None or cos is sin or sizes is None or x.dtype != ir.DataType.FLOAT:
            return False
        size, tables = number(sizes[3]) or 0, [facts.dims(table, 4) for table in (cos, sin)]
        if any(dims is None or dims[1::2] != ((1, ()), (size, ())) for dims in tables):
            return False
        found = [_part(value, x, size, facts) for value in parts.inputs]
        if None in found or int_attribute(parts, "axis") not in (-1, 3):
            return False
        if found != [(-1, range(size // 2, size)), (1, range(size // 2))] or size % 2:
            raise Refusal("ORP603", f"what {x.name!r} becomes is not its halves turned")
        dims, tokens = tables[0], _token_dims(_heads(x, facts), facts)
        if dims is None or dims != tables[1]:
            raise Refusal("ORP603", "cos and sin are not known to have one shape")
        if tokens is None or not all(map(rows_are, (dims[0], dims[2]), tokens, [facts] * 2)):
            raise Refusal("ORP602", "cos and sin may have more rows than there are tokens")
        if not all(_is_doubled(table, facts) for table in (cos, sin)):
            raise Refusal("ORP603", "the halves of cos or sin are not known to be the same")
        return True

    def rewrite(
        self,
        op: Any,
        x: ir.Value,
        cos: ir.Value,
        sin: ir.Value,
        out: ir.Value,
        **bound: ir.Value,
    ) -> Any:
        """Rotate before heads are transposed, where they are."""
        facts, node = self._facts, producer(out)
        heads, dims = _heads(x, facts), facts.dims(x, 4)
        tokens, count = _token_dims(heads, facts), heads.count
        # The kernel fails where these rows are not those of its tokens.
        tables = self._once((cos, sin, tokens), lambda: _tables(op, facts, heads, (cos, sin)))
        self._remarks.fired(label(node), "RotaryEmbedding")
        if heads.axes == FIRST or count is None or dims is None:
            return op.RotaryEmbedding(x, *tables, _name=node.name)
        size = dims[3][0]
        flat = heads.flat(op, facts, count * size)
        turned = op.RotaryEmbedding(flat, *tables, num_heads=count, _name=node.name)
        if tokens == (dims[0], dims[2]):
            split = op.Reshape(turned, ints(op, 0, 0, count, size))
        else:
            # With the number of heads, the model's Reshape fails where B or S is another.
            reshape = producer(heads.path[-2][0])

            def asked() -> Any:
                first = op.Slice(reshape.inputs[1], ints(op, 0), ints(op, 2))
                return ints(op, first, count, size)

            sizes = self._once((reshape.inputs[1], count, size), asked)
            split = op.Reshape(turned, sizes, **reshape.attributes)
        facts.note(split, (dims[0], dims[2], (count, ()), dims[3]))
        return op.Transpose(split, perm=SPLIT_HEADS)


def _part(
    value: ir.Value | None, x: ir.Value, size: int, facts: ProvedShapes
) -> tuple[int, range] | None:
    """Return the sign and the places of a part of each head of x; None for other values."""
    sign, node = 1, made_by(value, "Neg", "Slice", "Split")
    if node is not None and node.op_type == "Neg":
        sign, value = -1, node.inputs[0]
        node = made_by(value, "Slice", "Split")
    if node is None or node.inputs[0] is not x:
        return None
    if (
        value is not None
        and node.op_type == "Split"
        and int_attribute(node, "axis") in (-1, 3)
    ):
        widths = [number((facts.dims(part, 4) or (None,))[-1]) or 0 for part in node.outputs]
        place = [*node.outputs].index(value)
        start = sum(widths[:place])
        return sign, range(start, start + widths[place])
    if node.op_type == "Slice":
        with contextlib.suppress(Refusal):
            starts, ends, axes, steps = Site(node, facts, facts.opset(node)).slices()
            first, last = number(starts[0]), number(ends[0])
            if [*axes] in ([-1], [3]) and first is not None and last is not None:
                return sign, sliced(size, first, last, steps[0])
    return None


def _is_doubled(table: ir.Value | None, facts: ProvedShapes) -> bool:
    """Whether both halves of each row are proved to be the same."""
    size = (facts.dims(table) or ((0, ()),))[-1]
    while table is not None and (facts.dims(table) or ())[-1:] == (size,):
        tensor, node = constant(table), table.producer()
        if tensor is not None:
            first, second = np.split(tensor.numpy(), 2, axis=-1)
            return np.array_equal(first, second)
        if node is None or node.domain:
            return False
        if node.op_type == "Concat":
            on_last = int_attribute(node, "axis") in (-1, len(facts.dims(table) or ()) - 1)
            return on_last and len(node.inputs) == 2 and node.inputs[0] is node.inputs[1]
        scaled = scaled_input(node)
        if scaled is None and not (node.op_type in _BY_ELEMENT or _takes_rows(node, facts)):
            return False
        table = node.inputs[scaled or 0]
    return False


def _takes_rows(node: ir.Node, facts: ProvedShapes) -> bool:
    """Whether a node takes whole rows, or adds axes."""
    rank = len(facts.dims(node.inputs[0]) or ())
    if node.op_type == "Slice":
        axes = constant_ints(input_of(node, 3))
        return bool(axes) and rank > 0 and rank - 1 not in {axis % rank for axis in axes or ()}
    is_row = rank > 1 and int_attribute(node, "axis") == 0
    return node.op_type == "Unsqueeze" or (node.op_type == "Gather" and is_row)


def _heads(x: ir.Value, facts: ProvedShapes) -> Heads:
    """Follow heads back to what is split into them, if it is proved to have their B and S."""
    sizes, dims = Sizes(facts), facts.dims(x, 4)
    with contextlib.suppress(Refusal):
        heads = read_heads(x, facts, as_they_are=True)
        if (
            dims
            and [axes for _, axes in heads.path] == [FIRST, SPLIT, FLAT][: len(heads.path)]
        ):
            sizes.match_heads(heads, "B H S D")
            count = count_query_heads(x, facts)
            is_checked = sizes.agree() and len(sizes.key) < 2
            path = heads.path if is_checked else heads.path[:2]
            return dataclasses.replace(heads, path=path, count=count)
    return Heads(((x, FIRST),))


def _token_dims(heads: Heads, facts: ProvedShapes) -> tuple[Dim, Dim] | None:
    """Return B and S; None where the rank is not known."""
    dims = facts.dims(heads.source)
    return None if dims is None else (dims[0], dims[heads.axes.index("L")])


def _tables(
    op: Any,
    facts: ProvedShapes,
    heads: Heads,
    doubled: tuple[ir.Value, ir.Value],
) -> tuple[ir.Value, ...]:
    """Emit ``[B, S, D / 2]`` of tables ``[B, 1, S, D]`` that hold each number twice.

    They may have one row for all texts, or for all tokens.
    """
    dims, tokens = facts.dims(doubled[0], 4), _token_dims(heads, facts)
    assert dims is not None
    bounds = [ints(op, number) for number in (0, dims[3][0] // 2, 3)]
    once = [op.Squeeze(op.Slice(value, *bounds), ints(op, 1)) for value in doubled]
    if (dims[0], dims[2]) == tokens:
        return (*once,)
    places = 0, heads.axes.index("L")
    sizes = [op.Shape(heads.source, start=axis, end=axis + 1) for axis in places]
    wanted = ints(op, *sizes, 1)
    return tuple(op.Expand(value, wanted) for value in once)
