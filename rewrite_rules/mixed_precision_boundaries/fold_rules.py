# SPDX-License-Identifier: MIT
"""QuantizeLinear behind DequantizeLinear -> fewer nodes; one rule per identity.

    KeptCodes    DQ(Q(DQ(codes, a), b), c)  ->  DQ(codes, c)
    BareCodes    Q(DQ(codes, a), b)         ->  Identity(codes)

``a``, ``b`` and ``c`` are the nodes' own grids. No bit changes: all codes of ``a`` go through
the operators to decide it (:meth:`.QuantizationGrid.keeps_codes`). Of any number of pairs with
equal parameters one is left.
"""

from __future__ import annotations

import functools
from typing import Any

import onnx_ir as ir
from onnxscript.rewriter import MatchContext, MatchResult, RewriteRuleClassBase

from rewrite_rules.graph.nodes import (
    is_dequantize_linear,
    label,
    producer,
)
from rewrite_rules.graph.rule_set import DispatchingRuleSet, own
from rewrite_rules.mixed_precision_boundaries.quantization_grid import QuantizationGrid
from rewrite_rules.mixed_precision_boundaries.quantized_graph import read_grid
from rewrite_rules.remarks import PassContext, Refusal, Remarks


def fold_pairs(model: ir.Model, context: PassContext) -> None:
    """Fold in place, subgraphs included."""
    folds = _Folds(context.remarks)
    # What reads the codes of a pair is looked at once no DequantizeLinear needs them.
    for law in (KeptCodes, BareCodes):
        DispatchingRuleSet([law.rule(folds)]).apply_to_model(model)


class _Folds:
    """What the rules of one run share; each grid is read once."""

    def __init__(self, remarks: Remarks) -> None:
        self.remarks = remarks
        self.grid = functools.cache(read_grid)


def _q(codes: Any, name: str) -> Any:
    return own.QuantizeLinear(codes, _allow_other_inputs=True, _outputs=[name])


def _dq(codes: Any, name: str) -> Any:
    return own.DequantizeLinear(codes, _allow_other_inputs=True, _outputs=[name])


class Fold(RewriteRuleClassBase):
    """A rule that grids decide; where one can't be read, the last node has a remark.

    ``before``, ``through`` and ``out`` are its DequantizeLinear, QuantizeLinear and
    DequantizeLinear.
    """

    def __init__(self, folds: _Folds) -> None:
        super().__init__(remove_nodes=False)  # others may read what lies between
        self._folds = folds

    def pattern(self, op, codes):  # type: ignore[no-untyped-def]
        return _dq(_q(_dq(codes, "before"), "through"), "out")

    def check(  # type: ignore[override]
        self, context: MatchContext, codes: ir.Value, **values: ir.Value
    ) -> MatchResult:
        """Read the grids, and ask :meth:`folds` about them."""
        result, last = MatchResult(), context.root
        with self._folds.remarks.at(label(last)):
            try:
                nodes = {name: producer(value) for name, value in values.items()}
                grids = {name: self._folds.grid(node) for name, node in nodes.items()}
            except Refusal as refusal:
                self._folds.remarks.refused(label(last), refusal.behind("not folded: "))
                return result.fail(str(refusal), last)
            folds = self.folds(**grids)
        return result if folds else result.fail("values or codes would change", last)

    def folds(self, **grids: QuantizationGrid) -> bool:
        """Whether the grids are those of the identity."""
        raise NotImplementedError

    def fired(self, through: ir.Value, reason: str) -> None:
        self._folds.remarks.fired(label(producer(through)), reason)


class KeptCodes(Fold):
    """``DQ(Q(DQ(codes, a), b), c)`` -> ``DQ(codes, c)``, if Q gives back each code."""

    def folds(  # type: ignore[override]
        self, before: QuantizationGrid, through: QuantizationGrid, out: QuantizationGrid
    ) -> bool:
        """Whether codes stay; so they do in the same type only."""
        return before.keeps_codes(through)

    def rewrite(
        self, op: Any, codes: ir.Value, before: ir.Value, through: ir.Value, out: ir.Value
    ) -> Any:
        self.fired(through, f"gives back each code of {label(producer(before))!r}: folded")
        return _dequantized(op, codes, producer(out), producer(out))


class BareCodes(Fold):
    """``Q(DQ(codes, a), b)`` -> ``codes``, for a caller or an integer operator."""

    def pattern(self, op, codes):  # type: ignore[no-untyped-def]
        return _q(_dq(codes, "before"), "through")

    def check(  # type: ignore[override]
        self, context: MatchContext, codes: ir.Value, **values: ir.Value
    ) -> MatchResult:
        """Look at codes that anything but DequantizeLinear reads."""
        through = values["through"]
        readers = [is_dequantize_linear(node) and not index for node, index in through.uses()]
        if all(readers) and not through.is_graph_output():
            return MatchResult().fail("only DequantizeLinear reads them", context.root)
        return super().check(context, codes, **values)

    def folds(  # type: ignore[override]
        self, before: QuantizationGrid, through: QuantizationGrid
    ) -> bool:
        """Whether codes stay."""
        return before.keeps_codes(through)

    def rewrite(self, op: Any, codes: ir.Value, before: ir.Value, through: ir.Value) -> Any:
        self.fired(through, f"gives back each code of {label(producer(before))!r}: folded")
        return codes


def _dequantized(op: Any, codes: ir.Value, like: ir.Node, named: ir.Node) -> Any:
    """Emit a DequantizeLinear with the parameters of one node and the name of another."""
    return op.DequantizeLinear(
        codes,
        *like.inputs[1:],
        **like.attributes,
        _domain=like.domain,
        _name=named.name,
    )
