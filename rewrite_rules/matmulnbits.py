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

__all__ = ["MatMulNBitsInputs", "kernel_refusal", "write_matmulnbits"]

import dataclasses
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from rewrite_rules.block_quantized_weight import BlockQuantizedWeight, constant_tensor
from rewrite_rules.code_repacking import (
    SIGN_BITS,
    ChunkedTensor,
    pack_rows,
    packed_bytes,
    relabel,
    repack,
    unpack,
)
from rewrite_rules.initializers import derived_initializer

# What the CPU and CUDA kernels take; anything else fails when the session is created.
_BLOCK_SIZES = (16, 32, 64, 128, 256)


@dataclasses.dataclass(frozen=True, eq=False)
class MatMulNBitsInputs:
    """The constant inputs of one MatMulNBits node and the attributes that describe them.

    Attributes:
        codes: Input ``B``.
        scales: Input ``scales``.
        zero_points: Input ``zero_points``; None where the operator's default is meant.
        attributes: ``K``, ``N``, ``bits`` and ``block_size``.
    """

    codes: ir.Value
    scales: ir.Value
    zero_points: ir.Value | None
    attributes: dict[str, int]


def kernel_refusal(weight: BlockQuantizedWeight) -> str | None:
    """Say why no MatMulNBits kernel takes the weight as it is; None when one does."""
    if weight.block_size not in _BLOCK_SIZES:
        return (
            f"block_size {weight.block_size} of weight {weight.codes.name!r} has no kernel: "
            f"{', '.join(map(str, _BLOCK_SIZES))} have one"
        )
    return None


def write_matmulnbits(weight: BlockQuantizedWeight) -> MatMulNBitsInputs:
    """Register MatMulNBits' inputs for a weight, or find those that an earlier match made.

    Codes whose bytes fit already (unsigned, ``[N, K]``, whole blocks) are re-labelled where
    they lie; others are repacked while they are saved.
    """
    return MatMulNBitsInputs(
        codes=_write_codes(weight),
        scales=_write_scales(weight),
        zero_points=_write_zero_points(weight),
        attributes={
            "K": weight.K,
            "N": weight.N,
            "bits": weight.bits,
            "block_size": weight.block_size,
        },
    )


def _write_codes(weight: BlockQuantizedWeight) -> ir.Value:
    source = constant_tensor(weight.codes)
    shape = (weight.N, weight.blocks, weight.block_size * weight.bits // 8)

    def chunks() -> Iterator[npt.NDArray[np.uint8]]:
        return repack(
            packed_bytes(source),
            bits=weight.bits,
            signed=weight.signed,
            k=weight.K,
            n=weight.N,
            block_size=weight.block_size,
            k_axis=weight.k_axis,
        )

    def make(name: str) -> ir.TensorProtocol:
        fits = weight.k_axis == 1 and not weight.signed and weight.K % weight.block_size == 0
        if fits and isinstance(source, ir.ExternalTensor):
            return relabel(source, ir.DataType.UINT8, shape, name)
        return ChunkedTensor(chunks, ir.DataType.UINT8, shape, name)

    suffix = f".nbits{weight.block_size}" if weight.k_axis else f".T.nbits{weight.block_size}"
    return derived_initializer(weight.codes, suffix, make)


def _write_scales(weight: BlockQuantizedWeight) -> ir.Value:
    if weight.k_axis == 1:
        return weight.scales  # [N, blocks] already
    return derived_initializer(
        weight.scales, ".T", lambda name: _transposed(constant_tensor(weight.scales), name)
    )


def _transposed(source: ir.TensorProtocol, name: str) -> ir.LazyTensor:
    rows, columns = source.shape.numpy()
    dtype = source.dtype
    element = ir.DataType(dtype).numpy()

    def evaluate() -> ir.TensorProtocol:
        # Through the bytes and not numpy(): that one keeps a mapping of the file per tensor.
        array = packed_bytes(source).view(element).reshape(rows, columns)
        return ir.Tensor(np.ascontiguousarray(array.T), dtype=dtype, name=name)

    return ir.LazyTensor(evaluate, dtype, ir.Shape((columns, rows)), name=name)


def _write_zero_points(weight: BlockQuantizedWeight) -> ir.Value | None:
    shape = (weight.N, -(-weight.blocks * weight.bits // 8))
    if weight.zero_points is None:
        if weight.signed:
            return None
        return derived_initializer(
            weight.codes,
            f".zero_points{weight.block_size}",
            lambda name: ir.LazyTensor(
                lambda: ir.Tensor(np.zeros(shape, np.uint8), name=name),
                ir.DataType.UINT8,
                ir.Shape(shape),
                name=name,
            ),
        )
    if _is_default(weight):
        return None

    source = constant_tensor(weight.zero_points)
    fits = weight.k_axis == 1 and not weight.signed and weight.blocks * weight.bits % 8 == 0

    def make(name: str) -> ir.TensorProtocol:
        if fits and isinstance(source, ir.ExternalTensor):
            return relabel(source, ir.DataType.UINT8, shape, name)
        return ir.LazyTensor(
            lambda: ir.Tensor(
                pack_rows(_unsigned_zero_points(weight), weight.bits), name=name
            ),
            ir.DataType.UINT8,
            ir.Shape(shape),
            name=name,
        )

    return derived_initializer(
        weight.zero_points, ".nbits" if weight.k_axis else ".T.nbits", make
    )


def _unsigned_zero_points(weight: BlockQuantizedWeight) -> npt.NDArray[np.uint8]:
    """Zero points as unsigned bytes ``[N, blocks]``."""
    assert weight.zero_points is not None
    packed = packed_bytes(constant_tensor(weight.zero_points))
    column = np.arange(weight.N, dtype=np.int64)[:, None]
    block = np.arange(weight.blocks, dtype=np.int64)
    indices = column * weight.blocks + block if weight.k_axis else block * weight.N + column
    codes = unpack(packed, weight.bits, indices)
    if weight.signed:
        codes = codes ^ np.uint8(SIGN_BITS[weight.bits] & ((1 << weight.bits) - 1))
    return codes


def _is_default(weight: BlockQuantizedWeight) -> bool:
    """Whether every zero point is the one that MatMulNBits takes when it gets none.

    Leaving them out is smaller, and keeps clear of a defect that onnxruntime has with zero
    points on processors without AVX-512 (onnxruntime issue #29853).
    """
    return bool((_unsigned_zero_points(weight) == 1 << (weight.bits - 1)).all())
