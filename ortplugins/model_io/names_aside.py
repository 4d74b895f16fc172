# SPDX-License-Identifier: MIT
"""Renames values as long as onnxruntime's quantiser works, which asks for no names in use.

    x, x_scale    ->    x, x_scale_1    ->    x, x_scale (of x), x_scale_1    ->    names back

It calls the scale of ``x`` ``x_scale``; a Mul by a tensor of that name would read it.
"""

from __future__ import annotations

import re

import onnx_ir as ir

from rewrite_rules.graph.initializers import FreshNames, name_apart

# What it puts behind the name of a tensor, and its calibration; numbers make copies of a bias.
_BEHIND = re.compile(
    r"\d*(_scale|_zero_point|_quantized|_ReduceM(in|ax)|_Reshape"
    r"|_(Q|Deq)uantizeLinear(_Input|_Output)?)*"
)


def set_aside(model: ir.Model) -> dict[str, str]:
    """Rename what has such a name in the main graph; return the new names by the old ones.

    Nodes, which must have names, as well as values.
    """
    values, names = _values(model.graph), FreshNames(model)
    aside = {
        name: names.take(name)
        for name in dict.fromkeys([*values, *(node.name or "" for node in model.graph)])
        if any(
            name[:end] in values
            and _may_be_given(values.get(name), values[name[:end]], name[end:])
            for end in range(1, len(name))
        )
    }
    for name in aside.keys() & values.keys():
        values[name].name = aside[name]
    _rename_nodes(model.graph, aside)
    return aside


def put_back(model: ir.Model, aside: dict[str, str]) -> None:
    """Give all their names again; what has got one of these meanwhile gets another."""
    values, names = _values(model.graph), FreshNames(model)
    for name, fresh in aside.items():
        if fresh in values:
            if name in values:
                values[name].name = names.take(name)
            values[fresh].name = name
    _rename_nodes(model.graph, {fresh: name for name, fresh in aside.items()})
    name_apart(model)


def _may_be_given(value: ir.Value | None, stem: ir.Value, behind: str) -> bool:
    """Whether a name, ``behind`` that of another value, may be given once more."""
    if behind.isdigit():  # its copies of a bias count on from initializers
        return stem.is_initializer() and not (value and value.is_initializer())
    return _BEHIND.fullmatch(behind) is not None


def _rename_nodes(graph: ir.Graph, names: dict[str, str]) -> None:
    for node in graph:
        node.name = names.get(node.name or "", node.name)


def _values(graph: ir.Graph) -> dict[str, ir.Value]:
    made = (value for node in graph for value in node.outputs)
    found = (*graph.inputs, *graph.initializers.values(), *made)
    return {value.name or "": value for value in found}
