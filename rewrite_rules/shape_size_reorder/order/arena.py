# SPDX-License-Identifier: MIT
"""How many bytes of onnxruntime's arena a run touches.

An arena asks the system for regions and gives nothing back, so what a process holds after a
run is every byte that any tensor has lain on. Which those are depends on the order and the
sizes of all requests. This is onnxruntime's arena with the defaults of a session's CPU arena
(``onnxruntime/core/framework/bfc_arena.cc``, best fit with coalescing, as in TensorFlow):

1. A request is rounded up to 256 bytes. The smallest free chunk that it fits into is taken, of
   equal ones the first; it is split if it is twice as large, or 128 MB larger.
2. If there is none, a region is added: as large as the last one, doubled until the request
   fits; the next one is twice as large.
3. A chunk that is given back joins its free neighbours.
"""

from __future__ import annotations

__all__ = ["touched_bytes"]

import bisect
from collections.abc import Iterable

_ROUNDING = 256
_FIRST_REGION = 1 << 20
_MOST_DEAD = 128 << 20
_LARGEST_STEP = 1 << 30

# (size, first address): how free chunks are sorted.
_Chunk = tuple[int, int]


def touched_bytes(requests: Iterable[tuple[int, int]]) -> int:
    """Bytes that requests write to, each whole.

    Args:
        requests: In their order: ``(tensor, bytes)`` to get memory for a tensor, and
            ``(tensor, -1)`` to give it back.
    """
    arena = _Arena()
    for tensor, size in requests:
        if size < 0:
            arena.free(tensor)
        else:
            arena.allocate(tensor, size)
    return arena.touched()


class _Arena:
    """Regions lie one behind the other with a gap, so that no chunks of two are joined."""

    def __init__(self) -> None:
        self._end = 0
        self._next_region = _FIRST_REGION
        self._free: list[_Chunk] = []
        # Of free chunks: size by first address, and first address by the one behind.
        self._starts: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._used: dict[int, _Chunk] = {}
        self._touched: list[tuple[int, int]] = []

    def allocate(self, tensor: int, size: int) -> None:
        if size <= 0:
            return
        rounded = -(-size // _ROUNDING) * _ROUNDING
        index = bisect.bisect_left(self._free, (rounded, 0))
        if index == len(self._free):
            self._add_region(rounded)
            index = bisect.bisect_left(self._free, (rounded, 0))
        length, start = self._free[index]
        self._remove(start)
        if length >= 2 * rounded or length - rounded >= _MOST_DEAD:
            self._insert(start + rounded, length - rounded)
            length = rounded
        self._used[tensor] = length, start
        self._touched.append((start, start + size))

    def free(self, tensor: int) -> None:
        chunk = self._used.pop(tensor, None)
        if chunk is None:
            return
        length, start = chunk
        if (before := self._ends.get(start)) is not None:
            length += start - before
            self._remove(before)
            start = before
        if (behind := self._starts.get(start + length)) is not None:
            self._remove(start + length)
            length += behind
        self._insert(start, length)

    def touched(self) -> int:
        total = reach = 0
        for start, end in sorted(self._touched):
            total += max(0, end - max(start, reach))
            reach = max(reach, end)
        return total

    def _add_region(self, needed: int) -> None:
        grown = needed > self._next_region
        while needed > self._next_region:
            self._next_region *= 2
        self._insert(self._end + 1, self._next_region)
        self._end += self._next_region + 1
        if not grown:
            self._next_region = min(2 * self._next_region, _LARGEST_STEP)

    def _insert(self, start: int, length: int) -> None:
        bisect.insort(self._free, (length, start))
        self._starts[start] = length
        self._ends[start + length] = start

    def _remove(self, start: int) -> None:
        length = self._starts.pop(start)
        del self._ends[start + length]
        del self._free[bisect.bisect_left(self._free, (length, start))]
