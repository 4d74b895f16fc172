# SPDX-License-Identifier: MIT
"""A folder with one model, and the tokenizer and configurations that belong to it."""

from __future__ import annotations

__all__ = ["model_in", "tokenizer_beside"]

import os
from pathlib import Path

from ortplugins.errors import MissingFileError, ModelFileError


def model_in(path: str | os.PathLike[str]) -> Path:
    """Return a model's file: the path itself, or the one .onnx file in a folder.

    Those that lie in the folder itself go before those of its subfolders.

    Raises:
        MissingFileError: If a folder holds no .onnx file.
        ModelFileError: If it holds several; names them.
    """
    folder = Path(path)
    if not folder.is_dir():
        return folder
    found = sorted(folder.glob("*.onnx")) or sorted(folder.rglob("*.onnx"))
    if not found:
        raise MissingFileError(f"{folder}: there is no .onnx file in this folder")
    if len(found) > 1:
        named = ", ".join(str(item.relative_to(folder)) for item in found[:5])
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        raise ModelFileError(
            f"{folder}: holds {len(found)} models, {named}{more}: give the path of one"
        )
    return found[0]


def tokenizer_beside(path: str | os.PathLike[str]) -> Path | None:
    """Return the ``tokenizer.json`` of a model, or of a folder; None if there is none."""
    folder = Path(path) if os.path.isdir(path) else Path(path).parent
    tokenizer = folder / "tokenizer.json"
    return tokenizer if tokenizer.is_file() else None
