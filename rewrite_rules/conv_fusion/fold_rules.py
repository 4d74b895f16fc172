# SPDX-License-Identifier: MIT
"""Scales and offsets around convolutions go into the weights.

    FoldBehind    affine(Conv(x, w, b))            -> Conv(x, w', b')
                  affine(Transpose(Conv(x, w, b))) -> Transpose(Conv(x, w', b'))
                  the same of ConvTranspose
    FoldInFront   Conv(affine(x), w, b)            -> Conv(x, w', b')
    Gate          Add(x, Mul(x, gate))             -> Mul(x, Add(gate, 1))
    Normalize     Add(Mul(x, c), d), between blocked operators -> BatchNormalization(x)

``affine`` is a node of :mod:`.affine`. A rule of each class is made for each spelling.
None of these applies on a way to Floor, Sin or a comparison (see ``facts.sensitivity``).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript.rewriter import MatchContext, MatchResult, RewriteRule, RewriteRuleClassBase

from rewrite_rules.conv_fusion.affine import ANY, KINDS, OFFSETS, SCALES, Affines, Kind
from rewrite_rules.conv_fusion.linear import Affine, Float64, Linear, Linears, like
from rewrite_rules.facts.sensitivity import step_behind
from rewrite_rules.graph.nodes import label, made_by, producer
from rewrite_rules.graph.parameters import ints_attribute, source_of
from rewrite_rules.graph.rule_set import one_of
from rewrite_rules.remarks import Refusal, Remarks
from rewrite_rules.shapes.proved_shapes import ProvedShapes

_CONVOLUTIONS = ("Conv", "ConvTranspose")


class Folding:
    """What the rules of one run over one model share.

    Attributes:
        refused: Why a node stayed, by the node.
    """

    def __init__(self, model: ir.Model, remarks: Remarks) -> None:
        self.remarks = remarks
        self.linears = Linears(model)
        self.shapes = ProvedShapes(model, on_demand=True)
        self.affines = Affines(self.shapes)
        self.model = model
        self.refused: dict[ir.Node, Refusal] = {}

    def fired(self, node: ir.Node, what: str) -> None:
        """Record a rewrite."""
        self.remarks.fired(label(node), what)


def emit_constant(op: Any, array: Float64) -> ir.Value:
    """Emit a float32 constant."""
    return op.Constant(value=ir.tensor(np.asarray(array, np.float32)))  # type: ignore[no-any-return]


class Differs(Exception):
    """What matched is not what a rule looks for: nothing that is worth a remark."""


class FoldingRule(RewriteRuleClassBase):
    """A rule whose :meth:`find` proves its conditions and works out what is emitted.

    Attributes:
        candidate: Name of the value that stays where a Refusal is worth a remark.
        avoids_steps: Whether it stays on a way to Floor, Sin or a comparison, where a changed
            last digit matters. False if no bit changes, or the new kernel is the more exact.
    """

    candidate = ""
    avoids_steps = True

    def __init__(self, folding: Folding, *, remove_nodes: bool = True) -> None:
        super().__init__(remove_nodes=remove_nodes)
        self._folding = folding

    def check(  # type: ignore[override]
        self, context: MatchContext, out: ir.Value, **values: ir.Value
    ) -> MatchResult:
        """Work out the result; keep it for :meth:`rewrite`."""
        result, node = MatchResult(), producer(out)
        if any(other.graph is not node.graph for other in context.nodes):
            return result.fail("the nodes stand in several graphs", node)
        if not all(is_given(values.get(name)) for name in ("w", "c", "d")):
            return result.fail("an operand is computed", node)
        try:
            if _is_gelu(values.get("x")):
                raise Refusal(
                    "ORP655", "onnxruntime fuses it and the nodes before it to a Gelu"
                )
            self._found = self.find(out, **values)
            if self.avoids_steps and (step := step_behind(self._folding.model, out)):
                raise Refusal(
                    "ORP652", f"rounded differently, it may reach another step of {step}"
                )
        except (Differs, Refusal) as refusal:
            if self.candidate and isinstance(refusal, Refusal):
                stays = producer({"out": out, **values}[self.candidate])
                self._folding.refused[stays] = refusal.with_traceback(None)
            return result.fail(str(refusal), node)
        return result

    def find(self, out: ir.Value, **values: ir.Value) -> Any:
        """Return what :meth:`rewrite` needs; raise a Refusal where it can't be."""
        raise NotImplementedError


def is_given(value: ir.Value | None) -> bool:
    """Whether a value stands in the file; a caller may feed another all the same."""
    reshaped = made_by(value, "Reshape", "Unsqueeze", "Squeeze")
    value = value if reshaped is None else reshaped.inputs[0]
    if value is None:
        return True
    value = source_of(value)
    return value.is_initializer() or made_by(value, "Constant") is not None


