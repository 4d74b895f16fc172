# SPDX-License-Identifier: MIT
"""Chooses the codes of one weight: a pure function of arrays, which any executor can run.

The weight is worked on in strips of its columns, which no method mixes: it is never held in
float32 as a whole, and the result is the same, bit for bit, however many threads share it.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from ortplugins.errors import QuantizationError
from ortplugins.quantization.methods.gptq import RATIOS
from ortplugins.quantization.methods.nearest import (
    BlockFormat,
    Codes,
    Floats,
    ZeroPoints,
    dequantize_blocks,
    search_blocks,
)
from ortplugins.quantization.statistics import ActivationStatistics

# Float bytes of a strip of columns: with the copies that a method makes, what a thread holds.
_STRIP_BYTES = 4 << 20
# GPTQ rounds row by row, and a call of numpy costs more than a narrow row; but the strips of a
# weight go to several threads, and of a block there are candidates, numbers of a strip.
_GPTQ_STRIP_BYTES, _GPTQ_COLUMNS, _CANDIDATES = 8 << 20, (64, 512), 1 << 20
# The relative error of a weight of which nothing is left.
_LOST = 0.9


@dataclasses.dataclass(frozen=True, eq=False)
class WeightCodes:
    """The codes of a weight, and what they lose; NaN where it was not measured.

    Attributes:
        codes: ``[K, N]``, a byte each: int8, or uint8 with zero points.
        grid: Scales, float32 ``[blocks, N]``.
        zero_points: uint8 ``[blocks, N]``; None when symmetric.
        scales: float32 ``[K]``, which rows were multiplied by; None where they were not.
        weight_error: Frobenius norm of the difference from the floats over theirs, channel
            scales taken out again.
        output_error: The same of products with sampled tokens.
        added: Square of the error of the products, for each token, by the energy of all
            channels.
    """

    codes: Codes
    grid: Floats
    zero_points: ZeroPoints | None
    scales: Floats | None
    weight_error: float
    output_error: float
    added: float

    def dequantized(self, form: BlockFormat) -> Floats:
        """Return the matrix that the codes stand for, float32 ``[K, N]``, over the scales."""
        matrix = dequantize_blocks(self.codes, self.grid, self.zero_points, form)
        if self.scales is not None:
            matrix /= self.scales[:, None]
        return matrix


def choose_codes(
    matrix: npt.NDArray[Any],
    form: BlockFormat,
    statistics: ActivationStatistics | None = None,
    threads: int = 1,
) -> WeightCodes:
    """Quantise a weight, float ``[K, N]``, by what is known of its inputs.

    Without statistics, it is rounded to nearest as if every channel mattered as much.

    Raises:
        QuantizationError: If it holds NaN or infinite values, or its codes leave its type.
    """
    k, n = matrix.shape
    feedback = None if statistics is None else statistics.feedback
    scales = None if statistics is None else statistics.scales
    codes, blocks = np.empty((k, n), form.code_dtype), (form.blocks(k), n)
    grid = np.empty(blocks, np.float32)
    zero_points = None if form.is_symmetric else np.empty(blocks, np.uint8)

    def strip(columns: slice) -> list[float]:
        floats = checked(matrix[:, columns])
        scaled = floats if scales is None else floats * scales[:, None]
        found = _codes(floats, scaled, form, statistics)
        codes[:, columns], grid[:, columns] = found[:2]
        if zero_points is not None and found[2] is not None:
            zero_points[:, columns] = found[2]
        difference = dequantize_blocks(*found, form)
        _check_type_holds(difference, matrix.dtype)
        difference -= scaled
        return _squares(floats, scaled, difference, statistics)

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        sums = np.sum(list(pool.map(strip, _strips(k, n, form, feedback is not None))), axis=0)
    weight, output = np.sqrt(sums[:4:2] / np.where(sums[1:4:2] > 0, sums[1:4:2], 1)).tolist()
    if weight > _LOST and matrix.dtype.name != form.scale_type == "float16":
        raise QuantizationError(
            "its scales are below float16's least number; leave out scale_type"
        )
    measured = (math.nan, math.nan) if statistics is None else (output, float(sums[4]))
    return WeightCodes(codes, grid, zero_points, scales, weight, *measured)


def _codes(
    floats: Floats,
    scaled: Floats,
    form: BlockFormat,
    statistics: ActivationStatistics | None,
) -> tuple[Codes, Floats, ZeroPoints | None]:
    """Quantise columns; ``scaled`` are those times the scales."""
    if statistics is not None and statistics.feedback is not None:
        residual = None if statistics.drift is None else statistics.drift @ floats
        return statistics.feedback.quantize(scaled, form, residual)
    counts = statistics is not None and statistics.gram is not None
    return search_blocks(scaled, form, statistics.energy if statistics and counts else None)


def _squares(
    floats: Floats,
    scaled: Floats,
    difference: Floats,
    statistics: ActivationStatistics | None,
) -> list[float]:
    """Return squares: of errors and the weight, of errors and the product for each token.

    The last of five is the product's error by the energy of the channels.
    """
    error = wanted_square = added = 0.0
    if statistics is not None:
        sample = statistics.tokens
        product = wanted = sample @ scaled
        if statistics.float_tokens is not None:
            wanted = statistics.float_tokens @ floats
        error = _square(sample @ difference + (product - wanted)) / len(sample)
        wanted_square = _square(wanted) / len(sample)
        if statistics.gram is not None:
            added = float(statistics.energy @ np.square(difference).sum(axis=1))
        if statistics.scales is not None:
            difference /= statistics.scales[:, None]
    return [_square(difference), _square(floats), error, wanted_square, added]


def checked(matrix: npt.NDArray[Any]) -> Floats:
    """Return a copy in float32; a QuantizationError where it holds NaN or infinite values."""
    copy = np.ascontiguousarray(matrix, np.float32)
    if not np.isfinite(copy).all():
        raise QuantizationError("it holds NaN or infinite values")
    return copy


def _check_type_holds(matrix: Floats, dtype: np.dtype[Any]) -> None:
    """Refuse codes of a weight that stand for a matrix beyond its type."""
    with np.errstate(over="ignore"):
        if not np.isfinite(matrix.astype(dtype, copy=False)).all():
            raise QuantizationError(
                f"its codes stand for numbers beyond {dtype}: take more bits, or grid 'amax'"
            )


def _strips(k: int, n: int, form: BlockFormat, by_rows: bool) -> Iterator[slice]:
    size, columns = _STRIP_BYTES, n + 7
    if by_rows:
        most = _CANDIDATES // (len(RATIOS) * min(form.size_along(k), k))
        size, columns = _GPTQ_STRIP_BYTES, int(np.clip(most, *_GPTQ_COLUMNS))
    width = max(8, min(size // (4 * k), columns) // 8 * 8)
    for start in range(0, n, width):
        yield slice(start, min(start + width, n))


def _square(array: npt.NDArray[Any]) -> float:
    """Return the sum of squares of a matrix, which float32 may not hold."""
    return float(np.einsum("ij,ij->", array, array, dtype=np.float64))
