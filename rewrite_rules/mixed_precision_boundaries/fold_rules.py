# SPDX-License-Identifier: MIT
"""QuantizeLinear behind DequantizeLinear -> fewer nodes, one rule per identity.

    KeptCodes     DQ(Q(DQ(codes, a), b), c)                  ->  DQ(codes, c)
    KeptValues    DQ(Q(DQ(codes, a), b), c)                  ->  DQ(codes, a)
    BareCodes     Q(DQ(codes, a), b)                         ->  Identity(codes)
    Bridge        DQ(Q(DQ(Q(DQ(codes, a), b), b), a), a)     ->  DQ(codes, a)

``a``, ``b`` and ``c`` are the nodes' own grids. The first three rules change no bit: all codes
of ``a`` go through the operators to decide them (:meth:`.QuantizationGrid.keeps_codes`).
``Bridge`` removes a rounding to 8 bits, and runs only on request.
"""

from __future__ import annotations

import functools
from typing import Any

import onnx_ir as ir
from onnxscript.rewriter import (
    MatchContext,
    MatchResult,
    RewriteRule,
    RewriteRuleClassBase,
    pattern,
)

from rewrite_rules.graph.nodes import (
    dequantizer,
    input_of,
    is_dequantize_linear,
    is_quantize_linear,
    label,
    producer,
    remove_unused,
)
from rewrite_rules.graph.rule_set import DispatchingRuleSet
from rewrite_rules.mixed_precision_boundaries.quantized_graph import read_grid
from rewrite_rules.remarks import PassContext, Refusal


def fold_pairs(
    model: ir.Model, target: str, context: PassContext, *, merge: bool = False
) -> None:
    """Fold in place, subgraphs included; for ``"qnn"``, keep pairs that convert between types.

    :class:`Bridge`, which changes numbers, runs on ``merge``.
    """
    if not any(_requantizes(node) for graph in model.graphs() for node in graph):
        return
    run = _Run(context, target)
    identities: list[type[_Fold]] = [KeptCodes, KeptValues, BareCodes]
    if merge:
        identities.insert(0, Bridge)
    rules = DispatchingRuleSet([rule.rule(run) for rule in identities], _ends_pair)
    rules.remove_unused_nodes = False  # where no rule fired, nothing goes
    if rules.apply_to_model(model):
        remove_unused(model)


def _requantizes(node: ir.Node) -> bool:
    """Whether a node is a QuantizeLinear of a dequantised value."""
    return is_quantize_linear(node) and dequantizer(input_of(node, 0)) is not None


def _ends_pair(node: ir.Node) -> bool:
    """Whether a node may be the last of a pattern: nearly none is, and matching takes time."""
    codes = input_of(node, 0) if is_dequantize_linear(node) else None
    quantize = None if codes is None else codes.producer()
    return _requantizes(quantize or node)


class _Run:
    """What the rules share: where remarks go, the target, the grids (each is read once)."""

    def __init__(self, context: PassContext, target: str) -> None:
        self.remarks = context.remarks
        self.target = target
        self.grid = functools.cache(read_grid)


class _EitherDomain:
    """Matches ONNX's domain and onnxruntime's: Q and DQ of both mean the same."""

    def matches(self, domain: str) -> bool:
        return domain in ("", "com.microsoft")

    def __str__(self) -> str:
        return "com.microsoft"


class _AcrossGraphs(pattern.SimplePatternMatcher):
    """Matches a DequantizeLinear in a subgraph with the nodes outside that it reads.

    onnxscript refuses that, since it could not remove what matched; nothing is removed here.
    """

    def _match_value(self, pattern_value: Any, value: ir.Value | None) -> bool:
        if value is not None:
            self._graph: Any = value.graph
        return bool(super()._match_value(pattern_value, value))


_OP = pattern.OpsetPatternBuilder(_EitherDomain())  # type: ignore[arg-type]


def _q(value: Any, name: str) -> Any:
    return _OP.QuantizeLinear(value, _allow_other_inputs=True, _outputs=[name])


def _dq(value: Any, name: str) -> Any:
    return _OP.DequantizeLinear(value, _allow_other_inputs=True, _outputs=[name])


