# SPDX-License-Identifier: MIT
"""A folder with one model, and its tokenizer."""

from __future__ import annotations

import os
from pathlib import Path

from ortplugins.errors import MissingFileError, ModelFileError


def model_in(path: str | os.PathLike[str]) -> Path:
    """Return a model's file: the path itself, or the only .onnx file in a folder.

    Files in the folder itself take precedence over those in its subfolders.
    """
    folder = Path(path)
    if not folder.is_dir():
        return folder
    found = sorted(folder.glob("*.onnx")) or sorted(folder.rglob("*.onnx"))
    if not found:
        raise MissingFileError(f"{folder}: no .onnx file in this folder")
    if len(found) > 1:
        named = ", ".join(str(item.relative_to(folder)) for item in found[:5])
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        raise ModelFileError(
            f"{folder}: holds {len(found)} models, {named}{more}: give the path of one"
        )
    return found[0]


def tokenizer_beside(path: str | os.PathLike[str]) -> Path | None:
    """Return the ``tokenizer.json`` next to a model, or in its folder; None without one."""
    folder = Path(path) if os.path.isdir(path) else Path(path).parent
    tokenizer = folder / "tokenizer.json"
    if tokenizer.is_file():
        return tokenizer
    below = list(folder.glob("*/tokenizer.json")) if os.path.isdir(path) else []
    return below[0] if len(below) == 1 else None
