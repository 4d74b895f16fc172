# SPDX-License-Identifier: MIT
"""The arena takes the best chunk, splits it, joins what is free, and never gives back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rewrite_rules.shape_size_reorder.order.arena import touched_bytes

MB = 1 << 20


def test_what_was_given_back_serves_again():
    assert touched_bytes([(0, MB), (0, -1), (1, MB), (1, -1), (2, MB)]) == MB


def test_a_chunk_that_is_not_twice_as_large_is_taken_whole():
    # 700 KB lie in the 1 MB of the first tensor; the rest of it is lost for the second.
    requests = [(0, MB), (0, -1), (1, 700 << 10), (2, 200 << 10)]
    assert touched_bytes(requests) == (700 << 10) + (200 << 10) + (MB - (700 << 10))


def test_a_chunk_twice_as_large_is_split():
    assert touched_bytes([(0, MB), (0, -1), (1, MB // 2), (2, MB // 2)]) == MB


def test_neighbours_that_are_free_serve_a_larger_tensor():
    halves = [(0, MB // 2), (1, MB // 2)]
    assert touched_bytes([*halves, (0, -1), (1, -1), (2, MB)]) == MB
    # One that is still there keeps them apart.
    assert touched_bytes([*halves, (0, -1), (2, MB)]) == 2 * MB


def test_the_smallest_chunk_that_fits_is_taken():
    chunks = [(0, 4 * MB), (1, MB), (2, 3 * MB)]
    freed = [(0, -1), (1, -1)]
    # Into the chunk of 1 MB, so that the one of 4 MB is there for the next.
    assert touched_bytes([*chunks, *freed, (3, MB), (4, 4 * MB)]) == 8 * MB


@given(st.lists(st.tuples(st.integers(1, 3 * MB), st.integers(0, 9)), max_size=60))
def test_no_less_than_the_peak_and_no_more_than_all(steps: list[tuple[int, int]]):
    requests: list[tuple[int, int]] = []
    alive: dict[int, int] = {}
    peak = 0
    for tensor, (size, victim) in enumerate(steps):
        requests.append((tensor, size))
        alive[tensor] = size
        peak = max(peak, sum(alive.values()))
        if victim in alive:
            requests.append((victim, -1))
            del alive[victim]
    touched = touched_bytes(requests)
    assert peak <= touched <= sum(size for size, _ in steps)
