# SPDX-License-Identifier: MIT
"""Constant biases that are the same for every row of a product, as MatMulNBits takes them."""

from __future__ import annotations

__all__ = ["ColumnBias", "read_column_bias", "write_column_bias"]

import dataclasses
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from rewrite_rules.graph.attributes import int_attribute
from rewrite_rules.graph.constants import check_payload, constant, source_of
from rewrite_rules.graph.initializers import derived_initializer
from rewrite_rules.graph.quantize_linear import is_dequantize_linear

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
    """

    anchor: ir.Value
    numbers: npt.NDArray[np.float64]
    rank: int
    dequantize: ir.Node | None


def read_column_bias(value: ir.Value, columns: int) -> ColumnBias | None:
    """Read a bias of shape [N], [1, N], [1], [1, 1] ... or a scalar; None for any other.

    Raises:
        Refusal: If its data is damaged.
    """
    value = source_of(value)
    node = value.producer()
    if node is not None and is_dequantize_linear(node):
        numbers = _dequantized(node, columns)
        anchor = node.inputs[0] if node.inputs else None
    else:
        node, anchor = None, value
        numbers = _numbers(value, columns, _FLOATS)
    if numbers is None or anchor is None:
        return None
    per_column = np.broadcast_to(numbers.reshape(-1), (columns,))
    return ColumnBias(source_of(anchor), per_column, numbers.ndim, node)


def write_column_bias(bias: ColumnBias, factor: float, dtype: ir.DataType) -> ir.Value:
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
    # Rounded as a dequantised bias is, then as its product with beta is.
    with np.errstate(over="ignore"):
        numbers = bias.numbers.astype(dtype.numpy()).astype(np.float64) * factor
        array = numbers.astype(dtype.numpy())
    # The values and not their names: sibling subgraphs may give theirs the same.
    key = (shape, factor, dtype, bias.dequantize and tuple(bias.dequantize.inputs[1:]))
    return derived_initializer(
        bias.anchor, ".bias", lambda name: ir.Tensor(array, dtype=dtype, name=name), key
    )


def _numbers(
    value: ir.Value | None, columns: int, dtypes: tuple[ir.DataType, ...]
) -> npt.NDArray[np.float64] | None:
    """A constant's numbers if it holds one for each column, or one for all."""
    tensor = constant(value)
    if tensor is None or tensor.dtype not in dtypes:
        return None
    shape = tuple(tensor.shape.numpy())
    check_payload(tensor, f"bias {tensor.name!r}")
    if math.prod(shape) not in (1, columns) or (shape and shape[-1] not in (1, columns)):
        return None
    if shape and math.prod(shape) != shape[-1]:
        return None
    array: npt.NDArray[Any] = tensor.numpy()
    return array.astype(np.float64)


def _dequantized(node: ir.Node, columns: int) -> npt.NDArray[np.float64] | None:
    """The numbers of a dequantised bias with one scale, or one for each column."""
    inputs = [*node.inputs, None, None, None]
    codes = _numbers(inputs[0], columns, _QUANTISED)
    scales = _numbers(inputs[1], columns, _FLOATS)
    if codes is None or scales is None or int_attribute(node, "block_size", 0):
        return None
    offset: npt.NDArray[np.float64] | float = 0.0
    if inputs[2] is not None:
        zero_points = _numbers(inputs[2], columns, _QUANTISED)
        if zero_points is None or zero_points.size not in (1, scales.size):
            return None
        offset = zero_points.reshape(-1)
    if scales.size != 1 and scales.size != codes.size:
        return None
    return ((codes.reshape(-1) - offset) * scales.reshape(-1)).reshape(
        codes.shape if codes.size >= scales.size else scales.shape
    )
