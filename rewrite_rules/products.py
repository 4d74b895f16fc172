# SPDX-License-Identifier: MIT
"""One form for the nodes that multiply by a constant: MatMul, FusedMatMul and Gemm.

y = alpha * x @ W + beta * bias                   the weight on the right
y = alpha * W.T @ x + beta * bias                 on the left: y.T = alpha * x.T @ W
"""

from __future__ import annotations

__all__ = ["Product", "products"]

import dataclasses
from collections.abc import Iterator

import onnx_ir as ir


@dataclasses.dataclass(frozen=True, eq=False)
class Product:
    """A multiplication, seen from one of its operands.

    Attributes:
        node: The node.
        index: Input that holds the weight.
        k_axis: Which of the last two axes of that input is reduced.
        transpose_x: Whether the last two axes of the other operand have to be swapped first.
        transpose_y: Whether the last two axes of the product have to be swapped afterwards.
        alpha: Factor of the product.
        beta: Factor of the bias.
        batched: Whether operands may have more than two axes.
    """

    node: ir.Node
    index: int
    k_axis: int
    transpose_x: bool = False
    transpose_y: bool = False
    alpha: float = 1.0
    beta: float = 1.0
    batched: bool = True

    @property
    def weight(self) -> ir.Value | None:
        """The operand that may be a weight."""
        return self.node.inputs[self.index]

    @property
    def x(self) -> ir.Value | None:
        """The other operand."""
        return self.node.inputs[1 - self.index]

    @property
    def bias(self) -> ir.Value | None:
        """Gemm's third input; None where it adds nothing."""
        if self.node.op_type != "Gemm" or len(self.node.inputs) < 3 or self.beta == 0:
            return None
        return self.node.inputs[2]


def products(node: ir.Node) -> Iterator[Product]:
    """Yield the node as a product with its right operand as the weight, then its left."""
    attributes = node.attributes
    if node.op_type == "Gemm":
        trans_a, trans_b = attributes.get_int("transA", 0), attributes.get_int("transB", 0)
        beta, batched = attributes.get_float("beta", 1.0), False
    else:  # MatMul has none of these attributes
        trans_a, trans_b = attributes.get_int("transA", 0), attributes.get_int("transB", 0)
        beta, batched = 1.0, True
        if attributes.get_int("transBatchA", 0) or attributes.get_int("transBatchB", 0):
            return
    alpha = attributes.get_float("alpha", 1.0)
    yield Product(
        node,
        index=1,
        k_axis=1 if trans_b else 0,
        transpose_x=bool(trans_a),
        alpha=alpha,
        beta=beta,
        batched=batched,
    )
    yield Product(
        node,
        index=0,
        k_axis=0 if trans_a else 1,
        transpose_x=not trans_b,
        transpose_y=True,
        alpha=alpha,
        beta=beta,
        batched=batched,
    )
