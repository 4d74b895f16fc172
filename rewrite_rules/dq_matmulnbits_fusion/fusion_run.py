# SPDX-License-Identifier: MIT
"""What the fusion rules of one run share: options, new constants, remarks, one way to refuse.

    f(x, W)    ->    nodes that read W's codes, or f(x, float constant)

where W is a dequantised constant in whatever layout :mod:`.dequantized_operand` reads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import onnx_ir as ir
from onnxscript.rewriter import MatchContext, MatchResult, RewriteRuleClassBase

from rewrite_rules.graph.initializers import DerivedInitializers
from rewrite_rules.graph.nodes import label, producer
from rewrite_rules.graph.rule_set import one_of, own
from rewrite_rules.remarks import PassContext, Refusal
from rewrite_rules.shapes.proved_shapes import ProvedShapes
from rewrite_rules.weights.dequantized_operand import (
    DequantizedOperand,
    NoKernel,
    dequantize_chain,
    read_operand,
)
from rewrite_rules.weights.float_constant import FloatConstants, float_bytes

# Execution providers whose nodes onnxruntime's optimizer fuses.
NATIVE_PROVIDERS = frozenset({
    "AzureExecutionProvider", "CPUExecutionProvider", "CUDAExecutionProvider",
    "DmlExecutionProvider",
})  # fmt: skip
# Those that have kernels for quantised weights; the others read QDQ themselves and would hand
# the fused node to the CPU.
_PROVIDERS = NATIVE_PROVIDERS | {"JsExecutionProvider", "WebGpuExecutionProvider"}
# Of a float constant that is made for speed.
_SMALL_BYTES = 4 << 20


@dataclasses.dataclass(frozen=True)
class FusionOptions:
    """How to fuse.

    Attributes:
        accuracy_level: MatMulNBits' attribute: 0 or 1 computes in float32, 4 rounds the
            activations to int8. None takes onnxruntime's own level where its optimizer is sure
            to fuse the node, 0 elsewhere.
        slow_kernels: What becomes of a weight whose kernel unpacks it at every call, or that
            no kernel takes: ``"float"`` a float constant, ``"fuse"`` MatMulNBits all the same,
            ``"keep"`` the graph as it is.
        float_limit_mb: Megabytes that float constants may take in one model, all together.
    """

    accuracy_level: int | None
    slow_kernels: str
    float_limit_mb: int = 1024


class FusionRun:
    """One run over one model: its new constants and what became of each candidate.

    ``only``: the DequantizeLinear nodes whose constants are candidates; None for all.
    """

    def __init__(
        self,
        model: ir.Model,
        options: FusionOptions,
        context: PassContext,
        only: Collection[ir.Node] | None = None,
    ) -> None:
        self.opset = model.opset_imports.get("")
        self.initializers = DerivedInitializers(model)
        self.facts = ProvedShapes(model, on_demand=True)
        self.floats = FloatConstants(self.initializers, options.float_limit_mb)
        self.options = options
        self.context = context
        self.only = only
        self.made: set[ir.Node] = set()
        self._reported: set[tuple[ir.Node, ir.Node]] = set()

    def check_providers(self) -> None:
        """Refuse execution providers without the kernels, by name."""
        if foreign := sorted(set(self.context.providers) - _PROVIDERS):
            raise Refusal(
                "ORP114",
                f"execution provider {', '.join(foreign)} has no MatMulNBits kernel and "
                "reads DequantizeLinear itself",
            )

    def check_float(self, operand: DequantizedOperand, reason: Refusal) -> None:
        """Refuse, after ``reason``, where size or options forbid a float constant."""
        if self.options.slow_kernels == "keep":
            raise Refusal("ORP110", f"{reason}; kept, as slow_kernels=keep asks")
        if self.options.slow_kernels == "fuse":
            raise reason
        try:
            self.floats.check(operand)
        except Refusal as limit:
            raise Refusal(
                "ORP109", f"{reason}; {limit}, or take accuracy_level=4, or quantise to 4 bits"
            ) from None

    def is_small(self, operand: DequantizedOperand) -> bool:
        """Whether an operand may become a float constant for speed, as it takes little."""
        may_be_float = self.options.slow_kernels == "float" and self.context.cpu_only
        small = float_bytes(operand) <= _SMALL_BYTES
        return may_be_float and small and self.floats.fits(operand)

    def fired(self, consumer: ir.Node, dequantize: ir.Node, outcome: str) -> None:
        self.context.remarks.fired(label(consumer), self._tell(consumer, dequantize, outcome))

    def refused(self, consumer: ir.Node, dequantize: ir.Node, reason: Refusal) -> None:
        text = self._tell(consumer, dequantize, reason)
        self.context.remarks.refused(label(consumer), Refusal(reason.code, text))

    def was_reported(self, consumer: ir.Node, dequantize: ir.Node) -> bool:
        return (consumer, dequantize) in self._reported

    def _tell(self, consumer: ir.Node, dequantize: ir.Node, text: object) -> str:
        self._reported.add((consumer, dequantize))
        return f"DequantizeLinear {label(dequantize)!r}: {text}"


# Given onnxscript's builder, emits the nodes; returns their output and what they are.
Emit = Callable[[Any], tuple[ir.Value, str]]
_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16)
_GREATEST_HALF = 65504


class OperandRule(RewriteRuleClassBase):
    """Makes g(x, codes) of f(x, W), for operators f; subclasses declare g.

    f(x, float constant), where no fast kernel takes the codes.
    """

    operators: Collection[str]
    # Input of f that is W.
    index = 1

    def __init__(self, run: FusionRun) -> None:
        # The DequantizeLinear may have other consumers, which keep it.
        super().__init__(remove_nodes=False)
        self._run = run

    def pattern(self, op, x, w):  # type: ignore[no-untyped-def]
        operands = (x, w) if self.index == 1 else (w, x)
        return one_of(own, self.operators)(
            *operands, _allow_other_inputs=True, _outputs=["out"]
        )

    def check(  # type: ignore[override]
        self, context: MatchContext, w: ir.Value, out: ir.Value, **_: object
    ) -> MatchResult:
        """Read W and decide its form; every refusal is a remark."""
        result, node, run = MatchResult(), producer(out), self._run
        chain = dequantize_chain(w)
        if chain is None or (run.only is not None and chain[0] not in run.only):
            return result.fail("the operand is not a dequantised constant", node)
        with run.context.remarks.at(label(node)):
            try:
                run.check_providers()
                self._operand = operand = read_operand(chain)
                try:
                    self._emit = self._plan(node, chain, operand)
                except NoKernel as reason:
                    run.check_float(operand, reason)
                    self._emit = partial(self._with_float_constant, node, str(reason))
            except Refusal as refusal:
                run.refused(node, chain[0], refusal)
                return result.fail(str(refusal), node)
        return result

    def rewrite(self, op: Any, out: ir.Value, **_: object) -> ir.Value:
        node, operand = producer(out), self._operand
        with self._run.context.remarks.at(label(node)):
            value, outcome = self._emit(op)
            self._run.fired(node, operand.dequantize, f"{operand.layout} -> {outcome}")
        return value

    def _plan(self, node: ir.Node, chain: list[ir.Node], operand: DequantizedOperand) -> Emit:
        """Return what emits g, or raise the first refusal that applies."""
        raise NotImplementedError

    def _with_float_constant(
        self, node: ir.Node, reason: str, op: Any
    ) -> tuple[ir.Value, str]:
        inputs = list(node.inputs)
        inputs[self.index] = constant = self._run.floats.write(self._operand)
        for each in self._operand.trail:  # onnxruntime folds them
            inputs[self.index] = getattr(op, each.op_type)(
                inputs[self.index], *each.inputs[1:], **each.attributes
            )
        value = getattr(op, node.op_type)(
            *inputs, _domain=node.domain, _name=node.name, **node.attributes
        )
        assert constant.const_value is not None
        size = constant.const_value.nbytes / 1e6
        return value, f"float constant ({size:.1f} MB): {reason}"


def check_type(operand: DequantizedOperand) -> None:
    """Refuse types that no fused operator computes in, and what is rounded on its way."""
    if operand.bits > 8:
        raise Refusal(
            "ORP201", f"weight {operand.codes.name!r} is int32: codes of 4 or 8 bits fuse"
        )
    for dtype in operand.casts:
        if dtype not in _FLOATS:
            name = dtype.name.lower()
            raise Refusal("ORP105", f"the weight is cast to {name}: float32 and float16 fuse")
    if any(dtype.bitwidth < operand.dtype.bitwidth for dtype in operand.casts[1:]):
        raise NoKernel("ORP105", "the weight is rounded to float16 in between")
    if ir.DataType.FLOAT16 in operand.casts and operand.may_exceed(_GREATEST_HALF):
        raise NoKernel("ORP105", "the weight overflows float16 and becomes infinite")
