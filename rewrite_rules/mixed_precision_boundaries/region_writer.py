# SPDX-License-Identifier: MIT
"""Writes regions of another precision into a graph: Q and DQ nodes, their parameters, names.

Nothing here refuses: what comes here was checked.
"""

from __future__ import annotations

__all__ = ["RegionWriter", "feeds_a_body"]

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from rewrite_rules.graph.nodes import remove_node
from rewrite_rules.graph.quantize_linear import is_dequantize_linear
from rewrite_rules.graph.refusal import Refusal
from rewrite_rules.mixed_precision_boundaries.qdq_builder import QdqBuilder, graph_of
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
        self._make = QdqBuilder(model)
        # Operators whose output is float now; whether a body reads it.
        self._left: list[tuple[ir.Node, bool]] = []

    # Tensors.

    def retype(
        self,
        tensor: QuantizedTensor,
        plan: TensorPlan,
        grids: Mapping[ir.DataType, QuantizationGrid],
    ) -> None:
        """Produce a tensor in a type, and convert it once to each other type that is read.

        Every DequantizeLinear that is there reads the codes of the type that its readers want;
        where they want several, it gets a twin for each. The fold rules take out what of it
        changes no value.

        Args:
            tensor: The activation.
            plan: Types of it.
            grids: Of each of these types.
        """
        if plan.produced == _FLOAT:
            self._leave_float(tensor, plan)
            return
        readers = {node: _readers(node, plan) for node in tensor.dequantizes}
        read = {dtype for found in readers.values() for dtype in found}
        codes = self._codes(tensor, plan.produced, sorted(read), grids)
        for node, found in readers.items():
            kept, *others = found or [plan.produced]
            for dtype in others:
                twin = self._make.dequantize(tensor, codes[dtype], grids[dtype])
                _graph(node).insert_after(node, twin)
                for reader, index in found[dtype]:
                    reader.replace_input_with(index, twin.outputs[0])
            node.replace_input_with(0, codes[kept])
            self._make.set_grid(node, tensor, grids[kept])

    def _codes(
        self,
        tensor: QuantizedTensor,
        produced: ir.DataType,
        read: Iterable[ir.DataType],
        grids: Mapping[ir.DataType, QuantizationGrid],
    ) -> dict[ir.DataType, ir.Value]:
        """Return the codes of each type: ``Q(produced)``, and ``DQ -> Q`` behind it."""
        own, quantize = tensor.grid.dtype, tensor.quantize
        codes = {produced: tensor.codes}
        if quantize is not None and produced != own and (own in read or tensor.codes_are_read):
            # Codes that others read stay the output of the QuantizeLinear that is there.
            assert tensor.source is not None
            first = self._make.quantize(tensor, tensor.source, grids[produced])
            start = self._make.dequantize(tensor, first.outputs[0], grids[produced])
            _graph(quantize).insert_before(quantize, [first, start])
            quantize.replace_input_with(0, start.outputs[0])
            self._make.set_grid(quantize, tensor, grids[own])
            codes = {produced: first.outputs[0], own: tensor.codes}
        elif quantize is not None:
            self._make.set_grid(quantize, tensor, grids[produced])
        for dtype in read:
            if dtype not in codes:
                start = self._make.dequantize(tensor, codes[produced], grids[produced])
                step = self._make.quantize(tensor, start.outputs[0], grids[dtype])
                _insert_behind(codes[produced], [start, step])
                codes[dtype] = step.outputs[0]
        return codes

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
        assert tensor.quantize is not None
        node = self._clip(graph_of(tensor), source, tensor.grid, tensor.name)
        _graph(tensor.quantize).insert_before(tensor.quantize, node)
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
        graph, value = _graph(old), old.outputs[0]
        stem = value.name or "constant"
        parameters = [(change.codes, "codes"), (change.scale, "scale")]
        if change.zero_point is not None:
            parameters.append((change.zero_point, "zero_point"))
        inputs: list[ir.Value | None] = [
            self._make.initializer(graph, array, f"{stem}_{kind}_converted")
            for array, kind in parameters
        ]
        inputs += old.inputs[len(inputs) :]
        node = self._make.node("DequantizeLinear", inputs, f"{stem}_converted", value)
        node.domain = self._make.domain(change.codes.dtype.itemsize == 2, old)
        if change.zero_point is None:
            node.attributes.update(old.attributes)
        graph.insert_after(old, node)
        for reader, index in list(value.uses()):
            if reader in change.readers:
                reader.replace_input_with(index, node.outputs[0])
        if not value.uses() and not value.is_graph_output():
            remove_node(old)


def _readers(
    dequantize: ir.Node, plan: TensorPlan
) -> dict[ir.DataType, list[tuple[ir.Node, int]]]:
    """Return what reads a DequantizeLinear, by type; first the type that keeps its name."""
    value = dequantize.outputs[0]
    found: dict[ir.DataType, list[tuple[ir.Node, int]]] = {}
    if value.is_graph_output():
        found[plan.output] = []
    for reader, index in value.uses():
        # A QuantizeLinear that another tensor's rewrite put there is in no plan; what is
        # dequantised is float.
        dtype = plan.reads.get(reader, plan.produced)
        dtype = plan.produced if dtype == _FLOAT else dtype
        found.setdefault(dtype, []).append((reader, index))
    return found


def _insert_behind(value: ir.Value, nodes: Sequence[ir.Node]) -> None:
    producer = value.producer()
    if producer is not None:
        _graph(producer).insert_after(producer, nodes)
    else:
        assert isinstance(value.graph, ir.Graph)
        value.graph.insert_before(value.graph[0], nodes)


def _graph(node: ir.Node) -> ir.Graph:
    assert isinstance(node.graph, ir.Graph)
    return node.graph


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
