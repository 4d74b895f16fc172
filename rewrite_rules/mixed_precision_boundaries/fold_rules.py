# SPDX-License-Identifier: MIT
"""QuantizeLinear behind DequantizeLinear that changes nothing -> taken out.

    DQ(a) -> Q(b) -> DQ(c)    -> DQ(c)    every code of a is the same code of b
    DQ(a) -> Q(b) -> DQ(c)    -> DQ(a)    every value of a is a value of c, bit for bit
    DQ(a) -> Q(b)             -> the code every code of a is the same code of b

``a``, ``b`` and ``c`` are the nodes' own grids. Whether codes or values stay is never argued:
all 256 or 65,536 codes of ``a`` go through the operators. So 16-bit pairs under float16 scales
stay, which onnxruntime's own clean-up drops although most of their codes move, and so does a
16-bit pair that holds the range of the 8-bit one before it, but not its values.

For ``target="qnn"`` the second rule leaves pairs that change the type: there DQ -> Q is one
Convert, and the operators behind it have no kernels for two types. On CPUs, operators of 16
bits have none at all: they compute in float on whatever DequantizeLinear gives them, and the
boundary into their region only costs two nodes.
"""

from __future__ import annotations

__all__ = ["fold_pairs"]

import functools
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnx_ir.passes.common
from onnxscript.rewriter import MatchContext, MatchResult, RewriteRuleClassBase

from rewrite_rules.graph.nodes import label, producer
from rewrite_rules.graph.quantize_linear import is_dequantize_linear, is_quantize_linear
from rewrite_rules.graph.refusal import Refusal
from rewrite_rules.graph.rule_set import DispatchingRuleSet
from rewrite_rules.mixed_precision_boundaries.quantization_grid import QuantizationGrid
from rewrite_rules.mixed_precision_boundaries.quantized_graph import GridReader
from rewrite_rules.remarks import PassContext

_DOMAINS = frozenset({"", "com.microsoft"})
_TABLES = 4096


def fold_pairs(model: ir.Model, target: str, context: PassContext) -> None:
    """Fold in place, bodies included; a remark for each node that goes or could not be read.

    Args:
        model: A QDQ graph.
        target: ``"cpu"``, or ``"qnn"`` to keep pairs that convert between types.
        context: Where the folds are told.

    Raises:
        RewriteError: If a rule fails unexpectedly; earlier folds stay applied.
    """
    nodes = [node for graph in model.graphs() for node in graph]
    if not any(map(_requantizes, nodes)):
        return
    run = _Run(context, target)
    rules = [
        rule
        for domain in sorted({node.domain for node in nodes} & _DOMAINS)
        for rule in (
            KeptCodes.rule(run, domain),
            KeptValues.rule(run, domain),
            BareCodes.rule(run, domain),
        )
    ]
    if DispatchingRuleSet(rules, _ends_pair).apply_to_model(model):
        # The pairs that nobody reads any more; where nothing fired, nothing goes.
        onnx_ir.passes.common.RemoveUnusedNodesPass()(model)


class _Run:
    """What the rules of one model share; grids are read once for each node.

    Attributes:
        remarks: Where folds are told.
        target: Whom the result is for.
        grid: Reads the grid of a Q or DQ.
    """

    def __init__(self, context: PassContext, target: str) -> None:
        self.remarks = context.remarks
        self.target = target
        self.grid = GridReader()


def _ends_pair(node: ir.Node) -> bool:
    """Whether DQ -> Q ends in a node, or stands before it: nearly nowhere."""
    if node.op_type == "DequantizeLinear":
        return _pair_before(node) is not None
    return _requantizes(node)


