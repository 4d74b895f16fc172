# SPDX-License-Identifier: MIT
"""A folder with one model, its tokenizer and its configuration files."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

from ortplugins.errors import MissingFileError, ModelFileError
from ortplugins.model_io.saving import scratch_within

# Other files with weights, which would be those of the original model.
_WEIGHTS = frozenset({
    ".bin", ".ckpt", ".data", ".gguf", ".h5", ".msgpack", ".onnx", ".onnx_data", ".ort", ".pt",
    ".pth", ".safetensors",
})  # fmt: skip


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


class OutputFolder:
    """A new folder for another form of a folder's model, with the files that belong to it."""

    def __init__(self, source: Path, target: Path) -> None:
        """Check, before any work is done, that ``target`` can be made.

        Raises:
            ModelFileError: If one folder lies within the other, or no folder is above it.
            FileExistsError: If it exists and is not empty.
        """
        self._source, self._target = source, target
        own, new = Path(os.path.realpath(source)), Path(os.path.realpath(target))
        if own.is_relative_to(new) or new.is_relative_to(own):
            raise ModelFileError(
                f"{target}: is the model's own folder, or one within the other; "
                "choose another output"
            )
        if not new.parent.is_dir():
            raise ModelFileError(f"{target}: the folder above it does not exist")
        if new.exists() and (not new.is_dir() or any(new.iterdir())):
            raise FileExistsError(f"{target}: exists; remove it, or choose another output")

    @contextlib.contextmanager
    def staged(self, model: Path, without: Collection[Path]) -> Iterator[Path]:
        """Yield the path to write ``model`` to; the complete folder appears afterwards.

        Companion files are there already, except for ``without``.
        """
        target = Path(os.path.realpath(self._target))
        left = {os.path.realpath(path) for path in without}
        with scratch_within(target.parent) as scratch:
            folder = Path(scratch, "new")
            written = folder / model.relative_to(self._source)
            written.parent.mkdir(parents=True)
            for name in self._companions():
                if os.path.realpath(self._source / name) not in left:
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(self._source / name, folder / name)
            yield written
            if target.exists():  # and empty
                target.rmdir()
            folder.rename(target)

    def _companions(self) -> list[Path]:
        """Return the companion files, relative to the source: no weights, nothing hidden."""
        found = (path.relative_to(self._source) for path in sorted(self._source.rglob("*")))
        return [
            name
            for name in found
            if (self._source / name).is_file()
            and name.suffix not in _WEIGHTS
            and not any(part.startswith(".") for part in name.parts)
        ]
