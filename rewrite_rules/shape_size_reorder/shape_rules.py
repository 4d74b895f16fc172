# SPDX-License-Identifier: MIT
"""Rules for Shape, Size and the integers computed from them.

    Shape(f(x))                          -> Shape(x)                   f keeps the shape
    Shape(Transpose(x, perm))            -> Gather(Shape(x), perm)
    Size(f(x))                           -> Size(x)                    as many elements
    Gather(Shape(h[batch, 64]), 0)       -> Gather(Shape(x[batch]), 0)
    Gather(Shape(h[batch, 64]), 1)       -> 64
    Slice(Shape(x), 1, 3)                -> Shape(x, start=1, end=3)   opset 15
    Unsqueeze(Gather(Shape(x), 1), 0)    -> Shape(x, start=1, end=2)   opset 15
    Concat(Shape(x)[0:1], Shape(x)[1:2]) -> Shape(x, start=0, end=2)   opset 15

``x`` is the first value in the graph of which :mod:`.proved_shapes` shows that
its sizes are the same in every run. A rule fires where what is read comes earlier, or from the
same value in fewer nodes; so none fires twice.

A scalar stays ``Gather(Shape(x), 1)``: ``Squeeze(Shape(x, start=1, end=2))`` takes as many
nodes, and one more Shape for each dimension that is read.
"""

from __future__ import annotations

__all__ = ["Readings", "shape_rules"]

import dataclasses
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript.rewriter import MatchContext, MatchResult, RewriteRuleClassBase

from rewrite_rules.graph.attributes import int_attribute
from rewrite_rules.graph.nodes import label, producer
from rewrite_rules.graph.refusal import Refusal
from rewrite_rules.graph.rule_set import DispatchingRuleSet
from rewrite_rules.remarks import Remarks
from rewrite_rules.shapes.dimensions import Dims
from rewrite_rules.shapes.node_facts import Integers
from rewrite_rules.shapes.proved_shapes import ProvedShapes

