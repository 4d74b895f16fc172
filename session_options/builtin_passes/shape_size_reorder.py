# SPDX-License-Identifier: MIT
"""Options of ShapeSizeReorder."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from session_options.entries import option_key
from session_options.keys import option, parse_dims
from session_options.passes import Pass

if TYPE_CHECKING:
    import onnx_ir as ir

    from rewrite_rules.remarks import PassContext


@dataclasses.dataclass(frozen=True)
class ShapeSizeReorder(Pass):
    """Shape and Size read early and small; nodes run in an order of low peak memory."""

    name: ClassVar[str] = "shape_size_reorder"
    summary: ClassVar[str] = "read shapes early, order nodes for a low peak of memory"
    # Last of those that change the graph.
    position: ClassVar[int] = 80

    dims: str = option(
        "",
        "Sizes of symbolic dimensions to estimate memory with: batch=1,seq=512. Others count "
        "as 128. Results are right for any sizes.",
    )

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        _ = self.sizes

    def rearrange(self, model: ir.Model, context: PassContext) -> None:
        """Rewrite and reorder in place; see :mod:`.reorder`.

        After onnxruntime's own fusions: they give new nodes another place, and which of them
        fire depends on where shapes are read.
        """
        from rewrite_rules.shape_size_reorder.reorder import reorder

        reorder(model, context, dims=self.sizes)

    @property
    def sizes(self) -> dict[str, int]:
        """The option ``dims``, read."""
        return parse_dims(option_key(self.name, "dims"), self.dims)
