# SPDX-License-Identifier: MIT
"""Gather from a dequantised constant -> GatherBlockQuantized, which unpacks what it reads.

    Gather(DequantizeLinear(codes, scales, zero_points?), indices)
        -> GatherBlockQuantized(codes, indices, scales, zero_points?)

A table that the operator takes in no form becomes a float constant; so does a small one of 4
bits: the kernel takes longer for a row than onnxruntime takes to read it. The operator
(onnxruntime's docs/ContribOperators.md) takes rows of

    data         uint8 [rows, columns * bits / 8], unsigned codes
    scales       [rows, blocks]; their type is the output's
    zero_points  uint8 [rows, ceil(blocks * bits / 8)]; left out they are 2**(bits - 1)

in blocks of any power of 2 from 16 on. That is MatMulNBits' order: a tied embedding and head
share their bytes. Of int4 and uint4 tables it takes other axes, too, in 2 to 15 times the time
for a row (1.32).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import onnx_ir as ir

from rewrite_rules.dq_matmulnbits_fusion.fusion_run import Emit, OperandRule, check_type
from rewrite_rules.dq_matmulnbits_fusion.kernels import (
    check_table,
    fitting_block_size,
    given_zero_points,
    repacked,
    write_codes,
    write_scales,
    write_zero_points,
)
from rewrite_rules.graph.initializers import DerivedInitializers
from rewrite_rules.graph.lazy_tensors import AliasTensor, ChunkedTensor
from rewrite_rules.graph.parameters import axis_of, int_attribute
from rewrite_rules.onnxruntime_version import Version
from rewrite_rules.remarks import Refusal
from rewrite_rules.weights.bit_packing import Bytes
from rewrite_rules.weights.dequantized_operand import (
    BlockQuantizedWeight,
    DequantizedOperand,
    NoKernel,
)

_SMALLEST_BLOCK = 16


class GatherToGatherBlockQuantized(OperandRule):
    """Gather(W, indices) -> GatherBlockQuantized(codes, indices).

    Refused where QuantizeLinear alone reads the rows of 8-bit codes.
    """

    operators = ("Gather",)
    index = 0

    def _plan(self, node: ir.Node, chain: list[ir.Node], operand: DequantizedOperand) -> Emit:
        readers = {reader.op_type for reader in node.outputs[0].consumers()}
        if operand.bits == 8 and readers == {"QuantizeLinear"}:
            raise Refusal(
                "ORP115",
                "only QuantizeLinear reads the rows: onnxruntime gathers the codes themselves",
            )
        check_type(operand)
        axis = axis_of(int_attribute(node, "axis"), len(operand.shape))
        if operand.bits < 8 and self._run.is_small(operand):
            raise NoKernel("ORP111", "a small table is read faster as floats")
        weight, block_size = _rows(operand, axis, self._run.context.onnxruntime)

        def emit(op: Any) -> tuple[ir.Value, str]:
            made, dtype = self._run.initializers, weight.lossless_dtype
            zero_points = write_zero_points(made, weight, block_size)
            value = op.GatherBlockQuantized(
                _write_data(made, weight),
                node.inputs[1],
                write_scales(made, weight, block_size, dtype),
                *([] if zero_points is None else [zero_points]),
                gather_axis=0,
                quantize_axis=1,
                block_size=block_size,
                bits=weight.bits,
                _domain="com.microsoft",
                _name=node.name,
            )
            if dtype != operand.dtype:
                value = op.Cast(value, to=int(operand.dtype))
            return value, f"GatherBlockQuantized, block {block_size}"

        return emit


def _rows(
    operand: DequantizedOperand, axis: int, version: Version | None
) -> tuple[BlockQuantizedWeight, int]:
    """Describe the table, its rows as columns of ``W[K, N]``, and choose a block size."""
    name = operand.codes.name
    if axis != 0:
        raise NoKernel(
            "ORP108", f"table {name!r} is gathered along axis {axis}: axis 0 has a kernel"
        )
    weight = operand.matrix(k_axis=1)
    if weight.K * operand.bits % 8:
        raise NoKernel(
            "ORP104",
            f"table {name!r} has {weight.K} columns: its rows of {operand.bits}-bit codes "
            "don't fill bytes",
        )
    # The largest power of 2 that cuts stored blocks evenly, or covers a row.
    block_size = weight.block_size & -weight.block_size
    if weight.one_block:
        block_size = max(_SMALLEST_BLOCK, 1 << (weight.K - 1).bit_length())
    if block_size < _SMALLEST_BLOCK:
        raise NoKernel(
            "ORP108",
            f"blocks of {weight.block_size} in the rows of table {name!r} have no kernel: "
            f"multiples of {_SMALLEST_BLOCK} have one",
        )
    odd_blocks = (
        operand.zero_points is not None
        and weight.blocks(block_size) % 2 == 1
        and given_zero_points(operand) is not None
    )
    check_table(version, bits=operand.bits, odd_blocks=odd_blocks)
    return weight, block_size


def _write_data(initializers: DerivedInitializers, weight: BlockQuantizedWeight) -> ir.Value:
    """Register the packed codes, uint8 ``[N, K * bits / 8]``."""
    row_bytes = weight.K * weight.bits // 8
    shape = (weight.N, row_bytes)
    # That of MatMulNBits, whose codes are the same bytes where no row is padded.
    block_size = fitting_block_size(weight.block_size, weight.K)

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
