# SPDX-License-Identifier: MIT
"""Writes a dequantised table as the inputs of com.microsoft's GatherBlockQuantized.

The operator (onnxruntime's docs/ContribOperators.md) takes

    data         int4 or uint4 codes of any shape, blocks along any axis; or uint8, unsigned
                 codes packed along the last axis, for whole rows (gather_axis 0) only
    scales       rank of data, one for each block; their type is the output's
    zero_points  int4 and uint4: as scales; uint8: packed along the last axis. Left out they
                 are 0 for int4 and uint4, 2**(bits - 1) for uint8

in blocks of any power of 2 from 16 on, longer than the axis too. The uint8 form is
MatMulNBits' order: a tied embedding and head share their bytes.
"""

from __future__ import annotations

__all__ = ["TableInputs", "table_writer"]

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from rewrite_rules.dq_matmulnbits_fusion.kernel_support import NoKernel, table_unsupported
from rewrite_rules.dq_matmulnbits_fusion.matmulnbits_inputs import (
    kernel_block_size,
    write_codes,
    write_scales,
    write_zero_points,
)
from rewrite_rules.graph.initializers import DerivedInitializers
from rewrite_rules.graph.lazy_tensors import AliasTensor, ChunkedTensor, packed_bytes
from rewrite_rules.onnxruntime_version import Version
from rewrite_rules.weights.bit_packing import pack_rows, unpack
from rewrite_rules.weights.block_quantized_weight import BlockQuantizedWeight, Unrepresentable
from rewrite_rules.weights.dequantized_operand import DequantizedOperand
from rewrite_rules.weights.repacking import repack
from rewrite_rules.weights.strided_axes import offsets

_SMALLEST_BLOCK = 16
_CHUNK_ELEMENTS = 1 << 20


@dataclasses.dataclass(frozen=True, eq=False)
class TableInputs:
    """The constant inputs of one GatherBlockQuantized and its attributes.

    Attributes:
        data: Input ``data``.
        scales: Input ``scales``.
        zero_points: Input ``zero_points``; None where the operator's default is meant.
        attributes: ``gather_axis``, ``quantize_axis``, ``block_size``, and ``bits`` for uint8
            data (onnxruntime knows it from 1.23 on).
        note: What kept the table from sharing a product's codes; or empty.
    """

    data: ir.Value
    scales: ir.Value
    zero_points: ir.Value | None
    attributes: dict[str, int]
    note: str = ""


def table_writer(
    initializers: DerivedInitializers,
    operand: DequantizedOperand,
    axis: int,
    version: Version | None,
    *,
    tied: bool,
) -> Callable[[], TableInputs]:
    """Return what registers the inputs.

    Args:
        initializers: Those of the run.
        operand: The table.
        axis: Axis that is gathered from, not negative.
        version: Of onnxruntime; None for the newest.
        tied: Whether a product reads the same codes: the packed form is preferred then.

    Raises:
        NoKernel: If the operator takes the table in no form.
    """
    if len(operand.shape) < 2:
        raise NoKernel(
            f"table {operand.codes.name!r} has rank {len(operand.shape)}: 2 has one"
        )
    stored = operand.bits == 4 and not operand.renamed
    whole = _whole_axis(operand) if stored else None
    weight: BlockQuantizedWeight | None = None
    note = ""
    try:
        weight = _rows(operand, axis)
        blocks = 1 if weight.one_block else weight.blocks(weight.block_size)
        table_unsupported(
            version,
            bits=weight.bits,
            odd_blocks=weight.zero_points is not None and blocks % 2 == 1,
        )
    except (NoKernel, Unrepresentable) as refusal:
        if tied and weight is not None:
            note = f"its codes not shared with the product beside it: {refusal}"
        weight = None
        if not stored or (whole is None and not _has_kernel_blocks(operand)):
            raise
    if weight is not None and (tied or not stored):
        packed = weight
        return lambda: _write_packed(initializers, operand, packed)
    if _has_kernel_blocks(operand):
        return lambda: dataclasses.replace(
            _write_stored(initializers, operand, axis), note=note
        )
    if whole is not None:
        along = whole
        return lambda: dataclasses.replace(
            _write_whole(initializers, operand, axis, along), note=note
        )
    assert weight is not None
    rows = weight
    return lambda: _write_packed(initializers, operand, rows)


