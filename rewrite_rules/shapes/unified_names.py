# SPDX-License-Identifier: MIT
"""Calls equal dimensions alike in the annotations of a model."""

from __future__ import annotations

import onnx_ir as ir

from rewrite_rules.shapes.declared_names import DeclaredNames
from rewrite_rules.shapes.proved_shapes import ProvedShapes


def unify_dimension_names(model: ir.Model) -> None:
    """Name equal dimensions alike in the shapes of the main graph's values.

    Run after shape inference, on a sorted graph. Dimensions that no name is known for keep
    theirs.
    """
    names = DeclaredNames()
    facts = ProvedShapes(model, names)
    for node in model.graph:
        for value in node.outputs:
            shape = facts.shape(value)
            # The dimensions of an output are called as the user calls them.
            if value.shape is None or value.is_graph_output() or isinstance(shape, int):
                continue
            if len(shape) == len(value.shape):
                value.shape = ir.Shape(names.name(dim) for dim in shape)
