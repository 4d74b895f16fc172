# SPDX-License-Identifier: MIT
"""What calibration keeps of an activation: mean |x|, some of its tokens, its Gram matrix.

Tokens stream through and are not kept. The same tokens in the same portions give the same
statistics, bit for bit.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from ortplugins.errors import CalibrationError
from ortplugins.quantization.methods.gptq import Gptq

Floats = npt.NDArray[np.float32]

# Rows of the Gram matrix per product. Only what lies right of the diagonal is computed: 384 is
# where that saves most. numpy takes ssyrk for x.T @ x, but mirrors its result element by
# element, which costs more than ssyrk saves: 12 ms against 4 for 256 tokens of K = 1536, 110
# against 24 for K = 4096.
_GRAM_ROWS = 384
# Tokens per product, where portions bring fewer: adding a product to the matrix costs as much
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
    # What feeds errors of rounding back, for the gram.
    feedback: Gptq | None = None

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


def statistics_of(
    portions: Callable[[], Iterable[npt.NDArray[Any]]],
    name: str,
    k: int,
    axes: int = 0,
    *,
    gram_tokens: float = math.inf,
    max_tokens: int = 128,
    zeros: Callable[[tuple[int, ...]], Floats] | None = None,
) -> ActivationStatistics | None:
    """Return the statistics of an activation; None without tokens.

    Activations that have equally many tokens keep those of the same positions.

    Args:
        portions: Yields tokens ``[..., K]`` of any float type, an array for each sample, the
            same whenever it is called.
        name: The activation's, for errors.
        k: Size of its last axis.
        axes: Axes of the Gram matrix: 2, 1 for its diagonal, 0 for none.
        gram_tokens: About how many tokens, at random, count for the Gram matrix.
        max_tokens: How many tokens are kept.
        zeros: Makes the Gram matrix, of its shape; in memory by default.

    Raises:
        CalibrationError: If tokens have another size, or hold NaN or infinite values, or their
            squares leave float32.
    """
    count = sum(math.prod(portion.shape[:-1]) for portion in portions())
    if not count:
        return None
    rng = np.random.default_rng(0)
    kept = np.sort(rng.choice(count, min(count, max_tokens), replace=False))
    # Every s-th would be the first of each text where s divides their length.
    rng, stride = np.random.default_rng(0), max(1, round(count / gram_tokens))
    counted = np.arange(0, count, stride)
    counted[1:] += rng.integers(stride, size=len(counted) - 1)
    counted = counted[counted < count]
    sums, tokens = np.zeros(k), list[Floats]()

    def passing() -> Iterator[Floats]:
        """Yield what counts for the Gram matrix, and see to the rest."""
        start = 0
        for index, portion in enumerate(portions()):
            what = f"sample {index}: activation {name!r}"
            rows = _rows(portion, k, what)
            sums[:] += _magnitudes(rows, what)
            tokens.append(_at(kept, rows, start))
            yield rows if stride == 1 else _at(counted, rows, start)
            start += len(rows)

    gram = None
    if axes:
        shape = (k,) * axes
        gram = _gram(passing(), zeros(shape) if zeros else np.zeros(shape, np.float32))
        if not np.isfinite(gram).all():
            raise CalibrationError(
                f"activation {name!r} is too large: its squares leave float32"
            )
    else:
        collections.deque(passing(), maxlen=0)
    mean_abs = (sums / count).astype(np.float32)
    return ActivationStatistics(count, mean_abs, np.concatenate(tokens), gram)


def _rows(portion: npt.NDArray[Any], k: int, what: str) -> Floats:
    """Return tokens ``[T, K]`` in float32."""
    if not portion.ndim or portion.shape[-1] != k:
        shape = list(portion.shape)
        raise CalibrationError(f"{what} has shape {shape}: its last axis should be K = {k}")
    return np.ascontiguousarray(portion.reshape(-1, k), np.float32)


def _at(positions: npt.NDArray[np.int64], rows: Floats, start: int) -> Floats:
    """Return the rows at positions, which count from ``start`` rows before."""
    first, last = np.searchsorted(positions, (start, start + len(rows)))
    return rows[positions[first:last] - start]


def _magnitudes(rows: Floats, what: str) -> npt.NDArray[np.float64]:
    """Return sums of |x|, float64 ``[K]``."""
    sums = np.zeros(rows.shape[1], np.float64)
    step = max(1, _CHUNK_BYTES // (4 * max(1, rows.shape[1])))
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, len(rows), step):
            sums += np.abs(rows[start : start + step]).sum(axis=0)
    # NaN and infinity show in the sums, so that x need not be read again; finite values
    # may add up to infinity in float32, and only then x is looked at.
    if not np.isfinite(sums).all():
        if not np.isfinite(rows).all():
            raise CalibrationError(f"{what} holds NaN or infinite values")
        sums = np.abs(rows).sum(axis=0, dtype=np.float64)
    return sums


def _in_batches(portions: Iterable[Floats]) -> Iterator[Floats]:
    """Yield rows, those of small portions together."""
    waiting: list[Floats] = []
    for rows in portions:
        if waiting and sum(map(len, waiting)) + len(rows) > _GRAM_TOKENS:
            yield np.concatenate(waiting)
            waiting = []
        if len(rows) >= _GRAM_TOKENS:
            yield rows
        else:
            waiting.append(rows)
    if waiting:
        yield np.concatenate(waiting)


def _gram(portions: Iterable[Floats], gram: Floats) -> Floats:
    """Return X^T X / count of all rows, or its diagonal, in a matrix or vector of zeros."""
    count = 0
    for rows in portions if gram.ndim == 1 else _in_batches(portions):
        count += len(rows)
        if gram.ndim == 1:
            gram += np.square(rows).sum(axis=0)
        else:
            _add_upper(rows, gram)
    gram /= np.float32(count)
    for start in range(0, len(gram) * (gram.ndim - 1), _GRAM_ROWS):
        end = start + _GRAM_ROWS
        square = gram[start:end, start:end]
        square[:] = np.triu(square) + np.triu(square, 1).T
        gram[end:, start:end] = gram[start:end, end:].T
    return gram


def _add_upper(rows: Floats, gram: Floats) -> None:
    """Add ``rows^T rows`` to the blocks on and above the diagonal, which threads share."""

    def add(start: int) -> None:
        block = rows[:, start : start + _GRAM_ROWS]
        gram[start : start + _GRAM_ROWS, start:] += block.T @ rows[:, start:]

    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(add, range(0, rows.shape[1], _GRAM_ROWS)))
