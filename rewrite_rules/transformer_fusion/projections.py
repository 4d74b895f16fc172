# SPDX-License-Identifier: MIT
"""One MatMulNBits for all that multiply one input: Q, K and V, or gate and up.

    MatMulNBits(x, q), MatMulNBits(x, k), MatMulNBits(x, v)
        -> Split(MatMulNBits(x, [q, k, v]))

Codes, scales, zero points and biases lie one after another along N, so that each column is
computed as before. Nodes that differ otherwise, reorder K, or whose weights a run may change
are left as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript import TapeBuilder

from rewrite_rules.graph.initializers import DerivedInitializers
from rewrite_rules.graph.lazy_tensors import ChunkedTensor, packed_bytes
from rewrite_rules.graph.nodes import drop_unused_initializers, label
from rewrite_rules.graph.parameters import constant
from rewrite_rules.remarks import Remarks

_MICROSOFT = "com.microsoft"
_GROUP_INDICES = 4


def merge_projections(model: ir.Model, remarks: Remarks) -> None:
    """Merge in place, in the main graph, whose nodes are sorted."""
    groups: dict[object, list[ir.Node]] = {}
    for node in model.graph:
        groups.setdefault(_key(node), []).append(node)
    made = DerivedInitializers(model)
    for key, nodes in groups.items():
        if key is None or len(nodes) < 2:
            continue
        first, *others = map(label, nodes)
        _merge(nodes, made)
        remarks.fired(first, f"one MatMulNBits with {', '.join(others)}")


def _key(node: ir.Node) -> object:
    """What nodes have to share to be merged; None for others."""
    if node.op_type != "MatMulNBits" or node.domain != _MICROSOFT:
        return None
    indices = node.inputs[_GROUP_INDICES : _GROUP_INDICES + 1]
    if any(value is not None for value in indices) or node.outputs[0].is_graph_output():
        return None
    layouts: dict[int, object] = {}
    for index, value in enumerate(node.inputs[1:], start=1):
        tensor = constant(value)
        if value is not None:
            if tensor is None or not value.is_initializer():
                return None
            layouts[index] = tensor.dtype, tuple(tensor.shape.numpy()[1:])
    same = {name: attr.value for name, attr in node.attributes.items() if name != "N"}
    return node.inputs[0], tuple(layouts.items()), tuple(sorted(same.items()))


def _merge(nodes: Sequence[ir.Node], made: DerivedInitializers) -> None:
    first, graph = nodes[0], nodes[0].graph
    assert isinstance(graph, ir.Graph)
    weights = [value for node in nodes for value in node.inputs[1:]]
    columns = [node.attributes.get_int("N", 0) for node in nodes]
    joined = [
        None if value is None else _joined(value, [node.inputs[index] for node in nodes], made)
        for index, value in enumerate(first.inputs[1:], start=1)
    ]
    numbers = np.array(columns, np.int64)
    codes: Any = joined[0]
    sizes = made.get(codes, "_columns", lambda name: ir.Tensor(numbers, name=name))
    op = TapeBuilder()
    kept = {name: attr.value for name, attr in first.attributes.items()}
    merged = op.MatMulNBits(
        first.inputs[0], *joined, **kept | {"N": sum(columns)}, _domain=_MICROSOFT
    )
    parts = op.Split(merged, sizes, axis=-1, _outputs=len(nodes))
    merged.producer().name = first.name
    graph.insert_before(first, op.nodes)
    for node, part in zip(nodes, parts, strict=True):
        whole = node.outputs[0]
        part.type, part.shape, name = whole.type, whole.shape, whole.name
        whole.replace_all_uses_with(part)
        graph.remove(node, safe=True)
        part.name = name
    drop_unused_initializers(weights)
    merged.name = f"{parts[0].name}_merged"


def _joined(
    first: ir.Value, values: Sequence[ir.Value | None], made: DerivedInitializers
) -> ir.Value:
    """The tensors of one input of all nodes, one after another along N."""
    tensors = [tensor for tensor in map(constant, values) if tensor is not None]
    shapes = [tuple(tensor.shape.numpy()) for tensor in tensors]
    shape = (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def make(name: str) -> ir.TensorProtocol:
        return ChunkedTensor(lambda: map(packed_bytes, tensors), tensors[0].dtype, shape, name)

    return made.get(first, "_merged", make, key=tuple(values))
