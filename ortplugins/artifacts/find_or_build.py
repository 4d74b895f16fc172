# SPDX-License-Identifier: MIT
"""Which file a session opens: the artifact of a request, found or built."""

from __future__ import annotations

__all__ = ["Artifact", "find_or_build"]

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ortplugins.artifacts.build import build_entry, cache_of, is_usable, look_up
from ortplugins.artifacts.manifest import Entry, read_manifest
from ortplugins.artifacts.store import ArtifactCache
from ortplugins.errors import PassError
from ortplugins.optimization.request import DATA_FOLDER_KEY, BuildRequest
from ortplugins.report import Report

if TYPE_CHECKING:
    import tempfile


@dataclasses.dataclass(frozen=True)
class Artifact:
    """What a session opens.

    Attributes:
        report: What was done to the model.
        model: Path of the model; None for the one that the user gave.
        baked: Whether onnxruntime's optimisers have run already.
        settings: What the model needs of its session, see ``Pass.session_settings``.
        entry: Where it comes from; None where nothing was looked up.
        temporary: Folder to remove after the start, where there is no cache.
    """

    report: Report
    model: str | None = None
    baked: bool = False
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    entry: Entry | None = None
    temporary: tempfile.TemporaryDirectory[str] | None = None


def find_or_build(request: BuildRequest) -> Artifact:
    """Find the artifact of a request in the cache, or have it built.

    Raises:
        MissingFileError, ModelFileError: If the model or its data can't be used.
        PassError: If a pass fails and the plan is strict, or nothing can be built.
    """
    cache = cache_of(request.plan)
    entry = look_up(request, cache)
    if entry is not None and is_usable(entry, request.plan, warn=True):
        return _from_entry(entry, "cache", request)
    return _build(request, cache)


def _build(request: BuildRequest, cache: ArtifactCache) -> Artifact:
    import tempfile

    from ortplugins.artifacts.build_process import build_in_child

    try:
        temporary = tempfile.TemporaryDirectory(prefix="ortplugins-")
    except OSError as error:
        raise PassError(f"there is no temporary folder to build in: {error}") from error
    keep = False
    try:
        spare = Path(temporary.name)
        built = build_in_child(request, spare) or build_entry(request, spare)
        if built.is_temporary:
            manifest = read_manifest(built.folder)
            entry = None if manifest is None else Entry(built.folder, manifest)
        else:
            entry = cache.find(built.folder.name)
        if entry is None:
            raise PassError(f"{built.folder}: was removed as soon as it was built")
        artifact = _from_entry(entry, built.origin, request)
        keep = built.is_temporary and artifact.model is not None
        return dataclasses.replace(artifact, temporary=temporary if keep else None)
    finally:
        if not keep:
            temporary.cleanup()


def _from_entry(entry: Entry, origin: str, request: BuildRequest) -> Artifact:
    manifest = entry.manifest
    report = Report.from_dict(manifest["report"])
    if entry.model is None:
        return Artifact(dataclasses.replace(report, source="untouched"), entry=entry)
    settings = dict(manifest["session_settings"])
    if request.data_folder is not None:
        # onnxruntime looks there for the data of any model, ours too.
        settings[DATA_FOLDER_KEY] = os.fspath(entry.folder)
    model = os.fspath(entry.model)
    report = dataclasses.replace(report, source=origin, artifact=model)
    return Artifact(report, model, bool(manifest["baked"]), settings, entry)
