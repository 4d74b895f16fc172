# SPDX-License-Identifier: MIT
"""GPTQ: codes that make up for the rounding errors of the rows before them; numpy only.

With the products X W and H = X^T X / count, the error of the outputs for each token is
tr(D^T H D), D = dequantised - W. The rows of W are rounded one after the other, each to the
code nearest to what is best given the errors so far (Frantar et al., arXiv 2210.17323).

The paper inverts H and factors the inverse. Here, from H itself, as LDLQ does (Chee et al.,
arXiv 2307.13304, theorem 6: the same codes):

    H = R R^T, R upper triangular        A[j, k] = R[j, k] / R[k, k]
    tr(D^T H D) = sum over rows k of R[k, k]**2 |D[k] + sum over j < k of A[j, k] D[j]|**2
    row k is rounded from W[k] - sum over j < k of A[j, k] D[j]

so no inverse is formed, what earlier blocks add to a block is one matrix product, and the
terms of the sum say at once what a block costs, which is how its scales are chosen: several
ranges are tried for each block and column, each with the error feedback within the block.

Two departures from the paper, without which its perplexity is above that of rounding to
nearest (SmolLM2-135M, int4, blocks of 32: 30.1 against 29.3) though its layer error is lower:

* *Damping by each channel's own energy*: ``relative_damping`` times diag(H) is added to H. The
  first token of a text has activations a thousand times the others'; H is nearly of rank one
  along them, and the feedback trades the errors of all other tokens for theirs. Leaving those
  tokens out is worse (38.4), and so is more damping by the mean energy.
* *Order*: whole blocks, from the greatest mean energy down. Sorting rows, as the paper's
  "act-order" does, would break up the blocks: ONNX has no index of groups.
"""

from __future__ import annotations

__all__ = ["ORDERS", "gptq"]

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from ortplugins.errors import QuantizationError
from ortplugins.quantization.block_format import BlockFormat
from ortplugins.quantization.round_to_nearest import (
    Codes,
    Floats,
    ZeroPoints,
    block_grid,
    round_to_grid,
)

Doubles = npt.NDArray[np.float64]

