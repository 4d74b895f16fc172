# SPDX-License-Identifier: MIT
"""What rules have in common that rewrite one layer after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from onnxscript.rewriter import RewriteRuleClassBase

from rewrite_rules.remarks import Remarks
from rewrite_rules.shapes.proved_shapes import ProvedShapes


class LayerRule(RewriteRuleClassBase):
    """A rule that reads proved shapes, makes remarks, and emits once what layers share."""

    def __init__(self, facts: ProvedShapes, remarks: Remarks) -> None:
        super().__init__(remove_nodes=False)
        self._facts = facts
        self._remarks = remarks
        self._shared: dict[object, Any] = {}

    def _once(self, key: object, emit: Callable[[], Any]) -> Any:
        """Return what was emitted for a key by an earlier layer, or emit it."""
        if key not in self._shared:
            self._shared[key] = emit()
        return self._shared[key]
