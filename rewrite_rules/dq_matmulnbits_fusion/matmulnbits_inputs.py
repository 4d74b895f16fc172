# SPDX-License-Identifier: MIT
"""Writes a block-quantised weight as the inputs of com.microsoft's MatMulNBits.

The operator (onnxruntime's docs/ContribOperators.md) reads

    B            uint8 [N, blocks, block_size * bits / 8], unsigned codes
    scales       [N, blocks], type of the activation
    zero_points  uint8 [N, ceil(blocks * bits / 8)], optional; left out it is 2**(bits - 1)

DequantizeLinear's own default zero point is 0: signed codes without zero points need none here
either (adding 2**(bits - 1) to codes moves the default along), unsigned ones need zeros
written out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from rewrite_rules.dq_matmulnbits_fusion.kernel_support import NoKernel
from rewrite_rules.graph.initializers import DerivedInitializers
from rewrite_rules.graph.lazy_tensors import ChunkedTensor, packed_bytes, relabel
from rewrite_rules.weights.bit_packing import SIGN_BITS, Bytes, pack_rows, repack
from rewrite_rules.weights.block_quantized_weight import BlockQuantizedWeight

# What the kernels take (anything else fails when the session is created), with what a weight
# costs in each, relative to the others: measured on the CPU, 2048 x 2048, one row. 2-bit
# codes have a fast kernel in three of them only.
_COST = {16: 1.6, 32: 1.15, 64: 1.1, 128: 1.02, 256: 1.0}
_COST_2_BIT = {16: 160.0, 32: 2.9, 64: 1.6, 128: 1.0, 256: 160.0}
# Scales made at a time: those of a large weight take a quarter of its codes' space.
_CHUNK_ELEMENTS = 1 << 20


@dataclasses.dataclass(frozen=True, eq=False)
class KernelInputs:
    """The constant inputs of a MatMulNBits or GatherBlockQuantized node and its attributes.

    No zero points stand for the operator's default.
    """

    codes: ir.Value
    scales: ir.Value
    zero_points: ir.Value | None
    attributes: dict[str, int]

    @property
    def scales_and_zero_points(self) -> list[ir.Value]:
        """Those that there are, as both operators take them."""
        return [value for value in (self.scales, self.zero_points) if value is not None]


def kernel_block_size(weight: BlockQuantizedWeight) -> int:
    """Choose the block size that costs least among those that keep every number.

    A stored block may be cut into equal kernel blocks that repeat its scale; a column with one
    scale may be cut anywhere.
    """
    size = fitting_block_size(weight.operand.bits, weight.block_size, weight.K)
    if size is None:
        sizes = ", ".join(map(str, _COST))
        what = (
            f"block_size {weight.block_size} of weight {weight.operand.codes.name!r}"
            if weight.block_size > 1
            else f"weight {weight.operand.codes.name!r}, with a scale for each index of K,"
        )
        raise NoKernel(f"{what} has no kernel: {sizes} and their multiples have one")
    return size


def fitting_block_size(bits: int, block_size: int, k: int) -> int | None:
    """Return the cheapest block size that keeps every number; None if none does."""
    cost = _COST_2_BIT if bits == 2 else _COST
    fitting = [b for b in cost if block_size >= k or block_size % b == 0]
    return min(fitting, key=lambda b: -(-k // b) * b * cost[b], default=None)


def slow_kernel(bits: int, block_size: int, accuracy_level: int) -> str | None:
    """Say why the CPU kernel would unpack the weight at every call; None if it doesn't.

    Measured on onnxruntime 1.31: 8-bit and 2-bit weights are computed on directly only with
    int8 activations, 2-bit ones only in blocks of 32, 64 or 128.
    """
    if bits == 4:
        return None
    if accuracy_level != 4:
        return (
            f"{bits}-bit weights have a fast CPU kernel at accuracy_level 4 only, not at "
            f"{accuracy_level}"
        )
    if bits == 2 and _COST_2_BIT[block_size] > 100:
        return f"2-bit weights in blocks of {block_size} have no fast CPU kernel"
    return None


def write_matmulnbits(
    initializers: DerivedInitializers,
    weight: BlockQuantizedWeight,
    block_size: int,
    dtype: ir.DataType,
    factor: float = 1.0,
) -> KernelInputs:
    """Register MatMulNBits' inputs for a weight, or find those that an earlier match made.

    Codes whose bytes fit already (unsigned, ``[N, K]``, whole blocks) are re-labelled where
    they lie; others are repacked while they are saved. Scales are multiplied by ``factor``.
    """
    return KernelInputs(
        codes=write_codes(initializers, weight, block_size),
        scales=write_scales(initializers, weight, block_size, dtype, factor),
        zero_points=write_zero_points(initializers, weight, block_size),
        attributes={
            "K": weight.K,
            "N": weight.N,
            "bits": weight.operand.bits,
            "block_size": block_size,
        },
    )


def fold_into_scales(weight: BlockQuantizedWeight, dtype: ir.DataType, factor: float) -> bool:
    """Whether a factor may go into the scales without costing accuracy.

    A product in float32 is rounded to 24 bits, as any other of the computation is; float16
    scales must stay exact. Neither may overflow or lose bits near zero.
    """
    stored = weight.operand.stored_scales()
    element = dtype.numpy()
    limits = np.finfo(element)
    for start in range(0, stored.size, _CHUNK_ELEMENTS):
        product = stored[start : start + _CHUNK_ELEMENTS].astype(np.float64) * factor
        size = np.abs(product[product != 0])
        if size.size and (size.max() > limits.max or size.min() < limits.tiny):
            return False
        if element == np.float16 and (product.astype(element) != product).any():
            return False
    return True


def repacked(weight: BlockQuantizedWeight, block_size: int) -> Iterator[Bytes]:
    """Yield unsigned codes, uint8 ``[columns, blocks * block_size * bits / 8]``, padded."""
    bits, first = weight.operand.bits, weight.offset * weight.operand.bits // 8
    length = -(-weight.K * weight.N * bits // 8)
    return repack(
        packed_bytes(weight.operand.code_tensor)[first : first + length],
        bits=bits,
        signed=weight.operand.signed,
        k=weight.K,
        n=weight.N,
        block_size=block_size,
        k_axis=weight.k_axis,
    )


def write_codes(
    initializers: DerivedInitializers, weight: BlockQuantizedWeight, block_size: int
) -> ir.Value:
    """Register ``B``, uint8 ``[N, blocks, block_size * bits / 8]``."""
    operand, source = weight.operand, weight.operand.code_tensor
    shape = (weight.N, weight.blocks(block_size), block_size * operand.bits // 8)
    fits = weight.k_axis == 1 and not operand.signed and weight.K % block_size == 0
    fits = fits and source.size == weight.K * weight.N  # no group of a larger one
    return _register(
        initializers,
        operand.codes,
        f".nbits{block_size}" if weight.k_axis else f".T.nbits{block_size}",
        (weight.K, weight.N, weight.offset),
        lambda: repacked(weight, block_size),
        ir.DataType.UINT8,
        shape,
        source if fits else None,
    )


def write_scales(
    initializers: DerivedInitializers,
    weight: BlockQuantizedWeight,
    block_size: int,
    dtype: ir.DataType,
    factor: float = 1.0,
) -> ir.Value:
    """Register the scales ``[N, blocks]``, or return the stored ones where they are that.

    Their new type is as wide as the stored one at least.
    """
    source = weight.operand.scale_tensor
    shape = (weight.N, weight.blocks(block_size))
    unchanged = _in_order(weight, block_size) and factor == 1.0 and dtype == source.dtype
    if unchanged and tuple(source.shape.numpy()) == shape:
        return weight.operand.scales

    def chunks() -> Iterator[npt.NDArray[Any]]:
        for scales in _grid_rows(weight, block_size, weight.operand.stored_scales()):
            if factor != 1.0:
                scales = scales.astype(np.float64) * factor
            yield scales.astype(dtype.numpy())

    return _register(
        initializers,
        weight.operand.scales,
        ".nbits" if weight.k_axis else ".T.nbits",
        (shape, weight.grid, weight.cuts(block_size), factor, dtype),
        chunks,
        dtype,
        shape,
        source if unchanged else None,
    )


def write_zero_points(
    initializers: DerivedInitializers, weight: BlockQuantizedWeight, block_size: int
) -> ir.Value | None:
    """Register the zero points, uint8 ``[N, ceil(blocks * bits / 8)]``.

    None where every one is what MatMulNBits takes when it gets none. Leaving them out is
    smaller, and keeps clear of a defect that onnxruntime has with zero points on processors
    without AVX-512 (onnxruntime issue #29853).
    """
    operand, bits, blocks = weight.operand, weight.operand.bits, weight.blocks(block_size)
    shape = (weight.N, -(-blocks * bits // 8))
    source = operand.zero_point_tensor
    if source is None or operand.zero_points is None:
        if operand.signed:
            return None
        return _register(
            initializers,
            operand.codes,
            f".zero_points{block_size}",
            shape,
            lambda: iter([np.zeros(shape, np.uint8)]),
            ir.DataType.UINT8,
            shape,
        )
    middle = 0 if operand.signed else 1 << (bits - 1)
    if (operand.stored_zero_points() == middle).all():
        return None

    flip = np.uint8(SIGN_BITS[bits] & ((1 << bits) - 1) if operand.signed else 0)

    def chunks() -> Iterator[Bytes]:
        for rows in _grid_rows(weight, block_size, operand.stored_zero_points()):
            yield pack_rows(rows ^ flip, bits)

    fits = not operand.signed and blocks * bits % 8 == 0 and _in_order(weight, block_size)
    return _register(
        initializers,
        operand.zero_points,
        ".nbits" if weight.k_axis else ".T.nbits",
        (shape, weight.grid, weight.cuts(block_size)),
        chunks,
        ir.DataType.UINT8,
        shape,
        source if fits else None,
    )


def _register(
    initializers: DerivedInitializers,
    anchor: ir.Value,
    suffix: str,
    key: Hashable,
    chunks: Callable[[], Iterator[npt.NDArray[Any]]],
    dtype: ir.DataType,
    shape: tuple[int, ...],
    same: ir.TensorProtocol | None = None,
) -> ir.Value:
    """Register what ``chunks`` makes; where it is the bytes of ``same`` in a file, those."""

    def make(name: str) -> ir.TensorProtocol:
        if isinstance(same, ir.ExternalTensor):
            return relabel(same, dtype, shape, name)
        return ChunkedTensor(chunks, dtype, shape, name)

    return initializers.get(anchor, suffix, make, key)


def _in_order(weight: BlockQuantizedWeight, block_size: int) -> bool:
    """Whether scales or zero points are stored as ``[N, blocks]``, and nothing else is."""
    grid, blocks = weight.grid, weight.blocks(block_size)
    return (
        weight.cuts(block_size) == 1
        and grid.offset == 0
        and grid.column_block == 1
        and (blocks == 1 or grid.block_step == 1)
        and (weight.N == 1 or grid.column_step == blocks)
        and weight.operand.scale_tensor.size == weight.N * blocks
    )


def _grid_rows(
    weight: BlockQuantizedWeight, block_size: int, stored: npt.NDArray[Any]
) -> Iterator[npt.NDArray[Any]]:
    """Yield scales or zero points ``[columns, blocks]`` of successive columns."""
    blocks = weight.blocks(block_size)
    step = max(1, _CHUNK_ELEMENTS // blocks)
    for start in range(0, weight.N, step):
        stop = min(start + step, weight.N)
        yield weight.grid.expand(stored, blocks, weight.cuts(block_size), start, stop)
