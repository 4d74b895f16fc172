# SPDX-License-Identifier: MIT
"""Computes an order of the nodes of a graph that holds few bytes at a time.

Every Shape and Size runs directly after its producer, and so does the small chain of integers
that hangs on it (Gather, Concat, Mul, ... of nothing but shapes and constants). Of the others,
several orders are made, each in n log n steps, and all of them simulated; the best one wins:

    the two native orders
    net              the ready node that grows memory least
    segments         as net, but whole chains of nodes are compared: first those that end with
                     less than they began with, the one with the lowest peak first; then those
                     that fall deepest below their peak (Liu, SIAM J. Comput. 16, 1987: best
                     for parallel chains)
    backwards        as net, from the outputs to the inputs
    subtrees         depth first, of the inputs of a node first the one whose making needs most
                     beyond what is left of it (Sethi and Ullman, J. ACM 17, 1970: best for
                     trees)
    beam             for small graphs: the most promising sets of executed nodes, step by step

In the best one, what is held at the peak without being used there is made later or read
earlier, as long as that lowers the peak and the budget lasts.

The order that is returned is one that onnxruntime's ``PRIORITY_BASED`` runs as it is.
:func:`closest_default_order` is for those who can't set that, but can choose the file.
"""

from __future__ import annotations

__all__ = [
    "DefaultFile",
    "GraphOrder",
    "SimulatedOrder",
    "closest_default_order",
    "memory_order",
]

import dataclasses
import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence

import onnx_ir as ir

from rewrite_rules.concrete_shapes import ConcreteShapes
from rewrite_rules.execution_order import Dependencies, is_constant
from rewrite_rules.live_memory import MemoryModel, Timeline, inner_bytes
from rewrite_rules.nodes import bodies

# A chain's tensors are shapes; anything larger is data.
_CHAIN_BYTES = 4096
# Nodes that a chain is looked through for where it falls below its start.
_LOOK_AHEAD = 64
# States times nodes that the beam may look at: some tenths of a second.
_BEAM_NODES = 200
_BEAM_STATES = 4000
# Nodes that all simulations of moves may run; about a second for a million.
_MOVED_NODES = 100_000
_MOST_MOVES = 150
# Tensors tried at one peak, and nodes that may go along with one.
_TENSORS_AT_PEAK = 8
_MOVED_ALONG = 40


@dataclasses.dataclass(frozen=True)
class SimulatedOrder:
    """One order and what it costs.

    Attributes:
        order: Positions of the nodes in the graph, as they run; Constant nodes, which never
            run, come first.
        timeline: Live bytes of each step.
        distances: For each Shape and Size that reads another node's output, the steps from
            that node to it; 1 is directly after it or after another such one.
    """

    order: tuple[int, ...]
    timeline: Timeline
    distances: tuple[int, ...]

    @property
    def peak(self) -> int:
        """Bytes, bodies included."""
        return self.timeline.peak

    @property
    def mean_distance(self) -> float:
        """Steps between a Shape and its producer; 0 if there is none."""
        return sum(self.distances) / len(self.distances) if self.distances else 0.0

    @property
    def max_distance(self) -> int:
        """Steps between a Shape and its producer; 0 if there is none."""
        return max(self.distances, default=0)


