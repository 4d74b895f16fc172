# SPDX-License-Identifier: MIT
"""Differences between arrays: how far they are apart, and where they exceed a tolerance.

With the reference a and the other b, over all elements and samples:

    max_abs       max |b - a|
    relative_rms  sqrt(sum |b - a|^2 / sum |a|^2)
    cosine        a . b / (|a| |b|)

NaN equals NaN, and an infinity equals itself. Compared with anything else, they are infinitely
far away, and the cosine is 0.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

# Elements at a time: differences are computed in float64, and values may fill the memory.
_SLICE = 1 << 20


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far the values of one name are apart; a is the reference.

    Attributes:
        name: The name of the value.
        dtype: The type of a.
        shape: The shape of a in the last sample.
        max_abs: The greatest absolute difference.
        relative_rms: sqrt(sum |b - a|^2 / sum |a|^2).
        cosine: The cosine between both.
        mismatch: Why they could not be compared element by element; empty if they were.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    max_abs: float
    relative_rms: float
    cosine: float
    mismatch: str = ""

    def __str__(self) -> str:
        """Return the figures, or why there are none."""
        if self.mismatch:
            return self.mismatch
        return (
            f"max abs error {self.max_abs:.3g}, relative RMS {self.relative_rms:.3g}, "
            f"cosine {self.cosine:.7f}"
        )


class DifferenceSum:
    """Adds up what makes a :class:`Difference`, sample by sample."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._dtype, self._shape, self._mismatch = "", (), ""
        self._max_abs = self._error = 0.0
        self._energy_a = self._energy_b = self._product = 0.0

    def add(self, a: npt.NDArray[Any], b: npt.NDArray[Any]) -> None:
        """Take in one sample; other shapes or kinds of type end the comparison."""
        self._dtype, self._shape = str(a.dtype), a.shape
        self._mismatch = self._mismatch or _shape_mismatch(a, b)
        if self._mismatch:
            return
        for x, y, d in _slices(a, b):
            self._max_abs = max(self._max_abs, float(d.max()))
            finite = np.isfinite(x) & np.isfinite(y)
            with np.errstate(over="ignore"):
                self._error += float(np.square(d).sum())
            x, y = np.where(finite, x, 0.0), np.where(finite, y, 0.0)
            with np.errstate(over="ignore"):
                self._energy_a += float(np.square(x).sum())
                self._energy_b += float(np.square(y).sum())
                self._product += float((x * y).sum())

    def result(self) -> Difference:
        """Return what all samples add up to."""
        if self._mismatch:
            rms, cosine, self._max_abs = math.inf, 0.0, math.inf
        else:
            # A reference of zeros has no energy: the error counts as it is.
            rms = math.sqrt(self._error / (self._energy_a or 1.0))
            lengths = math.sqrt(self._energy_a) * math.sqrt(self._energy_b)
            if self._error == 0:
                cosine = 1.0
            elif lengths == 0 or not math.isfinite(self._error) or not math.isfinite(lengths):
                cosine = 0.0
            else:
                cosine = max(-1.0, min(1.0, self._product / lengths))
        kind = self._name, self._dtype, self._shape
        return Difference(*kind, self._max_abs, rms, cosine, self._mismatch)


def find_violation(
    name: str,
    sample: int,
    a: npt.NDArray[Any],
    b: npt.NDArray[Any],
    rtol: float,
    atol: float | None,
) -> tuple[int, str] | None:
    """Return at how many elements ``|b - a| > atol + rtol * |a|``, and what a test prints.

    None if there are none.

    By default, atol is ``rtol`` times the greatest finite magnitude of a: elements near 0 are
    sums of greater ones and have their errors.

    Integers with 32 and 64 bits (ids, indices, counts), booleans and strings are not rounded,
    so rtol does not apply to them: without atol they must be equal.
    """
    total = DifferenceSum(name)
    total.add(a, b)
    difference = total.result()
    where = f"output {name!r} of sample {sample}"
    if difference.mismatch:
        return a.size, f"{where}: {difference.mismatch}"
    if _is_exact(a) and _is_exact(b):
        rtol = 0.0
    if atol is None:
        finite = (x[np.isfinite(x)] for x, _, _ in _slices(a, b))
        atol = rtol * max((float(np.abs(x).max(initial=0.0)) for x in finite), default=0.0)
    count, worst, excess, bound_there, offset = 0, 0, 0.0, 0.0, 0
    for x, _, d in _slices(a, b):
        bound = atol + rtol * np.where(np.isfinite(x), np.abs(x), 0.0)
        over = d - bound
        count += int((over > 0).sum())
        place = int(over.argmax())
        if over[place] > excess:
            worst, excess = offset + place, float(over[place])
            bound_there = float(bound[place])
        offset += x.size
    if not count:
        return None
    index = tuple(map(int, np.unravel_index(worst, a.shape)))
    return count, (
        f"{where}: {count} of {a.size} elements differ by more than they may\n"
        f"  worst at {[*index]}: a = {a[index]}, b = {b[index]}, bound {bound_there:.3g}\n"
        f"  {difference}"
    )


def _shape_mismatch(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> str:
    """Return why two arrays cannot be compared element by element; empty if they can."""
    if a.shape != b.shape:
        return f"shape {list(a.shape)} in a, {list(b.shape)} in b"
    if _is_text(a) != _is_text(b):
        return f"{a.dtype} in a, {b.dtype} in b"
    return ""


def _is_text(array: npt.NDArray[Any]) -> bool:
    return array.dtype.kind in "OUS"


def _is_integer(array: npt.NDArray[Any]) -> bool:
    return array.dtype.kind in "iu"


def _is_exact(array: npt.NDArray[Any]) -> bool:
    wide = _is_integer(array) and array.dtype.itemsize >= 4
    return wide or array.dtype.kind == "b" or _is_text(array)


def _slices(
    a: npt.NDArray[Any], b: npt.NDArray[Any]
) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]]:
    """Yield the elements of a and b and their distance, all in float64, slice by slice.

    Strings count as 1, and those of b as 0 where they differ.
    """
    flat_a, flat_b = a.ravel(), b.ravel()
    for start in range(0, a.size, _SLICE):
        x, y = flat_a[start : start + _SLICE], flat_b[start : start + _SLICE]
        if _is_text(a):
            equal = (x == y).astype(np.float64)
            yield np.ones(x.size), equal, 1 - equal
            continue
        rounded = x.astype(np.float64), y.astype(np.float64)
        distance = _distance(*rounded)
        if _is_integer(a) and _is_integer(b):  # float64 does not tell all above 2**53 apart
            distance = np.where(x == y, 0.0, np.maximum(distance, 1.0))
        yield *rounded, distance


def _distance(x: npt.NDArray[Any], y: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return |y - x|: 0 for the same infinity or NaN in both, infinite for it in one."""
    with np.errstate(invalid="ignore", over="ignore"):
        d = np.abs(y - x)
    same = (x == y) | (np.isnan(x) & np.isnan(y))
    return np.where(same, 0.0, np.where(np.isnan(d), np.inf, d))
