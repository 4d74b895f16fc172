# SPDX-License-Identifier: MIT
"""AWQ-clip: how far to shrink the range of each block, so that its outputs err least.

The range of a block is that of its extreme; with a smaller one the extreme is clipped and all
others are rounded finer. For each block and column the ratio is searched for which the error
of the block's share of the output, for each token,

    d^T H_b d      d = dequantised - w within the block, H_b = (X^T X / count) of its rows

is least (Lin et al., arXiv 2306.00978, whose sum over tokens of (x d)**2 this is). That H_b is
only a block of the diagonal of H makes blocks independent, and the search cheap.
"""

from __future__ import annotations

__all__ = ["search_clip"]

import dataclasses
from collections.abc import Sequence

import numpy as np

from ortplugins.errors import QuantizationError
from ortplugins.quantization.block_format import BlockFormat
from ortplugins.quantization.round_to_nearest import (
    Floats,
    ZeroPoints,
    block_grid,
    dequantize_blocks,
    round_to_grid,
)

RATIOS = tuple(1 - step / 20 for step in range(11))
# Floats of a strip of a block: 512 KB, of which four are at work.
_STRIP = 1 << 17


def search_clip(
    weight: Floats,
    tokens: Floats | None,
    gram: Floats | None,
    form: BlockFormat | None = None,
    *,
    ratios: Sequence[float] = RATIOS,
) -> Floats:
    """Return the best ratio for each block and column.

    Each is one of ``ratios`` or 1, and 1 unless another is better; of equals the first.

    Args:
        weight: Float ``[K, N]``; after AWQ's scales it is s W, and the statistics are those of
            x / s.
        tokens: A sample of the activation, float32 ``[T, K]``.
        gram: X^T X over the number of tokens, float32 ``[K, K]``; preferred.
        form: Bits, block size and grid; the defaults of :class:`BlockFormat` where it is None.
        ratios: Ratios to try.

    Returns:
        float32 ``[blocks, N]``, what ``quantize_blocks`` takes.

    Raises:
        QuantizationError: If the weight is not of rank 2, holds NaN or infinity, or is too
            large for the type of the scales; if statistics are missing or have another K.
    """
    form = form or BlockFormat()
    if weight.ndim != 2 or 0 in weight.shape:
        raise QuantizationError(
            f"the weight has shape {list(weight.shape)}: [K, N] is expected"
        )
    k, n = weight.shape
    known = tokens if gram is None else gram
    if known is None:
        raise QuantizationError("neither tokens nor a Gram matrix: one of them is expected")
    if known.ndim != 2 or known.shape[1] != k or (gram is not None and len(gram) != k):
        raise QuantizationError(
            f"the statistics have shape {list(known.shape)}: [.., {k}] is expected"
        )
    tried = np.array([1.0, *(r for r in ratios if r != 1)], np.float32)
    size = form.size_along(k)
    result = np.empty((form.blocks(k), n), np.float32)
    width = max(64, _STRIP // min(size, k))
    for b, start in enumerate(range(0, k, size)):
        rows = slice(start, min(start + size, k))
        factor = _factor(tokens, gram, rows)
        for left in range(0, n, width):
            columns = slice(left, left + width)
            block = np.ascontiguousarray(weight[rows, columns], np.float32)
            losses = _losses(block, factor, tried, dataclasses.replace(form, block_size=-1))
            result[b, columns] = tried[losses.argmin(axis=0)]
    return result


@dataclasses.dataclass(frozen=True, eq=False)
class _Factor:
    """What the error of the outputs of a block is computed with.

    Attributes:
        matrix: H_b, or a sample of tokens, whichever is smaller.
        is_gram: Which of these.
    """

    matrix: Floats
    is_gram: bool

    def squares(self, d: Floats) -> Floats:
        """Return d^T H_b d of each column of ``[size, n]``, in some unit."""
        product = self.matrix @ d
        squares: Floats = np.einsum("kn,kn->n", d if self.is_gram else product, product)
        return squares


def _factor(tokens: Floats | None, gram: Floats | None, rows: slice) -> _Factor:
    if gram is not None:
        return _Factor(np.ascontiguousarray(gram[rows, rows], np.float32), True)
    assert tokens is not None
    sample = np.ascontiguousarray(tokens[:, rows], np.float32)
    if len(sample) < sample.shape[1]:
        return _Factor(sample, False)
    return _Factor(sample.T @ sample, True)


def _losses(block: Floats, factor: _Factor, ratios: Floats, whole: BlockFormat) -> Floats:
    """Return float32 ``[ratios, n]``."""
    n = block.shape[1]
    # All that a grid depends on are the least and the greatest element.
    ends = np.stack([block.min(axis=0), block.max(axis=0)])
    grid = block_grid(np.tile(ends, len(ratios)), whole, np.repeat(ratios, n)[None])
    scales = grid[0].reshape(-1, 1, n)
    zeros: ZeroPoints | None = None if grid[1] is None else grid[1].reshape(-1, 1, n)
    losses = np.empty((len(ratios), n), np.float32)
    for i, scale in enumerate(scales):
        zero = None if zeros is None else zeros[i]
        difference = dequantize_blocks(
            round_to_grid(block, scale, zero, whole), scale, zero, whole
        )
        difference -= block
        losses[i] = factor.squares(difference)
    return losses
