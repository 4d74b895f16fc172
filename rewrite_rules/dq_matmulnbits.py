# SPDX-License-Identifier: MIT
"""DequantizeLinear + MatMul -> MatMulNBits, ahead of the session.

    MatMul(x, DequantizeLinear(codes[K, N], scales, zero_points?, axis=0))
    MatMul(x, Transpose(DequantizeLinear(codes[N, K], scales, zero_points?, axis=1)))
        -> MatMulNBits(x, B, scales, zero_points?)

with the same codes and the same scales, so that with ``accuracy_level`` 0 the numbers stay.
Where the CPU has no fast kernel for the bits, block and accuracy level, the weight becomes a
float constant, unpacked once instead of at every inference:

        -> MatMul(x, W)

Every match is refused by name when the weight, its scales or its zero points are not constant
(an initializer that is also a graph input is not), when their types or shapes are none that a
kernel takes, or when the blocks run across the output columns. Every other DequantizeLinear on
a constant gets a remark that names what it feeds.
"""

from __future__ import annotations

__all__ = ["FusionOptions", "fuse"]

import dataclasses
from collections.abc import Iterator

import onnx_ir as ir
from onnxscript.rewriter import MatchContext, MatchResult, RewriteRuleClassBase, RewriteRuleSet

from rewrite_rules.block_quantized_weight import (
    BlockQuantizedWeight,
    Refusal,
    read_dequantize_linear,
)
from rewrite_rules.float_weight import float_bytes, write_float
from rewrite_rules.matmulnbits import kernel_refusal, write_matmulnbits
from rewrite_rules.remarks import PassContext, Remarks

# Execution providers that have a MatMulNBits kernel; the others read QDQ themselves and would
# hand the fused node to the CPU.
_PROVIDERS = frozenset(
    {
        "AzureExecutionProvider",
        "CPUExecutionProvider",
        "CUDAExecutionProvider",
        "DmlExecutionProvider",
        "JsExecutionProvider",
        "WebGpuExecutionProvider",
    }
)


@dataclasses.dataclass(frozen=True)
class FusionOptions:
    """How to fuse.

    Attributes:
        accuracy_level: MatMulNBits' attribute: 0 or 1 computes in float32, 4 rounds the
            activations to int8.
        slow_kernels: What becomes of a weight whose kernel unpacks it at every call:
            ``"float"`` a float constant, ``"fuse"`` MatMulNBits all the same, ``"keep"`` the
            graph as it is.
    """

    accuracy_level: int
    slow_kernels: str


class _DequantizedMatMul(RewriteRuleClassBase):
    """MatMul with a dequantised right side; subclasses say how the two are joined."""

    k_axis: int

    def __init__(self, options: FusionOptions, context: PassContext, examined: set[ir.Node]):
        # The DequantizeLinear may have other consumers, which keep it.
        super().__init__(remove_nodes=False)
        self._options = options
        self._context = context
        self._examined = examined
        self._weight: BlockQuantizedWeight | None = None

    def check(  # type: ignore[override]
        self, context: MatchContext, dq: ir.Value, out: ir.Value, **_: object
    ) -> MatchResult:
        """Read the weight; every refusal is a remark."""
        del context  # Unused
        result = MatchResult()
        matmul, dequantize = _producer(out), _producer(dq)
        with self._context.remarks.at(_label(matmul)):
            self._examined.add(dequantize)
            try:
                self._weight = self._read(matmul, dequantize)
            except Refusal as refusal:
                reason = f"DequantizeLinear {_label(dequantize)!r}: {refusal}"
                self._context.remarks.refused(_label(matmul), reason)
                return result.fail(reason, matmul)
        return result

    def rewrite(self, op: object, x: ir.Value, out: ir.Value, **_: object) -> ir.Value:
        """Emit MatMulNBits, or MatMul with a float constant."""
        weight, matmul = self._weight, _producer(out)
        assert weight is not None
        with self._context.remarks.at(_label(matmul)):
            if self._options.slow_kernels == "float" and (slow := self._slow_kernel(weight)):
                value: ir.Value = op.MatMul(x, write_float(weight), _name=matmul.name)  # type: ignore[attr-defined]
                size = float_bytes(weight) / 1e6
                fate = f"{weight.layout} -> float constant ({size:.1f} MB): {slow}"
            else:
                inputs = write_matmulnbits(weight)
                zero_points = [] if inputs.zero_points is None else [inputs.zero_points]
                value = op.MatMulNBits(  # type: ignore[attr-defined]
                    x,
                    inputs.codes,
                    inputs.scales,
                    *zero_points,
                    **inputs.attributes,
                    accuracy_level=self._options.accuracy_level,
                    _domain="com.microsoft",
                    _name=matmul.name,
                )
                level = self._options.accuracy_level
                fate = f"{weight.layout} -> MatMulNBits, accuracy_level {level}"
            self._context.remarks.fired(_label(matmul), fate)
        return value

    def _read(self, matmul: ir.Node, dequantize: ir.Node) -> BlockQuantizedWeight:
        """Return the weight, or raise the first refusal that applies."""
        del matmul  # for subclasses
        if foreign := sorted(set(self._context.providers) - _PROVIDERS):
            raise Refusal(
                f"execution provider {', '.join(foreign)} has no MatMulNBits kernel and "
                "reads DequantizeLinear itself"
            )
        weight = read_dequantize_linear(dequantize, k_axis=self.k_axis)
        if reason := kernel_refusal(weight):
            raise Refusal(reason)
        if self._options.slow_kernels == "keep" and (slow := self._slow_kernel(weight)):
            raise Refusal(f"{slow}; kept, as slow_kernels=keep asks")
        return weight

    def _slow_kernel(self, weight: BlockQuantizedWeight) -> str | None:
        """Say why the CPU kernel would unpack the weight at every call; None if it doesn't.

        Measured on onnxruntime 1.31: 8-bit and 2-bit weights are computed on directly only
        with int8 activations, 2-bit ones only in blocks of 32, 64 or 128.
        """
        level = self._options.accuracy_level
        if not self._context.cpu_only or weight.bits == 4:
            return None
        if level != 4:
            return (
                f"{weight.bits}-bit weights have a fast CPU kernel at accuracy_level 4 only, "
                f"not at {level}"
            )
        if weight.bits == 2 and weight.block_size not in (32, 64, 128):
            return f"2-bit weights in blocks of {weight.block_size} have no fast CPU kernel"
        return None


