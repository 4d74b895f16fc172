# SPDX-License-Identifier: MIT
"""The passes that ship with ortplugins: their options, and where their rules are."""

from __future__ import annotations

__all__ = ["BUILTIN_PASSES", "DqMatMulNBitsFusion"]

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from session_options.keys import option
from session_options.passes import Pass

if TYPE_CHECKING:
    import onnx_ir as ir

    from rewrite_rules.remarks import PassContext


@dataclasses.dataclass(frozen=True)
class DqMatMulNBitsFusion(Pass):
    """Dequantised weights -> MatMulNBits, GatherBlockQuantized; once, ahead of the session."""

    name: ClassVar[str] = "dq_matmulnbits_fusion"
    summary: ClassVar[str] = "fuse weights into MatMulNBits and GatherBlockQuantized"
    position: ClassVar[int] = 20

    accuracy_level: int = option(
        0,
        "How MatMulNBits computes: 0 or 1 in float32 (exact), 2 in float16, 3 in bfloat16, 4 "
        "with int8 activations (onnxruntime's own default; up to 3 times faster, relative "
        "error up to 2e-2 for each MatMul).",
        choices=(0, 1, 2, 3, 4),
        onnxruntime_key="session.qdq_matmulnbits_accuracy_level",
    )
    slow_kernels: str = option(
        "float",
        "Weights whose CPU kernel would unpack them at every call (8-bit below accuracy_level "
        "4, 2-bit mostly), or that no kernel takes: 'float' makes them float constants, "
        "'fuse' fuses those that it can all the same, 'keep' leaves them.",
        choices=("float", "fuse", "keep"),
    )
    float_limit_mb: int = option(
        1024,
        "Megabytes that such float constants may take in one model; weights beyond are left, "
        "each with a remark.",
    )

    def rewrite(self, model: ir.Model, context: PassContext) -> None:
        """Fuse in place; rules in :mod:`rewrite_rules.dq_matmulnbits`."""
        from rewrite_rules.dq_matmulnbits import FusionOptions, fuse

        options = FusionOptions(self.accuracy_level, self.slow_kernels, self.float_limit_mb)
        fuse(model, options, context)


BUILTIN_PASSES: tuple[type[Pass], ...] = (DqMatMulNBitsFusion,)
