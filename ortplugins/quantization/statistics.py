# SPDX-License-Identifier: MIT
"""What calibration keeps of an activation: mean |x|, some of its tokens, its Gram matrix.

Tokens stream through and are not kept. The same tokens in the same updates give the same
statistics, bit for bit.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ortplugins.errors import CalibrationError

Floats = npt.NDArray[np.float32]

# Rows of the Gram matrix per product. Only what lies right of the diagonal is computed: 384 is
# where that saves most. numpy takes ssyrk for x.T @ x, but mirrors its result element by
# element, which costs more than ssyrk saves: 12 ms against 4 for 256 tokens of K = 1536, 110
# against 24 for K = 4096.
_GRAM_ROWS = 384
# Tokens per product, where updates bring fewer: adding a product to the matrix costs as much
# as multiplying some 200 tokens.
_GRAM_TOKENS = 256
# Bytes of |x| at a time: what stays in the cache.
_CHUNK_BYTES = 1 << 18


@dataclasses.dataclass(frozen=True, eq=False)
class ActivationStatistics:
    """Statistics of an activation; K is its last axis, a token all before that."""

    count: int  # of tokens
    mean_abs: Floats  # [K], the mean of |x| over all tokens
    tokens: Floats  # [T, K], a uniform random sample in their order, or all if they are few
    # [K, K], X^T X / count; exactly symmetric. Or its diagonal alone, [K].
    gram: Floats | None = None
    # Where X is the quantised model's: the same tokens of the float model, and [K, K],
    # X^T (X_float - X) / count.
    float_tokens: Floats | None = None
    drift: Floats | None = None
    # [K], what the activation was divided by, and rows of its weights are multiplied by.
    scales: Floats | None = None

    @property
    def energy(self) -> Floats:
        """The mean square of each channel, ``[K]``."""
        assert self.gram is not None
        return self.gram if self.gram.ndim == 1 else np.diagonal(self.gram)

    def over(self, scales: Floats) -> ActivationStatistics:
        """Return the statistics of X / scales; what is the float model's stays."""
        gram = None if self.gram is None else self.gram / scales
        if gram is not None:
            gram /= scales if gram.ndim == 1 else scales[:, None]
        mean_abs, tokens = self.mean_abs / scales, self.tokens / scales
        return dataclasses.replace(
            self, mean_abs=mean_abs, tokens=tokens, gram=gram, scales=scales
        )


