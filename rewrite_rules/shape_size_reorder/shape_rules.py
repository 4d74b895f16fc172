# SPDX-License-Identifier: MIT
"""Rules for Shape, Size and the integers computed from them.

    FoldNumbers  Gather(Shape(h[batch, 64]), 1)       -> 64
    ReadSpan     Shape(f(x))                          -> Shape(x)                 f keeps it
                 Slice(Shape(x), 1, 3)                -> Shape(x, start=1, end=3)   opset 15
                 Unsqueeze(Gather(Shape(x), 1), 0)    -> Shape(x, start=1, end=2)   opset 15
                 Concat(Shape(x)[0:1], Shape(x)[1:2]) -> Shape(x, start=0, end=2)   opset 15
    ReadSize     Size(f(x))                           -> Size(x)             as many elements
    PickSizes    Shape(Transpose(x, perm))            -> Gather(Shape(x), perm)
                 Gather(Shape(h[batch, 64]), 0)       -> Gather(Shape(x[batch]), 0)

``x`` is the first value in the graph of which :class:`.ProvedShapes` shows that its sizes are
the same in every run. A rule fires where what is read comes earlier, or from the same value in
fewer nodes (:mod:`.readings`); so none fires twice.

A scalar stays ``Gather(Shape(x), 1)``: ``Squeeze(Shape(x, start=1, end=2))`` takes as many
nodes, and one more Shape for each dimension that is read.
"""

from __future__ import annotations

__all__ = ["shape_rules"]

from abc import abstractmethod
from typing import Any, ClassVar, Generic, TypeVar, cast

import numpy as np
import onnx_ir as ir
from onnxscript.rewriter import MatchContext, MatchResult, RewriteRuleClassBase

from rewrite_rules.graph.nodes import label, producer
from rewrite_rules.graph.rule_set import DispatchingRuleSet
from rewrite_rules.remarks import Remarks
from rewrite_rules.shape_size_reorder.readings import (
    Known,
    Picked,
    Reading,
    SizeOf,
    Span,
)

_Kind = TypeVar("_Kind", Known, Span, SizeOf, Picked)


class _BetterReading(RewriteRuleClassBase, Generic[_Kind]):
    """A node of one operator -> the same numbers, constant or read from the first value."""

    reading: ClassVar[type]

    def __init__(self, op_type: str, better: dict[ir.Node, Reading], remarks: Remarks) -> None:
        self._op_type = op_type
        self._better = better
        self._remarks = remarks
        # The nodes before it may have other consumers.
        super().__init__(name=f"{type(self).__name__}Of{op_type}", remove_nodes=False)

    def pattern(self, op, x):  # type: ignore[no-untyped-def]
        return getattr(op, self._op_type)(x, _allow_other_inputs=True, _outputs=["out"])

    def check(self, context: MatchContext, out: ir.Value, **_: object) -> MatchResult:  # type: ignore[override]
        """Look whether the node is to become this."""
        del context  # Unused
        result, node = MatchResult(), producer(out)
        if not isinstance(self._better.get(node), self.reading):
            return result.fail("what it reads is the first value of these sizes", node)
        return result

    def rewrite(self, op: Any, out: ir.Value, **_: object) -> ir.Value:
        """Emit the reading."""
        node = producer(out)
        reading = self._better[node]
        value = self.emit(op, cast(_Kind, reading), node.name)
        value.type = ir.TensorType(ir.DataType.INT64)
        self._remarks.fired(label(node), str(reading))
        return value

    @abstractmethod
    def emit(self, op: Any, reading: _Kind, name: str | None) -> ir.Value:
        """Return the numbers, made by a node of this name."""


class FoldNumbers(_BetterReading[Known]):
    """Numbers that no run can change -> a constant."""

    reading = Known

    def emit(self, op: Any, reading: Known, name: str | None) -> ir.Value:
        numbers = np.array(reading.numbers, np.int64).reshape(reading.shape)
        return op.Constant(value=ir.tensor(numbers), _name=name)  # type: ignore[no-any-return]


class ReadSpan(_BetterReading[Span]):
    """Sizes that lie side by side in a shape -> Shape."""

    reading = Span

    def emit(self, op: Any, reading: Span, name: str | None) -> ir.Value:
        ends = {"start": reading.start, "end": reading.end}
        ends = {end: axis for end, axis in ends.items() if axis is not None}
        return op.Shape(reading.source, **ends, _name=name)  # type: ignore[no-any-return]


class ReadSize(_BetterReading[SizeOf]):
    """Size -> Size of the first value of as many elements."""

    reading = SizeOf

    def emit(self, op: Any, reading: SizeOf, name: str | None) -> ir.Value:
        return op.Size(reading.source, _name=name)  # type: ignore[no-any-return]


class PickSizes(_BetterReading[Picked]):
    """Sizes anywhere in a shape -> Gather of Shape."""

    reading = Picked

    def emit(self, op: Any, reading: Picked, name: str | None) -> ir.Value:
        shape = op.Shape(reading.source)
        shape.type = ir.TensorType(ir.DataType.INT64)
        axes = np.array(reading.axes, np.int64).reshape(() if reading.scalar else -1)
        return op.Gather(shape, op.Constant(value=ir.tensor(axes)), axis=0, _name=name)  # type: ignore[no-any-return]


_RULES = (FoldNumbers, ReadSpan, ReadSize, PickSizes)


def shape_rules(better: dict[ir.Node, Reading], remarks: Remarks) -> DispatchingRuleSet:
    """Return the rules that have something to do.

    Args:
        better: What nodes are to become, from :class:`.Readings`.
        remarks: Get what each node reads now.
    """
    wanted = {(type(reading), node.op_type) for node, reading in better.items()}
    rules = [
        rule.rule(op_type, better, remarks)
        for rule in _RULES
        for reading, op_type in sorted(wanted, key=str)
        if reading is rule.reading
    ]
    return DispatchingRuleSet(rules, better.__contains__)
