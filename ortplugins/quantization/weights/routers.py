# SPDX-License-Identifier: MIT
"""Which products choose experts: small weights, whose errors send tokens to other experts.

    MatMul -> (Softmax, a bias, ...) -> TopK or ArgMax -> ... -> another product
    MatMul -> com.microsoft MoE or QMoE, not as the tokens

A TopK that leads to outputs alone, or to rows of a table, picks tokens and is none.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from rewrite_rules.graph.parameters import constant

_GRAPH = ir.AttributeType.GRAPH
_EXPERTS = frozenset({"MoE", "QMoE"})
_CHOICES = frozenset({"TopK", "ArgMax", "Hardmax"})
# Operators that pass scores on, the other operand, if any, a constant.
_SCORES = frozenset({
    "Add", "Cast", "Clip", "Div", "Flatten", "Identity", "LogSoftmax", "Mul", "Reshape",
    "Sigmoid", "Softmax", "Squeeze", "Sub", "Tanh", "Transpose", "Unsqueeze",
})  # fmt: skip
_PRODUCTS = frozenset({
    "Conv", "Einsum", "FusedMatMul", "Gemm", "MatMul", "MatMulInteger", "MatMulNBits",
    *_EXPERTS,
})  # fmt: skip


def is_router(product: ir.Value) -> bool:
    """Whether a product, the scores of experts, decides which of them compute."""
    waiting, seen = [product], {product}
    while waiting:
        for node, index in waiting.pop().uses():
            if node.op_type in _EXPERTS:
                return index > 0
            if node.op_type in _CHOICES and index == 0 and _leads_to_product(node.outputs):
                return True
            if _passes(node, index) and node.outputs[0] not in seen:
                seen.add(node.outputs[0])
                waiting.append(node.outputs[0])
    return False


def _passes(node: ir.Node, index: int) -> bool:
    """Whether a node passes scores on, its other operands constants or shapes."""
    if node.op_type not in _SCORES or index > 1:
        return False
    others = [value for place, value in enumerate(node.inputs) if place != index]
    return all(value is None or constant(value) is not None for value in others) or (
        node.op_type in ("Reshape", "Unsqueeze", "Squeeze", "Clip") and index == 0
    )


def _leads_to_product(values: Iterable[ir.Value]) -> bool:
    """Whether a product of the graph, or of a subgraph, depends on values."""
    waiting = list(values)
    seen = set(waiting)
    while waiting:
        for node, index in waiting.pop().uses():
            if node.op_type in _PRODUCTS:
                return True
            read = constant(node.inputs[0] if (node.op_type, index) == ("Gather", 1) else None)
            if read is not None and len(read.shape) == 2:
                continue
            subgraphs = [a.as_graph() for a in node.attributes.values() if a.type is _GRAPH]
            if any(inner.op_type in _PRODUCTS for g in subgraphs for inner in g.all_nodes()):
                return True
            waiting += [value for value in node.outputs if value not in seen]
            seen.update(node.outputs)
    return False
