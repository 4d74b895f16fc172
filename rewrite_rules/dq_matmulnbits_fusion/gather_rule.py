# SPDX-License-Identifier: MIT
"""Gather from a dequantised constant -> GatherBlockQuantized, which unpacks what it reads.

    Gather(DequantizeLinear(codes, scales, zero_points?), indices, axis)
        -> GatherBlockQuantized(codes, indices, scales, zero_points?)

A table that the operator takes in no form becomes a float constant; so does a small one of 2
or 4 bits: the kernel takes up to 3 times as long for a row as onnxruntime takes to unpack it
(1.32). The operator (onnxruntime's docs/ContribOperators.md) takes

    data         int4 or uint4 codes of any shape, blocks along any axis; or uint8, unsigned
                 codes packed along the last axis, for whole rows (gather_axis 0) only
    scales       rank of data, one for each block; their type is the output's
    zero_points  int4 and uint4: as scales; uint8: packed along the last axis. Left out they
                 are 0 for int4 and uint4, 2**(bits - 1) for uint8

in blocks of any power of 2 from 16 on. The uint8 form is MatMulNBits' order: a tied embedding
and head share their bytes. Its attribute ``bits`` is known from onnxruntime 1.23 on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy.typing as npt
import onnx_ir as ir

from rewrite_rules.dq_matmulnbits_fusion.fusion_run import Emit, OperandRule, check_type
from rewrite_rules.dq_matmulnbits_fusion.kernels import (
    KernelInputs,
    NoKernel,
    fitting_block_size,
    repacked,
    table_unsupported,
    write_codes,
    write_scales,
    write_zero_points,
)
from rewrite_rules.graph.initializers import DerivedInitializers
from rewrite_rules.graph.lazy_tensors import AliasTensor, ChunkedTensor
from rewrite_rules.graph.nodes import is_dequantize_linear
from rewrite_rules.graph.parameters import axis_of, int_attribute
from rewrite_rules.onnxruntime_version import Version
from rewrite_rules.remarks import Refusal
from rewrite_rules.weights.bit_packing import Bytes
from rewrite_rules.weights.dequantized_operand import (
    BlockQuantizedWeight,
    DequantizedOperand,
    Unrepresentable,
    is_layout_op,
    renamed_values,
)


class GatherToGatherBlockQuantized(OperandRule):
    """Gather(W, indices) -> GatherBlockQuantized(codes, indices).

    Refused where QuantizeLinear alone reads the rows of 8-bit codes.
    """

    index = 0

    def _plan(self, node: ir.Node, chain: list[ir.Node], operand: DequantizedOperand) -> Emit:
        readers = {reader.op_type for reader in node.outputs[0].consumers()}
        if operand.bits == 8 and readers == {"QuantizeLinear"}:
            raise Refusal(
                "ORP115",
                "only QuantizeLinear reads the rows: onnxruntime gathers the codes themselves",
            )
        check_type(operand)
        axis = axis_of(int_attribute(node, "axis", 0), len(operand.shape))
        tied = _is_tied(operand)
        if operand.bits < 8 and not tied and self._run.is_small(operand):
            raise NoKernel("ORP111", "a small table is read faster as floats")
        write, note = table_writer(operand, axis, self._run.context.onnxruntime, tied=tied)

        def emit(op: Any) -> tuple[ir.Value, str]:
            table = write(self._run.initializers)
            codes, *parameters = table.inputs
            value = op.GatherBlockQuantized(
                codes,
                node.inputs[1],
                *parameters,
                **table.attributes,
                _domain="com.microsoft",
                _name=node.name,
            )
            if table.scales.dtype != operand.dtype:
                value = op.Cast(value, to=int(operand.dtype))
            return value, f"GatherBlockQuantized, block {table.attributes['block_size']}{note}"

        return emit


def _is_tied(operand: DequantizedOperand) -> bool:
    """Whether anything but Gather reads the same codes, through whatever renames them."""

    def follows(node: ir.Node) -> bool:
        return is_layout_op(node) or is_dequantize_linear(node)

    uses = [use for value in renamed_values(operand.codes, follows) for use in value.uses()]
    return any(
        node.op_type not in ("Gather", "GatherBlockQuantized")
        and not (index == 0 and follows(node))
        for node, index in uses
    )


_SMALLEST_BLOCK = 16
_CHUNK_ELEMENTS = 1 << 20

_Writer = Callable[[DerivedInitializers], KernelInputs]


def table_writer(
    operand: DequantizedOperand, axis: int, version: Version | None, *, tied: bool
) -> tuple[_Writer, str]:
    """Return what registers the inputs, and what to remark on them; refuse what no form takes.

    Where a MatMul reads the same codes (``tied``), the packed form is preferred.
    """
    note, block = "", operand.dequantize.attributes.get_int("block_size", 0)
    as_stored = operand.bits == 4 and not operand.renamed and block >= _SMALLEST_BLOCK
    as_stored = as_stored and not block & (block - 1) and len(operand.shape) > 1
    if tied or not as_stored:
        try:
            return functools.partial(_write_packed, _rows(operand, axis, version)), ""
        except (NoKernel, Unrepresentable) as refusal:
            if not as_stored:
                raise
            note = f" (its codes not shared with the MatMul beside it: {refusal})"
    return functools.partial(_write_stored, operand, axis), note


def _rows(
    operand: DequantizedOperand, axis: int, version: Version | None
) -> BlockQuantizedWeight:
    """Describe the table for the packed form: its rows are the columns of ``W[K, N]``."""
    name = operand.codes.name
    if axis != 0:
        raise NoKernel(
            "ORP108",
            f"table {name!r} of {operand.bits}-bit codes is gathered along axis {axis}: axis "
            "0 has a kernel",
        )
    if len(operand.shape) != 2:
        raise NoKernel("ORP108", f"table {name!r} has rank {len(operand.shape)}: 2 has one")
    weight = operand.matrix(k_axis=1)
    if weight.K * operand.bits % 8:
        raise NoKernel(
            "ORP104",
            f"table {name!r} has {weight.K} columns: its rows of {operand.bits}-bit codes "
            "don't fill bytes",
        )
    block_size = _packed_block_size(weight)
    if block_size < _SMALLEST_BLOCK:
        raise NoKernel(
            "ORP108",
            f"blocks of {weight.block_size} in the rows of table {name!r} have no kernel: "
            f"multiples of {_SMALLEST_BLOCK} have one",
        )
    odd_blocks = operand.zero_points is not None and weight.blocks(block_size) % 2 == 1
    table_unsupported(version, bits=operand.bits, odd_blocks=odd_blocks)
    return weight


def _write_stored(
    operand: DequantizedOperand, axis: int, initializers: DerivedInitializers
) -> KernelInputs:
    """4-bit codes, scales and zero points as they are."""
    attributes = operand.dequantize.attributes
    source, dtype, scales = operand.scale_tensor, operand.dtype, operand.scales
    if source.dtype.bitwidth < dtype.bitwidth or not operand.scales_are_constant:

        def chunks() -> Iterator[npt.NDArray[Any]]:
            stored = operand.stored_scales()
            for start in range(0, stored.size, _CHUNK_ELEMENTS):
                yield stored[start : start + _CHUNK_ELEMENTS].astype(dtype.numpy())

        make = functools.partial(ChunkedTensor, chunks, dtype, tuple(source.shape.numpy()))
        scales = initializers.get(scales, f".{dtype.name.lower()}", make)
    made = {
        "gather_axis": axis,
        "quantize_axis": attributes.get_int("axis", 1) % len(operand.shape),
        "block_size": attributes.get_int("block_size", 0),
    }
    return KernelInputs(operand.codes, scales, operand.zero_points, made)


def _write_packed(
    weight: BlockQuantizedWeight, initializers: DerivedInitializers
) -> KernelInputs:
    """Unsigned codes, row by row, in MatMulNBits' order."""
    block_size = _packed_block_size(weight)
    return KernelInputs(
        _write_data(initializers, weight),
        write_scales(initializers, weight, block_size, weight.lossless_dtype),
        write_zero_points(initializers, weight, block_size),
        {"gather_axis": 0, "quantize_axis": 1, "block_size": block_size, "bits": weight.bits},
    )


