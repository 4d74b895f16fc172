# SPDX-License-Identifier: MIT
"""Orders of the nodes of a graph that may hold few bytes, each made in n log n steps.

net          the ready node that grows memory least
segments     as net, but whole chains of nodes are compared: first those that end with
             less than they began with, the one with the lowest peak first; then those
             that fall deepest below their peak (Liu, SIAM J. Comput. 16, 1987: best
             for parallel chains)
subtrees     depth first, of the inputs of a node first the one whose making needs most
             beyond what is left of it (Sethi and Ullman, J. ACM 17, 1970: best for
             trees)
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence

from rewrite_rules.shape_size_reorder.memory_plan import MemoryModel
from rewrite_rules.shape_size_reorder.onnxruntime_orders import Dependencies, ranks

# Nodes that a chain is looked through for where it falls below its start.
_LOOK_AHEAD = 64


def candidate_orders(
    dependencies: Dependencies, model: MemoryModel, inner: Mapping[int, int]
) -> Iterator[tuple[str, Sequence[int]]]:
    """Make names and orders, each when it is asked for, the quickest first."""
    tensors = HeuristicBytes(dependencies, model, inner)
    yield "segments", _greedy(tensors, _segment)
    yield "net", _greedy(tensors, _single)
    yield "subtrees", subtrees(tensors)


class HeuristicBytes:
    """Bytes as the heuristics see them: aliases are one tensor, free buffers are gone.

    Attributes:
        inner: For each node, the bytes that its subgraphs need while it runs.
        overwrites: Whether its output may take the place of what it reads.
        reads, grows: The tensors it reads, each once; the bytes of those it makes.
        readers: For each tensor, the nodes that read it or an alias of it.
        kept: Whether a tensor stays to the end.
    """

    def __init__(
        self, dependencies: Dependencies, model: MemoryModel, inner: Mapping[int, int]
    ) -> None:
        self.dependencies = dependencies
        self.size = model.sizes
        nodes = range(len(dependencies.nodes))
        self.inner = [inner.get(node, 0) for node in nodes]
        self.overwrites = [node in model.overwrites for node in nodes]
        self.reads = [sorted({model.roots[v] for v in read}) for read in model.reads]
        self.grows = [
            sum(model.sizes[v] for v in made if model.roots[v] == v) for made in model.makes
        ]
        self.readers: list[list[int]] = [[] for _ in model.sizes]
        for node in nodes:
            for value in self.reads[node]:
                self.readers[value].append(node)
        # What nobody reads is given back at the end.
        pairs = zip(model.outputs, self.readers, strict=True)
        self.kept = [kept or not readers for kept, readers in pairs]


class _State:
    """A run that is under way: what is ready, and what the next node would change."""

    def __init__(self, tensors: HeuristicBytes) -> None:
        self.tensors = tensors
        dependencies = tensors.dependencies
        count = len(dependencies.nodes)
        self.waiting = [len(producers) for producers in dependencies.producers]
        self.grows = tensors.grows
        self.frees = [0] * count
        self.done = [False] * count
        self._left = [len(readers) for readers in tensors.readers]
        # Exclusive or of all that are left: with one left, its number.
        self._last = [0] * len(tensors.readers)
        for value, readers in enumerate(tensors.readers):
            for node in readers:
                self._last[value] ^= node
            if len(readers) == 1 and not tensors.kept[value]:
                self.frees[readers[0]] += tensors.size[value]

    def hill(self, node: int) -> int:
        """Bytes that a node adds while it runs."""
        grows = self.grows[node]
        if self.tensors.overwrites[node]:
            grows -= min(grows, self.frees[node])
        return grows + self.tensors.inner[node]

    def run(self, node: int) -> tuple[list[int], list[int]]:
        """Run a node; returns those that are ready now, and ready ones that free more now."""
        self.done[node] = True
        ready = []
        for consumer in self.tensors.dependencies.consumers[node]:
            self.waiting[consumer] -= 1
            if not self.waiting[consumer]:
                ready.append(consumer)
        changed = []
        for value in self.tensors.reads[node]:
            self._left[value] -= 1
            self._last[value] ^= node
            if self._left[value] == 1 and not self.tensors.kept[value]:
                last = self._last[value]
                self.frees[last] += self.tensors.size[value]
                if not self.waiting[last]:
                    changed.append(last)
        return ready, changed


_Key = tuple[int, int]
# From a state and a ready node: the smaller the better; and how many nodes to run at once.
_Look = Callable[[_State, int], tuple[_Key, int]]


def _single(state: _State, node: int) -> tuple[_Key, int]:
    return (state.grows[node] - state.frees[node], state.hill(node)), 1


def _segment(state: _State, node: int) -> tuple[_Key, int]:
    """Follow the nodes that only wait for this one to where least is held."""
    consumers = state.tensors.dependencies.consumers
    held = peak = length = 0
    valley, valley_peak, valley_length = 0, 0, 0
    while True:
        peak = max(peak, held + state.hill(node))
        held += state.grows[node] - state.frees[node]
        length += 1
        if length == 1 or held <= valley:
            valley, valley_peak, valley_length = held, peak, length
            if held < 0:
                break
        following = consumers[node]
        if length >= _LOOK_AHEAD or len(following) != 1:
            break
        node = following[0]
        if state.waiting[node] != 1:
            break
    if valley <= 0:
        return (0, valley_peak), valley_length
    return (1, valley - valley_peak), valley_length


def _greedy(tensors: HeuristicBytes, look: _Look) -> list[int]:
    """Run the best ready node, or chain of nodes, again and again."""
    state = _State(tensors)
    dependencies = tensors.dependencies
    result: list[int] = []
    heap: list[tuple[_Key, int, int, int]] = []
    version = [0] * len(dependencies.nodes)

    def push(node: int) -> None:
        version[node] += 1
        key, length = look(state, node)
        # Of equals, one that became ready last: the branch under way is finished first.
        heapq.heappush(heap, (key, -len(result), node, length + (version[node] << 32)))

    for node, waiting in enumerate(state.waiting):
        if not waiting:
            push(node)
    while heap:
        _, _, node, stamp = heapq.heappop(heap)
        if state.done[node] or stamp >> 32 != version[node]:
            continue
        for left in range(stamp & 0xFFFFFFFF, 0, -1):
            result.append(node)
            ready, changed = state.run(node)
            for other in changed:
                if not state.done[other] and other not in ready:
                    push(other)
            if left > 1:
                (node,) = ready
            else:
                for other in ready:
                    push(other)
    return result


def subtrees(tensors: HeuristicBytes) -> list[int]:
    """Depth first; what a subtree needs is reckoned as if no other one shared its nodes."""
    dependencies = tensors.dependencies
    size = tensors.grows
    needs = [0] * len(size)
    sorted_producers: list[list[int]] = [[] for _ in size]
    for node in dependencies.default():
        producers = sorted(
            dependencies.producers[node], key=lambda producer: needs[producer] - size[producer]
        )
        sorted_producers[node] = producers  # a stack: what needs most is on top
        held = need = 0
        for producer in reversed(producers):
            need = max(need, held + needs[producer])
            held += size[producer]
        needs[node] = max(need, held + size[node] + tensors.inner[node])
    roots = sorted(range(len(size)), key=lambda node: needs[node] - size[node])
    return dependencies.depth_first(roots, sorted_producers.__getitem__)


def default_files(
    dependencies: Dependencies, model: MemoryModel, wanted: Sequence[int]
) -> Iterator[list[int]]:
    """Yield files whose depth-first walk may come close to an order; it can't run every one.

    Of the producers of a node, the one with the highest index runs first. So positions are
    given from the end of the file on, to the node that is to run earliest among those whose
    consumers have one; or to the one with the earliest node behind it.
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
