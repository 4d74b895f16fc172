# SPDX-License-Identifier: MIT
"""Shape and Size read the first value of the same sizes, or become constants: the rules.

    ConstantNumbers  Gather(Shape(h[batch, 64]), 1)       -> 64
    Span             Shape(f(x))                          -> Shape(x)           f keeps sizes
                     Slice(Shape(x), 1, 3)                -> Shape(x, start=1, end=3)
                     Unsqueeze(Gather(Shape(x), 1), 0)    -> Shape(x, start=1, end=2)
                     Concat(Shape(x)[0:1], Shape(x)[1:2]) -> Shape(x, start=0, end=2)
    Pick             Shape(Transpose(x, perm))            -> Gather(Shape(x), perm)
                     Gather(Shape(h[batch, 64]), 0)       -> Gather(Shape(x[batch]), 0)
    Whole            Size(f(x))                           -> Size(x)      as many elements
                     Shape(f(x))                          -> Shape(x)     of unknown rank
    EqualNumbers     f(Shape(x)), g(Shape(y))             -> the first    the same numbers
    BehindMaker      h, ..., Shape(h)                     -> h, Shape(h), ...

Shape has ``start`` and ``end`` from opset 15 on. What can be read is proved before any rule
runs (:mod:`.size_readings`); the order of the other nodes, too (:mod:`.memory_order`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnxscript.rewriter import MatchContext, RewriteRuleClassBase

from rewrite_rules.graph.nodes import label, producer
from rewrite_rules.graph.rule_set import DispatchingRuleSet, one_of
from rewrite_rules.remarks import Remarks
from rewrite_rules.shape_size_reorder.size_readings import FOLDED, Law, Reading
from rewrite_rules.shapes.shape_data import INTEGER_OPERATORS

ROOTS = ("Shape", "Size")
_INT64 = ir.TensorType(ir.DataType.INT64)
# The numbers, and what became of the node.
_Read = tuple[ir.Value, str]


def read_better(
    model: ir.Model, readings: Mapping[ir.Node, Reading], remarks: Remarks
) -> None:
    """Have nodes read what the analysis found for them."""
    laws: list[type[SizeRule]] = [ConstantNumbers, Span, Pick, Whole]
    replaced: dict[ir.Value, ir.Value] = {}
    rules = [law.rule(readings, replaced, remarks) for law in laws]
    DispatchingRuleSet(rules, readings.__contains__).apply_to_model(model)


def merge_equal(model: ir.Model, first: Mapping[ir.Node, ir.Value], remarks: Remarks) -> None:
    """Have the first of nodes with the same numbers read for all."""
    rules = [EqualNumbers.rule(first, remarks)]
    DispatchingRuleSet(rules, first.__contains__).apply_to_model(model)


def move_behind_makers(model: ir.Model, nodes: set[ir.Node]) -> None:
    """Move nodes, each a Shape or Size, to right behind what they read; empties the set."""
    rules = DispatchingRuleSet([BehindMaker.rule(nodes)], nodes.__contains__)
    rules.cleans_up = False  # nodes without a reader are part of the plan
    rules.apply_to_model(model)


class SizeRule(RewriteRuleClassBase):
    """Has a node of sizes give the same numbers earlier, or in fewer nodes."""

    law: Law

    def __init__(
        self,
        readings: Mapping[ir.Node, Reading],
        replaced: dict[ir.Value, ir.Value],
        remarks: Remarks,
    ) -> None:
        super().__init__()
        self._readings, self._replaced, self._remarks = readings, replaced, remarks

    def pattern(self, op):  # type: ignore[no-untyped-def]
        return one_of(op, FOLDED)(_allow_other_inputs=True, _outputs=["out"])

    def check(self, context: MatchContext, out: ir.Value) -> bool:  # type: ignore[override]
        """Whether what was found for the node is the rule's."""
        return self._readings[producer(out)].law is self.law

    def rewrite(self, op: Any, out: ir.Value) -> ir.Value:
        node, reading = producer(out), self._readings[producer(out)]
        source = reading.source
        with self._remarks.at(label(node)):
            if source is not None:
                source = self._replaced.get(source, source)
            made, what = self.read(op, reading, source, node)
            of = "" if reading.source is None else f" of {reading.source.name!r}"
            self._remarks.fired(label(node), what + of)
        self._replaced[out] = made
        return made

    def read(self, op: Any, reading: Reading, x: ir.Value | None, node: ir.Node) -> _Read:
        """Emit the nodes; return what they read."""
        raise NotImplementedError


