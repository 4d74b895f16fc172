# SPDX-License-Identifier: MIT
"""Sizes of dimensions, exact: a number times unknowns, equal only where they always are.

    [batch, 9, sequence, 64]  flattened  ->  576 batch sequence
    576 batch sequence / 64 sequence     ->  9 batch

An unknown is a size that only a run tells. Two unknowns may happen to agree; one unknown
always agrees with itself. Whoever works out the same thing from the same sizes gets the same
unknown (:meth:`Unknowns.remembered`).
"""

from __future__ import annotations

import collections
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from rewrite_rules.remarks import Refusal

# A number times unknowns, sorted. With unknowns it is a size, so no less than 0; without, it
# may be any int64 that a shape is computed from, -1 for instance.
Dim = tuple[int, tuple[int, ...]]
Dims = tuple[Dim, ...]
# The dimensions; an unknown for all of them together where not even their number is known.
Shape = Dims | int

_MAX_UNKNOWNS = 16
# What sizes are multiplied by, or added to: 2**32 of them fill no memory, so nothing wraps.
_BESIDE_SIZES = 1 << 31

# Integers up to here are numbers in float64, in which some kernels compute; differences, too.
EXACT = 1 << 52


def int64(number: int, unknowns: tuple[int, ...] = ()) -> Dim | None:
    """Return a number, or that many times unknowns; None where int64 may wrap round.

    All arithmetic ends here. Only what comes out counts: sums and products that wrapped on the
    way are the same. A quotient's operands have come out of here before.
    """
    limit = _BESIDE_SIZES if unknowns else 1 << 63
    return (number, unknowns) if -limit <= number < limit else None


def known(size: int) -> Dim:
    """Return the dimension of a size that is a number; refuse what no tensor holds."""
    dim = int64(size)
    if dim is None:
        raise Refusal("ORP602", f"{size} is beyond int64")
    return dim


def number(dim: Dim | None) -> int | None:
    """The size of a dimension; None where it is not known."""
    return dim[0] if dim is not None and not dim[1] else None


class Unknowns:
    """Makes a model's unknowns."""

    def __init__(self) -> None:
        self.count = 0
        self._memory: dict[Hashable, int] = {}
        self._keys: dict[int, tuple[Any, ...]] = {}
        # Sizes that a node makes the same where none is 1, and what it makes of them.
        self.met: list[tuple[Iterable[Dim], Dim | None]] = []

    def fresh(self) -> int:
        """Return an unknown that equals no other."""
        self.count += 1
        return self.count

    def fresh_dim(self) -> Dim:
        """Return a dimension of which nothing is known."""
        return 1, (self.fresh(),)

    def fresh_dims(self, rank: int) -> Dims:
        """Return a shape of which only the number of dimensions is known."""
        return tuple(self.fresh_dim() for _ in range(rank))

    def whole(self, key: Hashable) -> int:
        """Return the unknown for ``key``, always the same one."""
        unknown = self._memory.get(key)
        if unknown is None:
            unknown = self._memory[key] = self.fresh()
        return unknown

    def remembered(self, *key: Hashable) -> Dim:
        """Return the dimension for ``key``, always the same one."""
        unknown = self.whole(key)
        self._keys[unknown] = key
        return 1, (unknown,)

    def key(self, unknown: int) -> tuple[Any, ...]:
        """Return what a dimension is remembered for; empty for any other."""
        return self._keys.get(unknown, ())

    def meet(self, *sizes: Dim) -> None:
        """Note that sizes are the same where the node runs."""
        self.met.append((sizes, None))

    def product(self, dims: Iterable[Dim]) -> Dim:
        dims = tuple(dims)
        size = 1
        unknowns: list[int] = []
        for dim in dims:
            size *= dim[0]
            unknowns += dim[1]
        if size == 0:
            return known(0)
        # Products of products grow without end.
        made = int64(size, tuple(sorted(unknowns)))
        if made is None or len(unknowns) > _MAX_UNKNOWNS:
            return self.remembered("product", *sorted(dims))
        return made

    def quotient(self, total: Dim, part: Dim) -> Dim:
        """Divide sizes; in a run that succeeds, nothing remains and ``part`` is not 0."""
        if part[0] and total[0] % part[0] == 0:
            left = collections.Counter(total[1])
            left.subtract(part[1])
            if min(left.values(), default=0) >= 0:
                return total[0] // part[0], tuple(sorted(left.elements()))
        return self.remembered("quotient", total, part)

    def sum(self, parts: Sequence[Dim]) -> Dim:
        terms: collections.Counter[tuple[int, ...]] = collections.Counter()
        for size, unknowns in parts:
            terms[unknowns] += size
        left = sorted((size, unknowns) for unknowns, size in terms.items() if size)
        if not left:
            return known(0)
        made = int64(*left[0]) if len(left) == 1 and left[0][0] > 0 else None
        return self.remembered("sum", *left) if made is None else made

    def difference(self, total: Dim, part: Dim) -> Dim | None:
        """Subtract a size from a sum that it is a part of; None for others."""
        if part == known(0):
            return total if total[1] or total[0] >= 0 else None
        key = self.key(total[1][0]) if total[0] == len(total[1]) == 1 else ()
        if key[:1] != ("sum",) or part not in key[1:]:
            return None
        left = self.sum([term for term in key[1:] if term != part])
        return left if left[1] or left[0] >= 0 else None

    def broadcast(self, shapes: Iterable[Shape]) -> Shape:
        """The shape of numpy's broadcasting; it fails where a run's sizes don't fit."""
        shapes = set(shapes)
        if len(shapes) == 1:
            return shapes.pop()
        if any(isinstance(shape, int) for shape in shapes):
            shapes.discard(())  # scalars add no dimension
            if len(shapes) == 1:
                return shapes.pop()
            return self.whole(("broadcast", frozenset(shapes)))
        ranked = [shape for shape in shapes if isinstance(shape, tuple)]
        rank = max(map(len, ranked), default=0)
        return tuple(
            self._broadcast_dim({s[i - rank] for s in ranked if rank - i <= len(s)})
            for i in range(rank)
        )

    def _broadcast_dim(self, sizes: set[Dim]) -> Dim:
        # Broadcasting again what has been broadcast already changes nothing.
        parts = {part for size in sizes for part in self.broadcast_parts(size)} - {known(1)}
        if len(parts) < 2:
            return parts.pop() if parts else known(1)
        # Beside another number than 1, an unknown is that number or 1.
        numbers = [size for size in parts if not size[1]]
        made = numbers[0] if len(numbers) == 1 else self.remembered("fit", *sorted(parts))
        self.met.append((parts, made))
        return made

    def broadcast_parts(self, dim: Dim) -> tuple[Dim, ...]:
        """Return the sizes that a dimension was broadcast from; itself for any other."""
        key = self.key(dim[1][0]) if dim[0] == len(dim[1]) == 1 else ()
        return key[1:] if key[:1] == ("fit",) else (dim,)
