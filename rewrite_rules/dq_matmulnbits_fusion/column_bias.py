# SPDX-License-Identifier: MIT
"""Constant biases that are the same for every row of a product, as MatMulNBits takes them."""

from __future__ import annotations

__all__ = ["ColumnBias", "read_column_bias", "write_column_bias"]

import dataclasses
import math
from collections.abc import Hashable

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from rewrite_rules.graph.constants import check_payload, constant, source_of
from rewrite_rules.graph.initializers import DerivedInitializers
from rewrite_rules.graph.quantize_linear import is_dequantize_linear
from rewrite_rules.weights.dequantized_bias import read_dequantized_bias

_QUANTISED = (ir.DataType.INT32, ir.DataType.INT8, ir.DataType.UINT8)
_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16)


@dataclasses.dataclass(frozen=True, eq=False)
class ColumnBias:
    """A constant that adds one number to each column.

    Attributes:
        anchor: The constant that it comes from.
        numbers: The bias, float64 ``[N]``.
        rank: Rank that it has in the model.
        dequantize: The DequantizeLinear that made it; None for a float constant.
        parameters: What else than ``anchor`` its numbers come from.
    """

    anchor: ir.Value
    numbers: npt.NDArray[np.float64]
    rank: int
    dequantize: ir.Node | None
    parameters: Hashable


def read_column_bias(value: ir.Value, columns: int) -> ColumnBias | None:
    """Read a bias of shape [N], [1, N], [1], [1, 1] ... or a scalar; None for any other.

    Raises:
        Refusal: If its data is damaged.
    """
    value = source_of(value)
    node = value.producer()
    if node is not None and is_dequantize_linear(node):
        bias = read_dequantized_bias(node, _QUANTISED)
        if bias is None:
            return None
        anchor, numbers, key = bias.codes, bias.numbers(), bias.parameters
    else:
        tensor = constant(value)
        if tensor is None or tensor.dtype not in _FLOATS:
            return None
        check_payload(tensor, f"bias {tensor.name!r}")
        node, anchor, numbers, key = None, value, tensor.numpy(), ()
    if not _is_column_shape(numbers.shape, columns):
        return None
    per_column = np.broadcast_to(numbers.astype(np.float64).reshape(-1), (columns,))
    return ColumnBias(anchor, per_column, numbers.ndim, node, key)


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


def _is_column_shape(shape: tuple[int, ...], columns: int) -> bool:
    """Whether there is one number for each column, or one for all."""
    return math.prod(shape) in (1, columns) and (not shape or shape[-1] == math.prod(shape))
