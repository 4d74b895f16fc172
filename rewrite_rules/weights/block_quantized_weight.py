# SPDX-License-Identifier: MIT
"""One description of a block-quantised weight, between every reader and every writer.

A weight ``W[K, N]`` is stored as integer codes with one scale, and perhaps one zero point, for
each block of ``block_size`` neighbours along K:

    W[k, n] = (codes[k, n] - zero_points[k // block_size, n]) * scales[k // block_size, n]

which is what ONNX's DequantizeLinear computes
(https://onnx.ai/onnx/operators/onnx__DequantizeLinear.html). One scale for a whole column, or
for the whole weight, is a block as long as K.
"""

from __future__ import annotations

__all__ = ["BlockQuantizedWeight", "ScaleLayout", "Unrepresentable"]

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from rewrite_rules.graph.lazy_tensors import packed_bytes
from rewrite_rules.graph.refusal import Refusal
from rewrite_rules.weights.bit_packing import unpack


class Unrepresentable(Refusal):
    """The weight is sound, but its layout has no description; a float constant might do."""


@dataclasses.dataclass(frozen=True)
class ScaleLayout:
    """Where ``scales[block, n]`` lies in the stored tensor, and the zero points likewise.

    Element ``(block, n)`` is at ``offset + block * block_step + n // column_block *
    column_step``.

    Attributes:
        offset: Of the first one.
        block_step: From block to block; 0 where a column has one scale.
        column_step: From column to column; 0 where all columns share theirs.
        column_block: Neighbouring columns that share a scale.
    """

    offset: int
    block_step: int
    column_step: int
    column_block: int = 1

    def expand(
        self, stored: npt.NDArray[Any], blocks: int, repeat: int, start: int, stop: int
    ) -> npt.NDArray[Any]:
        """Return the rows ``[start:stop, blocks]`` of the grid, columns of the weight first.

        Args:
            stored: The stored tensor, flat.
            blocks: Blocks per column that are wanted.
            repeat: How many of them each stored block is cut into.
            start: First column.
            stop: Column after the last one.
        """
        first, last = start // self.column_block, -(-stop // self.column_block)
        item = stored.itemsize
        view = np.lib.stride_tricks.as_strided(
            stored[self.offset + first * self.column_step :],
            (last - first, -(-blocks // repeat)),
            (self.column_step * item, self.block_step * item),
            writeable=False,
        )
        if self.column_block > 1:
            skipped = start - first * self.column_block
            view = view.repeat(self.column_block, axis=0)[skipped : skipped + stop - start]
        if repeat > 1:
            view = view.repeat(repeat, axis=1)[:, :blocks]
        return view


@dataclasses.dataclass(frozen=True, eq=False)
class BlockQuantizedWeight:
    """A constant weight ``[K, N]`` in blocks along K; tensors by reference, never unpacked.

    Attributes:
        codes: Value of the stored codes; int2, uint2, int4, uint4, int8 or uint8.
        scales: Value of the scales; float32 or float16.
        zero_points: Value of the zero points, shape of ``scales``, type of ``codes``; None
            stands for 0.
        code_tensor: Tensor of ``codes``.
        scale_tensor: Tensor of ``scales``.
        zero_point_tensor: Tensor of ``zero_points``.
        bits: 2, 4 or 8.
        signed: Whether codes and zero points are in two's complement.
        K: Size of the reduced dimension.
        N: Number of output columns.
        block_size: Neighbours along K that share one scale; K where a column has only one.
        k_axis: 0 when the codes lie as ``[K, N]``, row-major; 1 when as ``[N, K]``.
        grid: Where the scales and zero points lie.
        offset: Elements of ``codes`` before the weight's first one.
        dtype: Type that the consumer computes in: float32 or float16.
        layout: The stored layout in a few words, for remarks.
    """

    codes: ir.Value
    scales: ir.Value
    zero_points: ir.Value | None
    code_tensor: ir.TensorProtocol
    scale_tensor: ir.TensorProtocol
    zero_point_tensor: ir.TensorProtocol | None
    bits: int
    signed: bool
    K: int
    N: int
    block_size: int
    k_axis: int
    grid: ScaleLayout
    offset: int
    dtype: ir.DataType
    layout: str

    @property
    def lossless_dtype(self) -> ir.DataType:
        """The wider type of the consumer's and the scales': no scale loses bits in it."""
        return max(self.dtype, self.scale_tensor.dtype, key=lambda dtype: dtype.bitwidth)

    @property
    def one_block(self) -> bool:
        """Whether each column has a single scale, so that any block size fits."""
        return self.block_size >= self.K

    def blocks(self, block_size: int) -> int:
        """Blocks per column, ``ceil(K / block_size)``; the last one may be short."""
        return -(-self.K // block_size)

    def cuts(self, block_size: int) -> int:
        """How many blocks of ``block_size`` each stored block is cut into.

        Raises:
            ValueError: If it does not divide.
        """
        if self.one_block:
            return self.blocks(block_size)
        if self.block_size % block_size:
            raise ValueError(f"{block_size} does not divide {self.block_size}")
        return self.block_size // block_size

    def stored_scales(self) -> npt.NDArray[Any]:
        """The scales, flat, as they are stored."""
        element = ir.DataType(self.scale_tensor.dtype).numpy()
        return packed_bytes(self.scale_tensor).view(element)

    def stored_zero_points(self) -> npt.NDArray[np.uint8]:
        """The zero points, flat, a byte each, not yet unsigned; there must be some."""
        assert self.zero_point_tensor is not None
        count = self.zero_point_tensor.size
        return unpack(
            packed_bytes(self.zero_point_tensor), self.bits, np.arange(count, dtype=np.int64)
        )
