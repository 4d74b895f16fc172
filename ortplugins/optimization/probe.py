# SPDX-License-Identifier: MIT
"""Writes the tiny model that :mod:`ortplugins.runtime.hidden_options` opens."""

from __future__ import annotations

__all__ = ["write_probe"]

from pathlib import Path
from typing import Any

import onnx_ir as ir

from ortplugins.runtime.hidden_options import PROBE


def write_probe(model: ir.Model, folder: Path) -> dict[str, Any]:
    """Write the tiny model of a source model; return what the manifest has to keep.

    Args:
        model: The model as the user gave it.
        folder: Gets ``probe.onnx``.
    """
    shaped = [value for value in model.graph.inputs if value.shape is not None]
    inputs = [
        ir.Value(name=f"i{i}", shape=value.shape, type=ir.TensorType(ir.DataType.FLOAT))
        for i, value in enumerate(shaped)
    ] or [ir.val("i0", ir.DataType.FLOAT, [1])]
    nodes = [ir.node("Identity", [value]) for value in inputs]
    for i, node in enumerate(nodes):
        node.outputs[0].name = f"o{i}"
        node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    outputs = [node.outputs[0] for node in nodes]
    graph = ir.Graph(inputs, outputs, nodes=nodes, opset_imports={"": 13}, name="probe")
    ir.save(ir.Model(graph, ir_version=8), folder / PROBE)
    names = [name for graph in model.graphs() for name in graph.initializers]
    return {"initializers": sorted(set(names))}
