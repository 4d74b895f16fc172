# SPDX-License-Identifier: MIT
"""Divides activations by the scales of their channels.

AWQ multiplies row k of a weight by s[k]; its activation must be divided by s. Best is to do it
in the vectors that make the activation, exact but for one rounding:

    LayerNormalization(x, scale, bias)                    scale / s, bias / s
    RMSNormalization, SimplifiedLayerNormalization        scale / s
    SkipLayerNormalization, SkipSimplified... (output 0)  gamma / s, beta / s
    Mul(x, vector)                                        vector / s

Nothing else may read the activation or one of these constants, nor the caller see it.
Otherwise one Mul by 1 / s goes behind the activation, for all weights that read it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import onnx_ir as ir

from ortplugins.quantization.methods.nearest import Floats
from rewrite_rules.graph.initializers import FreshNames, new_initializer
from rewrite_rules.graph.parameters import constant

_MICROSOFT = "com.microsoft"
_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16)
# Inputs that scale and shift output 0.
_VECTORS = {
    ("", "LayerNormalization"): (1, 2),
    ("", "RMSNormalization"): (1,),
    ("", "SimplifiedLayerNormalization"): (1,),
    (_MICROSOFT, "SkipLayerNormalization"): (2, 3),
    (_MICROSOFT, "SkipSimplifiedLayerNormalization"): (2,),
}

# A node and which of its inputs.
Use = tuple[ir.Node, int]


def divide(
    activation: ir.Value,
    uses: Collection[Use],
    scales: Floats,
    dtype: ir.DataType,
    names: FreshNames,
) -> str:
    """Divide what some nodes read of an activation by scales, float32 ``[K]``.

    ``dtype`` is the activation's, which the model need not say. Return ``"folded"`` where
    constants were divided, ``"mul"`` where a node was added.
    """
    others = {(use.node, use.idx) for use in activation.uses()} - set(uses)
    if not others and not activation.is_graph_output():
        vectors = _vectors(activation, len(scales))
        quotients = [_quotient(vector, scales) for vector in vectors]
        if quotients and all(quotient is not None for quotient in quotients):
            for vector, quotient in zip(vectors, quotients, strict=True):
                vector.const_value = quotient
            return "folded"
    graph = activation.graph
    assert isinstance(graph, ir.Graph)
    inverse = (1 / scales).astype(dtype.numpy())
    name = names.take(f"{activation.name}.channel_scales")
    vector = new_initializer(graph, ir.Tensor(inverse, dtype=dtype, name=name))
    node = ir.node("Mul", [activation, vector], name=names.take(f"{activation.name}.scaled"))
    scaled = described(node, dtype, activation.shape)
    producer = activation.producer()
    if producer is not None:
        graph.insert_after(producer, node)
    else:
        graph.insert_before(graph[0], node)
    for reader, index in uses:
        reader.replace_input_with(index, scaled)
    return "mul"


def _vectors(activation: ir.Value, channels: int) -> list[ir.Value]:
    """Return the constants that scale and shift an activation; none where not all may."""
    node = activation.producer()
    if node is None or activation.index() != 0:
        return []
    if (node.domain, node.op_type) == ("", "Mul"):
        factors = [value for value in node.inputs if constant(value) is not None]
        found = factors[:1]
    else:
        indices = _VECTORS.get((node.domain, node.op_type), ())
        found = [node.inputs[i] for i in indices if i < len(node.inputs)]
    vectors = [value for value in found if value is not None]
    return vectors if all(_is_private(value, node, channels) for value in vectors) else []


def _is_private(value: ir.Value, node: ir.Node, channels: int) -> bool:
    """Whether a value is a float vector along K that only this node reads, and no caller."""
    tensor = value.const_value
    if not value.is_initializer() or tensor is None or tensor.dtype not in _FLOATS:
        return False
    shape = tuple(tensor.shape.numpy())
    # A scalar would have to become a vector, and [channels, 1] does not lie along K.
    along_k = bool(shape) and shape[-1] == channels == tensor.size
    seen = value.is_graph_input() or value.is_graph_output() or len(value.uses()) != 1
    return along_k and not seen and node.graph is value.graph


def _quotient(vector: ir.Value, scales: Floats) -> ir.Tensor[Any] | None:
    """Return a constant over scales, in its own type; None where that does not hold it."""
    tensor = vector.const_value
    assert tensor is not None
    numbers = tensor.numpy()
    with np.errstate(over="ignore", under="ignore"):
        quotient = (numbers / scales.astype(np.float64)).astype(numbers.dtype)
    if not np.isfinite(quotient).all() or ((quotient == 0) & (numbers != 0)).any():
        return None
    return ir.Tensor(quotient, dtype=tensor.dtype, name=tensor.name)


def described(node: ir.Node, dtype: ir.DataType, shape: ir.Shape | None) -> ir.Value:
    """Return a node's output, with the node's name, a type and a shape."""
    (value,) = node.outputs
    value.name = node.name
    value.type, value.shape = ir.TensorType(dtype), shape
    return value
