# SPDX-License-Identifier: MIT
"""New initializers derived from others: made once, named once, kept beside their source.

Two rewrites that give an initializer the same name silently make an invalid model in
onnxscript's engine (onnxscript issue #2945), and an initializer made inside an If subgraph is
unknown outside it. Every rule therefore makes its initializers here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import onnx_ir as ir

from rewrite_rules.graph.names import FreshNames
from rewrite_rules.graph.nodes import owner


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
    value = ir.Value(
        name=tensor.name,
        shape=ir.Shape(tensor.shape.numpy()),
        type=ir.TensorType(tensor.dtype),
        const_value=tensor,
    )
    graph.register_initializer(value)
    return value
