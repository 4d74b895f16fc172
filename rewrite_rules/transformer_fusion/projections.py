# SPDX-License-Identifier: MIT
"""One MatMulNBits for all that multiply one input: Q, K and V, or gate and up.

    MatMulNBits(x, q), MatMulNBits(x, k), MatMulNBits(x, v)
        -> Split(MatMulNBits(x, [q, k, v]))

Codes, scales, zero points and biases lie one after another along N, so that each column is
computed as before. A token reads the same weights in fewer, larger steps.

Left as they are: nodes that differ in block size, bits, accuracy level or optional inputs, or
that reorder K; weights that a run may change.
"""

from __future__ import annotations

__all__ = ["merge_projections"]

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from rewrite_rules.graph.constants import constant
from rewrite_rules.graph.initializers import DerivedInitializers
from rewrite_rules.graph.lazy_tensors import ChunkedTensor, packed_bytes
from rewrite_rules.graph.nodes import drop_unused_initializers, label
from rewrite_rules.remarks import Remarks

_MICROSOFT = "com.microsoft"
_GROUP_INDICES = 4
_SUFFIXES = ("", "_codes", "_scales", "_zero_points", "", "_bias")


def merge_projections(model: ir.Model, remarks: Remarks) -> None:
    """Merge in place, in the main graph.

    Args:
        model: Its nodes are sorted.
        remarks: Gets one for each MatMulNBits that is made.
    """
    groups: dict[object, list[ir.Node]] = {}
    for node in model.graph:
        key = _key(node)
        if key is not None:
            groups.setdefault(key, []).append(node)
    made = DerivedInitializers(model)
    for nodes in groups.values():
        if len(nodes) > 1:
            _merge(nodes, made)
            names = ", ".join(label(node) for node in nodes[1:])
            remarks.fired(label(nodes[0]), f"one MatMulNBits with {names}")


def _key(node: ir.Node) -> object:
    """What nodes have to share to be merged; None for others."""
    if node.op_type != "MatMulNBits" or node.domain != _MICROSOFT:
        return None
    weights = [*node.inputs[1:]]
    if any(value is not None and constant(value) is None for value in weights):
        return None
    if any(value is not None and not value.is_initializer() for value in weights):
        return None
    if len(node.inputs) > _GROUP_INDICES and node.inputs[_GROUP_INDICES] is not None:
        return None
    if node.outputs[0].is_graph_output():
        return None
    types = tuple(None if value is None else value.dtype for value in node.inputs)
    while types and types[-1] is None:
        types = types[:-1]
    names = sorted(name for name in node.attributes if name != "N")
    return node.inputs[0], types, *((name, node.attributes[name].value) for name in names)


def _merge(nodes: Sequence[ir.Node], made: DerivedInitializers) -> None:
    first = nodes[0]
    graph = first.graph
    assert isinstance(graph, ir.Graph)
    columns = [node.attributes.get_int("N", 0) for node in nodes]
    inputs: list[ir.Value | None] = [first.inputs[0]]
    for index, value in enumerate(first.inputs[1:], start=1):
        joined = None if value is None else _joined(nodes, index, made)
        inputs.append(joined)
    attributes = [*first.attributes.values()]
    attributes = [a for a in attributes if a.name != "N"] + [ir.AttrInt64("N", sum(columns))]
    merged = ir.Node(_MICROSOFT, "MatMulNBits", inputs, attributes, name=first.name)
    sizes = made.get(
        inputs[1],  # type: ignore[arg-type]
        "_columns",
        lambda name: ir.Tensor(np.array(columns, np.int64), name=name),
    )
    split = ir.Node(
        "",
        "Split",
        [merged.outputs[0], sizes],
        [ir.AttrInt64("axis", -1)],
        num_outputs=len(nodes),
    )
    graph.insert_before(first, [merged, split])
    for node, part in zip(nodes, split.outputs, strict=True):
        whole = node.outputs[0]
        part.type, part.shape, name = whole.type, whole.shape, whole.name
        whole.replace_all_uses_with(part)
        weights = list(node.inputs)
        graph.remove(node, safe=True)
        drop_unused_initializers(weights)
        part.name = name
    merged.outputs[0].name = f"{split.outputs[0].name}_merged"


def _joined(nodes: Sequence[ir.Node], index: int, made: DerivedInitializers) -> ir.Value:
    """The tensors of one input of all nodes, one after another along N."""
    values = [node.inputs[index] for node in nodes]
    tensors = [constant(value) for value in values]
    shapes = [tuple(tensor.shape.numpy()) for tensor in tensors if tensor is not None]
    shape = (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def chunks() -> Iterator[Any]:
        for tensor in tensors:
            assert tensor is not None
            yield packed_bytes(tensor)

    assert values[0] is not None and tensors[0] is not None
    dtype = tensors[0].dtype
    return made.get(
        values[0],
        f"{_SUFFIXES[index]}_merged",
        lambda name: ChunkedTensor(chunks, dtype, shape, name),
        key=tuple(values),
    )