class StatisticsAccumulator:
    """Makes :class:`ActivationStatistics` of tokens that stream through it.

    Activations that have equally many tokens keep those of the same positions.
    """

    def __init__(
        self,
        name: str,
        k: int,
        axes: int = 0,
        gram_stride: int = 1,
        max_tokens: int = 128,
        zeros: Callable[[tuple[int, ...]], Floats] | None = None,
    ) -> None:
        """Start.

        Args:
            name: The activation's, for errors.
            k: Size of its last axis.
            axes: Of the Gram matrix: 2, 1 for its diagonal, 0 for none.
            gram_stride: Of so many tokens a random one counts for the Gram matrix.
            max_tokens: How many tokens are kept.
            zeros: Makes the Gram matrix, of its shape; in memory by default.
        """
        self._name, self._k, self._max_tokens = name, k, max_tokens
        self._rng = np.random.default_rng(0)
        self._count = 0
        self._sum_abs = np.zeros(k, np.float64)
        self._tokens: Floats = np.zeros((max_tokens, k), np.float32)
        self._positions = np.empty(max_tokens, np.int64)
        shape = (k,) * axes
        self._gram: Floats | None = None
        if axes:
            self._gram = np.zeros(shape, np.float32) if zeros is None else zeros(shape)
        self._waiting: Floats = np.zeros((_GRAM_TOKENS * (axes == 2), k), np.float32)
        self._waiting_tokens = 0
        self._gram_stride, self._gram_count = gram_stride, 0
        self._windows, self._pick = itertools.count(gram_stride, gram_stride), 0
        self._picks = np.random.default_rng(0)

    def update(self, x: npt.NDArray[Any]) -> None:
        """Take in tokens ``[..., K]`` of any float type; the array is not kept."""
        if not x.ndim or x.shape[-1] != self._k:
            raise CalibrationError(
                f"activation {self._name!r} has shape {list(x.shape)}: its last axis should "
                f"be K = {self._k}"
            )
        rows: Floats = np.ascontiguousarray(x.reshape(-1, self._k), np.float32)
        self._sum_abs += self._magnitudes(rows)
        self._sample(rows)
        if self._gram is not None:
            self._add_products(rows, self._gram)
        self._count += len(rows)

    def finish(self) -> ActivationStatistics | None:
        """Return the statistics, None without tokens; the accumulator is spent."""
        if not self._count:
            return None
        kept = min(self._count, self._max_tokens)
        order = np.argsort(self._positions[:kept])
        gram = self._gram
        if gram is not None:
            self._flush(gram)
            gram /= np.float32(self._gram_count)
            if not np.isfinite(gram).all():
                raise CalibrationError(
                    f"activation {self._name!r} is too large: its squares leave float32"
                )
            for start in range(0, self._k * (gram.ndim - 1), _GRAM_ROWS):
                end = start + _GRAM_ROWS
                square = gram[start:end, start:end]
                square[:] = np.triu(square) + np.triu(square, 1).T
                gram[end:, start:end] = gram[start:end, end:].T
        return ActivationStatistics(
            self._count,
            (self._sum_abs / self._count).astype(np.float32),
            self._tokens[:kept][order],
            gram,
        )

    def _magnitudes(self, rows: Floats) -> npt.NDArray[np.float64]:
        """Return sums of |x|, float64 ``[K]``."""
        sums = np.zeros(self._k, np.float64)
        step = max(1, _CHUNK_BYTES // (4 * max(1, self._k)))
        with np.errstate(over="ignore", invalid="ignore"):
            for start in range(0, len(rows), step):
                sums += np.abs(rows[start : start + step]).sum(axis=0)
        # NaN and infinity show in the sums, so that x need not be read again; finite values
        # may add up to infinity in float32, and only then x is looked at.
        if not np.isfinite(sums).all():
            if not np.isfinite(rows).all():
                raise CalibrationError(
                    f"activation {self._name!r} holds NaN or infinite values"
                )
            sums = np.abs(rows).sum(axis=0, dtype=np.float64)
        return sums

    def _sample(self, rows: Floats) -> None:
        """Algorithm R: token i replaces one of the kept ones with probability max_tokens/i."""
        head = min(len(rows), max(0, self._max_tokens - self._count))
        kept = slice(self._count, self._count + head)
        self._tokens[kept] = rows[:head]
        self._positions[kept] = np.arange(self._count, self._count + head)
        # One draw per token, so that tokens in other portions draw the same.
        positions = np.arange(self._count + head, self._count + len(rows))
        places = (self._rng.random(len(positions)) * (positions + 1)).astype(np.int64)
        for index in np.flatnonzero(places < self._max_tokens):
            self._tokens[places[index]] = rows[head + index]
            self._positions[places[index]] = positions[index]

    def _add_products(self, rows: Floats, gram: Floats) -> None:
        if self._gram_stride > 1:
            # Every s-th would be the first of each text where s divides their length.
            picked = []
            while self._pick < self._count + len(rows):
                picked.append(self._pick - self._count)
                self._pick = next(self._windows) + int(self._picks.integers(self._gram_stride))
            rows = rows[picked]
        self._gram_count += len(rows)
        if gram.ndim == 1:
            gram += np.square(rows).sum(axis=0)
            return
        if self._waiting_tokens + len(rows) > _GRAM_TOKENS:
            self._flush(gram)
        if len(rows) >= _GRAM_TOKENS:
            _add_upper(rows, gram)
            return
        end = self._waiting_tokens + len(rows)
        self._waiting[self._waiting_tokens : end] = rows
        self._waiting_tokens = end

    def _flush(self, gram: Floats) -> None:
        if self._waiting_tokens:
            _add_upper(self._waiting[: self._waiting_tokens], gram)
            self._waiting_tokens = 0


def _add_upper(rows: Floats, gram: Floats) -> None:
    """Add ``rows^T rows`` to the blocks on and above the diagonal."""
    for start in range(0, rows.shape[1], _GRAM_ROWS):
        block = rows[:, start : start + _GRAM_ROWS]
        gram[start : start + _GRAM_ROWS, start:] += block.T @ rows[:, start:]
