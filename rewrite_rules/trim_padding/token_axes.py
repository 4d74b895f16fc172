# SPDX-License-Identifier: MIT
"""Axes of a tensor as products of factors, one of which may be the sequence.

    input_ids                      [batch, sequence]
    flattened for a Gemm           [batch sequence, 384]
    attention scores               [batch, 12, sequence, sequence]

Sizes are looked at in several runs at once (:class:`Runs`), some of which have the same rows
with and without their padding; a factor is told by its sizes in all of them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from rewrite_rules.remarks import Refusal


@dataclasses.dataclass(frozen=True)
class Sequence:
    """The sequence as a factor of an axis.

    Where all other sequence factors of the tensor are at real positions, and this one at a
    padded position, values are exactly 0 (``zero``), or so far below the others that a softmax
    makes 0 of them (``low``).
    """

    zero: bool = False
    low: bool = False


BATCH = "batch"
UNFIT = "has sizes that do not follow from the length: export with a dynamic one"
Factor = int | str | Sequence
# The factors in row-major order, without ones.
Axis = tuple[Factor, ...]
Axes = tuple[Axis, ...]
# A size in every run.
Sizes = tuple[int, ...]


class Runs:
    """The runs on which sizes are compared and masks evaluated, bool ``[batch, length]``.

    They come in pairs: rows with padding behind every row, and the same rows cut at the
    longest of them. ``batch`` and ``length`` are the sizes in every run.
    """

    def __init__(self, pairs: Iterable[tuple[NDArray[np.bool_], int]]) -> None:
        """Take pairs of a mask with its padding and the length of its longest row."""
        self.masks: list[NDArray[np.bool_]] = []
        for mask, kept in pairs:
            self.masks += [mask, mask[:, :kept]]
        self.batch: Sizes = tuple(mask.shape[0] for mask in self.masks)
        self.length: Sizes = tuple(mask.shape[1] for mask in self.masks)

    def __len__(self) -> int:
        return len(self.masks)

    def size(self, axis: Axis) -> Sizes:
        result = (1,) * len(self)
        for factor in axis:
            result = tuple(a * b for a, b in zip(result, self.factor(factor), strict=True))
        return result

    def factor(self, factor: Factor) -> Sizes:
        if isinstance(factor, Sequence):
            return self.length
        return self.batch if isinstance(factor, str) else (factor,) * len(self)

    def real_positions(self) -> Iterator[NDArray[np.int64]]:
        """A real position of each row, in every run; the same in both runs of a pair."""
        for mask in self.masks:
            real = [np.flatnonzero(row) for row in mask]
            yield np.array([one[(5 * i + 3) % len(one)] for i, one in enumerate(real)])

    def axis(self, sizes: Sizes) -> Axis:
        """Return the factors of an axis of these sizes; a batch is taken to stand first."""
        if len(set(sizes)) == 1:
            return sizes[:1] if sizes[0] != 1 else ()
        for symbols in ((Sequence(),), (BATCH,), (BATCH, Sequence())):
            unit = self.size(symbols)
            counts = {divmod(size, one) for size, one in zip(sizes, unit, strict=True)}
            ((count, rest), *others) = counts
            if others or rest or count < 1:
                continue
            if count == 1:
                return symbols
            if symbols == (BATCH,):
                return BATCH, count
        raise Refusal(UNFIT)


def split_axes(axes: Axes, targets: Iterable[Sizes], runs: Runs) -> Axes:
    """Return the axes that a Reshape to given sizes makes; refuse what cuts a factor."""
    factors = [factor for axis in axes for factor in axis]
    result: list[Axis] = []
    for target in targets:
        axis: list[Factor] = []
        while set(target) != {1}:
            if not factors:
                raise Refusal(UNFIT)
            factor = factors.pop(0)
            if isinstance(factor, int):
                common = math.gcd(factor, *target)
                if common < factor:
                    factors.insert(0, factor // common)
                factor = common
            parts = runs.factor(factor)
            if factor == 1 or any(n % part for n, part in zip(target, parts, strict=True)):
                raise Refusal(UNFIT)
            target = tuple(n // part for n, part in zip(target, parts, strict=True))
            axis.append(factor)
        result.append(tuple(axis))
    if set(runs.size(tuple(factors))) != {1}:
        raise Refusal(UNFIT)
    return tuple(result)


def sequences_of(*axes: Axis) -> list[Sequence]:
    """Return the sequence factors of some axes."""
    return [factor for axis in axes for factor in axis if isinstance(factor, Sequence)]


def marked(axis: Axis, zero: bool | None = None, low: bool | None = None) -> Axis:
    """Return an axis with flags of its sequence factors replaced; None leaves a flag."""
    return tuple(
        Sequence(f.zero if zero is None else zero, f.low if low is None else low)
        if isinstance(f, Sequence)
        else f
        for f in axis
    )


def plain(axes: Iterable[Axis]) -> Axes:
    """Return axes without any flag."""
    return tuple(marked(axis, zero=False, low=False) for axis in axes)
