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
import itertools
import math
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from rewrite_rules.remarks import Refusal


@dataclasses.dataclass(frozen=True)
class Sequence:
    """The sequence as a factor of an axis, and what stands at padded positions along it.

    Attributes:
        zero: Exactly 0, where all other sequence factors are at real positions.
        low: So far below what is real that a softmax makes 0 of it, there as well.
        same: Behind the longest row, one value: what stands at the first such position.
        set_by_mask: The model itself put something else than 0 there, by the mask.
    """

    zero: bool = False
    low: bool = False
    same: bool = False
    set_by_mask: bool = False

    @property
    def uniform(self) -> bool:
        return self.zero or self.same

    def reworked(self) -> Sequence:
        """Return what stands there once each position is computed anew, from all of itself.

        What was one value behind the longest row still is.
        """
        return Sequence(same=self.uniform, set_by_mask=self.set_by_mask and self.uniform)

    def reduced(self) -> Sequence:
        """Return what stands there once other axes are reduced."""
        return Sequence(same=self.uniform, set_by_mask=self.set_by_mask)


BATCH = "batch"
MIXED_ROWS = "mixes rows, and no mask leaves their padding out"
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
    longest of them or behind. ``batch`` and ``length`` are the sizes in every run; ``own``
    are those of axes that are neither, each by a name, unlike any other.
    """

    def __init__(
        self, pairs: Iterable[tuple[NDArray[np.bool_], int]], own: Iterable[str] = ()
    ) -> None:
        """Take pairs of a mask with its padding and the length that is kept of it."""
        self.masks: list[NDArray[np.bool_]] = []
        for mask, kept in pairs:
            self.masks += [mask, mask[:, :kept]]
        self.batch: Sizes = tuple(mask.shape[0] for mask in self.masks)
        self.length: Sizes = tuple(mask.shape[1] for mask in self.masks)
        self.own: dict[str, Sizes] = {
            name: tuple(_prime(first + run // 2) for run in range(len(self)))
            for first, name in enumerate(own)
        }
        self._units: list[Axis] = [(Sequence(),), (BATCH,), (BATCH, Sequence())]
        self._units += [(name,) for name in self.own]

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
        if isinstance(factor, int):
            return (factor,) * len(self)
        return self.batch if factor == BATCH else self.own[factor]

    def behind(self, run: int) -> int:
        """Return the first position behind the longest row of a run."""
        return int(np.flatnonzero(self.masks[run].any(axis=0)).max(initial=-1)) + 1

    def real_positions(self) -> Iterator[NDArray[np.int64]]:
        """A real position of each row, in every run; the same in both runs of a pair."""
        for mask in self.masks:
            real = [np.flatnonzero(row) for row in mask]
            yield np.array([one[(5 * i + 3) % len(one)] for i, one in enumerate(real)])

    def axis(self, sizes: Sizes) -> Axis:
        """Return the factors of an axis of these sizes; a batch is taken to stand first."""
        if len(set(sizes)) == 1:
            return sizes[:1] if sizes[0] != 1 else ()
        for unit in self._units:
            counts = {divmod(n, one) for n, one in zip(sizes, self.size(unit), strict=True)}
            ((count, rest), *others) = counts
            if others or rest or count < 1:
                continue
            if count == 1:
                return unit
            if sequences_of(unit) == []:
                return *unit, count
        raise Refusal(UNFIT)


def _prime(index: int) -> int:
    """Return one of the primes from 17."""
    found = (n for n in itertools.count(17, 2) if all(n % part for part in range(3, n, 2)))
    return next(itertools.islice(found, index, None))


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


def check_rows(axes: Axes) -> None:
    """Refuse positions of two rows at once: which of them are real is not followed."""
    if sequences_of(*axes) and sum(axis.count(BATCH) for axis in axes) > 1:
        raise Refusal(MIXED_ROWS)


def sequences_of(*axes: Axis) -> list[Sequence]:
    """Return the sequence factors of some axes."""
    return [factor for axis in axes for factor in axis if isinstance(factor, Sequence)]


def changed(axes: Iterable[Axis], change: Callable[[Sequence], Sequence]) -> Axes:
    """Return axes with other flags."""
    return tuple(
        tuple(change(factor) if isinstance(factor, Sequence) else factor for factor in axis)
        for axis in axes
    )


def marked(axes: Iterable[Axis], **flags: bool) -> Axes:
    """Return axes with some flags of the sequence factors replaced."""
    return changed(axes, lambda factor: dataclasses.replace(factor, **flags))


def plain(axes: Iterable[Axis]) -> Axes:
    """Return axes without any flag."""
    return changed(axes, lambda _: Sequence())
