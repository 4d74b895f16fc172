# SPDX-License-Identifier: MIT
"""Constant biases that are the same for every row of a MatMul, as MatMulNBits takes them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from rewrite_rules.graph.constants import require_constant, source_of
from rewrite_rules.graph.initializers import DerivedInitializers
from rewrite_rules.graph.nodes import is_dequantize_linear
from rewrite_rules.graph.refusal import Refusal
from rewrite_rules.weights.dequantized_operand import read_operand

_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16)


@dataclasses.dataclass(frozen=True, eq=False)
class ColumnBias:
    """A constant that adds one number to each column.

    ``numbers`` is float64 ``[N]``; rank and dtype are those in the model. A float constant has
    no ``dequantize``. ``parameters`` is what else than ``anchor`` the numbers come from.
    """

    anchor: ir.Value
    numbers: npt.NDArray[np.float64]
    rank: int
    dtype: ir.DataType
    dequantize: ir.Node | None
    parameters: Hashable


def read_column_bias(value: ir.Value, columns: int) -> ColumnBias | None:
    """Read a float or dequantised bias of shape [N], [1, N], [1], [1, 1] ... or a scalar.

    None for any other, and where its data is damaged: it stays as it is.
    """
    node = source_of(value).producer()
    try:
        if node is not None and is_dequantize_linear(node):
            operand = read_operand([node])
            shape, dtype, anchor = operand.shape, operand.dtype, operand.codes
            key: Hashable = (operand.axes, operand.scales, operand.zero_points)
        else:
            node, key = None, ()
            anchor, tensor = require_constant(value, "bias")
            shape, dtype = tuple(tensor.shape.numpy()), tensor.dtype
    except Refusal:
        return None
    # One number for each column, or one for all.
    if math.prod(shape) not in (1, columns) or (shape and shape[-1] != math.prod(shape)):
        return None
    if dtype not in _FLOATS:
        return None
    numbers = tensor.numpy() if node is None else np.concatenate(list(operand.rows()))
    per_column = np.broadcast_to(numbers.astype(np.float64).reshape(-1), (columns,))
    return ColumnBias(anchor, per_column, len(shape), dtype, node, key)


def write_column_bias(
    initializers: DerivedInitializers, bias: ColumnBias, factor: float, dtype: ir.DataType
) -> ir.Value:
    """Register the bias ``[N]``, or return the constant itself where it is that."""
    tensor = bias.anchor.const_value
    shape = bias.numbers.shape
    if (
        bias.dequantize is None
        and factor == 1.0
        and tensor is not None
        and tensor.dtype == dtype
        and tuple(tensor.shape.numpy()) == shape
    ):
        return bias.anchor
    # Rounded as the bias is, then as its product with beta is.
    with np.errstate(over="ignore"):
        numbers = bias.numbers.astype(dtype.numpy()).astype(np.float64) * factor
        array = numbers.astype(dtype.numpy())
    key = (shape, factor, dtype, bias.parameters)
    return initializers.get(
        bias.anchor, ".bias", lambda name: ir.Tensor(array, dtype=dtype, name=name), key
    )
