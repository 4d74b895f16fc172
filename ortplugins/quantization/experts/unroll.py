# SPDX-License-Identifier: MIT
"""Writes a mixture of experts as one product after the other, so that each is a weight.

    for each expert e:
        rows = NonZero(routes[:, e])
        y[rows] += expert(x[rows]) * routes[rows, e]

``routes`` [T, E] are the shares of the chosen, 0 for the others. So statistics of an expert's
activations are those of tokens that are sent to it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript import TapeBuilder

from ortplugins.quantization.checkpoints.checkpoint import Checkpoint
from ortplugins.quantization.experts.mixture import Choice, Columns, Layer, Mixture, Operator
from ortplugins.quantization.experts.read import find_mixtures
from ortplugins.quantization.weights.recipe import Recipe
from ortplugins.quantization.weights.uses import SCOPES, WeightUse, modules_of
from rewrite_rules.graph.initializers import FreshNames, new_initializer
from rewrite_rules.graph.nodes import label, remove_unused
from rewrite_rules.graph.parameters import constant


@dataclasses.dataclass(frozen=True, eq=False)
class Experts:
    """An unrolled mixture, by names: converters of opsets make new nodes."""

    name: str  # of the node that it was
    output: str
    inputs: tuple[str, ...]  # x, what experts are chosen by, and their shares if not these
    attributes: dict[str, float | int | str]  # of QMoE
    order: tuple[int, ...]  # of the rows of all first layers
    # Of each layer, the last one last: the products by expert, and vectors that are added.
    products: tuple[tuple[str, ...], ...]
    biases: tuple[tuple[str, ...], ...]


def unroll_mixtures(
    model: ir.Model, recipe: Recipe, checkpoint: Checkpoint | None = None
) -> tuple[list[Experts], dict[str, str]]:
    """Unroll the mixtures that a recipe quantises.

    Return those that are to be QMoE, and why others stay as they are, by the names of nodes.
    MoE is onnxruntime's own operator; stacks of matrices become QMoE where the recipe writes
    such operators, and else products of standard ONNX. Those that a checkpoint has no codes of
    stay.
    """
    experts: list[Experts] = []
    reasons: dict[str, str] = {}
    if recipe.for_integers or "MatMul" not in recipe.op_types:
        return experts, reasons
    names, found = FreshNames(model), list(find_mixtures(model))
    for node, mixture in found:
        if isinstance(mixture, str):
            reasons[label(node)] = mixture
        elif reason := next(filter(None, _reasons(mixture, recipe)), ""):
            reasons[label(node)] = reason
        elif checkpoint is not None and not any(
            checkpoint.has_codes(f"{layer.matrices.name}.0") for layer in mixture.layers
        ):
            reasons[label(node)] = "no codes of its experts are in the checkpoint"
        else:
            written = _unroll(model.graph, names, mixture)
            if recipe.for_kernels or isinstance(mixture.router, Operator):
                experts.append(written)
    if len(reasons) < len(found):
        remove_unused(model)
    return experts, reasons


def _reasons(mixture: Mixture, recipe: Recipe) -> Iterator[str]:
    """Say why a recipe leaves layers in float, if it does."""
    for layer in mixture.layers:
        matrices, tensor, k_last = layer.matrices, layer.tensor, layer.k_last
        use = WeightUse(mixture.node, 1, matrices, tensor, k_last, k_last, mixture.x, None)
        yield recipe.choose(use, table=False)[2]


def _unroll(graph: ir.Graph, names: FreshNames, mixture: Mixture) -> Experts:
    """Write the products; what read the mixture reads their sum."""
    op, node = TapeBuilder(), mixture.node
    name, dtype = label(node), mixture.last.tensor.dtype
    count = mixture.last.experts
    flat, one = _constant(op, [-1]), _constant(op, [1])
    x = op.Reshape(mixture.x, _constant(op, [-1, mixture.last.N]))
    inputs, routes = _routes(op, mixture)
    total = op.ConstantOfShape(op.Shape(x), value=ir.tensor(np.zeros(1, dtype.numpy())))
    weights = {
        layer: [_part(graph, names, layer.matrices, count, expert) for expert in range(count)]
        for layer in mixture.layers
    }
    products: dict[Layer, list[str]] = {layer: [] for layer in mixture.layers}
    biases: dict[Layer, list[str]] = {layer: [] for layer in mixture.layers}

    def multiply(rows: Any, layer: Layer, expert: int) -> Any:
        matrix = weights[layer][expert]
        if layer.k_last:
            matrix = op.Transpose(matrix, perm=[1, 0])
        where = f"{name}.{expert}.{layer.matrices.name}"
        product = op.MatMul(rows, matrix, _name=names.take(where))
        product.name = names.take(f"{where}.product")
        scopes = [*modules_of(node), name, layer.matrices.name]
        product.producer().metadata_props[SCOPES] = repr(scopes)
        products[layer].append(product.name)
        if layer.bias is None:
            return product
        bias = _part(graph, names, layer.bias, layer.experts, expert)
        biases[layer].append(bias.name or "")
        return op.Add(product, bias)

    for expert in range(count):
        share = op.Gather(routes, _constant(op, expert), axis=1)
        rows = op.Reshape(op.NonZero(share), flat)
        tokens = op.Gather(x, rows, axis=0)
        outputs = {
            layer: multiply(tokens, layer, expert) for layer in mixture.activation.layers
        }
        hidden = _activation(op, mixture, outputs)
        share = op.Unsqueeze(op.Gather(share, rows), one)
        part = op.Mul(multiply(hidden, mixture.last, expert), share)
        part = op.Add(op.Gather(total, rows, axis=0), part)
        total = op.ScatterND(total, op.Unsqueeze(rows, one), part)
    output = op.Reshape(total, op.Shape(mixture.x))
    output.name = names.take(f"{name}.experts")
    for made in op.nodes:
        made.name = made.name or names.take(f"{name}.{made.op_type}")
    graph.insert_before(node, op.nodes)
    replaced = mixture.output
    output.dtype, output.shape = dtype, replaced.shape
    if replaced.is_graph_output():
        output.name, replaced.name = replaced.name, output.name
    replaced.replace_all_uses_with(output, replace_graph_outputs=True)
    assert output.name is not None
    return Experts(
        name,
        output.name,
        tuple(value.name or "" for value in inputs),
        {"k": mixture.k, **mixture.activation.attributes()},
        tuple(_order(mixture.activation.parts, mixture.activation.layers)),
        tuple(tuple(products[layer]) for layer in mixture.layers),
        tuple(tuple(biases[layer]) for layer in mixture.layers),
    )


def _routes(op: Any, mixture: Mixture) -> tuple[list[Any], Any]:
    """Emit the routes; return what QMoE reads, and them."""
    router, count = mixture.router, mixture.last.experts
    dtype = mixture.last.tensor.dtype
    if isinstance(router, Choice):
        shares = op.Cast(router.shares, to=dtype)
        routes = _scattered(op, router.chosen, shares, count, dtype)
        # QMoE takes the k greatest. What it takes beyond the chosen has a share of 0.
        return [mixture.x, routes, routes], routes
    probabilities = op.Softmax(router.logits, axis=-1)
    # Of equal ones the operators take the last, and TopK the first.
    flipped = op.Gather(probabilities, _constant(op, [*reversed(range(count))]), axis=1)
    shares, places = op.TopK(flipped, _constant(op, [mixture.k]), _outputs=2)
    if router.normalize:
        shares = op.Div(shares, op.ReduceSum(shares, _constant(op, [-1]), keepdims=1))
    chosen = op.Sub(_constant(op, count - 1), places)
    inputs = [mixture.x, router.logits]
    if not router.normalize:  # QMoE's own softmax is over the chosen
        inputs = [mixture.x, probabilities, probabilities]
    return inputs, _scattered(op, chosen, shares, count, dtype)


def _part(
    graph: ir.Graph, names: FreshNames, stack: ir.Value, count: int, expert: int
) -> ir.Value:
    """Return one expert's part of a constant, which lies where that does."""
    name, whole = names.take(f"{stack.name}.{expert}"), constant(stack)
    assert whole is not None
    shape, tensor = ir.Shape(whole.shape.numpy()[1:]), whole
    if isinstance(whole, ir.ExternalTensor):
        size = whole.nbytes // count
        place = whole.location, (whole.offset or 0) + expert * size, size
        tensor = ir.ExternalTensor(
            *place, whole.dtype, shape=shape, name=name, base_dir=whole.base_dir
        )
    else:
        tensor = ir.Tensor(whole.numpy()[expert], dtype=whole.dtype, name=name)
    return new_initializer(graph, tensor)


