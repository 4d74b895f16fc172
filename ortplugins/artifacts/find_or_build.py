# SPDX-License-Identifier: MIT
"""Which file a session opens: the artifact for a model and a plan, found or built."""

from __future__ import annotations

__all__ = ["Artifact", "Request", "build_and_publish", "prepare"]

import dataclasses
import os
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnxruntime

from ortplugins._version import __version__
from ortplugins.artifacts.directory import cache_root
from ortplugins.artifacts.manifest import Entry, write_manifest
from ortplugins.artifacts.source_index import content_digest, content_key
from ortplugins.artifacts.store import ArtifactCache
from ortplugins.errors import MissingFileError, ModelFileError, OrtpluginsWarning, PassError
from ortplugins.report import Report
from ortplugins.runtime.cpu_features import cpu_features
from ortplugins.runtime.hidden_options import find_hidden_options
from rewrite_rules.remarks import PassContext, Remarks
from session_options import Plan
from session_options.keys import stored

if TYPE_CHECKING:
    import tempfile

    from ortplugins.model_io.loading import LoadedModel
    from ortplugins.optimization.offline_optimizers import BakeSettings

# After this time a start tries again what broke in an earlier one.
_RETRY_SECONDS = 60.0
_EXTERNAL_FOLDER_KEY = "session.model_external_initializers_file_folder_path"


@dataclasses.dataclass(frozen=True)
class Artifact:
    """What a session opens.

    Attributes:
        model: Path of the model; None for the one that the user gave.
        report: What was done to it.
        baked: Whether onnxruntime's optimisers have run already.
        settings: What the model needs of its session, see ``Pass.session_settings``.
        temporary: Folder to remove after the start, where there is no cache.
    """

    model: str | None
    report: Report
    baked: bool = False
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    temporary: tempfile.TemporaryDirectory[str] | None = None


@dataclasses.dataclass(frozen=True)
class Request:
    """A model, and everything else that its artifact depends on.

    ``folder`` is where the options say that external data lies, None where they don't;
    ``final_graph`` whether the session runs none of onnxruntime's optimisers.
    """

    source: str | bytes | os.PathLike[str]
    folder: Path | None
    plan: Plan
    providers: tuple[str, ...]
    settings: BakeSettings | None
    final_graph: bool

    def digest(self, cache: ArtifactCache) -> str:
        """Digest of the .onnx file as it is now.

        Raises:
            MissingFileError, ModelFileError: If it can't be read.
        """
        if isinstance(self.source, bytes):
            return content_digest(self.source)
        try:
            return cache.sources.file_digest(self.source)
        except FileNotFoundError:
            path = os.fspath(self.source)
            raise MissingFileError(f"{path}: there is no such model file") from None
        except OSError as error:
            path = os.fspath(self.source)
            raise ModelFileError(f"{path}: cannot be read: {error.strerror}") from error

    def key(self, digest: str, locations: Sequence[str]) -> str | None:
        """Key of the artifact; None when a data file is missing."""
        return content_key(
            digest,
            [self._data_file(location) for location in sorted(locations)],
            {
                "plan": self.plan.fingerprint(),
                "ortplugins": __version__,
                "onnxruntime": onnxruntime.__version__,
                "providers": list(self.providers),
                "cpu": cpu_features(),
                "bake": None if self.settings is None else self.settings.as_json(),
                "final": self.final_graph,
            },
        )

    def _data_file(self, location: str) -> Path:
        """Where external data lies: beside the model, or beside the file that it links to."""
        folders = [self.folder or Path()]
        if self.folder is None and not isinstance(self.source, bytes):
            path = os.path.abspath(self.source)
            folders = [Path(path).parent, Path(os.path.realpath(path)).parent]
        found = next((f / location for f in folders if (f / location).exists()), None)
        return Path(os.path.realpath(found or folders[0] / location))

    def load(self) -> LoadedModel:
        """Load and check the model.

        Raises:
            MissingFileError, ModelFileError: If it or its data can't be used.
        """
        from ortplugins.model_io.loading import load_bytes, load_path

        if isinstance(self.source, bytes):
            return load_bytes(self.source, self.folder)
        return load_path(self.source, self.folder)

    def build(self, loaded: LoadedModel, folder: Path) -> dict[str, Any]:
        """Fill an empty folder; return the manifest.

        Raises:
            PassError: If a pass fails.
            OSError: If the folder can't be written.
        """
        from ortplugins.optimization.optimize import build_artifact

        manifest = build_artifact(
            loaded,
            self.plan,
            folder,
            providers=self.providers,
            settings=self.settings,
            final_graph=self.final_graph,
        )
        is_bytes = isinstance(self.source, bytes)
        return {**manifest, "model": "bytes" if is_bytes else os.path.abspath(self.source)}


