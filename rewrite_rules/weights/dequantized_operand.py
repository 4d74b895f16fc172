# SPDX-License-Identifier: MIT
"""Reads the constant weight behind an operand: DequantizeLinear, and what only renames it.

    DequantizeLinear(codes, scales, zero_points?)           per tensor, per axis or in blocks
        -> (Identity | Cast | Transpose | Reshape | Squeeze | Unsqueeze) x any number
        -> an operand of MatMul, Gemm, Gather ...

The codes may have any rank; what counts is where the numbers of ``W[K, N]`` lie in them. So
``[K, N]`` blocked on axis 0, ``[N, K]`` blocked on axis 1 with a Transpose, and ``[N, blocks,
block_size]`` blocked on axis 2 with Reshape and Transpose are one layout to the writers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from rewrite_rules.graph.attributes import axes_of, axis_of, int_attribute, ints_attribute
from rewrite_rules.graph.constants import constant_ints, require_constant, source_of
from rewrite_rules.graph.lazy_tensors import packed_bytes
from rewrite_rules.graph.nodes import is_dequantize_linear
from rewrite_rules.graph.refusal import Refusal
from rewrite_rules.weights.bit_packing import unpack
from rewrite_rules.weights.block_quantized_weight import (
    BlockQuantizedWeight,
    ScaleLayout,
    Unrepresentable,
)
from rewrite_rules.weights.strided_axes import (
    Axis,
    Run,
    coalesced,
    offsets,
    reshape,
    row_major,
)

# What weights are stored as, and biases besides.
_CODE_TYPES = frozenset(
    {
        *(ir.DataType.INT2, ir.DataType.INT4, ir.DataType.INT8, ir.DataType.INT32),
        *(ir.DataType.UINT2, ir.DataType.UINT4, ir.DataType.UINT8),
    }
)
_RENAMING = frozenset({"Identity", "Cast", "Transpose", "Reshape", "Squeeze", "Unsqueeze"})
_CHUNK_ELEMENTS = 1 << 20
_MAX_AXES = 8
# More nodes in a row rename nothing that a fewer could not; and a cycle must end.
_LONGEST_TRAIL = 64


@dataclasses.dataclass(frozen=True, eq=False)
class DequantizedOperand:
    """A dequantised constant as its consumer sees it.

    Attributes:
        codes: Of 2, 4 or 8 bits, or int32.
        scales: float32 or float16.
        zero_points: Shape of ``scales``, type of ``codes``; None stands for 0.
        axes: Where the numbers of each axis of the operand lie.
        casts: Types that its numbers pass through, DequantizeLinear's own first.
        layout: The stored layout in a few words.
        renamed: Whether its axes differ from DequantizeLinear's.
    """

    dequantize: ir.Node
    codes: ir.Value
    scales: ir.Value
    zero_points: ir.Value | None
    code_tensor: ir.TensorProtocol
    scale_tensor: ir.TensorProtocol
    zero_point_tensor: ir.TensorProtocol | None
    axes: tuple[Axis, ...]
    casts: tuple[ir.DataType, ...]
    layout: str
    renamed: bool = False

    @property
    def bits(self) -> int:
        """Of a code."""
        return self.code_tensor.dtype.bitwidth

    @property
    def signed(self) -> bool:
        """Whether codes and zero points are in two's complement."""
        return self.code_tensor.dtype.is_signed()

    @property
    def dtype(self) -> ir.DataType:
        """Type of the operand."""
        return self.casts[-1]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the operand."""
        return tuple(math.prod(run.size for run in axis) for axis in self.axes)

    def matrix(self, k_axis: int, group: int | None = None) -> BlockQuantizedWeight:
        """Describe the operand as ``W[K, N]``; its codes have to lie in order.

        ``k_axis`` is the reduced one of the last two axes; ``group`` the index before them.
        """
        *batch, rows, columns = self.axes
        k_run, n_run = (
            coalesced((rows, columns)[k_axis]),
            coalesced((rows, columns)[1 - k_axis]),
        )
        batch_run = coalesced(batch[0]) if batch else Run(1, 0)
        if k_run is None or n_run is None or batch_run is None:
            raise Unrepresentable(
                f"the numbers of weight {self.codes.name!r} lie at uneven steps"
            )
        K, N = self.shape[-2:] if k_axis == 0 else self.shape[:-3:-1]
        order = _order(k_run, n_run, K, N)
        if order is None:
            raise Unrepresentable(
                f"weight {self.codes.name!r} is stored neither as [K, N] nor as [N, K]"
            )
        block_size = K if k_run.scales == 0 else k_run.block
        index = group or 0
        if index * batch_run.codes * self.bits % 8:
            raise Unrepresentable(
                f"a group of weight {self.codes.name!r} starts within a byte"
            )
        grid = ScaleLayout(
            offset=index // batch_run.block * batch_run.scales,
            block_step=k_run.scales,
            column_step=n_run.scales,
            column_block=n_run.block,
        )
        return BlockQuantizedWeight(
            self, K, N, block_size, order, grid, offset=index * batch_run.codes
        )

    def stored_scales(self) -> npt.NDArray[Any]:
        """The scales, flat, as they are stored."""
        return packed_bytes(self.scale_tensor).view(self.scale_tensor.dtype.numpy())

    def stored_zero_points(self) -> npt.NDArray[np.uint8]:
        """The zero points, flat, a byte each, not yet signed; there must be some."""
        assert self.zero_point_tensor is not None
        count = np.arange(self.zero_point_tensor.size, dtype=np.int64)
        return unpack(packed_bytes(self.zero_point_tensor), self.bits, count)

    def rows(self) -> Iterator[npt.NDArray[Any]]:
        """Yield the operand's numbers in order, in chunks ``[rows, last axis]``.

        They are DequantizeLinear's own: one float32 product, rounded once, then cast.
        """
        scales = self.stored_scales()
        zero_points = None
        if self.zero_point_tensor is not None:
            count = np.arange(self.zero_point_tensor.size, dtype=np.int64)
            zero_points = _integers(self.zero_point_tensor, count)
        row_codes, row_scales = offsets(self.axes[:-1])
        codes_along, scales_along = offsets(self.axes[-1:])
        step = max(1, _CHUNK_ELEMENTS // codes_along.size)
        for start in range(0, row_codes.size, step):
            rows = slice(start, start + step)
            at = row_codes[rows, None] + codes_along
            scale_at = row_scales[rows, None] + scales_along
            steps = _integers(self.code_tensor, at)
            if zero_points is not None:
                steps -= zero_points[scale_at]
            product = steps.astype(np.float32) * scales[scale_at].astype(np.float32)
            for dtype in self.casts:
                product = product.astype(dtype.numpy())
            yield product


def dequantize_chain(value: ir.Value | None) -> list[ir.Node] | None:
    """The nodes from a DequantizeLinear on a candidate constant to ``value``, in order.

    None where ``value`` comes from elsewhere, or what is dequantised is computed at run time.
    """
    trail: list[ir.Node] = []
    while value is not None and (node := value.producer()) is not None:
        if len(node.outputs) != 1 or len(trail) >= _LONGEST_TRAIL:
            return None
        trail.append(node)
        if is_dequantize_linear(node):
            codes = node.inputs[0] if node.inputs else None
            if codes is None:
                return None
            codes = source_of(codes)
            # An overridable initializer is a candidate: its refusal tells how to fix it.
            return trail[::-1] if ir.convenience.get_const_tensor(codes) is not None else None
        if not is_layout_op(node):
            return None
        value = node.inputs[0] if node.inputs else None
    return None


def is_layout_op(node: ir.Node) -> bool:
    """Whether a node keeps the numbers of its first input, under other axes or types."""
    return node.op_type in _RENAMING and node.domain == ""


def read_operand(trail: list[ir.Node]) -> DequantizedOperand:
    """Read what :func:`dequantize_chain` found.

    Refused: what a caller can change, or is malformed; the text names the tensor, what was
    found and what would be needed. Unrepresentable: a sound layout without a description.
    """
    operand = _read_dequantize(trail[0])
    for node in trail[1:]:
        operand = _renamed(operand, node)
    return operand


def _read_dequantize(dq: ir.Node) -> DequantizedOperand:
    inputs = [*dq.inputs, None, None, None]
    codes, code_tensor = _input(inputs[0], "weight")
    scales, scale_type = inputs[1], 0
    cast = None if scales is None else source_of(scales).producer()
    if cast is not None and (cast.domain, cast.op_type) == ("", "Cast"):
        # Stored in fewer bits than they are used in; onnxruntime folds it at the start.
        scales, scale_type = cast.inputs[0], int_attribute(cast, "to", 0)
    scales, scale_tensor = _input(scales, "scale")
    zero_points, zero_point_tensor = None, None
    if inputs[2] is not None:
        zero_points, zero_point_tensor = _input(inputs[2], "zero point")

    if code_tensor.dtype not in _CODE_TYPES:
        raise Refusal(
            f"weight {codes.name!r} is {_type_name(code_tensor)}: codes of 2, 4 or 8 bits fuse"
        )
    shape = tuple(code_tensor.shape.numpy())
    if 0 in shape:
        raise Refusal(f"weight {codes.name!r} of shape {list(shape)} is empty")
    if len(shape) > _MAX_AXES:
        raise Refusal(f"weight {codes.name!r} has rank {len(shape)}: {_MAX_AXES} at most fuse")
    if scale_tensor.dtype not in (ir.DataType.FLOAT, ir.DataType.FLOAT16):
        raise Refusal(
            f"scale {scales.name!r} is {_type_name(scale_tensor)}: float32 or float16 scales "
            "fuse"
        )
    scale_type = scale_type or int(scale_tensor.dtype)
    dtype = _data_type(int_attribute(dq, "output_dtype", 0) or scale_type)
    axes, blocks = _axes(dq, codes, shape, scales, tuple(scale_tensor.shape.numpy()))
    if zero_points is not None and zero_point_tensor is not None:
        if zero_point_tensor.dtype != code_tensor.dtype:
            raise Refusal(
                f"zero point {zero_points.name!r} is {_type_name(zero_point_tensor)} but "
                f"weight {codes.name!r} is {_type_name(code_tensor)}"
            )
        found, expected = (
            list(tensor.shape.numpy()) for tensor in (zero_point_tensor, scale_tensor)
        )
        # [] and [1] both stand for a single one.
        if found != expected and found + expected != [1]:
            raise Refusal(
                f"zero point {zero_points.name!r} has shape {found}: {expected} is needed"
            )
        if code_tensor.dtype is ir.DataType.INT32 and zero_point_tensor.numpy().any():
            raise Refusal(f"zero point {zero_points.name!r} of int32 codes is not 0")
    zero = "" if zero_points is None else ", zero points"
    operand = DequantizedOperand(
        dequantize=dq,
        codes=codes,
        scales=scales,
        zero_points=zero_points,
        code_tensor=code_tensor,
        scale_tensor=scale_tensor,
        zero_point_tensor=zero_point_tensor,
        axes=axes,
        casts=(dtype,),
        layout=f"{_type_name(code_tensor)} {list(shape)}, {blocks}{zero}",
    )
    _check_scales(operand)
    return operand


def _axes(
    dq: ir.Node,
    codes: ir.Value,
    shape: tuple[int, ...],
    scales: ir.Value,
    scale_shape: tuple[int, ...],
) -> tuple[tuple[Axis, ...], str]:
    """Where codes and scales lie, and how they are quantised in a few words."""
    steps = row_major(shape)
    block_size = int_attribute(dq, "block_size", 0)
    if block_size < 0:
        raise Refusal(f"block_size {block_size} is negative")
    plain = [(Run(size, step),) for size, step in zip(shape, steps, strict=True)]
    if block_size == 0 and math.prod(scale_shape) == 1 and len(scale_shape) <= 1:
        return tuple(plain), "one scale"

    axis = axis_of(int_attribute(dq, "axis", 1), len(shape))
    if block_size == 0:
        if scale_shape != (shape[axis],):
            raise Refusal(
                f"scale {scales.name!r} has shape {list(scale_shape)}: weight {codes.name!r} "
                f"of shape {list(shape)} needs [], [1] or, for axis {axis}, [{shape[axis]}]"
            )
        plain[axis] = (Run(shape[axis], steps[axis], 1),)
        return tuple(plain), f"a scale for each index of axis {axis}"

    # A single block may have any size: onnxruntime's quantizer writes K for whole columns.
    if block_size & (block_size - 1) and block_size < shape[axis]:
        raise Refusal(f"block_size {block_size} of weight {codes.name!r} is not a power of 2")
    expected = list(shape)
    expected[axis] = -(-shape[axis] // block_size)
    if list(scale_shape) != expected:
        raise Refusal(
            f"scale {scales.name!r} has shape {list(scale_shape)}: weight {codes.name!r} of "
            f"shape {list(shape)} in blocks of {block_size} on axis {axis} needs {expected}"
        )
    scale_steps = row_major(expected)
    return (
        tuple(
            (Run(size, steps[i], scale_steps[i], block_size if i == axis else 1),)
            for i, size in enumerate(shape)
        ),
        f"axis {axis}, block {block_size}",
    )


def _renamed(operand: DequantizedOperand, node: ir.Node) -> DequantizedOperand:
    """Follow the operand through one node that keeps its numbers."""
    label = f"{node.op_type} {node.name or node.outputs[0].name!r}"
    if node.op_type == "Identity":
        return operand
    if node.op_type == "Cast":
        dtype = _data_type(int_attribute(node, "to", 0))
        return dataclasses.replace(operand, casts=(*operand.casts, dtype))
    if node.op_type == "Transpose":
        order = list(range(len(operand.axes)))
        given = ints_attribute(node, "perm")
        perm = order[::-1] if given is None else given
        if sorted(perm) != order:
            raise Refusal(f"{label} has perm {perm}: the weight has rank {len(order)}")
        axes = tuple(operand.axes[i] for i in perm)
        return dataclasses.replace(operand, axes=axes, renamed=True)
    try:
        shape = _new_shape(operand.shape, node)
    except Refusal as reason:
        raise Refusal(f"{label}: {reason}") from None
    if shape is None or math.prod(shape) != math.prod(operand.shape):
        raise Refusal(f"{label} does not give {list(operand.shape)} a constant shape")
    if len(shape) > _MAX_AXES:
        raise Refusal(f"{label} gives rank {len(shape)}: {_MAX_AXES} at most fuse")
    reshaped = reshape(operand.axes, shape)
    if reshaped is None:
        raise Unrepresentable(
            f"{label} cuts {list(operand.shape)} in the middle of blocks or axes"
        )
    return dataclasses.replace(operand, axes=reshaped, renamed=True)


def _new_shape(old: tuple[int, ...], node: ir.Node) -> list[int] | None:
    """Shape after Reshape, Squeeze or Unsqueeze; None where it isn't constant."""
    given = node.inputs[1] if len(node.inputs) > 1 else None
    # An attribute before opset 13.
    wanted = ints_attribute(node, "axes") if given is None else constant_ints(given)
    if node.op_type == "Reshape" and wanted is not None:
        if not int_attribute(node, "allowzero", 0):
            kept = dict(enumerate(old))
            wanted = [kept.get(i, 0) if size == 0 else size for i, size in enumerate(wanted)]
        if wanted.count(-1) == 1:
            known = math.prod(size for size in wanted if size != -1)
            wanted[wanted.index(-1)] = math.prod(old) // known if known else 0
        return wanted if all(size > 0 for size in wanted) else None
    if not wanted:
        squeezed = node.op_type == "Squeeze" and (given is None or wanted is not None)
        return [size for size in old if size != 1] if squeezed else None
    if node.op_type == "Squeeze":
        dropped = axes_of(wanted, len(old))
        return [size for i, size in enumerate(old) if i not in dropped]
    rank = len(old) + len(wanted)
    added, sizes = axes_of(wanted, rank), iter(old)
    return [1 if i in added else next(sizes) for i in range(rank)]


