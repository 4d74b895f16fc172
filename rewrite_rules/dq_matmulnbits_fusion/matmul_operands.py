# SPDX-License-Identifier: MIT
"""MatMul, FusedMatMul and Gemm by a constant in one form, and the biases that they add.

    y = x @ W + bias

A constant bias that is the same for every row is one that MatMulNBits takes.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from rewrite_rules.graph.initializers import DerivedInitializers
from rewrite_rules.graph.nodes import input_of
from rewrite_rules.graph.parameters import (
    constant,
    float_attribute,
    int_attribute,
    require_constant,
)
from rewrite_rules.remarks import Refusal
from rewrite_rules.shapes.proved_shapes import ProvedShapes


@dataclasses.dataclass(frozen=True, eq=False)
class Product:
    """A multiplication by its right operand.

    Attributes:
        k_axis: Which of the last two axes of the weight is reduced.
        transpose_x: Whether the last two axes of the left operand have to be swapped first.
        is_scaled: Whether the product or the bias has a factor, alpha or beta.
    """

    node: ir.Node
    k_axis: int
    transpose_x: bool
    is_scaled: bool

    @property
    def x(self) -> ir.Value | None:
        return self.node.inputs[0]

    def x_rank(self, facts: ProvedShapes) -> int | None:
        """Return the rank of the left operand; None where it isn't proved."""
        if self.node.op_type == "Gemm":
            return 2
        dims = facts.dims(self.x)
        return None if dims is None else len(dims)

    @property
    def bias(self) -> ir.Value | None:
        """Gemm's third input; None where it has none."""
        return input_of(self.node, 2) if self.node.op_type == "Gemm" else None


def read_product(node: ir.Node) -> Product:
    """Read a node as a product whose weight is its second input."""
    if int_attribute(node, "transBatchA") or int_attribute(node, "transBatchB"):
        raise Refusal("ORP107", f"{node.op_type} transposes batches")
    factors = (float_attribute(node, name, 1.0) for name in ("alpha", "beta"))
    is_scaled = any(factor != 1 for factor in factors)
    k_axis, transpose_x = (int_attribute(node, name) for name in ("transB", "transA"))
    return Product(node, int(bool(k_axis)), bool(transpose_x), is_scaled)


_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16)


def column_bias(value: ir.Value, columns: int) -> ir.TensorProtocol | None:
    """Return a constant of [N], [1, N], [1] ... or a scalar, float32 or float16; else None."""
    tensor = constant(value)
    if tensor is None or tensor.dtype not in _FLOATS:
        return None
    shape = tuple(tensor.shape.numpy())
    # One number for each column, or one for all.
    if tensor.size not in (1, columns) or (shape and shape[-1] != tensor.size):
        return None
    return tensor


def write_column_bias(
    initializers: DerivedInitializers,
    value: ir.Value,
    columns: int,
    dtype: ir.DataType,
) -> ir.Value:
    """Register a column bias, ``[N]``, or return the constant if it is that."""
    source, tensor = require_constant(value, "bias")
    if tensor.dtype == dtype and tuple(tensor.shape.numpy()) == (columns,):
        return source
    with np.errstate(over="ignore"):
        numbers = tensor.numpy().astype(dtype.numpy()).reshape(-1)
        array = np.array(np.broadcast_to(numbers, (columns,)))
    return initializers.get(
        source,
        ".bias",
        lambda name: ir.Tensor(array, dtype=dtype, name=name),
        (columns, dtype),
    )
