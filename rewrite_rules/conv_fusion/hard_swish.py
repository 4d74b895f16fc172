# SPDX-License-Identifier: MIT
"""Hard swish and hard sigmoid as exporters spell them, by HardSigmoid.

    HardSwish     y * clip(y + 3, 0, 6)              -> 6 * (y * HardSigmoid(y))
    HardGate      clip(y + 3, 0, 6) / 6, or * (1/6)  -> HardSigmoid(y)

with HardSigmoid(y) = max(0, min(1, y / 6 + 0.5)). The factor of 6 meets the division behind
it, see :mod:`.fold_rules`. onnxruntime makes the product a HardSwish, and from 1.32 on part of
the convolution before it. clip is a Clip, or Min of Max.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript.rewriter import RewriteRule

from rewrite_rules.conv_fusion.fold_rules import (
    Differs,
    Folding,
    FoldingRule,
    emit_constant,
)
from rewrite_rules.graph.nodes import input_of, producer
from rewrite_rules.graph.parameters import float_attribute

_ANY = {"_allow_other_inputs": True, "_allow_other_attributes": True}
# The sixth is written in float32.
_TOLERANCE = 1e-6
_CLIPS: dict[str, Callable[..., Any]] = {
    "clip": lambda op, y: op.Clip(y, **_ANY, _outputs=["upper"]),
    "min max": lambda op, y: op.Min(
        op.Max(y, **_ANY, _outputs=["lower"]), **_ANY, _outputs=["upper"]
    ),
}


class _Clipped(FoldingRule):
    """What both rules have: ``clip(y + 3, 0, 6)``."""

    def __init__(self, folding: Folding, clip: str, order: int, shift: int) -> None:
        super().__init__(folding)
        self._clip, self._order, self._shift = clip, order, shift

    def clipped(self, op: Any, y: Any, three: Any) -> Any:
        """Return the pattern of the clipped sum."""
        total = op.Add(*(y, three)[:: self._shift])
        return _CLIPS[self._clip](op, total)

    def find(self, out: ir.Value, **values: ir.Value) -> None:
        """Check the numbers, and that it computes in float32."""
        y = values["y"]
        if out.dtype != ir.DataType.FLOAT:
            raise Differs("it does not compute in float32")
        found = (self._number(values["three"], y), *self._ends(values))
        expected = (3.0, 0.0, 6.0)
        for number, wanted in zip(found, expected, strict=True):
            if number is None or abs(number - wanted) > _TOLERANCE:
                raise Differs("its numbers are not those of a hard swish")

    def _number(self, value: ir.Value | None, like: ir.Value) -> float | None:
        return self._folding.affines.number(value, like)

    def _ends(self, values: Mapping[str, ir.Value]) -> tuple[float | None, float | None]:
        """Return the least and the greatest value that the sum is clipped to."""
        upper, y = producer(values["upper"]), values["y"]
        if (lower := values.get("lower")) is not None:
            ends = [self._other(producer(lower)), self._other(upper)]
            return self._number(ends[0], y), self._number(ends[1], y)
        if "min" in upper.attributes or "max" in upper.attributes:
            infinity = 3e38
            low = float_attribute(upper, "min", -infinity)
            return low, float_attribute(upper, "max", infinity)
        return self._number(input_of(upper, 1), y), self._number(input_of(upper, 2), y)

    def _other(self, node: ir.Node) -> ir.Value | None:
        """Return the second operand of a Max or Min of two."""
        return node.inputs[1] if len(node.inputs) == 2 else None

    def hard_sigmoid(self, op: Any, y: ir.Value) -> ir.Value:
        """Emit the node."""
        gate = op.HardSigmoid(y, alpha=1 / 6, beta=0.5)
        gate.type, gate.shape = y.type, y.shape
        return gate  # type: ignore[no-any-return]


class HardSwish(_Clipped):
    """``y * clip(y + 3, 0, 6)`` -> ``6 * (y * HardSigmoid(y))``."""

    def pattern(self, op, y, three):  # type: ignore[no-untyped-def]
        return op.Mul(*(y, self.clipped(op, y, three))[:: self._order], _outputs=["out"])

    def rewrite(self, op: Any, y: ir.Value, out: ir.Value, **_: Any) -> ir.Value:
        """Emit both products."""
        node = producer(out)
        self._folding.fired(node, "a hard swish, by HardSigmoid")
        swish = op.Mul(y, self.hard_sigmoid(op, y))
        swish.type, swish.shape = out.type, out.shape
        six = emit_constant(op, np.array(6.0))
        return op.Mul(swish, six, _name=node.name)  # type: ignore[no-any-return]


class HardGate(_Clipped):
    """``clip(y + 3, 0, 6) / 6`` -> ``HardSigmoid(y)``."""

    def pattern(self, op, y, three, c):  # type: ignore[no-untyped-def]
        clipped = self.clipped(op, y, three)
        if self._order == 0:
            return op.Div(clipped, c, _outputs=["out"])
        return op.Mul(*(clipped, c)[:: self._order], _outputs=["out"])

    def find(self, out: ir.Value, **values: ir.Value) -> None:
        """Check the divisor as well."""
        super().find(out, **values)
        number = self._number(values["c"], values["y"])
        divisor = number if self._order == 0 else number and 1 / number
        if divisor is None or abs(divisor - 6) > 6 * _TOLERANCE:
            raise Differs("its numbers are not those of a hard sigmoid")

    def rewrite(self, op: Any, y: ir.Value, out: ir.Value, **_: Any) -> ir.Value:
        """Emit the node."""
        self._folding.fired(producer(out), "a hard sigmoid, by HardSigmoid")
        return self.hard_sigmoid(op, y)


def hard_swish_rules(folding: Folding) -> Iterator[RewriteRule]:
    """Make the rules of each spelling, in order of precedence."""
    for clip, order, shift in itertools.product(_CLIPS, (0, 1, -1), (1, -1)):
        yield HardGate.rule(folding, clip, order, shift)
    for clip, order, shift in itertools.product(_CLIPS, (1, -1), (1, -1)):
        yield HardSwish.rule(folding, clip, order, shift)