@dataclasses.dataclass(frozen=True)
class GraphOrder:
    """The order computed for a graph, beside those of onnxruntime.

    Attributes:
        graph: The graph; it is as it was.
        ours: The computed order: how nodes are to lie in the file, and how they then run with
            ``ExecutionOrder.PRIORITY_BASED``.
        default: What a session runs by default with the file as it is.
        priority: What it runs with ``PRIORITY_BASED`` with the file as it is.
        method: How the order was found, for instance ``"segments"``.
        output_bytes: Bytes of the graph's outputs.
        chain_bytes: Bytes of all results of Shape, Size and the chains on them. So much, at
            most, may ours lie above the better native order, for having them early.
        unknown_dims: Dimensions without a number, ``"?"`` for those without a name; they
            counted as :data:`rewrite_rules.concrete_shapes.DEFAULT_DIM`. Bodies included.
        unknown_values: Values whose size is a guess. Bodies included.
        bodies: The same for each body of each If, Loop and Scan, in the order of the file.
    """

    graph: ir.Graph
    ours: SimulatedOrder
    default: SimulatedOrder
    priority: SimulatedOrder
    method: str
    output_bytes: int
    chain_bytes: int
    unknown_dims: tuple[str, ...]
    unknown_values: tuple[str, ...]
    bodies: tuple[GraphOrder, ...]

    @property
    def worthwhile(self) -> bool:
        """Whether a session that runs ours never holds more than one with either order.

        It is False only where the default order profits from running a Shape late, which
        ``PRIORITY_BASED`` can't do: leave the session at its default then.
        """
        best = min(self.default.peak, self.priority.peak)
        return self.ours.peak <= best + self.chain_bytes

    def apply(self) -> None:
        """Put the nodes of the graph and of all bodies into our order."""
        for body in self.bodies:
            body.apply()
        _rearrange(self.graph, self.ours.order)


@dataclasses.dataclass(frozen=True)
class DefaultFile:
    """A file that a default session, which can't be told an order, runs well.

    Attributes:
        graph: The graph; it is as it was.
        file_order: How the nodes are to lie in the file: positions in the graph.
        runs: What a default session runs then.
        closeness: Share of all pairs of nodes that run in the order that was wanted, 0 to 1.
        output_bytes: Bytes of the graph's outputs.
        bodies: The same for each body of each If, Loop and Scan.
    """

    graph: ir.Graph
    file_order: tuple[int, ...]
    runs: SimulatedOrder
    closeness: float
    output_bytes: int
    bodies: tuple[DefaultFile, ...]

    def apply(self) -> None:
        """Put the nodes of the graph and of all bodies into the order of the file."""
        for body in self.bodies:
            body.apply()
        _rearrange(self.graph, self.file_order)


def memory_order(
    graph: ir.Graph,
    dims: Mapping[str, int] | None = None,
    parent: ir.Node | None = None,
    *,
    shapes: ConcreteShapes | None = None,
    reuse: bool = True,
) -> GraphOrder:
    """Compute an order with a low peak of live bytes; the graph stays as it is.

    Run after shape inference, last of all rewrites.

    Args:
        graph: The graph, sorted or not; each of its bodies is ordered for itself.
        dims: Numbers for symbolic dimensions, for instance ``{"batch": 1, "seq": 512}``.
        parent: The node whose body the graph is.
        shapes: From :func:`rewrite_rules.concrete_shapes.concrete_shapes`; go before ``dims``,
            and the more a graph computes of its shapes, the better.
        reuse: ``SessionOptions.enable_mem_reuse`` of the session that will run the graph.

    Raises:
        Refusal: If the graph is no DAG, or two nodes have an output of one name.
    """
    dims = dims or {}
    dependencies = Dependencies.of(graph)
    model = MemoryModel(graph, dependencies, dims, parent, shapes=shapes, reuse=reuse)
    inner = _Bodies(
        dependencies,
        lambda body, node: memory_order(body, dims, node, shapes=shapes, reuse=reuse),
    )
    chains = _Chains(dependencies, model)

    def simulated(order: Sequence[int], which: str) -> SimulatedOrder:
        timeline = model.timeline(order, inner.bytes(which))
        return SimulatedOrder(tuple(order), timeline, _distances(dependencies, order))

    default = simulated(dependencies.default(), "default")
    priority = simulated(dependencies.priority(), "priority")
    best: SimulatedOrder | None = None
    method = ""
    tried: set[tuple[int, ...]] = set()
    candidates = _candidates(dependencies, model, inner.bytes("ours"), default, priority)
    lowest = _lower_bound(model)
    for name, order in candidates:
        settled = tuple(chains.settle(order))
        if settled in tried:
            continue
        tried.add(settled)
        timeline = model.timeline(settled, inner.bytes("ours"))
        if best is None or timeline.peak < best.peak:
            best, method = SimulatedOrder(settled, timeline, ()), name
        if best.peak <= lowest:
            break
    assert best is not None  # the native orders are always there
    search = _Search(dependencies, model, inner.bytes("ours"), chains)
    if best.peak > lowest and (found := search.improve(best)) is not best:
        best, method = found, f"{method}, moved"
    ours = dataclasses.replace(best, distances=_distances(dependencies, best.order))
    orders = inner.all
    unknown_dims = {name for order in orders for name in order.unknown_dims}
    unknown_values = [name for order in orders for name in order.unknown_values]
    return GraphOrder(
        graph=graph,
        ours=ours,
        default=default,
        priority=priority,
        method=method,
        output_bytes=model.output_bytes(),
        chain_bytes=chains.bytes + sum(order.chain_bytes for order in orders),
        unknown_dims=tuple(sorted(unknown_dims.union(model.unknown_dims))),
        unknown_values=(*model.unknown_values, *unknown_values),
        bodies=tuple(orders),
    )


