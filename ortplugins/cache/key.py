# SPDX-License-Identifier: MIT
"""What an entry of the cache depends on: digests of the model's files, and the request."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ortplugins import known_starts
from ortplugins.errors import MissingFileError, ModelFileError
from ortplugins.known_starts import ABSENT
from ortplugins.model_io.data_in_place import data_file, data_folders, in_place
from ortplugins.optimization.request import BuildRequest
from ortplugins.runtime.machine import missing_packages

# Layout of the cache; another number is another cache.
_FORMAT = 5
# The end of a key: the beginning of the model's digest. It names the model's lock, too.
MODEL_CHARACTERS = 16
# From this size on, hashing takes a noticeable part of a start.
_MEMO_SIZE = 1 << 20


class KeyContent(NamedTuple):
    """What the key of an entry is made from."""

    parts: dict[str, Any]
    states: dict[str, str]  # of the files when they were read, by their paths

    @property
    def key(self) -> str:
        """The key: a digest, and at its end the beginning of the model's."""
        text = json.dumps(self.parts, sort_keys=True)
        model: str = self.parts["digest"][:MODEL_CHARACTERS]
        return hashlib.sha256(text.encode()).hexdigest()[: 40 - len(model)] + model

    def is_like(self, parts: Mapping[str, Any]) -> bool:
        """Whether an entry of these parts will do: all but packages that are missing here."""
        found = [json.loads(json.dumps(item)) for item in (parts, self.parts)]
        for item in found:
            for name in missing_packages():
                del item["versions"][name]
        return bool(found[0] == found[1])


def key_content(
    request: BuildRequest, root: Path, locations_of: Callable[[str], Sequence[str] | None]
) -> KeyContent | None:
    """Return what the key is made from; None where data is missing, or not known where.

    ``locations_of`` says where a model, by its digest, has its external data.
    """
    digest, states = digest_of(request, root)
    if (locations := locations_of(digest)) is None:
        return None
    folders = data_folders(request.name, request.data_folder)
    files = {x: Path(data_file(x, folders)) for x in locations}
    data = {}
    try:
        for location, path in files.items():
            data[location], state = file_digest(path, root)
            # By the paths that may lead there: a link may come to lead elsewhere.
            paths = [os.path.join(folder, location) for folder in folders]
            number = next(i for i, x in enumerate(paths) if os.path.exists(x))
            states |= {**dict.fromkeys(paths[:number], ABSENT), paths[number]: state}
    except (OSError, StopIteration):
        return None
    parts, placed = request.key_parts(), in_place(files)
    if placed is not None and any(x != name for x, name in placed.names.items()):
        parts["data_names"] = placed.names
    return KeyContent({"format": _FORMAT, "digest": digest, "data": data, **parts}, states)


def digest_of(request: BuildRequest, root: Path) -> tuple[str, dict[str, str]]:
    """Return the digest of the .onnx file; and, by its path, the state that it was read in."""
    if isinstance(request.source, bytes):
        return hashlib.sha256(request.source).hexdigest(), {}
    try:
        digest, state = file_digest(request.name, root)
    except FileNotFoundError:
        raise MissingFileError(f"{request.name}: no such model file") from None
    except OSError as error:
        raise ModelFileError(f"{request.name}: cannot be read: {error}") from error
    return digest, {request.name: state}


def file_digest(path: str | os.PathLike[str], root: Path) -> tuple[str, str]:
    """Return the SHA-256 of a file, and the state in which the file has it.

    A large one of which a memo below ``root`` has it is not read.

    Raises:
        OSError: If it can't be read, or changes while it is.
    """
    name, started = os.path.realpath(path), time.time()
    with open(name, "rb") as file:
        state = known_starts.state_of_open(file.fileno())
        is_large = os.fstat(file.fileno()).st_size >= _MEMO_SIZE
        memo = known_starts.recall(root, _digest_text(name)) if is_large else None
        if memo is not None and known_starts.state_of(name) == state:  # of the open file
            return memo[0], state
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if known_starts.state_of_open(file.fileno()) != state:
            raise OSError(f"{name}: changed while it was read")
    if is_large:
        known_starts.remember(root, _digest_text(name), {name: state}, [digest], started)
    return digest, state


def share_digests(paths: Iterable[str], root: Path) -> None:
    """Keep the digests of files for copies of them, beside which nothing can be written.

    Once no time stamp can hide another change.
    """
    for path in paths:
        if not os.path.exists(path) or os.stat(path).st_size < _MEMO_SIZE:
            continue
        digest, state = file_digest(path, root)
        time.sleep(max(0.0, known_starts.seconds_to_settle(state)))
        name = os.path.realpath(path)
        states = {name: state}
        known_starts.remember(
            root, _digest_text(name), states, [digest], time.time(), shared=True
        )


def _digest_text(name: str) -> str:
    return f"digest of {name}"
