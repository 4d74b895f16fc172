# SPDX-License-Identifier: MIT
"""Puts quantised weights into a graph, as the portable QDQ forms that tools exchange.

    MatMul(x, W)  ->  MatMul(x, DequantizeLinear(codes[K, N], scales, zero_points?, axis=0))
                  ->  MatMul(x, Transpose(DequantizeLinear(codes[N, K], ..., axis=1)))
    Gemm(x, W)    ->  the same; transB is flipped instead of a Transpose
    Gather(W, i)  ->  Gather(DequantizeLinear(codes[rows, width], ..., axis=1), i)

A weight with one scale per column gets one-dimensional scales and no block_size. MatMulNBits
and GatherBlockQuantized are made from these by the fusion's own rules.
"""

from __future__ import annotations

__all__ = ["CodeWriter", "QuantizedWeight", "drop_unused"]

import dataclasses

import numpy as np
import onnx_ir as ir

from ortplugins.model_io.tensor_reference import TensorReference
from ortplugins.quantization.methods.block_format import BlockFormat
from ortplugins.quantization.weights.sites import WeightSite
from rewrite_rules.graph.attributes import int_attribute
from rewrite_rules.graph.initializers import new_initializer
from rewrite_rules.graph.names import FreshNames
from rewrite_rules.weights.bit_packing import pack_rows


@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """Codes, scales and zero points of one weight, in files.

    Attributes:
        source: The float weight.
        source_k_last: Whether that is ``[N, K]``: one matrix may be multiplied either way.
        K: Size along which the blocks run.
        N: Number of columns.
        form: How it is quantised.
        k_last: Whether codes are ``[N, K]``; scales and zero points follow.
        codes: Packed codes, uint8.
        scales: float32 or float16.
        zero_points: uint8, a byte each; None when symmetric.
    """

    source: ir.Value
    source_k_last: bool
    K: int
    N: int
    form: BlockFormat
    k_last: bool
    codes: TensorReference
    scales: TensorReference
    zero_points: TensorReference | None

    @property
    def dtype(self) -> ir.DataType:
        """Type of codes and zero points."""
        sign = "" if self.form.is_symmetric else "U"
        return ir.DataType[f"{sign}INT{self.form.bits}"]

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the codes."""
        return (self.N, self.K) if self.k_last else (self.K, self.N)

    @property
    def grid_shape(self) -> tuple[int, ...]:
        """Shape of scales and zero points."""
        blocks = self.form.blocks(self.K)
        if self.per_column:
            return (self.N,)
        return (self.N, blocks) if self.k_last else (blocks, self.N)

    @property
    def per_column(self) -> bool:
        """Whether a column has one scale, and DequantizeLinear no blocks."""
        return self.form.block_size == -1


class CodeWriter:
    """Gives nodes of a model quantised weights to read; each weight is put in once."""

    def __init__(self, names: FreshNames) -> None:
        self._names = names
        self._dequantized: dict[QuantizedWeight, ir.Value] = {}
        self._transposed: dict[QuantizedWeight, ir.Value] = {}

    def read_through_dequantize(self, site: WeightSite, weight: QuantizedWeight) -> None:
        """Have a node read a quantised weight instead of its float one.

        The first node of a weight has to be the first in the graph.
        """
        if weight not in self._dequantized:
            self._dequantized[weight] = self._dequantize(weight, site)
        value = self._dequantized[weight]
        if weight.k_last != site.wanted_k_last:
            if site.node.op_type == "Gemm" and site.index == 1:
                flipped = 1 - int_attribute(site.node, "transB", 0)
                site.node.attributes["transB"] = ir.AttrInt64("transB", flipped)
            else:
                if weight not in self._transposed:
                    self._transposed[weight] = self._transpose(weight, value)
                value = self._transposed[weight]
        site.node.replace_input_with(site.index, value)

    def _dequantize(self, weight: QuantizedWeight, site: WeightSite) -> ir.Value:
        """Put in a DequantizeLinear ahead of a node; return its output."""
        producer = weight.source.producer()
        graph = weight.source.graph if producer is None else producer.graph
        assert isinstance(graph, ir.Graph)
        base = (
            f"{weight.source.name}.{weight.dtype.name.lower()}_block{weight.form.block_size}"
        )
        base = f"{base}_transposed" if weight.k_last else base
        tensors = [_codes(weight, self._names.take(base))]
        tensors.append(_scales(weight, self._names.take(f"{base}_scales")))
        if weight.zero_points is not None:
            tensors.append(_zero_points(weight, self._names.take(f"{base}_zero_points")))
        inputs = [new_initializer(graph, tensor) for tensor in tensors]
        axis = int(weight.k_last)
        attributes = {"axis": 1 - axis} if weight.per_column else {"axis": axis}
        if not weight.per_column:
            attributes["block_size"] = weight.form.block_size
        name = self._names.take(f"{base}.dequantized")
        node = ir.node("DequantizeLinear", inputs, attributes, name=name)
        _describe(node, weight, weight.shape)
        # A reader in the body of an If or Loop sees what comes before that node.
        graph.insert_before(site.node if site.node.graph is graph else graph[0], node)
        return node.outputs[0]

    def _transpose(self, weight: QuantizedWeight, value: ir.Value) -> ir.Value:
        name = self._names.take(f"{value.name}.T")
        node = ir.node("Transpose", [value], {"perm": [1, 0]}, name=name)
        _describe(node, weight, weight.shape[::-1])
        producer = value.producer()
        assert producer is not None
        assert isinstance(producer.graph, ir.Graph)
        producer.graph.insert_after(producer, node)
        return node.outputs[0]


def _describe(node: ir.Node, weight: QuantizedWeight, shape: tuple[int, int]) -> None:
    """Name a node's output and give it its type and shape."""
    (value,) = node.outputs
    value.name = node.name
    value.type = ir.TensorType(_scale_dtype(weight))
    value.shape = ir.Shape(shape)


