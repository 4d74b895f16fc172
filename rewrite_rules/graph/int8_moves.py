# SPDX-License-Identifier: MIT
"""Moves codes of int8 instead of what is dequantised of them.

    Transpose(DequantizeLinear(q, s, z))  -> DequantizeLinear(Transpose(q), s, z)

onnxruntime 1.32 does so, too, but at opset 21 and newer puts a QuantizeLinear between of which
it calls the codes int8 and the zero point uint8: no session opens.
"""

from __future__ import annotations

import onnx_ir as ir

from rewrite_rules.graph.nodes import input_of, walk
from rewrite_rules.graph.parameters import constant

OPSET = 21
"""The first one with the defect."""

MOVES = frozenset({"MaxPool", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"})
"""Operators that onnxruntime takes QuantizeLinear and DequantizeLinear past."""


def move_int8_codes(model: ir.Model) -> None:
    """Rewrite in place, in subgraphs as well; the same numbers are moved."""
    for node in [*walk(model.graph)]:
        if node.op_type == "DequantizeLinear" and not node.domain and _has_one_scale(node):
            pending = [node]
            while pending:
                pending += _moved(pending.pop())


def _has_one_scale(node: ir.Node) -> bool:
    """Whether codes of int8, no constants, have one scale that is above 0."""
    scale, zero = constant(input_of(node, 1)), constant(input_of(node, 2))
    one = scale is not None and scale.size == 1 and bool((scale.numpy() > 0).all())
    is_int8 = zero is not None and zero.dtype == ir.DataType.INT8 and zero.size == 1
    return one and is_int8 and constant(node.inputs[0]) is None


def _moved(dequantize: ir.Node) -> list[ir.Node]:
    """Move codes for the nodes that read what is dequantised; return the new Dequantizes."""
    made = list[ir.Node]()
    codes, *grid = dequantize.inputs
    for reader, index in dequantize.outputs[0].uses():
        if reader.op_type not in MOVES or reader.domain or index or len(reader.outputs) > 1:
            continue
        inputs, attributes = [codes, *reader.inputs[1:]], reader.attributes.values()
        move = ir.Node("", reader.op_type, inputs, attributes, name=reader.name)
        behind = ir.Node(
            "", dequantize.op_type, [move.outputs[0], *grid], dequantize.attributes.values()
        )
        (old,), (new,) = reader.outputs, behind.outputs
        new.type, new.shape, new.name = old.type, old.shape, old.name
        assert reader.graph is not None
        ir.convenience.replace_nodes_and_values(
            reader.graph, reader, [reader], [move, behind], [old], [new]
        )
        made.append(behind)
    return made
