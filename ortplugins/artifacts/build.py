# SPDX-License-Identifier: MIT
"""Looks an entry up in the cache, and builds the one that is not there."""

from __future__ import annotations

__all__ = ["Built", "build_entry", "is_usable", "look_up"]

import dataclasses
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ortplugins.artifacts.directory import cache_root, remove_tree
from ortplugins.artifacts.manifest import Entry, write_manifest
from ortplugins.artifacts.source_index import content_digest, content_key
from ortplugins.artifacts.store import ArtifactCache
from ortplugins.errors import MissingFileError, ModelFileError, OrtpluginsWarning, PassError
from ortplugins.optimization.request import BuildRequest
from session_options import Plan
from session_options.caller_warnings import warn_caller

if TYPE_CHECKING:
    from ortplugins.model_io.loading import LoadedModel


# After this time a start tries again what broke in an earlier one.
_RETRY_SECONDS = 60.0


@dataclasses.dataclass(frozen=True)
class Built:
    """Where an entry is.

    Attributes:
        folder: Its files.
        origin: ``"built"``; ``"cache"`` where another process was quicker.
        is_temporary: Whether it is in the folder for what the cache cannot take.
    """

    folder: Path
    origin: str
    is_temporary: bool = False


def look_up(request: BuildRequest, cache: ArtifactCache) -> Entry | None:
    """Return the entry of a request; None where there is none yet.

    Raises:
        MissingFileError, ModelFileError: If the model can't be read.
    """
    digest = _digest(request, cache)
    locations = cache.sources.data_locations(digest)
    key = None if locations is None else _key(request, digest, locations)
    return None if key is None else cache.find(key)


def is_usable(entry: Entry, plan: Plan, *, warn: bool = False) -> bool:
    """Whether a session may open an entry; else it is built again.

    Args:
        entry: The entry.
        plan: The session's.
        warn: Whether to warn of files that changed on disk.
    """
    if any(item.checks_digests() for item in plan.passes) and (
        damaged := entry.damaged_files()
    ):
        if warn:
            text = f"{entry.folder}: {', '.join(damaged)} changed on disk, and is built again"
            warn_caller(text, OrtpluginsWarning)
        return False
    # Workers that start together don't all try again what has just failed.
    is_old = abs(time.time() - entry.created) > _RETRY_SECONDS
    retries = (is_old and entry.manifest["provisional"]) or (
        plan.retry_failed and entry.manifest["failed"]
    )
    return not retries


def build_entry(request: BuildRequest, spare: Path) -> Built:
    """Build the entry of a request, one process at a time for each model.

    Args:
        request: What to build.
        spare: An empty folder that gets the entry where the cache cannot be written.

    Raises:
        MissingFileError, ModelFileError: If the model or its data can't be used.
        PassError: If a pass fails and the plan is strict, or nothing can be written.
    """
    cache = ArtifactCache(cache_root(request.plan.cache_dir))
    try:
        with cache.one_at_a_time(_digest(request, cache)):
            entry = look_up(request, cache)
            if entry is not None and is_usable(entry, request.plan):
                return Built(entry.folder, "cache")
            return _build_in_cache(request, cache)
    except (MissingFileError, PassError):
        raise
    except OSError as error:
        warn_caller(
            f"ortplugins works without its cache in {str(cache.root)!r}: {error}",
            OrtpluginsWarning,
        )
    try:
        write_manifest(spare, _build(request, request.load(), spare))
    except MissingFileError:
        raise
    except OSError as error:
        remove_tree(spare)
        raise PassError(f"{spare}: nothing can be built there: {error}") from error
    return Built(spare, "built", is_temporary=True)


def _build_in_cache(request: BuildRequest, cache: ArtifactCache) -> Built:
    digest = _digest(request, cache)
    loaded = request.load()
    locations = list(loaded.data_files)
    cache.sources.remember_data_locations(digest, locations)
    if (key := _key(request, digest, locations)) is None:
        raise FileNotFoundError("external data vanished while the model was read")
    with cache.build(key, lambda entry: is_usable(entry, request.plan)) as folder:
        if isinstance(folder, Entry):
            return Built(folder.folder, "cache")
        manifest = _build(request, loaded, folder)
        # A model replaced meanwhile must not be published under the old one's key.
        if _key(request, _digest(request, cache), locations) != key:
            raise FileNotFoundError("the model changed while it was read")
        return Built(cache.publish(key, folder, manifest).folder, "built")


def _build(request: BuildRequest, loaded: LoadedModel, folder: Path) -> dict[str, Any]:
    from ortplugins.optimization.build import build_artifact

    return {**build_artifact(request, loaded, folder), "model": request.name}


def _digest(request: BuildRequest, cache: ArtifactCache) -> str:
    """Digest of the .onnx file as it is now.

    Raises:
        MissingFileError, ModelFileError: If it can't be read.
    """
    if isinstance(request.source, bytes):
        return content_digest(request.source)
    try:
        return cache.sources.file_digest(request.name)
    except FileNotFoundError:
        raise MissingFileError(f"{request.name}: there is no such model file") from None
    except OSError as error:
        raise ModelFileError(f"{request.name}: cannot be read: {error.strerror}") from error


def _key(request: BuildRequest, digest: str, locations: Sequence[str]) -> str | None:
    """Key of the entry; None when a data file is missing."""
    files = [_data_file(request, location) for location in sorted(locations)]
    return content_key(digest, files, request.key_parts())


def _data_file(request: BuildRequest, location: str) -> Path:
    """Where external data lies: beside the model, or beside the file that it links to."""
    folders = [Path(request.data_folder or "")]
    if request.data_folder is None and not isinstance(request.source, bytes):
        folders = [Path(request.name).parent, Path(os.path.realpath(request.name)).parent]
    found = next((f / location for f in folders if (f / location).exists()), None)
    return Path(os.path.realpath(found or folders[0] / location))