# Operators that only name or pick what is in their first input.
_PICKS = frozenset({"Cast", "Gather", "Identity", "Reshape", "Slice", "Squeeze", "Unsqueeze"})
# Operators whose result is read from a value directly, where it can be.
_REREAD = frozenset({"Concat", "Gather", "Slice", "Squeeze", "Unsqueeze"})
# Operators whose result may turn out to be constant.
_FOLDED = (
    "Add",
    "Cast",
    "Div",
    "Identity",
    "Mul",
    "ReduceProd",
    "Reshape",
    "Sub",
    *sorted(_REREAD),
)
_LONG_CHAIN = 4


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What a node becomes.

    Attributes:
        constant: Its numbers, if no run can change them.
        op_type: Shape or Size.
        source: What that reads.
        start: Shape's attribute.
        end: Shape's attribute.
        picks: What Gather picks from the shape; None for all of it.
    """

    constant: tuple[int, ...] | None = None
    op_type: str = "Shape"
    source: ir.Value | None = None
    start: int | None = None
    end: int | None = None
    picks: tuple[int, ...] | None = None

    @property
    def nodes(self) -> int:
        """How many nodes it takes."""
        return 1 if self.picks is None else 2

    def __str__(self) -> str:
        if self.source is None:
            constant = self.constant or ()
            return f"constant {list(constant)}"
        what = "the shape" if self.op_type == "Shape" else "the size"
        if self.start is not None or self.end is not None:
            what = f"dimensions {self.start or 0}:{'' if self.end is None else self.end}"
        if self.picks is not None:
            what = f"dimension{'s' * (len(self.picks) > 1)} {', '.join(map(str, self.picks))}"
        return f"reads {what} of {self.source.name!r}"


class Readings:
    """What the rules of one model share: proofs, remarks, what each node reads now.

    Attributes:
        facts: The proved shapes.
        remarks: Where fates are told.
    """

    def __init__(self, facts: ProvedShapes, remarks: Remarks) -> None:
        self.facts = facts
        self.remarks = remarks
        self._reads: dict[ir.Value, int] = {}
        self._lengths: dict[ir.Value, int] = {}

    def look(self, node: ir.Node) -> bool:
        """Note how late a value a node's numbers depend on; whether they are known at all."""
        out = node.outputs[0]
        if node.op_type in ("Shape", "Size"):
            source = node.inputs[0] if node.inputs else None
            if source is None:
                return False
            self._reads[out], self._lengths[out] = self.facts.place(source), 1
            return True
        if self.facts.integers(out) is None:
            return False
        inputs = [value for value in node.inputs if value is not None]
        self._reads[out] = max((self._reads.get(value, -1) for value in inputs), default=-1)
        chain = inputs[:1] if node.op_type in _PICKS else []
        self._lengths[out] = 1 + max(
            (self._lengths.get(value, _LONG_CHAIN) for value in chain), default=_LONG_CHAIN
        )
        return True

    def plan(self, node: ir.Node) -> _Plan | None:
        """What a node is to become; None to leave it."""
        facts, out = self.facts, node.outputs[0]
        integers = facts.integers(out)
        if integers is not None and integers.constants is not None:
            return _Plan(integers.constants)
        if node.op_type == "Size":
            first = facts.first_of_count(facts.count(_input(node)), node)
            return self._if_earlier(first, node, _Plan(op_type="Size", source=first))
        dims = None if integers is None else integers.known
        if integers is None or dims is None:
            return self._plan_unranked(node) if node.op_type == "Shape" else None
        if node.op_type != "Shape" and node.op_type not in _REREAD:
            return None
        plans = self._plans(node, dims, integers.scalar)
        best = min(plans, key=self._rank, default=None)
        now = self._reads[out], self._lengths[out]
        return best if best is not None and self._rank(best) < now else None

    def write(self, op: Any, plan: _Plan, node: ir.Node) -> ir.Value:
        """Emit what a node becomes."""
        integers = self.facts.integers(node.outputs[0])
        if plan.source is None:
            assert integers is not None and plan.constant is not None
            shape = () if integers.scalar else (len(plan.constant),)
            value: ir.Value = op.Constant(
                value=ir.tensor(np.array(plan.constant, np.int64).reshape(shape)),
                _name=node.name,
            )
        elif plan.op_type == "Size":
            value = op.Size(plan.source, _name=node.name)
        else:
            span = {"start": plan.start, "end": plan.end}
            span = {name: number for name, number in span.items() if number is not None}
            name = node.name if plan.picks is None else None
            value = op.Shape(plan.source, **span, _name=name)
        value.type = ir.TensorType(ir.DataType.INT64)
        if plan.picks is not None:
            dims = self.facts.shape(plan.source) if plan.source is not None else 0
            assert isinstance(dims, tuple) and integers is not None
            value.shape = ir.Shape([len(dims)])
            self.facts.add(value, Integers(dims), node)
            picks = np.array(plan.picks, np.int64)
            indices = op.Constant(
                value=ir.tensor(picks.reshape(() if integers.scalar else -1))
            )
            value = op.Gather(value, indices, axis=0, _name=node.name)
        self.facts.add(value, integers, node)
        self.remarks.fired(label(node), str(plan))
        return value

    def _rank(self, plan: _Plan) -> tuple[int, int]:
        assert plan.source is not None
        return self.facts.place(plan.source), plan.nodes

    def _plans(self, node: ir.Node, dims: Dims, scalar: bool) -> Iterator[_Plan]:
        facts = self.facts
        sources = [] if scalar else [facts.first_of_shape(dims, node)]
        for dim in dims:
            found = facts.first_of_dim(dim, node)
            sources.append(None if found is None else found[0])
        sources.append(_read_now(node))
        for source in dict.fromkeys(sources):
            if source is not None:
                yield from _forms(source, facts.shape(source), dims, scalar, facts.opset(node))

    def _plan_unranked(self, node: ir.Node) -> _Plan | None:
        shape = self.facts.shape(_input(node))
        if isinstance(shape, tuple):
            return None
        try:
            start = int_attribute(node, "start", 0) or None
            end = int_attribute(node, "end", 0) if "end" in node.attributes else None
        except Refusal:
            return None
        first = self.facts.first_of_shape(shape, node)
        return self._if_earlier(first, node, _Plan(source=first, start=start, end=end))

    def _if_earlier(self, first: ir.Value | None, node: ir.Node, plan: _Plan) -> _Plan | None:
        if first is None or self.facts.place(first) >= self.facts.place(_input(node)):
            return None
        return plan