def prepare(
    source: str | bytes | os.PathLike[str],
    plan: Plan,
    options: onnxruntime.SessionOptions,
    providers: Sequence[str],
    disabled_optimizers: Any,
) -> Artifact:
    """Find or build the artifact for a model.

    Args:
        source: Path or serialized model, as for ``onnxruntime.InferenceSession``.
        plan: The passes; not empty.
        options: The session's options; only read.
        providers: The session's execution providers.
        disabled_optimizers: The session's argument of that name.

    Raises:
        MissingFileError, ModelFileError: If the model or its data can't be used.
        PassError: If a pass fails.
    """
    settings = None
    if plan.bake and PassContext(Remarks(""), providers).cpu_only:
        from ortplugins.optimization.offline_optimizers import bake_settings

        settings = bake_settings(options, disabled_optimizers)
    chosen = stored(options, _EXTERNAL_FOLDER_KEY)
    folder = Path(chosen).absolute() if chosen else None
    level = options.graph_optimization_level
    final_graph = level == onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    request = Request(source, folder, plan, tuple(providers), settings, final_graph)
    artifact, entry = _find_or_build(request)
    artifact = _respect(artifact, entry, options)
    if chosen and artifact.model is not None:
        # onnxruntime looks there for the data of any model, ours too.
        here = {_EXTERNAL_FOLDER_KEY: os.path.dirname(artifact.model)}
        artifact = dataclasses.replace(artifact, settings={**artifact.settings, **here})
    return artifact


def _find_or_build(request: Request) -> tuple[Artifact, Entry]:
    cache = ArtifactCache(cache_root(request.plan.cache_dir))
    digest = request.digest(cache)
    if (entry := _published(request, cache, digest)) is not None:
        fault = _fault(entry, request.plan)
        if fault is None:
            return _from_entry(entry, "cache"), entry
        try:
            cache.discard(entry.folder.name, entry.manifest)
        except OSError as error:  # read-only, or open elsewhere on Windows
            return _build_aside(request, cache, error)
    if any(item.child_seconds() for item in request.plan.passes):
        from ortplugins.artifacts.build_process import build_in_child

        origin = build_in_child(request)
        # A model that changed meanwhile is not found.
        entry = _published(request, cache, request.digest(cache)) if origin else None
        if entry is not None:
            return _from_entry(entry, origin), entry
    return _build(request, cache, digest)


def _fault(entry: Entry, plan: Plan) -> str | None:
    """Why a published entry has to be built again; None when it is good."""
    if any(item.checks_digests() for item in plan.passes) and (
        damaged := entry.damaged_files()
    ):
        text = f"{entry.folder}: {', '.join(damaged)} changed on disk, and is built again"
        warnings.warn(text, OrtpluginsWarning, stacklevel=6)
        return text
    # Workers that start together don't all try again what has just failed.
    if entry.manifest.get("provisional") and abs(time.time() - entry.created) > _RETRY_SECONDS:
        return "something broke when it was built"
    return None


def _published(request: Request, cache: ArtifactCache, digest: str) -> Entry | None:
    locations = cache.sources.data_locations(digest)
    key = None if locations is None else request.key(digest, locations)
    return None if key is None else cache.find(key)


