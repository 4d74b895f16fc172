# SPDX-License-Identifier: MIT
"""Hard swish and hard sigmoid as exporters spell them, by HardSigmoid.

    y * clip(y + 3, 0, 6) / 6, or * (1/6)  -> y * HardSigmoid(y)
    clip(y + 3, 0, 6) / 6, or * (1/6)      -> HardSigmoid(y)

with HardSigmoid(y) = max(0, min(1, y / 6 + 0.5)). onnxruntime makes the product a HardSwish,
and from 1.32 on part of the convolution before it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import onnx_ir as ir
from onnxscript.rewriter import RewriteRule

from rewrite_rules.conv_fusion.fold_rules import Differs, Folding, FoldingRule
from rewrite_rules.conv_fusion.linear import like
from rewrite_rules.graph.nodes import producer

# The sixth is written in float32, or as a decimal number.
_TOLERANCE = {"sixth": 1e-6}
_NUMBERS = {"three": 3.0, "low": 0.0, "high": 6.0, "sixth": 6.0}


class HardSwish(FoldingRule):
    """One spelling of a hard swish, or of a hard sigmoid."""

    def __init__(self, folding: Folding, kind: str, divided: str) -> None:
        super().__init__(folding)
        self._kind, self._divided = kind, divided

    def pattern(self, op, y, three, low, high, sixth):  # type: ignore[no-untyped-def]
        value = op.Clip(op.Add(y, three), low, high)
        if self._kind == "swish":
            value = op.Mul(y, value)
        return getattr(op, self._divided)(value, sixth, _outputs=["out"])

    def find(self, out: ir.Value, **values: ir.Value) -> None:
        """Check the numbers, and that it computes in float32."""
        if out.dtype != ir.DataType.FLOAT:
            raise Differs("it does not compute in float32")
        number, y = self._folding.affines.number, values["y"]
        found = {name: number(values.get(name), y) for name in _NUMBERS}
        if self._divided == "Mul" and found["sixth"]:
            found["sixth"] = 1 / found["sixth"]
        for name, each in found.items():
            most = _TOLERANCE.get(name, 0.0) * _NUMBERS[name]
            if each is None or not abs(each - _NUMBERS[name]) <= most:
                raise Differs("its numbers are not those of a hard swish")

    def rewrite(self, op: Any, y: ir.Value, out: ir.Value, **_: Any) -> Any:
        """Emit the hard sigmoid, and the product of a hard swish."""
        node = producer(out)
        self._folding.fired(node, f"a hard {self._kind}, by HardSigmoid")
        gate = like(y, op.HardSigmoid(y, alpha=1 / 6, beta=0.5))
        return gate if self._kind == "sigmoid" else op.Mul(y, gate, _name=node.name)


def hard_swish_rules(folding: Folding) -> Iterator[RewriteRule]:
    """Make the rules of each spelling, in order of precedence."""
    for kind, divided in itertools.product(("swish", "sigmoid"), ("Mul", "Div")):
        yield from HardSwish.rule(folding, kind, divided).commute()
