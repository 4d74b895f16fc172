# SPDX-License-Identifier: MIT
"""Puts quantised weights into a graph, as the portable QDQ forms that tools exchange.

    MatMul(x, W)  ->  MatMul(x, DequantizeLinear(codes[K, N], scales, zero_points?, axis=0))
                  ->  MatMul(x, Transpose(DequantizeLinear(codes[N, K], ..., axis=1)))
    Gemm(x, W)    ->  the same; transB is flipped instead of a Transpose
    FusedMatMul   ->  likewise, and MatMul where nothing is left of what it fused: onnxruntime
                      computes on codes behind MatMul and Gemm only
    Gather(W, i)  ->  Gather(DequantizeLinear(codes[rows, width], ..., axis=1), i)

Scales of another type than the weight's are cast to it. A weight with one scale per column
gets one-dimensional scales and no block_size. MatMulNBits and GatherBlockQuantized are made
from these by the fusion's own rules.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ortplugins.model_io.tensor_reference import TensorReference
from ortplugins.quantization.weights.group import StoredCodes
from ortplugins.quantization.weights.sites import WeightSite
from rewrite_rules.graph.attributes import float_attribute, int_attribute
from rewrite_rules.graph.initializers import new_initializer
from rewrite_rules.graph.names import FreshNames
from rewrite_rules.graph.nodes import drop_unused_initializers, is_constant, remove_node
from rewrite_rules.weights.bit_packing import pack_rows


class CodeWriter:
    """Gives nodes of a model quantised weights to read; each weight is put in once."""

    def __init__(self, names: FreshNames) -> None:
        self._names = names
        self._dequantized: dict[StoredCodes, ir.Value] = {}
        self._transposed: dict[StoredCodes, ir.Value] = {}

    def read_through_dequantize(self, site: WeightSite, stored: StoredCodes) -> None:
        """Have a node read a quantised weight instead of its float one.

        The first node of a weight has to be the first in the graph.
        """
        if stored not in self._dequantized:
            self._dequantized[stored] = self._dequantize(stored, site)
        value = self._dequantized[stored]
        if stored.k_last != site.wanted_k_last:
            if site.node.op_type in ("Gemm", "FusedMatMul") and site.index == 1:
                flipped = 1 - int_attribute(site.node, "transB", 0)
                site.node.attributes["transB"] = ir.AttrInt64("transB", flipped)
            else:
                if stored not in self._transposed:
                    self._transposed[stored] = self._transpose(value)
                value = self._transposed[stored]
        site.node.replace_input_with(site.index, value)
        _unfuse(site.node)

    def _dequantize(self, stored: StoredCodes, site: WeightSite) -> ir.Value:
        """Put in a DequantizeLinear ahead of a node; return its output."""
        producer = site.weight.producer()
        graph = site.weight.graph if producer is None else producer.graph
        assert isinstance(graph, ir.Graph)
        form, axis = stored.form, int(stored.k_last)
        code = ir.DataType[f"{'' if form.is_symmetric else 'U'}INT{form.bits}"]
        real, half = site.tensor.dtype, ir.DataType.FLOAT16
        scale_type = half if form.scale_type == "float16" else ir.DataType.FLOAT
        shape = (stored.N, stored.K) if stored.k_last else (stored.K, stored.N)
        # A weight with one scale per column has no blocks.
        by_column = form.block_size == -1
        grid = (stored.N,) if by_column else stored.scales.shape
        base = f"{site.weight.name}.{code.name.lower()}_block{form.block_size}"
        base = self._names.take(f"{base}_transposed" if stored.k_last else base)
        tensors: list[ir.TensorProtocol] = [
            _in_file(stored.codes, code, shape, base),
            _in_file(stored.scales, scale_type, grid, self._names.take(f"{base}_scales")),
        ]
        if stored.zero_points is not None:
            numbers = np.ascontiguousarray(stored.zero_points.map()).reshape(-1)
            name = self._names.take(f"{base}_zero_points")
            packed = pack_rows(numbers, form.bits)
            tensors.append(
                ir.Tensor(packed.reshape(grid), dtype=code, name=name)
                if form.bits == 8
                else ir.PackedTensor(packed, code, shape=ir.Shape(grid), name=name)
            )
        inputs = [new_initializer(graph, tensor) for tensor in tensors]
        # A reader in a subgraph of If or Loop sees what comes before that node.
        first = site.node if site.node.graph is graph else graph[0]
        if scale_type is not real:
            name = self._names.take(f"{base}_scales.{real.name.lower()}")
            cast = ir.node("Cast", inputs[1:2], {"to": int(real)}, name=name)
            graph.insert_before(first, cast)
            inputs[1] = described(cast, real, ir.Shape(grid))
        attributes = {"axis": 1 - axis}
        if not by_column:
            attributes = {"axis": axis, "block_size": form.block_size}
        name = self._names.take(f"{base}.dequantized")
        node = ir.node("DequantizeLinear", inputs, attributes, name=name)
        graph.insert_before(first, node)
        return described(node, real, ir.Shape(shape))

    def _transpose(self, value: ir.Value) -> ir.Value:
        name = self._names.take(f"{value.name}.T")
        node = ir.node("Transpose", [value], {"perm": [1, 0]}, name=name)
        producer = value.producer()
        assert producer is not None and isinstance(producer.graph, ir.Graph)
        assert value.dtype is not None and value.shape is not None
        producer.graph.insert_after(producer, node)
        return described(node, value.dtype, ir.Shape(value.shape.numpy()[::-1]))


def _unfuse(node: ir.Node) -> None:
    """Make a FusedMatMul that transposes nothing and has no factor a MatMul."""
    transposes = any(int_attribute(node, name, 0) for name in ("transA", "transB"))
    scales = float_attribute(node, "alpha", 1.0) != 1
    if node.op_type == "FusedMatMul" and not transposes and not scales:
        node.op_type, node.domain = "MatMul", ""
        node.attributes.clear()


def described(node: ir.Node, dtype: ir.DataType, shape: ir.Shape | None) -> ir.Value:
    """Return a node's output, with the node's name, a type and a shape."""
    (value,) = node.outputs
    value.name = node.name
    value.type, value.shape = ir.TensorType(dtype), shape
    return value


def drop_unused(value: ir.Value) -> None:
    """Remove a constant that nothing reads any more, and Transposes that lead nowhere."""
    for use in list(value.uses()):
        node = use.node
        if node.op_type in ("Transpose", "Identity"):
            drop_unused(node.outputs[0])
            unread = not node.outputs[0].uses() and not node.outputs[0].is_graph_output()
            if unread and node.graph is not None:
                node.graph.remove(node, safe=True)
    producer = value.producer()
    if (
        producer is not None
        and is_constant(producer)
        and not (value.uses() or value.is_graph_output())
    ):
        remove_node(producer)
    drop_unused_initializers([value])


def _in_file(
    reference: TensorReference, dtype: ir.DataType, shape: tuple[int, ...], name: str
) -> ir.ExternalTensor:
    return ir.ExternalTensor(
        reference.path,
        reference.offset,
        reference.nbytes,
        dtype,
        shape=ir.Shape(shape),
        name=name,
        base_dir="",
    )
