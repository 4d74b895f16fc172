# SPDX-License-Identifier: MIT
"""Makes nodes of fresh names, to be put into a graph later."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from rewrite_rules.graph.initializers import new_initializer
from rewrite_rules.graph.names import FreshNames


class NewNodes(list[ir.Node]):
    """Nodes of free names that a graph gets, and their constants, which it gets at once."""

    def __init__(self, graph: ir.Graph, names: FreshNames) -> None:
        super().__init__()
        self._graph = graph
        self._names = names

    def make(
        self, op_type: str, *inputs: ir.Value | None, name: str, **attributes: Any
    ) -> ir.Value:
        """Append a node and return its output; ``name`` is what that is called, if free."""
        node = ir.node(
            op_type, inputs, attributes, name=self._names.take(f"trim_padding_{op_type}")
        )
        node.outputs[0].name = self._names.take(name)
        self.append(node)
        return node.outputs[0]

    def integers(self, numbers: Any) -> ir.Value:
        """Return an int64 constant."""
        name = self._names.take("trim_padding_number")
        return new_initializer(self._graph, ir.Tensor(np.array(numbers, np.int64), name=name))

    def is_real(self, mask: ir.Value, name: str) -> ir.Value:
        """Return a mask as bool: any number but 0 is real."""
        if mask.dtype is ir.DataType.BOOL:
            return mask
        return self.make("Cast", mask, name=name, to=ir.DataType.BOOL.value)
