# SPDX-License-Identifier: MIT
"""What an entry of the cache depends on, its key, and whether the entry is there."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ortplugins.cache import store
from ortplugins.cache.store import ArtifactCache, Entry
from ortplugins.errors import MissingFileError, ModelFileError
from ortplugins.known_starts import ABSENT
from ortplugins.model_io.data_in_place import data_file, data_folders, in_place
from ortplugins.optimization.request import BuildRequest
from ortplugins.runtime.machine import missing_packages
from session_options import Plan
from session_options.keys import PREFIX, parse_size

# Layout of the cache; another number is another cache.
_FORMAT = 5
# After this time a start tries again what broke in an earlier one.
_RETRY_SECONDS = 60.0


class KeyContent(NamedTuple):
    """What the key of an entry is made from."""

    parts: dict[str, Any]
    states: dict[str, str]  # of the files when they were read, by their paths

    @property
    def key(self) -> str:
        """The key: a digest, and at its end the beginning of the model's."""
        text = json.dumps(self.parts, sort_keys=True)
        model: str = self.parts["digest"][: store.MODEL_CHARACTERS]
        return hashlib.sha256(text.encode()).hexdigest()[: 40 - len(model)] + model

    def is_like(self, parts: Mapping[str, Any]) -> bool:
        """Whether an entry of these parts will do: all but packages that are missing here."""
        found = [json.loads(json.dumps(item)) for item in (parts, self.parts)]
        for item in found:
            for name in missing_packages():
                del item["versions"][name]
        return bool(found[0] == found[1])


def look_up(
    request: BuildRequest, cache: ArtifactCache
) -> tuple[Entry | None, KeyContent | None]:
    """Return the entry of a request, and its key's content; None where there is none yet."""
    content = key_content(request, cache)
    if content is None:
        return None, None
    entry = cache.find(content.key)
    if entry is None and missing_packages():
        # Built where they are installed, whose versions are not known here.
        keys = (
            key
            for key, parts in cache.made_from(content.parts["digest"])
            if content.is_like(parts)
        )
        entry = next(filter(None, map(cache.find, keys)), None)
    return entry, content


def is_usable(entry: Entry, plan: Plan, *, warn: bool = False) -> bool:
    """Whether a session may open an entry; else it is built again."""
    if any(item.checks_digests() for item in plan.passes) and (damaged := entry.damage()):
        if warn:
            store.warn_rebuilt(entry.folder, damaged)
        return False
    # Workers that start together don't all try again what has just failed.
    is_old = abs(time.time() - entry.created) > _RETRY_SECONDS
    retries = (is_old and entry.manifest["provisional"]) or (
        plan.retry_failed and entry.manifest["failed"]
    )
    return not retries or bool(missing_packages())


def cache_of(plan: Plan) -> ArtifactCache:
    """Return the cache of a plan's sessions."""
    variable, limit = "ORTPLUGINS_CACHE_LIMIT", None
    if plan.cache_limit:
        limit = parse_size(f"{PREFIX}.cache_limit", plan.cache_limit)
    elif text := os.environ.get(variable, ""):
        limit = parse_size(f"environment variable {variable}", text)
    return ArtifactCache(store.cache_root(plan.cache_dir), limit)


def session_key_content(request: BuildRequest, cache: ArtifactCache) -> KeyContent:
    """Return everything that the entry of a request depends on."""
    content = key_content(request, cache)
    if content is None:  # a new model, or one whose data is missing, which loading reports
        content = key_content(request, cache, list(request.load().data_files))
    if content is None:
        raise MissingFileError(f"{request.name}: its data vanished while it was read")
    return content


def key_content(
    request: BuildRequest, cache: ArtifactCache, locations: Sequence[str] | None = None
) -> KeyContent | None:
    """Return what the key is made from; None where data is missing, or not known where."""
    digest, states = digest_of(request, cache)
    if locations is None and (locations := cache.data_locations(digest)) is None:
        return None
    folders = data_folders(request.name, request.data_folder)
    files = {x: Path(data_file(x, folders)) for x in locations}
    data = {}
    try:
        for location, path in files.items():
            data[location], state = cache.file_digest(path)
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


def digest_of(request: BuildRequest, cache: ArtifactCache) -> tuple[str, dict[str, str]]:
    """Return the digest of the .onnx file; and, by its path, the state that it was read in."""
    if isinstance(request.source, bytes):
        return hashlib.sha256(request.source).hexdigest(), {}
    try:
        digest, state = cache.file_digest(request.name)
    except FileNotFoundError:
        raise MissingFileError(f"{request.name}: no such model file") from None
    except OSError as error:
        raise ModelFileError(f"{request.name}: cannot be read: {error}") from error
    return digest, {request.name: state}
