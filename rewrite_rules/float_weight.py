# SPDX-License-Identifier: MIT
"""Writes a block-quantised weight as the float constant that DequantizeLinear would make.

For weights that no fast kernel takes: unpacked once, while the model is saved, instead of at
every inference. The numbers are DequantizeLinear's own, bit for bit.
"""

from __future__ import annotations

__all__ = ["float_bytes", "write_float"]

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from rewrite_rules.block_quantized_weight import BlockQuantizedWeight, constant_tensor
from rewrite_rules.code_repacking import ChunkedTensor, packed_bytes, unpack
from rewrite_rules.initializers import derived_initializer

_CHUNK_ELEMENTS = 1 << 20


def float_bytes(weight: BlockQuantizedWeight) -> int:
    """Bytes that the weight takes as a float constant."""
    return weight.K * weight.N * constant_tensor(weight.scales).dtype.bitwidth // 8


def write_float(weight: BlockQuantizedWeight) -> ir.Value:
    """Register the weight as a float constant ``[K, N]`` in the type of its scales."""
    dtype = constant_tensor(weight.scales).dtype

    def make(name: str) -> ir.TensorProtocol:
        return ChunkedTensor(lambda: _rows(weight), dtype, (weight.K, weight.N), name)

    return derived_initializer(weight.codes, ".T.float" if weight.k_axis else ".float", make)


def _rows(weight: BlockQuantizedWeight) -> Iterator[npt.NDArray[Any]]:
    """Yield successive rows of ``W[K, N]``."""
    packed = packed_bytes(constant_tensor(weight.codes))
    scales = _scales(weight)
    zero_points = _zero_points(weight)
    column = np.arange(weight.N, dtype=np.int64)
    step = max(1, _CHUNK_ELEMENTS // weight.N)
    for start in range(0, weight.K, step):
        k = np.arange(start, min(start + step, weight.K), dtype=np.int64)[:, None]
        indices = column * weight.K + k if weight.k_axis else k * weight.N + column
        block = k[:, 0] // weight.block_size
        steps = _signed(weight, unpack(packed, weight.bits, indices)) - zero_points[block]
        # One float32 product, rounded once to float16 where the scales are: ORT's order.
        product = steps.astype(np.float32) * scales[block].astype(np.float32)
        yield product.astype(scales.dtype)


def _scales(weight: BlockQuantizedWeight) -> npt.NDArray[Any]:
    """Scales as ``[blocks, N]``."""
    tensor = constant_tensor(weight.scales)
    return _by_block(weight, packed_bytes(tensor).view(ir.DataType(tensor.dtype).numpy()))


def _zero_points(weight: BlockQuantizedWeight) -> npt.NDArray[np.int16]:
    """Zero points as ``[blocks, N]``; without any, zeros."""
    count = weight.blocks * weight.N
    if weight.zero_points is None:
        return np.zeros((weight.blocks, weight.N), np.int16)
    packed = packed_bytes(constant_tensor(weight.zero_points))
    codes = unpack(packed, weight.bits, np.arange(count, dtype=np.int64))
    return _by_block(weight, _signed(weight, codes))


def _by_block(weight: BlockQuantizedWeight, flat: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Flat scales or zero points as ``[blocks, N]``."""
    if weight.k_axis:
        return flat.reshape(weight.N, weight.blocks).T
    return flat.reshape(weight.blocks, weight.N)


def _signed(
    weight: BlockQuantizedWeight, codes: npt.NDArray[np.uint8]
) -> npt.NDArray[np.int16]:
    """Unsigned bytes as the integers they stand for."""
    values = codes.astype(np.int16)
    if weight.signed:
        values -= (values >> (weight.bits - 1)) << weight.bits
    return values
