# SPDX-License-Identifier: MIT
"""Codes of a weight in blocks along K: their format, and rounding to nearest; numpy only.

Symmetric grids. With e the element of greatest magnitude of a block, sign included,

    "extreme"   scale = e / -2**(bits - 1)
    "positive"  scale = max(greatest / (2**(bits - 1) - 1), least / -2**(bits - 1))
    "amax"      scale = |e| / (2**(bits - 1) - 1)
    codes = clip(rint(w / scale), -2**(bits - 1), 2**(bits - 1) - 1)

"extreme" puts e itself at the grid's longer end, and its scale may be negative. It has one
code more to use: on SmolLM2-135M, int4, blocks of 32, the perplexity is 29.3 and not 32.5.

Asymmetric grid. With the range [lo, hi] of a block stretched to include 0,

    scale = (hi - lo) / (2**bits - 1)   zero_point = rint(-lo / scale)
    codes = clip(rint(w / scale) + zero_point, 0, 2**bits - 1)

Without the stretch a block of weights that are all far from 0 has a zero point outside of the
codes, and clipping that one moves every weight.

Searched scales, of all grids but "amax", below 8 bits: the range is tried at a few ratios, an
asymmetric one also with the neighbouring zero points, each with the scale that then fits its
codes, less the zero point, best,

    scale = sum(|w| q w) / sum(|w| q q)     the least sum of |w| (scale q - w)**2

Great weights count more, as in llama.cpp's k-quants; their w**2 is more than pays.
SmolLM2-135M (perplexity of 20,480 tokens) and MiniLM-L6 (cosine), int4, blocks of

                             32      128         32      128
    the formulas above    29.30    32.98      .9675    .9484
    by |w|                28.14    31.44      .9694    .9505

Where samples give the mean square of each input channel, H[k, k], that takes the place of |w|.
After AWQ's scales, MiniLM-L6 in blocks of 32: .9795, and .9766 with the formulas above; the KL
divergence of SmolLM2-135M with two of its layers quantised falls by a third. Without samples,
norm weights squared do not stand in for it: they say little of the energy of later layers.

A ratio r < 1 for a block shrinks its range: e, lo and hi become r times as large, and weights
outside of them are clipped.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ortplugins.errors import QuantizationError

# Ratios that a block's range is tried at; of those with equal errors the first wins.
_RATIOS = (1.0, 0.95, 0.9, 0.85, 1.05)
_SHIFTS = (0, -1, 1)  # of a zero point
# Floats of a strip of a block: what stays in the cache.
_STRIP = 1 << 16

Floats = npt.NDArray[np.float32]
Codes = npt.NDArray[np.integer[Any]]
ZeroPoints = npt.NDArray[np.uint8]

# A smaller scale is raised to this: in float32 to the least normal number, below which digits
# are lost; in float16 to the least number at all, since 0 divides by zero.
_MIN_SCALE = {
    "float32": np.float32(np.finfo(np.float32).tiny),
    "float16": np.float32(np.finfo(np.float16).smallest_subnormal),
}

GRIDS = ("extreme", "positive", "amax")


@dataclasses.dataclass(frozen=True)
class BlockFormat:
    """How a weight ``[K, N]`` is quantised in blocks of contiguous elements along K.

    Attributes:
        bits: 4 or 8.
        block_size: Elements along K that share a scale; K need not be a multiple of it. -1
            stands for the whole of K: a scale per column.
        is_symmetric: Signed codes without zero points; else unsigned ones with.
        grid: Of symmetric codes. ``"extreme"`` maps the element of greatest magnitude, sign
            included, to ``-2**(bits - 1)``; ``"positive"`` has the least positive scale that
            reaches all elements; ``"amax"`` maps the greatest magnitude to
            ``2**(bits - 1) - 1``. Scales of ``"amax"``, asymmetric ones as well, are those of
            the formulas, and never searched.
        scale_type: ``"float32"`` or ``"float16"``, the type that scales are stored in; float16
            for a weight of that type, and where a kernel wants the weight's type, that. Codes
            are computed with the scale that is stored, behind a Cast that onnxruntime folds.

    Raises:
        QuantizationError: If a value is none of these.
    """

    bits: int = 4
    block_size: int = 32
    is_symmetric: bool = True
    grid: str = "extreme"
    scale_type: str = "float32"

    def __post_init__(self) -> None:
        for name in ("bits", "block_size"):  # of Python: numpy's overflow
            self._expect(name, hasattr(value := getattr(self, name), "__index__"), "an int")
            object.__setattr__(self, name, operator.index(value))
        size = self.block_size
        self._expect("bits", self.bits in (4, 8), "4 or 8")
        fits = size == -1 or 0 < size < 1 << 31
        self._expect("block_size", fits, "1 to 2147483647, or -1 for K")
        # A word from the command line, "False" among them, would count as true.
        self._expect("is_symmetric", self.is_symmetric in (False, True), "true or false")
        self._expect("grid", self.grid in GRIDS, f"one of {', '.join(GRIDS)}")
        self._expect("scale_type", self.scale_type in [*_MIN_SCALE], "float32 or float16")

    def _expect(self, field: str, fits: bool, expected: str) -> None:
        """Refuse a value that does not fit."""
        if not fits:
            value = getattr(self, field)
            raise QuantizationError(f"{field} is {value!r}; expected {expected}")

    def size_along(self, k: int) -> int:
        """Return the block size for a weight of ``k`` rows, ``k`` where it is -1."""
        return k if self.block_size == -1 else self.block_size

    def blocks(self, k: int) -> int:
        """Return the number of blocks of a weight of ``k`` rows; the last may be short."""
        return -(-k // self.size_along(k))

    def stored_bytes(self, k: int, n: int) -> int:
        """Return the bytes that codes, scales and zero points of ``[k, n]`` take."""
        blocks = self.blocks(k) * n
        zero_points = 0 if self.is_symmetric else -(-blocks * self.bits // 8)
        scales = blocks * np.dtype(self.scale_type).itemsize
        return -(-k * n * self.bits // 8) + scales + zero_points

    @property
    def lowest_code(self) -> int:
        """The smallest code."""
        return -(1 << (self.bits - 1)) if self.is_symmetric else 0

    @property
    def highest_code(self) -> int:
        """The greatest code."""
        return self.lowest_code + (1 << self.bits) - 1

    @property
    def code_dtype(self) -> np.dtype[np.int8] | np.dtype[np.uint8]:
        """Type of codes, a byte each: int8 when symmetric, else uint8."""
        return np.dtype(np.int8) if self.is_symmetric else np.dtype(np.uint8)


def quantize_blocks(
    weight: npt.NDArray[Any], form: BlockFormat
) -> tuple[Codes, Floats, ZeroPoints | None]:
    """Quantise a weight to the nearest codes.

    ``(codes - zero_points) * scales`` is within half a step, ``|scale| / 2``, of the weight.
    One exception: the grid "extreme" has no code for the opposite of a block's extreme, so
    there, at code ``2**(bits - 1) - 1``, it is within a whole step. Zeros stay exact.

    Args:
        weight: Float ``[K, N]``.
        form: Bits, block size and grid.

    Returns:
        Codes ``[K, N]``, a byte each: int8 when symmetric, else uint8. Scales, float32
        ``[blocks, N]``, each a number of the format's ``scale_type``. Zero points, uint8
        ``[blocks, N]``; None when symmetric.

    Raises:
        QuantizationError: If the weight is not of rank 2, holds NaN or infinity, or is too
            large for the type of the scales.
    """
    scales, zero_points = block_grid(weight, form)
    return round_to_grid(weight, scales, zero_points, form), scales, zero_points


def search_blocks(
    weight: npt.NDArray[Any], form: BlockFormat, energy: Floats | None = None
) -> tuple[Codes, Floats, ZeroPoints | None]:
    """Quantise a weight as :func:`quantize_blocks`, with searched scales where there are such.

    The sum of ``|w| ((codes - zero_points) * scales - w)**2`` is not greater for any block,
    but for the rounding of scales to their type; with ``energy``, the mean square of each
    input channel ``[K]``, that of ``energy`` in the place of ``|w|``. Codes need not be the
    nearest to ``w / scale``.
    """
    scales, zero_points = block_grid(weight, form)
    if form.bits == 8 or form.grid == "amax":
        return round_to_grid(weight, scales, zero_points, form), scales, zero_points
    k, n = weight.shape
    size = form.size_along(k)
    codes = np.empty((k, n), form.code_dtype)
    width = max(64, _STRIP // size)
    for block in range(form.blocks(k)):
        rows = slice(block * size, min((block + 1) * size, k))
        for left in range(0, n, width):
            columns = slice(left, left + width)
            part = np.ascontiguousarray(weight[rows, columns], np.float32)
            importance = np.abs(part) if energy is None else energy[rows, None]
            zeros = None if zero_points is None else zero_points[block, columns]
            found = _best_scales(part, scales[block, columns], zeros, form, importance)
            codes[rows, columns], scales[block, columns], best = found
            if zero_points is not None:
                zero_points[block, columns] = best.astype(np.uint8)
    return codes, stored_scales(scales, form), zero_points


def _best_scales(
    block: Floats,
    scales: Floats,
    zeros: ZeroPoints | None,
    form: BlockFormat,
    importance: Floats,
) -> tuple[Floats, Floats, Floats]:
    """Return codes ``[rows, n]``, scales and zero points ``[n]`` of a block.

    The search starts from the scales and zero points of ratio 1.
    """
    middle = np.zeros_like(scales) if zeros is None else zeros.astype(np.float32)
    low, high = np.float32(form.lowest_code), np.float32(form.highest_code)
    # In steps, and of the greatest importance, so that no square overflows.
    steps = block / scales
    importance = importance / np.maximum(importance.max(axis=0), _MIN_SCALE["float32"])
    best, ratios, factors = np.zeros_like(scales), np.ones_like(scales), np.ones_like(scales)
    chosen = middle
    codes, weighted = np.empty_like(steps), np.empty_like(steps)
    for ratio, shift in itertools.product(_RATIOS, (0,) if zeros is None else _SHIFTS):
        zero = np.clip(middle + np.float32(shift), low, high) if shift else middle
        np.multiply(steps, np.float32(1 / ratio), out=codes)
        np.rint(codes, out=codes)
        np.clip(codes, low - zero, high - zero, out=codes)
        np.multiply(importance, codes, out=weighted)
        fit = np.einsum("kn,kn->n", weighted, steps)
        energy = np.einsum("kn,kn->n", weighted, codes)
        factor = fit / np.where(energy > 0, energy, 1)
        # What the best scale for these codes takes off the sum of |w|**3. Where it would be
        # raised to the least one of its type, it does not.
        is_stored = abs(scales * factor) >= _MIN_SCALE[form.scale_type]
        better = (fit * factor > best) & is_stored
        best[better], ratios[better] = (fit * factor)[better], 1 / ratio
        factors[better] = factor[better]
        chosen = np.where(better, zero, chosen)
    np.rint(steps * ratios, out=codes)
    np.clip(codes, low - chosen, high - chosen, out=codes)
    codes += chosen
    return codes, scales * factors, chosen


def block_grid(
    weight: npt.NDArray[Any], form: BlockFormat, ratios: Floats | None = None
) -> tuple[Floats, ZeroPoints | None]:
    """Return the scales and zero points of :func:`quantize_blocks`.

    ``ratios``, float32 ``[blocks, N]``, are what each block's range shrinks by; None for 1.
    """
    if weight.ndim != 2 or 0 in weight.shape:
        raise QuantizationError(f"the weight has shape {list(weight.shape)}; expected [K, N]")
    # What fills up the last block changes no grid: all have a code for 0.
    blocks = _in_blocks_of(form, weight)
    low, high = (end.astype(np.float32) for end in (blocks.min(axis=1), blocks.max(axis=1)))
    if not (np.isfinite(high).all() and np.isfinite(low).all()):  # NaN passes max and min
        raise QuantizationError("the weight holds NaN or infinite values")
    if ratios is not None:
        low, high = low * ratios, high * ratios
    if not form.is_symmetric:
        steps = np.float32(form.highest_code)
        low, high = low.clip(max=0), high.clip(min=0)  # every range holds 0
        # Two quotients, not one: the difference of two finite numbers may be infinite.
        scales = stored_scales(high / steps - low / steps, form)
        # A scale that was rounded down to its type may lead past the last code.
        zero_points = np.rint(-low / scales).clip(max=form.highest_code)
        return scales, zero_points.astype(np.uint8)
    if form.grid == "amax":
        end, code = np.maximum(high, -low), form.highest_code
    elif form.grid == "positive":
        scales = np.maximum(high / np.float32(form.highest_code), low / form.lowest_code)
        return stored_scales(scales, form), None
    else:  # a negative scale puts the grid's longer end at the extreme
        end, code = np.where(high > -low, high, low), form.lowest_code
    return stored_scales(end / np.float32(code), form), None


def candidate_grids(
    block: Floats, ratios: Sequence[float] | Floats, form: BlockFormat
) -> tuple[Floats, ZeroPoints | None]:
    """Return scales and zero points ``[ratios, n]`` of one block ``[rows, n]``."""
    n = block.shape[1]
    # All that a grid depends on are the least and the greatest element.
    ends = np.stack([block.min(axis=0), block.max(axis=0)])
    scales, zeros = block_grid(
        np.tile(ends, len(ratios)),
        dataclasses.replace(form, block_size=-1),
        np.repeat(np.array(ratios, np.float32), n)[None],
    )
    return scales.reshape(-1, n), None if zeros is None else zeros.reshape(-1, n)


def round_to_grid(
    weight: npt.NDArray[Any],
    scales: Floats,
    zero_points: ZeroPoints | None,
    form: BlockFormat,
) -> Codes:
    """Return the codes ``[K, N]`` nearest to a weight on a given grid; types as above."""
    k, n = weight.shape
    blocks = _in_blocks_of(form, weight) / scales[:, None]
    np.rint(blocks, out=blocks)
    if zero_points is not None:
        blocks += zero_points[:, None]
    np.clip(blocks, form.lowest_code, form.highest_code, out=blocks)
    return blocks.reshape(-1, n)[:k].astype(form.code_dtype)


def dequantize_blocks(
    codes: Codes, scales: Floats, zero_points: ZeroPoints | None, form: BlockFormat
) -> Floats:
    """Return ``(codes - zero_points) * scales``, float32 ``[K, N]``; float64 if scales are."""
    k, n = codes.shape
    whole = _in_blocks_of(form, codes).astype(np.result_type(scales, np.float32))
    if zero_points is not None:
        whole -= zero_points[:, None]
    with np.errstate(over="ignore"):  # callers refuse what the type does not hold
        whole *= scales[:, None]
    return whole.reshape(-1, n)[:k]


def in_blocks(weight: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
    """Return ``[blocks, size, N]``, the last block filled with zeros; a view if possible."""
    k, n = weight.shape
    if k % size == 0:
        return weight.reshape(-1, size, n)
    blocks = np.zeros((-(-k // size), size, n), weight.dtype)
    blocks.reshape(-1, n)[:k] = weight
    return blocks


def _in_blocks_of(form: BlockFormat, weight: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return ``[blocks, size, N]``; one block is not filled up."""
    return in_blocks(weight, min(form.size_along(len(weight)), len(weight)))


def stored_scales(scales: npt.NDArray[Any], form: BlockFormat) -> Floats:
    """Round scales to the type that they are stored in; none is 0 or infinite.

    Raises:
        QuantizationError: If one is too large for the type.
    """
    if form.scale_type == "float16":
        with np.errstate(over="ignore"):
            scales = scales.astype(np.float16).astype(np.float32)
        if np.isinf(scales).any():
            raise QuantizationError("a scale is beyond 65504, float16's greatest number")
    least = _MIN_SCALE[form.scale_type]
    return np.where(abs(scales) < least, least, scales).astype(np.float32, copy=False)
