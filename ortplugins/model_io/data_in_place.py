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
