# SPDX-License-Identifier: MIT
"""Computes a value of a graph on concrete inputs, as far as its subgraph is small.

What a mask or a rotation computes says more than how an exporter spelled it. A Shape is
answered from the sizes of its input, so that nothing large is computed for it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from rewrite_rules.graph.constants import constant
from rewrite_rules.masks.node_evaluator import Array, CannotEvaluate, NodeEvaluator
from rewrite_rules.shapes.proved_shapes import ProvedShapes

_MAX_NODES = 2000


class GraphEvaluator:
    """Evaluates values of one graph on one set of arrays.

    Args:
        facts: Sizes of values, where they follow without the arrays.
        given: Arrays of values to start from.
        nodes: Evaluates nodes; shared, it remembers.
    """

    def __init__(
        self, facts: ProvedShapes, given: Mapping[ir.Value, Array], nodes: NodeEvaluator
    ) -> None:
        self._facts = facts
        self._arrays = {value: nodes.intern(array) for value, array in given.items()}
        self._nodes = nodes

    def array(self, value: ir.Value) -> Array:
        """Return what a value holds.

        Raises:
            CannotEvaluate: If it depends on something that is not given, or is too large.
        """
        pending = [value]
        for _ in range(_MAX_NODES):
            if not pending:
                return self._arrays[value]
            current = pending[-1]
            missing = self._compute(current)
            pending.extend(missing)
            if not missing:
                pending.pop()
        raise CannotEvaluate(f"{value.name!r} depends on too much")

    def _compute(self, value: ir.Value) -> list[ir.Value]:
        """Compute a value; return what has to be known first instead, if anything."""
        if value in self._arrays:
            return []
        tensor, node = constant(value), value.producer()
        if tensor is not None:
            self._arrays[value] = self._nodes.intern(tensor.numpy())
            return []
        if node is None or node.graph is None:
            raise CannotEvaluate(f"{value.name!r} is not known")
        known = self._facts.integers(value)
        if known is not None and all(n is not None and not n[1] for n in known.numbers):
            numbers = np.array([n[0] for n in known.numbers if n is not None], np.int64)
            self._arrays[value] = self._nodes.intern(numbers.reshape(known.shape))
            return []
        inputs = [v for v in node.inputs if v is not None]
        if node.op_type == "Shape" and not node.domain and inputs[0] not in self._arrays:
            sizes = self._facts.sizes(inputs[0])
            if sizes is not None:
                start, end = (node.attributes.get(name) for name in ("start", "end"))
                first = 0 if start is None else start.as_int()
                last = None if end is None else end.as_int()
                self._arrays[value] = self._nodes.intern(np.array(sizes[first:last], np.int64))
                return []
        missing = [v for v in inputs if v not in self._arrays]
        if not missing:
            arrays = [None if v is None else self._arrays[v] for v in node.inputs]
            outputs = self._nodes.run(node, self._facts.opset(node), arrays)
            self._arrays.update(zip(node.outputs, outputs, strict=True))
        return missing
