# SPDX-License-Identifier: MIT
"""Which operators of a QDQ graph onnxruntime computes in integers.

    DequantizeLinear* -> operator -> Relu or Clip? -> QuantizeLinear*

It makes one operator of integers of such a group; the Relu or Clip disappears.
"""

from __future__ import annotations

import onnx_ir as ir

from rewrite_rules.graph.nodes import dequantizer, is_quantize_linear, made_by
from rewrite_rules.graph.parameters import constant, source_of


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
    """Whether nothing but QuantizeLinear reads a value, or one Relu or Clip behind it."""
    readers = list(value.consumers())
    if len(readers) == 1 and made_by(readers[0].outputs[0], "Clip", "Relu"):
        if value.is_graph_output():
            return False
        value = readers[0].outputs[0]
        readers = list(value.consumers())
    is_read = bool(readers) and not value.is_graph_output()
    return is_read and all(map(is_quantize_linear, readers))