class _DqMatMul(_DequantizedMatMul):
    """MatMul(x, DQ(codes[K, N])) -> MatMulNBits."""

    k_axis = 0

    def pattern(self, op, x, codes, scales):  # type: ignore[no-untyped-def]
        dq = op.DequantizeLinear(codes, scales, _allow_other_inputs=True, _outputs=["dq"])
        return op.MatMul(x, dq, _outputs=["out"])


class _DqTransposeMatMul(_DequantizedMatMul):
    """MatMul(x, Transpose(DQ(codes[N, K]))) -> MatMulNBits."""

    k_axis = 1

    def pattern(self, op, x, codes, scales):  # type: ignore[no-untyped-def]
        dq = op.DequantizeLinear(codes, scales, _allow_other_inputs=True, _outputs=["dq"])
        return op.MatMul(x, op.Transpose(dq, _outputs=["transposed"]), _outputs=["out"])

    def _read(self, matmul: ir.Node, dequantize: ir.Node) -> BlockQuantizedWeight:
        right = matmul.inputs[1]
        assert right is not None
        transpose = _producer(right)
        perm = transpose.attributes.get("perm")
        weight = super()._read(matmul, dequantize)
        if perm is not None and list(perm.as_ints()) != [1, 0]:
            raise Refusal(
                f"Transpose {_label(transpose)!r} has perm {list(perm.as_ints())}: "
                "[1, 0] fuses"
            )
        return weight


def fuse(model: ir.Model, options: FusionOptions, context: PassContext) -> None:
    """Fuse in place; ``context.remarks`` tells the fate of every candidate.

    Raises:
        RewriteError: If a rule fails unexpectedly; earlier rewrites stay applied.
    """
    examined: set[ir.Node] = set()
    if any(node.op_type == "DequantizeLinear" for node in model.graph.all_nodes()):
        # Rules are built per call: they hold the match between check and rewrite.
        rules = [
            rule.rule(options, context, examined)  # type: ignore[no-untyped-call]
            for rule in (_DqMatMul, _DqTransposeMatMul)
        ]
        RewriteRuleSet(rules).apply_to_model(model)
    _explain_the_rest(model, context.remarks, examined)


def _explain_the_rest(model: ir.Model, remarks: Remarks, examined: set[ir.Node]) -> None:
    """Give every DequantizeLinear on a constant that no rule looked at its remark."""
    for node in _dequantized_constants(model):
        with remarks.at(_label(node)):
            for reason in _other_uses(node, rule_looked=node in examined):
                remarks.refused(_label(node), f"{reason}; it runs at every inference")


def _dequantized_constants(model: ir.Model) -> Iterator[ir.Node]:
    graphs = [model.graph, *(function.graph for function in model.functions.values())]
    for graph in graphs:
        for node in graph.all_nodes():
            codes = node.inputs[0] if node.op_type == "DequantizeLinear" else None
            if codes is not None and codes.const_value is not None:
                yield node


def _other_uses(node: ir.Node, *, rule_looked: bool) -> Iterator[str]:
    """Reasons why the node stays, other than those that the rules gave."""
    output = node.outputs[0]
    if output.is_graph_output():
        yield f"output {output.name!r} is a graph output"
    for use in output.uses():
        consumer = use.node
        transposed = consumer.op_type == "Transpose" and any(
            end.node.op_type == "MatMul" and end.idx == 1 for end in consumer.outputs[0].uses()
        )
        matched = transposed or (consumer.op_type == "MatMul" and use.idx == 1)
        if matched and rule_looked:
            continue
        name = f"{consumer.op_type} {_label(consumer)!r}"
        if matched:
            yield f"{name} lies in another graph body than the DequantizeLinear"
        elif consumer.op_type == "MatMul":
            yield f"it is the left side of {name}: the right side fuses"
        else:
            yield f"it feeds {name}: MatMul, directly or through a Transpose, fuses"


def _producer(value: ir.Value) -> ir.Node:
    node = value.producer()
    assert node is not None, f"{value.name!r} has no producer"
    return node


def _label(node: ir.Node) -> str:
    return node.name or node.outputs[0].name or node.op_type
