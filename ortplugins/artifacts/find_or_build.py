# SPDX-License-Identifier: MIT
"""Which file a session opens: the artifact of a request, found or built."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ortplugins.artifacts.directory import cache_folder
from ortplugins.artifacts.known_starts import find_known_start, remember_start
from ortplugins.errors import PassError
from ortplugins.optimization.request import BuildRequest

if TYPE_CHECKING:
    import tempfile

    from ortplugins.artifacts.manifest import Entry
    from ortplugins.artifacts.store import ArtifactCache


class Artifact(NamedTuple):
    """What a session opens.

    Attributes:
        report: What was done to the model, as ``Report.to_dict`` has it.
        model: Path of the model; None for the one that the user gave.
        baked: Whether onnxruntime's optimisers have run already.
        settings: What the model needs of its session, see ``Pass.session_settings``.
        source: What the manifest says of the user's model: ``inputs``, ``initializers``.
        temporary: Folder to remove after the start, where there is no cache.
        as_bytes: Whether the model is opened as bytes: its data stays where the user has it.
    """

    report: Mapping[str, Any]
    model: str | None = None
    baked: bool = False
    settings: Mapping[str, str] = {}
    source: Mapping[str, Any] = {}
    temporary: tempfile.TemporaryDirectory[str] | None = None
    as_bytes: bool = False


def find_or_build(request: BuildRequest) -> Artifact:
    """Find the artifact of a request in the cache, or have it built."""
    root, started = cache_folder(request.plan.cache_dir), time.time()
    known = find_known_start(root, request)
    if known is not None:
        return _artifact(*known, "cache", request)
    # The long way is by content, and imports more.
    from ortplugins.artifacts.build import cache_of, is_usable, look_up, source_files

    cache = cache_of(request.plan)
    entry = look_up(request, cache)
    if entry is not None and is_usable(entry, request.plan, warn=True):
        artifact = _artifact(entry.folder, entry.manifest, "cache", request)
    else:
        artifact, entry = _build(request, cache)
    if entry is not None and not entry.manifest["provisional"]:
        files = source_files(request, cache)
        if files is not None:
            remember_start(root, request, entry.folder.name, files, started)
    return artifact


def discard_if_damaged(request: BuildRequest, artifact: Artifact) -> bool:
    """Take an artifact that cannot be opened out of the cache, if its files changed on disk.

    Returns:
        Whether the next :func:`find_or_build` of the request builds it again.
    """
    from pathlib import Path

    from ortplugins.artifacts.build import cache_of, warn_rebuilt

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
    warn_rebuilt(entry, damaged)
    return True


def _build(request: BuildRequest, cache: ArtifactCache) -> tuple[Artifact, Entry | None]:
    """Return what was built; the entry too, unless it goes with the session."""
    import tempfile
    from pathlib import Path

    from ortplugins.artifacts.build import build_entry
    from ortplugins.artifacts.build_process import build_in_child
    from ortplugins.artifacts.manifest import read_manifest

    if request.plan.hint:
        from ortplugins.runtime.hidden_options import custom_op_libraries

        request = request._replace(custom_op_libraries=custom_op_libraries())
    try:
        temporary = tempfile.TemporaryDirectory(prefix="ortplugins-")
    except OSError as error:
        raise PassError(f"there is no temporary folder to build in: {error}") from error
    keep = False
    try:
        spare = Path(temporary.name)
        built = build_in_child(request, spare) or build_entry(request, spare)
        if built.is_temporary:
            entry, manifest = None, read_manifest(built.folder)
        else:
            entry = cache.find(built.folder.name)
            manifest = None if entry is None else entry.manifest
        if manifest is None:
            raise PassError(f"{built.folder}: was removed as soon as it was built")
        artifact = _artifact(built.folder, manifest, built.origin, request)
        keep = built.is_temporary and artifact.model is not None
        return artifact._replace(temporary=temporary if keep else None), entry
    finally:
        if not keep:
            temporary.cleanup()


def _artifact(
    folder: str | os.PathLike[str],
    manifest: Mapping[str, Any],
    origin: str,
    request: BuildRequest,
) -> Artifact:
    from ortplugins.artifacts.manifest import MODEL

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
