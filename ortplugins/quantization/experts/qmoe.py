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

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ortplugins.quantization.experts.unroll import Experts, UnrolledLayer
from ortplugins.quantization.tensor_reference import ScratchWriter
from ortplugins.quantization.weights.graph import in_file
from ortplugins.quantization.weights.weight import Weight
from rewrite_rules.graph.initializers import FreshNames, new_initializer
from rewrite_rules.graph.nodes import producer, remove_unused
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
        own = [weights[name] for name in each.products & weights.keys()]
        if reason := _refusal(each, own):
            notes.append(f"the experts of {each.name!r} are no QMoE: {reason}")
            continue
        _write(model, each, weights, accuracy_level, writer)
        written.update(own)
    if written:
        remove_unused(model)
    return written, notes


def _refusal(experts: Experts, weights: Collection[Weight]) -> str:
    """Say why weights don't fit into one operator; nothing if they do."""
    if len(weights) < len(experts.products):
        return "some of them stay in float"
    if len({weight.form for weight in weights}) > 1:
        return "they differ in bits or block_size"
    form = next(iter(weights)).form
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
    weights: Mapping[str, Weight],
    accuracy_level: int,
    writer: ScratchWriter,
) -> None:
    values = ir.convenience.create_value_mapping(model.graph, include_subgraphs=False)
    output, names = values[experts.output], FreshNames(model)
    last = weights[experts.last.products[0]]
    inputs: list[ir.Value | None] = [values[name] for name in experts.inputs[:2]]
    zero_points: list[ir.Value | None] = []
    both = (experts.first, experts.order), ((experts.last,), range(last.N))
    for index, (layers, order) in enumerate(both, 1):
        for kind, of in _TENSORS.items():
            if kind == "zero_points" and last.form.is_symmetric:
                continue
            rows = functools.partial(_rows, layers, list(order), weights, of)
            base = names.take(f"{experts.name}.fc{index}.{kind}")
            tensor = _stacked(rows, len(experts.last.products), writer, base)
            value = new_initializer(model.graph, tensor)
            (zero_points if kind == "zero_points" else inputs).append(value)
        inputs.append(None)
        if (bias := _bias(layers, list(order), weights)) is not None:
            base = names.take(f"{experts.name}.fc{index}.bias")
            inputs[-1] = new_initializer(model.graph, ir.tensor(bias, name=base))
    third: list[ir.Value | None] = [None] * 3
    inputs += [*third, *(zero_points or third[:2]), None]
    inputs += [values[name] for name in experts.inputs[2:]]
    while inputs[-1] is None:
        inputs.pop()
    attributes = dict(experts.attributes)
    attributes |= {"expert_weight_bits": last.form.bits, "block_size": last.form.block_size}
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


def _rows(
    layers: Sequence[UnrolledLayer],
    order: list[int],
    weights: Mapping[str, Weight],
    of: Callable[[Weight], Array],
    expert: int,
) -> Array:
    """Return an expert's part of a tensor: the rows of its layers, in an order."""
    rows: Array = np.concatenate([of(weights[layer.products[expert]]) for layer in layers])
    return rows[order]


def _bias(
    layers: Sequence[UnrolledLayer], order: list[int], weights: Mapping[str, Weight]
) -> Array | None:
    """Return what is added to the rows, ``[E, N]``; None where nothing is."""
    if not any(layer.bias for layer in layers):
        return None
    parts = []
    for layer in layers:
        first = weights[layer.products[0]]
        none = np.zeros((len(layer.products), first.N), first.uses[0].tensor.dtype.numpy())
        parts.append(none if layer.bias is None else layer.bias.numpy())
    rows: Array = np.concatenate(parts, axis=1)[:, order]
    return rows


def _stacked(
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
