# SPDX-License-Identifier: MIT
"""Axes of a tensor as products of factors, one of which may be the sequence.

    input_ids                      [batch, sequence]
    flattened for a Gemm           [batch sequence, 384]
    attention scores               [batch, 12, sequence, sequence]

Sizes are looked at in several runs at once (:class:`Runs`), some of which have the same rows
with and without their padding; a factor is told by its sizes in all of them.
"""

from __future__ import annotations

__all__ = [
    "BATCH",
    "Axes",
    "Axis",
    "Runs",
    "Sequence",
    "Sizes",
    "flat_sequences",
    "sequences_of",
    "split_axes",
]

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rewrite_rules.graph.refusal import Refusal


@dataclasses.dataclass(frozen=True)
class Sequence:
    """The sequence as a factor of an axis.

    Where all other sequence factors of the tensor are at real positions, and this one at a
    padded position, the values

    Attributes:
        zero: are exactly 0.
        low: are so far below the others that a softmax makes 0 of them.
    """

    zero: bool = False
    low: bool = False


BATCH = "batch"
Factor = int | str | Sequence
# The factors in row-major order, without ones.
Axis = tuple[Factor, ...]
Axes = tuple[Axis, ...]
# A size in every run.
Sizes = tuple[int, ...]


class Runs:
    """The runs on which sizes are compared and masks evaluated.

    Runs come in pairs: rows with padding behind every row, and the same rows cut at the
    longest of them.

    Attributes:
        masks: What the attention mask is in every run, bool ``[batch, length]``.
        batch, length: Sizes in every run.
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
        """The size of an axis in every run."""
        result = (1,) * len(self)
        for factor in axis:
            result = tuple(a * b for a, b in zip(result, self.factor(factor), strict=True))
        return result

    def factor(self, factor: Factor) -> Sizes:
        """The size of a factor in every run."""
        if isinstance(factor, Sequence):
            return self.length
        return self.batch if isinstance(factor, str) else (factor,) * len(self)

    def axis(self, sizes: Sizes) -> Axis | None:
        """The factors of an axis of these sizes; None where the order can't be told.

        A batch is taken to stand before a sequence.
        """
        for symbols in ((), (Sequence(),), (BATCH,), (BATCH, Sequence())):
            unit = self.size(symbols)
            if all(
                size % one == 0 if one else size == 0
                for size, one in zip(sizes, unit, strict=True)
            ):
                counts = {size // one for size, one in zip(sizes, unit, strict=True) if one}
                if len(counts) == 1:
                    count = counts.pop()
                    if count == 1:
                        return symbols
                    if Sequence() not in symbols:
                        return (*symbols, count)
        return None


def split_axes(axes: Axes, targets: list[Sizes], runs: Runs) -> Axes:
    """Return the axes that a Reshape to given sizes makes.

    Raises:
        Refusal: If a size is not a product of neighbouring factors.
    """
    factors = [factor for axis in axes for factor in axis]
    result: list[Axis] = []
    for target in targets:
        axis: list[Factor] = []
        while (product := runs.size(tuple(axis))) != target:
            if not factors:
                raise Refusal("has sizes that do not follow from the length")
            factor = factors.pop(0)
            rest = _quotient(target, product)
            if rest is None:
                raise Refusal("has sizes that do not follow from the length")
            common = None
            if isinstance(factor, int) and len(set(rest)) == 1 and factor != rest[0]:
                common = math.gcd(factor, rest[0])
            if common is not None and isinstance(factor, int) and common < factor:
                if common == 1:
                    raise Refusal("has sizes that do not follow from the length")
                factors.insert(0, factor // common)
                factor = common
            axis.append(factor)
        result.append(tuple(axis))
    if any(size != 1 for size in runs.size(tuple(factors))):
        raise Refusal("has sizes that do not follow from the length")
    return tuple(result)


def _quotient(total: Sizes, part: Sizes) -> Sizes | None:
    if any(not b or a % b for a, b in zip(total, part, strict=True)):
        return None
    return tuple(a // b for a, b in zip(total, part, strict=True))


def sequences_of(axis: Axis) -> list[Sequence]:
    """The sequence factors of an axis."""
    return [factor for factor in axis if isinstance(factor, Sequence)]


def flat_sequences(axes: Iterable[Axis]) -> list[Sequence]:
    """The sequence factors of all axes."""
    return [factor for axis in axes for factor in sequences_of(axis)]


def marked(axis: Axis, **flags: Any) -> Axis:
    """Return an axis with flags of its sequence factors replaced."""
    return tuple(
        dataclasses.replace(f, **flags) if isinstance(f, Sequence) else f for f in axis
    )
