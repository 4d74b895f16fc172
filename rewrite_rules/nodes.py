# SPDX-License-Identifier: MIT
"""What messages call a node, and the graphs within it."""

from __future__ import annotations

__all__ = ["bodies", "label"]

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
