# SPDX-License-Identifier: MIT
"""Masks that the values are evaluated under that a model computes from its mask.

What such values show at padded positions only suggests what the rewritten graph asks of each
batch (:mod:`.whole_values`).
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rewrite_rules.trim_padding import token_axes
from rewrite_rules.trim_padding.token_axes import BATCH, Axes, Axis, sequences_of

Array = NDArray[Any]
Mask = NDArray[np.bool_]
# What hides a score, and how far others may be from 0: exp(-750) is 0 in every float type,
# also after products of ordinary size were added.
LOW, ORDINARY = -1000.0, 250.0
# Size of what is neither batch nor sequence.
_OTHER = 17
# Rows as digits, and the length with their padding.
_ROWS = ((("111", "1" * 8, "00111111", "1001001"), 13), (("1", "1"), 9))


class SampleMasks:
    """Masks, bool ``[batch, length]``, one for each run."""

    def __init__(self, masks: Iterable[Mask]) -> None:
        self.masks = list(masks)

    @classmethod
    def usual(cls, one_row: bool) -> SampleMasks:
        """Return several, of one row each if asked for."""
        masks = list[Mask]()
        for texts, length in _ROWS:
            mask = np.array([[*map(int, row.ljust(length, "0"))] for row in texts], np.bool_)
            masks += np.split(mask, len(mask)) if one_row else [mask]
        return cls(masks)

    def size(self, axis: Axis, run: int) -> int:
        batch, length = self.masks[run].shape
        sizes = {token_axes.Sequence(): length, BATCH: batch}
        factors = token_axes.plain([axis])[0]
        return math.prod(f if isinstance(f, int) else sizes.get(f, _OTHER) for f in factors)

    def real_positions(self) -> Iterator[NDArray[np.int64]]:
        """Yield a real position of each row, for every run."""
        for mask in self.masks:
            yield np.array([np.flatnonzero(row)[(5 * i + 3) % row.sum()]
                            for i, row in enumerate(mask)])  # fmt: skip

    def of_first(self, arrays: Sequence[Array]) -> tuple[SampleMasks, list[Array]]:
        """Return masks that have all padding behind, and what was computed from them."""
        pairs = zip(self.masks, arrays, strict=True)
        kept = [(mask, array) for mask, array in pairs if (mask[:, :-1] >= mask[:, 1:]).all()]
        return SampleMasks(mask for mask, _ in kept), [array for _, array in kept]

    def flagged(self, arrays: Sequence[Array], axes: Axes) -> Axes:
        """Mark the sequence along which padded positions are zero, low or one value."""
        places = [i for i, axis in enumerate(axes) if sequences_of(axis)]
        batch = axes.index((BATCH,)) if (BATCH,) in axes else None
        if batch is None and any(len(mask) > 1 for mask in self.masks):
            return axes
        real = [self._real(places, batch, run, len(axes)) for run in range(len(arrays))]
        found = {place: self._flags(place, arrays, real) for place in places}
        return tuple((found[i],) if i in found else axis for i, axis in enumerate(axes))

    def is_open(self, arrays: Iterable[Array], axes: Axes) -> bool:
        """Return whether no position is hidden, real or not, where it is beside itself."""
        places = [i for i, axis in enumerate(axes) if sequences_of(axis)]
        hidden = [_below(array, -ORDINARY) & _diagonal(places, array) for array in arrays]
        shown = [array > ORDINARY for array in arrays if array.dtype != np.bool_]
        return not any(wrong.any() for wrong in (*hidden, *shown))

    def _real(
        self, places: list[int], batch: int | None, run: int, rank: int
    ) -> dict[int, Mask]:
        """Return masks of real entries for each axis of the sequence."""
        result = {}
        for place in places:
            mask = self.masks[run] if batch is None or batch < place else self.masks[run].T
            mask = mask[0] if batch is None else mask
            others = [axis for axis in range(rank) if axis not in (place, batch)]
            result[place] = np.expand_dims(mask, others)
        return result

    def _flags(
        self, place: int, arrays: Sequence[Array], masks: list[dict[int, Mask]]
    ) -> token_axes.Sequence:
        is_bool = arrays[0].dtype == np.bool_
        zero = low = high = same = True
        changes = False
        for array, real, mask in zip(arrays, masks, self.masks, strict=True):
            others = _all_of(one for other, one in real.items() if other != place)
            padded = array[np.broadcast_to(others & ~real[place], array.shape)]
            beside = array[np.broadcast_to(_itself(real, array), array.shape)]
            zero = zero and not padded.any()
            if is_bool:
                low = low and not padded.any() and bool(beside.all())
                high = high and bool(padded.all()) and not beside.any()
            else:
                low = low and bool((padded < LOW).all() and not (beside < -ORDINARY).any())
                high = False
            behind = int(np.flatnonzero(mask.any(axis=0)).max()) + 1
            last = array.take([-1], place)
            same = same and bool(
                (array.take(range(behind, mask.shape[1]), place) == last).all()
            )
            changes = changes or bool((array != last).any())
        set_by_mask = low or (same and changes and not zero)
        return token_axes.Sequence(zero, low, high, same, set_by_mask)


def _below(array: Array, bound: float) -> Mask:
    return ~array if array.dtype == np.bool_ else array < bound


def _itself(real: dict[int, Mask], array: Array) -> Mask:
    """Return where a real position is beside itself."""
    return _all_of(real.values()) & _diagonal([*real], array)


def _diagonal(places: list[int], array: Array) -> Mask:
    result: Mask = np.asarray(True)
    for other in places[1:]:
        size, shape = array.shape[other], [1] * array.ndim
        shape[places[0]] = shape[other] = size
        result = result & np.eye(size, dtype=np.bool_).reshape(shape)
    return result


def _all_of(masks: Iterable[Mask]) -> Mask:
    return functools.reduce(operator.and_, masks, np.asarray(True))
