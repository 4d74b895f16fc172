# SPDX-License-Identifier: MIT
"""Takes scales of channels out of activations again.

AWQ multiplies row k of a weight by s[k]; its activation must be divided by s. Best is to do it
in the constants that the activation comes from (all exact but for one rounding):

    LayerNormalization(x, scale, bias)                    scale / s, bias / s
    RMSNormalization, SimplifiedLayerNormalization        scale / s
    SkipLayerNormalization, SkipSimplified... (output 0)  gamma / s, beta / s
    Mul(x, vector)                                        vector / s
    MatMul(x, W), Gemm(x, W, bias)                        columns of W / s, bias / s
    MatMulNBits(x, codes, scales, ...)                    left: its scales are not ours

A product of two activations takes them in either factor, Add in both terms; Relu and Identity
let positive scales through. Everything on the way must have no other reader and not be a graph
output, and every constant must belong to the one node alone. Otherwise one Mul by 1 / s goes
behind the activation, for all weights of the group.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection
from typing import Any

import numpy as np
import onnx_ir as ir

from ortplugins.quantization.methods.nearest import Floats
from rewrite_rules.dq_matmulnbits_fusion.matmul_operands import read_product
from rewrite_rules.graph.initializers import FreshNames, new_initializer
from rewrite_rules.graph.parameters import constant
from rewrite_rules.remarks import Refusal

_MICROSOFT = "com.microsoft"
_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16)
# Inputs of normalisations that scale and shift output 0, the ones that must be there first.
_NORMALISATIONS = {
    ("", "LayerNormalization"): (1, 2),
    ("", "RMSNormalization"): (1,),
    ("", "SimplifiedLayerNormalization"): (1,),
    (_MICROSOFT, "SkipLayerNormalization"): (2, 3),
    (_MICROSOFT, "SkipSimplifiedLayerNormalization"): (2,),
}
_THROUGH = ("Identity", "Relu", "LeakyRelu")
_DEEPEST = 8


@dataclasses.dataclass(frozen=True, eq=False)
class Fold:
    """An initializer that is divided along its last axis, or the first of ``[N, K]``."""

    constant: ir.Value
    axis: int = -1

    def quotient(self, scales: Floats) -> ir.Tensor[Any]:
        """Return the constant, divided, in its own type."""
        tensor = self.constant.const_value
        assert tensor is not None
        numbers, divisor = tensor.numpy(), scales.astype(np.float64)
        with np.errstate(over="ignore", under="ignore"):
            quotient = numbers / (divisor[:, None] if self.axis == 0 else divisor)
            quotient = quotient.astype(numbers.dtype)
        return ir.Tensor(quotient, dtype=tensor.dtype, name=tensor.name)


# A node and which of its inputs.
Use = tuple[ir.Node, int]


def find_folds(
    activation: ir.Value, uses: Collection[Use], scales: Floats
) -> list[Fold] | None:
    """Find the constants that divide an activation; None where there are none.

    ``uses`` are where it meets the weights that are multiplied by the scales, float32 ``[K]``.
    """
    others = {(use.node, use.idx) for use in activation.uses()} - set(uses)
    if others or activation.is_graph_output():
        return None
    try:
        folds = _folds(activation, len(scales), 0)
    except Refusal:
        return None
    return folds if all(_fits(fold, scales) for fold in folds) else None


def _folds(value: ir.Value, channels: int, depth: int) -> list[Fold]:
    """Constants to divide so that a value is; its readers are known to agree."""
    node = value.producer()
    if node is None or depth > _DEEPEST or value.index() != 0:
        raise Refusal("ORP804", "not computed by a node that scales")
    if indices := _NORMALISATIONS.get((node.domain, node.op_type)):
        _check_last_axis(node)
        given = [i for i in indices if i < len(node.inputs) and node.inputs[i] is not None]
        return [_vector(node, index, channels) for index in given]
    kind = "" if node.domain else node.op_type
    if kind in _THROUGH and constant(node.inputs[0]) is None:
        return _operand(node, 0, channels, depth)
    if kind == "Mul" and len(node.inputs) == 2:
        # One of the two factors is enough; a constant one comes first.
        for index in sorted((1, 0), key=lambda index: constant(node.inputs[index]) is None):
            with contextlib.suppress(Refusal):
                return _operand(node, index, channels, depth)
    if kind == "Add" and len(node.inputs) == 2:
        return [fold for index in (0, 1) for fold in _operand(node, index, channels, depth)]
    if kind in ("MatMul", "Gemm"):
        return _linear(node, channels)
    raise Refusal("ORP804", f"{node.op_type} does not scale")


def _operand(node: ir.Node, index: int, channels: int, depth: int) -> list[Fold]:
    value = node.inputs[index]
    if constant(value) is not None:
        return [_vector(node, index, channels)]
    if value is None or value.is_graph_output() or len(value.uses()) != 1:
        raise Refusal("ORP804", "read by others")
    return _folds(value, channels, depth + 1)


def _fits(fold: Fold, scales: Floats) -> bool:
    """Whether a constant can be divided within its type."""
    tensor = fold.constant.const_value
    assert tensor is not None
    if tensor.dtype is ir.DataType.FLOAT:
        return True  # scales are within 1e-4 and 1e4
    quotient = fold.quotient(scales).numpy()
    lost = (quotient == 0) & (tensor.numpy() != 0)
    return bool(np.isfinite(quotient).all()) and not lost.any()


def _linear(node: ir.Node, channels: int) -> list[Fold]:
    product = read_product(node, 1)
    if product.transpose_x and node.op_type != "Gemm":
        raise Refusal("ORP804", "an operand is transposed")
    weight = node.inputs[1]
    tensor = constant(weight)
    if weight is None or tensor is None:
        raise Refusal("ORP804", "a Mul of two activations")
    axis = 0 if product.k_axis == 1 else -1
    shape = tuple(tensor.shape.numpy())
    if len(shape) != 2 or shape[axis] != channels:
        raise Refusal("ORP804", f"weight {weight.name!r} has shape {shape}")
    _check_private(weight, node)
    folds = [Fold(weight, axis)]
    if product.bias is not None:
        folds.append(_vector(node, 2, channels))
    return folds


def _vector(node: ir.Node, index: int, channels: int) -> Fold:
    value = node.inputs[index]
    tensor = constant(value)
    if value is None or tensor is None:
        raise Refusal("ORP804", "not a constant")
    shape = tuple(tensor.shape.numpy())
    # A scalar would have to become a vector, and [channels, 1] does not lie along K.
    if not shape or shape[-1] != channels or tensor.size != channels:
        raise Refusal("ORP804", f"constant {value.name!r} has shape {shape}")
    _check_private(value, node)
    return Fold(value)


def _check_private(value: ir.Value, node: ir.Node) -> None:
    """Refuse a constant that others read, or that a caller may see or feed."""
    tensor = value.const_value
    if not value.is_initializer() or tensor is None or tensor.dtype not in _FLOATS:
        raise Refusal("ORP804", f"{value.name!r} is not a float initializer")
    if value.is_graph_input() or value.is_graph_output() or len(value.uses()) != 1:
        raise Refusal("ORP804", f"{value.name!r} is read by others")
    if node.graph is not value.graph:
        raise Refusal("ORP804", f"{value.name!r} is read in a subgraph")


def _check_last_axis(node: ir.Node) -> None:
    axis = node.attributes.get("axis")
    if axis is None or axis.as_int() == -1:
        return
    shape = None if node.inputs[0] is None else node.inputs[0].shape
    if shape is None or axis.as_int() != len(shape) - 1:
        raise Refusal("ORP804", "normalises over several axes")


def insert_mul(
    activation: ir.Value,
    uses: Collection[Use],
    scales: Floats,
    dtype: ir.DataType,
    names: FreshNames,
) -> None:
    """Put ``Mul(activation, 1 / scales)`` between an activation and some of its readers.

    ``dtype`` is the activation's, which the model need not say.
    """
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


def described(node: ir.Node, dtype: ir.DataType, shape: ir.Shape | None) -> ir.Value:
    """Return a node's output, with the node's name, a type and a shape."""
    (value,) = node.outputs
    value.name = node.name
    value.type, value.shape = ir.TensorType(dtype), shape
    return value
