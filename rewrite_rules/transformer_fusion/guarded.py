# SPDX-License-Identifier: MIT
"""How a kernel is used that is not always right: the model's own nodes stand behind it.

    guarded(nodes, (question, kernel), ...)
        -> If(question holds in this run, kernel, ... else the nodes, cloned)

The clone computes what the model does, whatever that is: a reader has to find what a kernel
reads and what to ask, and need not be able to write a form again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import onnx_ir as ir
from onnxscript import TapeBuilder

from rewrite_rules.graph.nodes import label, subgraphs
from rewrite_rules.remarks import Refusal
from rewrite_rules.shapes.proved_shapes import ProvedShapes

Build = Callable[[Any], Sequence[ir.Value]]
# Emits a bool; None for what is proved.
Question = Callable[[Any], ir.Value | None]


def guarded(
    op: Any, nodes: Build, *cases: tuple[Question, Build], name: str | None = None
) -> Sequence[ir.Value]:
    """Emit the first kernel whose question holds, else the nodes; ``name`` names the If."""
    if not cases:
        return nodes(op)
    (question, kernel), *others = cases
    holds = question(op)
    if holds is None:
        return kernel(op)
    branches = {
        "then_branch": _branch(kernel),
        "else_branch": _branch(lambda op: guarded(op, nodes, *others)),
    }
    count = len(branches["then_branch"].outputs)
    made = op.If(holds, **branches, _name=name, _outputs=count)
    return made if count > 1 else [made]


def mended(op: Any, nodes: Build, kernel: Build) -> Sequence[ir.Value]:
    """Emit a kernel's results, and nodes for the first where it is not a number."""
    made, *others = kernel(op)

    def is_number(op: Any) -> ir.Value:
        # All weights of a token are NaN, or none.
        found: ir.Value = op.Not(op.IsNaN(op.ReduceSum(made, keepdims=0)))
        return found

    case = is_number, lambda op: [op.Identity(made)]
    return [*guarded(op, lambda op: nodes(op)[:1], case), *others]


def _branch(build: Build) -> ir.Graph:
    op = TapeBuilder()
    outputs = build(op)
    for output in outputs:
        output.dtype = ir.DataType.FLOAT
    return ir.Graph([], outputs, nodes=op.nodes, name="branch")


class Region:
    """The nodes of a graph between some values and what is made of them.

    Attributes:
        captured: Values that these nodes read, beside the former.
    """

    def __init__(
        self,
        results: Sequence[ir.Value],
        read: Iterable[ir.Value],
        is_before: Callable[[ir.Node], bool],
    ) -> None:
        """Find the nodes; none that ``is_before`` others depends on what is read."""
        self.results = results
        self._inside: dict[ir.Value, bool] = dict.fromkeys(read, True)
        self._read, self._is_before = frozenset(self._inside), is_before
        self._nodes = dict[ir.Node, None]()
        for value in results:
            self._visit(value)
        made = {value for node in self._nodes for value in node.outputs}
        inputs = {v for node in self._nodes for v in node.inputs if v is not None}
        self.captured = inputs - made - self._read

    def _visit(self, value: ir.Value) -> bool:
        """Whether a value depends on what is read; its nodes, in order, are noted then."""
        node = value.producer()
        if value in self._inside or node is None or self._is_before(node):
            return self._inside.get(value, False)
        inputs = [v for v in node.inputs if v is not None]
        found = sum(map(self._visit, inputs)) > 0
        self._inside.update(dict.fromkeys(node.outputs, found))
        if found:
            if any(subgraphs(node)):
                raise Refusal("ORP603", f"{label(node)!r} between holds a subgraph")
            self._nodes[node] = None
        return found

    def emit(self, op: Any, facts: ProvedShapes) -> list[ir.Value]:
        """Emit clones of the nodes; return what they make."""
        made: dict[ir.Value | None, ir.Value | None] = {}
        for node in self._nodes:
            inputs = [made.get(value, value) for value in node.inputs]
            count, kept = len(node.outputs), dict(node.attributes)
            outputs = op.op(node.op_type, *inputs, _domain=node.domain, _outputs=count, **kept)
            for old, new in zip(
                node.outputs, outputs if count > 1 else [outputs], strict=True
            ):
                new.type = old.type
                facts.replace(old, new)
                made[old] = new
        return [made.get(value, value) or value for value in self.results]
