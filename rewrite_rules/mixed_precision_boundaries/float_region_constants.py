# SPDX-License-Identifier: MIT
"""Dequantises constants of operators that compute in float ahead, so that no run has to.

    op(x, DequantizeLinear(codes, scale, zero_point?))   ->   op(x, float constant)
    op(x, DequantizeLinear(bias_int32, scale))           ->   op(x, float constant)

for operators without a dequantised activation among their inputs, or whose outputs are not all
quantised: onnxruntime has no quantised kernel for such a group. Refused, by name: constants in
blocks and of less than 8 bits, for which MatMulNBits and GatherBlockQuantized are; constants
that a caller may feed; what exceeds the limit.
"""

from __future__ import annotations

import onnx_ir as ir

from rewrite_rules.graph.initializers import DerivedInitializers
from rewrite_rules.graph.nodes import (
    dequantizer,
    input_of,
    is_dequantize_linear,
    label,
    remove_node,
)
from rewrite_rules.graph.parameters import constant, int_attribute, source_of
from rewrite_rules.remarks import PassContext, Refusal
from rewrite_rules.weights.dequantized_operand import read_operand
from rewrite_rules.weights.float_constant import FloatConstants


def unpack_constants(model: ir.Model, limit_mb: int, context: PassContext) -> None:
    """Make float constants, ``limit_mb`` at most, after all fusions that take codes."""
    floats = FloatConstants(DerivedInitializers(model), limit_mb)
    for graph in model.graphs():
        for node in list(graph):
            if is_dequantize_linear(node) and len(node.outputs) == 1:
                _unpack(node, floats, context)


def _unpack(dequantize: ir.Node, floats: FloatConstants, context: PassContext) -> None:
    codes = dequantize.inputs[0]
    if codes is None or ir.convenience.get_const_tensor(source_of(codes)) is None:
        return
    old = dequantize.outputs[0]
    readers = [
        use
        for use in old.uses()
        if use.node.op_type not in ("QuantizeLinear", "DequantizeLinear")
        and (context.final_graph or _computes_in_float(use.node))
    ]
    if not readers:
        return
    what = f"DequantizeLinear {label(dequantize)!r}"
    try:
        operand = read_operand([dequantize])
        if int_attribute(dequantize, "block_size", 0) or operand.bits < 8:
            raise Refusal(
                "ORP315", f"{operand.layout}: for MatMulNBits, see dq_matmulnbits_fusion"
            )
        floats.check(operand)
    except Refusal as reason:
        for use in readers:
            text = f"{what}: {reason}; it runs at every inference"
            context.remarks.refused(label(use.node), Refusal(reason.code, text))
        return
    value = floats.write(operand)
    for use in readers:
        use.node.replace_input_with(use.idx, value)
        context.remarks.fired(
            label(use.node), f"{what}: a float constant, as this computes in float"
        )
    if not old.uses() and not old.is_graph_output():
        remove_node(dequantize)


def _computes_in_float(node: ir.Node) -> bool:
    """Whether an operator is not a group of DQ, operator and Q that has a quantised kernel."""
    # Outputs that nothing reads, or that were left out, say nothing of the group.
    written = [value for value in node.outputs if value.uses() or value.is_graph_output()]
    return not any(map(_is_activation, node.inputs)) or not all(map(_is_quantised, written))


def _is_quantised(value: ir.Value) -> bool:
    readers = {use.node.op_type for use in value.uses()}
    return readers == {"QuantizeLinear"} and not value.is_graph_output()


def _is_activation(value: ir.Value | None) -> bool:
    node = None if value is None else dequantizer(source_of(value))
    return node is not None and constant(input_of(node, 0)) is None
