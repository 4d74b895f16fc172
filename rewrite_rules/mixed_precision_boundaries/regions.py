# SPDX-License-Identifier: MIT
"""Which type each quantised activation is produced in, and which each node reads.

A user names tensors or nodes; what has to follow is found here, in the manner of onnxruntime's
``MixedPrecisionTensorQuantOverridesFixer``, one hop, whatever the operators are:

1. a tensor that is to be of another type takes with it those of its *group*: what Reshape,
   Split, MaxPool and other data movement reads and writes by one grid, now;
2. its producer and each of its consumers become nodes of a single type;
3. what such a node writes is produced in its type; what it reads is read by it in that type;
4. everybody else reads the type that it read before.

Unlike there, tensors of two types may be neighbours: a node between takes the type of what it
writes. Contradictions are errors that name both sides.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Hashable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from rewrite_rules.graph.nodes import is_quantize_linear, label
from rewrite_rules.mixed_precision_boundaries.quantization_grid import QuantizationGrid
from rewrite_rules.mixed_precision_boundaries.quantized_graph import (
    QuantizedGraph,
    QuantizedTensor,
)
from rewrite_rules.mixed_precision_boundaries.tensor_overrides import (
    OverrideError,
    TensorOverride,
)
from rewrite_rules.remarks import Refusal

# Their output has its input's parameters: onnxruntime's quantiser sees to it, and its CPU
# kernels run on the codes, without Q and DQ, as long as it is so.
SHARING_OPERATORS = frozenset({
    "AveragePool", "DepthToSpace", "Expand", "Flatten", "Gather", "GatherElements", "Identity",
    "MaxPool", "Pad", "ReduceMax", "ReduceMin", "Reshape", "Resize", "Slice", "SpaceToDepth",
    "Split", "Squeeze", "Tile", "TopK", "Transpose", "Unsqueeze",
})  # fmt: skip


# The override of each activation, and the name by which the user asked for it.
Overridden = Mapping[QuantizedTensor, tuple[str, TensorOverride]]


@dataclasses.dataclass
class TensorPlan:
    """What becomes of one activation.

    ``produced`` is the type of its codes; FLOAT: it is not quantised, and keeps its range if
    ``clipped``. ``output`` is that of a graph output of its values.
    """

    tensor: QuantizedTensor
    produced: ir.DataType
    reads: dict[ir.Node, ir.DataType]
    output: ir.DataType
    clipped: bool = False

    def types(self) -> set[ir.DataType]:
        return {self.produced, self.output, *self.reads.values()}

    def grid(self, dtype: ir.DataType) -> QuantizationGrid:
        """Return the grid that the activation gets in a type: its own, or a refined one."""
        own = self.tensor.grid
        return own if dtype == own.dtype else own.refine(dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class ConstantChange:
    """New codes for what some nodes read of a dequantised constant; others keep the old ones.

    The scale has its old shape; without a zero point, that stays as it is.
    """

    dequantize: ir.Node
    readers: tuple[ir.Node, ...]
    codes: npt.NDArray[np.generic]
    scale: npt.NDArray[np.generic]
    zero_point: npt.NDArray[np.generic] | None


@dataclasses.dataclass(eq=False)
class Region:
    """What is rewritten together, or not at all.

    ``seeds`` are what the user named. The constants are found later
    (:mod:`.region_constants`), with the biases that stay, by a node that reads each.
    """

    seeds: list[str] = dataclasses.field(default_factory=list)
    plans: dict[QuantizedTensor, TensorPlan] = dataclasses.field(default_factory=dict)
    constants: list[ConstantChange] = dataclasses.field(default_factory=list)
    biases_that_stay: dict[ir.Node, Refusal] = dataclasses.field(default_factory=dict)
    refusal: Refusal | None = None


@dataclasses.dataclass(frozen=True)
class _Request:
    """A type that something is asked to have, and who asks."""

    dtype: ir.DataType
    by: str
    # A node takes the type of the strongest request.
    strength: int = 0


# Strengths: the consumer of a tensor, its producer, a node that the user named.
_CONSUMER, _PRODUCER, _NAMED = range(3)


class Groups:
    """Disjoint sets that grow together; one that is alone is a set, too."""

    def __init__(self) -> None:
        self._sets: dict[Hashable, list[Any]] = {}

    def find(self, item: Hashable) -> list[Any]:
        """Return the items of a set; it is the same list for all of them."""
        return self._sets.setdefault(item, [item])

    def union(self, first: Hashable, second: Hashable) -> None:
        less, more = sorted((self.find(first), self.find(second)), key=len)
        if less is not more:
            more += less
            self._sets.update(dict.fromkeys(less, more))


def sharing_groups(graph: QuantizedGraph) -> Groups:
    """The activations that data movement reads and writes by one grid."""
    groups = Groups()
    for tensor in graph.tensors:
        for node in tensor.consumers():
            if node.op_type not in SHARING_OPERATORS or node.domain:
                continue
            # Only the first input moves; others are indices, sizes, repeats.
            if node.inputs[0] not in {dq.outputs[0] for dq in tensor.dequantizes}:
                continue
            try:
                written = graph.written_by(node)
            except Refusal:
                continue
            for other in written:
                if other.grid == tensor.grid:
                    groups.union(tensor, other)
    return groups


def find_regions(
    graph: QuantizedGraph,
    overridden: Overridden,
    promote: Collection[str],
    promoted: ir.DataType,
    groups: Groups,
) -> list[Region]:
    """Find what has to change: the regions, those that the graph does not allow among them.

    What ``promote`` names is to be of type ``promoted``, 16 bits or FLOAT; a name of a tensor
    and of a node means the tensor.
    """
    requests = _Requests(graph, groups)
    for tensor, (name, override) in overridden.items():
        requests.override(tensor, name, override)
    for name in promote:
        requests.promote(name, promoted)
    requests.ask_nodes()
    requests.ask_activations()
    return requests.gathered()


class _Requests:
    """What is asked, by whom, until it is known whether all of it goes together."""

    def __init__(self, graph: QuantizedGraph, groups: Groups) -> None:
        self._graph, self._groups, self._regions = graph, groups, Groups()
        self._produced: dict[QuantizedTensor, _Request] = {}
        self._read: dict[tuple[QuantizedTensor, ir.Node], _Request] = {}
        self._nodes: dict[ir.Node, _Request] = {}
        # Consumers of these read what is produced, unless they are asked otherwise.
        self._converts: dict[QuantizedTensor, TensorOverride] = {}
        # What the user named, and nodes that can't be what they are asked.
        self._seeds: dict[Hashable, str] = {}
        self._refused: dict[Hashable, Refusal] = {}

    def override(self, tensor: QuantizedTensor, name: str, override: TensorOverride) -> None:
        """Ask for what an override of a tensor says."""
        by = f"the override of {name!r}"
        self._seeds[tensor] = name
        self._produce(tensor, _Request(override.quant_type or tensor.grid.dtype, by))
        if override.convert is None:
            return
        self._converts[tensor] = override
        names = override.recv_nodes
        for node in tensor.consumers():
            if label(node) in names if names is not None else not is_quantize_linear(node):
                self._consume(tensor, node, _Request(override.convert, by))

    def promote(self, name: str, dtype: ir.DataType) -> None:
        """Ask for the type of a named tensor, or of the nodes of that name."""
        by = f"the promotion of {name!r}"
        tensors = self._graph.by_name.get(name, ())
        for tensor in tensors:
            self._seeds[tensor] = name
            self._produce(tensor, _Request(dtype, by))
        for node in () if tensors else self._graph.by_label.get(name, ()):
            if not is_quantize_linear(node):
                self._seeds[node] = name
                self._unify(node, _Request(dtype, by, _NAMED))

    def ask_nodes(self) -> None:
        """Ask the nodes around each tensor of another type, and its group, for that type."""
        kept = set()  # nodes whose output the user wants in the type that it has
        for tensor, request in list(self._produced.items()):
            if request.dtype == tensor.grid.dtype:
                kept.add(tensor.producer)
            elif tensor not in self._converts:
                for member in self._groups.find(tensor):
                    self._regions.union(tensor, member)
                    self._produce(member, request)
                    if member not in self._converts:
                        self._ask_neighbours(member, request)
        for node, request in list(self._nodes.items()):
            if request.strength == _CONSUMER and node in kept:
                del self._nodes[node]

    def _ask_neighbours(self, tensor: QuantizedTensor, request: _Request) -> None:
        readers = (node for node in tensor.consumers() if not is_quantize_linear(node))
        ends = [(node, _CONSUMER) for node in readers]
        if tensor.producer is not None:
            ends.append((tensor.producer, _PRODUCER))
        for node, strength in ends:
            self._unify(node, dataclasses.replace(request, strength=strength))
            self._regions.union(tensor, node)

    def ask_activations(self) -> None:
        """Ask what each node of one type reads and writes for it."""
        for node, request in self._nodes.items():
            try:
                read, written = self._graph.read_by(node), self._graph.written_by(node)
            except Refusal as refusal:
                # Its neighbours still belong together: they are refused with it.
                self._refused[node] = refusal.with_traceback(None)
                continue
            for tensor in read:
                self._consume(tensor, node, request)
            for tensor in written:
                self._produce(tensor, request)
            for tensor in (*read, *written):
                self._regions.union(node, tensor)

    def gathered(self) -> list[Region]:
        """Return the regions, with the plan of each tensor."""
        found: dict[int, Region] = {}

        def region_of(item: Hashable) -> Region:
            return found.setdefault(id(self._regions.find(item)), Region())

        for seed, name in self._seeds.items():
            region = region_of(seed)
            if name not in region.seeds:
                region.seeds.append(name)
        for tensor in dict.fromkeys([*self._produced, *(read for read, _ in self._read)]):
            region_of(tensor).plans[tensor] = self._plan(tensor)
        for item, reason in self._refused.items():
            region = region_of(item)
            region.refusal = region.refusal or reason
        return list(found.values())

    def _plan(self, tensor: QuantizedTensor) -> TensorPlan:
        own = _Request(tensor.grid.dtype, "")
        asked = self._produced.get(tensor, own)
        converted = self._converts.get(tensor)
        others = own if converted is None else asked
        reads = {
            # A QuantizeLinear takes what there is: whatever follows it is behind a boundary.
            node: self._read.get(
                (tensor, node), asked if is_quantize_linear(node) else others
            ).dtype
            for node in tensor.consumers()
        }
        # Codes that a caller feeds, or that another operator computed, keep their type.
        produced = (own if tensor.quantize is None else asked).dtype
        # As onnxruntime: an output is as it is produced, unless all consumers convert.
        output = produced
        if tensor.is_output and converted is not None and converted.recv_nodes is None:
            output = converted.convert or produced
        if tensor.is_output and len(read_types := set(reads.values())) == 1:
            output = read_types.pop()
        if tensor.codes_are_read or tensor.quantize is None:
            output = own.dtype  # it is dequantised from the codes that stay
        elif output == ir.DataType.FLOAT:
            output = produced  # what is dequantised is float
        return TensorPlan(tensor, produced, reads, output)

    def _produce(self, tensor: QuantizedTensor, request: _Request) -> None:
        other = self._produced.setdefault(tensor, request)
        _agree(other, request, f"tensor {tensor.name!r} is asked to be", "give one type")

    def _consume(self, tensor: QuantizedTensor, node: ir.Node, request: _Request) -> None:
        other = self._read.setdefault((tensor, node), request)
        what = f"node {label(node)!r} is asked to read tensor {tensor.name!r} as"
        _agree(other, request, what, "it reads one type")

    def _unify(self, node: ir.Node, request: _Request) -> None:
        other = self._nodes.setdefault(node, request)
        if other.strength < request.strength:
            self._nodes[node] = request
        elif other.strength == request.strength:
            _agree(
                other,
                request,
                f"node {label(node)!r} is asked to be",
                "a node has one type: name its consumers in 'convert', or give both tensors "
                "one type",
            )


def _agree(one: _Request, other: _Request, what: str, advice: str) -> None:
    if one.dtype != other.dtype:
        raise OverrideError(
            f"{what} {type_name(one.dtype)} by {one.by} and {type_name(other.dtype)} by "
            f"{other.by}; {advice}"
        )


def type_name(dtype: ir.DataType) -> str:
    """What messages call a type."""
    return dtype.name.lower()
