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

__all__ = ["QuantizedWeight", "drop_unused", "read_through_dequantize"]

import dataclasses
import functools

import numpy as np
import onnx_ir as ir

from ortplugins.quantization.block_format import BlockFormat
from ortplugins.quantization.tensor_reference import TensorReference
from ortplugins.quantization.weight_sites import WeightSite
from rewrite_rules.code_repacking import pack_rows
from rewrite_rules.constants import int_attribute
from rewrite_rules.initializers import derived_initializer


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

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zero points in the model."""
        return self.form.stored_bytes(self.K, self.N)


def read_through_dequantize(site: WeightSite, weight: QuantizedWeight) -> None:
    """Have a node read a quantised weight instead of its float one."""
    dequantized = _dequantized(weight, site)
    if weight.k_last == site.wanted_k_last:
        site.node.replace_input_with(site.index, dequantized)
    elif site.node.op_type == "Gemm" and site.index == 1:
        flipped = 1 - int_attribute(site.node, "transB", 0)
        site.node.attributes["transB"] = ir.AttrInt64("transB", flipped)
        site.node.replace_input_with(site.index, dequantized)
    else:
        site.node.replace_input_with(site.index, _transposed(dequantized, weight, site))


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
    if value.is_initializer() and not value.is_graph_input():
        del graph.initializers[value.name]


def _dequantized(weight: QuantizedWeight, site: WeightSite) -> ir.Value:
    """Return the output of the weight's DequantizeLinear, made at its first use."""
    kind = f".{weight.dtype.name.lower()}_block{weight.form.block_size}"
    kind = f"{kind}_transposed" if weight.k_last else kind
    key = (weight.form, weight.k_last, weight.source_k_last)
    makers = {"": _codes, "_scales": _scales}
    if weight.zero_points is not None:
        makers["_zero_points"] = _zero_points
    inputs = [
        derived_initializer(weight.source, kind + suffix, functools.partial(make, weight), key)
        for suffix, make in makers.items()
    ]
    for use in inputs[0].uses():
        return use.node.outputs[0]  # another node reads the weight, too
    axis = int(weight.k_last)
    attributes = {"axis": 1 - axis} if weight.per_column else {"axis": axis}
    if not weight.per_column:
        attributes["block_size"] = weight.form.block_size
    node = ir.node(
        "DequantizeLinear", inputs, attributes, name=f"{inputs[0].name}.dequantized"
    )
    _describe(node, weight, weight.shape)
    _insert(node, weight, site)
    return node.outputs[0]


def _transposed(dequantized: ir.Value, weight: QuantizedWeight, site: WeightSite) -> ir.Value:
    for use in dequantized.uses():
        if use.node.op_type == "Transpose":
            return use.node.outputs[0]
    node = ir.node("Transpose", [dequantized], {"perm": [1, 0]}, name=f"{dequantized.name}.T")
    _describe(node, weight, weight.shape[::-1])
    producer = dequantized.producer()
    assert producer is not None and isinstance(producer.graph, ir.Graph)
    producer.graph.insert_after(producer, node)
    return node.outputs[0]


def _describe(node: ir.Node, weight: QuantizedWeight, shape: tuple[int, int]) -> None:
    """Name a node's output and give it its type and shape."""
    (value,) = node.outputs
    value.name = node.name
    value.type = ir.TensorType(ir.DataType[_scale_dtype(weight).name])
    value.shape = ir.Shape(shape)


def _insert(node: ir.Node, weight: QuantizedWeight, site: WeightSite) -> None:
    """Put a node into the graph that owns the weight, ahead of its first reader."""
    producer = weight.source.producer()
    graph = weight.source.graph if producer is None else producer.graph
    assert isinstance(graph, ir.Graph)
    # A reader in the body of an If or Loop sees what comes before that node.
    graph.insert_before(site.node if site.node.graph is graph else graph[0], node)


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
