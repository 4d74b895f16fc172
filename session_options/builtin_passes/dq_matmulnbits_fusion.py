# SPDX-License-Identifier: MIT
"""Options of DqMatMulNBitsFusion."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from session_options.keys import option
from session_options.passes import Pass

if TYPE_CHECKING:
    import onnx_ir as ir

    from rewrite_rules.remarks import PassContext


ACCURACY_LEVELS = ("auto", "0", "1", "2", "3", "4")


def level_text(level: str | int) -> str | int:
    """Return an accuracy level as its option has it; other types are left."""
    return str(level) if type(level) is int else level


@dataclasses.dataclass(frozen=True)
class DqMatMulNBitsFusion(Pass):
    """Dequantised weights -> MatMulNBits, GatherBlockQuantized; once, ahead of the session."""

    name: ClassVar[str] = "dq_matmulnbits_fusion"
    summary: ClassVar[str] = "fuse weights into MatMulNBits and GatherBlockQuantized"
    position: ClassVar[int] = 20

    accuracy_level: str | int = option(
        "auto",
        "How MatMulNBits computes: 0 or 1 in float32 (exact), 2 in float16, 3 in bfloat16, 4 "
        "with int8 activations (up to 3 times faster, relative error up to 2e-2 for each "
        "MatMul). 'auto': onnxruntime's level (session.qdq_matmulnbits_accuracy_level, 4 when "
        "unset) where onnxruntime is sure to fuse the node; elsewhere 0.",
        choices=ACCURACY_LEVELS,
    )
    slow_kernels: str = option(
        "float",
        "Weights whose CPU kernel would unpack them at every call (8-bit below accuracy_level "
        "4, small tables below 8 bits), or that have no kernel: 'float' makes "
        "them float constants, 'fuse' fuses those that have a kernel, 'keep' leaves them.",
        choices=("float", "fuse", "keep"),
    )
    float_limit_mb: int = option(
        1024,
        "Megabytes that such float constants may take in one model; weights beyond it stay, "
        "each with a remark.",
        least=0,
    )

    def __post_init__(self) -> None:
        """Check the options; an ``accuracy_level`` given as a number becomes its text."""
        object.__setattr__(self, "accuracy_level", level_text(self.accuracy_level))
        super().__post_init__()

    def rewrite(self, model: ir.Model, context: PassContext) -> None:
        """Fuse in place; rules in :mod:`.fuse`."""
        from rewrite_rules.dq_matmulnbits_fusion.fuse import FusionOptions, fuse

        level = None if self.accuracy_level == "auto" else int(self.accuracy_level)
        options = FusionOptions(level, self.slow_kernels, self.float_limit_mb)
        fuse(model, options, context)
