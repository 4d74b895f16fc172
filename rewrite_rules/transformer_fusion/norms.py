# SPDX-License-Identifier: MIT
"""Root-mean-square norms, as exporters spell them, as one node.

    x * (1 / sqrt(mean(x**2, -1) + epsilon)) * weight
        -> SimplifiedLayerNormalization(x, weight)
    SimplifiedLayerNormalization(a + b, weight)
        -> SkipSimplifiedLayerNormalization(a, b, weight), and a + b from its last output

Norms of other types than float32 stay, and LayerNormalization: onnxruntime makes one node of
its parts itself, and SkipLayerNormalization is slower on a CPU than the sum and the norm.
"""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir
from onnxscript.rewriter import MatchContext, MatchResult
from onnxscript.rewriter.pattern import OrValue

from rewrite_rules.graph.nodes import label, producer
from rewrite_rules.graph.parameters import constant, constant_ints, int_attribute, scalar
from rewrite_rules.transformer_fusion.layer_rule import LayerRule

_MICROSOFT = "com.microsoft"


class RmsNorm(LayerRule):
    """``x / sqrt(mean(x**2) + epsilon) * weight -> SimplifiedLayerNormalization``."""

    def pattern(self, op, x, weight, epsilon):  # type: ignore[no-untyped-def]
        mean = op.ReduceMean(
            op.Pow(x, 2.0),
            _allow_other_inputs=True,
            _allow_other_attributes=True,
            _outputs=["mean"],
        )
        root = op.Sqrt(op.Add(mean, epsilon))
        # onnxscript 0.7 commutes only those alternatives that have a tag.
        forms = [op.Reciprocal(root), op.Div(1.0, root)]
        inverse = OrValue(forms, tag_var="inverse", tag_values=[0, 1])
        return op.Mul(op.Mul(x, inverse), weight, _outputs=["out"])

    def check(  # type: ignore[override]
        self,
        context: MatchContext,
        x: ir.Value,
        weight: ir.Value,
        epsilon: ir.Value,
        mean: ir.Value,
        out: ir.Value,
        **_: object,
    ) -> MatchResult:
        """Check the axis, the shapes of the constants and the types."""
        result = MatchResult()
        small, reduce, dims = scalar(epsilon, math.inf), producer(mean), self._facts.dims(x)
        if not dims or self._facts.dims(weight) != dims[-1:] or constant(weight) is None:
            return result.fail("the weight is not a constant for the last axis", weight)
        if small is None or not 0 <= small < math.inf:
            return result.fail("epsilon is not a constant", epsilon)
        if self._facts.shape(out) != dims:
            return result.fail("a constant adds axes", out)
        attribute = reduce.attributes.get("axes")
        stored = constant_ints(reduce.inputs[1]) if len(reduce.inputs) > 1 else None
        axes = [*(stored or ())] if attribute is None else [*attribute.as_ints()]
        last = (-1, len(dims or ()) - 1)
        keeps = int_attribute(reduce, "keepdims", 1) == 1
        if len(axes) != 1 or axes[0] not in last or not keeps:
            return result.fail("the mean is not over the last axis", reduce)
        if x.dtype != ir.DataType.FLOAT:
            return result.fail("it does not compute in float32", x)
        return result

    def rewrite(
        self,
        op: Any,
        x: ir.Value,
        weight: ir.Value,
        epsilon: ir.Value,
        out: ir.Value,
        **_: object,
    ) -> Any:
        """Emit the node."""
        node, small = producer(out), scalar(epsilon, math.inf)
        self._remarks.fired(label(node), "SimplifiedLayerNormalization")
        attributes = {"axis": -1, "epsilon": small, "stash_type": 1, "_name": node.name}
        return op.SimplifiedLayerNormalization(x, weight, **attributes)


class SkipNorm(LayerRule):
    """``SimplifiedLayerNormalization(a + b)``, with the sum as a second result."""

    def pattern(self, op, a, b, weight):  # type: ignore[no-untyped-def]
        total = op.Add(a, b, _outputs=["total"])
        others = {"_allow_other_inputs": True, "_allow_other_attributes": True}
        normal = op.SimplifiedLayerNormalization(total, weight, **others, _outputs=["normal"])
        return normal, total

    def check(  # type: ignore[override]
        self,
        context: MatchContext,
        a: ir.Value,
        b: ir.Value,
        weight: ir.Value,
        normal: ir.Value,
        **_: object,
    ) -> MatchResult:
        """Check that the kernel takes the sizes, and that only the norm is read."""
        result, node = MatchResult(), producer(normal)
        if normal.dtype != ir.DataType.FLOAT:
            return result.fail("it does not compute in float32", node)
        if int_attribute(node, "axis", -1) != -1 or int_attribute(node, "stash_type", 1) != 1:
            return result.fail("the norm is not over the last axis in float32", node)
        if any(value.uses() or value.is_graph_output() for value in node.outputs[1:]):
            return result.fail("its mean or deviation is read", node)
        # The kernel's results have the shape of its first input.
        rows = self._facts.match(a, "B S D") or self._facts.match(a, "N D")
        if rows is None or self._facts.dims(a) != self._facts.dims(b):
            return result.fail("the terms are not known to have one shape [B, S, D]", node)
        if self._facts.match(weight, "D", **rows) is None:
            return result.fail("the weight is not for the last axis", node)
        return result

    def rewrite(
        self, op: Any, a: ir.Value, b: ir.Value, normal: ir.Value, **_: object
    ) -> tuple[Any, Any]:
        """Emit the node; its second and third results are for training."""
        node = producer(normal)
        self._remarks.fired(label(node), "SkipSimplifiedLayerNormalization")
        epsilon = node.attributes.get_float("epsilon", 1e-5)
        made = {"_outputs": 4, "_domain": _MICROSOFT, "_name": node.name}
        inputs = (a, b, *node.inputs[1:])
        results = op.SkipSimplifiedLayerNormalization(*inputs, epsilon=epsilon, **made)
        return results[0], results[3]
