# SPDX-License-Identifier: MIT
"""Options of TrimPadding."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from session_options.keys import option
from session_options.passes import Pass

if TYPE_CHECKING:
    import onnx_ir as ir

    from rewrite_rules.remarks import PassContext


@dataclasses.dataclass(frozen=True)
class TrimPadding(Pass):
    """Inputs cut behind the longest row of a batch, outputs padded back: encoders."""

    name: ClassVar[str] = "trim_padding"
    summary: ClassVar[str] = "cut off padding after the longest row of a batch"
    # The proof reads the operators of exporters, before anything is fused.
    position: ClassVar[int] = 5

    mask: str = option(
        "",
        "Name of the attention mask, of shape [batch, sequence]; empty to find it by its use.",
    )
    pack: bool = option(
        False,
        "Run projections, feed-forward layers and norms on the real tokens of all rows only: "
        "for rows of mixed lengths.",
    )

    def rewrite(self, model: ir.Model, context: PassContext) -> None:
        """Trim in place; see :mod:`rewrite_rules.trim_padding.trim`."""
        from rewrite_rules.trim_padding.trim import trim_padding

        trim_padding(model, context, mask=self.mask, pack=self.pack)
