# SPDX-License-Identifier: MIT
"""Options of TransformerFusion."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from session_options.keys import option
from session_options.passes import Pass

if TYPE_CHECKING:
    import onnx_ir as ir

    from rewrite_rules.remarks import PassContext


@dataclasses.dataclass(frozen=True)
class TransformerFusion(Pass):
    """Attention, rotary embeddings, projections and norms, whoever exported the model."""

    name: ClassVar[str] = "transformer_fusion"
    summary: ClassVar[str] = "fuse attention, rotary embeddings, and norms with residuals"
    # After the weights are those of MatMulNBits.
    position: ClassVar[int] = 60

    kv_cache: str = option(
        "exported",
        "'shared': the caller binds long buffers as past and as present (IOBinding); new keys "
        "and values are appended in place, and the length of the attention mask says how much "
        "they hold. An error where GroupQueryAttention does not fit.",
        choices=("exported", "shared"),
    )

    def rewrite(self, model: ir.Model, context: PassContext) -> None:
        """Rewrite in place; see :mod:`.fuse`."""
        from rewrite_rules.transformer_fusion.fuse import fuse_transformer

        fuse_transformer(model, context, self.kv_cache)
