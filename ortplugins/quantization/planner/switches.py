# SPDX-License-Identifier: MIT
"""Puts a switch at every quantised activation: through its grid, or past it.

    x -> Q -> DQ -> consumers        x -> If(switch) { Q -> DQ } else { Clip } -> consumers

Past the grid a value is clipped to the grid's range and not rounded: what a grid of infinitely
many codes would do. Plain ``x`` would be another function, as onnxruntime's quantiser drops a
Relu or Clip whose range the grid has. An If runs one branch only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from rewrite_rules.graph.constants import constant
from rewrite_rules.graph.initializers import new_initializer
from rewrite_rules.graph.names import FreshNames
from rewrite_rules.mixed_precision_boundaries.quantized_graph import QuantizedTensor


def add_switches(model: ir.Model, places: Sequence[QuantizedTensor]) -> list[str]:
    """Add a bool input for each activation, in their order; return the inputs' names.

    Args:
        model: Changed in place.
        places: Activations of its main graph, each with a Q and at least one DQ.
    """
    names = FreshNames(model)
    switches = []
    for number, place in enumerate(places):
        assert place.quantize is not None and place.source is not None
        first = place.dequantizes[0]
        quantize = _copy(place.quantize, [place.source, *place.quantize.inputs[1:]], names)
        dequantize = _copy(first, [quantize.outputs[0], *first.inputs[1:]], names)
        clips = _clip(model.graph, place, names)
        switch = _new_switch(model, names.take(f"ortplugins.grid_{number}"))
        # A body whose output has no type is refused; the grid's scale tells it.
        dtype = ir.DataType.from_numpy(place.grid.float_dtype)
        node = _choice(switch, [quantize, dequantize], clips, dtype, names)
        model.graph.insert_before(first, node)
        for old in place.dequantizes:
            _redirect(model.graph, old.outputs[0], node.outputs[0], names)
        switches.append(switch.name or "")
    return switches


def add_weight_switch(
    model: ir.Model, coarse: ir.Node, fine: ir.Node, names: FreshNames
) -> str:
    """Let a bool input choose between two dequantised forms of a weight; return its name.

    Args:
        model: Changed in place.
        coarse: A DequantizeLinear of constants of its main graph, for when it is on.
        fine: One in another model, for when it is off; its constants are shared.
        names: Of the model.
    """
    stem = coarse.outputs[0].name
    inputs = []
    for value in fine.inputs:
        tensor = constant(value)
        assert tensor is not None
        own = ir.Value(
            name=names.take(f"{tensor.name}_fine"),
            shape=ir.Shape(tensor.shape.numpy()),
            type=ir.TensorType(tensor.dtype),
            const_value=tensor,
        )
        model.graph.register_initializer(own)
        inputs.append(own)
    switch = _new_switch(model, names.take(f"ortplugins.bits_{stem}"))
    scale = constant(coarse.inputs[1])
    assert scale is not None
    node = _choice(
        switch,
        [_copy(coarse, coarse.inputs, names)],
        [_copy(fine, inputs, names)],
        scale.dtype,
        names,
    )
    model.graph.insert_before(coarse, node)
    _redirect(model.graph, coarse.outputs[0], node.outputs[0], names)
    return switch.name or ""


def _new_switch(model: ir.Model, name: str) -> ir.Value:
    switch = ir.Value(name=name, shape=ir.Shape([]), type=ir.TensorType(ir.DataType.BOOL))
    model.graph.inputs.append(switch)
    return switch


def _choice(
    switch: ir.Value,
    then: Sequence[ir.Node],
    otherwise: Sequence[ir.Node],
    dtype: ir.DataType,
    names: FreshNames,
) -> ir.Node:
    """Make an If of two chains of nodes, each with one output."""
    branches = {}
    for name, nodes in (("then_branch", then), ("else_branch", otherwise)):
        nodes[-1].outputs[0].type = ir.TensorType(dtype)
        branches[name] = ir.Graph([], [nodes[-1].outputs[0]], nodes=nodes, name=name)
    node = ir.node("If", [switch], branches, name=names.take(f"{switch.name}_if"))
    node.outputs[0].name = names.take(f"{switch.name}_value")
    node.outputs[0].type = ir.TensorType(dtype)
    return node


def _redirect(graph: ir.Graph, old: ir.Value, new: ir.Value, names: FreshNames) -> None:
    """Let everybody read another value; an output of the graph keeps its name."""
    for index, item in enumerate(graph.outputs):
        if item is old:
            keep = ir.node("Identity", [new], name=names.take(f"{new.name}_output"))
            keep.outputs[0].type, keep.outputs[0].shape = old.type, old.shape
            keep.outputs[0].name, old.name = old.name, names.take(f"{old.name}_old")
            graph.append(keep)
            graph.outputs[index] = keep.outputs[0]
    old.replace_all_uses_with(new)


def _copy(node: ir.Node, inputs: Sequence[ir.Value | None], names: FreshNames) -> ir.Node:
    copy = ir.node(
        node.op_type,
        inputs,
        dict(node.attributes),
        domain=node.domain,
        name=names.take(f"{node.name or node.op_type}_switched"),
    )
    copy.outputs[0].name = names.take(f"{node.outputs[0].name}_switched")
    return copy


def _clip(graph: ir.Graph, place: QuantizedTensor, names: FreshNames) -> list[ir.Node]:
    """Clip the source to the grid's range: Clip has no constants as inputs before opset 11."""
    assert place.source is not None
    low, high = (
        new_initializer(
            graph,
            ir.tensor(np.asarray(end), name=names.take(f"{place.source.name}_{which}")),
        )
        for end, which in zip(place.grid.range, ("least", "greatest"), strict=True)
    )
    above = ir.node("Max", [place.source, low])
    clips = [above, ir.node("Min", [above.outputs[0], high])]
    for node in clips:
        node.name = names.take(f"{place.source.name}_clip")
        node.outputs[0].name = names.take(f"{place.source.name}_clipped")
    return clips
