# SPDX-License-Identifier: MIT
"""New initializers derived from others: made once, named once, kept beside their source.

Two rewrites that give an initializer the same name silently make an invalid model in
onnxscript's engine (onnxscript issue #2945), and an initializer made inside an If body is
unknown outside it. Every rule therefore makes its initializers here.
"""

from __future__ import annotations

__all__ = ["derived_initializer"]

from collections.abc import Callable

import onnx_ir as ir

_SOURCE = "ortplugins.derived_from"


def derived_initializer(
    anchor: ir.Value, suffix: str, make_tensor: Callable[[str], ir.TensorProtocol]
) -> ir.Value:
    """Return the initializer derived from ``anchor``, made at the first call.

    It is registered in the graph that owns ``anchor``, so that matches in several bodies share
    it, under ``<anchor><suffix>``, or that name with a number where the model has it already.

    Args:
        anchor: The initializer that the new one is computed from.
        suffix: What was done to it; together with ``anchor`` it identifies the result.
        make_tensor: Called with the name; returns the tensor, lazily if it is large.
    """
    graph = anchor.graph
    if graph is None or anchor.name is None:
        raise ValueError(f"{anchor.name!r} is not an initializer of a graph")
    base = name = f"{anchor.name}{suffix}"
    attempt = 0
    while (existing := graph.initializers.get(name)) is not None:
        if existing.meta.get(_SOURCE) == (anchor.name, suffix):
            return existing
        attempt += 1
        name = f"{base}_{attempt}"
    tensor = make_tensor(name)
    value = ir.Value(
        name=name,
        shape=ir.Shape(tensor.shape.numpy()),
        type=ir.TensorType(tensor.dtype),
        const_value=tensor,
    )
    value.meta[_SOURCE] = (anchor.name, suffix)  # meta is analysis only, never saved
    graph.register_initializer(value)
    return value
