# SPDX-License-Identifier: MIT
"""External data that a new model reads in place, instead of from a copy.

For a model given as bytes, onnxruntime reads external data from one folder
(``session.model_external_initializers_file_folder_path``). Hard links would be simpler, but
onnx and onnx_ir refuse a file with several links: linking the user's data would break the
user's own tools.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path

# Less data is copied: copying costs little, and the entry then needs no other file.
LEAST_BYTES = 100_000_000
# With more bytes of new tensors, the data is copied as well: tensors inside an .onnx file take
# private memory in every session.
NEW_BYTES = 10_000_000


class PlacedData(NamedTuple):
    """The folder of a model's data files, and their names in it by location."""

    folder: Path
    names: dict[str, str]


def in_place(files: Mapping[str, Path]) -> PlacedData | None:
    """Return where data files are, with links resolved; None if they are on two drives."""
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
    """Return the folders for a model's data: its own, and that of the file it links to."""
    if data_folder is not None:
        return [data_folder]
    return [os.path.dirname(model), os.path.dirname(os.path.realpath(model))]


def data_file(location: str, folders: Sequence[str]) -> str:
    """Return the path of external data with links resolved, whether it exists or not."""
    paths = [os.path.join(folder, location) for folder in folders]
    return os.path.realpath(next(filter(os.path.exists, paths), paths[0]))
