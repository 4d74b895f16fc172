# SPDX-License-Identifier: MIT
"""How a kernel is used that is not always right: the model's own nodes stand behind it.

    guarded(nodes, (question, kernel), ...)
        -> If(question holds in this run, kernel, ... else the nodes, cloned)

The clone computes what the model does, whatever that is: a reader has to find what a kernel
reads and what to ask, and need not be able to write a form again.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
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


def own_nodes(
    results: Iterable[ir.Value | None],
    read: Iterable[ir.Value | None],
    beside: Iterable[ir.Value | None] = (),
) -> list[ir.Node]:
    """Return the nodes, in their order, between values that are read and what is made of them.

    The graph is sorted. Of values ``beside``, which all layers may share, it is nodes from the
    first one that reads others. Sizes that nothing else reads are computed with them.

    Raises:
        Refusal: If a node holds a subgraph.
    """
    ends = [node for value in results if value and (node := value.producer()) is not None]
    needed, left, behind, nodes = set(ends), set(ends), set(read), list[ir.Node]()
    for node in ends[0].graph or () if ends else ():
        if not left:
            break
        left.discard(node)
        if not behind.isdisjoint(node.inputs) and behind.isdisjoint(node.outputs):
            behind.update(node.outputs, () if nodes else beside)
            nodes.append(node)
    for node in reversed(nodes):
        if node in needed:
            needed.update(maker for v in node.inputs if v and (maker := v.producer()))
    between = [node for node in nodes if node in needed]
    for node in between:
        if any(subgraphs(node)):
            raise Refusal("ORP603", f"{label(node)!r} between holds a subgraph")
    return [*reversed(_sizes_for(between)), *between]


def _sizes_for(nodes: Sequence[ir.Node]) -> list[ir.Node]:
    """Return what computes sizes for some nodes only, each behind what reads it."""
    found = [*nodes]
    for node in found:  # grows
        makers = dict.fromkeys(value.producer() for value in node.inputs if value)
        found += [maker for maker in makers if maker and _is_size_for(maker, found)]
    return found[len(nodes) :]


def _is_size_for(node: ir.Node, readers: Container[ir.Node]) -> bool:
    """Whether only these read what a node makes: integers of integers, or of graph inputs.

    What others are made of would be held until a branch reads it.
    """
    values = (*node.outputs, *(value for value in node.inputs if value))
    kinds = {value.dtype for value in values if not value.is_graph_input()}
    kept = node in readers or any(value.is_graph_output() for value in node.outputs)
    read_here = all(use.node in readers for made in node.outputs for use in made.uses())
    is_simple = not (node.domain or any(subgraphs(node)))
    return is_simple and kinds == {ir.DataType.INT64} and read_here and not kept


def clone(
    op: Any, nodes: Iterable[ir.Node], results: Iterable[ir.Value], facts: ProvedShapes
) -> list[ir.Value]:
    """Emit nodes once more; return what stands for results of theirs."""
    made: dict[ir.Value | None, ir.Value | None] = {}
    for node in nodes:
        inputs = [made.get(value, value) for value in node.inputs]
        count, kept = len(node.outputs), dict(node.attributes)
        outputs = op.op(node.op_type, *inputs, _domain=node.domain, _outputs=count, **kept)
        for old, new in zip(node.outputs, outputs if count > 1 else [outputs], strict=True):
            new.type = old.type
            facts.replace(old, new)
            made[old] = new
    return [made.get(value, value) or value for value in results]
