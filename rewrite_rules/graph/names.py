# SPDX-License-Identifier: MIT
"""Names that nothing in a model has yet, for new values and nodes."""

from __future__ import annotations

import onnx_ir as ir


class FreshNames:
    """Hands out names that no value or node of the model or its subgraphs has."""

    def __init__(self, model: ir.Model) -> None:
        self._taken: set[str] = set()
        self._attempts: dict[str, int] = {}
        for graph in model.graphs():
            self._taken.update(value.name or "" for value in graph.inputs)
            self._taken.update(graph.initializers)
            for node in graph:
                self._taken.add(node.name or "")
                self._taken.update(value.name or "" for value in node.outputs)

    def take(self, name: str) -> str:
        """Return a name, or it with a number behind, and count it as taken."""
        fresh, attempt = name, self._attempts.get(name, 0)
        while fresh in self._taken:
            attempt += 1
            fresh = f"{name}_{attempt}"
        self._attempts[name] = attempt
        self._taken.add(fresh)
        return fresh


def name_apart(model: ir.Model) -> None:
    """Rename values that nodes make under a name that another value has."""
    names, seen, graphs = FreshNames(model), set[str](), list(model.graphs())
    for graph in graphs:
        seen.update(value.name or "" for value in (*graph.inputs, *graph.outputs))
        seen.update(graph.initializers)
    made = (value for graph in graphs for node in graph for value in node.outputs)
    for value in made:
        if value.name in seen and value.name and not value.is_graph_output():
            value.name = names.take(value.name)
        seen.add(value.name or "")
