# SPDX-License-Identifier: MIT
"""AWQ: scales of input channels; numpy only.

Scales give the channels which matter a finer grid:

    x W = (x / s) (s W)

Rows of W with a large s take more of the range of their block, so their rounding errors,
divided by s again, are smaller (Lin et al., arXiv 2306.00978). As in the paper, and with the
statistic of the weights that NVIDIA ModelOpt adds,

    s = x_mean**a / w_mean**(1 - a)      x_mean = mean |x| of the channel
                                         w_mean = mean of |w| / (max |w| of its block)

and a is searched on a grid for the least error of the outputs, tr(D^T H D) with
D = dequantised(s W) / s - W and H = X^T X / count. In w_mean, ModelOpt takes every
(K / size)-th row for a block; here adjacent rows share a scale. All weights that
read an activation get one s, on the sum of their errors: only one can be folded into the
activation's producer.

s belongs to the input channels, so a sample of the columns finds it as well as all of them: an
eighth gave the same error on a chain of 13 MatMuls of 2048 x 2048, in an eighth of the time.
"""

from __future__ import annotations

import concurrent.futures
import math
import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ortplugins.errors import QuantizationError
from ortplugins.quantization.methods.nearest import (
    BlockFormat,
    Floats,
    dequantize_blocks,
    in_blocks,
    quantize_blocks,
)

Doubles = npt.NDArray[np.float64]

ALPHAS = tuple(a / 10 for a in range(11))
# Around the best of those, so far off on both sides.
_REFINEMENT = 0.05
# One column in so many is looked at, within these bounds on their number: on a wide weight
# each takes K * K operations for each alpha.
_COLUMN_STRIDE, _MIN_COLUMNS, _MAX_COLUMNS = 8, 64, 160
# s is kept within so many times of 1, so that neither x / s nor s W leaves its type.
_GREATEST_SCALE = 1e4
# Floats of a strip of columns: 1 MB.
_STRIP = 1 << 18


def search_scales(
    weights: Sequence[npt.NDArray[Any]],
    mean_abs: Floats,
    gram: Floats,
    forms: Sequence[BlockFormat],
    *,
    alphas: Sequence[float] | None = None,
) -> tuple[Floats, float | None, dict[float, float]]:
    """Search the scales of one activation, for all weights ``[K, N_i]`` that read it.

    ``gram`` comes from all tokens: a sample of 128 costs 0.3 of perplexity. A channel that is
    0 throughout keeps its scale, 1; of equal losses the first wins, no scales before any. The
    default exponents are 0 to 1 in tenths, and then a twentieth to both sides of the best, on
    some of the columns; exponents that are given are tried on all.

    Returns:
        float32 ``[K]``, what rows of weights are multiplied by; the exponent, None where no
        scales are better than 1; and for each exponent that was tried the square of the error
        of the outputs for each token, on the columns looked at.
    """
    k = len(mean_abs)
    sample = _sampled_columns(weights, forms, alphas is not None)
    one = np.ones(k, np.float32)
    without = _loss(sample, one, gram)
    w_mean = _relative_magnitude(weights, [form.size_along(k) for form in forms])

    def loss(alpha: float) -> float:
        try:
            return _loss(sample, channel_scales(mean_abs, w_mean, alpha), gram)
        except QuantizationError:  # s W is too large for the type of its scales
            return math.inf

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        tried = [float(alpha) for alpha in (ALPHAS if alphas is None else alphas)]
        losses = dict(zip(tried, pool.map(loss, tried), strict=True))
        best = min(losses, key=losses.__getitem__)
        if alphas is None and losses[best] < without:
            both = (best - _REFINEMENT, best + _REFINEMENT)
            finer = [alpha for alpha in both if 0 <= alpha <= 1]
            losses |= zip(finer, pool.map(loss, finer), strict=True)
            best = min(losses, key=losses.__getitem__)
    if not losses[best] < without:
        return one, None, losses
    return channel_scales(mean_abs, w_mean, best), best, losses


def _sampled_columns(
    weights: Sequence[npt.NDArray[Any]], forms: Sequence[BlockFormat], all_columns: bool
) -> list[tuple[Floats, BlockFormat]]:
    """Return some columns of each weight, in strips ``[K, n]``, copied; with its form."""
    k, total = len(weights[0]), sum(weight.shape[1] for weight in weights)
    some = max(1, min(_COLUMN_STRIDE, total // _MIN_COLUMNS), -(-total // _MAX_COLUMNS))
    step = 1 if all_columns else some
    width = max(1, _STRIP // k)
    strips = []
    for weight, form in zip(weights, forms, strict=True):
        # From the middle of the first step; of a narrow weight one column at least.
        columns = weight[:, min(step // 2, weight.shape[1] - 1) :: step]
        strips += [
            (np.ascontiguousarray(columns[:, start : start + width], np.float32), form)
            for start in range(0, columns.shape[1], width)
        ]
    return strips


def _relative_magnitude(weights: Sequence[npt.NDArray[Any]], sizes: Sequence[int]) -> Doubles:
    """Mean over all columns of |w| over the greatest of its block, ``[K]``, at most 1."""
    k = len(weights[0])
    total, count = np.zeros(k), 0
    for weight, size in zip(weights, sizes, strict=True):
        width = max(1, _STRIP // k)
        for start in range(0, weight.shape[1], width):
            strip = np.abs(weight[:, start : start + width], dtype=np.float32)
            blocks = in_blocks(strip, size)
            greatest = blocks.max(axis=1, keepdims=True)
            shares = blocks / np.where(greatest > 0, greatest, 1)
            total += shares.reshape(-1, strip.shape[1])[:k].sum(axis=1, dtype=np.float64)
        count += weight.shape[1]
    return total / count


def channel_scales(x: Floats, w: Doubles | Floats, alpha: float) -> Floats:
    """Return ``x**alpha / w**(1 - alpha)``, float32 ``[K]``, with 1 in the middle.

    ``x`` and ``w`` say how large inputs and weights of each channel are.
    """
    live = (x > 0) & (w > 0)
    scales = np.ones(len(x))
    if live.any():
        # In logarithms: no product of the extremes overflows.
        logs = alpha * np.log(x[live], dtype=np.float64)
        logs -= (1 - alpha) * np.log(w[live], dtype=np.float64)
        logs -= (logs.max() + logs.min()) / 2
        limit = math.log(_GREATEST_SCALE)
        scales[live] = np.exp(logs.clip(-limit, limit))
    return scales.astype(np.float32)


def _loss(strips: Iterable[tuple[Floats, BlockFormat]], scales: Floats, gram: Floats) -> float:
    """Return tr(D^T H D)."""
    column, total = scales[:, None], 0.0
    for strip, form in strips:
        difference = dequantize_blocks(*quantize_blocks(strip * column, form), form)
        difference /= column
        difference -= strip
        # Rounding may leave a hair less than nothing.
        total += max(0.0, float(np.vdot(difference, gram @ difference)))
    return total