def closest_default_order(
    graph: ir.Graph,
    wanted: Sequence[int],
    dims: Mapping[str, int] | None = None,
    parent: ir.Node | None = None,
    *,
    shapes: ConcreteShapes | None = None,
    reuse: bool = True,
) -> DefaultFile:
    """Find a file that a default session runs nearly as wanted; the graph stays as it is.

    A depth-first walk can't run every order. Of those that were tried, the one with the lowest
    peak is returned; of several, the one that is closest.

    Args:
        graph: The graph; each of its bodies gets a file order of its own, wanted being what
            :func:`memory_order` finds for it.
        wanted: Positions of all nodes as they should run.
        dims: Numbers for symbolic dimensions.
        parent: The node whose body the graph is.
        shapes: From :func:`rewrite_rules.concrete_shapes.concrete_shapes`; go before ``dims``,
            and the more a graph computes of its shapes, the better.
        reuse: ``SessionOptions.enable_mem_reuse`` of the session that will run the graph.

    Raises:
        Refusal: If the graph is no DAG, or two nodes have an output of one name.
        ValueError: If ``wanted`` does not have every node once, after what it reads.
    """
    dims = dims or {}
    dependencies = Dependencies.of(graph)
    if not dependencies.is_order(wanted):
        raise ValueError(
            f"not an order of the {len(dependencies.nodes)} nodes: each has to be there "
            "once, after all that it reads"
        )
    model = MemoryModel(graph, dependencies, dims, parent, shapes=shapes, reuse=reuse)
    inner: dict[int, int] = {}
    files = []
    for index, node in enumerate(dependencies.nodes):
        parts = [
            closest_default_order(
                body,
                memory_order(body, dims, node, shapes=shapes, reuse=reuse).ours.order,
                dims,
                node,
                shapes=shapes,
                reuse=reuse,
            )
            for body in bodies(node)
        ]
        if parts:
            files += parts
            inner[index] = inner_bytes(
                node, [(part.runs.peak, part.output_bytes) for part in parts]
            )
    best: tuple[tuple[int, float], list[int], list[int], Timeline] | None = None
    for file_order in _default_files(dependencies, model, wanted):
        runs = dependencies.default(file_order)
        timeline = model.timeline(runs, inner)
        score = timeline.peak, -_closeness(runs, wanted)
        if best is None or score < best[0]:
            best = score, file_order, runs, timeline
    assert best is not None  # the file as it is
    score, file_order, runs, timeline = best
    return DefaultFile(
        graph=graph,
        file_order=tuple(file_order),
        runs=SimulatedOrder(tuple(runs), timeline, _distances(dependencies, runs)),
        closeness=-score[1],
        output_bytes=model.output_bytes(),
        bodies=tuple(files),
    )


def _rearrange(graph: ir.Graph, order: Sequence[int]) -> None:
    nodes = list(graph)
    if len(nodes) > 1:
        graph.remove(nodes)
        graph.extend(nodes[index] for index in order)


