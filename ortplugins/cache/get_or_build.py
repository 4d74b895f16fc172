# SPDX-License-Identifier: MIT
"""The cache's one way in: what a session opens of a request, found or built.

The key is the files' content. What a start found is kept, so that later ones on files that
have not changed since read none of them, see :mod:`ortplugins.known_starts`.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ortplugins.cache.key import cache_of, is_usable, look_up
from ortplugins.cache.store import ArtifactCache, Entry, warn_rebuilt
from ortplugins.errors import PassError
from ortplugins.known_starts import MANIFEST, MODEL, Artifact, cache_folder, keep, state_of
from ortplugins.runtime.machine import missing_packages
from session_options.passes import NOTHING_TO_DO, Pass

if TYPE_CHECKING:
    from ortplugins.cache.build import Build
    from ortplugins.optimization.request import BuildRequest
    from session_options.plan import Plan


def get_or_build(request: BuildRequest, build: Build, text: str | None = None) -> Artifact:
    """Return what a session opens: of the entry of a request, which is found or built.

    It is kept under the ``text`` of a start, for others like it.

    Raises:
        MissingFileError, ModelFileError: If the model cannot be used.
        PassError: If nothing can be built.
    """
    started = time.time()
    if (state := _lacks_operators(request)) is not None:
        artifact = Artifact(_nothing_to_do(request.plan))
        _keep(request, text, artifact, None, {request.name: state}, started)
        return artifact
    cache = cache_of(request.plan)
    entry, content = look_up(request, cache)
    if entry is not None and is_usable(entry, request.plan, warn=True):
        artifact = _artifact_of(entry, "cache", request)
    else:
        entry, artifact = _built(request, build, cache)
        if artifact.temporary is not None:
            return artifact
        _, content = look_up(request, cache)
    # The files may have changed since the entry was found, or while it was built.
    is_theirs = content is not None and content.is_like(entry.manifest["made_from"])
    if content is not None and is_theirs and not entry.manifest["provisional"]:
        _keep(request, text, artifact, entry, content.states, started)
    return artifact


def _lacks_operators(request: BuildRequest) -> str | None:
    """Return the state of a model's file that does not name any operator the passes need.

    None where it names one, or where a pass looks at every model.
    """
    names = [item.needs_operator for item in request.plan.passes]
    if request.plan.hint or not all(names) or isinstance(request.source, bytes):
        return None
    try:
        state = state_of(request.name)
        with (
            open(request.name, "rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            is_named = any(content.find(name.encode()) >= 0 for name in names)
    except (OSError, ValueError):  # whoever loads it says what is wrong
        return None
    return None if is_named else state


def _nothing_to_do(plan: Plan) -> dict[str, Any]:
    """Return the report; a Report would take milliseconds to import."""
    remark = {"node": "model", "outcome": "note", "reason": NOTHING_TO_DO}
    passes = [{"name": item.name, "seconds": 0.0, "remarks": [remark]} for item in plan.passes]
    return {"source": "untouched", "passes": passes, "notes": (), "artifact": "", "fired": 0}


def _built(
    request: BuildRequest, build: Build, cache: ArtifactCache
) -> tuple[Entry, Artifact]:
    """Have an entry built and published; in a temporary folder where there is no cache."""
    if missing := missing_packages():
        raise PassError(
            f"{request.name}: not in the cache {str(cache.root)!r}, and nothing can be built "
            f"without {', '.join(missing)}: pip install {' '.join(missing)}, or warm the cache"
        )
    try:
        temporary = tempfile.TemporaryDirectory(prefix="ortplugins-")
    except OSError as error:
        raise PassError(f"no temporary folder to build in: {error}") from error
    artifact = None
    try:
        from ortplugins.cache.build import build_entry, build_in_child

        spare = Path(temporary.name)
        built = build_in_child(request, spare, build) or build_entry(request, spare, build)
        folder, origin = built
        is_spare = folder.is_relative_to(spare)
        entry = (ArtifactCache(spare) if is_spare else cache).find(folder.name)
        if entry is None:
            raise PassError(f"{folder}: was removed as soon as it was built")
        artifact = _artifact_of(entry, origin, request)
        if is_spare:
            artifact.temporary = temporary
        return entry, artifact
    finally:
        if artifact is None or artifact.temporary is None:
            temporary.cleanup()


def _artifact_of(entry: Entry, origin: str, request: BuildRequest) -> Artifact:
    manifest = entry.manifest
    settings = dict(manifest["session_settings"])
    if MODEL not in manifest["files"]:
        # A hint may change nothing but settings; passes that modify nothing need none.
        settings = settings if request.plan.hint else {}
        source = origin if settings else "untouched"
        return Artifact({**manifest["report"], "source": source}, settings=settings)
    data = manifest["data"]
    settings |= request.data_settings(data, entry.folder)
    model = os.path.join(entry.folder, MODEL)
    report = {**manifest["report"], "source": origin, "artifact": model}
    flags = ("b" if manifest["baked"] else "") + ("d" if data else "")
    artifact = Artifact(report, model, settings, flags)
    artifact.source = manifest["model_given"]
    return artifact


def _keep(
    request: BuildRequest,
    text: str | None,
    artifact: Artifact,
    entry: Entry | None,
    states: dict[str, str],
    started: float,
) -> None:
    """Keep what a start opened, for the next one that depends on the same text and files."""
    plan = request.plan
    if text is None or plan.retry_failed or any(x.checks_digests() for x in plan.passes):
        return
    artifact.opened = any(type(item).opened is not Pass.opened for item in plan.passes)
    folder = None if entry is None else os.fspath(entry.folder)
    names = [] if entry is None else [MANIFEST, *entry.manifest["files"]]
    keep(cache_folder(plan.cache_dir), text, artifact, folder, names, states, started)


def discard_if_damaged(request: BuildRequest, artifact: Artifact) -> bool:
    """Take an artifact that changed on disk out of the cache; return whether that was so."""
    if artifact.model is None or artifact.temporary is not None:
        return False
    cache, key = cache_of(request.plan), Path(artifact.model).parent.name
    entry = cache.find(key)
    if entry is None:  # removed a moment ago
        return True
    if not (damaged := entry.damage()):
        return False
    try:
        cache.discard(key, entry.manifest)
    except (OSError, ImportError):  # it is read-only, or filelock is not installed
        return False
    warn_rebuilt(entry.folder, damaged)
    return True
