# SPDX-License-Identifier: MIT
"""One form for the nodes that multiply by a constant: MatMul, FusedMatMul and Gemm.

y = alpha * x @ W + beta * bias                   the weight on the right
y = alpha * W.T @ x + beta * bias                 on the left: y.T = alpha * x.T @ W
"""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from rewrite_rules.graph.attributes import float_attribute, int_attribute
from rewrite_rules.graph.refusal import Refusal


@dataclasses.dataclass(frozen=True, eq=False)
class Product:
    """A multiplication, seen from one of its operands.

    Attributes:
        index: Input that holds the weight.
        k_axis: Which of the last two axes of that input is reduced.
        transpose_x: Whether the last two axes of the other operand have to be swapped first.
        transpose_y: Whether the last two axes of the product have to be swapped afterwards.
        alpha, beta: Factors of the product and of the bias.
        batched: Whether operands may have more than two axes.
    """

    node: ir.Node
    index: int
    k_axis: int
    transpose_x: bool
    transpose_y: bool
    alpha: float
    beta: float
    batched: bool

    @property
    def weight(self) -> ir.Value | None:
        """The operand that may be a weight."""
        return self.node.inputs[self.index]

    @property
    def x(self) -> ir.Value | None:
        """The other operand."""
        return self.node.inputs[1 - self.index]

    @property
    def x_rank(self) -> int | None:
        """Rank of the other operand; None where it isn't known."""
        if not self.batched:
            return 2
        shape = None if self.x is None else self.x.shape
        return None if shape is None else len(shape)

    @property
    def bias(self) -> ir.Value | None:
        """Gemm's third input; None where it adds nothing."""
        if self.node.op_type != "Gemm" or len(self.node.inputs) < 3 or self.beta == 0:
            return None
        return self.node.inputs[2]


def read_product(node: ir.Node, index: int) -> Product:
    """Read a node as a product whose weight is one of its first two inputs."""
    trans_a = trans_b = 0
    alpha = beta = 1.0
    if node.op_type != "MatMul":
        trans_a, trans_b = int_attribute(node, "transA", 0), int_attribute(node, "transB", 0)
        alpha = float_attribute(node, "alpha", 1.0)
    if node.op_type == "Gemm":
        beta = float_attribute(node, "beta", 1.0)
    elif int_attribute(node, "transBatchA", 0) or int_attribute(node, "transBatchB", 0):
        raise Refusal(f"{node.op_type} transposes batches")
    if index == 1:
        k_axis, transpose_x, transpose_y = 1 if trans_b else 0, bool(trans_a), False
    else:
        k_axis, transpose_x, transpose_y = 0 if trans_a else 1, not trans_b, True
    batched = node.op_type != "Gemm"
    return Product(node, index, k_axis, transpose_x, transpose_y, alpha, beta, batched)