def _distances(dependencies: Dependencies, order: Sequence[int]) -> tuple[int, ...]:
    """Steps from each Shape's producer to it, other Shapes of that producer left out."""
    step = {node: index for index, node in enumerate(order)}
    result = []
    for node, reads_shape in enumerate(dependencies.shape_readers):
        if not reads_shape or not dependencies.producers[node]:
            continue
        producer = dependencies.producers[node][0]
        between = range(step[producer] + 1, step[node])
        siblings = sum(
            step[other] in between
            for other in dependencies.consumers[producer]
            if dependencies.shape_readers[other]
        )
        result.append(step[node] - step[producer] - siblings)
    return tuple(result)


class _Bodies:
    """The bodies of a graph, ordered, and the bytes they add to their nodes."""

    def __init__(
        self, dependencies: Dependencies, order: Callable[[ir.Graph, ir.Node], GraphOrder]
    ) -> None:
        self.all: list[GraphOrder] = []
        self._bytes: dict[str, dict[int, int]] = {"ours": {}, "default": {}, "priority": {}}
        for index, node in enumerate(dependencies.nodes):
            orders = [order(body, node) for body in bodies(node)]
            if not orders:
                continue
            self.all += orders
            for which, held in self._bytes.items():
                held[index] = inner_bytes(
                    node, [(getattr(o, which).peak, o.output_bytes) for o in orders]
                )

    def bytes(self, which: str) -> Mapping[int, int]:
        """Bytes for each control-flow node under "ours", "default" or "priority"."""
        return self._bytes[which]


class _Chains:
    """Small integers computed from nothing but shapes and constants.

    Attributes:
        bytes: Of all of them, and of the shapes.
    """

    def __init__(self, dependencies: Dependencies, model: MemoryModel) -> None:
        self._dependencies = dependencies
        self._class = [2] * len(dependencies.nodes)
        self.bytes = 0
        for index in dependencies.default():
            node = dependencies.nodes[index]
            size = sum(model.sizes[value] for value in model.makes[index])
            if dependencies.shape_readers[index]:
                self._class[index] = 0
            elif (
                size <= _CHAIN_BYTES
                and not is_constant(node)
                and dependencies.producers[index]
                and all(self._class[p] < 2 for p in dependencies.producers[index])
                and all(_comes_from_node_or_file(value) for value in node.inputs)
                and not any(True for _ in bodies(node))
            ):
                self._class[index] = 1
            else:
                continue
            self.bytes += size

    def settle(self, order: Sequence[int]) -> list[int]:
        """Move shapes and chains to where they can run first.

        ``PRIORITY_BASED`` moves nothing of the result: at each step, the first node that is
        ready lies next, and Shapes lie before all others that are ready.
        """
        length = len(order)
        key = [0] * length
        for rank, node in enumerate(order):
            key[node] = self._class[node] * length + rank
        return self._dependencies.smallest_first(key)


def _comes_from_node_or_file(value: ir.Value | None) -> bool:
    """Whether an input is no tensor that the caller feeds or a graph around has."""
    return (
        value is None
        or value.producer() is not None
        or (value.is_initializer() and not value.is_graph_input())
    )


def _lower_bound(model: MemoryModel) -> int:
    """Bytes that every order has to hold while some node runs."""
    return max(model.needed_by(node) for node in range(len(model.reads))) if model.reads else 0


def _candidates(
    dependencies: Dependencies,
    model: MemoryModel,
    inner: Mapping[int, int],
    default: SimulatedOrder,
    priority: SimulatedOrder,
) -> Iterator[tuple[str, Sequence[int]]]:
    yield "priority", priority.order
    yield "default", default.order
    tensors = _Tensors(dependencies, model, inner)
    yield "segments", _greedy(tensors, _segment)
    yield "net", _greedy(tensors, _single)
    yield "backwards", _backwards(tensors)
    yield "subtrees", _subtrees(tensors)
    if len(dependencies.nodes) <= _BEAM_NODES:
        yield "beam", _beam(tensors)


