# SPDX-License-Identifier: MIT
"""What the rules for operators on a dequantised constant have in common.

    f(x, W)    ->    nodes that read W's codes, or f(x, float constant)

where W is a dequantised constant in whatever layout :mod:`.dequantized_operand` reads. It
becomes a float constant, unpacked once instead of at every inference, where no kernel takes
it. Every match is refused by name when the weight, its scales or its zero points are not
constant (an initializer that is also a graph input is not), or malformed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import onnx_ir as ir
from onnxscript.rewriter import MatchContext, MatchResult, RewriteRuleClassBase

from rewrite_rules.dq_matmulnbits_fusion.fusion_run import FusionRun
from rewrite_rules.dq_matmulnbits_fusion.kernel_support import NoKernel
from rewrite_rules.graph.nodes import label, producer
from rewrite_rules.graph.refusal import Refusal
from rewrite_rules.weights.block_quantized_weight import Unrepresentable
from rewrite_rules.weights.dequantized_operand import (
    DequantizedOperand,
    dequantize_chain,
    read_operand,
)

# Given onnxscript's builder, emits the nodes; returns their output and what they are.
Emit = Callable[[Any], tuple[ir.Value, str]]
_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16)


class OperandRule(RewriteRuleClassBase):
    """f(x, W) -> g(x, codes); subclasses declare f, with values ``w`` and ``out``, and g."""

    # Input of f that is W.
    index = 1

    def __init__(self, run: FusionRun) -> None:
        # The DequantizeLinear may have other consumers, which keep it.
        super().__init__(remove_nodes=False)
        self._run = run

    def check(  # type: ignore[override]
        self, context: MatchContext, w: ir.Value, out: ir.Value, **_: object
    ) -> MatchResult:
        """Read W and decide its form; every refusal is a remark."""
        del context  # Unused
        result, node, run = MatchResult(), producer(out), self._run
        chain = dequantize_chain(w)
        if chain is None or (run.only is not None and chain[0] not in run.only):
            return result.fail("the operand is not a dequantised constant", node)
        with run.context.remarks.at(label(node)):
            try:
                run.check_providers()
                self._operand = operand = read_operand(chain)
                try:
                    self._emit = self._plan(node, chain, operand)
                except (NoKernel, Unrepresentable) as reason:
                    run.check_float(operand, reason)
                    self._emit = functools.partial(self._as_float, node, operand, str(reason))
            except Refusal as refusal:
                run.refused(node, chain[0], refusal)
                return result.fail(str(refusal), node)
        return result

    def rewrite(self, op: Any, out: ir.Value, **_: object) -> ir.Value:
        """Emit what :meth:`check` decided."""
        node, operand = producer(out), self._operand
        with self._run.context.remarks.at(label(node)):
            value, outcome = self._emit(op)
            self._run.fired(node, operand.dequantize, f"{operand.layout} -> {outcome}")
        return value

    def _plan(self, node: ir.Node, chain: list[ir.Node], operand: DequantizedOperand) -> Emit:
        """Return what emits g, or raise the first refusal that applies."""
        raise NotImplementedError

    def _as_float(
        self, node: ir.Node, operand: DequantizedOperand, reason: str, op: Any
    ) -> tuple[ir.Value, str]:
        inputs = list(node.inputs)
        inputs[self.index] = constant = self._run.floats.write(operand)
        value = getattr(op, node.op_type)(
            *inputs, _domain=node.domain, _name=node.name, **node.attributes
        )
        assert constant.const_value is not None
        return value, f"float constant ({constant.const_value.nbytes / 1e6:.1f} MB): {reason}"


def check_type(operand: DequantizedOperand) -> None:
    """Refuse types that no fused operator computes in, and what is rounded on its way."""
    if operand.bits > 8:
        raise Refusal(f"weight {operand.codes.name!r} is int32: codes of 2, 4 or 8 bits fuse")
    for dtype in operand.casts:
        if dtype not in _FLOATS:
            name = dtype.name.lower()
            raise Refusal(f"the weight is cast to {name}: float32 and float16 fuse")
    if any(dtype.bitwidth < operand.dtype.bitwidth for dtype in operand.casts[1:-1]):
        raise NoKernel("the weight is rounded to float16 on its way")
