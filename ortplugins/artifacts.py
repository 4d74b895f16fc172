# SPDX-License-Identifier: MIT
"""Which file a session opens: the artifact for a model and a plan, found or built."""

from __future__ import annotations

__all__ = ["Artifact", "prepare"]

import dataclasses
import os
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnxruntime

from ortplugins._version import __version__
from ortplugins.artifact_cache import ArtifactCache, Entry, cache_root
from ortplugins.errors import OrtpluginsWarning
from ortplugins.machine import cpu_features
from ortplugins.report import Report
from session_options import Plan
from session_options.keys import stored

if TYPE_CHECKING:
    from ortplugins.baking import BakeSettings

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
class _Request:
    """Everything that an artifact depends on."""

    source: str | bytes | os.PathLike[str]
    content: bytes
    folder: Path | None
    plan: Plan
    providers: tuple[str, ...]
    settings: BakeSettings | None

    def parts(self) -> dict[str, Any]:
        """What goes into the cache key beside the model itself."""
        return {
            "plan": self.plan.fingerprint(),
            "ortplugins": __version__,
            "onnxruntime": onnxruntime.__version__,
            "providers": list(self.providers),
            "cpu": cpu_features(),
            "bake": None if self.settings is None else self.settings.as_json(),
        }


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
    request = _read_request(source, plan, options, providers, disabled_optimizers)
    cache = ArtifactCache(cache_root(plan.cache_dir))
    digest = cache.digest(request.content)
    locations = cache.data_locations(digest)
    key = None if locations is None else _key(cache, digest, locations, request)
    if key is not None and (entry := cache.find(key)) is not None:
        return _from_entry(entry, "cache")
    return _build(request, cache, digest)


def _build(request: _Request, cache: ArtifactCache, digest: str) -> Artifact:
    """Load the model, which checks it, and build under the key's lock."""
    from ortplugins.model_files import load_bytes, load_path
    from ortplugins.optimize import build_artifact

    def load() -> Any:
        if isinstance(request.source, bytes):
            return load_bytes(request.content, request.folder)
        return load_path(request.source)

    def build(loaded: Any, folder: Path) -> dict[str, Any]:
        return build_artifact(
            loaded,
            request.plan,
            folder,
            providers=request.providers,
            settings=request.settings,
        )

    loaded = load()
    try:
        cache.remember_data_locations(digest, list(loaded.data_files))
        key = _key(cache, digest, list(loaded.data_files), request)
        if key is None:
            raise FileNotFoundError("external data vanished while the model was read")
        with cache.build(key) as result:
            if isinstance(result, Entry):
                return _from_entry(result, "cache")
            manifest = {**build(loaded, result), "model": _describe(request.source)}
            # The model may have been replaced while it was read.
            if _key(cache, digest, list(loaded.data_files), request) != key:
                raise FileNotFoundError("external data changed while the model was read")
            return _from_entry(cache.publish(key, result, manifest), "built")
    except OSError as error:
        warnings.warn(
            f"ortplugins works without its cache in {str(cache.root)!r}: {error}",
            OrtpluginsWarning,
            stacklevel=6,
        )
    temporary = tempfile.TemporaryDirectory(prefix="ortplugins-")
    from ortplugins.artifact_cache import write_manifest

    folder = Path(temporary.name)
    complete = write_manifest(folder, build(load(), folder))
    artifact = _from_entry(Entry(folder, complete), "built")
    return dataclasses.replace(artifact, temporary=temporary)


def _read_request(
    source: str | bytes | os.PathLike[str],
    plan: Plan,
    options: onnxruntime.SessionOptions,
    providers: Sequence[str],
    disabled_optimizers: Any,
) -> _Request:
    cpu_only = set(providers) <= {"CPUExecutionProvider", "AzureExecutionProvider"}
    settings = None
    if plan.bake and cpu_only:
        from ortplugins.baking import bake_settings

        settings = bake_settings(options, disabled_optimizers)
    if isinstance(source, bytes):
        folder = stored(options, _EXTERNAL_FOLDER_KEY)
        chosen = Path(folder).absolute() if folder else None
        return _Request(source, source, chosen, plan, tuple(providers), settings)
    content = _read(source)
    return _Request(
        source, content, Path(source).absolute().parent, plan, tuple(providers), settings
    )


def _read(source: str | os.PathLike[str]) -> bytes:
    try:
        with open(source, "rb") as file:
            return file.read()
    except OSError:
        # Told by the same words as everywhere; model_files imports onnx_ir, a hit must not.
        from ortplugins.model_files import read_model_file

        return read_model_file(source)


def _key(
    cache: ArtifactCache, digest: str, locations: Sequence[str], request: _Request
) -> str | None:
    folder = request.folder or Path()
    files = [Path(os.path.realpath(folder / location)) for location in sorted(locations)]
    return cache.key(digest, files, request.parts())


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


def _describe(source: str | bytes | os.PathLike[str]) -> str:
    return "bytes" if isinstance(source, bytes) else os.path.abspath(source)
