# SPDX-License-Identifier: MIT
"""Model-local functions, before they are inlined."""

from __future__ import annotations

import onnx_ir as ir

# Nodes that a model may have once its functions are inlined.
_MOST_INLINED = 200_000


def check_inlined_size(model: ir.Model) -> None:
    """Refuse functions that would fill memory once they are inlined.

    Raises:
        ValueError: With the function's name.
    """
    sizes: dict[ir.OperatorIdentifier, int] = {}

    def size(
        identifier: ir.OperatorIdentifier, callers: tuple[ir.OperatorIdentifier, ...]
    ) -> int:
        if identifier in callers:
            raise ValueError(f"calls are a cycle: function {identifier[1]!r} calls itself")
        if identifier not in sizes:
            nodes = list(model.functions[identifier].graph.all_nodes())
            sizes[identifier] = len(nodes) + sum(
                size(node.op_identifier(), (*callers, identifier))
                for node in nodes
                if node.op_identifier() in model.functions
            )
        if sizes[identifier] > _MOST_INLINED:
            raise ValueError(
                f"function {identifier[1]!r} is {sizes[identifier]} nodes once the functions "
                f"that it calls are inlined: {_MOST_INLINED} at most are"
            )
        return sizes[identifier]

    total = sum(
        size(node.op_identifier(), ())
        for node in model.graph.all_nodes()
        if node.op_identifier() in model.functions
    )
    if total > _MOST_INLINED:
        raise ValueError(f"its calls of functions are {total} nodes once they are inlined")
