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

so H is not inverted, what earlier blocks add to a block is one matrix product, and the terms
of the sum say at once what a block costs, which is how its scales are chosen: several ranges
are tried for each block and column, each with the error feedback within the block.

Departures from the paper. Without the first, the perplexity is above that of rounding to
nearest (SmolLM2-135M, int4, blocks of 32: 30.1 against 29.3) though the layer error is lower.

* *Damping by each channel's own energy*: ``RELATIVE_DAMPING`` times diag(H) is added to H. The
  cause is likely, not proven: the first token of a text has activations a thousand times the
  others', H is nearly of rank one along them, and the feedback trades the errors of all other
  tokens for theirs. With it even the natural order of the blocks is good. Tried
  without gain: leaving those tokens out (38.4), weighting tokens by 1 / |x| (no better) or
  its square (worse), more damping by the mean energy.
* *Order*: whole blocks, from the greatest mean energy down, and so the rows in each. Sorting
  all rows, as the paper's "act-order" does, would break up the blocks: ONNX has no index of
  groups.
* *More visits*: the first one knows nothing of later blocks' errors. Afterwards each code q is
  chosen again given all others, one row after the other (coordinate descent, as Nair and
  Suggala, arXiv 2406.17542), and then the scale is fitted to the codes of its block, by least
  squares. With H_b = H[block, block] and the slope S = H D

      q[k] - S[k] / (H[k, k] scale), rounded        scale - q^T S / q^T H_b q

Outputs other than X W: where X are inputs of the quantised model, and the outputs are to be
the float model's Y, the weight to round is that of least squares (Li et al., arXiv 2504.02692;
Zhang et al., arXiv 2505.11695), with H damped as above:

    |X Q - Y|^2 = |X (Q - T)|^2 + const.        T = W + H^-1 X^T (Y - X W) / count
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ortplugins.errors import QuantizationError
from ortplugins.quantization.methods.half_factor import HalfFactor
from ortplugins.quantization.methods.nearest import (
    BlockFormat,
    Codes,
    Floats,
    ZeroPoints,
    candidate_grids,
    stored_scales,
)

Doubles = npt.NDArray[np.float64]
Rows = npt.NDArray[np.intp]
# A weight's block, its target, feedback within it, cost of its rows; see _round_rows.
_Block = tuple[Floats, Floats, Floats, Floats, BlockFormat]

