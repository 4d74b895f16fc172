# SPDX-License-Identifier: MIT
"""Gather from a dequantised constant -> GatherBlockQuantized, which unpacks what it reads.

    Gather(DequantizeLinear(codes, scales, zero_points?), indices, axis)
        -> GatherBlockQuantized(codes, indices, scales, zero_points?)

A table that the operator takes in no form becomes a float constant, unpacked once.
"""

from __future__ import annotations

__all__ = ["GatherToGatherBlockQuantized"]

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
from onnxscript.rewriter import MatchContext, MatchResult, RewriteRuleClassBase

from rewrite_rules.dq_matmulnbits_fusion.fusion_run import FusionRun, check_type
from rewrite_rules.dq_matmulnbits_fusion.gather_block_quantized_inputs import (
    TableInputs,
    table_writer,
)
from rewrite_rules.dq_matmulnbits_fusion.kernel_support import NoKernel
from rewrite_rules.graph.attributes import int_attribute
from rewrite_rules.graph.nodes import label, producer
from rewrite_rules.graph.quantize_linear import is_dequantize_linear
from rewrite_rules.graph.refusal import Refusal
from rewrite_rules.weights.block_quantized_weight import Unrepresentable
from rewrite_rules.weights.dequantized_operand import (
    DequantizedOperand,
    dequantize_chain,
    is_layout_op,
    read_operand,
)


class GatherToGatherBlockQuantized(RewriteRuleClassBase):
    """Gather(table, indices) -> GatherBlockQuantized."""

    def __init__(self, run: FusionRun) -> None:
        super().__init__(remove_nodes=False)
        self._run = run
        self._operand: DequantizedOperand | None = None
        self._write: Callable[[], TableInputs] | None = None
        self._to_float = ""

    def pattern(self, op, table, indices):  # type: ignore[no-untyped-def]
        return op.Gather(table, indices, _outputs=["out"])

    def check(  # type: ignore[override]
        self, context: MatchContext, table: ir.Value, out: ir.Value, **_: object
    ) -> MatchResult:
        """Read the table and decide its form; every refusal is a remark."""
        del context  # Unused
        result, node = MatchResult(), producer(out)
        trail = dequantize_chain(table)
        if trail is None:
            return result.fail("the table is no dequantised constant", node)
        with self._run.context.remarks.at(label(node)):
            try:
                self._run.check_providers()
                self._operand, self._write = read_operand(trail), None
                if self._operand.bits == 8 and _is_quantized_again(node):
                    raise Refusal(
                        "only QuantizeLinear reads the rows: onnxruntime gathers the codes "
                        "themselves"
                    )
                try:
                    check_type(self._operand)
                    self._write = table_writer(
                        self._run.initializers,
                        self._operand,
                        _axis(node, len(self._operand.shape)),
                        self._run.context.onnxruntime,
                        tied=_is_tied(self._operand),
                    )
                except (NoKernel, Unrepresentable) as refusal:
                    self._run.float_fits(self._operand, str(refusal))
                    self._to_float = str(refusal)
            except Refusal as refusal:
                self._run.refused(node, trail[0], refusal)
                return result.fail(str(refusal), node)
        return result

    def rewrite(self, op: Any, indices: ir.Value, out: ir.Value, **_: object) -> ir.Value:
        """Emit GatherBlockQuantized, or Gather from a float constant."""
        operand, node = self._operand, producer(out)
        assert operand is not None
        with self._run.context.remarks.at(label(node)):
            if self._write is None:
                constant = self._run.write_float(operand)
                value: ir.Value = op.Gather(
                    constant, indices, _name=node.name, **node.attributes
                )
                assert constant.const_value is not None
                size = constant.const_value.nbytes / 1e6
                fate = f"float constant ({size:.1f} MB): {self._to_float}"
            else:
                table = self._write()
                optional = [] if table.zero_points is None else [table.zero_points]
                value = op.GatherBlockQuantized(
                    table.data,
                    indices,
                    table.scales,
                    *optional,
                    **table.attributes,
                    _domain="com.microsoft",
                    _name=node.name,
                )
                if table.scales.dtype != operand.dtype:
                    value = op.Cast(value, to=int(operand.dtype))
                fate = f"GatherBlockQuantized, block {table.attributes['block_size']}"
                if table.note:
                    fate += f" ({table.note})"
            self._run.fired(node, operand.dequantize, f"{operand.layout} -> {fate}")
        return value


def _axis(node: ir.Node, rank: int) -> int:
    axis = int_attribute(node, "axis", 0)
    if not -rank <= axis < rank:
        raise Refusal(f"axis {axis} is out of range for a table of rank {rank}")
    return axis % rank


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
