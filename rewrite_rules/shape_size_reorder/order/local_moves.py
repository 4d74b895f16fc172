# SPDX-License-Identifier: MIT
"""Lowers the peak of an order: what is only held there is made later or read earlier."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rewrite_rules.shape_size_reorder.order.memory_plan import MemoryModel, Timeline
from rewrite_rules.shape_size_reorder.order.onnxruntime_orders import Dependencies, ranks

# Nodes that all simulations of moves may run; about a second for a million.
_MOVED_NODES = 100_000
_MAX_MOVES = 150
# Tensors tried at one peak, and nodes that may go along with one.
_TENSORS_AT_PEAK = 8
_MOVED_ALONG = 40


def lower_peak(
    order: Sequence[int],
    dependencies: Dependencies,
    model: MemoryModel,
    simulate: Callable[[Sequence[int]], Timeline],
    settle: Callable[[Sequence[int]], Sequence[int]],
) -> Sequence[int] | None:
    """Move nodes away from the peak, one tensor after another, while the budget lasts.

    ``settle`` makes an order one that runs as it is. None if no better one was found.
    """
    best, found = tuple(order), simulate(order)
    left = min(_MAX_MOVES, _MOVED_NODES // max(len(best), 1))
    improved = False
    while left > 0:
        before = best
        for moved in _moves(best, found.step, dependencies, model):
            settled = tuple(settle(moved))
            timeline = simulate(settled)
            left -= 1
            if _height(timeline) < _height(found):
                best, found, improved = settled, timeline, True
                break
            if left <= 0:
                break
        if best is before:
            break
    return best if improved else None


def _moves(
    order: tuple[int, ...], peak: int, dependencies: Dependencies, model: MemoryModel
) -> Iterator[list[int]]:
    """Make later, or read earlier, what step ``peak`` holds and does not use."""
    step = ranks(order)
    made = {value: step[node] for node, values in enumerate(model.makes) for value in values}
    readers: dict[int, set[int]] = {}
    for node in order:
        for value in model.reads[node]:
            readers.setdefault(value, set()).add(step[node])
    waiting = [
        value
        for value, steps in readers.items()
        if made[value] < peak < max(steps) and peak not in steps
    ]
    waiting.sort(key=lambda value: -model.sizes[value])
    for value in waiting[:_TENSORS_AT_PEAK]:
        later = sorted(at for at in readers[value] if at > peak)
        if min(readers[value]) > peak:  # make it later
            at, first = made[value], later[0]
            yield [*order[:at], *order[at + 1 : first], order[at], *order[first:]]
        along = _needed([order[at] for at in later], step, peak, dependencies)
        if along is not None:  # read it earlier
            now = [node for node in order[peak:] if node in along]
            after = [node for node in order[peak:] if node not in along]
            yield [*order[:peak], *now, *after]


def _needed(
    nodes: list[int], step: Sequence[int], peak: int, dependencies: Dependencies
) -> set[int] | None:
    """Nodes that have to run first to run some before the peak; None if too many."""
    found: set[int] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if step[node] < peak or node in found:
            continue
        if step[node] == peak or len(found) >= _MOVED_ALONG:
            return None
        found.add(node)
        pending += dependencies.producers[node]
    return found


def _height(timeline: Timeline) -> tuple[int, int]:
    """A lower peak is better, then a shorter one."""
    return timeline.peak, int((timeline.live == timeline.peak).sum())
