# SPDX-License-Identifier: MIT
"""Reads a small dequantised constant, a bias as a rule, as the numbers that it stands for."""

from __future__ import annotations

__all__ = ["DequantizedBias", "read_dequantized_bias"]

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from rewrite_rules.graph.attributes import axis_of, int_attribute
from rewrite_rules.graph.constants import constant, require_constant
from rewrite_rules.graph.nodes import label
from rewrite_rules.graph.refusal import Refusal


@dataclasses.dataclass(frozen=True, eq=False)
class DequantizedBias:
    """A constant behind DequantizeLinear, with one scale or one for each index of an axis.

    Attributes:
        codes: Value of the codes.
        parameters: DequantizeLinear's other inputs and its axis: with ``codes`` they identify
            the numbers.
        code_tensor: Tensor of the codes.
        scales: The scales, in a shape that broadcasts to the codes'.
        offset: The zero points likewise; 0 where there are none.
    """

    codes: ir.Value
    parameters: tuple[ir.Value | int | None, ...]
    code_tensor: ir.TensorProtocol
    scales: npt.NDArray[Any]
    offset: npt.NDArray[Any] | int

    @property
    def dtype(self) -> ir.DataType:
        """Type of the numbers: the scales'."""
        return ir.DataType.from_numpy(self.scales.dtype)

    def numbers(self) -> npt.NDArray[Any]:
        """Return DequantizeLinear's own: one float32 multiplication, rounded once."""
        steps = self.code_tensor.numpy().astype(np.int64) - self.offset
        product = steps.astype(np.float32) * self.scales.astype(np.float32)
        return product.astype(self.scales.dtype)


def read_dequantized_bias(
    dequantize: ir.Node, types: tuple[ir.DataType, ...]
) -> DequantizedBias | None:
    """Read a DequantizeLinear; None where its codes are not constant, or of other types.

    Raises:
        Refusal: If it dequantises in blocks, a caller may feed an input, or one does not fit.
    """
    tensor = constant(dequantize.inputs[0]) if dequantize.inputs else None
    if tensor is None or tensor.dtype not in types:
        return None
    codes, _ = require_constant(_input(dequantize, 0), "bias")
    _, scale_tensor = require_constant(_input(dequantize, 1), "scale")
    if scale_tensor.dtype not in (ir.DataType.FLOAT, ir.DataType.FLOAT16):
        raise Refusal(f"the scales of bias {codes.name!r} are not float32 or float16")
    if int_attribute(dequantize, "block_size", 0):
        raise Refusal(f"bias {codes.name!r} is quantised in blocks")
    shape, scales = tuple(tensor.shape.numpy()), scale_tensor.numpy()
    along, axis = [], 0
    if scales.size > 1:
        axis = axis_of(int_attribute(dequantize, "axis", 1), len(shape))
        if scales.shape != (shape[axis],):
            raise Refusal(f"{scales.size} scales for codes of shape {list(shape)}")
        along = [-1 if i == axis else 1 for i in range(len(shape))]
    offset: npt.NDArray[Any] | int = 0
    if len(dequantize.inputs) > 2 and dequantize.inputs[2] is not None:
        zero_point, zeros = require_constant(dequantize.inputs[2], "zero point")
        if zeros.size not in (1, scales.size) or zeros.dtype != tensor.dtype:
            raise Refusal(f"zero point {zero_point.name!r} does not fit bias {codes.name!r}")
        if tensor.dtype is ir.DataType.INT32 and zeros.numpy().any():
            raise Refusal(f"zero point {zero_point.name!r} of int32 codes is not 0")
        offset = zeros.numpy().astype(np.int64).reshape(along if zeros.size > 1 else [])
    parameters = (*dequantize.inputs[1:], axis)
    return DequantizedBias(codes, parameters, tensor, scales.reshape(along), offset)


def _input(node: ir.Node, index: int) -> ir.Value:
    value = node.inputs[index] if index < len(node.inputs) else None
    if value is None:
        raise Refusal(f"DequantizeLinear {label(node)!r} lacks input {index}")
    return value
