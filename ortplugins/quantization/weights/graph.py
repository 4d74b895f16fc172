# SPDX-License-Identifier: MIT
"""Puts quantised weights into a graph.

Weights are written as the portable QDQ forms that tools exchange:

    MatMul(x, W)  ->  MatMul(x, DequantizeLinear(codes[K, N], scales, zero_points?, axis=0))
                  ->  MatMul(x, Transpose(DequantizeLinear(codes[N, K], ..., axis=1)))
    Gemm(x, W)    ->  the same; transB is flipped instead of a Transpose
    Gather(W, i)  ->  Gather(DequantizeLinear(codes[rows, width], ..., axis=1), i)

Scales of another type than the weight's are cast to it. A weight with one scale per column
gets one-dimensional scales and no block_size. MatMulNBits and GatherBlockQuantized are made
from these by the fusion's own rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ortplugins.quantization.codes import WeightCodes
from ortplugins.quantization.weights.folds import described, divide
from ortplugins.quantization.weights.plan import Weight, WeightPlan
from ortplugins.quantization.weights.uses import WeightUse
from rewrite_rules.graph.initializers import FreshNames, new_initializer
from rewrite_rules.graph.nodes import remove_unused
from rewrite_rules.graph.parameters import int_attribute
from rewrite_rules.weights.bit_packing import pack_rows

# Tensors in a file start at a cache line, which is enough for every vector instruction.
_ALIGNMENT = 64
# Bytes of codes that are packed at a time.
_CHUNK_BYTES = 1 << 22


def store_codes(
    weight: Weight, found: WeightCodes, path: Path | None, names: FreshNames
) -> None:
    """Append the codes of a weight to a file; note them, and report the errors.

    The file lies next to the output, and has all codes before the output is written. Without
    one they stay in memory.
    """
    form, kind = weight.form, f"{'' if weight.form.is_symmetric else 'U'}INT"
    code, by_column = ir.DataType[f"{kind}{form.bits}"], form.block_size == -1
    base = f"{weight.name}.{code.name.lower()}_block{form.block_size}"
    base = names.take(f"{base}_transposed" if weight.k_last else base)
    scales = found.grid.astype(form.scale_type)
    parts = [(found.codes, code, base), (scales, None, names.take(f"{base}_scales"))]
    if found.zero_points is not None:
        parts.append((found.zero_points, code, names.take(f"{base}_zero_points")))
    weight.tensors = []
    for array, packed, name in parts:
        rows = array.T if weight.k_last else array
        chunks = iter([np.ascontiguousarray(rows)])
        if packed is not None:
            chunks = _packed(rows, form.bits)
        dtype = packed or ir.DataType.from_numpy(rows.dtype)
        shape = (weight.N,) if by_column and array is not found.codes else rows.shape
        weight.tensors.append(_stored(chunks, dtype, ir.Shape(shape), name, path))
    for row in weight.rows:
        row.weight_error, row.output_error = found.weight_error, found.output_error


def _packed(rows: npt.NDArray[Any], bits: int) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield codes as they are stored, eight rows at least: whole bytes, whatever they hold."""
    step = max(8, _CHUNK_BYTES // rows.shape[1] // 8 * 8)
    for start in range(0, len(rows), step):
        part = np.ascontiguousarray(rows[start : start + step])
        yield pack_rows(part.reshape(-1).view(np.uint8) & np.uint8((1 << bits) - 1), bits)


def _stored(
    chunks: Iterable[npt.NDArray[Any]],
    dtype: ir.DataType,
    shape: ir.Shape,
    name: str,
    path: Path | None,
) -> ir.TensorProtocol:
    if path is None:
        array = np.concatenate([chunk.reshape(-1) for chunk in chunks])
        if dtype.bitwidth < 8:
            return ir.PackedTensor(array, dtype, shape=shape, name=name)
        whole = array.view(dtype.numpy()).reshape(shape.numpy())
        return ir.Tensor(whole, dtype=dtype, name=name)
    with open(path, "ab") as file:
        start = file.tell()
        for chunk in chunks:
            file.write(chunk.data)
        end = file.tell()
        file.write(bytes(-end % _ALIGNMENT))
    place = (path.name, start, end - start, dtype)
    return ir.ExternalTensor(*place, shape=shape, name=name, base_dir=str(path.parent))


def write_codes(plan: WeightPlan, names: FreshNames) -> None:
    """Have nodes read codes, and divide the activations whose weights were scaled."""
    for group in plan.groups:
        if (scales := group.channel_scales) is None:
            continue
        # An activation has its weights' type, whether or not the model says so.
        dtype = group.weights[0].uses[0].tensor.dtype
        reads = [(use.node, 0) for w in group.weights for use in w.uses]
        assert group.activation is not None
        group.folded = divide(group.activation, reads, scales, dtype, names)
    for group in plan.groups:
        for weight in group.weights:
            _read_through_dequantize(weight, names)
    remove_unused(plan.model)


def _read_through_dequantize(weight: Weight, names: FreshNames) -> None:
    """Have all nodes of a weight, in the graph's order, read its codes instead."""
    value, transposed = _dequantize(weight, weight.uses[0], names), None
    for use in weight.uses:
        read = value
        if weight.k_last != use.wanted_k_last:
            if use.node.op_type == "Gemm":
                flipped = 1 - int_attribute(use.node, "transB", 0)
                use.node.attributes["transB"] = ir.AttrInt64("transB", flipped)
            else:
                read = transposed = transposed or _transpose(value, names)
        use.node.replace_input_with(use.index, read)


def _dequantize(weight: Weight, use: WeightUse, names: FreshNames) -> ir.Value:
    """Put in a DequantizeLinear ahead of a node; return its output."""
    producer = use.weight.producer()
    graph = use.weight.graph if producer is None else producer.graph
    assert isinstance(graph, ir.Graph)
    form, axis = weight.form, int(weight.k_last)
    real, scales = use.tensor.dtype, weight.tensors[1]
    inputs = [new_initializer(graph, tensor) for tensor in weight.tensors]
    # A reader in a subgraph of If or Loop sees what comes before that node.
    first = use.node if use.node.graph is graph else graph[0]
    if scales.dtype is not real:
        name = names.take(f"{scales.name}.{real.name.lower()}")
        cast = ir.node("Cast", inputs[1:2], {"to": int(real)}, name=name)
        graph.insert_before(first, cast)
        inputs[1] = described(cast, real, inputs[1].shape)
    attributes = {"axis": 1 - axis}
    if form.block_size != -1:
        attributes = {"axis": axis, "block_size": form.size_along(weight.K)}
    name = names.take(f"{inputs[0].name}.dequantized")
    node = ir.node("DequantizeLinear", inputs, attributes, name=name)
    graph.insert_before(first, node)
    shape = (weight.N, weight.K) if weight.k_last else (weight.K, weight.N)
    return described(node, real, ir.Shape(shape))


def _transpose(value: ir.Value, names: FreshNames) -> ir.Value:
    name = names.take(f"{value.name}.T")
    node = ir.node("Transpose", [value], {"perm": [1, 0]}, name=name)
    producer = value.producer()
    assert producer is not None and isinstance(producer.graph, ir.Graph)
    assert value.dtype is not None and value.shape is not None
    producer.graph.insert_after(producer, node)
    return described(node, value.dtype, ir.Shape(value.shape.numpy()[::-1]))
