# SPDX-License-Identifier: MIT
"""Model-local functions, before they are inlined."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

# Nodes that a model's functions may be once they are inlined.
_MAX_INLINED = 200_000


def check_inlined_size(model: ir.Model) -> None:
    """Refuse functions that would fill memory once they are inlined, by a ValueError."""
    sizes: dict[ir.OperatorIdentifier, int] = {}

    def size(nodes: Iterable[ir.Node], callers: tuple[ir.OperatorIdentifier, ...] = ()) -> int:
        total = 0
        for node in nodes:
            called = node.op_identifier()
            if called not in model.functions:
                total += 1
                continue
            if called in callers:
                raise ValueError(f"calls are a cycle: function {called[1]!r} calls itself")
            if called not in sizes:
                inner = model.functions[called].graph.all_nodes()
                sizes[called] = size(inner, (*callers, called))
            total += sizes[called]
        if total > _MAX_INLINED:
            what = f"function {callers[-1][1]!r}" if callers else "the graph's calls"
            raise ValueError(
                f"{what} would be {total} nodes once functions are inlined: {_MAX_INLINED} at "
                "most are"
            )
        return total

    size(node for node in model.graph.all_nodes() if node.op_identifier() in model.functions)