def _order(parts: Sequence[Columns], layers: Sequence[Layer]) -> Iterator[int]:
    """Yield the rows of all first layers as QMoE has them, the halves interleaved."""
    starts, start = {}, 0
    for layer in layers:
        starts[layer] = start
        start += layer.N
    for row in zip(*(part.places for part in parts), strict=True):
        for part, place in zip(parts, row, strict=True):
            yield starts[part.layer] + place


def _activation(op: Any, mixture: Mixture, outputs: dict[Layer, Any]) -> Any:
    """Emit what lies between the layers."""
    how, dtype = mixture.activation, mixture.last.tensor.dtype
    gate, *others = (_taken(op, outputs[part.layer], part) for part in how.parts)
    if how.kind == "relu":
        return op.Relu(gate)
    if how.kind == "identity":
        return gate
    if how.kind == "gelu":
        root = op.Mul(gate, _constant(op, math.sqrt(2 / math.pi), dtype))
        cube = op.Mul(op.Mul(gate, gate), _constant(op, 0.044715, dtype))
        bent = op.Tanh(op.Mul(root, op.Add(cube, _constant(op, 1, dtype))))
        half = op.Mul(gate, _constant(op, 0.5, dtype))
        return op.Mul(half, op.Add(bent, _constant(op, 1, dtype)))
    limit = how.limit < math.inf
    if limit:
        gate = op.Clip(gate, None, _constant(op, how.limit, dtype))
    scaled = gate if how.alpha == 1 else op.Mul(gate, _constant(op, how.alpha, dtype))
    gate = op.Mul(gate, op.Sigmoid(scaled))
    for other in others:
        if limit:
            bounds = (_constant(op, bound, dtype) for bound in (-how.limit, how.limit))
            other = op.Clip(other, *bounds)
        if how.beta:
            other = op.Add(other, _constant(op, how.beta, dtype))
        gate = op.Mul(gate, other)
    return gate


def _taken(op: Any, whole: Any, part: Columns) -> Any:
    places = part.places
    if len(places) == part.layer.N and places.step == 1:
        return whole
    bounds = (places.start, places.stop, 1, places.step)
    return op.Slice(whole, *(_constant(op, [bound]) for bound in bounds))


def _scattered(op: Any, chosen: Any, shares: Any, count: int, dtype: ir.DataType) -> Any:
    """Emit [T, E], the shares of the chosen and 0 for the others."""
    rows = op.Gather(op.Shape(chosen), _constant(op, [0]))
    shape = op.Concat(rows, _constant(op, [count]), axis=0)
    zeros = op.ConstantOfShape(shape, value=ir.tensor(np.zeros(1, dtype.numpy())))
    return op.ScatterElements(zeros, chosen, shares, axis=1)


def _constant(op: Any, numbers: Any, dtype: ir.DataType = ir.DataType.INT64) -> Any:
    return op.Constant(value=ir.tensor(np.array(numbers, dtype.numpy())))
