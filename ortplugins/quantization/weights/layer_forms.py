# SPDX-License-Identifier: MIT
"""What codes of checkpoints need beside DequantizeLinear.

Act-order puts the rows of a block together, so the activation's channels have to follow:

    MatMul(x, W)  ->  MatMul(Gather(x, order, axis=-1), W[order])

llama.cpp's types with a minimum add an offset to each block, which neither DequantizeLinear
nor a fast kernel of MatMulNBits does (with zero points of floats onnxruntime 1.32 dequantises
the whole weight at every run, 50 times as slow for a token, and 8 bits have none):

    MatMul(x, W + offsets)  ->  MatMul(x, W) + MatMul(ReduceSum(blocks of x), offsets)
    Gather(W + offsets, i)  ->  Gather(W, i), in blocks, + Gather(offsets, i)

Weights of one activation share its sums and its order.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ortplugins.errors import ModelFileError
from ortplugins.quantization.weights.uses import WeightUse
from ortplugins.quantization.weights.weight import Weight
from rewrite_rules.graph.initializers import FreshNames, new_initializer
from rewrite_rules.graph.nodes import label
from rewrite_rules.graph.parameters import float_attribute, int_attribute
from rewrite_rules.shapes.proved_shapes import ProvedShapes


def check_layers(model: ir.Model, weights: Iterable[Weight]) -> None:
    """Refuse products that can't be written for the codes of their layers."""
    shapes = ProvedShapes(model, on_demand=True)
    for weight in weights:
        if weight.layer is None:
            continue
        offsets, order = weight.layer.has_offsets, weight.layer.order() is not None
        for use in weight.uses if offsets or order else ():
            if reason := _unfit(use, offsets, shapes):
                what = "blocks with offsets" if offsets else "rows in another order"
                raise ModelFileError(
                    f"layer {weight.layer.name!r} of the checkpoint has {what}, which node "
                    f"{use.label!r} cannot take: {reason}; leave it in float: --rule "
                    f"'{use.label}=float'"
                )


def _unfit(use: WeightUse, offsets: bool, shapes: ProvedShapes) -> str:
    """Say what is in the way; nothing where nothing is."""
    if use.activation is None:
        ranked = use.node.outputs[0]
        if not offsets:
            return "it picks rows of a table"
    else:
        ranked = use.activation
        if use.index != 1 or int_attribute(use.node, "transA", 0):
            return "K is not the last axis of its activation"
        if float_attribute(use.node, "alpha", 1.0) != 1:
            return "it multiplies by alpha"
    if offsets and _rank(ranked, shapes) is None:
        return f"the rank of {ranked.name!r} is not known: run onnx.shape_inference"
    return ""


def _rank(value: ir.Value, shapes: ProvedShapes) -> int | None:
    dims = shapes.dims(value)
    return None if dims is None else len(dims)


