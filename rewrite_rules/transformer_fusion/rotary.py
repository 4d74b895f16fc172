# SPDX-License-Identifier: MIT
"""Rotary embedding, whatever spells the rotation.

    x * cos + turned(x) * sin
    Concat(x1 * cos - x2 * sin, x2 * cos + x1 * sin)
        -> RotaryEmbedding(x, positions, cos, sin)

``turned`` is ``[-x2, x1]`` of the halves of a head, or ``[-x1, x0, -x3, x2, ...]`` of pairs
(interleaved), by nodes that only move elements; the sign may stand in ``sin`` instead.
``cos`` and ``sin`` stay as the graph computes or gathers them, with each number once, and
serve as the caches of the kernel: row ``b * S + s`` for token s of row b. A rotation of a part
of each head rotates the Slice that the exporter wrote. Other rotations, and cosines that are
not the same in both halves, get a remark.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript.rewriter import MatchContext, MatchResult, RewriteRuleClassBase

from rewrite_rules.graph.nodes import input_of, label, made_by, producer
from rewrite_rules.graph.parameters import int_attribute
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


def may_be_rotation(node: ir.Node) -> bool:
    """Whether a node ends as one of the patterns does, of which there are 40."""
    return made_by(input_of(node, 0), "Mul", "Sub") is not None


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
            found = self._read(**bound)
        except Refusal as refusal:
            self._remarks.refused(label(node), refusal.behind("rotary: "))
            return result.fail(str(refusal), node)
        return result if found is not None else result.fail("it is not a rotation", node)

    def _parts(
        self, x: ir.Value, turned: ir.Value, **_: object
    ) -> tuple[ir.Value | None, Sequence[ir.Value]]:
        """Return what is rotated, and what it becomes: as a whole or in halves."""
        return None if turned.producer() is None else x, [turned]

    def _read(self, cos: ir.Value, sin: ir.Value, **bound: ir.Value) -> _Rotation | None:
        """Read a rotation; None for what is none, a Refusal for another rotation."""
        x, parts = self._parts(**bound)
        sizes = self._facts.dims(x, 4)
        if x is None or cos is sin or sizes is None or x.dtype != ir.DataType.FLOAT:
            return None
        size = number(sizes[3]) or 0
        width = size // len(parts)
        for dims in (self._facts.dims(table, 4) for table in (cos, sin)):
            if dims is None or dims[1] != (1, ()) or dims[3] != (width, ()):
                return None
        kind = self._kind(x, parts, size)
        if kind is None:
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
        if len(parts) == 1:
            self._check_tables(cos, sin, *kind)
        return _Rotation(x, size, kind[0], width == size)

    def _kind(
        self, x: ir.Value, parts: Sequence[ir.Value], size: int
    ) -> tuple[bool, int] | None:
        """Return whether pairs are turned, and the sign of the sines that make it a rotation.

        None for what is not computed from x alone; refused if x becomes something else.
        """
        if size < 2 or size % 2:
            return None
        try:
            made = [moved(part, x, size, self._facts) for part in parts]
        except CannotEvaluate:
            return None
        array, actual = made[0][0], [one for _, one in made]
        if len(parts) == 2 and all(map(np.array_equal, actual, _halves(array, False))):
            return False, 1
        for interleaved, sign in itertools.product((False, True), (1, -1)):
            first, second = _halves(array, interleaved)
            expected = np.empty_like(array)
            low, high = _halves(expected, interleaved)
            low[...], high[...] = -sign * second, first
            if len(parts) == 1 and np.array_equal(actual[0], expected):
                return interleaved, sign
        raise Refusal(
            "ORP603", f"what {x.name!r} becomes is neither its halves nor its pairs turned"
        )

    def _check_tables(
        self, cos: ir.Value, sin: ir.Value, interleaved: bool, sign: int
    ) -> None:
        """Refuse tables that do not hold each number twice, up to the sign of a sine."""
        for table, factor in ((cos, 1), (sin, sign)):
            try:
                first, second = _halves(columns(table, self._facts), interleaved)
            except CannotEvaluate as error:
                raise Refusal("ORP603", str(error)) from error
            if not np.array_equal(factor * first, second):
                raise Refusal("ORP603", "the halves of cos or sin differ")

    def rewrite(
        self, op: Any, cos: ir.Value, sin: ir.Value, out: ir.Value, **bound: ir.Value
    ) -> Any:
        """Rotate before heads are transposed, where they are."""
        found, node = self._read(cos, sin, **bound), producer(out)
        assert found is not None
        x = found.x
        # Layers share the rows: the kernel fails where they are not those of its tokens.
        key = (cos, sin, found.interleaved, token_dims(x, self._facts))
        if key not in self._tables:
            self._tables[key] = _tables(op, self._facts, found, cos, sin)
        attributes = {"interleaved": int(found.interleaved), "_domain": "com.microsoft"}
        self._remarks.fired(label(node), "RotaryEmbedding")
        if not is_transposed_heads(x):
            return op.RotaryEmbedding(x, *self._tables[key], **attributes, _name=node.name)
        split = unsplit(x)
        known = count_heads(x, self._facts)
        heads = known or op.Shape(split, start=2, end=3)
        width = known * found.size if known else op.Mul(heads, ints(op, found.size))
        flat, sizes = rows(op, x, self._facts, width), ints(op, 0, 0, heads, found.size)
        turned = op.RotaryEmbedding(flat, *self._tables[key], **attributes, _name=node.name)
        before, split = split, op.Reshape(turned, sizes)
        dims = self._facts.dims(before, 4)
        if dims is not None and known:
            self._facts.note(split, (*dims[:2], (known, ()), dims[3]))
        return op.Transpose(split, perm=SPLIT_HEADS)


class SplitRotary(Rotary):
    """``Concat(x1 * cos - x2 * sin, x2 * cos + x1 * sin) -> RotaryEmbedding``."""

    def pattern(self, op, first, second, cos, sin):  # type: ignore[no-untyped-def, override]
        low = op.Sub(op.Mul(first, cos), op.Mul(second, sin))
        high = op.Add(op.Mul(second, cos), op.Mul(first, sin))
        return op.Concat(low, high, _allow_other_attributes=True, _outputs=["out"])

    def check(  # type: ignore[override]
        self, context: MatchContext, out: ir.Value, **bound: ir.Value
    ) -> MatchResult:
        """Look at the axis first: no other joins the halves of heads."""
        axis, dims = int_attribute(producer(out), "axis", 0), self._facts.dims(out)
        if axis == -1 or (dims is not None and axis == len(dims) - 1):
            return super().check(context, out, **bound)
        return MatchResult().fail("it does not join along the last axis", producer(out))

    def _parts(  # type: ignore[override]
        self, first: ir.Value, second: ir.Value, **_: object
    ) -> tuple[ir.Value | None, Sequence[ir.Value]]:
        """Return what the terms are cut from, and the terms."""
        node = first.producer()
        return node.inputs[0] if node is not None and node.inputs else None, [first, second]


@dataclasses.dataclass(frozen=True, eq=False)
class _Rotation:
    """What is rotated: x ``[B, H, S, D]``; ``size`` is D.

    ``interleaved``: pairs are turned instead of halves. ``doubled``: cos and sin hold each
    number twice, ``[B, 1, S, D]``.
    """

    x: ir.Value
    size: int
    interleaved: bool
    doubled: bool


def _halves(array: Array, interleaved: bool) -> tuple[Array, Array]:
    """The two parts of each head that are turned into one another."""
    if interleaved:
        return array[..., 0::2], array[..., 1::2]
    half = array.shape[-1] // 2
    return array[..., :half], array[..., half:]


def _tables(
    op: Any, facts: ProvedShapes, found: _Rotation, cos: ir.Value, sin: ir.Value
) -> tuple[ir.Value, ...]:
    """Positions ``[B, S]`` into tables of a row for each token, and the tables."""
    half, dims = found.size // 2, facts.dims(cos)
    sizes = batch_and_length(op, found.x, facts)
    # The second of each two: the first sine may have the other sign.
    start, step = (1, 2) if found.interleaved else (half, 1)
    bounds = [ints(op, number) for number in (start, _BEYOND, 3, step)]
    once = [op.Slice(value, *bounds) if found.doubled else value for value in (cos, sin)]
    flat = ints(op, -1, half)
    tables = [op.Reshape(value, flat) for value in once]
    tokens = token_dims(found.x, facts)
    if dims is None or tokens is None or (dims[0], dims[2]) != ((1, ()), tokens[1]):
        # The kernel wants S rows of a table that serves all tokens, or an empty batch, too.
        pads = ints(op, 0, 0, sizes[1], 0)
        tables = [op.Pad(table, pads) for table in tables]
    own = op.Gather(op.Shape(cos), ints(op, 0, 2))
    count = op.ReduceProd(own, keepdims=0)
    numbers = op.Range(op.Constant(value_int=0), count, op.Constant(value_int=1))
    # One row of positions may serve the whole batch.
    return op.Expand(op.Reshape(numbers, own, allowzero=1), ints(op, *sizes)), *tables
