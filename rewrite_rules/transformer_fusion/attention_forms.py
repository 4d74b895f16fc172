# SPDX-License-Identifier: MIT
"""Writes attention in the form that is fastest for one token, a prompt or an encoder."""

from __future__ import annotations

import dataclasses
from typing import Any

import onnx_ir as ir

from rewrite_rules.graph.nodes import producer
from rewrite_rules.shapes.proved_shapes import ProvedShapes
from rewrite_rules.transformer_fusion.head_layout import (
    SPLIT_HEADS,
    count_heads,
    in_order,
    ints,
    is_transposed_heads,
    rows,
    unsplit,
)
from rewrite_rules.transformer_fusion.repeated_heads import RepeatedHeads

_MICROSOFT = "com.microsoft"
# Where nodes of opset 23 wait until the rest of the model has been converted.
OPSET_23 = "ortplugins.opset23"


@dataclasses.dataclass(frozen=True, eq=False)
class Attention:
    """``softmax(scale q k' + mask) v``, where query heads share key and value heads.

    Attributes:
        facts: Proves shapes.
        query: ``[B, H, S, D]``, before it is scaled.
        read_keys: ``[B, G, T, D]``, past and new, or ``[B, T, G, D]``.
        read_values: The same.
        mask: What is added to the scores; None for nothing.
        scale: What the scores are multiplied by.
        heads: H.
        groups: G.
        size: D.
        reshaped: Whether only the order of the result's elements counts.
        joins: Whether a form returns the new cache as well, made of the old one.
    """

    facts: ProvedShapes
    query: ir.Value
    read_keys: RepeatedHeads
    read_values: RepeatedHeads
    mask: ir.Value | None
    scale: float
    heads: int
    groups: int
    size: int
    reshaped: bool
    joins: bool = False

    @property
    def keys(self) -> ir.Value:
        """The keys, as they are read."""
        return self.read_keys.source

    @property
    def values(self) -> ir.Value:
        """The values, as they are read."""
        return self.read_values.source

    def length(self, op: Any) -> Any:
        """Emit S."""
        source, axis = self._tokens()
        return op.Shape(source, start=axis, end=axis + 1)

    def batch(self, op: Any) -> Any:
        """Emit B."""
        return op.Shape(self._tokens()[0], start=0, end=1)

    def _tokens(self) -> tuple[ir.Value | None, int]:
        """What is split into heads, so that nothing is split for its sizes; S's axis."""
        split = unsplit(self.query)
        if split is self.query:
            return split, 2
        return producer(split).inputs[0] if count_heads(split, self.facts) else split, 1

    def one_token(self, op: Any) -> list[Any]:
        """Emit ``[B, 1, H, D]``, where query heads of a group are the rows of one MatMul.

        Or ``[B, G, H / G, D]``, of the same elements in the same order.
        """
        sizes = ints(op, -1, self.groups, self.heads // self.groups, self.size)
        keys = self._cache(op, self.keys, one=True)
        scores = self._scores(op, op.Reshape(in_order(self.query), sizes), keys)
        values = self._cache(op, self.values, one=True)
        mixed = op.MatMul(self._weights(op, scores), values)
        mixed = mixed if self.reshaped else op.Reshape(mixed, self._sizes(op, -1, 1))
        return self._results(mixed, keys, values)

    def any_tokens(self, op: Any) -> list[Any]:
        """Emit ``[B, S, H, D]`` for any number of tokens."""
        heads, groups = self.heads, self.groups
        query = self._split(op, self.query, heads)
        held, values = (self._cache(op, one) for one in (self.keys, self.values))
        if heads == groups:
            mixed = op.MatMul(self._weights(op, self._scores(op, query, held)), values)
            return self._results(op.Transpose(mixed, perm=SPLIT_HEADS), held, values)
        keys, tokens = op.Shape(held, start=2, end=3), self.length(op)
        count = op.Mul(tokens, ints(op, heads // groups))
        # Reshape cannot infer a size of an empty tensor: B or S may be 0.
        rows = op.Reshape(query, ints(op, 0, groups, count, self.size))
        each = op.Reshape(self._scores(op, rows, held), ints(op, 0, heads, tokens, keys))
        grouped = op.Reshape(self._weights(op, each), ints(op, 0, groups, count, keys))
        each = op.Reshape(op.MatMul(grouped, values), ints(op, 0, heads, tokens, self.size))
        return self._results(op.Transpose(each, perm=SPLIT_HEADS), held, values)

    def by_kernel(
        self, op: Any, last: ir.Value, total: ir.Value, cached: bool = False
    ) -> list[Any]:
        """Emit ``[B, S, H, D]``, or ``[B, S, H * D]``, by GroupQueryAttention.

        Args:
            op: Makes the nodes.
            last: T - 1 for each row, int32.
            total: T, int32.
            cached: Whether the kernel reads the cache; else new tokens are by themselves.
        """
        query = self._rows(op, self.query, self.heads)
        joins = [producer(whole).inputs for whole in (self.keys, self.values)]
        attended, keys, values = op.GroupQueryAttention(
            query,
            *(self._rows(op, new, self.groups) for _, new in joins),
            *(past if cached else None for past, _ in joins),
            last,
            total,
            None,
            None,
            None,
            self.mask,
            num_heads=self.heads,
            kv_num_heads=self.groups,
            scale=self.scale,
            _domain=_MICROSOFT,
            _outputs=3,
        )
        if not self.reshaped:
            attended = op.Reshape(attended, self._sizes(op))
        return self._results(attended, keys, values)

    def whole(self, op: Any) -> list[Any]:
        """Emit ``[B, S, H, D]`` by the standard operator, whose kernel needs no Transpose."""
        both = (self.read_keys, self.read_values)
        attributes = {"scale": self.scale, "_domain": OPSET_23}
        if any(not (heads.split or is_transposed_heads(heads.source)) for heads in both):
            # A cache is not laid out anew.
            stored = [
                op.Transpose(heads.source, perm=SPLIT_HEADS) if heads.split else heads.source
                for heads in both
            ]
            mixed = op.Attention(self.query, *stored, self.mask, **attributes)
            return [op.Transpose(mixed, perm=SPLIT_HEADS)]
        width = self.groups * self.size
        mixed = op.Attention(
            self._rows(op, self.query, self.heads),
            *(rows(op, heads.source, self.facts, width, heads.split) for heads in both),
            self.mask,
            q_num_heads=self.heads,
            kv_num_heads=self.groups,
            **attributes,
        )
        return [op.Reshape(mixed, self._sizes(op))]

    def nothing(self, op: Any) -> list[Any]:
        """Emit ``[B, S, H, D]`` of zeros: what no tokens get, and what no keys add up to."""
        rows = op.Shape(unsplit(self.query), start=0, end=1)
        sizes = ints(op, rows, self.length(op), self.heads, self.size)
        return [op.Expand(op.Constant(value_float=0.0), sizes)]

    def _rows(self, op: Any, split: Any, heads: int) -> ir.Value:
        return rows(op, split, self.facts, heads * self.size)

    def _sizes(self, op: Any, batch: int = 0, length: int = 0) -> Any:
        return ints(op, batch, length, self.heads, self.size)

    def _results(self, mixed: Any, keys: Any, values: Any) -> list[Any]:
        return [mixed, keys, values] if self.joins else [mixed]

    def _cache(self, op: Any, whole: ir.Value, one: bool = False) -> Any:
        """Emit ``[B, G, T, D]`` of past and new tokens, or take it as it is."""
        if not self.joins:
            return whole
        past, new = producer(whole).inputs
        assert new is not None
        flat = in_order(new)
        if not one:
            new = self._split(op, new, self.groups)
        elif flat is not new:
            new = op.Reshape(flat, ints(op, -1, self.groups, 1, self.size))
        return op.Concat(past, new, axis=2)

    def _split(self, op: Any, heads: ir.Value, count: int) -> Any:
        """Emit ``[B, H, S, D]``, from what its Transpose reads."""
        if not is_transposed_heads(heads):
            return heads
        split = op.Reshape(self._rows(op, heads, count), ints(op, 0, 0, count, self.size))
        return op.Transpose(split, perm=SPLIT_HEADS)

    def _scores(self, op: Any, query: Any, keys: Any) -> Any:
        return op.FusedMatMul(query, keys, transB=1, alpha=self.scale, _domain=_MICROSOFT)

    def _weights(self, op: Any, scores: ir.Value) -> Any:
        total = scores if self.mask is None else op.Add(scores, self.mask)
        return op.Softmax(total, axis=-1)