class LayerWriter:
    """Puts in what products and tables of layers need."""

    def __init__(self, model: ir.Model, names: FreshNames) -> None:
        self._names, self._shapes = names, ProvedShapes(model, on_demand=True)
        self._made: dict[Hashable, ir.Value] = {}  # shared by the weights of an activation

    def write(self, weight: Weight, use: WeightUse) -> None:
        """Complete a node that reads the codes of a weight already."""
        if weight.layer is None:
            return
        order = weight.layer.order()
        if order is not None and use.activation is not None:
            sorted_ = self._sorted(use.activation, order)
            use.node.replace_input_with(1 - use.index, sorted_)
        if weight.offsets is not None:
            if use.activation is None:
                self._offset_rows(weight, use)
            else:
                self._offset_product(weight, use)

    def _sorted(self, activation: ir.Value, order: Any) -> ir.Value:
        key = (activation, order.tobytes())
        if key not in self._made:
            constant = self._constant(activation, "order", order)
            node = ir.node("Gather", [activation, constant], {"axis": -1})
            self._made[key] = self._behind(activation, "sorted", node, activation.shape)
        return self._made[key]

    def _offset_product(self, weight: Weight, use: WeightUse) -> None:
        x = use.node.inputs[1 - use.index]
        assert x is not None and weight.offsets is not None
        key = (x, weight.form.block_size)
        if key not in self._made:
            rank = _rank(x, self._shapes)
            assert rank is not None
            blocks = self._in_blocks(x, weight, rank)
            axes = self._constant(x, "last_axis", np.array([-1]))
            node = ir.node("ReduceSum", [blocks, axes], {"keepdims": 0})
            self._made[key] = self._behind(blocks, "block_sums", node, None)
        offsets = self._offsets(weight, use, weight.offsets.map())
        node = ir.node("MatMul", [self._made[key], offsets])
        self._add(use.node, [node], node.outputs[0])

    def _offset_rows(self, weight: Weight, use: WeightUse) -> None:
        rows, ids = use.node.outputs[0], use.node.inputs[1]
        rank = _rank(rows, self._shapes)
        assert rank is not None and weight.offsets is not None
        # Of [rows, K] as [rows * K / size, size] there is one offset to a row.
        offsets = self._offsets(weight, use, weight.offsets.map().T)
        picked = ir.node("Gather", [offsets, ids], {"axis": 0})
        size = weight.form.size_along(weight.K)
        last = self._constant(rows, "last_axis", np.array([-1]))
        column = ir.node("Unsqueeze", [picked.outputs[0], last])
        ones = self._constant(rows, "ones", np.ones(size, use.tensor.dtype.numpy()))
        wide = ir.node("Mul", [column.outputs[0], ones])
        shape = self._constant(rows, "row", np.array([0] * (rank - 1) + [weight.K]))
        flat = ir.node("Reshape", [wide.outputs[0], shape])
        self._add(use.node, [picked, column, wide, flat], flat.outputs[0])

    def _in_blocks(self, value: ir.Value, weight: Weight, rank: int) -> ir.Value:
        size = weight.form.size_along(weight.K)
        shape = np.array([0] * (rank - 1) + [weight.K // size, size])
        node = ir.node("Reshape", [value, self._constant(value, "blocks", shape)])
        return self._behind(value, "in_blocks", node, None)

    def _offsets(self, weight: Weight, use: WeightUse, numbers: Any) -> ir.Value:
        key = (weight, numbers.shape)
        if key not in self._made:
            numbers = np.ascontiguousarray(numbers, use.tensor.dtype.numpy())
            self._made[key] = self._constant(use.weight, "offsets", numbers)
        return self._made[key]

    def _constant(self, value: ir.Value, what: str, numbers: Any) -> ir.Value:
        graph = value.graph
        assert isinstance(graph, ir.Graph)
        name = self._names.take(f"{value.name}.{what}")
        return new_initializer(graph, ir.Tensor(numbers, name=name))

    def _behind(
        self, value: ir.Value, what: str, node: ir.Node, shape: ir.Shape | None
    ) -> ir.Value:
        """Put a node where a value is, for all readers of it."""
        graph, producer = value.graph, value.producer()
        assert isinstance(graph, ir.Graph)
        node.name = self._names.take(f"{value.name}.{what}")
        if producer is None:
            graph.insert_before(graph[0], node)
        else:
            graph.insert_after(producer, node)
        node.outputs[0].name, node.outputs[0].shape = node.name, shape
        return node.outputs[0]

    def _add(self, node: ir.Node, nodes: Sequence[ir.Node], offset: ir.Value) -> None:
        """Add something to what a node gives, under the name that this has."""
        graph, old = node.graph, node.outputs[0]
        assert isinstance(graph, ir.Graph)
        node.name = label(node)  # which its output may have given it
        total = ir.node("Add", [old, offset])
        readers = total.outputs[0]
        readers.type, readers.shape = old.type, old.shape
        old.replace_all_uses_with(readers, replace_graph_outputs=True)
        total.replace_input_with(0, old)
        name, old.name = old.name, self._names.take(f"{old.name}.without_offsets")
        for each in (*nodes, total):
            each.name = self._names.take(f"{name}.{each.op_type}")
            each.outputs[0].name = each.name
        readers.name = name
        graph.insert_after(node, [*nodes, total])
