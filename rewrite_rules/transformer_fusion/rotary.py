# SPDX-License-Identifier: MIT
"""Rotary embedding, whatever spells the rotation.

    x * cos + turned(x) * sin -> RotaryEmbedding(x, positions, cos, sin)

``turned`` is ``[-x2, x1]`` of the halves of a head, or ``[-x1, x0, -x3, x2, ...]`` of pairs
(interleaved), by nodes that only move elements.
``cos`` and ``sin`` stay as the graph computes or gathers them, with each number once, and
serve as the caches of the kernel: row ``b * S + s`` for token s of row b. A rotation of a part
of each head rotates the Slice that the exporter wrote. Other rotations, and cosines that are
not the same in both halves, get a remark.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript.rewriter import MatchContext, MatchResult, RewriteRuleClassBase

from rewrite_rules.graph.nodes import label, producer
from rewrite_rules.remarks import Refusal, Remarks
from rewrite_rules.shapes.dimensions import number
from rewrite_rules.shapes.evaluator import Array, CannotEvaluate
from rewrite_rules.shapes.proved_shapes import ProvedShapes
from rewrite_rules.transformer_fusion.columns import columns, moved
from rewrite_rules.transformer_fusion.head_layout import (
    SPLIT_HEADS,
    batch_and_length,
    count_heads,
    ints,
    is_transposed_heads,
    rows,
    rows_are,
    token_dims,
    unsplit,
)

_BEYOND = (1 << 63) - 1


class Rotary(RewriteRuleClassBase):
    """``Add(Mul(x, cos), Mul(turned(x), sin)) -> RotaryEmbedding(x, positions, cos, sin)``."""

    def __init__(self, facts: ProvedShapes, remarks: Remarks) -> None:
        super().__init__(remove_nodes=False)
        self._facts = facts
        self._remarks = remarks
        self._tables: dict[object, tuple[ir.Value, ...]] = {}

    def pattern(self, op, x, cos, turned, sin):  # type: ignore[no-untyped-def]
        return op.Add(op.Mul(x, cos), op.Mul(turned, sin), _outputs=["out"])

    def check(  # type: ignore[override]
        self, context: MatchContext, out: ir.Value, **bound: ir.Value
    ) -> MatchResult:
        """Compare what the subgraph computes with a rotation, and look at the tables."""
        result, node = MatchResult(), producer(out)
        try:
            is_rotation = self._is_interleaved(**bound) is not None
        except Refusal as refusal:
            self._remarks.refused(label(node), refusal.behind("rotary: "))
            return result.fail(str(refusal), node)
        return result if is_rotation else result.fail("it is not a rotation", node)

    def _is_interleaved(
        self, x: ir.Value, cos: ir.Value, turned: ir.Value, sin: ir.Value
    ) -> bool | None:
        """Whether pairs of ``x``, ``[B, H, S, D]``, are turned, and not halves.

        None for what is no rotation, a Refusal for another rotation.
        """
        sizes = self._facts.dims(x, 4)
        if turned.producer() is None or cos is sin or sizes is None:
            return None
        if x.dtype != ir.DataType.FLOAT:
            return None
        size = number(sizes[3]) or 0
        for dims in (self._facts.dims(table, 4) for table in (cos, sin)):
            if dims is None or dims[1] != (1, ()) or dims[3] != (size, ()):
                return None
        interleaved = self._turns_pairs(x, turned, size)
        if interleaved is None:
            return None
        if self._facts.dims(cos) != self._facts.dims(sin):
            raise Refusal("ORP603", "cos and sin are not known to have one shape")
        dims, tokens = self._facts.dims(cos, 4), token_dims(x, self._facts)
        if (
            dims is None
            or tokens is None
            or not all(map(rows_are, (dims[0], dims[2]), tokens, [self._facts] * 2))
        ):
            raise Refusal("ORP602", "cos and sin may have more rows than there are tokens")
        self._check_tables(cos, sin, interleaved)
        return interleaved

    def _turns_pairs(self, x: ir.Value, turned: ir.Value, size: int) -> bool | None:
        """Whether pairs are turned; None for what is not computed from x alone."""
        if size < 2 or size % 2:
            return None
        try:
            array, actual = moved(turned, x, size, self._facts)
        except CannotEvaluate:
            return None
        for interleaved in (False, True):
            first, second = _halves(array, interleaved)
            expected = np.empty_like(array)
            low, high = _halves(expected, interleaved)
            low[...], high[...] = -second, first
            if np.array_equal(actual, expected):
                return interleaved
        raise Refusal(
            "ORP603", f"what {x.name!r} becomes is neither its halves nor its pairs turned"
        )

    def _check_tables(self, cos: ir.Value, sin: ir.Value, interleaved: bool) -> None:
        """Refuse tables that do not hold each number twice."""
        for table in (cos, sin):
            try:
                first, second = _halves(columns(table, self._facts), interleaved)
            except CannotEvaluate as error:
                raise Refusal("ORP603", str(error)) from error
            if not np.array_equal(first, second):
                raise Refusal("ORP603", "the halves of cos or sin differ")

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
        interleaved = self._is_interleaved(x=x, cos=cos, sin=sin, **bound)
        node, dims = producer(out), self._facts.dims(x, 4)
        assert interleaved is not None and dims is not None
        size = dims[3][0]
        # Layers share the rows: the kernel fails where they are not those of its tokens.
        key = (cos, sin, interleaved, token_dims(x, self._facts))
        if key not in self._tables:
            self._tables[key] = _tables(op, self._facts, x, interleaved, (cos, sin))
        attributes = {"interleaved": int(interleaved), "_domain": "com.microsoft"}
        self._remarks.fired(label(node), "RotaryEmbedding")
        if not is_transposed_heads(x):
            return op.RotaryEmbedding(x, *self._tables[key], **attributes, _name=node.name)
        split = unsplit(x)
        known = count_heads(x, self._facts)
        heads = known or op.Shape(split, start=2, end=3)
        width = known * size if known else op.Mul(heads, ints(op, size))
        flat, sizes = rows(op, x, self._facts, width), ints(op, 0, 0, heads, size)
        turned = op.RotaryEmbedding(flat, *self._tables[key], **attributes, _name=node.name)
        before, split = split, op.Reshape(turned, sizes)
        dims = self._facts.dims(before, 4)
        if dims is not None and known:
            self._facts.note(split, (*dims[:2], (known, ()), dims[3]))
        return op.Transpose(split, perm=SPLIT_HEADS)


def _halves(array: Array, interleaved: bool) -> tuple[Array, Array]:
    """The two parts of each head that are turned into one another."""
    if interleaved:
        return array[..., 0::2], array[..., 1::2]
    half = array.shape[-1] // 2
    return array[..., :half], array[..., half:]


def _tables(
    op: Any,
    facts: ProvedShapes,
    x: ir.Value,
    interleaved: bool,
    doubled: tuple[ir.Value, ir.Value],
) -> tuple[ir.Value, ...]:
    """Positions ``[B, S]`` into tables of a row for each token, and the tables.

    Of tables ``[B, 1, S, D]`` that hold each number twice.
    """
    cos, dims, tokens = doubled[0], facts.dims(doubled[0], 4), token_dims(x, facts)
    assert dims is not None and tokens is not None
    half, sizes = dims[3][0] // 2, batch_and_length(op, x, facts)
    bounds = [0, _BEYOND, 3, 2] if interleaved else [0, half, 3, 1]
    once = [op.Slice(value, *(ints(op, number) for number in bounds)) for value in doubled]
    flat = ints(op, -1, half)
    tables = [op.Reshape(value, flat) for value in once]
    if (dims[0], dims[2]) != ((1, ()), tokens[1]):
        # The kernel wants S rows of a table that serves all tokens, or an empty batch, too.
        pads = ints(op, 0, 0, sizes[1], 0)
        tables = [op.Pad(table, pads) for table in tables]
    own = op.Gather(op.Shape(cos), ints(op, 0, 2))
    count = op.ReduceProd(own, keepdims=0)
    numbers = op.Range(op.Constant(value_int=0), count, op.Constant(value_int=1))
    # One row of positions may serve the whole batch.
    return op.Expand(op.Reshape(numbers, own, allowzero=1), ints(op, *sizes)), *tables
