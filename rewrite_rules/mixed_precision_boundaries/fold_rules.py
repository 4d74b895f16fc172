# SPDX-License-Identifier: MIT
"""QuantizeLinear behind DequantizeLinear -> fewer nodes, by four identities.

    kept codes     DQ(Q(DQ(codes, a), b), c)                  ->  DQ(codes, c)
    kept values    DQ(Q(DQ(codes, a), b), c)                  ->  DQ(codes, a)
    bare codes     Q(DQ(codes, a), b)                         ->  Identity(codes)
    bridge         DQ(Q(DQ(Q(DQ(codes, a), b), b), a), a)     ->  DQ(codes, a)

``a``, ``b`` and ``c`` are the nodes' own grids. The first three change no bit: all codes of
``a`` go through the operators to decide them (:meth:`.QuantizationGrid.keeps_codes`). A bridge
rounds to 8 bits between two regions of 16 bits; without it numbers are more accurate, and not
the same, so it goes on request only.

Nodes are changed where they stand, and may stand in several graphs. Others may read the values
between: what nothing reads is removed at the end. No DequantizeLinear reads the values of
another one, since onnxruntime fuses operators with a DequantizeLinear of their own.
"""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common

from rewrite_rules.graph.nodes import (
    dequantizer,
    input_of,
    is_dequantize_linear,
    is_quantize_linear,
    label,
)
from rewrite_rules.mixed_precision_boundaries.quantization_grid import QuantizationGrid
from rewrite_rules.mixed_precision_boundaries.quantized_graph import read_grid
from rewrite_rules.remarks import PassContext, Refusal


def fold_pairs(
    model: ir.Model, target: str, context: PassContext, *, merge: bool = False
) -> None:
    """Fold in place, subgraphs included; for ``"qnn"``, keep pairs that convert between types.

    Bridges, which change numbers, are folded on ``merge``.
    """
    folder = _Folder(target, context, merge)
    holders = [model.graph, *(function.graph for function in model.functions.values())]
    folded = [folder.fold(node) for holder in holders for node in holder.all_nodes()]
    if any(folded):
        onnx_ir.passes.common.RemoveUnusedNodesPass()(model)


class _Folder:
    """Folds one node after the other; reads each grid once."""

    def __init__(self, target: str, context: PassContext, merge: bool) -> None:
        self._target = target
        self._remarks = context.remarks
        self._merge = merge
        self._grids: dict[ir.Node, QuantizationGrid] = {}

    def fold(self, last: ir.Node) -> bool:
        """Fold what ends in a node, by the first identity that applies."""
        through = _quantizer(last) if is_dequantize_linear(last) else last
        first = None if through is None else _dequantizer_before(through)
        if through is None or first is None or len(last.outputs) != 1:
            return False
        with self._remarks.at(label(last)):
            try:
                outcome = (
                    self._fold_codes(first, last)
                    if through is last
                    else self._fold_values(first, through, last)
                )
            except Refusal as refusal:
                self._remarks.refused(label(last), f"not folded: {refusal}")
                return False
        if outcome:
            self._remarks.fired(label(through), outcome)
        return bool(outcome)

    def _fold_values(self, first: ir.Node, through: ir.Node, last: ir.Node) -> str:
        """Return which identity made ``last`` read earlier codes; nothing where none did."""
        if self._merge and (wide := self._before_bridge(first, through, last)) is not None:
            last.replace_input_with(0, wide.inputs[0])
            return f"reads {_codes(wide).name!r}, which stayed in 16 bits"
        # Where ``last`` has no zero point, its type has to be known.
        coarse, fine, after = map(self._grid, (first, through, last))
        if coarse.keeps_codes(fine):
            # Of any number of pairs with equal parameters one is left.
            last.replace_input_with(0, first.inputs[0])
            return f"gives back each code of {label(first)!r}: folded"
        # On qnn, DQ -> Q is one Convert: operators behind it have no kernels for two types.
        converts = self._target == "qnn" and coarse.dtype != fine.dtype
        if converts or not coarse.keeps_values(fine, after):
            return ""
        # For instance a 16-bit grid that refines the 8-bit grid before it: on CPUs, operators
        # of 16 bits compute in float on whatever DequantizeLinear gives them.
        last.domain = first.domain
        last.resize_inputs(len(first.inputs))
        for index, value in enumerate(first.inputs):
            last.replace_input_with(index, value)
        last.attributes.clear()
        last.attributes.update(first.attributes)
        del self._grids[last]
        return f"{fine} gives back each value of {label(first)!r}, {coarse}: folded"

    def _before_bridge(
        self, narrow: ir.Node, through: ir.Node, last: ir.Node
    ) -> ir.Node | None:
        """The DequantizeLinear of the 16-bit grid of the last pair, with 8 bits between."""
        quantize = _quantizer(narrow)
        wide = None if quantize is None else _dequantizer_before(quantize)
        if quantize is None or wide is None:
            return None
        try:
            of_wide, of_narrow = self._grid(wide), self._grid(narrow)
            others = [self._grid(node) for node in (quantize, through, last)]
        except Refusal:
            return None  # reported where the pair of that node ends
        bits = of_wide.bits, of_narrow.bits
        return wide if bits == (16, 8) and others == [of_narrow, of_wide, of_wide] else None

    def _fold_codes(self, first: ir.Node, last: ir.Node) -> str:
        """Give readers of codes, a caller or an integer operator, the codes themselves."""
        out = last.outputs[0]
        if not out.is_graph_output() and all(map(is_dequantize_linear, out.consumers())):
            return ""  # folded where they are dequantised, if at all
        if not self._grid(first).keeps_codes(self._grid(last)):
            return ""
        # Behind an Identity, no operator would be fused with its DequantizeLinear.
        for reader, index in [*out.uses()]:
            if is_dequantize_linear(reader):
                reader.replace_input_with(index, first.inputs[0])
        last.domain, last.op_type = "", "Identity"
        last.attributes.clear()
        last.resize_inputs(1)
        last.replace_input_with(0, first.inputs[0])
        return f"gives back each code of {label(first)!r}: folded"

    def _grid(self, node: ir.Node) -> QuantizationGrid:
        if node not in self._grids:
            self._grids[node] = read_grid(node)
        return self._grids[node]


def _codes(dequantize: ir.Node) -> ir.Value:
    assert dequantize.inputs[0] is not None
    return dequantize.inputs[0]


def _quantizer(dequantize: ir.Node) -> ir.Node | None:
    """The QuantizeLinear whose codes a node reads."""
    codes = input_of(dequantize, 0)
    node = None if codes is None else codes.producer()
    return node if node is not None and is_quantize_linear(node) else None


def _dequantizer_before(quantize: ir.Node) -> ir.Node | None:
    """The DequantizeLinear whose values a QuantizeLinear reads."""
    node = dequantizer(input_of(quantize, 0)) if is_quantize_linear(quantize) else None
    return None if node is None or input_of(node, 0) is None else node
