# SPDX-License-Identifier: MIT
"""Kernels for quantised weights: which onnxruntime has which, what they cost, what they read.

Those of the CPU are measured on onnxruntime 1.24.4, 1.27.0, 1.29.0, 1.31.1 and 1.32.0
(Linux, x86-64, AVX-512); a version in between counts as the next older one measured. Forms
that were right on all of them have no entry. Those of CUDA: from the kernels' messages in the
wheels of onnxruntime-gpu 1.27, 1.28, 1.30 and 1.31.

MatMulNBits (onnxruntime's docs/ContribOperators.md) reads

    B            uint8 [N, blocks, block_size * bits / 8], unsigned codes
    scales       [N, blocks], type of the activation
    zero_points  uint8 [N, ceil(blocks * bits / 8)], optional; left out it is 2**(bits - 1)

DequantizeLinear's own default zero point is 0: signed codes without zero points need none here
either (adding 2**(bits - 1) to codes moves the default along), unsigned ones need zeros
written out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from rewrite_rules.graph.initializers import DerivedInitializers
from rewrite_rules.graph.lazy_tensors import ChunkedTensor, packed_bytes, relabel
from rewrite_rules.graph.nodes import owner
from rewrite_rules.onnxruntime_version import Version
from rewrite_rules.remarks import PassContext
from rewrite_rules.weights.bit_packing import SIGN_BITS, Bytes, pack_rows, repack
from rewrite_rules.weights.dequantized_operand import (
    BlockQuantizedWeight,
    DequantizedOperand,
    NoKernel,
)

# What the kernels take (anything else fails when the session is created), with what a weight
# costs in each, relative to the others: measured on the CPU, 2048 x 2048, one row.
_COST = {16: 1.6, 32: 1.15, 64: 1.1, 128: 1.02, 256: 1.0}
_UINT8 = ir.DataType.UINT8
_CUDA = "CUDAExecutionProvider"


def takes_bias(context: PassContext) -> bool:
    """Whether MatMulNBits may have a bias: CUDA's kernel throws before onnxruntime 1.28."""
    version = context.onnxruntime
    return version is None or version >= (1, 28) or _CUDA not in context.providers


def check_version(
    operand: DequantizedOperand,
    accuracy_level: int,
    graph: ir.Graph | ir.Function | None,
    context: PassContext,
) -> None:
    """Refuse what a version of onnxruntime computes wrongly in ``graph``.

    Codes and zero points, be they given or written, are captured where the node lies in a
    body (If, Loop, Scan) and they in a graph around it.
    """
    version = context.onnxruntime
    if not version or version >= (1, 29) or not context.cpu_only or accuracy_level != 4:
        return  # without reading all zero points
    given = given_zero_points(operand)
    if given is not None and owner(given) is not graph:
        raise NoKernel(
            "ORP113",
            f"onnxruntime {_text(version)} computes wrong numbers at accuracy_level 4 from "
            "zero points outside the subgraph of If, Loop or Scan: 1.29 is right, and so is "
            "accuracy_level 0",
        )


def check_table(version: Version | None, *, bits: int, odd_blocks: bool) -> None:
    """Refuse tables without a right kernel; ``odd_blocks``: zero points of odd rows."""
    if version is not None and version < (1, 27) and bits == 4 and odd_blocks:
        raise NoKernel(
            "ORP113",
            f"onnxruntime {_text(version)} computes wrong numbers at Gather from tables of "
            "4-bit codes with zero points for an odd number of blocks: 1.27 is right",
        )


def _text(version: Version) -> str:
    return f"{version[0]}.{version[1]}"


# What onnxruntime cuts columns with one scale into.
_BLOCK_OF_ONE_SCALE = 32


def kernel_block_size(weight: BlockQuantizedWeight, accuracy_level: int) -> int:
    """Choose the block size that costs least among those that keep every number.

    A stored block may be cut into equal kernel blocks that repeat its scale; a column with one
    scale may be cut anywhere.
    """
    stored = weight.operand.dequantize.attributes.get_int("block_size")
    # Activations are rounded in blocks: in those of onnxruntime.
    if accuracy_level == 4 and not stored and weight.block_size >= weight.K:
        return _BLOCK_OF_ONE_SCALE
    if accuracy_level == 4 and weight.block_size in _COST:
        return weight.block_size
    size = fitting_block_size(weight.block_size, weight.K)
    if size is None:
        sizes = ", ".join(map(str, _COST))
        what = (
            f"block_size {weight.block_size} of weight {weight.operand.codes.name!r}"
            if weight.block_size > 1
            else f"weight {weight.operand.codes.name!r}, with a scale for each index of K,"
        )
        raise NoKernel("ORP103", f"{what} has no kernel: {sizes} and their multiples have one")
    return size


