# SPDX-License-Identifier: MIT
"""Lets equal values be one, so that what layers compute alike (masks, positions) is found."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable

import onnx_ir as ir

from rewrite_rules.graph.initializers import FreshNames, new_initializer
from rewrite_rules.graph.parameters import constant, contents
from rewrite_rules.shapes.evaluator import CannotEvaluate, array_of
from rewrite_rules.shapes.proved_shapes import ProvedShapes

_MAX_SHARED = 8
# Two of these are two draws, even of the same inputs.
_DRAWS = frozenset({
    "Bernoulli", "Dropout", "Multinomial", "RandomNormal", "RandomNormalLike",
    "RandomUniform", "RandomUniformLike",
})  # fmt: skip


def share_nodes(graph: ir.Graph) -> None:
    """Let standard nodes that compute the same of the same inputs be one; they are sorted."""
    seen: dict[Hashable, ir.Node] = {}
    equal = list[ir.Node]()
    for node in graph:
        key = _computes(node)
        if key is None or any(value.is_graph_output() for value in node.outputs):
            continue
        first = seen.setdefault(key, node)
        if first is not node:
            ir.convenience.replace_all_uses_with(node.outputs, first.outputs)
            equal.append(node)
    graph.remove(equal, safe=True)


def _computes(node: ir.Node) -> Hashable:
    """What a node computes, equal for equal nodes; None where runs may differ."""
    if node.domain or node.op_type in _DRAWS:
        return None
    attributes = []
    for name, attribute in sorted(node.attributes.items()):
        value = attribute.value
        if attribute.type is ir.AttributeType.TENSOR and value.size <= _MAX_SHARED:
            value = contents(value)
        elif attribute.type in (ir.AttributeType.FLOAT, ir.AttributeType.FLOATS):
            value = repr(value)  # 0.0 equals -0.0, by which a division differs
        elif isinstance(value, (list, tuple)):
            value = tuple(value)
        elif not isinstance(value, (int, float, str)):
            return None
        attributes.append((name, attribute.type, value))
    # An output without a name is not computed, and nothing may come to read it.
    present = tuple(bool(value.name) for value in node.outputs)
    return node.op_type, tuple(node.inputs), present, tuple(attributes)


def fold_scalars(model: ir.Model, graphs: Iterable[ir.Graph], facts: ProvedShapes) -> None:
    """Make numbers that scale others constants: the root of a head's size, of a Shape."""
    names = FreshNames(model)
    for node in itertools.chain(*graphs):
        if node.op_type not in ("Mul", "Div") or node.domain:
            continue
        for index, value in enumerate(node.inputs):
            if value is None or value.producer() is None or constant(value) is not None:
                continue
            if value.dtype != ir.DataType.FLOAT or (value.shape and len(value.shape) > 1):
                continue
            if facts.shape(value) not in ((), ((1, ()),)):
                continue
            try:
                array = array_of(value, facts)
            except CannotEvaluate:
                continue
            tensor = ir.Tensor(array, name=names.take(f"{value.name}_folded"))
            node.replace_input_with(index, new_initializer(model.graph, tensor))
