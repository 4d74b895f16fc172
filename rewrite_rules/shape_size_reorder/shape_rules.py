# SPDX-License-Identifier: MIT
"""Rules for Shape, Size and the integers computed from them.

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
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript.rewriter import MatchContext, MatchResult, RewriteRuleClassBase

from rewrite_rules.graph.nodes import label, producer
from rewrite_rules.graph.rule_set import DispatchingRuleSet
from rewrite_rules.remarks import Remarks
from rewrite_rules.shape_size_reorder.readings import Reading


class _BetterReading(RewriteRuleClassBase):
    """A node of one operator -> the same numbers, constant or read from the first value."""

    def __init__(
        self, kind: type, op_type: str, better: dict[ir.Node, Reading], remarks: Remarks
    ) -> None:
        self._kind = kind
        self._op_type = op_type
        self._better = better
        self._remarks = remarks
        # The nodes before it may have other consumers.
        super().__init__(name=f"{kind.__name__}Of{op_type}", remove_nodes=False)

    def pattern(self, op, x):  # type: ignore[no-untyped-def]
        return getattr(op, self._op_type)(x, _allow_other_inputs=True, _outputs=["out"])

    def check(self, context: MatchContext, out: ir.Value, **_: object) -> MatchResult:  # type: ignore[override]
        """Look whether the node is to become this."""
        del context  # Unused
        result, node = MatchResult(), producer(out)
        if not isinstance(self._better.get(node), self._kind):
            return result.fail("what it reads is the first value of these sizes", node)
        return result

    def rewrite(self, op: Any, out: ir.Value, **_: object) -> ir.Value:
        """Emit the reading."""
        node = producer(out)
        reading = self._better[node]
        value = reading.emit(op, node.name)
        value.type = ir.TensorType(ir.DataType.INT64)
        self._remarks.fired(label(node), str(reading))
        return value


def shape_rules(better: dict[ir.Node, Reading], remarks: Remarks) -> DispatchingRuleSet:
    """Return the rules that have something to do.

    Args:
        better: What nodes are to become, from :class:`.Readings`.
        remarks: Get what each node reads now.
    """
    wanted = {(type(reading), node.op_type) for node, reading in better.items()}
    rules = [
        _BetterReading.rule(kind, op_type, better, remarks)
        for kind, op_type in sorted(wanted, key=str)
    ]
    return DispatchingRuleSet(rules, better.__contains__)
