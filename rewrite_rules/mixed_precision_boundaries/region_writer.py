# SPDX-License-Identifier: MIT
"""Writes regions of another precision into a graph: Q and DQ nodes, their parameters, names.

Nothing here refuses: what comes here was checked. A pair stands at every change of type; the
fold rules take out what changes no value, and :meth:`RegionWriter.finish` what nothing reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from rewrite_rules.graph.initializers import FreshNames, new_initializer
from rewrite_rules.graph.nodes import (
    dequantizer,
    input_of,
    is_quantize_linear,
    owner,
    producer,
    remove_unused,
)
from rewrite_rules.mixed_precision_boundaries.quantization_grid import QuantizationGrid
from rewrite_rules.mixed_precision_boundaries.quantized_graph import QuantizedTensor, read_grid
from rewrite_rules.mixed_precision_boundaries.region_constants import ConstantChange
from rewrite_rules.mixed_precision_boundaries.regions import Grids, TensorPlan
from rewrite_rules.remarks import Refusal

_FLOAT = ir.DataType.FLOAT
_MICROSOFT = "com.microsoft"
_Q, _DQ = "QuantizeLinear", "DequantizeLinear"
# Over these, onnxruntime repeats a DequantizeLinear; Identity nodes it has removed by then.
_PASSED_OPERATORS = frozenset(
    {"Identity", "MaxPool", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"}
)
# From here on, QuantizeLinear and DequantizeLinear take 16 bits, and types by an attribute.
_OPSET_OF_16_BITS = 21


class RegionWriter:
    """Rewrites tensors of one model; each new node and initializer has a name of its own."""

    def __init__(self, model: ir.Model) -> None:
        self._model = model
        self._opset = model.opset_imports.get("", 0)
        self._names = FreshNames(model)
        self._parameters: dict[
            tuple[QuantizedTensor, QuantizationGrid], Sequence[ir.Value]
        ] = {}
        # Operators whose output is float now.
        self._left: list[ir.Node] = []

    # Tensors.

    def retype(self, tensor: QuantizedTensor, plan: TensorPlan, grids: Grids) -> None:
        """Produce a tensor in a type, and convert it once to each other type that is read.

        Every DequantizeLinear that is there reads the codes of the type that its readers want;
        where they want several, it gets a twin for each.
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
                twin = self._convert(_DQ, tensor, codes[dtype], grids[tensor, dtype])
                node.append(twin)
                for reader, index in found[dtype]:
                    reader.replace_input_with(index, twin.outputs[0])
            node.replace_input_with(0, codes[kept])
            self._set_grid(node, tensor, grids[tensor, kept])

    def _codes(
        self,
        tensor: QuantizedTensor,
        produced: ir.DataType,
        read: Iterable[ir.DataType],
        grids: Grids,
    ) -> dict[ir.DataType, ir.Value]:
        """Return the codes of each type: ``Q(produced)``, and ``DQ -> Q`` behind it."""
        own, quantize = tensor.grid.dtype, tensor.quantize
        codes = {produced: tensor.codes}
        if quantize is not None and produced != own and (own in read or tensor.codes_are_read):
            # Codes that others read stay the output of the QuantizeLinear that is there.
            assert tensor.source is not None
            first = self._convert(_Q, tensor, tensor.source, grids[tensor, produced])
            start = self._convert(_DQ, tensor, first.outputs[0], grids[tensor, produced])
            quantize.prepend([first, start])
            quantize.replace_input_with(0, start.outputs[0])
            self._set_grid(quantize, tensor, grids[tensor, own])
            codes = {produced: first.outputs[0], own: tensor.codes}
        elif quantize is not None:
            self._set_grid(quantize, tensor, grids[tensor, produced])
        for dtype in read:
            if dtype not in codes:
                start = self._convert(_DQ, tensor, codes[produced], grids[tensor, produced])
                step = self._convert(_Q, tensor, start.outputs[0], grids[tensor, dtype])
                if (maker := codes[produced].producer()) is not None:
                    maker.append([start, step])
                else:
                    graph = _graph_of(tensor)
                    graph.insert_before(graph[0], [start, step])
                codes[dtype] = step.outputs[0]
        return codes

    def _leave_float(self, tensor: QuantizedTensor, plan: TensorPlan) -> None:
        value, quantize = tensor.source, tensor.quantize
        assert value is not None and quantize is not None
        if tensor.producer is not None:
            self._left.append(tensor.producer)
        if plan.clipped:
            # To the range that it was quantised for.
            clip = self._clip(_graph_of(tensor), value, tensor.grid, tensor.name)
            quantize.prepend(clip)
            value = clip.outputs[0]
        for node, index in list(tensor.uses()):
            if plan.reads.get(node, _FLOAT) == _FLOAT:
                node.replace_input_with(index, value)
        for node in tensor.dequantizes:
            if node.outputs[0].is_graph_output() and plan.output == _FLOAT:
                free = self._names.take(f"{tensor.name}_dequantized")
                _give_output(node.outputs[0], value, free)

    def _clip(
        self, graph: ir.Graph, value: ir.Value, grid: QuantizationGrid, stem: str
    ) -> ir.Node:
        low, high = map(np.asarray, grid.range)
        ends = (
            self._initializer(graph, low, f"{stem}_clip_min"),
            self._initializer(graph, high, f"{stem}_clip_max"),
        )
        return self._node("Clip", [value, *ends], f"{stem}_Clip", value)

    def finish(self) -> None:
        """Once all regions are written, remove what nothing reads, and keep what is float.

        Over data movement, onnxruntime repeats the DequantizeLinear before it, towards the
        readers (PropagateDQForward of qdq_propagation.cc, 1.31). Of int8 codes from opset 21
        on it makes a QuantizeLinear of two types, with which no session loads. It does not
        pass a Clip, and one to the range of the codes changes no value.
        """
        for node in self._left if self._opset >= _OPSET_OF_16_BITS else ():
            if (found := _dequantized_before(node)) is None:
                continue
            first, value, grid = found
            graph = first.graph
            if isinstance(graph, ir.Graph) and grid.dtype == ir.DataType.INT8:
                clip = self._clip(graph, value, grid, value.name or "moved")
                first.prepend(clip)
                first.replace_input_with(0, clip.outputs[0])
        remove_unused(self._model)

    # Constants.

    def change_constant(self, change: ConstantChange) -> None:
        """Give some readers of a constant new codes of it."""
        old = change.dequantize
        graph, value = old.graph, old.outputs[0]
        assert isinstance(graph, ir.Graph)
        stem = value.name or "constant"
        parameters = [(change.codes, "codes"), (change.scale, "scale")]
        if change.zero_point is not None:
            parameters.append((change.zero_point, "zero_point"))
        inputs: list[ir.Value | None] = [
            self._initializer(graph, array, f"{stem}_{kind}_converted")
            for array, kind in parameters
        ]
        inputs += old.inputs[len(inputs) :]
        node = self._node(_DQ, inputs, f"{stem}_converted", value)
        node.domain = self._domain(change.codes.dtype.itemsize == 2, old)
        if change.zero_point is None:
            node.attributes.update(old.attributes)
        old.append(node)
        for reader, index in list(value.uses()):
            if reader in change.readers:
                reader.replace_input_with(index, node.outputs[0])

    # Nodes and initializers.

    def _convert(
        self, op_type: str, tensor: QuantizedTensor, value: ir.Value, grid: QuantizationGrid
    ) -> ir.Node:
        like = value if op_type == _Q else tensor.source
        if op_type == _DQ and tensor.dequantizes:
            like = tensor.dequantizes[0].outputs[0]
        assert like is not None
        node = self._node(op_type, [value], f"{tensor.name}_convert_{op_type}", like)
        self._set_parameters(node, tensor, grid)
        return node

    def _set_grid(
        self, node: ir.Node, tensor: QuantizedTensor, grid: QuantizationGrid
    ) -> None:
        if grid == tensor.grid:
            return
        # The output_dtype of a DequantizeLinear is the float type, which stays.
        named_by = ["output_dtype"] if is_quantize_linear(node) else []
        for name in ("axis", "saturate", *named_by):
            node.attributes.pop(name, None)
        self._set_parameters(node, tensor, grid)

    def _set_parameters(
        self, node: ir.Node, tensor: QuantizedTensor, grid: QuantizationGrid
    ) -> None:
        node.resize_inputs(3)
        for index, value in enumerate(self._grid_inputs(tensor, grid), 1):
            node.replace_input_with(index, value)
        if is_quantize_linear(node):
            node.outputs[0].type = ir.TensorType(grid.dtype)
        node.domain = self._domain(grid.bits == 16, _first_node(tensor))

    def _grid_inputs(
        self, tensor: QuantizedTensor, grid: QuantizationGrid
    ) -> Sequence[ir.Value]:
        """Return scale and zero point, which all nodes of a tensor share."""
        if (tensor, grid) not in self._parameters:
            graph = _graph_of(tensor)
            # The tensor's own, if any node of its graph may read them.
            own = [
                value
                for value in _first_node(tensor).inputs[1:]
                if value is not None and value.is_initializer() and value.graph is graph
            ]
            zero_point = np.asarray(grid.zero_point, grid.dtype.numpy())
            arrays = {"scale": np.asarray(grid.scale), "zero_point": zero_point}
            self._parameters[tensor, grid] = (
                own
                if grid == tensor.grid and len(own) == len(arrays)
                else [
                    self._initializer(graph, array, f"{tensor.name}_{kind}_convert")
                    for kind, array in arrays.items()
                ]
            )
        return self._parameters[tensor, grid]

    def _initializer(
        self, graph: ir.Graph, array: npt.NDArray[np.generic], name: str
    ) -> ir.Value:
        return new_initializer(graph, ir.Tensor(array, name=self._names.take(name)))

    def _node(
        self, op_type: str, inputs: Sequence[ir.Value | None], stem: str, like: ir.Value
    ) -> ir.Node:
        """Make a standard node whose output is of the type and shape of another value."""
        name = self._names.take(f"{stem}_Output")
        output = ir.Value(name=name, shape=like.shape, type=like.type)
        return ir.Node("", op_type, inputs, outputs=[output], name=self._names.take(stem))

    def _domain(self, wide: bool, beside: ir.Node) -> str:
        """Return the domain of a Q or DQ (``wide``: of 16 bits) beside one of the model."""
        if beside.domain != _MICROSOFT and not (wide and self._opset < _OPSET_OF_16_BITS):
            return ""
        self._model.opset_imports.setdefault(_MICROSOFT, 1)
        return _MICROSOFT


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


def _first_node(tensor: QuantizedTensor) -> ir.Node:
    return tensor.quantize or tensor.dequantizes[0]


def _graph_of(tensor: QuantizedTensor) -> ir.Graph:
    """Return the graph that holds an activation's codes; what is new is put there."""
    graph = owner(tensor.codes)
    assert isinstance(graph, ir.Graph)
    return graph


def _dequantized_before(node: ir.Node) -> tuple[ir.Node, ir.Value, QuantizationGrid] | None:
    """The first node of the data movement that ends in one, and the value that it reads."""
    while node.op_type in _PASSED_OPERATORS and (value := input_of(node, 0)) is not None:
        if (before := dequantizer(value)) is not None:
            try:
                return node, value, read_grid(before)
            except Refusal:
                return None  # per axis, for instance: stays where it is
        if (maker := value.producer()) is None:
            return None
        node = maker
    return None


def _give_output(value: ir.Value, source: ir.Value, free: str) -> None:
    """Return ``source`` under the name of ``value``, which is called ``free`` then."""
    graph = producer(value).graph
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
