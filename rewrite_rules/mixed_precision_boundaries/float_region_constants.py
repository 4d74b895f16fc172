# SPDX-License-Identifier: MIT
"""Dequantises constants of operators that compute in float ahead, so that no run has to.

    op(x, DequantizeLinear(codes, scale, zero_point?))   ->   op(x, float constant)
    op(x, DequantizeLinear(bias_int32, scale))           ->   op(x, float constant)

for operators that onnxruntime does not compute in integers. Refused, by name: constants in
blocks and of less than 8 bits, for which MatMulNBits and GatherBlockQuantized are; constants
that a caller may feed; what exceeds the limit.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript.rewriter import MatchContext, RewriteRuleClassBase

from rewrite_rules.facts.integer_groups import computes_in_integers, dequantized
from rewrite_rules.graph.initializers import DerivedInitializers
from rewrite_rules.graph.nodes import label, producer
from rewrite_rules.graph.parameters import int_attribute, source_of
from rewrite_rules.graph.rule_set import DispatchingRuleSet, own
from rewrite_rules.remarks import PassContext, Refusal
from rewrite_rules.weights.dequantized_operand import DequantizedOperand, read_operand
from rewrite_rules.weights.float_constant import FloatConstants


def unpack_constants(model: ir.Model, limit_mb: int, context: PassContext) -> None:
    """Make float constants, ``limit_mb`` at most, after all fusions that take codes."""
    floats = FloatConstants(DerivedInitializers(model), limit_mb)
    rules, graphs = [UnpackedConstant.rule(floats, context)], {*model.graphs()}
    DispatchingRuleSet(rules, lambda node: node.graph in graphs).apply_to_model(model)


class UnpackedConstant(RewriteRuleClassBase):
    """``op(x, DQ(codes))`` -> ``op(x, float constant)``, where op computes in float."""

    def __init__(self, floats: FloatConstants, context: PassContext) -> None:
        super().__init__(remove_nodes=False)  # others may read it
        self._floats, self._context = floats, context

    def pattern(self, op, codes):  # type: ignore[no-untyped-def]
        return own.DequantizeLinear(codes, _allow_other_inputs=True, _outputs=["out"])

    def check(self, context: MatchContext, codes: ir.Value, out: ir.Value) -> bool:  # type: ignore[override]
        """Read the constant; a refusal is a remark on each operator that reads it."""
        if ir.convenience.get_const_tensor(source_of(codes)) is None:
            return False
        self._readers = [
            use
            for use in out.uses()
            if use.node.op_type not in ("QuantizeLinear", "DequantizeLinear")
            and (self._context.final_graph or not computes_in_integers(use.node))
        ]
        if not self._readers:
            return False
        node = producer(out)
        try:
            operand = read_operand([node])
            if operand.bits == 8 and any(_would_fail(use, operand) for use in self._readers):
                self._operand = operand
                return True
            if int_attribute(node, "block_size") or operand.bits < 8:
                raise Refusal(
                    "ORP315", f"{operand.layout}: for MatMulNBits, see dq_matmulnbits_fusion"
                )
            self._floats.check(operand)
        except Refusal as reason:
            text = f"{_called(node)}: {reason}; it runs at every inference"
            for use in self._readers:
                self._context.remarks.refused(label(use.node), Refusal(reason.code, text))
            return False
        self._operand = operand
        return True

    def rewrite(self, op: Any, codes: ir.Value, out: ir.Value) -> ir.Value:
        value = self._floats.write(self._operand)
        for use in self._readers:
            use.node.replace_input_with(use.idx, value)
            self._context.remarks.fired(
                label(use.node),
                f"{_called(producer(out))}: a float constant, as this computes in float",
            )
        return out


def _would_fail(use: Any, operand: DequantizedOperand) -> bool:
    """Whether onnxruntime makes one operator of two codes of which no kernel takes these.

    Without a QuantizeLinear behind, that is MatMulIntegerToFloat or QGemm.
    """
    node, index = use
    if node.op_type not in ("Gemm", "MatMul") or None in map(dequantized, node.inputs):
        return False
    k_axis = int_attribute(node, "transB")
    return operand.scale_tensor.size > 1 and not (
        index == 1 and operand.suits_integers(k_axis)
    )


def _called(node: ir.Node) -> str:
    return f"DequantizeLinear {label(node)!r}"