# Part of the mean of diag(H) that is added to it; ten times as much for as long as H cannot be
# factored. And part of diag(H) itself.
DAMPING, RELATIVE_DAMPING = 0.01, 1.0
# Ranges to try for a block. Above 1, too: the errors of its rows move others beyond the range
# that they had when its scale was chosen.
RATIOS = (1.1, 1.05, 1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
# How often each block is quantised again, given all others.
REVISITS = 4
# How often damping grows tenfold before a matrix is refused.
_ATTEMPTS = 12
_NONE: Rows = np.arange(0)


class Gptq:
    """Quantises weights so that the errors of their rows make up for each other.

    A channel without energy is rounded to nearest and changes nothing else. The same arguments
    give the same bits, with the same number of BLAS threads.
    """

    def __init__(self, gram: npt.NDArray[Any], block_size: int) -> None:
        """Take H, float ``[K, K]``: X^T X over the number of tokens, or in any other unit."""
        self._gram, self._size, self._damping = gram, block_size, DAMPING
        self._energy: Doubles = np.diagonal(gram).astype(np.float64)
        self._mean = float(self._energy.mean()) or 1.0  # all of H is over it: it has no unit

    @functools.cached_property
    def factored(self) -> tuple[list[Rows], HalfFactor]:
        """The rows of each block in their order, and the factor of H in that order."""
        order = self._block_order()
        return order, self._factor(np.concatenate(order))

    def quantize(
        self, weight: npt.NDArray[Any], form: BlockFormat, residual: Floats | None = None
    ) -> tuple[Codes, Floats, ZeroPoints | None]:
        """Quantise a weight ``[K, N]``, or some of its columns; in threads once H is factored.

        Blocks of the form have the size that was given to the constructor.
        ``residual`` is X^T (Y - X W) over the number of tokens, float32 ``[K, N]``, where the
        outputs are to be Y and not X W.
        """
        order, factor = self.factored
        if residual is not None:
            rows, weight = np.concatenate(order), weight.astype(np.float32)
            weight[rows] += factor.solve(residual[rows] / self._mean)
        result = _Result(weight, form)
        result.round_blocks(order, factor)
        # A block that is all of the rows has no others to make up for.
        for _ in range(REVISITS if len(order) > 1 else 0):
            for rows in order:
                result.revisit(rows, *self._block(rows, result.errors))
        return result.codes, result.scales, result.zero_points

    def _block_order(self) -> list[Rows]:
        """Return the rows of each block, in the order in which they are rounded."""
        energy, size = self._energy, self._size
        rows = np.arange(len(energy))
        blocks = [rows[start : start + size] for start in range(0, len(rows), size)]
        blocks = [block[np.argsort(-energy[block], kind="stable")] for block in blocks]
        return sorted(blocks, key=lambda block: -float(energy[block].mean()))  # stable

    def _factor(self, order: Rows) -> HalfFactor:
        """Factor H with its rows and columns in this order."""
        last = order[::-1]
        for _ in range(_ATTEMPTS):
            try:
                return HalfFactor(
                    len(order), lambda span: self._damped(last[span], last[: span.start])
                )
            except np.linalg.LinAlgError:
                self._damping = max(10 * self._damping, 1e-6)
        raise QuantizationError(
            "the Gram matrix is not X^T X: it has negative eigenvalues beyond any damping"
        )

    def _block(self, rows: Rows, errors: Floats) -> tuple[Floats, Floats]:
        """Return H_b, float32 ``[rows, rows]``, and the slope H D, ``[rows, N]``."""
        hessian = self._damped(rows).astype(np.float32)
        gram = self._gram[rows]
        slope = (gram @ errors - gram[:, rows] @ errors[rows]) / self._mean
        return hessian, slope.astype(np.float32) + hessian @ errors[rows]

    def _damped(self, rows: Rows, before: Rows = _NONE) -> Doubles:
        """Return rows of H, ``[rows, before and rows]``."""
        columns = np.concatenate([before, rows])
        hessian = np.empty((len(rows), len(columns)))
        for row, values in zip(rows, hessian, strict=True):
            np.divide(self._gram[row][columns], self._mean, out=values)
        own = self._energy[rows] / self._mean
        # A channel without energy stands apart: anything above 0 does.
        own = np.where(own > 0, own * (1 + RELATIVE_DAMPING) + self._damping, 1.0)
        np.fill_diagonal(hessian[:, len(before) :], own)
        return hessian


class _Result:
    """Codes, scales, zero points and errors D of a weight, block by block."""

    def __init__(self, weight: npt.NDArray[Any], form: BlockFormat) -> None:
        """Start with a weight, ``[K, N]``."""
        k, n = weight.shape
        self._weight, self._form = weight, form
        grid = form.blocks(k), n
        self.codes: Codes = np.empty((k, n), form.code_dtype)
        self.scales: Floats = np.empty(grid, np.float32)
        self.zero_points = None if form.is_symmetric else np.empty(grid, np.uint8)
        self.errors: Floats = np.empty((k, n), np.float32)

    def round_blocks(self, order: Sequence[Rows], factor: HalfFactor) -> None:
        """Quantise the blocks in their order, each given those before; H as factored."""
        errors: Floats = np.empty(self.codes.shape, np.float32)  # in this order
        start = 0
        for rows in order:
            stop = start + len(rows)
            feedback = factor.rows(start, stop)
            own, cost = feedback[:, start:], factor.cost[start:stop]
            moved = settled = feedback[:, :start] @ errors[:start]
            if start:
                # Where no row is rounded, each row's move moves the rows after it, too.
                settled = np.linalg.inv(own.astype(np.float64)).astype(np.float32) @ moved
            part = self._part(rows)
            given = part, part - moved, own, cost, self._form
            # What the block would be if it were not rounded: that decides its range.
            candidates = candidate_grids(part - settled, RATIOS, self._form)
            errors[start:stop] = self._store(rows, given, *_best_grid(given, *candidates))
            start = stop

    def _store(
        self, rows: Rows, given: _Block, scales: Floats, zeros: ZeroPoints | None
    ) -> Floats:
        """Round the rows of a block on one grid, store what that gives; return D."""
        codes = np.empty(given[0].shape, self._form.code_dtype)
        errors, _ = _round_rows(*given, scales, zeros, codes)
        block = self._block(rows)
        self.codes[rows], self.scales[block] = codes, scales[0]
        if self.zero_points is not None and zeros is not None:
            self.zero_points[block] = zeros[0]
        self.errors[rows] = errors[:, 0]
        return errors[:, 0]

    def revisit(self, rows: Rows, hessian: Floats, slope: Floats) -> None:
        """Choose the codes and then the scale of a block again, given all others."""
        block, form = self._block(rows), self._form
        scales = self.scales[block]
        zeros = 0 if self.zero_points is None else self.zero_points[block]
        steps = self.codes[rows].astype(np.float32) - zeros
        low, high = (np.float32(x) - zeros for x in (form.lowest_code, form.highest_code))
        moved = np.zeros(steps.shape, np.float32)
        for k, own in enumerate(np.diagonal(hessian)):
            step = steps[k] - (slope[k] + hessian[k, :k] @ moved[:k]) / (own * scales)
            np.rint(step, out=step)
            np.clip(step, low, high, out=step)
            moved[k] = (step - steps[k]) * scales
            steps[k] = step
        fitted = self._fitted(scales, steps, hessian, slope + hessian @ moved)
        self.codes[rows] = steps + zeros
        self.scales[block] = fitted
        self.errors[rows] = steps * fitted - self._part(rows)

    def _fitted(self, scales: Floats, steps: Floats, hessian: Floats, slope: Floats) -> Floats:
        """Return the scales ``[n]`` that cost least with these codes."""
        curve = np.einsum("kn,kn->n", steps, hessian @ steps)
        slope = np.einsum("kn,kn->n", steps, slope)
        fitted = stored_scales(scales - slope / np.where(curve > 0, curve, 1), self._form)
        change = fitted - scales
        # Rounded to its type, a scale may be further from the best than it was.
        better = change * (2 * slope + change * curve) < 0
        return np.where(better & ((fitted > 0) == (scales > 0)), fitted, scales)

    def _block(self, rows: Rows) -> int:
        return int(rows[0]) // self._form.size_along(len(self.codes))

    def _part(self, rows: Rows) -> Floats:
        return np.ascontiguousarray(self._weight[rows], np.float32)


def _best_grid(
    given: _Block, scales: Floats, zeros: ZeroPoints | None
) -> tuple[Floats, ZeroPoints | None]:
    """Return the grid ``[1, n]``, of several, whose codes lose least for each column.

    Codes are not kept for all grids: it is cheaper to round on the best one again.
    """
    if len(scales) == 1:
        return scales, zeros
    _, losses = _round_rows(*given, scales, zeros)
    best = losses.argmin(axis=0)[None]
    chosen = None if zeros is None else np.take_along_axis(zeros, best, 0)
    return np.take_along_axis(scales, best, 0), chosen


def _round_rows(
    weight: Floats,
    target: Floats,
    feedback: Floats,
    cost: Floats,
    form: BlockFormat,
    scales: Floats,
    zeros: ZeroPoints | None,
    codes: Codes | None = None,
) -> tuple[Floats, Floats]:
    """Round the rows of a block after each other to be ``target``, on grids ``[grids, n]``.

    Row k of ``feedback`` is A[:, k] below the diagonal; ``cost`` is R[k, k]**2.
    Return D ``[rows, grids, n]`` and losses ``[grids, n]``; a single grid's codes go to
    ``codes``.
    """
    count, shape = len(weight), scales.shape
    errors = np.empty((count, *shape), np.float32)
    flat = errors.reshape(count, -1)
    losses = np.zeros(shape, np.float32)
    wanted, code = np.empty(shape, np.float32), np.empty(shape, np.float32)
    shift = None if zeros is None else zeros.astype(np.float32)
    for k in range(count):
        # Rows, one by one, since each depends on those before: nothing may allocate here.
        np.matmul(feedback[k, :k], flat[:k], out=wanted.reshape(-1))
        np.subtract(target[k], wanted, out=wanted)
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
        code *= cost[k]
        losses += code
    return errors, losses
