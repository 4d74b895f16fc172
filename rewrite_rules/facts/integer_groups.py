# SPDX-License-Identifier: MIT
"""Which operators of a QDQ graph onnxruntime computes in integers.

    DequantizeLinear* -> operator -> Relu or Clip? -> QuantizeLinear*

It makes one operator of integers of such a group; a Relu or Clip disappears before, if the
codes end where it does. Copies disappear, too, and Q and DQ are taken past data movement, so
that either may stand between.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from rewrite_rules.graph.int8_moves import MOVES
from rewrite_rules.graph.nodes import (
    dequantizer,
    input_of,
    is_dequantize_linear,
    is_quantize_linear,
)
from rewrite_rules.graph.parameters import constant, scalar

_EPSILON = float(np.finfo(np.float32).eps)  # as in onnxruntime's clip_quantizelinear.cc


def computes_in_integers(node: ir.Node) -> bool:
    """Whether all that a node reads is dequantised, and all that reads it quantises.

    Data movement counts as what reads its result.
    """
    if _moves(node):
        readers = [*_readers(node.outputs[0])]
        return bool(readers) and all(
            reader is not None and not _moves(reader) and computes_in_integers(reader)
            for reader in readers
        )
    # A bias is quantised by onnxruntime, if it is not yet.
    read = [value for value in node.inputs if value is not None and constant(value) is None]
    codes = [maker.inputs[0] for maker in map(dequantized, read) if maker is not None]
    # Outputs that nothing reads, or that were left out, say nothing of the group.
    written = [value for value in node.outputs if value.uses() or value.is_graph_output()]
    return (
        len(codes) == len(read)
        and any(constant(value) is None for value in codes)
        and bool(written)
        and all(map(_is_quantised, written))
    )


def dequantized(value: ir.Value | None) -> ir.Node | None:
    """Return the DequantizeLinear behind a value and what copies or moves it; else None."""
    seen = set[ir.Value]()  # a damaged graph may have a cycle
    while value is not None and value not in seen:
        seen.add(value)
        node = value.producer()
        if node is None or is_dequantize_linear(node) or not _moves(node):
            break
        value = node.inputs[0]
    return dequantizer(value)


def _moves(node: ir.Node) -> bool:
    """Whether a node goes as a copy, or Q and DQ are taken past it."""
    if node.domain or not node.inputs or node.inputs[0] is None:
        return False
    return node.op_type in MOVES or node.op_type in ("Dropout", "Identity")


def _readers(value: ir.Value) -> Iterator[ir.Node | None]:
    """Yield what reads a value or what is moved of it; None for a caller."""
    found, seen = [value], {value}
    for each in found:  # grows
        if each.is_graph_output():
            yield None
        for node, index in each.uses():
            if index or not _moves(node):
                yield node
            elif node.outputs[0] not in seen:
                found.append(node.outputs[0])
                seen.add(node.outputs[0])


def _is_quantised(value: ir.Value) -> bool:
    """Whether nothing but QuantizeLinear reads a value, or a Relu or Clip that goes."""
    readers = [*_readers(value)]
    clip = readers[0] if len(readers) == 1 else None
    if clip is None or clip.domain or clip.op_type not in ("Clip", "Relu"):
        return bool(readers) and all(
            node is not None and is_quantize_linear(node) for node in readers
        )
    behind = [*_readers(clip.outputs[0])]
    return bool(behind) and all(
        node is not None and is_quantize_linear(node) and _ends_in(node, clip)
        for node in behind
    )


def _ends_in(quantize: ir.Node, clip: ir.Node) -> bool:
    """Whether the codes of a QuantizeLinear end where a Relu or Clip does, or before."""
    scale, zero_point = (scalar(input_of(quantize, index), math.inf) for index in (1, 2))
    codes = constant(input_of(quantize, 2))
    ends: list[float | None] = [0.0, math.inf]
    if clip.op_type == "Clip":
        given = [input_of(clip, index) for index in (1, 2)]
        ends = [
            no_end if value is None else scalar(value, math.inf)
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
