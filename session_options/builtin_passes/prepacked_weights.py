# SPDX-License-Identifier: MIT
"""Options of PrepackedWeights."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from session_options.keys import option
from session_options.passes import Pass

if TYPE_CHECKING:
    from pathlib import Path

    from rewrite_rules.remarks import PassContext


@dataclasses.dataclass(frozen=True)
class PrepackedWeights(Pass):
    """Kernels' packed weights in the file, mapped and shared by all processes."""

    name: ClassVar[str] = "prepacked_weights"
    summary: ClassVar[str] = "keep packed weights in the file, shared instead of on the heap"
    position: ClassVar[int] = 90

    verify: str = option(
        "size",
        "How a start checks the files: 'size', or 'digest', which reads them whole. Before "
        "1.32, onnxruntime silently computes wrong numbers from damaged packed weights.",
        choices=("size", "digest"),
    )

    def finish(self, model_path: Path, context: PassContext) -> None:
        """Pack in place; see :mod:`.prepack`."""
        from rewrite_rules.prepacked_weights.prepack import prepack

        prepack(model_path, context)