def _check_scales(operand: DequantizedOperand) -> None:
    """Refuse scales that are not numbers, or that make numbers vanish.

    A scale of 0 is what quantizers write for a block of zeros, and is right there: all its
    codes are the zero point.
    """
    scales = operand.stored_scales()
    any_zero = False
    for start in range(0, scales.size, _CHUNK_ELEMENTS):
        chunk = scales[start : start + _CHUNK_ELEMENTS]
        finite = np.isfinite(chunk)
        if not finite.all():
            at = int(np.argmin(finite))
            raise Refusal(
                f"scale {operand.scales.name!r} holds {chunk[at]} (element {start + at})"
            )
        any_zero = any_zero or not chunk.all()
    if any_zero:
        _check_zero_scales(operand, scales)


def _check_zero_scales(operand: DequantizedOperand, scales: npt.NDArray[Any]) -> None:
    """Refuse a scale of 0 under codes that differ from the zero point."""
    # The numbers themselves, with every scale but 0 taken away: any that is left stood for
    # something.
    tensor = ir.Tensor((scales == 0).astype(np.float32))
    marked = dataclasses.replace(operand, scale_tensor=tensor, casts=(ir.DataType.FLOAT,))
    for chunk in marked.rows():
        if chunk.any():
            at = int(np.argmin(scales != 0))
            raise Refusal(
                f"scale {operand.scales.name!r} is 0 (element {at}) where the codes of weight "
                f"{operand.codes.name!r} differ from the zero point: their numbers are lost"
            )


