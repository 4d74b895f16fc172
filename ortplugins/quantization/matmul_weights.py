# SPDX-License-Identifier: MIT
"""Weight-only quantisation of MatMuls, as the portable QDQ graphs that tools exchange.

    MatMul(x, W[K, N])
        -> MatMul(x, DequantizeLinear(codes[K, N], scales, zero_points?, axis=0))
        -> MatMul(x, Transpose(DequantizeLinear(codes[N, K], scales, zero_points?, axis=1)))

for the layouts ``"axis0"`` and ``"transposed"``. Refused by name: a weight that is not float32
or not of rank 2, that a caller may feed (a graph input), or that the user excludes.
"""

from __future__ import annotations

__all__ = ["quantize_matmuls"]

import difflib
import functools
from collections.abc import Collection, Sequence

import onnx_ir as ir

from ortplugins.quantization.quantized_tensors import (
    WeightFormat,
    codes_tensor,
    scales_tensor,
    zero_points_tensor,
)
from rewrite_rules.initializers import derived_initializer
from rewrite_rules.remarks import Remarks

# The first with int4 tensors and DequantizeLinear in blocks, and the file format to hold them.
_OPSET, _IR_VERSION = 21, 10


def quantize_matmuls(
    model: ir.Model,
    *,
    bits: int = 4,
    block_size: int = 32,
    symmetric: bool = True,
    layout: str = "axis0",
    nodes_to_exclude: Collection[str] = (),
) -> Remarks:
    """Quantise the weights of MatMuls in place, to nearest, in blocks along K.

    Nothing is computed yet: the new tensors quantise their weight, strip by strip, when the
    model is saved. A weight that several MatMuls share is quantised once.

    Args:
        model: The model, opset 21 or newer.
        bits: 4 or 8.
        block_size: Neighbours along K that share a scale; K need not be a multiple of it.
        symmetric: Signed codes (int4, int8) without zero points; else unsigned ones with.
        layout: ``"axis0"`` or ``"transposed"``.
        nodes_to_exclude: Names of MatMul nodes that keep their float weight.

    Returns:
        The fate of every MatMul whose right side is an initializer.

    Raises:
        ValueError: If the opset is too old, an argument is out of range or an excluded name is
            no MatMul; when the model is saved, if a weight holds NaN or infinite values.
    """
    form = WeightFormat(bits, block_size, symmetric, layout)
    _check_opset(model)
    matmuls = [node for node in model.graph.all_nodes() if _is_matmul(node)]
    _check_names(nodes_to_exclude, matmuls)
    remarks = Remarks("weight_only_quantization")
    for node in matmuls:
        weight = node.inputs[1]
        if weight is None or not weight.is_initializer():
            continue  # a product of two activations
        label = node.name or node.outputs[0].name or node.op_type
        if reason := _refusal(node, weight, nodes_to_exclude):
            remarks.refused(label, reason)
            continue
        node.replace_input_with(1, _dequantized(weight, node, form))
        remarks.fired(label, f"{weight.name!r} -> {form.dtype.name.lower()}, {layout}")
        _drop_if_unused(weight)
    model.ir_version = max(model.ir_version or 0, _IR_VERSION)
    return remarks


def _check_opset(model: ir.Model) -> None:
    opset = model.opset_imports.get("", 0)
    if opset < _OPSET:
        raise ValueError(
            f"the model has opset {opset}, but DequantizeLinear in blocks needs {_OPSET}: "
            f"convert it first, with onnx.version_converter.convert_version(model, {_OPSET})"
        )


def _check_names(names: Collection[str], matmuls: Sequence[ir.Node]) -> None:
    known = [node.name for node in matmuls if node.name]
    for name in sorted(set(names) - set(known)):
        near = difflib.get_close_matches(name, known, n=3)
        hint = f"; the closest are {', '.join(map(repr, near))}" if near else ""
        raise ValueError(f"nodes_to_exclude: no MatMul is called {name!r}{hint}")


def _is_matmul(node: ir.Node) -> bool:
    return node.op_type == "MatMul" and node.domain in ("", "ai.onnx")


def _refusal(node: ir.Node, weight: ir.Value, excluded: Collection[str]) -> str | None:
    """Say why a weight keeps its floats; None if it does not."""
    tensor = weight.const_value
    if node.name in excluded:
        return "excluded by nodes_to_exclude"
    if weight.is_graph_input() or tensor is None:
        return f"weight {weight.name!r} is a graph input: a caller may feed another"
    if tensor.dtype != ir.DataType.FLOAT:
        return f"weight {weight.name!r} is {tensor.dtype.name.lower()}: float32 is quantised"
    shape = tensor.shape.numpy()
    if len(shape) != 2 or 0 in shape:
        return f"weight {weight.name!r} has shape {list(shape)}: [K, N] is quantised"
    return None


def _dequantized(weight: ir.Value, consumer: ir.Node, form: WeightFormat) -> ir.Value:
    """Return the dequantised weight ``[K, N]``, made at the weight's first use."""
    tensor = weight.const_value
    assert tensor is not None
    kind = f".{form.dtype.name.lower()}_block{form.block_size}"
    kind += "_transposed" if form.transposed else ""
    makers = {"": codes_tensor, "_scales": scales_tensor}
    if not form.symmetric:
        makers["_zero_points"] = zero_points_tensor
    inputs = [
        derived_initializer(weight, kind + suffix, functools.partial(make, tensor, form))
        for suffix, make in makers.items()
    ]
    for dequantize in inputs[0].consumers():  # an earlier MatMul shares the weight
        value: ir.Value = dequantize.outputs[0]
        return value.consumers()[0].outputs[0] if form.transposed else value
    k, n = tensor.shape.numpy()
    attributes = {"axis": int(form.transposed), "block_size": form.block_size}
    nodes = [ir.node("DequantizeLinear", inputs, attributes)]
    _describe(nodes[0], f"{inputs[0].name}.dequantized", form.shape(k, n))
    if form.transposed:
        nodes.append(ir.node("Transpose", nodes[0].outputs, {"perm": [1, 0]}))
        _describe(nodes[1], f"{inputs[0].name}.dequantized.T", (k, n))
    _insert(nodes, weight, consumer)
    return nodes[-1].outputs[0]


def _describe(node: ir.Node, name: str, shape: tuple[int, int]) -> None:
    """Name a node and its float32 output, and give that its shape."""
    (value,) = node.outputs
    node.name = value.name = name
    value.type, value.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(shape)


def _insert(nodes: Sequence[ir.Node], weight: ir.Value, consumer: ir.Node) -> None:
    """Put nodes into the graph that owns the weight, ahead of the first consumer."""
    graph = weight.graph
    assert isinstance(graph, ir.Graph)
    # A consumer in the body of an If or Loop sees what comes before that node.
    graph.insert_before(consumer if consumer.graph is graph else graph[0], nodes)


def _drop_if_unused(weight: ir.Value) -> None:
    graph = weight.graph
    if graph is not None and not weight.uses() and not weight.is_graph_output():
        del graph.initializers[weight.name or ""]