def build_and_publish(request: Request) -> str:
    """Build the entry of a request in the cache, one process at a time for each model.

    Returns:
        ``"built"``, or ``"cache"`` where another process was quicker; empty where the cache
        can't be written.

    Raises:
        MissingFileError, ModelFileError, PassError: As for :func:`prepare`.
    """
    cache = ArtifactCache(cache_root(request.plan.cache_dir))
    digest = request.digest(cache)
    try:
        with cache.one_at_a_time(digest):
            if _published(request, cache, digest) is not None:
                return "cache"
            artifact, _ = _build_in_cache(request, cache, digest, request.load())
            return artifact.report.source if artifact.model is not None else "built"
    except OSError:
        return ""


def _build(request: Request, cache: ArtifactCache, digest: str) -> tuple[Artifact, Entry]:
    """Build under the key's lock and publish, or build aside where there is no cache."""
    loaded = request.load()
    try:
        return _build_in_cache(request, cache, digest, loaded)
    except OSError as error:
        return _build_aside(request, cache, error)


def _build_aside(
    request: Request, cache: ArtifactCache, reason: OSError
) -> tuple[Artifact, Entry]:
    """Build in a temporary folder, for this session only.

    Raises:
        PassError: If there is no room for that either.
    """
    import tempfile

    warnings.warn(
        f"ortplugins works without its cache in {str(cache.root)!r}: {reason}",
        OrtpluginsWarning,
        stacklevel=6,
    )
    try:
        temporary = tempfile.TemporaryDirectory(prefix="ortplugins-")
    except OSError as error:
        raise PassError(f"there is no temporary folder to build in: {error}") from error
    folder = Path(temporary.name)
    try:
        # Loaded here: an attempt before may have left a model half rewritten.
        manifest = write_manifest(folder, request.build(request.load(), folder))
    except OSError as error:
        temporary.cleanup()
        raise PassError(f"{folder}: nothing can be built there: {error}") from error
    except BaseException:
        temporary.cleanup()
        raise
    entry = Entry(folder, manifest)
    return dataclasses.replace(_from_entry(entry, "built"), temporary=temporary), entry


def _build_in_cache(
    request: Request, cache: ArtifactCache, digest: str, loaded: LoadedModel
) -> tuple[Artifact, Entry]:
    locations = list(loaded.data_files)
    cache.sources.remember_data_locations(digest, locations)
    key = request.key(digest, locations)
    if key is None:
        raise FileNotFoundError("external data vanished while the model was read")
    with cache.build(key) as result:
        if isinstance(result, Entry):
            return _from_entry(result, "cache"), result
        manifest = request.build(loaded, result)
        # A model replaced meanwhile must not be published under the old one's key.
        if request.key(request.digest(cache), locations) != key:
            raise FileNotFoundError("the model changed while it was read")
        entry = cache.publish(key, result, manifest)
        return _from_entry(entry, "built"), entry


def _respect(
    artifact: Artifact, entry: Entry, options: onnxruntime.SessionOptions
) -> Artifact:
    """Give way to options that the artifact was made without.

    Raises:
        PassError: If the entry cannot be opened.
    """
    if artifact.model is None:
        return artifact
    try:
        hidden = find_hidden_options(options, entry.folder, entry.manifest)
    except Exception as error:  # removed a moment ago, say
        raise PassError(f"{entry.folder} cannot be opened: {error}") from error
    if (name := hidden.added_initializer) is not None:
        note = (
            f"initializer {name!r} was added to the SessionOptions; the untouched model runs"
        )
        report = dataclasses.replace(
            artifact.report,
            source="untouched",
            notes=(*artifact.report.notes, note),
            artifact="",
        )
        return dataclasses.replace(
            artifact, model=None, report=report, baked=False, settings={}
        )
    if hidden.overrides_dimensions and artifact.baked:
        note = "free dimensions are overridden, so onnxruntime optimises at this start"
        report = dataclasses.replace(artifact.report, notes=(*artifact.report.notes, note))
        return dataclasses.replace(artifact, report=report, baked=False)
    return artifact


def _from_entry(entry: Entry, origin: str) -> Artifact:
    manifest = entry.manifest
    report = Report.from_dict(manifest["report"])
    model = None if entry.model is None else str(entry.model)
    source = "untouched" if model is None else origin
    return Artifact(
        model=model,
        report=dataclasses.replace(report, source=source, artifact=model or ""),
        baked=bool(manifest["baked"]) and model is not None,
        settings=manifest["session_settings"],
    )