def drop_unused(value: ir.Value) -> None:
    """Remove a constant that nothing reads any more, and Transposes that lead nowhere."""
    for use in list(value.uses()):
        node = use.node
        if node.op_type in ("Transpose", "Identity"):
            drop_unused(node.outputs[0])
            unread = not node.outputs[0].uses() and not node.outputs[0].is_graph_output()
            if unread and node.graph is not None:
                node.graph.remove(node, safe=True)
    graph = value.graph
    if value.uses() or value.is_graph_output() or graph is None or value.name is None:
        return
    producer = value.producer()
    if producer is not None and producer.op_type == "Constant":
        assert isinstance(producer.graph, ir.Graph)
        producer.graph.remove(producer, safe=True)
    elif value.is_initializer() and not value.is_graph_input():
        del graph.initializers[value.name]


def _scale_dtype(weight: QuantizedWeight) -> ir.DataType:
    return ir.DataType.FLOAT16 if weight.form.scale_type == "float16" else ir.DataType.FLOAT


def _codes(weight: QuantizedWeight, name: str) -> ir.TensorProtocol:
    return _in_file(weight.codes, weight.dtype, weight.shape, name)


def _scales(weight: QuantizedWeight, name: str) -> ir.TensorProtocol:
    return _in_file(weight.scales, _scale_dtype(weight), weight.grid_shape, name)


def _zero_points(weight: QuantizedWeight, name: str) -> ir.TensorProtocol:
    assert weight.zero_points is not None
    numbers = np.ascontiguousarray(weight.zero_points.map()).reshape(-1)
    packed = pack_rows(numbers, weight.form.bits)
    shape = ir.Shape(weight.grid_shape)
    if weight.form.bits == 8:
        unpacked = packed.reshape(weight.grid_shape)
        return ir.Tensor(unpacked, dtype=weight.dtype, shape=shape, name=name)
    return ir.PackedTensor(packed, weight.dtype, shape=shape, name=name)


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
