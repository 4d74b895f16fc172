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

import bisect
from collections.abc import Iterable

_ROUNDING = 256
_FIRST_REGION = 1 << 20
_MAX_DEAD = 128 << 20
_LARGEST_STEP = 1 << 30

# (size, first address): how free chunks are sorted.
_Chunk = tuple[int, int]


def touched_bytes(requests: Iterable[tuple[int, int]]) -> int:
    """Bytes that requests write to, each whole.

    Requests are ``(tensor, bytes)`` to get memory and ``(tensor, -1)`` to give it back.
    """
    next_region, end = _FIRST_REGION, 0
    # Of free chunks: sorted sizes and addresses; size by address, address by the one behind.
    free: list[_Chunk] = []
    starts: dict[int, int] = {}
    ends: dict[int, int] = {}
    used: dict[int, _Chunk] = {}
    touched: list[tuple[int, int]] = []

    def insert(start: int, length: int) -> None:
        bisect.insort(free, (length, start))
        starts[start] = length
        ends[start + length] = start

    def remove(start: int) -> int:
        length = starts.pop(start)
        del ends[start + length]
        del free[bisect.bisect_left(free, (length, start))]
        return length

    for tensor, size in requests:
        if size > 0:
            rounded = -(-size // _ROUNDING) * _ROUNDING
            if not free or free[-1][0] < rounded:
                # Between regions is a gap, so that no chunks of two are joined.
                doubled = (-(-rounded // next_region) - 1).bit_length()
                region = next_region << doubled
                insert(end + 1, region)
                end += region + 1
                next_region = region if doubled else min(2 * region, _LARGEST_STEP)
            length, start = free[bisect.bisect_left(free, (rounded, 0))]
            remove(start)
            if length >= 2 * rounded or length - rounded >= _MAX_DEAD:
                insert(start + rounded, length - rounded)
                length = rounded
            used[tensor] = length, start
            touched.append((start, start + size))
        elif size < 0 and tensor in used:
            length, start = used.pop(tensor)
            if start in ends:
                start = ends[start]
                length += remove(start)
            if start + length in starts:
                length += remove(start + length)
            insert(start, length)
    total = reach = 0
    for first, behind in sorted(touched):
        total += max(0, behind - max(first, reach))
        reach = max(reach, behind)
    return total
