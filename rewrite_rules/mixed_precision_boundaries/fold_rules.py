# SPDX-License-Identifier: MIT
"""Pairs that give back what they get go; a rule, with its identity.

    KeptCodes    DQ(Q(DQ(codes, a), b), c)  ->  DQ(codes, c)

``a``, ``b`` and ``c`` are the nodes' own grids. No bit changes: all codes of ``a`` go through
the operators to decide it (:meth:`.QuantizationGrid.keeps_codes`). Of any number of pairs with
equal parameters one is left.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript.rewriter import MatchContext, MatchResult, RewriteRuleClassBase

from rewrite_rules.graph.nodes import label, producer
from rewrite_rules.graph.rule_set import DispatchingRuleSet, matching, own
from rewrite_rules.mixed_precision_boundaries.quantized_graph import read_grid
from rewrite_rules.remarks import PassContext, Remarks


def fold_pairs(model: ir.Model, context: PassContext) -> None:
    """Fold in place, subgraphs included."""
    DispatchingRuleSet([KeptCodes.rule(context.remarks)]).apply_to_model(model)


class KeptCodes(RewriteRuleClassBase):
    """``DQ(Q(DQ(codes, a), b), c)`` -> ``DQ(codes, c)``, if Q gives back each code.

    Where a grid can't be read, the last node has a remark.
    """

    def __init__(self, remarks: Remarks) -> None:
        super().__init__(remove_nodes=False)  # others may read what lies between
        self._remarks = remarks

    def pattern(self, op, codes):  # type: ignore[no-untyped-def]
        given: dict[str, Any] = {"_allow_other_inputs": True}
        before = own.DequantizeLinear(codes, **given, _outputs=["before"])
        through = own.QuantizeLinear(before, **given, _outputs=["through"])
        return own.DequantizeLinear(through, **given, _outputs=["out"])

    def check(  # type: ignore[override]
        self,
        context: MatchContext,
        before: ir.Value,
        through: ir.Value,
        out: ir.Value,
        **_: Any,
    ) -> MatchResult:
        """Read the grids, and ask whether codes stay; so they do in the same type only."""
        with matching(self._remarks, producer(out), "not folded: ") as result:
            first, second, _third = (read_grid(producer(v)) for v in (before, through, out))
            if not first.keeps_codes(second):
                result.fail("codes would change", through)
        return result

    def rewrite(
        self, op: Any, codes: ir.Value, before: ir.Value, through: ir.Value, out: ir.Value
    ) -> Any:
        last, first = producer(out), producer(before)
        reason = f"gives back each code of {label(first)!r}: folded"
        self._remarks.fired(label(producer(through)), reason)
        return op.DequantizeLinear(
            codes, *last.inputs[1:], **last.attributes, _domain=last.domain, _name=last.name
        )
