# SPDX-License-Identifier: MIT
"""Which operators of a QDQ graph onnxruntime computes in integers.

    DequantizeLinear* -> operator -> Relu or Clip? -> QuantizeLinear*

It makes one operator of integers of such a group; a Relu or Clip disappears before, if the
codes end where it does.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from rewrite_rules.graph.nodes import dequantizer, input_of, is_quantize_linear, made_by
from rewrite_rules.graph.parameters import constant, source_of

_EPSILON = float(np.finfo(np.float32).eps)  # as in onnxruntime's clip_quantizelinear.cc


def computes_in_integers(node: ir.Node) -> bool:
    """Whether all that a node reads is dequantised, and all that reads it quantises."""
    # A bias is quantised by onnxruntime, if it is not yet.
    read = [value for value in node.inputs if value is not None and constant(value) is None]
    makers = [dequantizer(source_of(value)) for value in read]
    codes = [maker.inputs[0] for maker in makers if maker is not None]
    # Outputs that nothing reads, or that were left out, say nothing of the group.
    written = [value for value in node.outputs if value.uses() or value.is_graph_output()]
    return (
        len(codes) == len(read)
        and any(constant(value) is None for value in codes)
        and bool(written)
        and all(map(_is_quantised, written))
    )


def _is_quantised(value: ir.Value) -> bool:
    """Whether nothing but QuantizeLinear reads a value, or a Relu or Clip that goes."""
    readers = [*value.consumers()]
    if value.is_graph_output() or not readers:
        return False
    if all(map(is_quantize_linear, readers)):
        return True
    clip, result = readers[0], readers[0].outputs[0]
    if len(readers) > 1 or not made_by(result, "Clip", "Relu") or result.is_graph_output():
        return False
    behind = [*result.consumers()]
    return bool(behind) and all(is_quantize_linear(q) and _ends_in(q, clip) for q in behind)


def _ends_in(quantize: ir.Node, clip: ir.Node) -> bool:
    """Whether the codes of a QuantizeLinear end where a Relu or Clip does, or before."""
    scale, zero_point = (_number(input_of(quantize, index)) for index in (1, 2))
    codes = constant(input_of(quantize, 2))
    ends: list[float | None] = [0.0, math.inf]
    if clip.op_type == "Clip":
        given = [input_of(clip, index) for index in (1, 2)]
        ends = [
            no_end if value is None else _number(value)
            for value, no_end in zip(given, (-math.inf, math.inf), strict=True)
        ]
    least, greatest = ends
    if scale is None or zero_point is None or least is None or greatest is None:
        return False
    if codes is None or not codes.dtype.is_integer() or clip.attributes:  # of old opsets
        return False
    of_codes = codes.dtype.min, codes.dtype.max
    low, high = ((float(end) - zero_point) * scale for end in of_codes)
    return least - low <= _EPSILON and high - greatest <= _EPSILON


def _number(value: ir.Value | None) -> float | None:
    """Return a constant of one element; else None."""
    tensor = constant(value)
    return float(tensor.numpy().item()) if tensor is not None and tensor.size == 1 else None
