# SPDX-License-Identifier: MIT
"""The cache's one way in: the entry of a request, found or built."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ortplugins.cache.key import KeyContent, cache_of, is_usable, look_up
from ortplugins.cache.store import ArtifactCache, Entry
from ortplugins.errors import PassError
from ortplugins.runtime.machine import missing_packages

if TYPE_CHECKING:
    from ortplugins.cache.build import Build
    from ortplugins.optimization.request import BuildRequest


class Got(NamedTuple):
    """An entry, and where it comes from."""

    entry: Entry
    origin: str  # "cache" or "built"
    content: KeyContent | None  # of its key, with the files' states; None if these changed
    temporary: tempfile.TemporaryDirectory[str] | None = None  # if it is in no cache


def get_or_build(request: BuildRequest, build: Build) -> Got:
    """Return the entry of a request from the cache; else have it built and published.

    Raises:
        MissingFileError, ModelFileError: If the model cannot be used.
        PassError: If nothing can be built.
    """
    cache = cache_of(request.plan)
    entry, content = look_up(request, cache)
    if entry is not None and is_usable(entry, request.plan, warn=True):
        return Got(entry, "cache", content)
    if missing := missing_packages():
        raise PassError(
            f"{request.name}: not in the cache {str(cache.root)!r}, and nothing can be built "
            f"without {', '.join(missing)}: pip install {' '.join(missing)}, or warm the cache"
        )
    try:
        temporary = tempfile.TemporaryDirectory(prefix="ortplugins-")
    except OSError as error:
        raise PassError(f"no temporary folder to build in: {error}") from error
    keeps = False
    try:
        from ortplugins.cache.build import build_entry, build_in_child

        spare = Path(temporary.name)
        built = build_in_child(request, spare, build) or build_entry(request, spare, build)
        folder, origin = built
        is_spare = folder.is_relative_to(spare)
        found = (ArtifactCache(spare) if is_spare else cache).find(folder.name)
        if found is None:
            raise PassError(f"{folder}: was removed as soon as it was built")
        if keeps := is_spare:
            return Got(found, origin, None, temporary)
        _, content = look_up(request, cache)
        return Got(found, origin, content)
    finally:
        if not keeps:
            temporary.cleanup()
