# SPDX-License-Identifier: MIT
"""New QuantizeLinear and DequantizeLinear nodes beside those of an activation."""

from __future__ import annotations

__all__ = ["QdqBuilder", "graph_of"]

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from rewrite_rules.graph.initializers import new_initializer
from rewrite_rules.graph.names import FreshNames
from rewrite_rules.graph.nodes import drop_unused_initializers, owner
from rewrite_rules.graph.quantize_linear import is_quantize_linear
from rewrite_rules.mixed_precision_boundaries.quantization_grid import QuantizationGrid
from rewrite_rules.mixed_precision_boundaries.quantized_graph import QuantizedTensor

_MICROSOFT = "com.microsoft"
# From here on, QuantizeLinear and DequantizeLinear take 16 bits.
_OPSET_OF_16_BITS = 21


def graph_of(tensor: QuantizedTensor) -> ir.Graph:
    """Return the graph that holds an activation's codes; what is new is put there."""
    graph = owner(tensor.codes)
    assert isinstance(graph, ir.Graph)
    return graph


class QdqBuilder:
    """Makes nodes and initializers for one model, each under a name of its own.

    Attributes:
        names: The names of the model.
        opset: Version of its standard operators.
    """

    def __init__(self, model: ir.Model) -> None:
        self.names = FreshNames(model)
        self.opset = model.opset_imports.get("", 0)
        self._model = model
        self._parameters: dict[
            tuple[QuantizedTensor, QuantizationGrid], tuple[ir.Value, ...]
        ] = {}

    def quantize(
        self, tensor: QuantizedTensor, value: ir.Value, grid: QuantizationGrid
    ) -> ir.Node:
        """Make a QuantizeLinear of a value of the tensor."""
        inputs: list[ir.Value | None] = [value, *self._grid_inputs(tensor, grid)]
        node = self.node(
            "QuantizeLinear", inputs, f"{tensor.name}_convert_QuantizeLinear", value
        )
        node.domain = self._domain(tensor, grid)
        node.outputs[0].type = ir.TensorType(grid.dtype)
        return node

    def dequantize(
        self, tensor: QuantizedTensor, codes: ir.Value, grid: QuantizationGrid
    ) -> ir.Node:
        """Make a DequantizeLinear of codes of the tensor."""
        inputs: list[ir.Value | None] = [codes, *self._grid_inputs(tensor, grid)]
        like = tensor.dequantizes[0].outputs[0] if tensor.dequantizes else tensor.source
        assert like is not None
        stem = f"{tensor.name}_convert_DequantizeLinear"
        node = self.node("DequantizeLinear", inputs, stem, like)
        node.domain = self._domain(tensor, grid)
        return node

    def set_grid(self, node: ir.Node, tensor: QuantizedTensor, grid: QuantizationGrid) -> None:
        """Give a Q or DQ of the tensor another grid."""
        if grid == tensor.grid:
            return
        before = list(node.inputs[1:])
        node.resize_inputs(3)
        for index, value in enumerate(self._grid_inputs(tensor, grid), 1):
            node.replace_input_with(index, value)
        # The output_dtype of a DequantizeLinear is the float type, which stays.
        stale = ["axis", "saturate"]
        if is_quantize_linear(node):
            stale.append("output_dtype")
            node.outputs[0].type = ir.TensorType(grid.dtype)
        for name in stale:
            node.attributes.pop(name, None)
        node.domain = self._domain(tensor, grid)
        drop_unused_initializers(before)

    def initializer(
        self, graph: ir.Graph, array: npt.NDArray[np.generic], name: str
    ) -> ir.Value:
        """Make an initializer."""
        return new_initializer(graph, ir.Tensor(array, name=self.names.take(name)))

    def node(
        self, op_type: str, inputs: list[ir.Value | None], stem: str, like: ir.Value
    ) -> ir.Node:
        """Make a standard node whose output is of the type and shape of another value."""
        name = self.names.take(f"{stem}_Output")
        output = ir.Value(name=name, shape=like.shape, type=like.type)
        return ir.Node("", op_type, inputs, outputs=[output], name=self.names.take(stem))

    def domain(self, wide: bool, beside: ir.Node | None) -> str:
        """Return the domain of a Q or DQ (``wide``: of 16 bits) beside one of the model."""
        known = beside is None or beside.domain != _MICROSOFT
        if known and not (wide and self.opset < _OPSET_OF_16_BITS):
            return ""
        self._model.opset_imports.setdefault(_MICROSOFT, 1)
        return _MICROSOFT

    def _domain(self, tensor: QuantizedTensor, grid: QuantizationGrid) -> str:
        beside = tensor.quantize or (tensor.dequantizes[0] if tensor.dequantizes else None)
        return self.domain(grid.bits == 16, beside)

    def _grid_inputs(
        self, tensor: QuantizedTensor, grid: QuantizationGrid
    ) -> tuple[ir.Value, ...]:
        """Return scale and zero point, which all nodes of a tensor share."""
        found = self._parameters.get((tensor, grid)) or _initializers_of(tensor, grid)
        if found is None:
            zero_point = np.asarray(grid.zero_point, grid.dtype.numpy())
            arrays = {"scale": np.asarray(grid.scale), "zero_point": zero_point}
            found = tuple(
                self.initializer(graph_of(tensor), array, f"{tensor.name}_{kind}_convert")
                for kind, array in arrays.items()
            )
        self._parameters[tensor, grid] = found
        return found


def _initializers_of(
    tensor: QuantizedTensor, grid: QuantizationGrid
) -> tuple[ir.Value, ...] | None:
    """Return the tensor's own parameters, if any node of its graph may read them."""
    maker = tensor.quantize or tensor.dequantizes[0]
    graph = graph_of(tensor)
    found = tuple(
        value
        for value in maker.inputs[1:]
        if value is not None and value.is_initializer() and value.graph is graph
    )
    return found if grid == tensor.grid and len(found) == 2 else None
