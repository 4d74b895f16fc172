# SPDX-License-Identifier: MIT
"""What a server expects of a model's folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import onnxruntime

from ortplugins.model_io.model_folder import OutputFolder, model_in
from ortplugins.runtime.optimizer_settings import ALL_OPTIMIZERS, OptimizerSettings

# Given the new folder, its model, a session on that and the settings that sessions need.
Finish = Callable[[Path, Path, onnxruntime.InferenceSession, Mapping[str, str]], None]


@dataclasses.dataclass(frozen=True)
class Layout:
    """A folder to write.

    Attributes:
        folder: Where from and where to.
        finish: Checks the model against the configurations and writes them.
        optimizers: How the server's sessions will optimise the model.
    """

    folder: OutputFolder
    finish: Finish = lambda *_: None
    optimizers: OptimizerSettings = ALL_OPTIMIZERS


def plain_layout(model: Path, target: Path, overwrite: bool) -> Layout:
    """Return the layout of the source: of a file the model alone, of a folder all.

    Raises:
        MissingFileError, ModelFileError: If a folder does not hold one model.
    """
    is_folder = model.is_dir()
    return Layout(
        OutputFolder(
            model if is_folder else model.parent,
            model_in(model),
            target,
            overwrite,
            companions=is_folder,
        )
    )
