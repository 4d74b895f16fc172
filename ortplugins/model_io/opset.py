# SPDX-License-Identifier: MIT
"""The opset that a quantised form needs."""

from __future__ import annotations

import onnx_ir as ir

from ortplugins.errors import ModelFileError
from rewrite_rules.graph.opset_conversion import convert_opset


def raise_opset(model: ir.Model, opset: int, reason: str, advice: str = "") -> list[str]:
    """Convert a model in place to an opset that a ``reason`` needs; return a note of that.

    Raises:
        ModelFileError: If the conversion fails; ends with what to do instead.
    """
    found = model.opset_imports.get("", 0)
    if found >= opset:
        return []
    if why := convert_opset(model, opset):
        raise ModelFileError(
            f"the model has opset {found}; {reason} needs {opset}, and the conversion failed: "
            f"{why}. Export it with opset {opset}{advice}"
        )
    return [f"opset {found} was converted to {opset}: {reason} needs it"]
