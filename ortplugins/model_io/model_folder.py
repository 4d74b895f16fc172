# SPDX-License-Identifier: MIT
"""A folder with one model, its tokenizer and its configuration files."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

from ortplugins.errors import MissingFileError, ModelFileError
from ortplugins.model_io.saving import REPLACED, scratch_within

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


@dataclasses.dataclass(frozen=True)
class OutputFolder:
    """A folder to be written with another form of a folder's model."""

    source: Path
    model: Path
    target: Path
    overwrite: bool = False  # replace what is in the target
    companions: bool = True  # copy the files that belong to the model

    @property
    def location(self) -> Path:
        """Where the .onnx file goes, relative to the target."""
        return self.model.relative_to(self.source)

    @property
    def written_model(self) -> Path:
        """The .onnx file to write."""
        return self.target / self.location

    def check(self) -> None:
        """Raise, before any work is done, if the folder cannot be written."""
        source, target = (
            Path(os.path.realpath(self.source)),
            Path(os.path.realpath(self.target)),
        )
        if source.is_relative_to(target) or (
            self.companions and target.is_relative_to(source)
        ):
            raise ModelFileError(
                f"{self.target}: is the model's own folder, or one within the other; choose "
                "another output"
            )
        if not target.parent.is_dir():
            raise ModelFileError(f"{self.target}: the folder above it does not exist")
        if not target.exists():
            return
        if not target.is_dir():
            raise NotADirectoryError(f"{self.target}: is a file, and the model is a folder")
        data = self.written_model.with_name(f"{self.written_model.name}.data")
        known = {self.written_model, data, *(self.target / x for x in self._companions())}
        others = [p for p in self.target.rglob("*") if not p.is_dir() and p not in known]
        if self.overwrite and others:
            raise FileExistsError(
                f"{others[0]}: would be lost; move it, or choose another output"
            )
        if not self.overwrite and any(target.iterdir()):
            raise FileExistsError(
                f"{self.target}: exists; --force or overwrite=True overwrites it"
            )

    @contextlib.contextmanager
    def staged(self, without: Collection[Path]) -> Iterator[Path]:
        """Yield the path to write the model to; the complete folder appears afterwards.

        Companion files are there already, except for ``without``.
        """
        target = Path(os.path.realpath(self.target))
        left = {os.path.realpath(path) for path in without}
        with scratch_within(target.parent) as scratch:
            folder = Path(scratch, "new")
            model = folder / self.location
            model.parent.mkdir(parents=True)
            for name in self._companions():
                if os.path.realpath(self.source / name) not in left:
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(self.source / name, folder / name)
            yield model
            old = Path(scratch, REPLACED)
            try:
                if target.exists():
                    target.rename(old)
                folder.rename(target)
            finally:  # if anything went wrong between the two
                if old.exists() and not target.exists():
                    old.rename(target)

    def _companions(self) -> list[Path]:
        """Return the companion files, relative to the source: no weights, nothing hidden."""
        if not self.companions:
            return []
        found = (path.relative_to(self.source) for path in sorted(self.source.rglob("*")))
        return [
            name
            for name in found
            if (self.source / name).is_file()
            and name.suffix not in _WEIGHTS
            and not any(part.startswith(".") for part in name.parts)
        ]