def _data_type(number: int) -> ir.DataType:
    try:
        return ir.DataType(number)
    except ValueError:
        raise Refusal(f"type {number} is none of ONNX") from None


def _order(k_run: Run, n_run: Run, K: int, N: int) -> int | None:
    """0 when codes lie as [K, N], row-major, 1 when as [N, K], None when as neither."""
    if (N == 1 or n_run.codes == 1) and (K == 1 or k_run.codes == N):
        return 0
    if (K == 1 or k_run.codes == 1) and (N == 1 or n_run.codes == K):
        return 1
    return None


def _integers(
    tensor: ir.TensorProtocol, at: npt.NDArray[np.int64]
) -> npt.NDArray[np.int16 | np.int32]:
    """The codes at flat positions, as integers wide enough for their differences."""
    bits = tensor.dtype.bitwidth
    if bits > 8:
        return packed_bytes(tensor).view(np.int32)[at]
    values = unpack(packed_bytes(tensor), bits, at).astype(np.int16)
    if tensor.dtype.is_signed():
        values -= (values >> (bits - 1)) << bits
    return values


def _input(value: ir.Value | None, role: str) -> tuple[ir.Value, ir.TensorProtocol]:
    if value is None:
        raise Refusal(f"{role} is missing")
    return require_constant(value, role)


def _type_name(tensor: ir.TensorProtocol) -> str:
    return tensor.dtype.name.lower()