def _has_kernel_blocks(operand: DequantizedOperand) -> bool:
    """Whether the operator takes the scales and zero points as they are stored."""
    block_size = operand.dequantize.attributes.get_int("block_size", 0)
    return block_size >= _SMALLEST_BLOCK and not block_size & (block_size - 1)


def _whole_axis(operand: DequantizedOperand) -> int | None:
    """The last axis along which the scale stays the same; None if there is none."""
    axes = [i for i, axis in enumerate(operand.axes) if all(run.scales == 0 for run in axis)]
    return axes[-1] if axes else None


def _write_stored(
    initializers: DerivedInitializers, operand: DequantizedOperand, axis: int
) -> TableInputs:
    """4-bit codes, scales and zero points as they are."""
    attributes = operand.dequantize.attributes
    return TableInputs(
        data=operand.codes,
        scales=_scales_as_stored(initializers, operand),
        zero_points=operand.zero_points,
        attributes={
            "gather_axis": axis,
            "quantize_axis": attributes.get_int("axis", 1) % len(operand.shape),
            "block_size": attributes.get_int("block_size", 0),
        },
    )


def _scales_as_stored(
    initializers: DerivedInitializers, operand: DequantizedOperand
) -> ir.Value:
    """The scales in the operand's type, or as they are where that one is narrower."""
    source, dtype = operand.scale_tensor, operand.dtype
    if source.dtype.bitwidth >= dtype.bitwidth:
        return operand.scales

    def chunks() -> Iterator[npt.NDArray[Any]]:
        stored = packed_bytes(source).view(source.dtype.numpy())
        for start in range(0, stored.size, _CHUNK_ELEMENTS):
            yield stored[start : start + _CHUNK_ELEMENTS].astype(dtype.numpy())

    def make(name: str) -> ir.TensorProtocol:
        return ChunkedTensor(chunks, dtype, tuple(source.shape.numpy()), name)

    return initializers.get(operand.scales, f".{dtype.name.lower()}", make)


def _write_whole(
    initializers: DerivedInitializers, operand: DequantizedOperand, axis: int, whole: int
) -> TableInputs:
    """4-bit codes as they are, one block along an axis on which the scale stays the same."""
    axes = [() if i == whole else runs for i, runs in enumerate(operand.axes)]
    shape = tuple(1 if i == whole else size for i, size in enumerate(operand.shape))
    _, at = offsets(axes)
    scales = packed_bytes(operand.scale_tensor).view(operand.scale_tensor.dtype.numpy())
    dtype = max(operand.dtype, operand.scale_tensor.dtype, key=lambda item: item.bitwidth)
    array = scales[at].astype(dtype.numpy()).reshape(shape)
    key = (operand.axes, whole, dtype)
    zero_points = None
    if operand.zero_points is not None and operand.zero_point_tensor is not None:
        source = operand.zero_point_tensor
        packed = pack_rows(unpack(packed_bytes(source), operand.bits, at), operand.bits)
        zero_points = initializers.get(
            operand.zero_points,
            ".whole",
            lambda name: ir.PackedTensor(
                packed, source.dtype, shape=ir.Shape(shape), name=name
            ),
            key,
        )
    return TableInputs(
        data=operand.codes,
        scales=initializers.get(
            operand.scales,
            ".whole",
            lambda name: ir.Tensor(array, dtype=dtype, name=name),
            key,
        ),
        zero_points=zero_points,
        attributes={
            "gather_axis": axis,
            "quantize_axis": whole,
            "block_size": _covering_block(operand.shape[whole]),
        },
    )


