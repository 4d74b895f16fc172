# SPDX-License-Identifier: MIT
"""External data that a new model reads where the old one has it, in place of a copy.

onnxruntime takes the external data of a model that is given as bytes from one folder
(``session.model_external_initializers_file_folder_path``). Hard links would do without, but
onnx and onnx_ir refuse a file that has several: linking a user's data would break the user's
own tools.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path

    import onnx_ir as ir

# Smaller data is copied: what is saved is little, and the entry needs no other file.
LEAST_BYTES = 100_000_000
# With more new tensors than this the data is copied, too: what is inside of an .onnx file lies
# in every session's private memory.
NEW_BYTES = 10_000_000


class PlacedData(NamedTuple):
    """The folder of a model's data files, and their names there by the model's locations."""

    folder: Path
    names: dict[str, str]


def in_place(files: Mapping[str, Path]) -> PlacedData | None:
    """Return where data files are, by location, links resolved; None if on two drives."""
    from pathlib import Path

    try:
        folder = os.path.commonpath([path.parent for path in files.values()])
    except ValueError:
        return None
    names = {x: os.path.relpath(path, folder) for x, path in sorted(files.items())}
    return PlacedData(Path(folder), names)


def folder_of(names: Mapping[str, str], model: str, data_folder: str | None) -> str:
    """Return the folder of a model's data, from the names that :func:`in_place` returned."""
    location, name = next(iter(names.items()))
    path = data_file(location, data_folders(model, data_folder))
    return os.path.normpath(path.removesuffix(name))


def data_folders(model: str, data_folder: str | None) -> list[str]:
    """Return where a model's data may be: beside it, or beside the file that it links to."""
    if data_folder is not None:
        return [data_folder]
    return [os.path.dirname(model), os.path.dirname(os.path.realpath(model))]


def data_file(location: str, folders: Sequence[str]) -> str:
    """Return the path of external data, links resolved, whether it is there or not."""
    paths = [os.path.join(folder, location) for folder in folders]
    return os.path.realpath(next(filter(os.path.exists, paths), paths[0]))


def new_bytes(model: ir.Model, placed: PlacedData) -> int:
    """Return the bytes of the tensors that lie in none of the files."""
    from pathlib import Path

    from ortplugins.model_io.loading import initializer_tensors, stored_bytes
    from ortplugins.model_io.saving import original_of

    size = 0
    for _, tensor in initializer_tensors(model):
        path = getattr(original_of(tensor), "path", None)
        if path is None or placed.folder not in Path(os.path.realpath(path)).parents:
            size += stored_bytes(tensor)
    return size


def place(model: ir.Model, placed: PlacedData) -> None:
    """Have the tensors of a model that was read without its data find it."""
    from ortplugins.model_io.loading import initializer_tensors

    for _, tensor in initializer_tensors(model):
        if hasattr(tensor, "base_dir"):
            tensor.base_dir = str(placed.folder)
