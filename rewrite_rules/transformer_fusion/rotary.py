# SPDX-License-Identifier: MIT
"""Rotary embedding, whatever spells the rotation.

    x * cos + turned(x) * sin  ->  RotaryEmbedding(x, positions, cos, sin)

``turned`` is found by what it computes: ``[-x2, x1]`` of the halves of a head, or
``[-x1, x0, -x3, x2, ...]`` of its pairs (interleaved). ``cos`` and ``sin`` stay as the graph
computes or gathers them, with each number once, and serve as the caches of the kernel: row
``b * S + s`` for token s of row b, so that no greatest length is needed. A rotation of a part
of each head rotates the Slice that the exporter wrote.

Left as it is: a rotation that is not one of the two, or whose cosines are not the same in both
halves; both are named.
"""

from __future__ import annotations

__all__ = ["Rotary"]

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript.rewriter import MatchContext, MatchResult, RewriteRuleClassBase

from rewrite_rules.graph.nodes import label, producer
from rewrite_rules.masks.graph_evaluator import GraphEvaluator
from rewrite_rules.masks.node_evaluator import Array, CannotEvaluate, NodeEvaluator
from rewrite_rules.remarks import Remarks
from rewrite_rules.shapes.dimensions import number
from rewrite_rules.shapes.proved_shapes import ProvedShapes
from rewrite_rules.transformer_fusion.head_layout import (
    SPLIT_HEADS,
    ints,
    is_transposed_heads,
    rows,
)

_BEYOND = (1 << 63) - 1


class Rotary(RewriteRuleClassBase):
    """``Add(Mul(x, cos), Mul(turned(x), sin)) -> RotaryEmbedding(x, positions, cos, sin)``."""

    def __init__(
        self, facts: ProvedShapes, runs: Sequence[GraphEvaluator], remarks: Remarks
    ) -> None:
        super().__init__(remove_nodes=False)
        self._facts = facts
        self._runs = runs
        self._remarks = remarks
        self._nodes = NodeEvaluator()
        self._tables: dict[object, tuple[ir.Value, ...]] = {}

    def pattern(self, op, x, cos, turned, sin):  # type: ignore[no-untyped-def]
        return op.Add(op.Mul(x, cos), op.Mul(turned, sin), _outputs=["out"])

    def check(
        self,
        context: MatchContext,
        x: ir.Value,
        cos: ir.Value,
        turned: ir.Value,
        sin: ir.Value,
        out: ir.Value,
    ) -> MatchResult:
        """Compare what the subgraph computes with a rotation."""
        del context  # Unused
        result, node = MatchResult(), producer(out)
        sizes = self._facts.shape(x)
        if not isinstance(sizes, tuple) or len(sizes) != 4 or x.dtype != ir.DataType.FLOAT:
            return result.fail("x is not [B, H, S, D] in float32", x)
        if turned.producer() is None or cos is sin:
            return result.fail("nothing is turned", turned)
        try:
            found = [(run.array(cos), run.array(sin)) for run in self._runs]
        except CannotEvaluate as error:
            return result.fail(str(error), cos)
        size = found[0][0].shape[-1] if found and found[0][0].ndim else 0
        self._interleaved = self._kind(x, turned, size)
        if self._interleaved is None:
            return result.fail("it is not a rotation", node)
        for array in (array for pair in found for array in pair):
            if array.ndim != 4 or array.shape[1] != 1 or array.shape[-1] != size:
                return result.fail("cos is not [B, 1, S, D]", cos)
            if not np.array_equal(*_halves(array, self._interleaved)):
                self._remarks.refused(label(node), "rotary: the halves of cos differ")
                return result.fail("the halves of cos differ", cos)
        return result

    def _kind(self, x: ir.Value, turned: ir.Value, size: int) -> int | None:
        """Return 0 for halves, 1 for pairs, None for any other subgraph."""
        if size < 2 or size % 2 or number(self._facts.shape(x)[3]) not in (size, None):  # type: ignore[index]
            return None
        array = np.random.default_rng(size).standard_normal((2, 3, 5, size))
        array = array.astype(np.float32)
        try:
            actual = GraphEvaluator(self._facts, {x: array}, self._nodes).array(turned)
        except CannotEvaluate:
            return None
        for kind in (0, 1):
            first, second = _halves(array, kind)
            expected = np.empty_like(array)
            low, high = _halves(expected, kind)
            low[...], high[...] = -second, first
            if np.array_equal(actual, expected):
                return kind
        return None

    def rewrite(
        self, op: Any, x: ir.Value, cos: ir.Value, sin: ir.Value, out: ir.Value, **_: object
    ) -> Any:
        """Rotate before heads are transposed, where they are."""
        node, shape = producer(out), self._facts.shape(x)
        assert isinstance(shape, tuple) and self._interleaved is not None
        size = self._runs[0].array(cos).shape[-1]
        # Layers share the rows: the kernel fails where they are not those of its tokens.
        key = (cos, sin, self._interleaved)
        if key not in self._tables:
            self._tables[key] = _tables(op, x, cos, sin, size, self._interleaved)
        attributes = {"interleaved": self._interleaved, "_domain": "com.microsoft"}
        self._remarks.fired(label(node), "RotaryEmbedding")
        if not is_transposed_heads(x):
            return op.RotaryEmbedding(x, *self._tables[key], **attributes, _name=node.name)
        heads = number(shape[1])
        flat = rows(op, x, self._facts, -1 if heads is None else heads * size)
        turned = op.RotaryEmbedding(flat, *self._tables[key], **attributes, _name=node.name)
        split = op.Reshape(turned, ints(op, 0, 0, heads or -1, size))
        return op.Transpose(split, perm=SPLIT_HEADS)


def _halves(array: Array, interleaved: int) -> tuple[Array, Array]:
    """The two parts of each head that are turned into one another."""
    if interleaved:
        return array[..., 0::2], array[..., 1::2]
    half = array.shape[-1] // 2
    return array[..., :half], array[..., half:]


def _tables(
    op: Any, x: ir.Value, cos: ir.Value, sin: ir.Value, size: int, interleaved: int
) -> tuple[ir.Value, ...]:
    """Positions ``[B, S]`` into tables of a row for each token, and the tables."""
    end, step = (_BEYOND, 2) if interleaved else (size // 2, 1)
    bounds = [ints(op, number) for number in (0, end, 3, step)]
    flat = ints(op, -1, size // 2)
    tables = [op.Reshape(op.Slice(value, *bounds), flat) for value in (cos, sin)]
    own = op.Gather(op.Shape(cos), ints(op, 0, 2))
    count = op.ReduceProd(own, keepdims=0)
    numbers = op.Range(op.Constant(value_int=0), count, op.Constant(value_int=1))
    # One row of positions may serve the whole batch.
    wanted = op.Gather(op.Shape(x), ints(op, 0, 2))
    return op.Expand(op.Reshape(numbers, own), wanted), *tables
