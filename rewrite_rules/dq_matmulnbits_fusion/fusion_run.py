# SPDX-License-Identifier: MIT
"""What the fusion rules of one run share: options, the float budget, how fates are told."""

from __future__ import annotations

__all__ = ["FusionOptions", "FusionRun"]

import dataclasses

import onnx_ir as ir

from rewrite_rules.dq_matmulnbits_fusion.kernel_support import NoKernel
from rewrite_rules.graph.initializers import DerivedInitializers
from rewrite_rules.graph.nodes import label
from rewrite_rules.graph.refusal import Refusal
from rewrite_rules.remarks import PassContext
from rewrite_rules.weights.dequantized_operand import DequantizedOperand
from rewrite_rules.weights.float_constant import float_bytes, write_float

# Execution providers that have kernels for quantised weights; the others read QDQ themselves
# and would hand the fused node to the CPU.
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
            activations to int8. None takes onnxruntime's own level where its optimizer would
            fuse the node, 0 elsewhere.
        slow_kernels: What becomes of a weight whose kernel unpacks it at every call, or that
            no kernel takes: ``"float"`` a float constant, ``"fuse"`` MatMulNBits all the same,
            ``"keep"`` the graph as it is.
        float_limit_mb: Megabytes that float constants may take in one model, all together.
    """

    accuracy_level: int | None
    slow_kernels: str
    float_limit_mb: int = 1024


class FusionRun:
    """One run over one model.

    Attributes:
        options: How to fuse.
        context: Whom for, and where remarks go.
        opset: Version of the default domain; None where it isn't known.
        initializers: Makes new ones.
    """

    def __init__(self, model: ir.Model, options: FusionOptions, context: PassContext) -> None:
        self.opset = model.opset_imports.get("")
        self.initializers = DerivedInitializers(model)
        self.options = options
        self.context = context
        self._told: set[tuple[ir.Node, ir.Node]] = set()
        self._float_bytes = 0
        self._floats: set[ir.Value] = set()

    def check_providers(self) -> None:
        """Refuse execution providers without the kernels.

        Raises:
            Refusal: With their names.
        """
        if foreign := sorted(set(self.context.providers) - _PROVIDERS):
            raise Refusal(
                f"execution provider {', '.join(foreign)} has no MatMulNBits kernel and "
                "reads DequantizeLinear itself"
            )

    def float_fits(self, operand: DequantizedOperand, reason: str) -> None:
        """Check that an operand may become a float constant.

        Args:
            operand: The operand.
            reason: Why it has to.

        Raises:
            Refusal: If options, its type or its size forbid it; with ``reason``.
        """
        if self.options.slow_kernels == "keep":
            raise Refusal(f"{reason}; kept, as slow_kernels=keep asks")
        if self.options.slow_kernels == "fuse":
            raise Refusal(reason)
        size = float_bytes(operand) / 1e6
        used = self._float_bytes / 1e6
        if used + size > self.options.float_limit_mb:
            raise Refusal(
                f"{reason}; as a float constant it would take {size:.0f} MB, above what "
                f"float_limit_mb={self.options.float_limit_mb} leaves ({used:.0f} MB used): "
                "raise it, or take accuracy_level=4, or quantise to 4 bits"
            )

    def write_float(self, operand: DequantizedOperand) -> ir.Value:
        """Make the operand a float constant, or find the one made earlier."""
        value = write_float(self.initializers, operand)
        if value not in self._floats:
            self._floats.add(value)
            self._float_bytes += float_bytes(operand)
        return value

    def fired(self, consumer: ir.Node, dequantize: ir.Node, fate: str) -> None:
        """Record that a consumer was rewritten."""
        self._told.add((consumer, dequantize))
        self.context.remarks.fired(label(consumer), f"{_named(dequantize)}: {fate}")

    def refused(self, consumer: ir.Node, dequantize: ir.Node, reason: object) -> None:
        """Record that a consumer was left as it was."""
        self._told.add((consumer, dequantize))
        self.context.remarks.refused(label(consumer), f"{_named(dequantize)}: {reason}")

    def folded(self, consumer: ir.Node, dequantize: ir.Node, what: str) -> None:
        """Record that a small dequantised constant became part of another."""
        self._told.add((consumer, dequantize))
        self.context.remarks.note(label(consumer), f"{_named(dequantize)}: {what}")

    def was_told(self, consumer: ir.Node, dequantize: ir.Node) -> bool:
        """Whether a remark on the pair was made."""
        return (consumer, dequantize) in self._told


def check_type(operand: DequantizedOperand) -> None:
    """Refuse types that no consumer of ours computes in.

    Raises:
        NoKernel: If it is rounded on its way, as a kernel would not.
        Refusal: With the type.
    """
    for dtype in operand.casts:
        if dtype not in (ir.DataType.FLOAT, ir.DataType.FLOAT16):
            name = dtype.name.lower()
            raise Refusal(f"the weight is cast to {name}: float32 and float16 fuse")
    if any(dtype.bitwidth < operand.dtype.bitwidth for dtype in operand.casts[1:-1]):
        raise NoKernel("the weight is rounded to float16 on its way")


def _named(dequantize: ir.Node) -> str:
    return f"DequantizeLinear {label(dequantize)!r}"