class FoldBehind(FoldingRule):
    """``affine(linear(x))`` -> ``linear'(x)``; a Transpose of the layout stays between."""

    candidate = "out"

    def __init__(self, folding: Folding, kind: Kind, is_turned: bool) -> None:
        super().__init__(folding)
        self._kind, self._is_turned = kind, is_turned

    def pattern(self, op, x, w, c):  # type: ignore[no-untyped-def]
        value = one_of(op, _CONVOLUTIONS)(x, w, **ANY, _outputs=["linear"])
        if self._is_turned:
            value = op.Transpose(value, **ANY, _outputs=["turned"])
        return self._kind.pattern(op, value, c, "out")

    def find(self, out: ir.Value, **values: ir.Value) -> Linear:
        """Return the linear node with the affine one in it."""
        linear = self._folding.linears.read(producer(values["linear"]))
        rank = linear.rank
        axis = rank - 1
        if "turned" in values:
            order = ints_attribute(producer(values["turned"]), "perm")
            if order is None or sorted(order) != list(range(rank)):
                raise Refusal(
                    "ORP651", "the Transpose behind the weight is not one of its axes"
                )
            axis = rank - order.index(rank - axis)
        channels, node = linear.weight.outputs, producer(out)
        per_channel = self._folding.affines.per_channel
        affine = per_channel(self._kind, node, values["c"], channels, rank, axis)
        return linear.behind(affine)

    def rewrite(self, op: Any, out: ir.Value, **values: Any) -> ir.Value:
        """Emit the linear node, and the Transpose."""
        linear, node = self._found, producer(out)
        result = self._folding.linears.write(op, linear)
        if (turned := values.get("turned")) is not None:
            made = producer(turned)
            result = op.Transpose(result, **made.attributes, _name=made.name)
            result = like(turned, result)
        self._folding.fired(linear.node, f"{node.op_type} {label(node)!r} is in its weights")
        return result


class FoldInFront(FoldingRule):
    """``Conv(affine(x), w, b)`` -> ``Conv(x, w', b')``, if all its readers take it so."""

    candidate = "scaled"

    def __init__(self, folding: Folding, kind: Kind) -> None:
        super().__init__(folding, remove_nodes=False)
        self._kind = kind

    def pattern(self, op, x, w, c):  # type: ignore[no-untyped-def]
        scaled = self._kind.pattern(op, x, c, "scaled")
        return one_of(op, _CONVOLUTIONS)(scaled, w, **ANY, _outputs=["out"])

    def find(self, out: ir.Value, **values: ir.Value) -> Linear:
        """Return the convolution that reads x itself."""
        x, scaled, node = values["x"], values["scaled"], producer(out)
        kind, affines, folded = self._kind, self._folding.affines, dict[ir.Node, Linear]()
        if scaled.is_graph_output():
            raise Refusal("ORP655", f"{scaled.name!r} is an output")
        for reader, index in scaled.uses():
            is_same = reader.op_type == node.op_type and not reader.domain
            if not is_same or index or reader.graph is not node.graph:
                raise Refusal("ORP655", f"{label(reader)!r} reads {scaled.name!r} as well")
            linear = self._folding.linears.read(reader)
            channels, rank, axis = linear.weight.inputs, linear.rank, linear.rank - 1
            # A constant with more channels than x would have made them.
            if affines.channels(x, rank) != channels:
                if kind.op_type == "BatchNormalization":
                    raise Refusal("ORP651", f"the channels of {x.name!r} are not known")
                rank = 1
            affine = affines.per_channel(
                kind, producer(scaled), values["c"], channels, rank, axis
            )
            folded[reader] = linear.in_front(affine)
        return folded[node]

    def rewrite(self, op: Any, out: ir.Value, **values: Any) -> ir.Value:
        """Emit the convolution."""
        source = producer(values["scaled"])
        what = f"{source.op_type} {label(source)!r} in front is in its weights"
        self._folding.fired(producer(out), what)
        return self._folding.linears.write(op, self._found, values["x"])


class Gate(FoldingRule):
    """``x + x * gate`` -> ``x * (gate + 1)``, the gate having one element for each channel.

    Around -1 the sum would lose what the product still has: the gate is from 0 to 1.
    """

    def pattern(self, op, x, gate):  # type: ignore[no-untyped-def]
        return op.Add(x, op.Mul(x, gate), _outputs=["out"])

    def find(self, out: ir.Value, **values: ir.Value) -> None:
        """Check the type, and that the gate is the smaller one."""
        x, gate = values["x"], values["gate"]
        if made_by(gate, "HardSigmoid", "Sigmoid") is None:
            raise Differs(f"{gate.name!r} may be negative")
        if out.dtype != ir.DataType.FLOAT:
            raise Differs("it does not compute in float32")
        rank = self._folding.affines.least_rank(x)
        form = " ".join(["N", "C", *["1"] * (rank - 2)])
        if rank < 3 or self._folding.shapes.match(gate, form) is None:
            raise Differs(f"{gate.name!r} is not one number for each channel")

    def rewrite(self, op: Any, x: ir.Value, gate: ir.Value, out: ir.Value) -> ir.Value:
        """Emit the sum of small tensors, and one product."""
        node = producer(out)
        self._folding.fired(node, "1 is added to the gate instead of the product to x")
        one = emit_constant(op, np.array(1.0))
        more = like(gate, op.Add(gate, one))
        return op.Mul(x, more, _name=node.name)  # type: ignore[no-any-return]


