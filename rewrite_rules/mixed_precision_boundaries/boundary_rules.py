# SPDX-License-Identifier: MIT
"""Where regions of different types meet, DequantizeLinear -> QuantizeLinear; the rules.

``a`` is the type and grid that a tensor has, ``b`` another that a region asks for; the nodes
behind the arrow on the right read what their plan says.

    Inside           Q(x, a)                        ->  Q(x, b)
    Exit             Q(x, a), read as a and b       ->  Q(DQ(Q(x, b), b), a)
    Entry            DQ(codes, a), read as b        ->  DQ(Q(DQ(codes, a), b), b)
    Float            DQ(Q(x, a))                    ->  x, or Clip(x) to the range of a
    Constant         DQ(constant, a), read as b     ->  DQ(constant', b)

Types, grids and new constants are planned before (:mod:`.place`), and nothing here refuses. A
pair stands at every change of type; :mod:`.fold_rules` take out what changes no value.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import onnx_ir as ir
from onnxscript.rewriter import MatchContext, RewriteRule, RewriteRuleClassBase

from rewrite_rules.graph.nodes import (
    producer,
    remove_unused,
    sort_nodes,
)
from rewrite_rules.graph.rule_set import DispatchingRuleSet, own
from rewrite_rules.mixed_precision_boundaries.boundary_nodes import (
    DQ,
    FLOAT,
    Boundaries,
    Q,
)
from rewrite_rules.mixed_precision_boundaries.regions import TensorPlan


def write_boundaries(boundaries: Boundaries) -> None:
    """Write what was planned, and remove what nothing reads."""
    sort_nodes(boundaries.model.graph)  # a Q is rewritten before what reads it
    laws: list[type[BoundaryRule]] = [Inside, Exit, Float, Entry, Constant]
    candidates = boundaries.plans.keys() | boundaries.constants.keys()
    _apply(boundaries.model, [law.rule(boundaries) for law in laws], candidates)


def _apply(
    model: ir.Model, rules: Sequence[RewriteRule], candidates: Collection[ir.Node]
) -> None:
    applied = DispatchingRuleSet(rules, candidates.__contains__)
    applied.cleans_up = False  # nodes of one name, which a model may have, keep it
    if candidates and applied.apply_to_model(model):
        remove_unused(model)


class BoundaryRule(RewriteRuleClassBase):
    """A rule for a DequantizeLinear of a tensor that changes.

    It may give a part of the readers another value, so that the node stays for the others.
    """

    keeps_node = True

    def __init__(self, boundaries: Boundaries) -> None:
        super().__init__(remove_nodes=not self.keeps_node)
        self._boundaries = boundaries

    def pattern(self, op, codes):  # type: ignore[no-untyped-def]
        return own.DequantizeLinear(codes, _allow_other_inputs=True, _outputs=["out"])

    def check(self, context: MatchContext, out: ir.Value, **_: Any) -> bool:  # type: ignore[override]
        """Whether the plan of the tensor is what the rule is for."""
        plan = self._boundaries.plans.get(producer(out))
        return plan is not None and self.fits(producer(out), plan)

    def fits(self, node: ir.Node, plan: TensorPlan) -> bool:
        raise NotImplementedError


class QuantizeRule(BoundaryRule):
    """A rule for the QuantizeLinear of a tensor that changes."""

    keeps_node = False

    def pattern(self, op, x):  # type: ignore[no-untyped-def]
        return own.QuantizeLinear(x, _allow_other_inputs=True, _outputs=["out"])


class Inside(QuantizeRule):
    """``Q(x, a)`` -> ``Q(x, b)``: a tensor that is only read as b."""

    def fits(self, node: ir.Node, plan: TensorPlan) -> bool:
        """Whether all codes change."""
        changes = plan.produced not in (FLOAT, plan.tensor.grid.dtype)
        return changes and not _keeps_codes(plan)

    def rewrite(self, op: Any, x: ir.Value, out: ir.Value) -> ir.Value:
        node, made = producer(out), self._boundaries
        plan = made.plans[node]
        return made.emit(op, Q, x, plan.tensor, plan.grid(plan.produced), like=node)


class Exit(QuantizeRule):
    """``Q(x, a)`` -> ``Q(DQ(Q(x, b), b), a)``: a tensor made as b that others read as a."""

    def fits(self, node: ir.Node, plan: TensorPlan) -> bool:
        """Whether codes of both types are read."""
        return plan.produced != FLOAT and _keeps_codes(plan)

    def rewrite(self, op: Any, x: ir.Value, out: ir.Value) -> ir.Value:
        node, made = producer(out), self._boundaries
        plan = made.plans[node]
        tensor, own_type = plan.tensor, plan.tensor.grid.dtype
        first = made.emit(op, Q, x, tensor, plan.grid(plan.produced))
        start = made.emit(op, DQ, first, tensor, plan.grid(plan.produced))
        codes = made.emit(op, Q, start, tensor, plan.grid(own_type), like=node)
        made.made[tensor, plan.produced] = first
        made.made[tensor, own_type] = codes
        return codes


class Entry(BoundaryRule):
    """``DQ(codes, a)`` -> ``DQ(Q(DQ(codes, a), b), b)`` for each type b that it is read as."""

    def fits(self, node: ir.Node, plan: TensorPlan) -> bool:
        """Whether anything reads another type."""
        types = _readers(node, plan).keys() or {plan.produced}
        return plan.produced != FLOAT and types != {plan.tensor.grid.dtype}

    def rewrite(self, op: Any, codes: ir.Value, out: ir.Value) -> ir.Value:
        node, made = producer(out), self._boundaries
        plan = made.plans[node]
        tensor, readers = plan.tensor, _readers(node, plan)
        kept, *others = readers or [plan.produced]
        for dtype in others:
            twin = made.codes(op, plan, dtype, node)
            twin = made.emit(op, DQ, twin, tensor, plan.grid(dtype))
            for reader, index in readers[dtype]:
                reader.replace_input_with(index, twin)
        read = made.codes(op, plan, kept, node)
        return made.emit(op, DQ, read, tensor, plan.grid(kept), like=node)


class Float(BoundaryRule):
    """``DQ(Q(x))`` -> ``x``, or ``Clip(x)`` where a quantiser may have removed a Clip."""

    def fits(self, node: ir.Node, plan: TensorPlan) -> bool:
        """Whether the tensor is not quantised any more."""
        return plan.produced == FLOAT

    def rewrite(self, op: Any, codes: ir.Value, out: ir.Value) -> ir.Value:
        node, made = producer(out), self._boundaries
        plan = made.plans[node]
        value = self._value(op, plan)
        uses = list(out.uses())
        floats = [(n, i) for n, i in uses if plan.reads.get(n, FLOAT) == FLOAT]
        for reader, index in floats:
            reader.replace_input_with(index, value)
        if not out.is_graph_output() or plan.output != FLOAT:
            return out
        if len(floats) < len(uses):
            twin = made.emit(op, DQ, codes, plan.tensor, plan.tensor.grid)
            for reader, index in list(out.uses()):
                reader.replace_input_with(index, twin)
        return value

    def _value(self, op: Any, plan: TensorPlan) -> ir.Value:
        made, tensor = self._boundaries, plan.tensor
        source = tensor.source
        assert source is not None
        if not plan.clipped:
            return source
        if (tensor, FLOAT) not in made.made:
            # To the range that it was quantised for.
            clip = made.clip(op, source, tensor.grid, tensor.name)
            made.made[tensor, FLOAT] = clip
        return made.made[tensor, FLOAT]


class Constant(BoundaryRule):
    """``DQ(constant, a)`` -> ``DQ(constant', b)`` for the nodes that compute in b."""

    def check(self, context: MatchContext, out: ir.Value, **_: Any) -> bool:  # type: ignore[override]
        """Whether its codes change for anything."""
        return producer(out) in self._boundaries.constants

    def rewrite(self, op: Any, codes: ir.Value, out: ir.Value) -> ir.Value:
        for change in self._boundaries.constants[producer(out)]:
            made = self._boundaries.constant(op, change)
            for reader, index in list(out.uses()):
                if reader in change.readers:
                    reader.replace_input_with(index, made)
        return out


def _keeps_codes(plan: TensorPlan) -> bool:
    """Whether the codes of a tensor of another type are read as they were."""
    tensor, own_type = plan.tensor, plan.tensor.grid.dtype
    read = {dtype for node in tensor.dequantizes for dtype in _readers(node, plan)}
    return plan.produced != own_type and (own_type in read or tensor.codes_are_read)


def _readers(
    dequantize: ir.Node, plan: TensorPlan
) -> dict[ir.DataType, list[tuple[ir.Node, int]]]:
    """Return what reads a DequantizeLinear, by type; first the type that keeps its name."""
    value = dequantize.outputs[0]
    found: dict[ir.DataType, list[tuple[ir.Node, int]]] = {}
    if value.is_graph_output():
        found[plan.output] = []
    for reader, index in value.uses():
        # A QuantizeLinear that another tensor's rewrite put there is in no plan; what is
        # dequantised is float.
        dtype = plan.reads.get(reader, plan.produced)
        dtype = plan.produced if dtype == FLOAT else dtype
        found.setdefault(dtype, []).append((reader, index))
    return found
