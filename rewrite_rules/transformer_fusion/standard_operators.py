# SPDX-License-Identifier: MIT
"""Standard operators without a kernel on a CPU, by those of onnxruntime's own operators.

    LinearAttention(q, k, v, state, decay, beta)
        -> com.microsoft LinearAttention(q, k, v, state, decay, beta)
    CausalConvWithState(x, weight, bias, state)
        -> If(few tokens: com.microsoft CausalConvWithState(...), else: itself)
    Swish(x)
        -> QuickGelu(x)

onnxruntime runs the functions that define them: LinearAttention is a Scan over tokens. The
first two have the same inputs, outputs and attributes under both names. The kernel of
LinearAttention reads decay and beta without a look at their batch and length: unless these are
proved, a Reshape to them stands in front, as in the function.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import onnx_ir as ir
from onnxscript import TapeBuilder

from rewrite_rules.graph.initializers import name_apart
from rewrite_rules.graph.nodes import input_of, label
from rewrite_rules.graph.parameters import float_attribute, int_attribute
from rewrite_rules.remarks import PassContext, Refusal
from rewrite_rules.shapes.dimensions import known, number
from rewrite_rules.shapes.proved_shapes import ProvedShapes
from rewrite_rules.transformer_fusion.conditions import either
from rewrite_rules.transformer_fusion.head_layout import ints

_MICROSOFT = "com.microsoft"
# Opsets up to which the operators are known, and the first onnxruntime that was looked at.
_OPSET, _VERSION = 28, (1, 32)
_DECAY_AND_BETA, _PAST = (4, 5), 3
# The kernel takes .1 of the nodes' time for one token, .3 for 4, .8 for 16 and 3.2 for 256.
_FEW_TOKENS = 8


def use_kernels(
    model: ir.Model,
    nodes: Mapping[str, Sequence[ir.Node]],
    shapes: ProvedShapes,
    parts: Collection[str],
    context: PassContext,
) -> None:
    """Rewrite in place, in subgraphs as well, operators of some parts of the pass."""
    version, remarks = context.onnxruntime, context.remarks
    is_newer = model.opset_imports.get("", 0) > _OPSET
    if is_newer or (version is not None and version < _VERSION) or not context.cpu_only:
        return
    fired = False
    for kind, (part, rewrite) in _REWRITES.items():
        for node in nodes[kind] if part in parts else ():
            name = label(node)
            if node.domain:
                continue
            try:
                _check_types(node)
                rewrite(node, shapes)
            except Refusal as refusal:
                remarks.refused(name, refusal.behind(f"{kind}: "))
            else:
                remarks.fired(name, f"{kind} by a kernel")
                fired = True
    if fired:
        model.opset_imports.setdefault(_MICROSOFT, 1)
        name_apart(model)


def _check_types(node: ir.Node) -> None:
    for value in node.inputs:
        if value is not None and value.dtype is not ir.DataType.FLOAT:
            raise Refusal("ORP605", f"computes in {value.dtype}, not in float32")


def _attention(node: ir.Node, shapes: ProvedShapes) -> None:
    heads, groups = (int_attribute(node, f"{kind}_num_heads", 0) for kind in ("q", "kv"))
    query, key, value = (shapes.dims(each, 3) for each in node.inputs[:3])
    product = shapes.unknowns.product
    # The function reshapes them to the queries' batch and length, whatever they have. The
    # kernel divides by the size of a head, and a process dies of 0.
    if (
        query is None
        or key is None
        or value is None
        or not number(query[2])
        or not query[:2] == key[:2] == value[:2]
        or product((query[2], known(groups))) != product((key[2], known(heads)))
    ):
        raise Refusal(
            "ORP602", "the sizes of its queries, keys and values are not known to fit"
        )
    for index in _DECAY_AND_BETA:
        read = input_of(node, index)
        if read is not None and (shapes.dims(read, 3) or ())[:2] != query[:2]:
            op = TapeBuilder()
            sizes = op.Concat(op.Shape(node.inputs[0], start=0, end=2), ints(op, -1), axis=0)
            node.replace_input_with(index, op.Reshape(read, sizes))
            _graph(node).insert_before(node, op.nodes)
    node.domain = _MICROSOFT


def _convolution(node: ir.Node, shapes: ProvedShapes) -> None:
    dims, past, weight = (shapes.dims(input_of(node, index), 3) for index in (0, _PAST, 1))
    if input_of(node, _PAST) is not None:
        # Nodes take one of any length, the kernel a token less than its weights have.
        held, kernel = (None if each is None else number(each[2]) for each in (past, weight))
        if held is None or kernel != held + 1:
            raise Refusal("ORP602", "the length of its past is not known to fit its weights")
    length = None if dims is None else number(dims[2])
    if length is not None and length > _FEW_TOKENS:
        raise Refusal("ORP603", f"nodes are faster for {length} tokens")
    if length is not None:
        node.domain = _MICROSOFT
        return

    def by(domain: str) -> Callable[[Any], Sequence[ir.Value]]:
        made = {"_domain": domain, "_outputs": len(node.outputs)}
        attributes = {name: item.value for name, item in node.attributes.items()}
        return lambda op: op.CausalConvWithState(*node.inputs, **attributes, **made)

    op = TapeBuilder()
    count = op.Shape(node.inputs[0], start=2, end=3)
    is_few = op.LessOrEqual(count, ints(op, _FEW_TOKENS))
    made = either(op, is_few, by(_MICROSOFT), by(""), node.name)
    for old, new in zip(node.outputs, made, strict=True):
        shapes.replace(old, new)
    replace = ir.convenience.replace_nodes_and_values
    replace(_graph(node), node, [node], op.nodes, node.outputs, made)


def _swish(node: ir.Node, shapes: ProvedShapes) -> None:
    alpha = ir.AttrFloat32("alpha", float_attribute(node, "alpha", 1.0))
    node.attributes.add(alpha)  # onnxruntime's own has another default
    node.op_type, node.domain = "QuickGelu", _MICROSOFT


def _graph(node: ir.Node) -> ir.Graph:
    assert isinstance(node.graph, ir.Graph)
    return node.graph


_REWRITES: Mapping[str, tuple[str, Callable[[ir.Node, ProvedShapes], None]]] = {
    "LinearAttention": ("attention", _attention),
    "CausalConvWithState": ("attention", _convolution),
    "Swish": ("activations", _swish),
}