class _Fold(RewriteRuleClassBase):
    """A rule whose pattern names the values behind its nodes, ``out`` the last."""

    outcome = ""
    repeats_first = False

    @classmethod
    def rule(cls, run: _Run) -> RewriteRule:
        """Return the rule; its nodes may stand in several graphs."""
        fold = cls(run)
        steps = fold.pattern, fold.rewrite, fold.check
        return RewriteRule(*steps, _AcrossGraphs, name=fold.name, remove_nodes=False)

    def __init__(self, run: _Run) -> None:
        # Others may read the values between: what nothing reads is removed at the end.
        super().__init__(remove_nodes=False)
        self._run = run

    def pattern(self, op, codes):  # type: ignore[no-untyped-def]
        return _dq(_q(_dq(codes, "before"), "through"), "out")

    def check(  # type: ignore[override]
        self, context: MatchContext, out: ir.Value, **values: ir.Value
    ) -> MatchResult:
        """Apply :meth:`_obstacle`; a grid that cannot be read is a remark."""
        result = MatchResult()
        last = producer(out)
        # BareCodes ends in Q: it goes through its last node.
        through = producer(values.get("through", out))
        with self._run.remarks.at(label(last)):
            try:
                reason = self._obstacle(producer(values["before"]), through, last)
            except Refusal as refusal:
                reason = str(refusal)
                self._run.remarks.refused(label(last), f"not folded: {reason}")
        return result if reason is None else result.fail(reason, last)

    def _obstacle(self, before: ir.Node, through: ir.Node, last: ir.Node) -> str | None:
        """Return why the rule does not apply, None if it does."""
        raise NotImplementedError

    def rewrite(self, op: Any, codes: ir.Value, out: ir.Value, **values: ir.Value) -> ir.Value:
        first, last = producer(values["before"]), producer(out)
        self._fired(first, producer(values["through"]), codes)
        # Not the value of the first: onnxruntime fuses operators with a DequantizeLinear of
        # their own.
        like = first if self.repeats_first else last
        name, parameters = last.name, like.inputs[1:]
        value: ir.Value = op.DequantizeLinear(
            codes, *parameters, _domain=like.domain, _name=name, **like.attributes
        )
        # Removed at the end only, and until then names have to be unique.
        last.name = None
        return value

    def _fired(self, first: ir.Node, through: ir.Node, codes: ir.Value) -> None:
        grid = self._run.grid
        outcome = self.outcome.format(
            first=label(first), coarse=grid(first), fine=grid(through), codes=codes.name
        )
        self._run.remarks.fired(label(through), outcome)


class KeptCodes(_Fold):
    """DQ(Q(DQ(codes, a), b), c)  ->  DQ(codes, c), where Q gives back every code.

    Of any number of pairs with equal parameters one is left. Others may read the codes of Q.
    """

    outcome = "gives back each code of {first!r}: folded"

    def _obstacle(self, before: ir.Node, through: ir.Node, last: ir.Node) -> str | None:
        grid = self._run.grid
        grid(last)  # where it has no zero point, its type has to be known
        return None if grid(before).keeps_codes(grid(through)) else "codes move"


class KeptValues(_Fold):
    """DQ(Q(DQ(codes, a), b), c)  ->  DQ(codes, a), where ``c`` gives back every value.

    For instance where ``b`` = ``c`` is a 16-bit grid that refines the 8-bit grid ``a``: on
    CPUs, operators of 16 bits compute in float on whatever DequantizeLinear gives them.
    Refused for ``qnn`` where the types differ: DQ -> Q is one Convert there, and operators
    behind it have no kernels for two types.
    """

    outcome = "{fine} gives back each value of {first!r}, {coarse}: folded"
    repeats_first = True

    def _obstacle(self, before: ir.Node, through: ir.Node, last: ir.Node) -> str | None:
        coarse, fine = self._run.grid(before), self._run.grid(through)
        if self._run.target == "qnn" and coarse.dtype != fine.dtype:
            return "a Convert on the target"
        return None if coarse.keeps_values(fine, self._run.grid(last)) else "values move"


class BareCodes(_Fold):
    """Q(DQ(codes, a), b)  ->  Identity(codes), where Q gives back every code.

    For a caller or an integer operator that reads the codes; outputs keep their names.
    DequantizeLinear gets the codes themselves; if only that reads them, KeptCodes folds it.
    """

    outcome = KeptCodes.outcome

    def pattern(self, op, codes):  # type: ignore[no-untyped-def]
        return _q(_dq(codes, "before"), "out")

    def _obstacle(self, before: ir.Node, through: ir.Node, last: ir.Node) -> str | None:
        out = last.outputs[0]
        if not out.is_graph_output() and all(map(is_dequantize_linear, out.consumers())):
            return "only DequantizeLinear reads it"
        grid = self._run.grid
        return None if grid(before).keeps_codes(grid(last)) else "codes move"

    def rewrite(self, op: Any, codes: ir.Value, out: ir.Value, **values: ir.Value) -> ir.Value:
        node = producer(out)
        self._fired(producer(values["before"]), node, codes)
        # In place: behind an Identity, no operator would be fused with its DequantizeLinear.
        for reader, index in [*out.uses()]:
            if is_dequantize_linear(reader):
                reader.replace_input_with(index, codes)
        value: ir.Value = op.Identity(codes, _name=node.name)
        node.name = None  # as above
        return value


class Bridge(_Fold):
    """DQ(Q(DQ(Q(DQ(codes, a), b), b), a), a)  ->  DQ(codes, a): 16 bits, 8 and 16 again.

    The exit of a region leads into another one of the same grid. Values are not rounded to 8
    bits between any more: more accurate, and not the same bits.
    """

    outcome = "reads {codes!r}, which stayed in 16 bits"

    def pattern(self, op, codes):  # type: ignore[no-untyped-def]
        narrow = _dq(_q(_dq(codes, "before"), "narrow"), "narrowed")
        return _dq(_q(narrow, "through"), "out")

    def _obstacle(self, before: ir.Node, through: ir.Node, last: ir.Node) -> str | None:
        grid = self._run.grid
        narrowed = producer(through.inputs[0])
        wide, narrow = grid(before), grid(narrowed)
        if (wide.bits, narrow.bits) != (16, 8):
            return "not 16, 8 and 16 bits"
        pairs_differ = grid(producer(narrowed.inputs[0])) != narrow or grid(through) != grid(
            last
        )
        return "grids differ" if pairs_differ or grid(through) != wide else None
