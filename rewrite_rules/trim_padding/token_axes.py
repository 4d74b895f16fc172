# SPDX-License-Identifier: MIT
"""Axes of a tensor as products of factors, one of which may be the sequence.

    input_ids                      [batch, sequence]
    flattened for a Gemm           [batch sequence, 384]
    attention scores               [batch, 12, sequence, sequence]

Which factors an axis has is proved (:mod:`rewrite_rules.facts.axis_roles`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable

from rewrite_rules.remarks import Refusal
from rewrite_rules.shapes.dimensions import Dim


@dataclasses.dataclass(frozen=True)
class Sequence:
    """The sequence as a factor of an axis, and what stands at padded positions along it.

    Attributes:
        zero: Exactly 0, where all other sequence factors are at real positions.
        low: So far below what is real that a softmax makes 0 of it, there as well; each real
            position is above that beside itself. Of booleans, False there, and True beside.
        set_by_mask: The model itself put something else than 0 there, by the mask.
        wild: It may be infinite there, or none: times 0, that is not 0.
    """

    zero: bool = False
    low: bool = False
    set_by_mask: bool = False
    wild: bool = False

    def reduced(self, keeps_zero: bool = False) -> Sequence:
        """Return what stands there once positions are computed again, or axes reduced."""
        return dataclasses.replace(self, zero=keeps_zero and self.zero, low=False)


BATCH = "batch"
MIXED_ROWS = "ORP503", "mixes rows, and no mask leaves their padding out"
UNFIT = "ORP504", "has sizes that do not follow from the length: export with a dynamic one"
# A number, the sequence, or another size by its name.
Factor = int | str | Sequence
# The factors in row-major order, without ones.
Axis = tuple[Factor, ...]
Axes = tuple[Axis, ...]


def size_of(*axes: Axis) -> tuple[int, list[str]]:
    """Return the size of axes together, comparable: a number times names."""
    factors = [factor for axis in axes for factor in axis]
    names = [factor for factor in factors if isinstance(factor, str)]
    names += [""] * len(sequences_of(*axes))
    return math.prod(factor for factor in factors if isinstance(factor, int)), sorted(names)


class Sizes:
    """Dimensions as axes, by the unknowns that stand for the batch and the sequence."""

    def __init__(self, rows: Dim, length: Dim) -> None:
        """Take those of the mask; a batch may be 1 in every run."""
        self._factors: dict[int, Factor] = dict.fromkeys(rows[1], BATCH)
        self._factors |= {unknown: Sequence() for unknown in length[1]}
        self.fits = length[0] == len(length[1]) == 1 and rows != length
        self.fits = self.fits and (rows == (1, ()) or rows[0] == len(rows[1]) == 1)

    def axis(self, dim: Dim) -> Axis:
        """Return the axis of a size; refused where the order of its factors would count."""
        count, unknowns = dim
        result = (*self._named(unknowns), *((count,) if count != 1 else ()))
        if len(result) > 1 and sequences_of(result):
            raise Refusal(*UNFIT)
        return result

    def _named(self, unknowns: Iterable[int]) -> list[Factor]:
        return [self._factors.get(unknown, f"axis {unknown}") for unknown in unknowns]

    def is_of(self, axis: Axis, dim: Dim) -> bool:
        """Return whether an axis has a size."""
        return size_of(axis) == size_of((dim[0], *self._named(dim[1])))

    def split(self, axes: Axes, targets: Iterable[Dim]) -> Axes:
        """Return the axes that a Reshape to given sizes makes; refuse what cuts a factor."""
        factors = [factor for axis in axes for factor in axis]
        result: list[Axis] = []
        for count, unknowns in targets:
            left = self._named(unknowns)
            axis: list[Factor] = []
            while left or count != 1:
                factor = factors.pop(0) if factors else 1
                if isinstance(factor, int):
                    common = math.gcd(factor, count)
                    if common < 2:
                        raise Refusal(*UNFIT)
                    if common < factor:
                        factors.insert(0, factor // common)
                    count //= common
                    axis.append(common)
                    continue
                own = Sequence() if isinstance(factor, Sequence) else factor
                if own not in left:
                    raise Refusal(*UNFIT)
                left.remove(own)
                axis.append(factor)
            result.append(tuple(axis))
        if factors:
            raise Refusal(*UNFIT)
        return tuple(result)


def check_rows(axes: Axes) -> None:
    """Refuse positions of two rows at once: which of them are real is not followed."""
    if sequences_of(*axes) and sum(axis.count(BATCH) for axis in axes) > 1:
        raise Refusal(*MIXED_ROWS)


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