class _Fold(RewriteRuleClassBase):
    """A rule rooted in a Q or DQ; operators before it are looked up, whatever their domain."""

    def __init__(self, run: _Run, domain: str) -> None:
        super().__init__()
        self._run = run
        self._domain = domain

    def check(  # type: ignore[override]
        self, context: MatchContext, out: ir.Value, **_: object
    ) -> MatchResult:
        """See the rules; a grid that can't be read is a remark."""
        del context  # Unused
        result, node = MatchResult(), producer(out)
        with self._run.remarks.at(label(node)):
            try:
                reason = self._obstacle(node)
            except Refusal as refusal:
                reason = str(refusal)
                self._run.remarks.refused(label(node), f"not folded: {reason}")
        return result if reason is None else result.fail(reason, node)

    def _obstacle(self, node: ir.Node) -> str | None:
        """Why the rule does not apply, None if it does."""
        raise NotImplementedError


class KeptCodes(_Fold):
    """DQ(codes, a) -> Q(b) -> DQ(c)  ->  DQ(codes, c), where Q gives back every code.

    Cases:
        1. ``a`` = ``b`` = ``c``: of two pairs with the same parameters one is left; so it is
           with any number of them, as each is looked at in turn.
        2. The scales of ``a`` and ``b`` differ by less than what moves a code: ``c`` decodes.
        3. Others read the codes of Q: they keep it.
    """

    def pattern(self, op, codes):  # type: ignore[no-untyped-def]
        return op.DequantizeLinear(
            codes, _allow_other_inputs=True, _domain=self._domain, _outputs=["out"]
        )

    def _obstacle(self, node: ir.Node) -> str | None:
        pair = _pair_before(node)
        if pair is None:
            return "no pair before it"
        self._run.grid(node)  # where it has no zero point, its type has to be known
        return None if keeps_codes(*map(self._run.grid, pair)) else "codes move"

    def rewrite(self, op: Any, out: ir.Value, **_: object) -> ir.Value:
        """Emit the same DequantizeLinear on the codes before the pair."""
        node = producer(out)
        dequantize, quantize = _present(_pair_before(node))
        self._run.remarks.fired(
            label(quantize), f"gives back each code of {label(dequantize)!r}: folded"
        )
        value: ir.Value = _dequantize(op, dequantize.inputs[0], node, node)
        return value


class KeptValues(_Fold):
    """DQ(codes, a) -> Q(b) -> DQ(c)  ->  DQ(codes, a), where DQ gives back every value.

    Cases:
        1. ``b`` = ``c`` is a 16-bit grid that refines the 8-bit grid ``a``: folded, but not
           for ``qnn``.
        2. ``a`` and ``b`` have one type, and codes move between such that have one value.
        3. Types of values differ: left, since it is a cast as well.
    """

    def pattern(self, op, codes):  # type: ignore[no-untyped-def]
        return op.DequantizeLinear(
            codes, _allow_other_inputs=True, _domain=self._domain, _outputs=["out"]
        )

    def _obstacle(self, node: ir.Node) -> str | None:
        pair = _pair_before(node)
        if pair is None:
            return "no pair before it"
        before, through = map(self._run.grid, pair)
        if self._run.target == "qnn" and before.dtype != through.dtype:
            return "a Convert on the target"
        return None if keeps_values(before, through, self._run.grid(node)) else "values move"

    def rewrite(self, op: Any, out: ir.Value, **_: object) -> ir.Value:
        """Emit the DequantizeLinear before the pair once more.

        Not its value: onnxruntime fuses operators with a DequantizeLinear of their own.
        """
        node = producer(out)
        dequantize, quantize = _present(_pair_before(node))
        self._run.remarks.fired(
            label(quantize),
            f"{self._run.grid(quantize)} gives back each value of {label(dequantize)!r}, "
            f"{self._run.grid(dequantize)}: folded",
        )
        value: ir.Value = _dequantize(op, dequantize.inputs[0], dequantize, node)
        return value


