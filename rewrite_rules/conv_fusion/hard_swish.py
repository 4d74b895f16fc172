# SPDX-License-Identifier: MIT
"""Hard swish and hard sigmoid as exporters spell them, by HardSigmoid.

    HardSwish     y * clip(y + 3, 0, 6)              -> 6 * (y * HardSigmoid(y))
    HardGate      clip(y + 3, 0, 6) / 6, or * (1/6)  -> HardSigmoid(y)

with HardSigmoid(y) = max(0, min(1, y / 6 + 0.5)). The factor of 6 meets the division behind
it, see :mod:`.fold_rules`. onnxruntime makes the product a HardSwish, and from 1.32 on part of
the convolution before it. clip is a Clip, or a Min and a Max.
"""

from __future__ import annotations

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
    like,
)
from rewrite_rules.graph.nodes import producer
from rewrite_rules.graph.parameters import float_attribute

# The sixth is written in float32.
_TOLERANCE = 1e-6
_CLIPS: Mapping[str, Callable[..., Any]] = {
    "inputs": lambda op, y, low, high: op.Clip(y, low, high),
    "attributes": lambda op, y, low, high: op.Clip(
        y, _allow_other_attributes=True, _outputs=["clip"]
    ),
    "min max": lambda op, y, low, high: op.Min(op.Max(y, low), high),
    "max min": lambda op, y, low, high: op.Max(op.Min(y, high), low),
}


class HardSwish(FoldingRule):
    """``y * clip(y + 3, 0, 6)`` -> ``6 * (y * HardSigmoid(y))``."""

    def __init__(self, folding: Folding, clip: str) -> None:
        super().__init__(folding)
        self._clip = clip

    def pattern(self, op, y, three, low, high):  # type: ignore[no-untyped-def]
        return op.Mul(y, self.clipped(op, y, three, low, high), _outputs=["out"])

    def clipped(self, op: Any, y: Any, three: Any, low: Any, high: Any) -> Any:
        """Return the pattern of the clipped sum."""
        return _CLIPS[self._clip](op, op.Add(y, three), low, high)

    def find(self, out: ir.Value, **values: ir.Value) -> None:
        """Check the numbers, and that it computes in float32."""
        if out.dtype != ir.DataType.FLOAT:
            raise Differs("it does not compute in float32")
        names = ("three", "low", "high")
        found = [self._number(values.get(name), values) for name in names]
        if "clip" in values:
            clip, infinity = producer(values["clip"]), 3e38
            found[1] = float_attribute(clip, "min", -infinity)
            found[2] = float_attribute(clip, "max", infinity)
        for number, wanted in zip(found, (3.0, 0.0, 6.0), strict=True):
            if number is None or abs(number - wanted) > _TOLERANCE:
                raise Differs("its numbers are not those of a hard swish")

    def _number(self, value: ir.Value | None, values: Mapping[str, ir.Value]) -> float | None:
        return self._folding.affines.number(value, values["y"])

    def hard_sigmoid(self, op: Any, y: ir.Value) -> ir.Value:
        """Emit the node."""
        return like(y, op.HardSigmoid(y, alpha=1 / 6, beta=0.5))

    def rewrite(self, op: Any, y: ir.Value, out: ir.Value, **_: Any) -> ir.Value:
        """Emit both products."""
        node = producer(out)
        self._folding.fired(node, "a hard swish, by HardSigmoid")
        swish = like(out, op.Mul(y, self.hard_sigmoid(op, y)))
        six = emit_constant(op, np.array(6.0))
        return op.Mul(swish, six, _name=node.name)  # type: ignore[no-any-return]


class HardGate(HardSwish):
    """``clip(y + 3, 0, 6) / 6`` -> ``HardSigmoid(y)``."""

    def __init__(self, folding: Folding, clip: str, op_type: str) -> None:
        super().__init__(folding, clip)
        self._op_type = op_type

    def pattern(self, op, y, three, low, high, c):  # type: ignore[no-untyped-def, override]
        clipped = self.clipped(op, y, three, low, high)
        return getattr(op, self._op_type)(clipped, c, _outputs=["out"])

    def find(self, out: ir.Value, **values: ir.Value) -> None:
        """Check the divisor as well."""
        super().find(out, **values)
        number = self._number(values["c"], values)
        divisor = number if self._op_type == "Div" else number and 1 / number
        if divisor is None or abs(divisor - 6) > 6 * _TOLERANCE:
            raise Differs("its numbers are not those of a hard sigmoid")

    def rewrite(self, op: Any, y: ir.Value, out: ir.Value, **_: Any) -> ir.Value:
        """Emit the node."""
        self._folding.fired(producer(out), "a hard sigmoid, by HardSigmoid")
        return self.hard_sigmoid(op, y)


def hard_swish_rules(folding: Folding) -> Iterator[RewriteRule]:
    """Make the rules of each spelling, in order of precedence."""
    for op_type in ("Mul", "Div"):
        for clip in _CLIPS:
            yield from HardGate.rule(folding, clip, op_type).commute()
    for clip in _CLIPS:
        yield from HardSwish.rule(folding, clip).commute()
