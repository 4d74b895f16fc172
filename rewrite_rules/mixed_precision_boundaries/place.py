# SPDX-License-Identifier: MIT
"""Regions of another precision in a QDQ graph: exact conversions where they begin and end.

    entry   P -> Q8 -+-> DQ8 -> others               all consumers convert:
                     +-> DQ8' -> Q16 -> DQ16 -> C    P -> Q8 -> DQ8 -> Q16 -> DQ16 -> C
    inside  P -> Q8 -> DQ8 -> C                  ->  P -> Q16 -> DQ16 -> C
    exit    P -> Q16 -+-> DQ16 -> C in the region
                      +-> DQ16' -> Q8 -> DQ8 -> others

In three steps: a plan of types, finished before anything is written, so that a
region that is refused leaves no trace; Q and DQ at each change of type, by
:mod:`.boundary_rules`; :mod:`.fold_rules`.
The 16-bit grid at an entry holds every value of the 8-bit one
(:meth:`.QuantizationGrid.refine`). Outputs keep their names, codes that a caller feeds or
reads their type. In mode "float", a region's tensors are not quantised.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

import onnx_ir as ir

from rewrite_rules.closest_name import did_you_mean
from rewrite_rules.graph.int8_moves import OPSET as INT8_OPSET
from rewrite_rules.graph.int8_moves import move_int8_codes
from rewrite_rules.graph.nodes import (
    is_dequantize_linear,
    is_quantize_linear,
    label,
)
from rewrite_rules.mixed_precision_boundaries.boundary_nodes import Boundaries
from rewrite_rules.mixed_precision_boundaries.boundary_rules import write_boundaries
from rewrite_rules.mixed_precision_boundaries.quantized_graph import (
    QuantizedGraph,
    QuantizedTensor,
)
from rewrite_rules.mixed_precision_boundaries.region_constants import change_constants
from rewrite_rules.mixed_precision_boundaries.regions import (
    SHARING_OPERATORS,
    Overridden,
    Region,
    TensorPlan,
    find_regions,
    sharing_groups,
    type_name,
)
from rewrite_rules.mixed_precision_boundaries.tensor_overrides import (
    OverrideError,
    Overrides,
    TensorOverride,
)
from rewrite_rules.remarks import PassContext, Refusal, Remarks

# From here on, Clip takes its ends as inputs.
_OPSET_OF_CLIP = 11


def place_boundaries(
    model: ir.Model,
    context: PassContext,
    *,
    promote: Collection[str] = (),
    overrides: Overrides | None = None,
    in_float: bool = False,
) -> None:
    """Rewrite the regions of a QDQ model that are to be of another precision.

    ``promote`` are tensors or nodes that are to have 16 bits, signed where all activations of
    the model are; a name of both means the tensor. ``overrides`` are types of single tensors.
    ``in_float``: where 16 bits are asked for, nothing is quantised.

    A region that the graph does not allow gets a remark. What is not in the model, or
    contradicts itself, is an :class:`OverrideError`, and the model is as it was.
    """
    if not overrides and not promote:
        return
    graph = QuantizedGraph(model)
    overridden = _checked_overrides(graph, overrides or {}, in_float, context)
    named = _checked_promotions(graph, promote, context)
    groups = sharing_groups(graph)
    promoted = ir.DataType.FLOAT if in_float else _wide_type(graph)
    regions = find_regions(graph, overridden, named, promoted, groups)
    # All is read before anything is written.
    ready = []
    for region in regions:
        try:
            _complete(graph, region)
        except Refusal as refusal:
            for seed in region.seeds:
                context.remarks.refused(seed, refusal)
        else:
            ready.append(region)
    boundaries = Boundaries(model)
    for region in ready:
        _add(boundaries, region, context.remarks)
    write_boundaries(boundaries)
    if in_float and ready and graph.opset >= INT8_OPSET:
        move_int8_codes(model)


def _complete(graph: QuantizedGraph, region: Region) -> None:
    """Choose the constants of a region; refused where the graph forbids it."""
    if region.refusal is not None:
        raise region.refusal
    for plan in region.plans.values():
        plan.clipped = _may_clip(graph, plan.tensor)
        _check_plan(graph, plan)
    change_constants(region, graph)


def _add(boundaries: Boundaries, region: Region, remarks: Remarks) -> None:
    """Have a region written, and say what changes."""
    for node, refusal in region.biases_that_stay.items():
        remarks.refused(label(node), refusal)
    changed = []
    for plan in region.plans.values():
        for reason in (reasons := [*_changes(plan)]):
            remarks.fired(plan.tensor.name, reason)
        changed += [plan] if reasons else []
    boundaries.add(changed, region.constants)
    for seed in () if changed else region.seeds:
        remarks.note(
            seed,
            "nothing to change: it is of that type, all that reads it keeps its own, "
            "or it reads and writes no quantised activation",
        )


def _check_plan(graph: QuantizedGraph, plan: TensorPlan) -> None:
    tensor, own = plan.tensor, plan.tensor.grid.dtype
    for dtype in sorted(plan.types() - {ir.DataType.FLOAT}):
        try:
            plan.grid(dtype)
        except Refusal as refusal:
            raise Refusal(refusal.code, f"tensor {tensor.name!r}: {refusal}") from None
    if plan.produced == ir.DataType.FLOAT and plan.types() - {own, ir.DataType.FLOAT}:
        raise Refusal(
            "ORP305", f"tensor {tensor.name!r} would be float and of another type at once"
        )
    if plan.produced == ir.DataType.FLOAT and plan.clipped and graph.opset < _OPSET_OF_CLIP:
        raise Refusal(
            "ORP313",
            f"tensor {tensor.name!r} needs a Clip of opset {_OPSET_OF_CLIP}, and the model is "
            f"of opset {graph.opset}; convert the model",
        )


# What operators compute, whatever they read.
_RANGES = {"HardSigmoid": (0, 1), "Sigmoid": (0, 1), "Softmax": (0, 1), "Tanh": (-1, 1)}
# Data movement that writes other values than those it reads.
_WRITES_OTHERS = frozenset({"Pad", "ReduceMax", "ReduceMin", "Resize"})


def _may_clip(graph: QuantizedGraph, tensor: QuantizedTensor) -> bool:
    """Whether Q may clip: quantisers remove the Relu or Clip that the range stands for."""
    producer = tensor.producer
    if producer is None or producer.domain:
        return True
    if producer.op_type in SHARING_OPERATORS - _WRITES_OTHERS:
        return all(
            other.grid != tensor.grid or producer.inputs[0] not in other.values()
            for other in graph.read_by(producer)
        )
    low, high = map(float, tensor.grid.range)
    least, greatest = _RANGES.get(producer.op_type, (-math.inf, math.inf))
    return least < low or high < greatest


def _checked_overrides(
    graph: QuantizedGraph, overrides: Overrides, in_float: bool, context: PassContext
) -> Overridden:
    """The overrides of activations; tensors that stay for a reason get a remark."""
    found: dict[QuantizedTensor, tuple[str, TensorOverride]] = {}
    for name, override in overrides.items():
        if name in graph.stay and name not in graph.by_name:
            context.remarks.refused(name, graph.stay[name])
            continue
        _check_override(name, override, graph)
        wanted = _as_float(override) if in_float else override
        for tensor in graph.by_name[name]:
            other, before = found.setdefault(tensor, (name, wanted))
            if wanted != before:
                raise OverrideError(
                    f"overrides of {other!r} and {name!r} contradict each other: both are "
                    f"names of tensor {tensor.name!r}; keep one"
                )
    return found


def _check_override(name: str, override: TensorOverride, graph: QuantizedGraph) -> None:
    """Raise an OverrideError for a name that the model has not, or no other type."""
    where, tensors = f"override of tensor {name!r}", graph.by_name.get(name, ())
    if not tensors:
        hint = did_you_mean(name, [*graph.by_name])
        raise OverrideError(
            f"{where}: no activation of that name is quantised in the model{hint}"
        )
    own = {override.quant_type or tensor.grid.dtype for tensor in tensors}
    if override.convert is not None and override.convert in own:
        raise OverrideError(
            f"{where}: 'convert' is to {type_name(override.convert)}, which is the tensor's "
            "own type; give another, or leave it out"
        )
    consumers = (node for tensor in tensors for node in tensor.consumers())
    readers = {label(node) for node in consumers if not is_quantize_linear(node)}
    for node in sorted((override.recv_nodes or frozenset()) - readers):
        hint = "" if node in graph.by_label else did_you_mean(node, [*graph.by_label])
        listed = ", ".join(map(repr, sorted(readers))) or "no node"
        raise OverrideError(
            f"{where}: 'recv_nodes': no node {node!r} reads it{hint}; {listed} does"
        )


def _checked_promotions(
    graph: QuantizedGraph, promote: Collection[str], context: PassContext
) -> list[str]:
    found = []
    for name in sorted(promote):
        nodes = graph.by_label.get(name, ())
        pairs = (is_quantize_linear(node) or is_dequantize_linear(node) for node in nodes)
        if name in graph.by_name or not all(pairs):
            found.append(name)
        elif nodes:
            text = f"it is a {nodes[0].op_type}: name its tensor, or the nodes around it"
            context.remarks.refused(name, Refusal("ORP306", text))
        elif name in graph.stay:
            context.remarks.refused(name, graph.stay[name])
        else:
            hint = did_you_mean(name, [*graph.by_name, *graph.by_label])
            raise OverrideError(
                f"the model has no quantised tensor and no node {name!r} to promote{hint}"
            )
    return found


def _wide_type(graph: QuantizedGraph) -> ir.DataType:
    types = {tensor.grid.dtype for tensor in graph.tensors}
    signed = types <= {ir.DataType.INT8, ir.DataType.INT16}
    return ir.DataType.INT16 if signed else ir.DataType.UINT16


def _as_float(override: TensorOverride) -> TensorOverride:
    """An override whose 16-bit types are float."""
    quant_type, convert = (
        ir.DataType.FLOAT if dtype is not None and dtype.bitwidth == 16 else dtype
        for dtype in (override.quant_type, override.convert)
    )
    return TensorOverride(quant_type, convert, override.recv_nodes)


def _changes(plan: TensorPlan) -> Iterator[str]:
    """What happens to a tensor, in words; nothing where it stays as it is."""
    tensor, own = plan.tensor, plan.tensor.grid.dtype
    produced = type_name(plan.produced)
    if plan.produced == ir.DataType.FLOAT:
        read = set(plan.reads.values()) | ({plan.output} if tensor.is_output else set())
        if plan.produced not in read:
            return  # all that read it read what is there
    if plan.produced != own:
        yield f"{type_name(own)} -> {produced}"
    others: dict[ir.DataType, list[str]] = {}
    for node, dtype in plan.reads.items():
        # What is dequantised is float already.
        if dtype not in (plan.produced, ir.DataType.FLOAT):
            others.setdefault(dtype, []).append(repr(label(node)))
    if tensor.is_output and plan.output not in (plan.produced, ir.DataType.FLOAT):
        others.setdefault(plan.output, []).append("the output")
    for dtype, nodes in others.items():
        yield f"{produced} -> {type_name(dtype)} for {', '.join(nodes)}"
