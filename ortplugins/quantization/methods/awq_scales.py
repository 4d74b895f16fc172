# SPDX-License-Identifier: MIT
"""AWQ: scales per input channel that give the channels which matter a finer grid; numpy only.

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

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from ortplugins.errors import QuantizationError
from ortplugins.quantization.methods.block_format import BlockFormat
from ortplugins.quantization.methods.nearest import (
    Floats,
    check_gram,
    check_weight,
    dequantize_blocks,
    in_blocks,
    quantize_blocks,
)

Doubles = npt.NDArray[np.float64]

ALPHAS = tuple(a / 10 for a in range(11))
# Around the best of those, so far off on both sides.
_REFINEMENT = 0.05
# Of the columns, one in so many is looked at, but not fewer nor more than so many in all: on a
# wide weight each takes K * K operations for each alpha.
_COLUMN_STRIDE, _MIN_COLUMNS, _MAX_COLUMNS = 8, 64, 160
# s is kept within so many times of 1, so that neither x / s nor s W leaves its type.
_GREATEST_SCALE = 1e4
# Floats of a strip of columns: 1 MB.
_STRIP = 1 << 18


@dataclasses.dataclass(frozen=True, eq=False)
class ScaleChoice:
    """Scales of the input channels of an activation.

    Attributes:
        scales: float32 ``[K]``, finite and above 0, that rows of weights are multiplied and
            the activation is divided by. All 1 where no alpha is better than that.
        alpha: The exponent; None where they are 1.
        loss: Square of the error of the outputs for each token, summed over the columns that
            were looked at.
        loss_of_nearest: The same with all scales 1; never less than ``loss``.
    """

    scales: Floats
    alpha: float | None
    loss: float
    loss_of_nearest: float


def search_scales(
    weights: Sequence[Floats],
    mean_abs: Floats,
    tokens: Floats | None,
    gram: Floats | None,
    forms: Sequence[BlockFormat] | None = None,
    *,
    alphas: Sequence[float] | None = None,
    column_stride: int = _COLUMN_STRIDE,
) -> ScaleChoice:
    """Search the scales of one activation.

    Deterministic; of equal losses the first wins, no scales before any.

    Args:
        weights: All weights that the activation is multiplied by, float ``[K, N_i]``.
        mean_abs: Mean |x| of each channel, float32 ``[K]``. A channel that is 0 throughout
            keeps its scale, 1.
        tokens: A sample of the activation, float32 ``[T, K]``.
        gram: X^T X over the number of tokens, float32 ``[K, K]``. It is preferred: it comes
            from all tokens, where a sample of 128 costs 0.3 of perplexity.
        forms: Bits, block size and grid of each weight; the defaults of :class:`BlockFormat`
            where it is None.
        alphas: Exponents to try; by default 0 to 1 in tenths, and then a twentieth to both
            sides of the best.
        column_stride: One in so many columns is looked at, but 64 at least and 160 at most of
            all weights together; 1 for all.

    Returns:
        The best scales, normalised so that the least and the greatest are inverse.

    Raises:
        QuantizationError: If there is no weight, one is not ``[K, N]`` or holds NaN or
            infinity; if statistics are missing, have another K or are not finite; if a weight
            is too large for the type of the scales.
    """
    forms = forms or [BlockFormat()] * len(weights)
    k = len(mean_abs)
    _check(weights, mean_abs, tokens, gram)
    sample = _sampled_columns(weights, forms, column_stride)
    square = _output_square(tokens, gram)
    one = np.ones(k, np.float32)
    nearest = _loss(sample, one, square)
    best = ScaleChoice(one, None, nearest, nearest)
    w_mean = _relative_magnitude(weights, [form.size_along(k) for form in forms])

    def attempt(alpha: float) -> None:
        nonlocal best
        scales = _scales(mean_abs, w_mean, alpha)
        try:
            loss = _loss(sample, scales, square)
        except QuantizationError:  # s W is too large for the type of its scales
            return
        if loss < best.loss:
            best = ScaleChoice(scales, float(alpha), loss, nearest)

    for alpha in ALPHAS if alphas is None else alphas:
        attempt(alpha)
    if alphas is None and best.alpha is not None:
        middle = best.alpha
        for alpha in (middle - _REFINEMENT, middle + _REFINEMENT):
            if 0 <= alpha <= 1:
                attempt(alpha)
    return best


def _check(
    weights: Sequence[Floats], mean_abs: Floats, tokens: Floats | None, gram: Floats | None
) -> None:
    k = len(mean_abs)
    if not weights:
        raise QuantizationError("no weights: one or more are expected")
    for weight in weights:
        check_weight(weight, k)
    if gram is not None:
        check_gram(gram, k)
    elif tokens is None:
        raise QuantizationError("neither tokens nor a Gram matrix: one of them is expected")
    elif tokens.ndim != 2 or tokens.shape[1] != k or not len(tokens):
        raise QuantizationError(
            f"the tokens have shape {list(tokens.shape)}: [T, {k}] is expected"
        )
    for statistic in (mean_abs, tokens):
        if statistic is not None and not np.isfinite(statistic).all():
            raise QuantizationError("the activation's statistics hold NaN or infinite values")


def _sampled_columns(
    weights: Sequence[Floats], forms: Sequence[BlockFormat], stride: int
) -> list[tuple[Floats, BlockFormat]]:
    """Return every stride-th column of each weight, in strips ``[K, n]``, copied; its form."""
    k, total = len(weights[0]), sum(weight.shape[1] for weight in weights)
    step = max(1, min(stride, total // _MIN_COLUMNS))
    if stride > 1:
        step = max(step, -(-total // _MAX_COLUMNS))
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


def _relative_magnitude(weights: Sequence[Floats], sizes: Sequence[int]) -> Doubles:
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


def _scales(mean_abs: Floats, w_mean: Doubles, alpha: float) -> Floats:
    """Return s, float32 ``[K]``, for one exponent."""
    live = (mean_abs > 0) & (w_mean > 0)
    scales = np.ones(len(mean_abs))
    if live.any():
        # In logarithms: no product of the extremes overflows.
        logs = alpha * np.log(mean_abs[live], dtype=np.float64)
        logs -= (1 - alpha) * np.log(w_mean[live])
        logs -= (logs.max() + logs.min()) / 2
        limit = math.log(_GREATEST_SCALE)
        scales[live] = np.exp(logs.clip(-limit, limit))
    return scales.astype(np.float32)


def _output_square(tokens: Floats | None, gram: Floats | None) -> Callable[[Floats], float]:
    """Return what computes tr(D^T H D) of a D, ``[K, n]``, the cheapest way."""
    if gram is None:
        assert tokens is not None
        if len(tokens) < tokens.shape[1]:
            # A sample narrower than H: the products themselves.
            sample = np.asarray(tokens, np.float32)
            return lambda d: _square(sample @ d) / len(sample)
        gram = tokens.T @ tokens / np.float32(len(tokens))
    hessian = np.asarray(gram, np.float32)
    # Rounding may leave a hair less than nothing.
    return lambda d: max(0.0, float(np.vdot(d, hessian @ d)))


def _loss(
    strips: Iterable[tuple[Floats, BlockFormat]],
    scales: Floats,
    square: Callable[[Floats], float],
) -> float:
    column, total = scales[:, None], 0.0
    for strip, form in strips:
        difference = dequantize_blocks(*quantize_blocks(strip * column, form), form)
        difference /= column
        difference -= strip
        total += square(difference)
    return total


def _square(array: Floats) -> float:
    return float(np.vdot(array, array))
