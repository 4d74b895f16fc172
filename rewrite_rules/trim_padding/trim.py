# SPDX-License-Identifier: MIT
"""Cuts the padding off the inputs of an encoder and gives it back to its outputs.

    cut = padded positions after the longest row of the mask
    inputs [batch, sequence] -> Slice up to the cut -> the model -> Pad by cut -> outputs

:mod:`.token_flow` proves that real positions keep their numbers, :mod:`.padding_nodes` asks of
each batch what that rests on.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from rewrite_rules.facts.input_roles import Kind, role_of, tables_below
from rewrite_rules.facts.operator_table import ATTENTIONS
from rewrite_rules.graph.initializers import FreshNames, name_apart
from rewrite_rules.graph.nodes import remove_unused, walk
from rewrite_rules.remarks import PassContext, Refusal
from rewrite_rules.trim_padding.operator_rules import RULES
from rewrite_rules.trim_padding.packing import pack_regions
from rewrite_rules.trim_padding.padding_nodes import PaddingNodes
from rewrite_rules.trim_padding.token_axes import BATCH, Sequence, sequences_of
from rewrite_rules.trim_padding.token_flow import Side, Stopped, TokenFlow, Tokens

_MODEL = "model"
_FUSED = (
    "attention is in branches of If, as TransformerFusion writes it: run TrimPadding first, "
    "or both passes at once"
)
_MIN_OPSET = 11  # Pad takes its sizes as an input
# What onnxruntime's Pad takes on the CPU.
_PADDED_TYPES = frozenset({
    ir.DataType.BOOL, ir.DataType.DOUBLE, ir.DataType.FLOAT, ir.DataType.FLOAT16,
    ir.DataType.INT8, ir.DataType.INT32, ir.DataType.INT64, ir.DataType.UINT8,
    ir.DataType.UINT32, ir.DataType.UINT64,
})  # fmt: skip


def trim_padding(
    model: ir.Model,
    context: PassContext,
    *,
    mask: str = "",
    pack: bool = False,
) -> None:
    """Trim in place; remarks say what was cut, or what stood in the way.

    ``mask`` names the input that is the mask; empty to find it. ``pack`` runs what works token
    by token on real tokens only.
    """
    names = FreshNames(model)
    try:
        flow = _find_mask(model, mask)
        axes = _sequence_axes(model, flow)
        inputs = [value for value in model.graph.inputs if value in axes]
        outputs = [value for value in model.graph.outputs if value in axes]
        sizes = {
            value: (_axis_of_rows(flow.tokens(value)), *axes[value])
            for value in inputs
            if value is not flow.mask
        }
        nodes = PaddingNodes(model, names, flow)
        nodes.count(sizes)
    except Refusal as refusal:
        if _is_fused(model):
            refusal = Refusal("ORP508", f"{refusal}; {_FUSED}")
        context.remarks.refused(_MODEL, refusal)
        return
    declared = [value.shape for value in model.graph.outputs]
    remove_unused(model)  # of which nothing is known
    _forget_lengths(model, flow)
    nodes.cut_sides()
    sides = [v for v in model.graph.outputs if isinstance(flow.value(v), Side)]
    for value in dict.fromkeys(v for v in sides if not flow.is_constant(v)):
        nodes.whole_output(value)
    # Packing puts other values in place of outputs.
    places = [axes.get(value) for value in model.graph.outputs]
    gained = f"padding after the longest row is cut off {_names(inputs)}"
    if outputs:
        gained += f" and given back to {_names(outputs)}"
    for value in outputs:
        if any(not one.zero for one in axes[value].values()):
            context.remarks.note(
                str(value.name), "positions after the longest row are 0 from now on"
            )
    if pack:
        gained += _pack(model, flow, names, nodes.holds, context)
    for value in inputs:
        nodes.cut_input(value, list(axes[value]))
    for value, at in zip(model.graph.outputs, places, strict=True):
        if at:
            nodes.pad_output(value, at)
    nodes.insert()
    for value, shape in zip(model.graph.outputs, declared, strict=True):
        value.shape = shape
    remove_unused(model)
    name_apart(model)
    context.remarks.fired(str(flow.mask.name), gained)


def _pack(
    model: ir.Model, flow: TokenFlow, names: FreshNames, holds: ir.Value, context: PassContext
) -> str:
    """Pack what can be; return what was gained, after a note where that is nothing."""
    why_not = f"{flow.unpackable}: not packed" if flow.unpackable else ""
    if not why_not:
        if packed := pack_regions(model, flow, names, holds):
            return f"; {packed} nodes run on real tokens only"
        why_not = "nothing works token by token for long enough to pack it"
    context.remarks.note(_MODEL, why_not)
    return ""


def _is_fused(model: ir.Model) -> bool:
    nodes = (node for node in walk(model.graph) if node.graph is not model.graph)
    return any((node.domain, node.op_type) in ATTENTIONS for node in nodes)


def _axis_of_rows(known: Tokens) -> int | None:
    axes = known.axes or ()
    return axes.index((BATCH,)) if (BATCH,) in axes else None


def _names(values: Iterable[ir.Value]) -> str:
    return ", ".join(repr(value.name) for value in values)


# Which input is the mask


def _find_mask(model: ir.Model, name: str) -> TokenFlow:
    if model.opset_imports.get("", 0) < _MIN_OPSET:
        raise Refusal(
            "ORP502",
            f"opset {model.opset_imports.get('', 0)} is too old: convert the model to opset "
            f"{_MIN_OPSET} or newer",
        )
    proofs: list[TokenFlow] = []
    stopped: list[Stopped] = []
    for mask in _candidates(model, name):
        for asks_finite in (False, True):
            try:
                flow = TokenFlow(model, mask, RULES, asks_finite)
                if not name and not flow.is_mask():
                    raise Stopped(
                        "ORP501",
                        f"{mask.name!r} is only multiplied and added up, as any matrix: name "
                        "it with trim_padding.mask if it is 0 at padding",
                        0,
                    )
                proofs.append(flow)
                break
            except Stopped as refusal:
                stopped.append(refusal.with_traceback(None))  # which holds the proof
    if len(proofs) > 1:
        raise Refusal(
            "ORP501",
            f"{_names(flow.mask for flow in proofs)} may each be the mask: name it with "
            "trim_padding.mask",
        )
    if not proofs:
        raise max(stopped, key=lambda refusal: refusal.nodes_before)
    return proofs[0]


def _candidates(model: ir.Model, name: str) -> list[ir.Value]:
    inputs = [
        value for value in model.graph.inputs if value.name not in model.graph.initializers
    ]
    if name:
        found = [value for value in inputs if value.name == name]
        if not found:
            raise Refusal(
                "ORP501", f"no input {name!r} to take the mask from: {_names(inputs)}"
            )
        if not _may_be_mask(found[0]):
            raise Refusal("ORP501", f"{name!r} {_is_no_mask(found[0])}")
        return found
    candidates = [v for v in inputs if _may_be_mask(v) and not any(tables_below(v))]
    if not candidates:
        for value in inputs:
            if role_of(value).kind in (Kind.MASK, Kind.BIAS):
                raise Refusal("ORP501", f"{value.name!r} {_is_no_mask(value)}")
        raise Refusal(
            "ORP501",
            "no input says which positions are padding: export the model with its attention "
            "mask, of shape [batch, sequence], as an input",
        )
    return candidates


def _is_no_mask(value: ir.Value) -> str:
    kind = "no type" if value.dtype is None else f"type {value.dtype.name.lower()}"
    return f"is not a mask of [batch, sequence]: it has {kind}, shape {value.shape}"


def _may_be_mask(value: ir.Value) -> bool:
    is_tensor = isinstance(value.type, ir.TensorType) and value.dtype in _PADDED_TYPES
    return is_tensor and value.shape is not None and len(value.shape) == 2


# Where it has the sequence


def _sequence_axes(model: ir.Model, flow: TokenFlow) -> dict[ir.Value, dict[int, Sequence]]:
    """Where inputs and outputs have the sequence, and what stands there at padding."""
    result = dict[ir.Value, dict[int, Sequence]]()
    for value in (*model.graph.inputs, *model.graph.outputs):
        if not value.is_graph_input() and isinstance(flow.value(value), Side):
            continue  # computed from whole inputs
        axes = flow.tokens(value).axes or ()
        found = {i: one for i, axis in enumerate(axes) for one in sequences_of(axis)}
        if not found:
            continue
        if any(len(axes[i]) > 1 for i in found):
            raise Refusal("ORP506", f"{value.name!r} joins the sequence with another axis")
        if value.dtype not in _PADDED_TYPES:
            kind = "no type" if value.dtype is None else f"type {value.dtype.name.lower()}"
            raise Refusal("ORP506", f"{value.name!r} is of {kind}, which Pad does not take")
        if value.is_graph_input() and value in model.graph.outputs:
            raise Refusal("ORP506", f"{value.name!r} is an input and an output")
        for behind in () if value.is_graph_input() else found.values():
            if not behind.zero and behind.set_by_mask:
                raise Refusal(
                    "ORP506",
                    f"{value.name!r} is set after the longest row by the model itself",
                )
        result[value] = found
    return result


def _forget_lengths(model: ir.Model, flow: TokenFlow) -> None:
    """Drop the sizes of values inside that depend on the length.

    Where onnxruntime knows that two values are equally large it lets them share a buffer,
    which makes attention's products 1.4 times as slow, and fuses SkipLayerNormalization. Sizes
    that contradict the proof go as well: beside new ones onnxruntime would believe them.
    """
    roles = flow.roles
    (length,) = (roles.dims(flow.mask) or ())[1][1]
    for value in [value for node in model.graph for value in node.outputs if value.shape]:
        dims = roles.dims(value)
        if dims is None or value.shape is None:
            continue
        if len(dims) != len(value.shape):  # declared with another rank
            value.shape = None
            continue
        pairs = zip(dims, value.shape, strict=True)
        value.shape = ir.Shape(
            [
                None
                if length in dim[1] or (isinstance(old, int) and dim != (old, ()))
                else old
                for dim, old in pairs
            ]
        )
