# SPDX-License-Identifier: MIT
"""Nodes whose result is their input: exporters leave them between what rules match.

Identity(x)   Dropout(x) at inference   Cast(x) to the type of x   Concat(x)
Transpose(x, perm = [0, 1, ...])   Reshape(x) where sizes are proved to stay
"""

from __future__ import annotations

import onnx_ir as ir

from rewrite_rules.graph.nodes import input_of, walk
from rewrite_rules.graph.parameters import constant, int_attribute, ints_attribute
from rewrite_rules.remarks import Refusal
from rewrite_rules.shapes.proved_shapes import ProvedShapes

_OPERATORS = frozenset({"Cast", "Concat", "Dropout", "Identity", "Reshape", "Transpose"})
# Before, an attribute of Dropout says whether it trains.
_DROPOUT_OPSET = 7


def drop_copies(model: ir.Model) -> None:
    """Have what copies are read for read their source; of outputs of graphs a copy stays.

    Looks at the main graph and its subgraphs, which are sorted.
    """
    facts = ProvedShapes(model, on_demand=True)
    for node in [*walk(model.graph)]:
        if node.op_type in _OPERATORS and not node.domain and _is_copy(node, facts):
            source, result = node.inputs[0], node.outputs[0]
            assert node.graph is not None
            for reader, index in result.uses():
                reader.replace_input_with(index, source)
            if not result.is_graph_output():
                node.graph.remove(node, safe=True)


def _is_copy(node: ir.Node, facts: ProvedShapes) -> bool:
    """Whether a node's first result is its first input, and nothing else is read of it."""
    source, others = input_of(node, 0), node.outputs[1:]
    if source is None or any(value.uses() or value.is_graph_output() for value in others):
        return False
    if node.op_type == "Reshape":
        # onnxruntime's optimiser infers one of the sizes, which fails where none changes.
        dims = facts.dims(source)
        return dims is not None and dims == facts.dims(node.outputs[0])
    try:
        if node.op_type == "Cast":
            return source.dtype is not None and int_attribute(node, "to") == source.dtype
        if node.op_type == "Transpose":
            order = ints_attribute(node, "perm")
            return order is not None and order == [*range(len(order))]
    except Refusal:
        return False
    if node.op_type == "Dropout":
        trains = input_of(node, 2)
        tensor = constant(trains)
        off = trains is None or (tensor is not None and not tensor.numpy().any())
        return facts.opset(node) >= _DROPOUT_OPSET and off
    return len(node.inputs) == 1