def fitting_block_size(block_size: int, k: int) -> int | None:
    """Return the cheapest block size that keeps every number; None if none does."""
    fitting = [b for b in _COST if block_size >= k or block_size % b == 0]
    return min(fitting, key=lambda b: -(-k // b) * b * _COST[b], default=None)


def slow_kernel(bits: int, accuracy_level: int) -> str | None:
    """Say why the CPU kernel would unpack the weight at every call; None if it doesn't.

    Measured on onnxruntime 1.31: 8-bit weights are computed on directly only with int8
    activations.
    """
    if bits == 4 or accuracy_level == 4:
        return None
    return (
        f"{bits}-bit weights have a fast CPU kernel at accuracy_level 4 only, not at "
        f"{accuracy_level}"
    )


def repacked(weight: BlockQuantizedWeight, block_size: int) -> Iterator[Bytes]:
    """Yield unsigned codes, uint8 ``[columns, blocks * block_size * bits / 8]``, padded."""
    return repack(
        packed_bytes(weight.operand.code_tensor),
        bits=weight.bits,
        signed=weight.operand.signed,
        k=weight.K,
        n=weight.N,
        block_size=block_size,
        k_axis=weight.k_axis,
    )


def write_codes(
    initializers: DerivedInitializers, weight: BlockQuantizedWeight, block_size: int
) -> ir.Value:
    """Register ``B``, uint8 ``[N, blocks, block_size * bits / 8]``.

    Codes whose bytes fit already (unsigned, ``[N, K]``, whole blocks) are re-labelled where
    they lie; others are repacked while they are saved.
    """
    operand, source = weight.operand, weight.operand.code_tensor
    shape = (weight.N, weight.blocks(block_size), block_size * operand.bits // 8)
    fits = weight.k_axis == 1 and not operand.signed and weight.K % block_size == 0
    make = _maker(
        lambda: repacked(weight, block_size), _UINT8, shape, source if fits else None
    )
    key = (weight.K, weight.N)
    return initializers.get(operand.codes, f"{_suffix(weight)}{block_size}", make, key)


def write_scales(
    initializers: DerivedInitializers,
    weight: BlockQuantizedWeight,
    block_size: int,
    dtype: ir.DataType,
) -> ir.Value:
    """Register the scales ``[N, blocks]``, in a type as wide at least as the stored."""
    source = weight.operand.scale_tensor
    shape = (weight.N, weight.blocks(block_size))
    unchanged = _in_order(weight, block_size) and dtype == source.dtype
    if unchanged and tuple(source.shape.numpy()) == shape:
        return weight.operand.scales

    def chunks() -> Iterator[npt.NDArray[Any]]:
        for scales in weight.grid_rows(weight.operand.stored_scales(), block_size):
            yield scales.astype(dtype.numpy())

    make = _maker(chunks, dtype, shape, source if unchanged else None)
    key = (shape, weight.grid, weight.cuts(block_size), dtype)
    return initializers.get(weight.operand.scales, _suffix(weight), make, key)


def write_zero_points(
    initializers: DerivedInitializers, weight: BlockQuantizedWeight, block_size: int
) -> ir.Value | None:
    """Register the zero points, uint8 ``[N, ceil(blocks * bits / 8)]``.

    None where none are needed. Leaving them out is smaller, and keeps clear of a defect that
    onnxruntime has with zero points on processors without AVX-512 (onnxruntime issue #29853).
    """
    operand, bits, blocks = weight.operand, weight.bits, weight.blocks(block_size)
    shape, given = (weight.N, -(-blocks * bits // 8)), given_zero_points(operand)
    source = operand.zero_point_tensor
    if given is None:
        return None
    if source is None:
        make = _maker(lambda: iter([np.zeros(shape, np.uint8)]), _UINT8, shape)
        return initializers.get(given, f".zero_points{block_size}", make, shape)

    flip = np.uint8(SIGN_BITS[bits] & ((1 << bits) - 1) if operand.signed else 0)

    def chunks() -> Iterator[Bytes]:
        for rows in weight.grid_rows(operand.stored_zero_points(), block_size):
            yield pack_rows(rows ^ flip, bits)

    fits = not operand.signed and blocks * bits % 8 == 0 and _in_order(weight, block_size)
    make = _maker(chunks, _UINT8, shape, source if fits else None)
    key = (shape, weight.grid, weight.cuts(block_size))
    return initializers.get(given, _suffix(weight), make, key)


def given_zero_points(operand: DequantizedOperand) -> ir.Value | None:
    """Return the zero points, or the codes that get zeros beside them; None for neither.

    That is where every one is what kernels take when they get none.
    """
    if operand.zero_points is None:
        return None if operand.signed else operand.codes
    middle = 0 if operand.signed else 1 << (operand.bits - 1)
    return operand.zero_points if (operand.stored_zero_points() != middle).any() else None


def _suffix(weight: BlockQuantizedWeight) -> str:
    return ".nbits" if weight.k_axis else ".T.nbits"


def _maker(
    chunks: Callable[[], Iterator[npt.NDArray[Any]]],
    dtype: ir.DataType,
    shape: tuple[int, ...],
    same: ir.TensorProtocol | None = None,
) -> Callable[[str], ir.TensorProtocol]:
    """Return what makes a tensor of chunks, or of the bytes of ``same`` in a file."""

    def make(name: str) -> ir.TensorProtocol:
        if isinstance(same, ir.ExternalTensor):
            return relabel(same, dtype, shape, name)
        return ChunkedTensor(chunks, dtype, shape, name)

    return make


def _in_order(weight: BlockQuantizedWeight, block_size: int) -> bool:
    """Whether scales or zero points are stored as ``[N, blocks]``, and nothing else is."""
    blocks = weight.blocks(block_size)
    return (
        weight.cuts(block_size) == 1
        and weight.n.block == 1
        and (blocks == 1 or weight.k.step == 1)
        and (weight.N == 1 or weight.n.step == blocks)
        and weight.operand.scale_tensor.size == weight.N * blocks
    )
