# SPDX-License-Identifier: MIT
"""Bridges between regions that meet: nothing is quantised to 8 bits on the way.

    Q16 -> DQ16 -> Q8 -> DQ8 -> Q16' -> DQ16'    ->    Q16 -> DQ16'

where both 16-bit pairs have one grid. The values were rounded to 8 bits between, and are not
any more: more accurate, and not the same bits. So it is done only where it is asked for.
"""

from __future__ import annotations

__all__ = ["bridge_regions"]

from collections.abc import Callable

import onnx_ir as ir

from rewrite_rules.graph.nodes import label, remove_node
from rewrite_rules.graph.quantize_linear import is_dequantize_linear, is_quantize_linear
from rewrite_rules.graph.refusal import Refusal
from rewrite_rules.mixed_precision_boundaries.quantization_grid import QuantizationGrid
from rewrite_rules.mixed_precision_boundaries.quantized_graph import read_grid
from rewrite_rules.remarks import PassContext


def bridge_regions(model: ir.Model, context: PassContext) -> None:
    """Bridge each exit that an entry of the same grid follows.

    Args:
        model: Changed in place.
        context: Takes a remark for each bridge.
    """
    for graph in list(model.graphs()):
        for node in list(graph):
            if node.graph is not graph or not is_quantize_linear(node):
                continue
            codes = _codes_before(node)
            if codes is not None and not node.outputs[0].is_graph_output():
                _bridge(node, codes, context)


def _codes_before(node: ir.Node) -> ir.Value | None:
    """The 16-bit codes that a QuantizeLinear computes again, over 8 bits."""
    wide = _grid(node)
    if wide is None or wide.bits != 16:
        return None
    second = _step_back(node, is_dequantize_linear)
    narrow = _step_back(second, is_quantize_linear)
    first = _step_back(narrow, is_dequantize_linear)
    start = _step_back(first, is_quantize_linear)
    if second is None or narrow is None or first is None or start is None:
        return None
    grids = [_grid(step) for step in (start, first, narrow, second)]
    if grids[0] != wide or grids[1] != wide or grids[2] is None or grids[2] != grids[3]:
        return None
    return start.outputs[0] if grids[2].bits == 8 else None


def _step_back(node: ir.Node | None, kind: Callable[[ir.Node], bool]) -> ir.Node | None:
    value = node.inputs[0] if node is not None and node.inputs else None
    producer = None if value is None else value.producer()
    return producer if producer is not None and kind(producer) else None


def _grid(node: ir.Node) -> QuantizationGrid | None:
    try:
        return read_grid(node)
    except Refusal:
        return None


def _bridge(node: ir.Node, codes: ir.Value, context: PassContext) -> None:
    source = node.inputs[0]
    context.remarks.fired(label(node), f"reads {codes.name!r}, which stayed in 16 bits")
    node.outputs[0].replace_all_uses_with(codes)
    remove_node(node)
    # What was only there for it.
    while source is not None and not source.uses() and not source.is_graph_output():
        producer = source.producer()
        if producer is None:
            break
        if not (is_quantize_linear(producer) or is_dequantize_linear(producer)):
            break
        source = producer.inputs[0]
        remove_node(producer)
