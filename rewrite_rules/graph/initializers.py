# SPDX-License-Identifier: MIT
"""Names that are free in a model; new initializers: made once, kept in their source's graph.

Two rewrites that give an initializer the same name silently make an invalid model in
onnxscript's engine (onnxscript issue #2945), and an initializer made inside an If subgraph is
unknown outside it. Every rule therefore makes its initializers here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable

import onnx_ir as ir

from rewrite_rules.graph.nodes import owner


class FreshNames:
    """Hands out names that no value or node of the model or its subgraphs has."""

    def __init__(self, model: ir.Model) -> None:
        self._model = model
        self._attempts: dict[str, int] = {}

    @functools.cached_property
    def _taken(self) -> set[str | None]:
        """The names in use, looked for when the first one is asked for."""
        taken = set[str | None]()
        for graph in self._model.graphs():
            taken.update(value.name for value in graph.inputs)
            taken.update(graph.initializers)
            for node in graph:
                taken.add(node.name)
                taken.update(value.name for value in node.outputs)
        return taken

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
    """Rename values and nodes that have the name of another: onnxruntime opens no such model.

    What replaces a node takes its name, and the node stays where something else reads it.
    """
    names, graphs = FreshNames(model), [*model.graphs()]
    kept = set(model.graph.outputs)
    seen = {value.name for value in kept}
    for graph in graphs:
        seen.update(value.name for value in graph.inputs)
        seen.update(graph.initializers)
    made = (value for graph in graphs for node in graph for value in node.outputs)
    for value in made:
        if value.name in seen and value.name and value not in kept:
            value.name = names.take(value.name)
        seen.add(value.name)
    for graph in graphs:
        named = set[str | None]()
        for node in graph:
            if node.name and node.name in named:
                node.name = names.take(node.name)
            named.add(node.name)


class DerivedInitializers:
    """The initializers that one run over one model derives from others."""

    def __init__(self, model: ir.Model) -> None:
        self._names = FreshNames(model)
        self._made: dict[tuple[ir.Value, str, Hashable], ir.Value] = {}

    def get(
        self,
        anchor: ir.Value,
        suffix: str,
        make_tensor: Callable[[str], ir.TensorProtocol],
        key: Hashable = (),
    ) -> ir.Value:
        """Return the initializer derived from ``anchor``, made at the first call.

        It is registered in the graph that owns ``anchor``, so that matches in several
        subgraphs share it, under ``<anchor><suffix>``, or that name with a number where the
        model has it already. ``key`` is what else the tensor depends on.
        """
        identity = (anchor, suffix, key)
        if identity not in self._made:
            graph = owner(anchor)
            if not isinstance(graph, ir.Graph) or anchor.name is None:
                raise ValueError(f"{anchor.name!r} is not a constant of a graph")
            tensor = make_tensor(self._names.take(f"{anchor.name}{suffix}"))
            self._made[identity] = new_initializer(graph, tensor)
        return self._made[identity]


def new_initializer(graph: ir.Graph, tensor: ir.TensorProtocol) -> ir.Value:
    """Register a tensor, under its name, which has to be free."""
    value = ir.val(tensor.name, const_value=tensor)
    graph.register_initializer(value)
    return value
