# SPDX-License-Identifier: MIT
"""One MatMul for all query heads that share a key or value head, instead of repeated heads.

    MatMul(L[B, G * r, S, X], repeat(K[B, G, X, N], r))
        -> Reshape(MatMul(Reshape(L, [B, G, r * S, X]), K), [B, G * r, S, N])
    MatMul(L[..., r, S, X], K[..., 1, X, N])
        -> Reshape(MatMul(Reshape(L, [..., 1, r * S, X]), K), [..., r, S, N])

The second is the same where MatMul's broadcasting repeats. Each sum has the same terms in the
same order; keys and values are read once for r heads, and copied (once) only where the sizes
that repeat them are not proved to be their own.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript.rewriter import MatchContext, MatchResult

from rewrite_rules.graph.nodes import label, producer
from rewrite_rules.graph.rule_set import matching
from rewrite_rules.remarks import Refusal, Remarks
from rewrite_rules.shapes.dimensions import Dims, known, number
from rewrite_rules.shapes.proved_shapes import ProvedShapes
from rewrite_rules.transformer_fusion.heads import FIRST, Heads, follow_heads, ints
from rewrite_rules.transformer_fusion.layer_rule import LayerRule
from rewrite_rules.transformer_fusion.sizes import Sizes, count_query_heads


class GroupQueries(LayerRule):
    """MatMul(left, repeated heads) -> Reshape(MatMul(Reshape(left), heads))."""

    def __init__(self, facts: ProvedShapes, nonempty: ProvedShapes, remarks: Remarks) -> None:
        """``nonempty``: of runs without empty values, in which Reshapes move the batch."""
        super().__init__(facts, remarks)
        self._nonempty = nonempty

    def pattern(self, op, left, right):  # type: ignore[no-untyped-def]
        return op.MatMul(left, right, _outputs=["out"])

    def check(
        self, context: MatchContext, left: ir.Value, right: ir.Value, out: ir.Value
    ) -> MatchResult:
        """Find what the right operand repeats; a repetition that stays is a remark."""
        with matching(self._remarks, producer(out), "heads stay repeated: ") as result:
            if self._read(left, right) is None:
                result.fail("repeats no heads", right)
        return result

    def rewrite(
        self, op: Any, left: ir.Value, right: ir.Value, out: ir.Value, **_: object
    ) -> Any:
        """Emit the MatMul of all rows of a group, and the Reshapes around it."""
        heads, node = self._read(left, right), producer(out)
        rows, columns = self._facts.dims(left), self._facts.dims(right)
        assert heads is not None and rows is not None and columns is not None
        groups = heads.count or 1
        query_heads = groups * heads.repeats
        once = _emit_source(op, heads)
        inner = number(rows[-1]) or op.Shape(once, start=-2, end=-1)
        width = number(columns[-1]) or op.Shape(once, start=-1)

        def counted() -> tuple[Any, Any, Any]:
            before, queries = op.Shape(left, end=-3), op.Shape(left, start=-2, end=-1)
            return before, queries, op.Mul(queries, ints(op, heads.repeats))

        key = (node.graph, rows[:-3], rows[-2], heads.repeats)
        before, queries, count = self._once(key, counted)
        # Reshape cannot infer a size of an empty tensor, and onnxruntime lets it infer the one
        # that is not a number.
        grouped = op.Reshape(left, ints(op, before, groups, count, inner))
        product = op.MatMul(grouped, once, _name=node.name)
        self._remarks.fired(
            label(node),
            f"{heads.repeats} query heads share each of {groups} heads of "
            f"{heads.source.name!r}",
        )
        # Of one text of queries and several of keys, the product has several.
        texts = before if rows[:-3] == columns[:-3] else op.Shape(product, end=-3)
        return op.Reshape(product, ints(op, texts, query_heads, queries, width))

    def _read(self, left: ir.Value, right: ir.Value) -> Heads | None:
        rows, columns = self._facts.dims(left), self._facts.dims(right)
        if columns is None or len(columns) < 4:
            return None
        heads = follow_heads(right, self._facts).repeated() if len(columns) == 4 else None
        heads = heads or _broadcast(rows, right, columns)
        if heads is None:
            return None
        query_heads = (heads.count or 1) * heads.repeats
        sizes = Sizes(self._nonempty)
        if heads.once:
            whole = heads.source if heads.merge is None else heads.merge.outputs[0]
            sizes.match(whole, f"B _ {' '.join(heads.axes[2:])}")
            sizes.know("K", known(query_heads))
        if sizes.misfit(heads, "B N L D K") is not None:
            raise Refusal("ORP603", f"{right.name!r} has another layout")
        if rows is None or len(rows) != len(columns):
            raise Refusal(
                "ORP602", f"the rank of {left.name!r} is not known to be {len(columns)}"
            )
        if (own := count_query_heads(left, self._facts)) != query_heads:
            raise Refusal(
                "ORP603", f"{left.name!r} has {own or 'unknown'} heads, not {query_heads}"
            )
        return heads


def _broadcast(rows: Dims | None, right: ir.Value, columns: Dims) -> Heads | None:
    """One head that MatMul itself repeats; None where there is no such."""
    if rows is None or len(rows) != len(columns) or number(columns[-3]) != 1:
        return None
    repeats = number(rows[-3]) or 0
    return Heads(((right, FIRST),), 1, repeats=repeats) if repeats > 1 else None


def _emit_source(op: Any, heads: Heads) -> ir.Value:
    """The MatMul's new right operand: each head once, laid out and scaled as before."""
    value = heads.source
    if heads.merge is not None:
        # Where the model repeats one text or token as well, so does this.
        once = op.Div(heads.merge.inputs[1], ints(op, 1, heads.repeats, 1, 1))
        value = op.Expand(value, once)
    if heads.axes != FIRST:
        value = op.Transpose(value, perm=[0, 1, 3, 2])
    for node, index in [*heads.scalings()][::-1]:
        operands: list[ir.Value | None] = [*node.inputs]
        operands[index] = value
        value = getattr(op, node.op_type)(*operands)
    return value
