# SPDX-License-Identifier: MIT
"""QuantizeLinear behind DequantizeLinear -> fewer nodes, one row per identity.

    bridge        DQ(Q(DQ(Q(DQ(codes, a), b), b), a), a)     ->  DQ(codes, a)      on request
    kept codes    DQ(Q(DQ(codes, a), b), c)                  ->  DQ(codes, c)
    kept values   DQ(Q(DQ(codes, a), b), c)                  ->  DQ(codes, a)
    bare codes    Q(DQ(codes, a), b)                         ->  Identity(codes)

``a``, ``b`` and ``c`` are the nodes' own grids. All but the bridge change no bit: all codes of
``a`` go through the operators to decide them (:meth:`.QuantizationGrid.keeps_codes`). Of any
number of pairs with equal parameters one is left.
"""

from __future__ import annotations

import functools

import onnx_ir as ir

from rewrite_rules.graph.nodes import (
    dequantizer,
    input_of,
    is_dequantize_linear,
    is_quantize_linear,
    label,
    producer,
    remove_unused,
)
from rewrite_rules.mixed_precision_boundaries.quantization_grid import QuantizationGrid
from rewrite_rules.mixed_precision_boundaries.quantized_graph import read_grid
from rewrite_rules.remarks import PassContext, Refusal


def fold_pairs(
    model: ir.Model, target: str, context: PassContext, *, merge: bool = False
) -> None:
    """Fold in place, subgraphs included; for ``"qnn"``, keep pairs that convert between types.

    ``merge`` bridges regions, which changes numbers.
    """
    folds = _Folds(context, target, merge)
    # Outer graphs come before their subgraphs, and what is read before what reads it.
    for graph in model.graphs():
        for node in list(graph):
            if is_quantize_linear(node) and dequantizer(input_of(node, 0)) is not None:
                folds.fold(node)
    if folds.changed:  # where nothing was folded, nothing goes
        remove_unused(model)


class _Folds:
    """Folds single QuantizeLinear nodes of dequantised values; each grid is read once."""

    def __init__(self, context: PassContext, target: str, merge: bool) -> None:
        self._remarks = context.remarks
        self._target = target
        self._merge = merge
        self._grid = functools.cache(read_grid)
        self.changed = False

    def fold(self, through: ir.Node) -> None:
        """Fold a QuantizeLinear with each DequantizeLinear that reads it, then for others."""
        values = through.outputs[0]
        readers = [use.node for use in values.uses() if use.idx == 0]
        pairs = [node for node in readers if is_dequantize_linear(node)]
        steps = [(self._fold_pair, node) for node in pairs]
        if len(pairs) < len(values.uses()) or values.is_graph_output():
            steps.append((self._fold_codes, through))
        for step, last in steps:
            with self._remarks.at(label(last)):
                try:
                    step(producer(through.inputs[0]), through, last)
                except Refusal as refusal:
                    self._remarks.refused(label(last), refusal.behind("not folded: "))

    def _fold_pair(self, before: ir.Node, through: ir.Node, last: ir.Node) -> None:
        codes = before.inputs[0]
        coarse, fine, after = map(self._grid, (before, through, last))
        wide = self._bridged(before, fine, after) if self._merge else None
        if wide is not None:
            codes = wide.inputs[0]
            assert codes is not None
            reason = f"reads {codes.name!r}, which stayed in 16 bits"
        elif coarse.keeps_codes(fine):
            reason = f"gives back each code of {label(before)!r}: folded"
        elif self._target == "qnn" and coarse.dtype != fine.dtype:
            # One Convert there, and operators behind it have no kernels for two types. CPUs
            # compute in float on whatever DequantizeLinear gives them.
            return
        elif coarse.keeps_values(fine, after):
            reason = f"{fine} gives back each value of {label(before)!r}, {coarse}: folded"
            # And not the value of the first: onnxruntime fuses operators with a
            # DequantizeLinear of their own.
            _take_parameters(last, before)
        else:
            return
        last.replace_input_with(0, codes)
        self._fired(through, reason)

    def _bridged(
        self, narrowed: ir.Node, wide: QuantizationGrid, after: QuantizationGrid
    ) -> ir.Node | None:
        """The DequantizeLinear of 16 bits before a pair of 8 bits, if the grids are equal.

        The exit of a region leads into another one of the same grid: without a rounding to 8
        bits between them the result is more accurate, and not the same bits.
        """
        quantize = None if narrowed.inputs[0] is None else narrowed.inputs[0].producer()
        if quantize is None or not is_quantize_linear(quantize):
            return None
        before, narrow = dequantizer(input_of(quantize, 0)), self._grid(narrowed)
        if before is None or (wide.bits, narrow.bits) != (16, 8):
            return None
        grids = self._grid(before), self._grid(quantize), after
        return before if grids == (wide, narrow, wide) else None

    def _fold_codes(self, before: ir.Node, through: ir.Node, last: ir.Node) -> None:
        """For a caller or an integer operator that reads codes; outputs keep their names."""
        if not self._grid(before).keeps_codes(self._grid(through)):
            return
        self._fired(through, f"gives back each code of {label(before)!r}: folded")
        through.op_type, through.domain = "Identity", ""
        through.attributes.clear()
        through.resize_inputs(1)
        through.replace_input_with(0, before.inputs[0])

    def _fired(self, through: ir.Node, reason: str) -> None:
        self.changed = True
        self._remarks.fired(label(through), reason)


def _take_parameters(node: ir.Node, like: ir.Node) -> None:
    """Give a DequantizeLinear the grid of another one."""
    node.domain = like.domain
    node.attributes.clear()
    node.attributes.update(like.attributes)
    node.resize_inputs(len(like.inputs))
    for index, value in enumerate(like.inputs[1:], 1):
        node.replace_input_with(index, value)