def _write_data(initializers: DerivedInitializers, weight: BlockQuantizedWeight) -> ir.Value:
    """Register the packed codes, uint8 ``[N, K * bits / 8]``."""
    row_bytes = weight.K * weight.bits // 8
    shape = (weight.N, row_bytes)
    # That of MatMulNBits, whose codes are the same bytes where no row is padded.
    block_size = fitting_block_size(weight.bits, weight.block_size, weight.K)

    def chunks() -> Iterator[Bytes]:
        for rows in repacked(weight, 8):
            yield rows[:, :row_bytes]

    def make(name: str) -> ir.TensorProtocol:
        if block_size is not None and weight.K % block_size == 0:
            codes = write_codes(initializers, weight, block_size)
            return AliasTensor(codes, ir.DataType.UINT8, shape, name)
        return ChunkedTensor(chunks, ir.DataType.UINT8, shape, name)

    key = (weight.K, weight.N, weight.k_axis)
    return initializers.get(weight.operand.codes, ".rows", make, key)


def _packed_block_size(weight: BlockQuantizedWeight) -> int:
    """Return the largest power of 2 that cuts stored blocks evenly, or covers a row."""
    if weight.one_block:
        return max(_SMALLEST_BLOCK, 1 << (weight.K - 1).bit_length())
    return weight.block_size & -weight.block_size
