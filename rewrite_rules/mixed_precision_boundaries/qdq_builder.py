# SPDX-License-Identifier: MIT
"""New QuantizeLinear and DequantizeLinear nodes beside those of an activation."""

from __future__ import annotations

__all__ = ["PairMaker", "graph_of"]

from collections.abc import Iterable

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
# QuantizeLinear and DequantizeLinear know 16 bits from here on.
_OPSET_OF_16_BITS = 21


def graph_of(tensor: QuantizedTensor) -> ir.Graph:
    """The graph that holds an activation's codes; what is new is put there."""
    graph = owner(tensor.codes)
    assert isinstance(graph, ir.Graph)
    return graph


class PairMaker:
    """Makes nodes and initializers for one model, each under a name of its own.

    Attributes:
        names: The names of the model.
        opset: Version of its standard operators.
    """

    def __init__(self, model: ir.Model) -> None:
        self.names = FreshNames(model)
        self._model = model
        self.opset = model.opset_imports.get("", 0)

    def pair(
        self, tensor: QuantizedTensor, value: ir.Value, grid: QuantizationGrid
    ) -> tuple[ir.Node, ir.Node]:
        """Quantise a dequantised value of a tensor again, by another grid."""
        stem = f"{tensor.name}_convert"
        quantize = self.quantize(tensor, value, grid, stem)
        return quantize, self.dequantize(tensor, quantize.outputs[0], grid, stem)

    def quantize(
        self, tensor: QuantizedTensor, value: ir.Value, grid: QuantizationGrid, stem: str
    ) -> ir.Node:
        """A QuantizeLinear of a value, named as onnxruntime's quantiser does."""
        parameters = self.parameters(tensor, grid)
        node = self.node(
            "QuantizeLinear", [value, *parameters], f"{stem}_QuantizeLinear", value
        )
        node.domain = self._domain(tensor, grid)
        node.outputs[0].type = ir.TensorType(grid.dtype)
        return node

    def dequantize(
        self, tensor: QuantizedTensor, codes: ir.Value, grid: QuantizationGrid, stem: str
    ) -> ir.Node:
        """A DequantizeLinear of codes; it shares the parameters of what made them."""
        maker = codes.producer()
        if maker is None or not is_quantize_linear(maker):
            maker = tensor.dequantizes[0]
        parameters = list(maker.inputs[1:])
        # Constant nodes may stand behind, and initializers in a body that is not ours.
        if len(parameters) != 2 or not _are_initializers(parameters, graph_of(tensor)):
            parameters = list(self.parameters(tensor, grid))
        like = tensor.dequantizes[0].outputs[0] if tensor.dequantizes else tensor.source
        assert like is not None
        node = self.node(
            "DequantizeLinear", [codes, *parameters], f"{stem}_DequantizeLinear", like
        )
        node.domain = self._domain(tensor, grid)
        return node

    def set_grid(self, tensor: QuantizedTensor, grid: QuantizationGrid) -> None:
        """Give the nodes that are there another grid."""
        if grid == tensor.grid:
            return
        scale, zero_point = self.parameters(tensor, grid)
        nodes = [*tensor.dequantizes]
        if tensor.quantize is not None:
            nodes.append(tensor.quantize)
        for node in nodes:
            before = list(node.inputs[1:])
            node.resize_inputs(3)
            node.replace_input_with(1, scale)
            node.replace_input_with(2, zero_point)
            # Of a DequantizeLinear, output_dtype is the float type, and as the scale's.
            stale = ["axis", "saturate"]
            if is_quantize_linear(node):
                stale.append("output_dtype")
            for name in stale:
                node.attributes.pop(name, None)
            node.domain = self._domain(tensor, grid)
            drop_unused_initializers(before)
        tensor.codes.type = ir.TensorType(grid.dtype)

    def parameters(
        self, tensor: QuantizedTensor, grid: QuantizationGrid
    ) -> tuple[ir.Value, ir.Value]:
        """New initializers of a grid's scale and zero point."""
        graph = graph_of(tensor)
        zero_point = np.asarray(grid.zero_point, grid.dtype.numpy())
        return (
            self.initializer(graph, np.asarray(grid.scale), f"{tensor.name}_scale_convert"),
            self.initializer(graph, zero_point, f"{tensor.name}_zero_point_convert"),
        )

    def initializer(
        self, graph: ir.Graph, array: npt.NDArray[np.generic], name: str
    ) -> ir.Value:
        """A new initializer."""
        return new_initializer(graph, ir.Tensor(array, name=self.names.take(name)))

    def node(
        self, op_type: str, inputs: list[ir.Value | None], stem: str, like: ir.Value
    ) -> ir.Node:
        """A node of the standard domain whose output is of the type and shape of another."""
        name = self.names.take(f"{stem}_Output")
        output = ir.Value(name=name, shape=like.shape, type=like.type)
        return ir.Node("", op_type, inputs, outputs=[output], name=self.names.take(stem))

    def domain(self, wide: bool, beside: ir.Node | None) -> str:
        """The domain of a Q or DQ of 16 bits (``wide``) or 8, beside one of the model."""
        known = beside is None or beside.domain != _MICROSOFT
        if known and not (wide and self.opset < _OPSET_OF_16_BITS):
            return ""
        self._model.opset_imports.setdefault(_MICROSOFT, 1)
        return _MICROSOFT

    def _domain(self, tensor: QuantizedTensor, grid: QuantizationGrid) -> str:
        beside = tensor.quantize or (tensor.dequantizes[0] if tensor.dequantizes else None)
        return self.domain(grid.bits == 16, beside)


def _are_initializers(values: Iterable[ir.Value | None], graph: ir.Graph) -> bool:
    return all(
        value is not None and value.is_initializer() and value.graph is graph
        for value in values
    )
