# SPDX-License-Identifier: MIT
"""Writes QMoE, onnxruntime's operator, in the place of experts that were unrolled.

    fc1, fc2        codes [E, N, K / pack], unsigned, low bits first; rows of fc1 interleaved
    scales          [E, N, K / block_size]
    zero points     [E, N, blocks / pack], by default 8 or 128
    router          x, what the k greatest of each token are picked by, and their shares

Without shares the operator takes the softmax of the k greatest. It drops a share up to 1e-8.
onnxruntime (1.32) has fast kernels for blocks alone, and computes 8 bits with activations of 8
bits, whatever the accuracy_level.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ortplugins.quantization.experts.unroll import Experts
from ortplugins.quantization.tensor_reference import ScratchWriter
from ortplugins.quantization.weights.graph import in_file
from ortplugins.quantization.weights.weight import Weight
from rewrite_rules.graph.initializers import FreshNames, new_initializer
from rewrite_rules.graph.nodes import producer
from rewrite_rules.graph.parameters import require_constant
from rewrite_rules.weights.bit_packing import SIGN_BITS, pack_rows

Array = npt.NDArray[Any]
_BLOCKS = (16, 32, 64, 128, 256)


def write_experts(
    model: ir.Model,
    experts: Sequence[Experts],
    weights: Mapping[str, Weight],
    accuracy_level: int,
    writer: ScratchWriter,
) -> tuple[set[Weight], list[str]]:
    """Write QMoE for experts whose products have these weights, by the products' names.

    Return the weights that are in one now, and notes on experts that stay products.
    """
    written: set[Weight] = set()
    notes = []
    for each in experts:
        layers = [
            [weights[name] for name in names if name in weights] for names in each.products
        ]
        if reason := _refusal(layers, len(each.products[-1])):
            notes.append(f"the experts of {each.name!r} are no QMoE: {reason}")
            continue
        _write(model, each, layers, accuracy_level, writer)
        written.update(*layers)
    return written, notes


def _refusal(layers: Sequence[Sequence[Weight]], experts: int) -> str:
    """Say why weights don't fit into one operator; nothing if they do."""
    weights = [weight for layer in layers for weight in layer]
    if len(weights) < experts * len(layers):
        return "some of them stay in float"
    if len({weight.form for weight in weights}) > 1:
        return "they differ in bits or block_size"
    if any(weight.offsets is not None for weight in weights):
        return "their blocks have offsets"
    form = weights[0].form
    if form.bits not in (4, 8):
        return f"it takes 4 or 8 bits, not {form.bits}"
    sizes = {weight.K for weight in weights}
    if form.block_size not in _BLOCKS or any(size % form.block_size for size in sizes):
        return f"it takes whole blocks of one of {_BLOCKS} along {sorted(sizes)}"
    if not form.is_symmetric and form.block_size in sizes:
        return "it takes zero points of two blocks and more"
    return ""


def _write(
    model: ir.Model,
    experts: Experts,
    layers: Sequence[Sequence[Weight]],
    accuracy_level: int,
    writer: ScratchWriter,
) -> None:
    values = ir.convenience.create_value_mapping(model.graph, include_subgraphs=False)
    output, names, form = values[experts.output], FreshNames(model), layers[-1][0].form
    x, router, *shares = (values[name] for name in experts.inputs)

    def stacked(part: slice, order: Sequence[int], kind: str) -> ir.Value:
        """Write a tensor of each expert, the rows of its layers in an order."""
        tensor = _in_file(
            lambda expert: np.concatenate(
                [_TENSORS[kind](layer[expert]) for layer in layers[part]]
            )[order],
            len(layers[-1]),
            writer,
            names.take(f"{experts.name}.{kind}"),
        )
        return new_initializer(model.graph, tensor)

    def bias(part: slice, order: Sequence[int]) -> ir.Value | None:
        """Write what is added to the rows, ``[E, N]``, if anything is."""
        if not any(experts.biases[part]):
            return None
        dtype = layers[-1][0].uses[0].tensor.dtype.numpy()
        rows = [
            np.stack([require_constant(values[name], name)[1].numpy() for name in vectors])
            if vectors
            else np.zeros((len(layer), layer[0].N), dtype)
            for vectors, layer in zip(experts.biases[part], layers[part], strict=True)
        ]
        name = names.take(f"{experts.name}.bias")
        whole = np.concatenate(rows, axis=1)[:, order]
        return new_initializer(model.graph, ir.tensor(whole, name=name))

    inputs: list[ir.Value | None] = [x, router]
    zero_points: list[ir.Value | None] = [None, None]
    both = (slice(0, -1), experts.order), (slice(-1, None), range(layers[-1][0].N))
    for index, (part, places) in enumerate(both):
        order = list(places)
        inputs += [stacked(part, order, "weight"), stacked(part, order, "scales")]
        inputs.append(bias(part, order))
        if not form.is_symmetric:
            zero_points[index] = stacked(part, order, "zero_points")
    inputs += [None, None, None, *zero_points, None, *shares]
    while inputs[-1] is None:
        inputs.pop()
    attributes = dict(experts.attributes)
    attributes |= {"expert_weight_bits": form.bits, "block_size": form.block_size}
    if accuracy_level:
        attributes["accuracy_level"] = accuracy_level
    name = names.take(f"{experts.name}.QMoE")
    node = ir.node("QMoE", inputs, attributes, domain="com.microsoft", name=name)
    maker = producer(output)
    assert isinstance(maker.graph, ir.Graph)
    maker.graph.insert_before(maker, node)
    made = node.outputs[0]
    made.name, made.shape = names.take(name), output.shape
    if output.dtype is not None:
        made.dtype = output.dtype
    if output.is_graph_output():
        made.name, output.name = output.name, made.name
    output.replace_all_uses_with(made, replace_graph_outputs=True)
    model.opset_imports.setdefault("com.microsoft", 1)


def _codes(weight: Weight) -> Array:
    """Return codes, unsigned, uint8 ``[N, K / pack]``."""
    flip = SIGN_BITS[weight.form.bits] if weight.form.is_symmetric else 0
    codes: Array = weight.codes.map().reshape(weight.N, -1) ^ np.uint8(flip)
    return codes


def _scales(weight: Weight) -> Array:
    """Return scales ``[N, blocks]`` of the type that activations have."""
    return weight.scales.map().astype(weight.uses[0].tensor.dtype.numpy())


def _zero_points(weight: Weight) -> Array:
    """Return zero points ``[N, blocks / pack]``."""
    assert weight.zero_points is not None
    return pack_rows(weight.zero_points.map(), weight.form.bits)


_TENSORS = {"weight": _codes, "scales": _scales, "zero_points": _zero_points}


def _in_file(
    rows: Callable[[int], Array], count: int, writer: ScratchWriter, name: str
) -> ir.ExternalTensor:
    """Write arrays of one shape behind each other; return the tensor [count, ...] of them."""
    first = rows(0)
    reference = writer.reserve((count, *first.shape), first.dtype)
    stored = reference.map("r+")
    for expert in range(count):
        stored[expert] = first if expert == 0 else rows(expert)
    dtype = ir.DataType.from_numpy(first.dtype)
    return in_file(reference, dtype, reference.shape, name)
