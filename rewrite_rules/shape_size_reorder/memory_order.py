# SPDX-License-Identifier: MIT
"""An order of the nodes of a graph that holds few bytes at a time, and how many it holds.

Every Shape and Size runs directly after its producer. The others run as in the one of
onnxruntime's two orders that holds less so, or as in the file that its optimisers read.

Orders that were searched for (the node that grows memory least, Liu's segments, Sethi and
Ullman's subtrees) held at most 4 % less, and nothing in 22 of 23 nets that people ship.

Sizes come from shapes and types; what is held, from the plan that onnxruntime makes for a
sequential session on the CPU without reuse of buffers
(``onnxruntime/core/framework/allocation_planner.cc``), which is repeated here rule by rule:

1. An output of the graph has a buffer of its own, to the end of the run.
2. Reshape, Squeeze, Unsqueeze, Flatten and Identity give their input on (``_ALIASES``).
3. Some kernels write over an input that no other node will read, if it is of the same shape
   and element size (``_IN_PLACE``). Add, Mul and most other operators never do.
4. Any other output gets a new buffer.

A buffer is given back after the last node that reads it; one that nobody reads, at the end.
What belongs to the caller (inputs), to the session (initializers) or to a graph around a
subgraph does not count, nor does what kernels take for themselves while they work. With reuse,
a session holds these bytes or more: a reused buffer is held from its first use to its last.

Rules 2 and 3 are measured, operator by operator, on onnxruntime 1.31; the plan was compared
with ``mem_bytes_requested_in_use`` of its profiles.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import onnx_ir as ir

from rewrite_rules.graph.nodes import captures, input_of, subgraphs
from rewrite_rules.shape_size_reorder.onnxruntime_orders import Dependencies
from rewrite_rules.shapes.proved_shapes import ProvedShapes

_ALIASES = frozenset({
    "Flatten", "Identity", "Optional", "OptionalGetElement", "Reshape", "Squeeze", "Unsqueeze",
})  # fmt: skip

# Operator -> input that the first output may be written over.
_IN_PLACE = dict.fromkeys([("", op_type) for op_type in (
    "Cast", "Celu", "Clip", "Elu", "HardSigmoid", "LeakyRelu", "LogSoftmax", "Relu",
    "ScatterElements", "Selu", "Shrink", "Sigmoid", "Softmax", "Softplus", "Softsign", "Tanh",
    "ThresholdedRelu", "Trilu",
)], 0)  # fmt: skip
# The tensor that is added.
_IN_PLACE |= {("com.microsoft", "FusedConv"): 3, ("com.microsoft.nchwc", "Conv"): 3}

# No machine holds more.
_MOST_BYTES = 1 << 40

# (element bytes, dimensions): one may be written over another of the same.
_Key = tuple[int, tuple[int, ...]]


class SimulatedOrder(NamedTuple):
    """Positions of the nodes as they run, Constants left out, and the most bytes then held."""

    order: tuple[int, ...]
    peak: int


class GraphOrder:
    """The order computed for a graph, and those of onnxruntime; the graph stays as it is.

    A value without a shape counts as the largest input of its node.

    Attributes:
        ours: The order of nodes in the file, which ``ExecutionOrder.PRIORITY_BASED`` runs.
        default, priority: What a session runs with the file as it is.
        dependencies: Of the graph's nodes; a number of a node is its position there.
        unknown_values: Values whose size is a guess: without rank, or no tensors. Subgraphs
            included.
        subgraphs: The same for each subgraph, in the order of the file.
        output_bytes: Bytes of the outputs that nodes of the graph make.
    """

    def __init__(self, graph: ir.Graph, shapes: ProvedShapes) -> None:
        self.graph = graph
        self.dependencies = known = Dependencies.of(graph)
        self._below = [[GraphOrder(g, shapes) for g in subgraphs(n)] for n in known.nodes]
        self.subgraphs: list[GraphOrder] = [
            order for orders in self._below for order in orders
        ]
        self.unknown_values: list[str] = [
            name for g in self.subgraphs for name in g.unknown_values
        ]
        self._shapes, self._outputs = shapes, set[ir.Value | None](graph.outputs)
        # Of the values that nodes make: bytes, what may be written over, how often it is read.
        self._sizes: dict[ir.Value | None, int] = {}
        self._keys: dict[ir.Value | None, _Key | None] = {}
        self._uses = collections.Counter[ir.Value]()
        default = known.default()
        # By a topological order: guesses look at the inputs of a node.
        for index in default:
            read = self._read(known.nodes[index])
            self._uses.update(read)
            largest = max((self._sizes[value] for value in read), default=0)
            for value in _made(known.nodes[index]):
                self._sizes[value], self._keys[value] = self._measure(value, largest)
        self.output_bytes = sum(self._sizes.get(value, 0) for value in self._outputs)
        self.default = self._simulated(default, "default")
        self.priority = self._simulated(known.priority(), "priority")
        candidates = (range(len(known.nodes)), default, known.as_exported())
        orders = (self._simulated(known.shapes_first(order), "ours") for order in candidates)
        self.ours = min(orders, key=lambda order: order.peak)

    def apply(self) -> set[ir.Node]:
        """Put the nodes of the graph and of all subgraphs into order, Shapes in front.

        Return each Shape and Size, which is to follow what it reads.
        """
        in_front = set[ir.Node]().union(*(order.apply() for order in self.subgraphs))
        nodes, readers = self.dependencies.nodes, self.dependencies.shape_readers
        order = sorted(self.ours.order, key=lambda index: not readers[index])
        in_front.update(nodes[index] for index in order if readers[index])
        self.graph.remove(nodes)
        self.graph.extend(nodes[index] for index in order)
        return in_front

    def _simulated(self, order: Sequence[int], name: str) -> SimulatedOrder:
        return SimulatedOrder(tuple(order), max(self.live(order, name), default=0))

    def live(self, order: Sequence[int], name: str = "default") -> list[int]:
        """Return the bytes held while each node of an order runs, its outputs included.

        Subgraphs run in their order of that name.
        """
        # The value that each buffer was allocated for; None where that is not the graph's.
        buffers: dict[ir.Value | None, ir.Value | None] = {}
        left = collections.Counter[ir.Value | None]()
        held, result = 0, []
        for index in order:
            node = self.dependencies.nodes[index]
            for value in _made(node):
                buffer = buffers[value] = self._buffer(value, node, buffers, left)
                left[buffer] += self._uses[value]
                if buffer is value:
                    held += self._sizes[value]
            result.append(held + self._inner(index, name))
            # What nobody reads is in no list of things to give back.
            for value in self._read(node):
                buffer = buffers[value]
                left[buffer] -= 1
                if not left[buffer] and buffer not in self._outputs:
                    held -= self._sizes.get(buffer, 0)
        return result

    def _inner(self, index: int, name: str) -> int:
        """Bytes that subgraphs of a node hold besides its outputs, within 10 %."""
        below = self._below[index]
        peaks = [getattr(order, name).peak for order in below]
        if self.dependencies.nodes[index].op_type == "If":
            # A branch writes its outputs where those of the node are.
            peaks = [
                peak - order.output_bytes for peak, order in zip(peaks, below, strict=True)
            ]
        return max(peaks, default=0)

    def _read(self, node: ir.Node) -> list[ir.Value]:
        """Return what a node or its subgraphs read of other nodes, each as often as it is."""
        read = (*node.inputs, *captures(node))
        return [value for value in read if value is not None and value in self._sizes]

    def _buffer(
        self,
        value: ir.Value,
        node: ir.Node,
        buffers: Mapping[ir.Value | None, ir.Value | None],
        left: Mapping[ir.Value | None, int],
    ) -> ir.Value | None:
        """Return the value whose buffer a new one has: its own, but by rule 2 or 3."""
        if value is not node.outputs[0] or value in self._outputs:
            return value
        if node.op_type in _ALIASES and node.domain == "":
            source = input_of(node, 0)
            return value if source is None else buffers.get(source)
        place, key = _IN_PLACE.get((node.domain, node.op_type)), self._keys[value]
        over = None if place is None else input_of(node, place)
        if (buffer := buffers.get(over)) is None or buffer in self._outputs:
            return value
        is_alike = key is not None and self._keys[over] == key
        return buffer if is_alike and left[buffer] == 1 else value

    def _measure(self, value: ir.Value, largest: int) -> tuple[int, _Key | None]:
        sizes = self._shapes.sizes(value)
        if sizes is None and value.shape is not None and value.shape.is_static():
            sizes = value.shape.numpy()  # believed, for an estimate
        if sizes is None or isinstance(value.type, (ir.SequenceType, ir.OptionalType)):
            self.unknown_values.append(value.name or "")
            return largest, None
        dtype = value.dtype if value.dtype is not None else ir.DataType.FLOAT
        # What texts take isn't known; no net holds many.
        has_no_width = dtype in (ir.DataType.UNDEFINED, ir.DataType.STRING)
        bits = 8 if has_no_width else dtype.bitwidth
        return min(-(-math.prod(sizes) * bits // 8), _MOST_BYTES), (math.ceil(bits / 8), sizes)


def _made(node: ir.Node) -> list[ir.Value]:
    """Return the outputs of a node, but for those that are left out."""
    return [value for value in node.outputs if value.name]