class _Tensors:
    """Bytes as the heuristics see them: aliases are one tensor, free buffers are gone.

    Attributes:
        dependencies: The graph's edges.
        size: Bytes of each tensor.
        reads: For each node, the tensors it reads, each once.
        makes: For each node, the tensors it makes and that are no aliases.
        readers: For each tensor, the nodes that read it or an alias of it.
        kept: Whether a tensor stays to the end.
        inner: Bytes that the bodies of a node need while it runs.
        overwrites: For each node, whether its output may take the place of what it reads.
    """

    def __init__(
        self, dependencies: Dependencies, model: MemoryModel, inner: Mapping[int, int]
    ) -> None:
        self.dependencies = dependencies
        self.size = model.sizes
        count = len(dependencies.nodes)
        self.reads: list[list[int]] = []
        self.makes: list[list[int]] = []
        self.readers: list[list[int]] = [[] for _ in model.sizes]
        self.kept = list(model.outputs)
        self.inner = [inner.get(node, 0) for node in range(count)]
        self.overwrites = [value is not None for value in model.overwrites]
        for node in range(count):
            read = {model.roots[value] for value in model.reads[node]}
            self.reads.append(sorted(read - {-1}))
            self.makes.append(
                [value for value in model.makes[node] if model.roots[value] == value]
            )
            for value in self.reads[node]:
                self.readers[value].append(node)
        for value, readers in enumerate(self.readers):
            # What nobody reads is given back at the end.
            self.kept[value] = self.kept[value] or not readers


class _State:
    """A run that is under way: what is ready, and what the next node would change."""

    def __init__(self, tensors: _Tensors) -> None:
        self.tensors = tensors
        dependencies = tensors.dependencies
        count = len(dependencies.nodes)
        self.waiting = [len(producers) for producers in dependencies.producers]
        self.grows = [sum(tensors.size[v] for v in made) for made in tensors.makes]
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


def _greedy(tensors: _Tensors, look: _Look) -> list[int]:
    """Run the best ready node, or chain of nodes, again and again."""
    state = _State(tensors)
    dependencies = tensors.dependencies
    absent = set(dependencies.constants)
    result = list(dependencies.constants)
    heap: list[tuple[_Key, int, int, int]] = []
    version = [0] * len(dependencies.nodes)

    def push(node: int) -> None:
        version[node] += 1
        key, length = look(state, node)
        # Of equals, one that became ready last: the branch under way is finished first.
        heapq.heappush(heap, (key, -len(result), node, length + (version[node] << 32)))

    for node, waiting in enumerate(state.waiting):
        if not waiting and node not in absent:
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


def _backwards(tensors: _Tensors) -> list[int]:
    """The greedy order of the reversed graph, reversed.

    There, a node brings the tensors it reads to life, and ends those that it makes.
    """
    dependencies = tensors.dependencies
    absent = set(dependencies.constants)
    waiting = [len(consumers) for consumers in dependencies.consumers]
    alive = list(tensors.kept)
    change = [
        sum(tensors.size[v] for v in tensors.reads[node] if not alive[v])
        - sum(tensors.size[v] for v in tensors.makes[node])
        for node in range(len(waiting))
    ]
    done = [False] * len(waiting)
    heap = [
        (change[node], 0, -node)
        for node, left in enumerate(waiting)
        if not left and node not in absent
    ]
    heapq.heapify(heap)
    result: list[int] = []
    while heap:
        key, _, negative = heapq.heappop(heap)
        node = -negative
        if done[node] or key != change[node]:
            continue
        done[node] = True
        result.append(node)
        for producer in dependencies.producers[node]:
            waiting[producer] -= 1
            if not waiting[producer]:
                heapq.heappush(heap, (change[producer], -len(result), -producer))
        for value in tensors.reads[node]:
            if alive[value]:
                continue
            alive[value] = True
            for reader in tensors.readers[value]:
                if not done[reader]:
                    change[reader] -= tensors.size[value]
                    if not waiting[reader]:
                        heapq.heappush(heap, (change[reader], -len(result), -reader))
    return [*dependencies.constants, *reversed(result)]


