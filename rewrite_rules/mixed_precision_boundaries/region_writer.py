# SPDX-License-Identifier: MIT
"""Writes regions of another precision into a graph: Q and DQ nodes, their parameters, names.

Nothing here refuses: what comes here was checked.
"""

from __future__ import annotations

__all__ = ["RegionWriter", "feeds_a_body"]

from collections.abc import Iterable

import numpy as np
import onnx_ir as ir

from rewrite_rules.graph.nodes import remove_node
from rewrite_rules.graph.quantize_linear import is_dequantize_linear
from rewrite_rules.graph.refusal import Refusal
from rewrite_rules.mixed_precision_boundaries.qdq_builder import PairMaker, graph_of
from rewrite_rules.mixed_precision_boundaries.quantization_grid import QuantizationGrid
from rewrite_rules.mixed_precision_boundaries.quantized_graph import QuantizedTensor, read_grid
from rewrite_rules.mixed_precision_boundaries.region_constants import ConstantChange
from rewrite_rules.mixed_precision_boundaries.regions import TensorPlan

_FLOAT = ir.DataType.FLOAT
# Over these, onnxruntime repeats a DequantizeLinear; Identity nodes it has removed by then.
_PASSED_OPERATORS = frozenset(
    {"Identity", "MaxPool", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"}
)
# QuantizeLinear can name its type by an attribute from here on.
_OPSET_OF_TYPES = 21


class RegionWriter:
    """Rewrites tensors of one model."""

    def __init__(self, model: ir.Model) -> None:
        self._make = PairMaker(model)
        # Operators whose output is float now; whether a body reads it.
        self._left: list[tuple[ir.Node, bool]] = []

    # Tensors.

    def retype(
        self,
        tensor: QuantizedTensor,
        plan: TensorPlan,
        grids: dict[ir.DataType, QuantizationGrid],
    ) -> None:
        """Produce a tensor in a type and give its consumers those that they read.

        Args:
            tensor: The activation.
            plan: Types of it.
            grids: Of each of these types.
        """
        if plan.produced == _FLOAT:
            self._leave_float(tensor, plan)
            return
        moved: dict[ir.DataType, list[tuple[ir.Node, int]]] = {}
        home = _home(tensor, plan)
        for node, index in tensor.uses():
            # A QuantizeLinear that another tensor's rewrite put there is in no plan.
            dtype = plan.reads.get(node, plan.produced)
            # What is dequantised is float.
            moved.setdefault(plan.produced if dtype == _FLOAT else dtype, []).append(
                (node, index)
            )
        if home == plan.produced:
            self._branch_off(tensor, plan, grids, moved)
        else:
            self._put_before(tensor, plan, grids, moved, home)

    def _branch_off(
        self,
        tensor: QuantizedTensor,
        plan: TensorPlan,
        grids: dict[ir.DataType, QuantizationGrid],
        moved: dict[ir.DataType, list[tuple[ir.Node, int]]],
    ) -> None:
        """The pair that is there produces; others follow behind it."""
        self._make.set_grid(tensor, grids[plan.produced])
        grid = grids[plan.produced]
        others = {dtype: uses for dtype, uses in moved.items() if dtype != plan.produced}
        # A DQ that loses all its readers starts the first conversion: under its names, but
        # right behind the Q, wherever it stood.
        idle = [node for node in tensor.dequantizes if others and _is_left(node, plan)]
        new: list[ir.Node] = []
        starts: list[ir.Node] = []
        for dtype, uses in others.items():
            start = self._make.dequantize(
                tensor, tensor.codes, grid, f"{tensor.name}_convert_clone"
            )
            chain = self._make.pair(tensor, start.outputs[0], grids[dtype])
            _redirect(uses, chain[1].outputs[0])
            new += [start, *chain]
            starts.append(start)
        for node, start in zip(idle, starts, strict=False):
            # Bodies beside each other may have one name twice; around them it would be taken.
            if node.graph is graph_of(tensor):
                _swap_names(start, node)
        for node in idle:
            remove_node(node)
        self._insert(tensor, new, behind=True)

    def _put_before(
        self,
        tensor: QuantizedTensor,
        plan: TensorPlan,
        grids: dict[ir.DataType, QuantizationGrid],
        moved: dict[ir.DataType, list[tuple[ir.Node, int]]],
        home: ir.DataType,
    ) -> None:
        """The pair that is there stands behind a new one that produces."""
        assert tensor.quantize is not None and tensor.source is not None
        quantize = self._make.quantize(
            tensor, tensor.source, grids[plan.produced], tensor.name
        )
        codes = quantize.outputs[0]
        grid = grids[plan.produced]
        new = [quantize]
        free: list[ir.Node] = []
        if plan.produced in moved:
            reader = self._make.dequantize(tensor, codes, grid, tensor.name)
            new.append(reader)
            _redirect(moved[plan.produced], reader.outputs[0])
        else:
            free.append(self._make.dequantize(tensor, codes, grid, tensor.name))
            new += free
        for dtype in dict.fromkeys([home, *moved]):
            if dtype == plan.produced:
                continue
            if free:
                start = free.pop()
            else:
                start = self._make.dequantize(
                    tensor, codes, grid, f"{tensor.name}_convert_clone"
                )
                new.append(start)
            if dtype == home:
                tensor.quantize.replace_input_with(0, start.outputs[0])
                self._make.set_grid(tensor, grids[home])
            else:
                chain = self._make.pair(tensor, start.outputs[0], grids[dtype])
                new += chain
                _redirect(moved[dtype], chain[1].outputs[0])
        for node in tensor.dequantizes:
            if not node.outputs[0].uses() and not node.outputs[0].is_graph_output():
                remove_node(node)
        self._insert(tensor, new, behind=False)

    def _leave_float(self, tensor: QuantizedTensor, plan: TensorPlan) -> None:
        source, quantize = tensor.source, tensor.quantize
        assert source is not None and quantize is not None
        if tensor.producer is not None:
            self._left.append((tensor.producer, feeds_a_body(tensor, plan)))
        value = self._clipped(tensor, source) if plan.clipped else source
        for node, index in list(tensor.uses()):
            if plan.reads.get(node, _FLOAT) == _FLOAT:
                node.replace_input_with(index, value)
        for node in tensor.dequantizes:
            old = node.outputs[0]
            if old.is_graph_output() and plan.output == _FLOAT:
                _give_output(old, value, self._make.names.take(f"{tensor.name}_dequantized"))
            if not old.uses() and not old.is_graph_output():
                remove_node(node)
        if not tensor.codes.uses() and not tensor.codes.is_graph_output():
            remove_node(quantize)
        if (
            (clip := value.producer()) is not None
            and value is not source
            and not (value.uses() or value.is_graph_output())
        ):
            remove_node(clip)

    def _clipped(self, tensor: QuantizedTensor, source: ir.Value) -> ir.Value:
        """The values of a tensor within the range that it was quantised for."""
        node = self._clip(graph_of(tensor), source, tensor.grid, tensor.name)
        self._insert(tensor, [node], behind=False)
        return node.outputs[0]

    def _clip(
        self, graph: ir.Graph, value: ir.Value, grid: QuantizationGrid, stem: str
    ) -> ir.Node:
        low, high = map(np.asarray, grid.range)
        ends = (
            self._make.initializer(graph, low, f"{stem}_clip_min"),
            self._make.initializer(graph, high, f"{stem}_clip_max"),
        )
        return self._make.node("Clip", [value, *ends], f"{stem}_Clip", value)

    def finish(self) -> None:
        """Once all regions are written, keep onnxruntime from spoiling what is float.

        Over data movement it repeats the DequantizeLinear before it, towards the readers
        (PropagateDQForward of qdq_propagation.cc, 1.31). That aborts the process where the
        body of an If or Loop reads what was moved; and of int8 codes from opset 21 on it makes
        a QuantizeLinear of two types, with which no session loads. It does not pass a Clip,
        and one to the range of the codes changes no value.
        """
        for node, feeds_body in self._left:
            if (found := _dequantized_before(node)) is None:
                continue
            first, value, grid = found
            graph = first.graph
            repeated = grid.dtype == ir.DataType.INT8 and self._make.opset >= _OPSET_OF_TYPES
            if isinstance(graph, ir.Graph) and (feeds_body or repeated):
                clip = self._clip(graph, value, grid, value.name or "moved")
                graph.insert_before(first, clip)
                first.replace_input_with(0, clip.outputs[0])

    # Constants.

    def change_constant(self, change: ConstantChange) -> None:
        """Give some readers of a constant new codes of it."""
        old = change.dequantize
        graph = old.graph
        assert isinstance(graph, ir.Graph)
        before = [None if value is None else value.name for value in old.inputs]
        stem = old.outputs[0].name or "constant"
        codes, scale = (
            self._make.initializer(graph, array, f"{name}_converted")
            for array, name in zip((change.codes, change.scale), before, strict=False)
        )
        parameters: list[ir.Value | None] = [scale]
        if change.zero_point is not None:
            name = f"{stem}_zero_point_converted"
            parameters.append(self._make.initializer(graph, change.zero_point, name))
        else:
            parameters += old.inputs[2:]
        kept = {
            name: attribute
            for name, attribute in old.attributes.items()
            if change.zero_point is None
        }
        node = self._make.node(
            "DequantizeLinear", [codes, *parameters], f"{stem}_converted", old.outputs[0]
        )
        node.domain = self._make.domain(change.codes.dtype.itemsize == 2, old)
        node.attributes.update(kept)
        uses = [use for use in old.outputs[0].uses() if use.node in change.readers]
        graph.insert_after(old, node)
        _redirect(((use.node, use.idx) for use in uses), node.outputs[0])
        if not old.outputs[0].uses() and not old.outputs[0].is_graph_output():
            remove_node(old)

    @staticmethod
    def _insert(tensor: QuantizedTensor, nodes: list[ir.Node], behind: bool) -> None:
        if not nodes:
            return
        graph = graph_of(tensor)
        made = tensor.codes.producer()
        if made is None:
            graph.insert_before(graph[0], nodes)
        elif behind:
            graph.insert_after(made, nodes)
        else:
            graph.insert_before(made, nodes)


def feeds_a_body(tensor: QuantizedTensor, plan: TensorPlan) -> bool:
    """Whether data movement hands a float straight to the body of an If or Loop."""
    producer = tensor.producer
    return (
        producer is not None
        and producer.op_type in _PASSED_OPERATORS
        and any(
            read == _FLOAT and node.graph is not producer.graph
            for node, read in plan.reads.items()
        )
    )


def _dequantized_before(
    node: ir.Node,
) -> tuple[ir.Node, ir.Value, QuantizationGrid] | None:
    """The first node of the data movement that ends in one, and the value that it reads."""
    while node.op_type in _PASSED_OPERATORS and node.inputs:
        value = node.inputs[0]
        before = None if value is None else value.producer()
        if value is None or before is None:
            return None
        if is_dequantize_linear(before):
            try:
                return node, value, read_grid(before)
            except Refusal:
                return None  # per axis, for instance: stays where it is
        node = before
    return None


def _home(tensor: QuantizedTensor, plan: TensorPlan) -> ir.DataType:
    """The type of the pair that is there, by which graph outputs keep their names."""
    if tensor.codes_are_read or tensor.quantize is None:
        return tensor.grid.dtype
    if tensor.is_output:
        return plan.output
    if tensor.grid.dtype in plan.reads.values():
        return tensor.grid.dtype
    return plan.produced


def _redirect(uses: Iterable[tuple[ir.Node, int]], value: ir.Value) -> None:
    for node, index in list(uses):
        node.replace_input_with(index, value)


def _is_left(node: ir.Node, plan: TensorPlan) -> bool:
    """Whether all that read a DQ read another type from now on."""
    value = node.outputs[0]
    return not value.is_graph_output() and all(
        plan.reads.get(use.node, _FLOAT) not in (plan.produced, _FLOAT) for use in value.uses()
    )


def _swap_names(first: ir.Node, second: ir.Node) -> None:
    first.name, second.name = second.name, first.name
    one, other = first.outputs[0], second.outputs[0]
    one.name, other.name = other.name, one.name


def _give_output(value: ir.Value, source: ir.Value, free: str) -> None:
    """Let a graph return ``source`` under the name of ``value``, if it can have that name.

    ``value`` is called ``free`` then.
    """
    node = value.producer()
    assert node is not None
    graph = node.graph
    if (
        graph is None
        or source.producer() is None
        or source.graph is not graph
        or source.is_graph_output()
    ):
        return
    for index, output in enumerate(graph.outputs):
        if output is value:
            graph.outputs[index] = source
    name = value.name
    value.name = free
    source.name = name
    if source.shape is None:
        source.shape = value.shape
    if source.type is None:
        source.type = value.type
