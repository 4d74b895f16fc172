# SPDX-License-Identifier: MIT
"""What a value has to show at padded positions: written once, asked twice.

Of sample masks, what is computed from them suggests what a value is for; the rewritten graph
asks it of each batch. ``op`` computes arrays or writes nodes.
"""

from __future__ import annotations

import enum
from typing import Any

import numpy as np

from rewrite_rules.trim_padding.token_axes import BATCH, Axes, sequences_of

# What hides a score, and how far others may be from 0: exp(-750) is 0 in every float type,
# also after products of ordinary size were added.
LOW, ORDINARY = -1000.0, 250.0


class How(enum.Enum):
    """How a node reads a mask."""

    NUMBERS = enum.auto()  # as it is: added to scores, or hiding those that are False
    HIDES = enum.auto()  # those that are True are hidden
    ABOVE_0 = enum.auto()  # keys count that are above 0
    COUNT = enum.auto()  # as many keys count, ``[batch]``


class Arrays:
    """The operators that questions need, of arrays."""

    And, Or, Xor, Not = np.logical_and, np.logical_or, np.logical_xor, np.logical_not
    Equal, Less, Greater, Where = np.equal, np.less, np.greater, staticmethod(np.where)

    def is_bool(self, value: Any) -> bool:
        return bool(value.dtype == np.bool_)

    def true(self, value: Any) -> Any:
        return value.astype(np.bool_)

    def int64(self, value: Any) -> Any:
        return value.astype(np.int64)

    def number(self, like: Any, number: float) -> float:
        return number

    def spread(self, value: Any, axes: list[int]) -> Any:
        return np.expand_dims(value, axes)

    def turned(self, value: Any) -> Any:
        return value.T

    def row(self, value: Any) -> Any:
        return value.all(axis=0)


def places_of(axes: Axes) -> list[int]:
    """Return which axes are the sequence."""
    return [i for i, axis in enumerate(axes) if sequences_of(axis)]


class Questions:
    """Questions about values, bool where each holds.

    A value has ``axes``, of which that at ``place`` is the sequence.
    """

    def __init__(self, op: Any, real: Any, positions: Any) -> None:
        """Take the real positions, ``[batch, length]``, and all."""
        self._op, self._real, self._positions = op, real, positions

    @classmethod
    def of_array(cls, mask: Any) -> Questions:
        return cls(Arrays(), mask, np.arange(mask.shape[1]))

    def seen(self, value: Any, how: How) -> Any:
        """Return a value as a node reads it."""
        op = self._op
        match how:
            case How.NUMBERS:
                return value
            case How.HIDES:
                return op.Not(value)
            case How.ABOVE_0:
                return op.Greater(value, op.number(value, 0))
        return op.Less(self._positions, op.spread(op.int64(value), [1]))

    def low(self, value: Any, axes: Axes, place: int) -> Any:
        """Whether padding is hidden, and no real position where it is beside itself."""
        op, (elsewhere, itself) = self._op, self._places(axes, place)
        bound = op.Where(itself, op.number(value, -ORDINARY), op.number(value, LOW))
        holds = op.Xor(self._below(value, bound), itself)
        return holds if elsewhere is itself else op.Or(holds, op.Xor(elsewhere, itself))

    def zero(self, value: Any, axes: Axes, place: int) -> Any:
        """Whether padding is 0, where other axes are at real positions."""
        elsewhere, _ = self._places(axes, place)
        return self._op.Or(self._op.Not(self._op.true(value)), elsewhere)

    def opens(self, value: Any, axes: Axes) -> Any:
        """Whether each position sees itself, real or not, and none shows what is hidden."""
        op, (first, *others) = self._op, places_of(axes) or [0]
        hidden = self._below(value, op.number(value, -ORDINARY))
        for other in others:
            hidden = op.And(hidden, self._diagonal(len(axes), first, other))
        if not op.is_bool(value):
            hidden = op.Or(hidden, op.Greater(value, op.number(value, ORDINARY)))
        return op.Not(hidden)

    def _below(self, value: Any, bound: Any) -> Any:
        is_bool = self._op.is_bool(value)
        return self._op.Not(value) if is_bool else self._op.Less(value, bound)

    def _places(self, axes: Axes, place: int) -> tuple[Any, Any]:
        """Return where it is real along an axis, or not along others; and beside itself."""
        op = self._op
        elsewhere = itself = self.along(axes, place)
        for other in places_of(axes):
            if other != place:
                real = self.along(axes, other)
                elsewhere = op.Or(elsewhere, op.Not(real))
                beside = self._diagonal(len(axes), place, other)
                itself = op.And(op.And(itself, real), beside)
        return elsewhere, itself

    def along(self, axes: Axes, place: int) -> Any:
        """Return which positions are real, with the axes of a value."""
        op, mask = self._op, self._real
        at = [axes.index((BATCH,)), place] if (BATCH,) in axes else [place]
        if len(at) == 1:
            mask = op.row(mask)
        elif at[0] > place:
            mask = op.turned(mask)
        return op.spread(mask, [i for i in range(len(axes)) if i not in at])

    def _diagonal(self, rank: int, *places: int) -> Any:
        each = (
            self._op.spread(self._positions, [i for i in range(rank) if i != at])
            for at in places
        )
        return self._op.Equal(*each)