def _input(node: ir.Node) -> ir.Value:
    value = node.inputs[0]
    assert value is not None  # looked at before
    return value


def _read_now(node: ir.Node) -> ir.Value | None:
    """The value whose shape a node's numbers are picked from."""
    for _ in range(_LONG_CHAIN):
        source = node.inputs[0] if node.inputs else None
        if node.op_type == "Shape" or source is None:
            return source
        maker = source.producer()
        if node.op_type not in _PICKS or maker is None:
            return None
        node = maker
    return None


def _forms(
    source: ir.Value, shape: object, dims: Dims, scalar: bool, opset: int
) -> Iterator[_Plan]:
    """How to read sizes from a value."""
    if not isinstance(shape, tuple) or not set(dims) <= set(shape):
        return
    if not scalar and shape == dims:
        yield _Plan(source=source)
        return
    count = len(dims)
    starts = [i for i in range(len(shape) - count + 1) if shape[i : i + count] == dims]
    if starts and not scalar and opset >= 15:
        end = starts[0] + count
        yield _Plan(
            source=source, start=starts[0] or None, end=end if end < len(shape) else None
        )
        return
    yield _Plan(source=source, picks=tuple(shape.index(dim) for dim in dims))


class _ReadEarliest(RewriteRuleClassBase):
    """A node of one operator -> the same numbers, constant or read from the first value."""

    def __init__(self, op_type: str, readings: Readings) -> None:
        self._op_type = op_type
        self._readings = readings
        self._plan: _Plan | None = None
        # The nodes before it may have other consumers.
        super().__init__(name=f"{op_type}OfEarliest", remove_nodes=False)

    def pattern(self, op, x):  # type: ignore[no-untyped-def]
        return getattr(op, self._op_type)(x, _allow_other_inputs=True, _outputs=["out"])

    def check(self, context: MatchContext, out: ir.Value, **_: object) -> MatchResult:  # type: ignore[override]
        """Find a better reading."""
        del context  # Unused
        result, node = MatchResult(), producer(out)
        with self._readings.remarks.at(label(node)):
            self._plan = self._readings.plan(node)
        if self._plan is None:
            return result.fail("what it reads is the first value of these sizes", node)
        return result

    def rewrite(self, op: Any, out: ir.Value, **_: object) -> ir.Value:
        """Emit the reading."""
        plan, self._plan = self._plan, None
        assert plan is not None
        node = producer(out)
        with self._readings.remarks.at(label(node)):
            return self._readings.write(op, plan, node)


def shape_rules(readings: Readings, present: Collection[str]) -> DispatchingRuleSet:
    """The rules for one model, by the operators that are in it."""

    def is_candidate(node: ir.Node) -> bool:
        # A node without a consumer was rewritten, or never mattered.
        out = node.outputs[0]
        return (bool(out.uses()) or out.is_graph_output()) and readings.look(node)

    rules = [
        _ReadEarliest.rule(op_type, readings)
        for op_type in ("Shape", "Size", *_FOLDED)
        if op_type in present
    ]
    return DispatchingRuleSet(rules, is_candidate)