ORDERS = ("energy", "natural")
# Ranges to try for a block. Above 1, too: an extreme that lies beyond the last code but one is
# better rounded within a wider grid when the errors of other rows have moved it.
RATIOS = (1.1, 1.05, 1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
NUDGES = (0.92, 0.96, 1.0, 1.04, 1.08)
# Floats of the candidates of a strip of columns: 4 MB; narrower ones cost more calls for each
# row than they spare the caches.
_STRIP = 1 << 20


def gptq(
    weight: npt.NDArray[Any],
    gram: npt.NDArray[Any],
    form: BlockFormat | None = None,
    *,
    order: str = "energy",
    damping: float = 0.01,
    relative_damping: float = 1.0,
    ratios: tuple[float, ...] = RATIOS,
    passes: int = 1,
) -> tuple[Codes, Floats, ZeroPoints | None]:
    """Quantise a weight so that the errors of its rows make up for each other.

    Where H is diagonal and ``ratios`` is ``(1.0,)``, the result is that of
    :func:`~ortplugins.quantization.round_to_nearest.quantize_blocks`. A channel without energy
    is rounded to nearest, and no other row depends on it. Columns do not depend on each other.
    The same bits come out for the same number of BLAS threads.

    Args:
        weight: Float ``[K, N]``, of any K and N.
        gram: H, float ``[K, K]``: X^T X over the number of tokens, in any unit.
        form: Bits, block size and grid; the defaults of :class:`BlockFormat` where it is None.
        order: ``"energy"``, blocks of the greatest mean diag(H) first, or ``"natural"``.
        damping: Part of the mean of diag(H) that is added to it. Ten times as much for as long
            as H cannot be factored.
        relative_damping: Part of diag(H) that is added to it.
        ratios: What to shrink or stretch the range of a block by, the best for each block and
            column; the first of equals.

    Returns:
        Codes, scales and zero points as ``quantize_blocks`` returns them.

    Raises:
        QuantizationError: If the weight is not of rank 2, holds NaN or infinity or is too
            large for the type of the scales; if H is not ``[K, K]`` or is no Gram matrix.
        ValueError: If an option has none of the values above.
    """
    form = form or BlockFormat()
    if order not in ORDERS:
        raise ValueError(f"order is {order!r}: one of {ORDERS} is expected")
    if not (damping >= 0 and relative_damping >= 0):
        raise ValueError(
            f"damping is {damping} and relative_damping {relative_damping}: "
            f"0 or more is expected"
        )
    if not ratios or min(ratios) <= 0:
        raise ValueError(f"ratios is {ratios}: one or more above 0 are expected")
    if weight.ndim != 2 or 0 in weight.shape:
        raise QuantizationError(
            f"the weight has shape {list(weight.shape)}: [K, N] is expected"
        )
    if not np.isfinite(weight).all():
        raise QuantizationError("the weight holds NaN or infinite values")
    k, n = weight.shape
    energy = _checked_energy(gram, k)
    size = form.size_along(k)
    blocks = [slice(start, min(start + size, k)) for start in range(0, k, size)]
    turns = list(range(len(blocks)))
    if order == "energy":
        turns.sort(key=lambda b: -float(energy[blocks[b]].mean()))  # stable
    rows = np.concatenate([np.arange(k)[blocks[b]] for b in turns])
    factor = _Factor(gram, energy, damping, relative_damping)
    feedback, cost = factor.feedback(rows)

    codes = np.empty((k, n), form.code_dtype)
    scales = np.empty((len(blocks), n), np.float32)
    zero_points = None if form.is_symmetric else np.empty((len(blocks), n), np.uint8)
    errors = np.empty((k, n), np.float32)  # D, in the order of the turns
    # The widest strips that fit: numpy's calls for each row are what narrow ones cost.
    width = max(64, _STRIP // (min(size, k) * len(ratios)))
    strips = [slice(left, min(left + width, n)) for left in range(0, n, width)]
    start = 0
    for b in turns:
        block = blocks[b]
        stop = start + block.stop - block.start
        target = np.matmul(feedback[start:stop, :start], errors[:start])
        np.subtract(weight[block], target, out=target)
        step = _Block(feedback[start:stop, start:stop].copy(), cost[start:stop], form)
        for columns in strips:
            original = np.ascontiguousarray(weight[block, columns], np.float32)
            wanted = np.ascontiguousarray(target[:, columns])
            result = step.quantize(original, wanted, *step.grids(wanted, ratios))
            codes[block, columns], scales[b, columns] = result.codes, result.scales
            errors[start:stop, columns] = result.errors
            if zero_points is not None:
                zero_points[b, columns] = result.zeros
        start = stop
    del feedback
    if passes and len(blocks) > 1:
        natural = np.empty_like(errors)
        natural[rows] = errors
        errors = natural
    for _ in range(passes if len(blocks) > 1 else 0):
        for b in turns:
            block = blocks[b]
            step, upper = factor.block(block, form)
            pull = gram[block] @ errors
            pull -= gram[block, block] @ errors[block]
            shift = factor.shift(upper, pull)
            for columns in strips:
                original = np.ascontiguousarray(weight[block, columns], np.float32)
                old = errors[block, columns]
                moved = shift[:, columns]
                before = step.feedback @ old
                before += old
                before += moved
                before = step.cost @ np.square(before)
                grid = scales[b, columns] * np.array(NUDGES, np.float32)[:, None]
                zeros = None
                if zero_points is not None:
                    zeros = np.broadcast_to(zero_points[b, columns], grid.shape)
                result = step.quantize(original, original - moved, grid, zeros)
                better = result.losses < before
                np.copyto(codes[block, columns], result.codes, where=better)
                np.copyto(scales[b, columns], result.scales, where=better)
                np.copyto(errors[block, columns], result.errors, where=better)
    return codes, scales, zero_points


@dataclasses.dataclass(frozen=True, eq=False)
class _Block:
    """The rows of one block.

    Attributes:
        feedback: float32 ``[rows, rows]``: row k is A[:, k], zeros from the diagonal on.
        cost: float32 ``[rows]``: R[k, k]**2.
        form: Of the weight.
    """

    feedback: Floats
    cost: Floats
    form: BlockFormat

    def grids(
        self, target: Floats, ratios: tuple[float, ...]
    ) -> tuple[Floats, ZeroPoints | None]:
        """Return scales and zero points ``[ratios, n]`` of the ranges to try."""
        n = target.shape[1]
        # All that a grid depends on are the least and the greatest element.
        ends = np.stack([target.min(axis=0), target.max(axis=0)])
        whole = dataclasses.replace(self.form, block_size=-1)
        scales, zeros = block_grid(
            np.tile(ends, len(ratios)), whole, np.repeat(np.array(ratios, np.float32), n)[None]
        )
        return scales.reshape(-1, n), None if zeros is None else zeros.reshape(-1, n)

    def quantize(
        self, weight: Floats, target: Floats, scales: Floats, zeros: ZeroPoints | None
    ) -> _Result:
        if len(scales) > 1:
            best = self._losses(weight, target, scales, zeros).argmin(axis=0)[None]
            scales = np.take_along_axis(scales, best, 0)
            zeros = None if zeros is None else np.take_along_axis(zeros, best, 0)
        codes, errors, losses = self._round(weight, target, scales, zeros, keep_codes=True)
        assert codes is not None
        return _Result(codes, scales[0], None if zeros is None else zeros[0], errors[:, 0], losses[0])

    def _losses(
        self, weight: Floats, target: Floats, scales: Floats, zeros: ZeroPoints | None
    ) -> Floats:
        """What each of the grids ``[candidates, n]`` costs: the block's terms of the sum."""
        return self._round(weight, target, scales, zeros, keep_codes=False)[2]

    def _round(
        self,
        weight: Floats,
        target: Floats,
        scales: Floats,
        zeros: ZeroPoints | None,
        *,
        keep_codes: bool,
    ) -> tuple[Codes | None, Floats, Floats]:
        """Round row after row on each of the grids ``[candidates, n]``.

        Returns:
            Codes ``[rows, n]`` of the only candidate; errors D, ``[rows, candidates, n]``;
            losses ``[candidates, n]``.
        """
        form, (count, n) = self.form, weight.shape
        shape = (len(scales), n)
        errors = np.empty((count, *shape), np.float32)
        flat = errors.reshape(count, -1)
        codes = np.empty((count, n), form.code_dtype) if keep_codes else None
        shift = None if zeros is None else zeros.astype(np.float32)
        wanted, step = np.empty(shape, np.float32), np.empty_like(flat[0])
        losses = np.zeros(shape, np.float32)
        code = np.empty(shape, np.float32)
        for k in range(count):
            if k:
                np.matmul(self.feedback[k, :k], flat[:k], out=step)
                np.subtract(target[k], step.reshape(shape), out=wanted)
            else:
                wanted[:] = target[0]
            np.divide(wanted, scales, out=code)
            np.rint(code, out=code)
            if shift is not None:
                code += shift
            np.maximum(code, form.lowest_code, out=code)
            np.minimum(code, form.highest_code, out=code)
            if codes is not None:
                codes[k] = code[0]
            if shift is not None:
                code -= shift
            code *= scales
            np.subtract(code, weight[k], out=errors[k])
            code -= wanted
            code *= code
            code *= self.cost[k]
            losses += code
        return codes, errors, losses


def _checked_energy(gram: npt.NDArray[Any], k: int) -> Doubles:
    """Return diag(H).

    Raises:
        QuantizationError: If H has the wrong shape, is not finite or has a negative diagonal.
    """
    if gram.shape != (k, k):
        raise QuantizationError(
            f"the Gram matrix has shape {list(gram.shape)}: {[k, k]} is expected"
        )
    if not np.isfinite(gram).all():
        raise QuantizationError(
            "the Gram matrix holds NaN or infinite values: so do the activations, or their "
            "squares overflow"
        )
    energy = np.diagonal(gram).astype(np.float64)
    if (energy < 0).any():
        raise QuantizationError("the Gram matrix has negative numbers on its diagonal")
    return energy


@dataclasses.dataclass(frozen=True, eq=False)
class _Result:
    codes: Codes
    scales: Floats
    zeros: ZeroPoints | None
    errors: Floats
    losses: Floats


class _Factor:
    def __init__(self, gram, energy, damping, relative_damping):
        self.gram, self.energy = gram, energy
        self.damping, self.relative_damping = damping, relative_damping
        self.mean = float(energy.mean()) or 1.0

    def damped(self, rows):
        hessian = self.gram[rows][:, rows].astype(np.float64)
        hessian /= self.mean
        own = self.energy[rows] / self.mean
        own = np.where(own > 0, own * (1 + self.relative_damping) + self.damping, 1.0)
        np.fill_diagonal(hessian, own)
        return hessian

    def feedback(self, rows):
        for _ in range(12):
            try:
                lower = np.linalg.cholesky(self.damped(rows[::-1]))
            except np.linalg.LinAlgError:
                self.damping = max(10 * self.damping, 1e-6)
                continue
            diagonal = np.diagonal(lower).copy()
            feedback = np.empty(lower.shape, np.float32)
            np.divide(lower.T[::-1, ::-1], diagonal[::-1, None], out=feedback, casting="same_kind")
            np.fill_diagonal(feedback, 0)
            return feedback, (diagonal[::-1] ** 2).astype(np.float32)
        raise QuantizationError(
            "the Gram matrix is no X^T X: it has negative eigenvalues beyond any damping"
        )

    def block(self, rows, form):
        lower = np.linalg.cholesky(self.damped(slice(rows.start, rows.stop))[::-1, ::-1])
        diagonal = np.diagonal(lower)
        feedback = lower.T / diagonal[:, None]
        np.fill_diagonal(feedback, 0)
        upper = lower[::-1, ::-1]
        feedback = (upper / np.diagonal(upper)).T.astype(np.float32).copy()
        np.fill_diagonal(feedback, 0)
        return _Block(feedback, (np.diagonal(upper) ** 2).astype(np.float32), form), upper.astype(np.float32)

    def shift(self, upper, pull):
        inverse = np.linalg.inv(upper.astype(np.float64)) / np.diagonal(upper)[:, None]
        return (inverse / self.mean).astype(np.float32) @ pull
