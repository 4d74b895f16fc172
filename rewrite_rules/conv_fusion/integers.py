# SPDX-License-Identifier: MIT
"""Integer convolutions in the form that has a fast kernel.

    UnsignedWeight   ConvInteger(q, w, zx, zw)   -> ConvInteger(q, w + 128, zx, zw + 128)

onnxruntime has no fast kernel for a signed weight, which quantize_dynamic writes. Part of the
time (onnxruntime 1.32, AVX512-VNNI, processor time of one thread):

    C x M x k   24 x 24 x 3: .14   64 x 256 x 1: .27   256 x 256 x 3: .24
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from rewrite_rules.conv_fusion.affine import ANY
from rewrite_rules.conv_fusion.fold_rules import Differs, FoldingRule
from rewrite_rules.conv_fusion.linear import like
from rewrite_rules.graph.nodes import input_of, owner, producer
from rewrite_rules.graph.parameters import require_constant


class UnsignedWeight(FoldingRule):
    """A signed weight and its zero point, both 128 more, without a sign."""

    avoids_steps = False
    candidate = "out"

    def pattern(self, op, q, w):  # type: ignore[no-untyped-def]
        return op.ConvInteger(q, w, **ANY, _outputs=["out"])

    def find(self, out: ir.Value, **values: ir.Value) -> list[ir.TensorProtocol]:
        """Return the weight and its zero point."""
        node = producer(out)
        _, weight = require_constant(values["w"], "weight")
        if weight.dtype != ir.DataType.INT8:
            raise Differs("its weight has no sign")
        if (zero := input_of(node, 3)) is None:
            return [weight, ir.tensor(np.int8(0), name="zero")]
        return [weight, require_constant(zero, "zero point")[1]]

    def rewrite(self, op: Any, q: ir.Value, w: ir.Value, out: ir.Value, **_: Any) -> ir.Value:
        """Emit the same with other constants."""
        node, graph = producer(out), owner(w)
        assert isinstance(graph, ir.Graph)
        unsigned = [self._folding.linears.new_unsigned(graph, each) for each in self._found]
        self._folding.fired(node, "its weight has no sign any more: kernels are fast")
        inputs = (q, unsigned[0], input_of(node, 2), unsigned[1])
        return like(out, op.ConvInteger(*inputs, **node.attributes, _name=node.name))
