# SPDX-License-Identifier: MIT
"""Masks that the values are evaluated under that a model computes from its mask.

What such values show at padded positions only suggests what the rewritten graph asks of each
batch (:mod:`.questions`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rewrite_rules.remarks import Refusal
from rewrite_rules.trim_padding import token_axes
from rewrite_rules.trim_padding.questions import How, Questions, places_of
from rewrite_rules.trim_padding.token_axes import BATCH, UNFIT, Axes, Axis

Array = NDArray[Any]
# Size of what is neither batch nor sequence.
_OTHER = 17
# Lengths of rows, and the length with their padding.
_ROWS = (((3, 8, 1, 11), 13), ((1, 1), 9))


class SampleMasks:
    """Masks, bool ``[batch, length]``, one for each run."""

    def __init__(self, masks: Iterable[NDArray[np.bool_]]) -> None:
        self.masks = list(masks)
        self._asked = [Questions.of_array(mask) for mask in self.masks]

    @classmethod
    def usual(cls, one_row: bool) -> SampleMasks:
        """Return several, of one row each if asked for."""
        masks = list[NDArray[np.bool_]]()
        for lengths, padded in _ROWS:
            mask = np.arange(padded) < np.array(lengths)[:, None]
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
            yield (5 * np.arange(len(mask)) + 3) % mask.sum(axis=1)

    def seen(self, arrays: Sequence[Array], how: How) -> list[Array]:
        """Return numbers as a node reads them."""
        return [asked.seen(array, how) for asked, array in self._each(arrays)]

    def flagged(self, arrays: Sequence[Array], axes: Axes) -> Axes:
        """Mark the sequence along which padded positions are zero, low or set by the mask."""
        if (BATCH,) not in axes and any(len(mask) > 1 for mask in self.masks):
            return token_axes.marked(axes, wild=not are_finite(arrays))
        if any(
            a.shape[i] != m.shape[1]
            for a, m in zip(arrays, self.masks, strict=True)
            for i in places_of(axes)
        ):
            raise Refusal(*UNFIT)
        found = {place: self._flags(arrays, axes, place) for place in places_of(axes)}
        return tuple((found[i],) if i in found else axis for i, axis in enumerate(axes))

    def is_open(self, arrays: Sequence[Array], axes: Axes) -> bool:
        """Return whether no position is hidden, real or not, where it is beside itself."""
        return all(asked.opens(array, axes).all() for asked, array in self._each(arrays))

    def _each(self, arrays: Sequence[Array]) -> Iterator[tuple[Questions, Array]]:
        return zip(self._asked, arrays, strict=True)

    def _flags(self, arrays: Sequence[Array], axes: Axes, place: int) -> token_axes.Sequence:
        def all_say(question: Callable[..., Any]) -> bool:
            asked = self._each(arrays)
            return all(question(each, array, axes, place).all() for each, array in asked)

        zero, low = all_say(Questions.zero), all_say(Questions.low)
        # Two positions come after the longest row.
        ends = [[array.take([i], place) for i in (-2, -1)] for array in arrays]
        same = all((one == other).all() for one, other in ends)
        changes = any((a != end).any() for a, (_, end) in zip(arrays, ends, strict=True))
        set_by_mask = low or (same and changes and not zero)
        return token_axes.Sequence(zero, low, set_by_mask, low or not are_finite(arrays))


def are_finite(arrays: Iterable[Array]) -> bool:
    """Return whether all numbers are finite."""
    return all(np.isfinite(array).all() for array in arrays if array.dtype.kind == "f")
