# SPDX-License-Identifier: MIT
"""Gather from a dequantised constant -> GatherBlockQuantized, which unpacks what it reads.

    Gather(DequantizeLinear(codes, scales, zero_points?), indices, axis)
        -> GatherBlockQuantized(codes, indices, scales, zero_points?)

A table that the operator takes in no form becomes a float constant, unpacked once; so does a
small one of 2 or 4 bits. A batch may hold more indices than it has rows, and the kernel takes
up to 3 times as long for a row as onnxruntime takes to unpack it (1.32).
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from rewrite_rules.dq_matmulnbits_fusion.gather_block_quantized_inputs import table_writer
from rewrite_rules.dq_matmulnbits_fusion.kernel_support import NoKernel
from rewrite_rules.dq_matmulnbits_fusion.operand_rule import Emit, OperandRule, check_type
from rewrite_rules.graph.attributes import axis_of, int_attribute
from rewrite_rules.graph.nodes import is_dequantize_linear
from rewrite_rules.graph.refusal import Refusal
from rewrite_rules.weights.dequantized_operand import DequantizedOperand, is_layout_op


class GatherToGatherBlockQuantized(OperandRule):
    """Gather(W, indices) -> GatherBlockQuantized(codes, indices).

    Refused where QuantizeLinear alone reads the rows of 8-bit codes.
    """

    index = 0

    def pattern(self, op, w, indices):  # type: ignore[no-untyped-def]
        return op.Gather(w, indices, _outputs=["out"])

    def _plan(self, node: ir.Node, chain: list[ir.Node], operand: DequantizedOperand) -> Emit:
        if operand.bits == 8 and _is_quantized_again(node):
            raise Refusal(
                "only QuantizeLinear reads the rows: onnxruntime gathers the codes themselves"
            )
        check_type(operand)
        axis = axis_of(int_attribute(node, "axis", 0), len(operand.shape))
        tied = _is_tied(operand)
        if operand.bits < 8 and not tied and self._run.is_small(operand):
            raise NoKernel("a small table is read faster as floats")
        write, note = table_writer(
            operand,
            axis,
            self._run.context.onnxruntime,
            tied=tied,
        )

        def emit(op: Any) -> tuple[ir.Value, str]:
            table = write(self._run.initializers)
            value = op.GatherBlockQuantized(
                table.codes,
                node.inputs[1],
                *table.scales_and_zero_points,
                **table.attributes,
                _domain="com.microsoft",
                _name=node.name,
            )
            if table.scales.dtype != operand.dtype:
                value = op.Cast(value, to=int(operand.dtype))
            return value, f"GatherBlockQuantized, block {table.attributes['block_size']}{note}"

        return emit


def _is_quantized_again(node: ir.Node) -> bool:
    users = [use.node.op_type for use in node.outputs[0].uses()]
    return bool(users) and set(users) == {"QuantizeLinear"}


def _is_tied(operand: DequantizedOperand) -> bool:
    """Whether anything but Gather reads the same codes, through whatever renames them."""
    pending = [operand.codes]
    followed = set(pending)
    while pending:
        for use in pending.pop().uses():
            follow = use.idx == 0 and (
                is_layout_op(use.node) or is_dequantize_linear(use.node)
            )
            if follow and len(use.node.outputs) == 1:
                if use.node.outputs[0] not in followed:
                    followed.add(use.node.outputs[0])
                    pending.append(use.node.outputs[0])
            elif use.node.op_type not in ("Gather", "GatherBlockQuantized"):
                return True
    return False
