# SPDX-License-Identifier: MIT
"""Which file a session opens: the artifact of a request, found or built.

What earlier starts found for files that have not changed since is a shortcut past
:mod:`.build`, whose key is the files' content: no file is read twice. Whatever is not known
exactly takes the long way.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ortplugins.cache.directory import (
    MODEL,
    cache_folder,
    recall,
    remember,
    state_of,
)
from ortplugins.errors import PassError

if TYPE_CHECKING:
    import tempfile

    from ortplugins.cache.store import ArtifactCache, Entry
    from ortplugins.optimization.request import BuildRequest
    from session_options.plan import Plan


class Artifact(NamedTuple):
    """What a session opens; ``model`` is None for the one that the user gave."""

    report: Mapping[str, Any]  # as Report.to_dict has it
    model: str | None = None
    baked: bool = False
    settings: Mapping[str, str] = {}  # as Pass.session_settings has them
    source: Mapping[str, Any] = {}  # what describe_model says of the user's model
    temporary: tempfile.TemporaryDirectory[str] | None = None  # if the cache cannot be written
    as_bytes: bool = False  # its data stays where the user has it


def find_or_build(request: BuildRequest) -> Artifact:
    """Find the artifact of a request in the cache, or have it built."""
    from ortplugins.cache.build import cache_of, is_usable, look_up

    root, started = cache_folder(request.plan.cache_dir), time.time()
    cache, text = cache_of(request.plan), _text(request)
    if _can_be_known(request) and (found := recall(root, text)) is not None:
        entry = cache.find(found[0])
        if entry is not None:
            return _artifact(entry.folder, entry.manifest, "cache", request)
    entry, content = look_up(request, cache)
    if entry is not None and is_usable(entry, request.plan, warn=True):
        artifact = _artifact(entry.folder, entry.manifest, "cache", request)
    else:
        artifact, entry = _build(request, cache)
        _, content = look_up(request, cache)
    if entry is None or content is None or not _can_be_known(request):
        return artifact
    # The files may have changed since the entry was found, or while it was built.
    if content.key == entry.key and not entry.manifest["provisional"]:
        remember(root, text, content.states, [entry.key], started)
    return artifact


def discard_if_damaged(request: BuildRequest, artifact: Artifact) -> bool:
    """Take an artifact that changed on disk out of the cache; return whether that was so."""
    from pathlib import Path

    from ortplugins.cache.build import cache_of
    from ortplugins.cache.store import warn_rebuilt

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
    except OSError:
        return False
    warn_rebuilt(entry.folder, damaged)
    return True


def _build(request: BuildRequest, cache: ArtifactCache) -> tuple[Artifact, Entry | None]:
    """Return what was built; the entry too, unless it goes with the session."""
    import tempfile
    from pathlib import Path

    from ortplugins.cache.build import build_entry, build_in_child
    from ortplugins.cache.store import ArtifactCache

    if request.plan.hint:
        from ortplugins.runtime.session_settings import custom_op_libraries

        request = request._replace(custom_op_libraries=custom_op_libraries())
    try:
        temporary = tempfile.TemporaryDirectory(prefix="ortplugins-")
    except OSError as error:
        raise PassError(f"no temporary folder to build in: {error}") from error
    keep = False
    try:
        spare = Path(temporary.name)
        folder, origin = build_in_child(request, spare) or build_entry(request, spare)
        is_spare = folder.is_relative_to(spare)
        entry = (ArtifactCache(spare) if is_spare else cache).find(folder.name)
        if entry is None:
            raise PassError(f"{folder}: was removed as soon as it was built")
        artifact = _artifact(folder, entry.manifest, origin, request)
        keep = is_spare and artifact.model is not None
        artifact = artifact._replace(temporary=temporary if keep else None)
        return artifact, None if is_spare else entry
    finally:
        if not keep:
            temporary.cleanup()


def _artifact(
    folder: str | os.PathLike[str],
    manifest: Mapping[str, Any],
    origin: str,
    request: BuildRequest,
) -> Artifact:
    settings = dict(manifest["session_settings"])
    if MODEL not in manifest["files"]:
        # A hint may change nothing but settings; passes that modify nothing need none.
        settings = settings if request.plan.hint else {}
        source = origin if settings else "untouched"
        return Artifact({**manifest["report"], "source": source}, settings=settings)
    data = manifest["data"]
    settings |= request.data_settings(data, folder)
    model = os.path.join(folder, MODEL)
    report = {**manifest["report"], "source": origin, "artifact": model}
    return Artifact(
        report,
        model,
        bool(manifest["baked"]),
        settings,
        manifest["model_given"],
        as_bytes=bool(data),
    )


def lacks_operators(path: str, plan: Plan) -> bool:
    """Whether each pass needs an operator that the model's file does not even name."""
    names = sorted(item.needs_operator for item in plan.passes)
    if plan.hint or not all(names):
        return False
    root, started = cache_folder(plan.cache_dir), time.time()
    text = json.dumps({"lacks": names, "path": path})
    if recall(root, text) is not None:
        return True
    import mmap

    try:
        state = state_of(path)
        with (
            open(path, "rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            found = any(content.find(name.encode()) >= 0 for name in names)
    except (OSError, ValueError):  # whoever loads it says what is wrong
        return False
    if not found:
        remember(root, text, {path: state}, [], started)
    return not found


def _can_be_known(request: BuildRequest) -> bool:
    plan = request.plan
    reads_files = any(item.checks_digests() for item in plan.passes)
    return not isinstance(request.source, bytes) and not plan.retry_failed and not reads_files


def _text(request: BuildRequest) -> str:
    parts = {**request.key_parts(), "path": request.name, "data": request.data_folder}
    return json.dumps(parts, sort_keys=True)
