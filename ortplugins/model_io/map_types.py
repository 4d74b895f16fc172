# SPDX-License-Identifier: MIT
"""Types of maps, which onnx_ir has no form for: kept aside, and written back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import onnx_ir as ir

if TYPE_CHECKING:
    import onnx

# Where a graph keeps the types, by the names of its inputs and outputs.
_TYPES = "ortplugins.types"


def set_types_aside(
    proto: onnx.ModelProto, graphs: Iterable[onnx.GraphProto | onnx.FunctionProto]
) -> dict[str, onnx.TypeProto]:
    """Take map types out of all graphs; return those of the model's inputs and outputs."""
    types = {}
    for value in (*proto.graph.input, *proto.graph.output):
        if _holds_map(value.type):
            types[value.name] = type(value.type)()
            types[value.name].CopyFrom(value.type)
    for graph in graphs:
        ends = [*graph.input, *graph.output] if hasattr(graph, "initializer") else []
        for value in (*ends, *graph.value_info):
            if _holds_map(value.type):
                value.ClearField("type")
    return types


def keep_types(model: ir.Model, types: dict[str, onnx.TypeProto]) -> None:
    """Have :func:`to_proto` write types that onnx_ir does not hold."""
    if types:
        model.graph.meta[_TYPES] = types


def has_kept_types(model: ir.Model) -> bool:
    """Whether an input or output of the model is of such a type."""
    return _TYPES in model.graph.meta


def to_proto(model: ir.Model) -> onnx.ModelProto:
    """Return the model as a protobuf, with the types that onnx_ir does not hold."""
    proto = ir.to_proto(model)
    types = model.graph.meta.get(_TYPES, {})
    for value in (*proto.graph.input, *proto.graph.output):
        if value.name in types:
            value.type.CopyFrom(types[value.name])
    return proto


def _holds_map(kind: onnx.TypeProto) -> bool:
    if kind.HasField("sequence_type"):
        return _holds_map(kind.sequence_type.elem_type)
    if kind.HasField("optional_type"):
        return _holds_map(kind.optional_type.elem_type)
    return bool(kind.HasField("map_type"))