def _subtrees(tensors: _Tensors) -> list[int]:
    """Depth first; what a subtree needs is reckoned as if no other one shared its nodes."""
    dependencies = tensors.dependencies
    size = [sum(tensors.size[v] for v in made) for made in tensors.makes]
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
    absent = set(dependencies.constants)
    stack = [
        node
        for node, consumers in enumerate(dependencies.consumers)
        if not consumers and node not in absent
    ]
    stack.sort(key=lambda node: needs[node] - size[node])
    result = list(dependencies.constants)
    visited = [False] * len(size)
    while stack:
        node = stack.pop()
        if node < 0:
            result.append(~node)
        elif not visited[node]:
            visited[node] = True
            stack.append(~node)
            stack += [p for p in sorted_producers[node] if not visited[p]]
    return result


class _Search:
    """Lowers the peak of an order by moving nodes away from it, one tensor after another."""

    def __init__(
        self,
        dependencies: Dependencies,
        model: MemoryModel,
        inner: Mapping[int, int],
        chains: _Chains,
    ) -> None:
        self._dependencies = dependencies
        self._model = model
        self._inner = inner
        self._chains = chains

    def improve(self, best: SimulatedOrder) -> SimulatedOrder:
        """Return a better order, or the same one."""
        left = min(_MOST_MOVES, _MOVED_NODES // max(len(best.order), 1))
        while left > 0:
            before = best
            for order in self._moves(best):
                settled = tuple(self._chains.settle(order))
                timeline = self._model.timeline(settled, self._inner)
                left -= 1
                if _height(timeline) < _height(best.timeline):
                    best = SimulatedOrder(settled, timeline, ())
                    break
                if left <= 0:
                    break
            if best is before:
                break
        return best

    def _moves(self, best: SimulatedOrder) -> Iterator[list[int]]:
        order, peak = list(best.order), best.timeline.step
        step = {node: index for index, node in enumerate(order)}
        model = self._model
        maker = {value: node for node, made in enumerate(model.makes) for value in made}
        readers: dict[int, set[int]] = {}
        for node in order:
            for value in model.reads[node]:
                readers.setdefault(value, set()).add(step[node])
        waiting = [
            value
            for value, steps in readers.items()
            if step[maker[value]] < peak < max(steps) and peak not in steps
        ]
        waiting.sort(key=lambda value: -model.sizes[value])
        for value in waiting[:_TENSORS_AT_PEAK]:
            later = sorted(at for at in readers[value] if at > peak)
            if min(readers[value]) > peak:  # make it later
                node = maker[value]
                rest = [other for other in order if other != node]
                place = rest.index(order[later[0]])
                yield [*rest[:place], node, *rest[place:]]
            along = self._needed([order[at] for at in later], step, peak)
            if along is not None:  # read it earlier
                now = [node for node in order[peak:] if node in along]
                after = [node for node in order[peak:] if node not in along]
                yield [*order[:peak], *now, *after]

    def _needed(
        self, nodes: Sequence[int], step: Mapping[int, int], peak: int
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
            pending += self._dependencies.producers[node]
        return found


def _height(timeline: Timeline) -> tuple[int, int]:
    """A lower peak is better, then a shorter one."""
    return timeline.peak, int((timeline.live == timeline.peak).sum())


# The last node, and how one got there.
_Way = tuple["_Way | None", int]
# Peak, bytes held, ready nodes, how one got there; by the set of executed nodes.
_BeamState = tuple[int, int, list[int], _Way | None]


def _beam(tensors: _Tensors) -> list[int]:
    """Go on from the best sets of executed nodes of each size; exact if none is dropped."""
    dependencies = tensors.dependencies
    nodes = sorted(set(range(len(dependencies.nodes))).difference(dependencies.constants))
    width = max(_BEAM_STATES // max(len(nodes), 1), 8)
    needs = [sum(1 << p for p in producers) for producers in dependencies.producers]
    readers = [sum(1 << node for node in found) for found in tensors.readers]
    grows = [sum(tensors.size[v] for v in made) for made in tensors.makes]
    states: dict[int, _BeamState] = {
        0: (0, 0, [node for node in nodes if not needs[node]], None)
    }
    for _ in nodes:
        following: dict[int, _BeamState] = {}
        for executed, (peak, held, ready, way) in states.items():
            for node in ready:
                after = executed | 1 << node
                freed = sum(
                    tensors.size[v]
                    for v in tensors.reads[node]
                    if not tensors.kept[v] and not readers[v] & ~after
                )
                over = min(grows[node], freed) if tensors.overwrites[node] else 0
                highest = max(peak, held + grows[node] - over + tensors.inner[node])
                known = following.get(after)
                if known is None or highest < known[0]:
                    rest = [other for other in ready if other != node]
                    rest += [
                        other
                        for other in dependencies.consumers[node]
                        if not needs[other] & ~after
                    ]
                    left = held + grows[node] - freed
                    following[after] = highest, left, rest, (way, node)
        best = sorted(following.items(), key=lambda item: item[1][:2])[:width]
        states = dict(best)
    result: list[int] = []
    walk = next(iter(states.values()))[3]
    while walk is not None:
        walk, last = walk
        result.append(last)
    return [*dependencies.constants, *reversed(result)]


def _default_files(
    dependencies: Dependencies, model: MemoryModel, wanted: Sequence[int]
) -> Iterator[list[int]]:
    """Files whose depth-first walk may come close to an order.

    Of the producers of a node, the one with the highest index runs first. So positions are
    given from the end of the file on, to the node that is to run earliest among those whose
    consumers have one; or to the one with the earliest node behind it.
    """
    count = len(dependencies.nodes)
    yield list(range(count))
    yield list(wanted)
    tensors = _Tensors(dependencies, model, {})
    for order in (wanted, _subtrees(tensors)):
        rank = [0] * count
        for step, node in enumerate(order):
            rank[node] = step
        yield _from_the_end(dependencies, rank)
        earliest = list(rank)
        for node in order:
            for producer in dependencies.producers[node]:
                earliest[node] = min(earliest[node], earliest[producer])
        # Branches of one beginning are all as early: the shorter way first.
        keys = sorted(range(count), key=lambda node: (earliest[node], rank[node]))
        for step, node in enumerate(keys):
            earliest[node] = step
        yield _from_the_end(dependencies, earliest)


def _from_the_end(dependencies: Dependencies, rank: Sequence[int]) -> list[int]:
    waiting = [len(consumers) for consumers in dependencies.consumers]
    absent = set(dependencies.constants)
    heap = [
        (rank[node], node)
        for node, left in enumerate(waiting)
        if not left and node not in absent
    ]
    heapq.heapify(heap)
    result: list[int] = []
    while heap:
        _, node = heapq.heappop(heap)
        result.append(node)
        for producer in dependencies.producers[node]:
            waiting[producer] -= 1
            if not waiting[producer]:
                heapq.heappush(heap, (rank[producer], producer))
    return [*dependencies.constants, *reversed(result)]


def _closeness(order: Sequence[int], wanted: Sequence[int]) -> float:
    """Share of pairs that are in the same order in both (Kendall's tau, from 0 to 1)."""
    rank = {node: step for step, node in enumerate(wanted)}
    pairs = len(order) * (len(order) - 1) // 2
    return 1 - _inversions([rank[node] for node in order]) / pairs if pairs else 1.0


def _inversions(numbers: list[int]) -> int:
    """Pairs of which the larger one stands first; a Fenwick tree over the numbers."""
    tree = [0] * (len(numbers) + 1)
    result = 0
    for seen, number in enumerate(numbers):
        index, smaller = number + 1, 0
        while index:
            smaller += tree[index]
            index &= index - 1
        result += seen - smaller
        index = number + 1
        while index < len(tree):
            tree[index] += 1
            index += index & -index
    return result