class ConstantNumbers(SizeRule):
    """Numbers that no run can change -> ``Constant``."""

    law = Law.CONSTANT

    def read(self, op: Any, reading: Reading, x: ir.Value | None, node: ir.Node) -> _Read:
        assert reading.constants is not None
        array = np.array(reading.constants.constants, np.int64)
        made = _constant(op, array.reshape(reading.constants.shape), _name=node.name)
        return made, f"constant {array.ravel().tolist()}"


class Span(SizeRule):
    """Sizes of x side by side -> ``Shape(x, start, end)``."""

    law = Law.SPAN

    def read(self, op: Any, reading: Reading, x: ir.Value | None, node: ir.Node) -> _Read:
        start, end = reading.axes[0], reading.axes[-1] + 1
        ends = {"start": start} if start else {}
        ends |= {"end": end} if end < reading.rank else {}
        what = f"dimensions {start}:{ends.get('end', '')}" if ends else "the shape"
        return op.Shape(x, **ends, _name=node.name), f"reads {what}"


class Pick(SizeRule):
    """Sizes of x in any order -> ``Gather(Shape(x), axes)``; of one, maybe a scalar."""

    law = Law.PICK

    def read(self, op: Any, reading: Reading, x: ir.Value | None, node: ir.Node) -> _Read:
        axes = np.array(reading.axes, np.int64).reshape(() if reading.is_scalar else -1)
        shape, indices = op.Shape(x), _constant(op, axes)
        shape.type = _INT64
        plural = "s" * (len(reading.axes) > 1)
        what = f"reads dimension{plural} {', '.join(map(str, reading.axes))}"
        return op.Gather(shape, indices, axis=0, _name=node.name), what


class Whole(SizeRule):
    """``Size(f(x))`` -> ``Size(x)``, and Shape, of which not even the rank is known."""

    law = Law.WHOLE

    def read(self, op: Any, reading: Reading, x: ir.Value | None, node: ir.Node) -> _Read:
        made = getattr(op, node.op_type)(x, **node.attributes, _name=node.name)
        return made, f"reads the {node.op_type.lower()}"


class EqualNumbers(RewriteRuleClassBase):
    """Two nodes of the same numbers -> the first."""

    def __init__(self, first: Mapping[ir.Node, ir.Value], remarks: Remarks) -> None:
        super().__init__()
        self._first, self._remarks = first, remarks

    def pattern(self, op):  # type: ignore[no-untyped-def]
        return one_of(op, INTEGER_OPERATORS)(_allow_other_inputs=True, _outputs=["out"])

    def rewrite(self, op: Any, out: ir.Value) -> ir.Value:
        node = producer(out)
        first = self._first[node]
        if node.op_type in ROOTS:
            self._remarks.fired(label(node), f"is {first.name!r}, its like")
        return first


class BehindMaker(RewriteRuleClassBase):
    """``h, ..., Shape(h)`` -> ``h, Shape(h), ...``: h is not kept for its sizes."""

    def __init__(self, waiting: set[ir.Node]) -> None:
        super().__init__()
        self._waiting = waiting
        # What was moved behind a node last.
        self._last: dict[ir.Node, ir.Node] = {}

    def pattern(self, op, x):  # type: ignore[no-untyped-def]
        return one_of(op, ROOTS)(x, _outputs=["out"])

    def check(self, context: MatchContext, x: ir.Value, out: ir.Value) -> bool:  # type: ignore[override]
        """Whether x is computed in the same graph; else it stays in front."""
        self._waiting.discard(producer(out))
        maker = x.producer()
        return maker is not None and maker.graph is producer(out).graph

    def rewrite(self, op: Any, x: ir.Value, out: ir.Value) -> ir.Value:
        maker, node = producer(x), producer(out)
        assert node.graph is not None
        node.graph.remove(node)
        self._last.get(maker, maker).append(node)
        self._last[maker] = node
        return out


def _constant(op: Any, array: NDArray[np.int64], **named: Any) -> ir.Value:
    made: ir.Value = op.Constant(value=ir.tensor(array), **named)
    made.type = _INT64
    return made
