# SPDX-License-Identifier: MIT
"""One description of a block-quantised weight, between every reader and every writer.

A weight ``W[K, N]`` is stored as integer codes with one scale, and perhaps one zero point, for
each block of ``block_size`` neighbours along K:

    W[k, n] = (codes[k, n] - zero_points[k // block_size, n]) * scales[k // block_size, n]

which is what ONNX's DequantizeLinear computes
(https://onnx.ai/onnx/operators/onnx__DequantizeLinear.html, "blocked quantization").
"""

from __future__ import annotations

__all__ = ["BlockQuantizedWeight", "Refusal", "constant_tensor", "read_dequantize_linear"]

import dataclasses

import onnx_ir as ir

_STORAGE = {
    ir.DataType.INT2: (2, True),
    ir.DataType.UINT2: (2, False),
    ir.DataType.INT4: (4, True),
    ir.DataType.UINT4: (4, False),
    ir.DataType.INT8: (8, True),
    ir.DataType.UINT8: (8, False),
}


class Refusal(Exception):
    """A candidate cannot be rewritten; the text is the reason a user reads."""


@dataclasses.dataclass(frozen=True, eq=False)
class BlockQuantizedWeight:
    """A constant weight ``[K, N]`` in blocks along K; tensors by reference, never unpacked.

    Attributes:
        codes: Value of the stored codes: ``[K, N]`` when ``k_axis`` is 0, ``[N, K]`` when it
            is 1; type int2, uint2, int4, uint4, int8 or uint8.
        scales: Value of the scales: ``[blocks, N]`` or ``[N, blocks]``; float32 or float16.
        zero_points: Value of the zero points, shape of ``scales``, type of ``codes``; None
            stands for 0.
        bits: 2, 4 or 8.
        signed: Whether codes and zero points are in two's complement.
        K: Size of the reduced dimension.
        N: Number of output columns.
        block_size: Neighbours along K that share one scale.
        k_axis: Axis of ``codes`` along which the blocks run.
    """

    codes: ir.Value
    scales: ir.Value
    zero_points: ir.Value | None
    bits: int
    signed: bool
    K: int
    N: int
    block_size: int
    k_axis: int

    @property
    def blocks(self) -> int:
        """Blocks per column, ``ceil(K / block_size)``; the last one may be short."""
        return -(-self.K // self.block_size)

    @property
    def dtype(self) -> ir.DataType:
        """Stored type of the codes."""
        return constant_tensor(self.codes).dtype

    @property
    def layout(self) -> str:
        """The stored layout in a few words, for remarks."""
        shape = (self.K, self.N) if self.k_axis == 0 else (self.N, self.K)
        zero_point = "" if self.zero_points is None else ", zero points"
        return (
            f"{self.dtype.name.lower()} {list(shape)}, axis {self.k_axis}, "
            f"block {self.block_size}{zero_point}"
        )


def constant_tensor(value: ir.Value) -> ir.TensorProtocol:
    """Return the tensor of a value that :func:`read_dequantize_linear` has accepted.

    Raises:
        Refusal: If the value is not a constant.
    """
    if value.const_value is None:
        raise Refusal(f"{value.name!r} is not a constant")
    return value.const_value


def read_dequantize_linear(dq: ir.Node, *, k_axis: int) -> BlockQuantizedWeight:
    """Read the weight that a blocked DequantizeLinear unpacks.

    Args:
        dq: The DequantizeLinear node.
        k_axis: Axis along which the consumer reduces: 0 when the output is used as
            ``[K, N]``, 1 when it is transposed first.

    Returns:
        The weight, its tensors untouched.

    Raises:
        Refusal: If the layout is none that the description can hold; the text names the
            tensor, what was found and what would be needed.
    """
    codes = _constant_input(dq, 0, "weight")
    scales = _constant_input(dq, 1, "scale")
    has_zero_points = len(dq.inputs) > 2 and dq.inputs[2] is not None
    zero_points = _constant_input(dq, 2, "zero point") if has_zero_points else None

    if codes.dtype not in _STORAGE:
        raise Refusal(
            f"weight {codes.name!r} is {_type_name(codes)}: codes of 2, 4 or 8 bits fuse"
        )
    bits, signed = _STORAGE[codes.dtype]

    shape = _static_shape(codes, "weight")
    if len(shape) != 2:
        raise Refusal(f"weight {codes.name!r} has shape {list(shape)}: rank 2 fuses")
    if 0 in shape:
        raise Refusal(f"weight {codes.name!r} of shape {list(shape)} is empty")
    if scales.dtype not in (ir.DataType.FLOAT, ir.DataType.FLOAT16):
        raise Refusal(
            f"scale {scales.name!r} is {_type_name(scales)}: float32 or float16 scales fuse"
        )
    output_dtype = dq.attributes.get_int("output_dtype", 0)
    if output_dtype not in (0, int(scales.dtype)):
        raise Refusal(
            f"output_dtype is {ir.DataType(output_dtype).name.lower()} but scale "
            f"{scales.name!r} is {_type_name(scales)}: equal types fuse"
        )

    block_size = dq.attributes.get_int("block_size", 0)
    if block_size == 0:
        raise Refusal(
            f"scale {scales.name!r} of shape {list(_static_shape(scales, 'scale'))} is per "
            "tensor or per channel: blocks along K fuse"
        )
    if block_size < 0:
        raise Refusal(f"block_size {block_size} is negative")
    axis = dq.attributes.get_int("axis", 1)
    if not -2 <= axis < 2:
        raise Refusal(f"axis {axis} is out of range for weight {codes.name!r} of rank 2")
    if axis % 2 != k_axis:
        raise Refusal(
            f"blocks of weight {codes.name!r} run along axis {axis}, across the output "
            f"columns: blocks along the reduced axis {k_axis} fuse"
        )

    k, n = (shape[0], shape[1]) if k_axis == 0 else (shape[1], shape[0])
    blocks = -(-k // block_size)
    expected = (blocks, n) if k_axis == 0 else (n, blocks)
    if _static_shape(scales, "scale") != expected:
        raise Refusal(
            f"scale {scales.name!r} has shape {list(_static_shape(scales, 'scale'))}: weight "
            f"{codes.name!r} of shape {list(shape)} in blocks of {block_size} needs "
            f"{list(expected)}"
        )
    if zero_points is not None:
        if zero_points.dtype != codes.dtype:
            raise Refusal(
                f"zero point {zero_points.name!r} is {_type_name(zero_points)} but weight "
                f"{codes.name!r} is {_type_name(codes)}"
            )
        if _static_shape(zero_points, "zero point") != expected:
            raise Refusal(
                f"zero point {zero_points.name!r} has shape "
                f"{list(_static_shape(zero_points, 'zero point'))}: {list(expected)} is needed"
            )
    return BlockQuantizedWeight(
        codes=codes,
        scales=scales,
        zero_points=zero_points,
        bits=bits,
        signed=signed,
        K=k,
        N=n,
        block_size=block_size,
        k_axis=k_axis,
    )


def _constant_input(dq: ir.Node, index: int, role: str) -> ir.Value:
    """Return an input that no caller of the session can change."""
    value = dq.inputs[index]
    if value is None:
        raise Refusal(f"{role} is missing")
    # An initializer that is also a graph input is only a default: const_value is set, yet
    # whoever runs the session may feed another tensor.
    if value.is_graph_input():
        raise Refusal(
            f"{role} {value.name!r} is a graph input: a caller may feed another; make it an "
            "initializer only"
        )
    if value.const_value is None or not value.is_initializer():
        raise Refusal(f"{role} {value.name!r} is computed at run time: initializers fuse")
    return value


def _static_shape(value: ir.Value, role: str) -> tuple[int, ...]:
    if value.const_value is None:
        raise Refusal(f"{role} {value.name!r} is not a constant")
    return tuple(value.const_value.shape.numpy())


def _type_name(value: ir.Value) -> str:
    return value.dtype.name.lower() if value.dtype is not None else "of unknown type"
