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

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from rewrite_rules.graph.refusal import Refusal

if TYPE_CHECKING:
    from rewrite_rules.weights.dequantized_operand import DequantizedOperand


class Unrepresentable(Refusal):
    """The weight is sound, but its layout has no description; a float constant might do."""


@dataclasses.dataclass(frozen=True)
class ScaleLayout:
    """Where ``scales[block, n]`` lies in the stored tensor, and the zero points likewise.

    Element ``(block, n)`` is at ``offset + block * block_step + n // column_block *
    column_step``; ``column_block`` neighbours share a scale. The block step is 0 where a
    column has one scale, the column step where all columns share theirs.
    """

    offset: int
    block_step: int
    column_step: int
    column_block: int = 1

    def expand(
        self, stored: npt.NDArray[Any], blocks: int, repeat: int, start: int, stop: int
    ) -> npt.NDArray[Any]:
        """Return columns of the weight as rows of the grid, ``[start:stop, blocks]``.

        Each stored block is cut into ``repeat`` of the blocks that are wanted.
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
        operand: The dequantised operand that it is, or is a part of: codes, scales, types.
        block_size: Neighbours along K that share one scale; K where a column has only one.
        k_axis: 0 when the codes lie as ``[K, N]``, row-major; 1 when as ``[N, K]``.
        grid: Where the scales and zero points lie.
        offset: Elements of the codes before the weight's first one.
    """

    operand: DequantizedOperand
    K: int
    N: int
    block_size: int
    k_axis: int
    grid: ScaleLayout
    offset: int

    @property
    def lossless_dtype(self) -> ir.DataType:
        """The wider type of the consumer's and the scales': no scale loses bits in it."""
        types = (self.operand.dtype, self.operand.scale_tensor.dtype)
        return max(types, key=lambda dtype: dtype.bitwidth)

    @property
    def one_block(self) -> bool:
        """Whether each column has a single scale, so that any block size fits."""
        return self.block_size >= self.K

    def blocks(self, block_size: int) -> int:
        """Blocks per column, ``ceil(K / block_size)``; the last one may be short."""
        return -(-self.K // block_size)

    def cuts(self, block_size: int) -> int:
        """How many blocks of ``block_size``, a divisor, each stored block is cut into."""
        return self.blocks(block_size) if self.one_block else self.block_size // block_size