def _rows(operand: DequantizedOperand, axis: int) -> BlockQuantizedWeight:
    """Describe the table for the packed form: its rows are the columns of ``W[K, N]``."""
    name = operand.codes.name
    if axis != 0:
        raise NoKernel(
            f"table {name!r} of {operand.bits}-bit codes is gathered along axis {axis}: axis "
            "0 has a kernel"
        )
    if len(operand.shape) < 2:
        raise NoKernel(f"table {name!r} has shape {list(operand.shape)}: rows have a kernel")
    leading = tuple(run for axis_runs in operand.axes[:-1] for run in axis_runs)
    rows = dataclasses.replace(operand, axes=(leading, operand.axes[-1]))
    weight = rows.matrix(k_axis=1)
    if weight.K * weight.bits % 8:
        raise NoKernel(
            f"table {name!r} has {weight.K} columns: its rows of {weight.bits}-bit codes "
            "don't fill bytes"
        )
    if not weight.one_block and weight.block_size < _SMALLEST_BLOCK:
        raise NoKernel(
            f"blocks of {weight.block_size} in the rows of table {name!r} have no kernel: "
            f"{_SMALLEST_BLOCK} and more have one"
        )
    return weight


def _covering_block(size: int) -> int:
    return max(_SMALLEST_BLOCK, 1 << (size - 1).bit_length())


def _write_packed(
    initializers: DerivedInitializers,
    operand: DequantizedOperand,
    weight: BlockQuantizedWeight,
) -> TableInputs:
    """Unsigned codes, row by row, in MatMulNBits' order."""
    block_size = _covering_block(weight.K) if weight.one_block else weight.block_size
    zero_points = write_zero_points(initializers, weight, block_size)
    scales = write_scales(initializers, weight, block_size, weight.lossless_dtype)
    leading = operand.shape[:-1]
    if zero_points is not None:
        zero_points = _with_axes(initializers, zero_points, leading)
    return TableInputs(
        data=_with_axes(initializers, _write_data(initializers, weight), leading),
        scales=_with_axes(initializers, scales, leading),
        zero_points=zero_points,
        attributes={
            "gather_axis": 0,
            "quantize_axis": len(operand.shape) - 1,
            "block_size": block_size,
            "bits": weight.bits,
        },
    )


def _with_axes(
    initializers: DerivedInitializers, rows: ir.Value, leading: tuple[int, ...]
) -> ir.Value:
    """The same bytes with the rows' axes told apart again."""
    if len(leading) == 1:
        return rows
    assert rows.const_value is not None
    dtype, width = rows.const_value.dtype, int(rows.const_value.shape.numpy()[-1])
    shape = (*leading, width)
    return initializers.get(
        rows, ".axes", lambda name: AliasTensor(rows, dtype, shape, name), shape
    )


def _write_data(initializers: DerivedInitializers, weight: BlockQuantizedWeight) -> ir.Value:
    """Register the packed codes, uint8 ``[N, K * bits / 8]``."""
    shape = (weight.N, weight.K * weight.bits // 8)
    key = (weight.K, weight.N, weight.k_axis, weight.offset)
    kernel_block = _unpadded_block(weight)
    if kernel_block is not None:
        codes = write_codes(initializers, weight, kernel_block)
        return initializers.get(
            weight.codes,
            ".rows",
            lambda name: AliasTensor(codes, ir.DataType.UINT8, shape, name),
            key,
        )

    def chunks() -> Iterator[npt.NDArray[np.uint8]]:
        for rows in repack(
            packed_bytes(weight.code_tensor),
            bits=weight.bits,
            signed=weight.signed,
            k=weight.K,
            n=weight.N,
            block_size=8,
            k_axis=weight.k_axis,
        ):
            yield rows[:, : shape[1]]

    return initializers.get(
        weight.codes,
        ".rows",
        lambda name: ChunkedTensor(chunks, ir.DataType.UINT8, shape, name),
        key,
    )


def _unpadded_block(weight: BlockQuantizedWeight) -> int | None:
    """The block size of MatMulNBits whose codes are the same bytes; None if none are."""
    try:
        block_size = kernel_block_size(weight)
    except NoKernel:
        return None
    return block_size if weight.K % block_size == 0 else None
