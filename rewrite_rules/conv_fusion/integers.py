# SPDX-License-Identifier: MIT
"""Integer convolutions in the forms that have fast kernels.

    UnsignedWeight     ConvInteger(q, w, zx, zw)   -> ConvInteger(q, w + 128, zx, zw + 128)
    FloatConvolution   Cast(ConvInteger(q, w, zx, zw)) * (sx * sw)   -> Conv(x, w - zw) * sw

with ``q, sx, zx = DynamicQuantizeLinear(x)``, as quantize_dynamic writes it. onnxruntime has
no fast kernel for a signed weight. Where each channel has filters of its own, integers are
slower than floats all the same: an option, as numbers change where x is not rounded. The
product with sw folds, see :mod:`.fold_rules`. Part of the time (onnxruntime 1.32, AVX512-VNNI,
processor time of one thread):

    unsigned of signed, C x M x k   24 x 24 x 3: .14   64 x 256 x 1: .27   256 x 256 x 3: .24
    float of unsigned, C x k        8 x 3: .65   32 x 3: .29   256 x 5: .10   960 x 5: .05
    the same of all channels        24 x 24 x 3: 1.33   64 x 256 x 1: 1.03   3 x 32 x 3: .83
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from rewrite_rules.conv_fusion.affine import ANY
from rewrite_rules.conv_fusion.fold_rules import Differs, Folding, FoldingRule
from rewrite_rules.conv_fusion.linear import Linear, Weight, like
from rewrite_rules.graph.nodes import input_of, made_by, producer
from rewrite_rules.graph.parameters import constant
from rewrite_rules.remarks import Refusal

_REMARKS = {
    "keep": ("ORP656", "slow_kernels=float makes it a Conv, in .02 to .9 of the time"),
    "float": ("ORP657", "its result is not multiplied by the scale of its input alone"),
}


class UnsignedWeight(FoldingRule):
    """A signed weight and its zero point, both 128 more, without a sign."""

    rounds = False
    candidate = "out"

    def __init__(self, folding: Folding, slow_kernels: str) -> None:
        super().__init__(folding)
        self._remark = _REMARKS[slow_kernels]

    def pattern(self, op, q, w):  # type: ignore[no-untyped-def]
        return op.ConvInteger(q, w, **ANY, _outputs=["out"])

    def find(self, out: ir.Value, **_: ir.Value) -> Weight:
        """Return the weight."""
        weight = self._folding.linears.read(producer(out)).weight
        if (tensor := weight.value.const_value) and tensor.dtype == ir.DataType.INT8:
            return weight
        if weight.is_depthwise:
            raise Refusal(*self._remark)
        raise Differs("its weight has no sign")

    def rewrite(self, op: Any, q: ir.Value, out: ir.Value, **_: Any) -> ir.Value:
        """Emit the same with other constants."""
        node, weight, linears = producer(out), self._found, self._folding.linears
        zero = constant(input_of(node, 3)) or ir.tensor(np.int8(0), name="zero")
        tensors = (weight.value.const_value, zero)
        unsigned = [linears.new_unsigned(weight.graph, tensor) for tensor in tensors]
        self._folding.fired(node, "its weight has no sign any more: kernels are fast")
        inputs = (q, unsigned[0], input_of(node, 2), unsigned[1])
        return like(out, op.ConvInteger(*inputs, **node.attributes, _name=node.name))


class FloatConvolution(FoldingRule):
    """A ConvInteger of channels that each have a filter."""

    rounds = False
    candidate = "integers"

    def pattern(self, op, q, w, s):  # type: ignore[no-untyped-def]
        integers = op.ConvInteger(q, w, **ANY, _outputs=["integers"])
        return op.Mul(op.Cast(integers, to=ir.DataType.FLOAT), s, _outputs=["out"])

    def find(
        self, out: ir.Value, **values: ir.Value
    ) -> tuple[Linear, ir.Value, list[ir.Value]]:
        """Return the convolution, x, and sw, if there is one."""
        node = producer(values["integers"])
        linear = self._folding.linears.read(node)
        if not linear.weight.is_depthwise:
            raise Differs("its filters read several channels: integers are as fast")
        source = made_by(values["q"], "DynamicQuantizeLinear")
        if source is None or source.inputs[0] is None:
            raise Refusal(
                "ORP657", "its input is given in integers: there are no floats to compute with"
            )
        codes, scale, zero = source.outputs
        if values["q"] is not codes or input_of(node, 2) is not zero:
            raise Refusal(
                "ORP657", "its zero point is not the one that its input is quantised with"
            )
        product = made_by(values["s"], "Mul")
        factors = [each for each in product.inputs if each] if product else [values["s"]]
        if factors.count(scale) != 1:
            raise Refusal(*_REMARKS["float"])
        factors.remove(scale)
        return linear, source.inputs[0], factors

    def rewrite(self, op: Any, out: ir.Value, **_: Any) -> ir.Value:
        """Emit the convolution, and the product."""
        linear, x, factors = self._found
        self._folding.fired(linear.node, "a Conv in float: numbers change")
        result = like(out, self._folding.linears.write(op, linear, x))
        for factor in factors:
            result = like(out, op.Mul(result, factor))
        return result
