# SPDX-License-Identifier: MIT
"""Files whose default order, a depth-first walk from the end, may hold few bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rewrite_rules.shape_size_reorder.order.heuristics import HeuristicBytes, subtrees
from rewrite_rules.shape_size_reorder.order.memory_plan import MemoryModel
from rewrite_rules.shape_size_reorder.order.onnxruntime_orders import Dependencies, ranks


def default_files(
    dependencies: Dependencies, model: MemoryModel, wanted: Sequence[int]
) -> Iterator[list[int]]:
    """Yield files whose depth-first walk may come close to an order; it can't run every one.

    Of the producers of a node, the one with the highest index runs first. So positions are
    given from the end of the file on, to the node that is to run earliest among those whose
    consumers have one; or to the one with the earliest node behind it.

    Args:
        dependencies: The graph's edges.
        model: The graph's bytes.
        wanted: Positions of all nodes as they should run.
    """
    count = len(dependencies.nodes)
    yield list(range(count))
    yield list(wanted)
    tensors = HeuristicBytes(dependencies, model, {})
    for order in (wanted, subtrees(tensors)):
        rank = ranks(order)
        yield dependencies.smallest_last(rank)
        earliest = list(rank)
        for node in order:
            for producer in dependencies.producers[node]:
                earliest[node] = min(earliest[node], earliest[producer])
        # Branches of one beginning are all as early: the shorter way first.
        keys = sorted(range(count), key=lambda node: (earliest[node], rank[node]))
        yield dependencies.smallest_last(ranks(keys))
