# SPDX-License-Identifier: MIT
"""Gelu by tanh, in whatever spelling, as one node.

    0.5 * x * (1 + tanh(0.79788456 * (x + 0.044715 * x**3)))
    0.5 * x * (1 + tanh(0.79788456 * x * (1 + 0.044715 * x**2)))
        -> FastGelu(x)

Powers are ``Pow`` or products, and factors and terms stand in any order. onnxruntime makes
Gelu and QuickGelu of every spelling with Erf and Sigmoid itself, but leaves these.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import onnx_ir as ir
from onnxscript.rewriter import MatchContext, MatchResult, RewriteRuleClassBase
from onnxscript.rewriter.pattern import OrValue

from rewrite_rules.graph.nodes import label, producer
from rewrite_rules.graph.rule_set import DispatchingRuleSet
from rewrite_rules.remarks import Remarks

_MICROSOFT = "com.microsoft"
_ROOT = 0.79788456  # of 2 / pi
_CUBIC = 0.044715
# From Tanh to the end: the sum with 1, and two products.
_STEPS = 3


def fuse_activations(model: ir.Model, remarks: Remarks) -> None:
    """Fuse in place; a model without Tanh costs one look at each node."""
    near, ends = set[ir.Node](), [n for n in model.graph.all_nodes() if n.op_type == "Tanh"]
    for _ in range(_STEPS):
        ends = [reader for node in ends for reader in node.outputs[0].consumers()]
        near.update(ends)
    if near:
        rules = [TanhGelu.rule(remarks, *end) for end in itertools.product(_ENDS, (1, -1))]
        DispatchingRuleSet(rules, near.__contains__).apply_to_model(model)


class TanhGelu(RewriteRuleClassBase):
    """``0.5 * x * (1 + tanh(...)) -> FastGelu(x)``."""

    def __init__(self, remarks: Remarks, factors: Callable[..., Any], order: int) -> None:
        super().__init__()
        self._remarks = remarks
        self._factors = factors
        self._order = order

    def pattern(self, op, x):  # type: ignore[no-untyped-def]
        square = OrValue([op.Pow(x, 2.0), op.Mul(x, x)])
        cube = OrValue([op.Pow(x, 3.0), _either(op.Mul, square, x)])
        scaled = OrValue(
            [_either(op.Mul, _CUBIC, square), _either(op.Mul, _either(op.Mul, _CUBIC, x), x)]
        )
        inner = OrValue(
            [
                _either(op.Mul, _ROOT, _either(op.Add, x, _either(op.Mul, _CUBIC, cube))),
                _either(op.Mul, _either(op.Mul, _ROOT, x), _either(op.Add, 1.0, scaled)),
            ]
        )
        factors = self._factors(op, x, _either(op.Add, 1.0, op.Tanh(inner)))
        return op.Mul(*factors[:: self._order], _outputs=["out"])

    def check(  # type: ignore[override]
        self, context: MatchContext, x: ir.Value, **_: object
    ) -> MatchResult:
        """Check the type, and that callers may not feed the constants."""
        result = MatchResult()
        if x.dtype != ir.DataType.FLOAT:
            return result.fail("it does not compute in float32", x)
        read = [value for node in context.nodes for value in node.inputs if value is not x]
        if any(value is not None and value.is_graph_input() for value in read):
            return result.fail("a caller may feed a constant", x)
        return result

    def rewrite(self, op: Any, x: ir.Value, out: ir.Value) -> Any:
        """Emit the node."""
        node = producer(out)
        self._remarks.fired(label(node), "FastGelu")
        return op.FastGelu(x, _domain=_MICROSOFT, _name=node.name)


def _either(make: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    """A sum or product of two operands, in either order."""
    return OrValue([make(a, b), make(b, a)])


# The factors of the last product, made of x, 1 + tanh and a half.
_ENDS: tuple[Callable[..., Any], ...] = (
    lambda op, x, one: (_either(op.Mul, 0.5, x), one),
    lambda op, x, one: (_either(op.Mul, x, one), 0.5),
    lambda op, x, one: (_either(op.Mul, 0.5, one), x),
)
