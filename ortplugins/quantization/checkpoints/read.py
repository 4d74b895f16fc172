# SPDX-License-Identifier: MIT
"""Opens a checkpoint, and finds out by what it holds of which format it is."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ortplugins.errors import MissingFileError, ModelFileError
from ortplugins.quantization.checkpoints.checkpoint import Checkpoint
from ortplugins.quantization.checkpoints.compressed_tensors import CompressedTensors
from ortplugins.quantization.checkpoints.gguf import GgufCheckpoint
from ortplugins.quantization.checkpoints.gptq import GptqCheckpoint
from ortplugins.quantization.checkpoints.safetensors_folder import read_json

_CONFIG_FILES = ("config.json", "quantize_config.json", "quant_config.json")


def read_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Find out what is in a file or folder.

    Raises:
        MissingFileError, ModelFileError: If there is no checkpoint, or one that is not read.
        UsageError: If the package that reads it is not installed.
    """
    folder = Path(path)
    if not folder.exists():
        raise MissingFileError(f"{folder}: no such file or folder")
    if folder.is_file():
        return GgufCheckpoint(folder)
    if (config := _config(folder)) is None:
        files = sorted(folder.glob("*.gguf"))
        if len({re.sub(r"-\d{5}-of-\d{5}", "", file.name) for file in files}) > 1:
            raise ModelFileError(f"{folder}: several .gguf files: name one of them")
        if not files:
            raise MissingFileError(
                f"{folder}: neither config.json with quantization_config nor "
                f"{_CONFIG_FILES[1]}, and no .gguf file"
            )
        return GgufCheckpoint(files[0])
    if str(config.get("quant_method")).lower() in ("compressed-tensors", "compressed_tensors"):
        return CompressedTensors(folder, config)
    return GptqCheckpoint(folder, config)


def _config(folder: Path) -> Mapping[str, Any] | None:
    """Return what a folder says of its quantisation."""
    for name in _CONFIG_FILES:
        if (folder / name).is_file():
            config = found = read_json(folder / name)
            if name == "config.json":
                config = found.get("quantization_config", found.get("compression_config"))
            if isinstance(config, dict):
                return config
    return None
