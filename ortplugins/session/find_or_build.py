# SPDX-License-Identifier: MIT
"""Which file a session opens: the artifact of a request, found or built.

The key in the cache is the files' content. What a start found is kept, so that later ones on
files that have not changed since read none of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ortplugins.cache.directory import (
    MANIFEST,
    MODEL,
    are_unchanged,
    cache_folder,
    recall,
    remember,
    state_of,
)
from ortplugins.session.hit import Artifact, fields_of
from session_options.passes import Pass

if TYPE_CHECKING:
    from pathlib import Path

    from ortplugins.cache.store import Entry
    from ortplugins.model_io.loading import LoadedModel
    from ortplugins.optimization.request import BuildRequest
    from session_options.plan import Plan


def find_or_build(request: BuildRequest, text: str | None = None) -> Artifact:
    """Find the artifact of a request in the cache, or have it built.

    It is kept under the ``text`` of a start, see :mod:`ortplugins.session.hit`, for others
    like it. Without one, its key is kept under what the request depends on.
    """
    from ortplugins.cache.get_or_build import get_or_build
    from ortplugins.cache.key import cache_of

    root, started = cache_folder(request.plan.cache_dir), time.time()
    if text is None and _can_be_known(request):
        found = recall(root, _text(request))
        known = None if found is None else cache_of(request.plan).find(found[0])
        if known is not None:
            return _artifact(known.folder, known.manifest, "cache", request)
    if request.plan.hint:
        from ortplugins.runtime.session_settings import custom_op_libraries

        request = request._replace(custom_op_libraries=custom_op_libraries())
    entry, origin, content, temporary = get_or_build(request, _build)
    artifact = _artifact(entry.folder, entry.manifest, origin, request)
    if temporary is not None:  # the cache cannot be written
        if artifact.model is None:
            temporary.cleanup()
        else:
            artifact.temporary = temporary
        return artifact
    if content is None or not _can_be_known(request):
        return artifact
    # The files may have changed since the entry was found, or while it was built.
    if content.is_like(entry.manifest["made_from"]) and not entry.manifest["provisional"]:
        keep_start(
            request.plan, text or _text(request), artifact, entry, content.states, started
        )
    return artifact


def keep_start(
    plan: Plan,
    text: str,
    artifact: Artifact,
    entry: Entry | None,
    states: Mapping[str, str],
    started: float,
) -> None:
    """Keep what a start opened, for the next one that depends on the same text and files."""
    root = cache_folder(plan.cache_dir)
    artifact.opened = any(type(item).opened is not Pass.opened for item in plan.passes)
    report = {**artifact.report, "notes": list(artifact.report["notes"])}
    folder = None if entry is None else os.fspath(entry.folder)
    names = [] if entry is None else [MANIFEST, *entry.manifest["files"]]
    with contextlib.suppress(OSError):  # the entry was removed meanwhile
        fields = fields_of(artifact, folder, names, json.dumps(report))
        remember(root, text, states, fields, started)


def discard_if_damaged(request: BuildRequest, artifact: Artifact) -> bool:
    """Take an artifact that changed on disk out of the cache; return whether that was so."""
    from pathlib import Path

    from ortplugins.cache.key import cache_of
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
    except (OSError, ImportError):  # it is read-only, or filelock is not installed
        return False
    warn_rebuilt(entry.folder, damaged)
    return True


def _build(request: BuildRequest, loaded: LoadedModel, folder: Path) -> dict[str, Any]:
    """Make the files of an entry in a folder; return its manifest."""
    if request.plan.hint:
        from ortplugins.tuning.tune import tune

        return tune(request, loaded, folder).manifest
    from ortplugins.optimization.build import build_artifact

    return build_artifact(request, loaded, folder)


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
        baked=bool(manifest["baked"]),
        settings=settings,
        source=manifest["model_given"],
        as_bytes=bool(data),
    )


def lacks_operators(path: str, plan: Plan) -> dict[str, str] | None:
    """Return the state of a model's file that does not name any operator the passes need.

    By its path; None where it names one, or where a pass looks at every model.
    """
    names = sorted(item.needs_operator for item in plan.passes)
    if plan.hint or not all(names):
        return None
    root, started = cache_folder(plan.cache_dir), time.time()
    text = json.dumps({"lacks": names, "path": path})
    import mmap

    try:
        states = {path: state_of(path)}
        if recall(root, text) is not None:
            return states if are_unchanged(states) else None
        with (
            open(path, "rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            if any(content.find(name.encode()) >= 0 for name in names):
                return None
    except (OSError, ValueError):  # whoever loads it says what is wrong
        return None
    remember(root, text, states, [], started)
    return states


def _can_be_known(request: BuildRequest) -> bool:
    plan = request.plan
    reads_files = any(item.checks_digests() for item in plan.passes)
    return not isinstance(request.source, bytes) and not plan.retry_failed and not reads_files


def _text(request: BuildRequest) -> str:
    paths = [request.name, os.path.realpath(request.name), request.data_folder]
    parts = {**request.key_parts(), "paths": paths}
    return json.dumps(parts, sort_keys=True)