class BareCodes(_Fold):
    """DQ(codes, a) -> Q(b)  ->  Identity(codes), where Q gives back every code.

    Cases:
        1. The caller or an integer operator reads the codes. Identity, since a value has one
           name, and outputs keep theirs; onnxruntime removes it elsewhere.
        2. DequantizeLinear reads them, too: it gets the codes themselves.
        3. Only DequantizeLinear reads them: left to :class:`KeptCodes`.
    """

    def pattern(self, op, x):  # type: ignore[no-untyped-def]
        return op.QuantizeLinear(
            x, _allow_other_inputs=True, _domain=self._domain, _outputs=["out"]
        )

    def _obstacle(self, node: ir.Node) -> str | None:
        out = node.outputs[0]
        if not out.is_graph_output() and all(map(is_dequantize_linear, out.consumers())):
            return "only DequantizeLinear reads it"
        if not _requantizes(node):
            return "no DequantizeLinear before it"
        before, through = self._run.grid(_dequantize_before(node)), self._run.grid(node)
        return None if keeps_codes(before, through) else "codes move"

    def rewrite(self, op: Any, out: ir.Value, **_: object) -> ir.Value:
        """Emit the Identity."""
        node = producer(out)
        dequantize = _dequantize_before(node)
        self._run.remarks.fired(
            label(node), f"gives back each code of {label(dequantize)!r}: folded"
        )
        # In place: behind an Identity, no operator would be fused with its DequantizeLinear.
        for reader, index in [*out.uses()]:
            if is_dequantize_linear(reader):
                reader.replace_input_with(index, dequantize.inputs[0])
        value: ir.Value = op.Identity(dequantize.inputs[0], _name=node.name)
        return value


@functools.lru_cache(_TABLES)
def keeps_codes(before: QuantizationGrid, through: QuantizationGrid) -> bool:
    """Whether ``DQ(before) -> Q(through)`` gives back every code, in its type."""
    if before.dtype != through.dtype or before.float_dtype != through.float_dtype:
        return False
    codes = before.codes()
    values = before.dequantize(codes)
    return _all_finite(values) and np.array_equal(through.quantize(values), codes)


@functools.lru_cache(_TABLES)
def keeps_values(
    before: QuantizationGrid, through: QuantizationGrid, after: QuantizationGrid
) -> bool:
    """Whether ``DQ(before) -> Q(through) -> DQ(after)`` gives back each value, bit for bit."""
    if len({before.float_dtype, through.float_dtype, after.float_dtype}) > 1:
        return False
    if through.dtype != after.dtype:  # no valid graph
        return False
    values = before.dequantize(before.codes())
    returned = after.dequantize(through.quantize(values))
    return _all_finite(values) and returned.tobytes() == values.tobytes()


def _all_finite(values: npt.NDArray[np.generic]) -> bool:
    """False where float16 overflows; what becomes of infinities depends on the processor."""
    return bool(np.isfinite(values.astype(np.float32)).all())


def _requantizes(node: ir.Node) -> bool:
    """Whether a node is a QuantizeLinear of a dequantised value."""
    value = node.inputs[0] if is_quantize_linear(node) and node.inputs else None
    before = None if value is None else value.producer()
    return before is not None and is_dequantize_linear(before) and before.inputs[0] is not None


def _dequantize_before(node: ir.Node) -> ir.Node:
    value = node.inputs[0]
    assert value is not None
    return producer(value)


def _pair_before(node: ir.Node) -> tuple[ir.Node, ir.Node] | None:
    """The DQ and the Q that a DequantizeLinear reads; None if it reads something else."""
    codes = node.inputs[0] if node.inputs else None
    quantize = None if codes is None else codes.producer()
    if quantize is None or not _requantizes(quantize):
        return None
    return _dequantize_before(quantize), quantize


def _present(pair: tuple[ir.Node, ir.Node] | None) -> tuple[ir.Node, ir.Node]:
    assert pair is not None  # looked at by check
    return pair


def _dequantize(op: Any, codes: ir.Value | None, like: ir.Node, old: ir.Node) -> Any:
    return op.DequantizeLinear(
        codes,
        *like.inputs[1:],
        _domain=like.domain,
        _name=old.name,
        **like.attributes,
    )
