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

from collections.abc import Hashable, Iterable
from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript import TapeBuilder

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
        offsets, order = weight.layer.has_offsets, weight.layer.order is not None
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
        order = weight.layer.order
        if order is not None and use.activation is not None:
            sorted_ = self._sorted(use.activation, order)
            use.node.replace_input_with(1 - use.index, sorted_)
        if weight.offsets is None:
            return
        op, node = TapeBuilder(), use.node
        if use.activation is None:
            added = self._offset_rows(op, weight, use)
        else:
            added = op.MatMul(self._block_sums(weight, use), self._offsets(weight, use))
        old = node.outputs[0]
        total = op.Add(old, added)
        total.type, total.shape = old.type, old.shape
        old.replace_all_uses_with(total, replace_graph_outputs=True)
        op.nodes[-1].replace_input_with(0, old)
        node.name = label(node)  # which its output may have given it
        self._put_behind(node, op, old)
        total.name, old.name = old.name, self._names.take(f"{old.name}.without_offsets")

    def _sorted(self, activation: ir.Value, order: Any) -> ir.Value:
        key = (activation, order.tobytes())
        if key not in self._made:
            op = TapeBuilder()
            made = op.Gather(activation, self._constant(activation, "order", order), axis=-1)
            made.shape = activation.shape
            self._made[key] = self._put_behind(activation.producer(), op, activation)
        return self._made[key]

    def _block_sums(self, weight: Weight, use: WeightUse) -> ir.Value:
        x = use.node.inputs[1 - use.index]
        assert x is not None
        key = (x, weight.form.block_size)
        if key not in self._made:
            op, size = TapeBuilder(), weight.form.size_along(weight.K)
            shape = [0] * (self._rank(x) - 1) + [weight.K // size, size]
            blocks = op.Reshape(x, self._constant(x, "blocks", shape))
            op.ReduceSum(blocks, self._constant(x, "last_axis", [-1]), keepdims=0)
            self._made[key] = self._put_behind(x.producer(), op, x)
        return self._made[key]

    def _offset_rows(self, op: TapeBuilder, weight: Weight, use: WeightUse) -> ir.Value:
        """Of [rows, K] as [rows * K / size, size] there is one offset to a row."""
        rows, ids = use.node.outputs[0], use.node.inputs[1]
        size = weight.form.size_along(weight.K)
        picked = op.Gather(self._offsets(weight, use), ids, axis=0)
        column = op.Unsqueeze(picked, self._constant(rows, "last_axis", [-1]))
        ones = np.ones(size, use.tensor.dtype.numpy())
        wide = op.Mul(column, self._constant(rows, "ones", ones))
        shape = [0] * (self._rank(rows) - 1) + [weight.K]
        flat: ir.Value = op.Reshape(wide, self._constant(rows, "row", shape))
        return flat

    def _offsets(self, weight: Weight, use: WeightUse) -> ir.Value:
        """Return the offsets ``[blocks, N]``, or for a table ``[rows, blocks]``."""
        key = (weight, use.activation is None)
        if key not in self._made:
            assert weight.offsets is not None
            numbers = weight.offsets.map()
            numbers = (numbers.T if use.activation is None else numbers).astype(
                use.tensor.dtype.numpy(), order="C"
            )
            self._made[key] = self._constant(use.weight, "offsets", numbers)
        return self._made[key]

    def _rank(self, value: ir.Value) -> int:
        rank = _rank(value, self._shapes)
        assert rank is not None  # see check_layers
        return rank

    def _constant(self, value: ir.Value, what: str, numbers: Any) -> ir.Value:
        graph = value.graph
        assert isinstance(graph, ir.Graph)
        name = self._names.take(f"{value.name}.{what}")
        return new_initializer(graph, ir.Tensor(np.asarray(numbers), name=name))

    def _put_behind(self, node: ir.Node | None, op: TapeBuilder, value: ir.Value) -> ir.Value:
        """Put nodes behind one, or first in the graph of a value; return the last output."""
        for made in op.nodes:
            made.name = self._names.take(f"{value.name}.{made.op_type}")
            made.outputs[0].name = made.name
        graph = value.graph
        assert isinstance(graph, ir.Graph)
        if node is None:
            graph.insert_before(graph[0], op.nodes)
        else:
            graph.insert_after(node, op.nodes)
        return op.nodes[-1].outputs[0]
