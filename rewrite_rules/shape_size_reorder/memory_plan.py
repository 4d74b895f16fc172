# SPDX-License-Identifier: MIT
"""How many bytes onnxruntime holds while it runs each node of an order.

The sizes come from shapes and types; what is held, from the plan that onnxruntime makes for a
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

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from rewrite_rules.graph.nodes import captures
from rewrite_rules.shape_size_reorder.onnxruntime_orders import Dependencies
from rewrite_rules.shapes.proved_shapes import ConcreteShapes

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
# Their float64 kernels do not.
_IN_PLACE_FLOAT_ONLY = frozenset({"LogSoftmax", "Softmax"})

# No machine holds more; millions of such tensors add up within int64.
_MOST_BYTES = 1 << 40
_STRING_BYTES = 32  # std::string of libstdc++ and libc++; short texts lie inside

# (element bytes, dimensions): one may be written over another of the same.
_Key = tuple[int, tuple[int, ...]]
# The number of what no node makes: the last of all lists, of no size and never free.
_ELSEWHERE = -1


class MemoryModel:
    """What the bytes of every order of one graph, or subgraph of ``parent``, follow from.

    A value without a shape counts as the largest input of its node.

    Attributes:
        dependencies: Of the graph's nodes; a number of a node is its position there.
        sizes: Bytes of each value that a node makes, by number; the last is any other.
        reads: For each node, the values it or its subgraphs read, once for each time; values
            that are not the graph's own are left out.
        makes: For each node, the values it makes.
        source, overwrites: Node -> the value that its first output is an alias of, or may be
            written over.
        uses: For each value, how often it is read.
        outputs: Whether a value is an output of the graph.
        unknown_values: Names of values whose size is a guess: without rank, or no tensors.
    """

    def __init__(
        self,
        graph: ir.Graph,
        shapes: ConcreteShapes,
        parent: ir.Node | None = None,
    ) -> None:
        self.dependencies = dependencies = Dependencies.of(graph)
        self._shapes = shapes
        self.unknown_values: list[str] = []
        self.sizes: list[int] = []
        self._keys: list[_Key | None] = []
        self.reads: list[list[int]] = [[] for _ in dependencies.nodes]
        self.makes: list[list[int]] = [[] for _ in dependencies.nodes]
        self.source: dict[int, int] = {}
        self.overwrites: dict[int, int] = {}
        numbers: dict[ir.Value | None, int] = {}
        # By a topological order: guesses look at the inputs of a node.
        for index in dependencies.default():
            node = dependencies.nodes[index]
            read = (*node.inputs, *captures(node))
            self.reads[index] = [numbers[value] for value in read if value in numbers]
            for value in node.outputs:
                if value.name:
                    numbers[value] = len(self.sizes)
                    self.makes[index].append(numbers[value])
                    size, key = self._measure(value, index)
                    self.sizes.append(size)
                    self._keys.append(key)
            if node.inputs and self.makes[index] and node.outputs[0].name:
                self._set_reuse(node, index, numbers)
            if _is_unchanged_state(node, graph, parent):
                self.sizes[self.makes[index][0]] = 0
        results = set(graph.outputs)
        self.outputs = [*(value in results for value in numbers), True]
        self.sizes.append(0)
        self.uses = [0] * len(self.sizes)
        for number in itertools.chain.from_iterable(self.reads):
            self.uses[number] += 1
        self._keys.append(None)

    def output_bytes(self) -> int:
        return sum(size for size, kept in zip(self.sizes, self.outputs, strict=True) if kept)

    def live(
        self, order: Sequence[int], inner: Mapping[int, int] | None = None
    ) -> npt.NDArray[np.int64]:
        """Return the bytes held while each node of an order runs, its outputs included.

        ``inner`` is the peak of a node's subgraphs while it runs.
        """
        buffers = self._plan(order)
        # For each buffer the step that it is there from, and the last one that needs it.
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for step, node in enumerate(order):
            for value in self.reads[node]:
                if not self.outputs[buffers[value]]:
                    last[buffers[value]] = step
            for value in self.makes[node]:
                first.setdefault(buffers[value], step)
        change = np.zeros(len(order) + 1, np.int64)
        for buffer, step in first.items():
            change[step] += self.sizes[buffer]
            # What nobody reads is in no list of things to give back.
            if buffer in last:
                change[last[buffer] + 1] -= self.sizes[buffer]
        live = np.cumsum(change)[: len(order)]
        if inner:
            live += np.array([inner.get(node, 0) for node in order], np.int64)
        return live

    def _plan(self, order: Sequence[int]) -> list[int]:
        """Which buffer each value has, named by the value that it was allocated for."""
        buffers = [*range(len(self.sizes) - 1), _ELSEWHERE]
        # One more use until the node that makes the value is through with it; outputs keep it.
        left = [1 + uses + kept for uses, kept in zip(self.uses, self.outputs, strict=True)]
        left[_ELSEWHERE] = len(order) * len(left)  # never free
        for node in order:
            source, over = self.source.get(node), self.overwrites.get(node)
            first = self.makes[node][0] if self.makes[node] else _ELSEWHERE
            if not self.outputs[first]:
                if source is not None:
                    buffers[first] = buffers[source]
                elif over is not None and left[buffers[over]] == 1:
                    buffers[first] = buffers[over]
                if buffers[first] != first:
                    left[buffers[first]] += left[first]
            for value in (*self.reads[node], *self.makes[node]):
                left[buffers[value]] -= 1
        return buffers

    def _measure(self, value: ir.Value, node: int) -> tuple[int, _Key | None]:
        sizes = self._shapes.of.get(value)
        if sizes is None or isinstance(value.type, (ir.SequenceType, ir.OptionalType)):
            self.unknown_values.append(value.name or "")
            return max((self.sizes[read] for read in self.reads[node]), default=0), None
        dtype = value.dtype if value.dtype is not None else ir.DataType.FLOAT
        if dtype is ir.DataType.STRING:
            return min(math.prod(sizes) * _STRING_BYTES, _MOST_BYTES), None
        bits = 8 if dtype is ir.DataType.UNDEFINED else dtype.bitwidth
        return min(-(-math.prod(sizes) * bits // 8), _MOST_BYTES), (math.ceil(bits / 8), sizes)

    def _set_reuse(
        self, node: ir.Node, index: int, numbers: Mapping[ir.Value | None, int]
    ) -> None:
        if node.op_type in _ALIASES and node.domain == "":
            if node.inputs[0] is not None:
                self.source[index] = numbers.get(node.inputs[0], _ELSEWHERE)
            return
        place = _overwritten_input(node)
        if place is None or place >= len(node.inputs):
            return
        read, key = numbers.get(node.inputs[place]), self._keys[self.makes[index][0]]
        if read is not None and key is not None and self._keys[read] == key:
            self.overwrites[index] = read


def _overwritten_input(node: ir.Node) -> int | None:
    if node.domain == "" and node.op_type in _IN_PLACE_FLOAT_ONLY:
        first = node.inputs[0]
        return None if first is None or first.dtype is ir.DataType.DOUBLE else 0
    return _IN_PLACE.get((node.domain, node.op_type))


def _is_unchanged_state(node: ir.Node, graph: ir.Graph, parent: ir.Node | None) -> bool:
    """Whether a Loop's body hands on an input other than the iteration's number."""
    return (
        parent is not None
        and parent.op_type == "Loop"
        and node.op_type == "Identity"
        and node.outputs[0].is_graph_output()
        and node.inputs[0] in graph.inputs[1:]
    )


def inner_bytes(node: ir.Node, parts: Sequence[tuple[int, int]]) -> int:
    """Bytes that subgraphs of an If, Loop or Scan hold beside the node's outputs, within 10 %.

    ``parts`` has the peak of each body, and the bytes of its outputs.
    """
    if node.op_type == "If":
        # A branch writes its outputs where those of the node are.
        return max((peak - outputs for peak, outputs in parts), default=0)
    return max((peak for peak, _ in parts), default=0)
