# SPDX-License-Identifier: MIT
"""What messages call a node, the subgraphs within it, and one name for the default domain."""

from __future__ import annotations

__all__ = ["bodies", "label", "normalize_domains"]

from collections.abc import Iterator

import onnx_ir as ir


def label(node: ir.Node) -> str:
    """How messages call a node: its name, else its first output's, else its operator."""
    names = (output.name for output in node.outputs)
    return node.name or next((name for name in names if name), None) or node.op_type


def bodies(node: ir.Node) -> Iterator[ir.Graph]:
    """The bodies of an If, Loop or Scan, none for other nodes."""
    for attribute in node.attributes.values():
        if attribute.is_ref():
            continue
        if attribute.type is ir.AttributeType.GRAPH:
            yield attribute.as_graph()
        elif attribute.type is ir.AttributeType.GRAPHS:
            yield from attribute.as_graphs()


def normalize_domains(model: ir.Model) -> None:
    """Import the default domain as ``""``, where a model calls it ``"ai.onnx"``.

    onnx_ir does it for the domains of nodes. Rules look opsets up under one name.
    """
    holders: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    holders += [body for node in model.graph.all_nodes() for body in bodies(node)]
    for holder in holders:
        version = holder.opset_imports.pop("ai.onnx", None)
        if version is not None:
            holder.opset_imports.setdefault("", version)
