# SPDX-License-Identifier: MIT
"""Clip draft."""

from __future__ import annotations

__all__ = ["search_clip"]

import numpy as np

from ortplugins.quantization.block_format import BlockFormat
from ortplugins.quantization.round_to_nearest import Floats, dequantize_blocks, quantize_blocks


def search_clip(
    weight: Floats,
    tokens: Floats | None,
    gram: Floats | None,
    form: BlockFormat | None = None,
    *,
    ratios=tuple(np.arange(1.0, 0.49, -0.05)),
    relative_damping: float = 0.0,
) -> Floats:
    form = form or BlockFormat()
    k, n = weight.shape
    size = form.size_along(k)
    whole = BlockFormat(form.bits, -1, form.is_symmetric, form.grid, form.scale_type)
    result = np.ones((form.blocks(k), n), np.float32)
    for b in range(form.blocks(k)):
        rows = slice(b * size, min((b + 1) * size, k))
        w = np.asarray(weight[rows], np.float32)
        if gram is None:
            t = tokens[:, rows]
            g = t.T @ t / np.float32(len(t))
        else:
            g = np.array(gram[rows, rows])
        if relative_damping:
            g = g + np.diag(relative_damping * np.diag(g))
        least = np.full(n, np.inf, np.float32)
        for r in ratios:
            d = dequantize_blocks(
                *quantize_blocks(w, whole, np.full((1, n), r, np.float32)), whole
            )
            d -= w
            loss = np.einsum("kn,kn->n", d, g @ d)
            better = loss < least
            least[better] = loss[better]
            result[b, better] = r
    return result