def _is_gelu(value: ir.Value | None) -> bool:
    """Whether a value is x * (1 + erf(...)), or with tanh, which lacks a half."""
    product = made_by(value, "Mul")
    sums = [made_by(factor, "Add") for factor in product.inputs] if product else []
    terms = [term for total in sums if total for term in total.inputs]
    return any(made_by(term, "Erf", "Tanh") for term in terms)


# What onnxruntime keeps in the blocked layout: of its first input, or of all that it reads.
_OF_FIRST = (
    *("AveragePool", "BatchNormalization", "Clip", "HardSigmoid", "HardSwish", "LeakyRelu"),
    *("MaxPool", "Relu", "Sigmoid", "Tanh"),
)
_OF_ALL = ("Add", "Concat", "Mul", "Sum")
_BLOCK = 16
_MAX_STEPS = 4


def _is_blocked(value: ir.Value | None, shapes: ProvedShapes, steps: int = _MAX_STEPS) -> bool:
    """Whether a value is sure to be in the blocked layout: a convolution's, or made of such.

    Elsewhere onnxruntime's BatchNormalization runs on one thread only.
    """
    node = made_by(value, "Conv", *_OF_FIRST, *_OF_ALL)
    if value is None or node is None or steps < 0:
        return False
    if node.op_type == "Conv":
        return shapes.dims(value, 4) is not None and is_given(node.inputs[1])
    if node.op_type in _OF_FIRST:
        return _is_blocked(node.inputs[0], shapes, steps - 1)
    if node.op_type != "Concat" and len({shapes.shape(v) for v in node.inputs if v}) > 1:
        return False
    return all(_is_blocked(each, shapes, steps - 1) for each in node.inputs)


class Normalize(FoldingRule):
    """A scale, and an offset behind it, that stay -> BatchNormalization in blocks."""

    def __init__(self, folding: Folding, scale: Kind, offset: Kind) -> None:
        super().__init__(folding)
        self._scale, self._offset = scale, offset

    def pattern(self, op, x, c, d):  # type: ignore[no-untyped-def]
        return self._offset.pattern(op, self._scale.pattern(op, x, c, "between"), d, "out")

    def find(self, out: ir.Value, **values: ir.Value) -> Affine:
        """Return scale and offset, both [C], of x[N, C, H, W]."""
        x, node, affines = values["x"], producer(out), self._folding.affines
        channels = affines.channels(x, 4)
        if channels is None or channels % _BLOCK or out.dtype != ir.DataType.FLOAT:
            raise Differs(f"{x.name!r} is not known to be float32 of [N, C, H, W], in blocks")
        if not _is_blocked(x, self._folding.shapes):
            raise Differs(f"{x.name!r} is not in onnxruntime's blocked layout")
        scale = affines.per_channel(self._scale, node, values["c"], channels, 4, 3).scale
        behind = affines.per_channel(self._offset, node, values["d"], channels, 4, 3)
        return Affine(scale * behind.scale, behind.offset)

    def rewrite(self, op: Any, x: ir.Value, out: ir.Value, **_: Any) -> ir.Value:
        """Emit the node."""
        affine, node, epsilon = self._found, producer(out), 1e-5
        self._folding.fired(node, "is a BatchNormalization, in the layout around it")
        zeros = np.zeros_like(affine.scale)
        # Others than onnxruntime take no epsilon of 0.
        parts = (affine.scale, affine.offset, zeros, zeros + (1 - epsilon))
        constants = [emit_constant(op, part) for part in parts]
        return op.BatchNormalization(x, *constants, epsilon=epsilon, _name=node.name)  # type: ignore[no-any-return]


def folding_rules(folding: Folding) -> Iterator[RewriteRule]:
    """Make the rules, in order of precedence."""
    for form in itertools.product(KINDS, (False, True)):
        yield from FoldBehind.rule(folding, *form).commute()
    for kind in KINDS:
        yield from FoldInFront.rule(folding, kind).commute()
    yield from Gate.rule(folding).commute()


def normalizing_rules(folding: Folding) -> Iterator[RewriteRule]:
    """Make the rules for what is left once nothing folds any more."""
    for scale, offset in itertools.product(SCALES, OFFSETS):
        yield from Normalize.rule(folding, scale, offset).commute()
