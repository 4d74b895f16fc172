# SPDX-License-Identifier: MIT
"""Raises a model's opset by converting its nodes, never by editing the number alone."""

from __future__ import annotations

import logging

import onnx_ir as ir

from ortplugins.errors import ModelFileError


def raise_opset(model: ir.Model, opset: int, reason: str) -> bool:
    """Convert a model in place to an opset, if its own is older.

    Returns:
        Whether anything was converted.

    Raises:
        ModelFileError: If neither onnxscript's nor ONNX's converter can.
    """
    found = model.opset_imports.get("", 0)
    if found >= opset:
        return False
    from onnxscript.version_converter import ConvertVersionPass

    logger = logging.getLogger("onnxscript.version_converter")
    level = logger.level
    # It falls back to ONNX's own converter below opset 18, with a warning each time.
    logger.setLevel(logging.ERROR)
    try:
        ConvertVersionPass(opset, fallback=True)(model)
    except Exception as error:  # whatever a converter of another project raises
        raise _refused(found, opset, reason, str(error)) from error
    finally:
        logger.setLevel(level)
    if model.opset_imports.get("", 0) < opset:
        raise _refused(found, opset, reason, "onnx.version_converter gave up")
    return True


def _refused(found: int, opset: int, reason: str, why: str) -> ModelFileError:
    return ModelFileError(
        f"the model has opset {found}; {reason} needs {opset}, and the conversion failed: "
        f"{why}. Export it with opset {opset}, or take quant_format='MatMulNBits', which "
        "needs no other opset"
    )
