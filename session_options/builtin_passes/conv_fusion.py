# SPDX-License-Identifier: MIT
"""Options of ConvFusion."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from session_options.passes import Pass

if TYPE_CHECKING:
    import onnx_ir as ir

    from rewrite_rules.remarks import PassContext


@dataclasses.dataclass(frozen=True)
class ConvFusion(Pass):
    """Scales, offsets, norms and hard swishes around convolutions, whoever exported them."""

    name: ClassVar[str] = "conv_fusion"
    summary: ClassVar[str] = "fold scales, offsets and norms into convolutions"
    # After attention is fused, whose projections have scales as well.
    position: ClassVar[int] = 65

    def rewrite(self, model: ir.Model, context: PassContext) -> None:
        """Rewrite in place; see :mod:`rewrite_rules.conv_fusion.fuse`."""
        from rewrite_rules.conv_fusion.fuse import fuse_convolutions

        fuse_convolutions(model, context)
