# SPDX-License-Identifier: MIT
"""What an entry of the cache depends on: digests of the model's files, and the request."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ortplugins import known_starts
from ortplugins.errors import MissingFileError, ModelFileError
from ortplugins.known_starts import ABSENT
from ortplugins.model_io.data_in_place import data_file, data_folders, in_place
from ortplugins.optimization.request import BuildRequest

# Layout of the cache; another number is another cache.
_FORMAT = 5
# The end of a key: the beginning of the model's digest. It names the model's lock, too.
MODEL_CHARACTERS = 16


class KeyContent(NamedTuple):
    """What the key of an entry is made from."""

    parts: dict[str, Any]
    states: dict[str, str]  # of the files when they were read, by their paths

    @property
    def is_known(self) -> bool:
        """Whether the model's data is there, and where it is was known."""
        return self.parts["data"] is not None

    @property
    def key(self) -> str:
        """The key: a digest, and at its end the beginning of the model's."""
        text = json.dumps(self.parts, sort_keys=True)
        model: str = self.parts["digest"][:MODEL_CHARACTERS]
        return hashlib.sha256(text.encode()).hexdigest()[: 40 - len(model)] + model


def key_content(
    request: BuildRequest, root: Path, locations_of: Callable[[str], Sequence[str] | None]
) -> KeyContent:
    """Return what the key is made from.

    ``locations_of`` says where a model, by its digest, has its external data; None if that is
    not known.

    Raises:
        MissingFileError, ModelFileError: If the model cannot be read.
    """
    digest, states = _digest_of(request, root)
    parts = {"format": _FORMAT, "digest": digest, "data": None, **request.key_parts()}
    if (locations := locations_of(digest)) is None:
        return KeyContent(parts, states)
    folders = data_folders(request.name, request.data_folder)
    files = {x: Path(data_file(x, folders)) for x in locations}
    data = {}
    try:
        for location, path in files.items():
            data[location], state = known_starts.file_digest(path, root)
            # By the paths that may lead there: a link may come to lead elsewhere.
            paths = [os.path.join(folder, location) for folder in folders]
            number = next(i for i, x in enumerate(paths) if os.path.exists(x))
            states |= {**dict.fromkeys(paths[:number], ABSENT), paths[number]: state}
    except (OSError, StopIteration):
        return KeyContent(parts, states)
    placed = in_place(files)
    if placed is not None and any(x != name for x, name in placed.names.items()):
        parts["data_names"] = placed.names
    return KeyContent({**parts, "data": data}, states)


def _digest_of(request: BuildRequest, root: Path) -> tuple[str, dict[str, str]]:
    """Return the digest of the .onnx file; and, by its path, the state that it was read in."""
    if isinstance(request.source, bytes):
        return hashlib.sha256(request.source).hexdigest(), {}
    try:
        digest, state = known_starts.file_digest(request.name, root)
    except FileNotFoundError:
        raise MissingFileError(f"{request.name}: no such model file") from None
    except OSError as error:
        raise ModelFileError(f"{request.name}: cannot be read: {error}") from error
    return digest, {request.name: state}


def share_digests(paths: Iterable[str], root: Path) -> None:
    """Keep the digests of files for copies of them, beside which nothing can be written.

    Once no time stamp can hide another change.
    """
    for path in paths:
        if not os.path.exists(path) or os.stat(path).st_size < known_starts.MEMO_SIZE:
            continue
        digest, state = known_starts.file_digest(path, root)
        time.sleep(max(0.0, known_starts.seconds_to_settle(state)))
        name = os.path.realpath(path)
        text = known_starts.digest_text(name)
        known_starts.remember(root, text, {name: state}, [digest], time.time(), shared=True)
