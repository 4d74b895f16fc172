# SPDX-License-Identifier: MIT
"""Values whose rounding decides much: those on a way to a step, or to a phase.

    Floor(x * c)   CumSum(x) ... Sin(x * c)   x * c > 1

The last digit of ``x * c`` is a whole cycle of a vocoder's phase later, or the other side of a
threshold. Linear nodes and norms end a way: they round sums of many terms anyway.
"""

from __future__ import annotations

import onnx_ir as ir

from rewrite_rules.graph.nodes import label

_STEPS = frozenset({
    "ArgMax", "ArgMin", "Ceil", "Cos", "CumProd", "CumSum", "Equal", "Floor", "Greater",
    "GreaterOrEqual", "Hardmax", "Less", "LessOrEqual", "Mod", "NonMaxSuppression", "NonZero",
    "Round", "Sign", "Sin", "Tan", "TopK", "Unique",
})  # fmt: skip
_ENDS = frozenset({
    "Attention", "BatchNormalization", "Conv", "ConvInteger", "ConvTranspose", "Einsum",
    "GRU", "Gemm", "GroupNormalization", "InstanceNormalization", "LSTM",
    "LayerNormalization", "MatMul", "MatMulInteger", "RMSNormalization", "RNN", "Softmax",
    "DynamicQuantizeLinear", "QuantizeLinear",
    # Of no element's value.
    "ConstantOfShape", "Shape", "Size",
})  # fmt: skip
_FLOATS = frozenset({
    ir.DataType.BFLOAT16, ir.DataType.DOUBLE, ir.DataType.FLOAT, ir.DataType.FLOAT16,
})  # fmt: skip
_MAX_FOLLOWED = 2000


def step_behind(model: ir.Model, value: ir.Value) -> str | None:
    """Return the step that a value leads to, for a remark; None where none is found.

    What leaves a subgraph, or goes too far on, may lead to one.
    """
    pending, seen = [value], {value}
    for current in pending:  # grows
        if len(pending) > _MAX_FOLLOWED:
            return "a node too far on to look for"
        if current.is_graph_output() and current not in model.graph.outputs:
            return "what reads the output of a subgraph"
        for node in current.consumers():
            if not node.domain and (node.op_type in _STEPS or _cuts(node)):
                return f"{node.op_type} {label(node)!r}"
            if node.domain or node.op_type not in _ENDS:
                new = [made for made in node.outputs if made not in seen]
                seen.update(new)
                pending += new
    return None


def _cuts(node: ir.Node) -> bool:
    """Whether a node makes integers or booleans of floats."""
    target = node.attributes.get_int("to", 0) if node.op_type == "Cast" else 0
    return bool(target) and ir.DataType(target) not in _FLOATS
