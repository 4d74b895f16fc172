# SPDX-License-Identifier: MIT
"""Looks an entry up in the cache, and builds the one that is not there, here or in a child.

A child is a process of its own, so that a server never sees the peak. The parent writes a job
to its standard input: a line of JSON, then the model's bytes where it was given as bytes. The
child builds the entry and prints, as one line of JSON, where it is, or what went wrong.
"""

from __future__ import annotations

import gc
import glob
import hashlib
import json
import os
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ortplugins.cache import directory, store
from ortplugins.cache.store import ArtifactCache, Entry
from ortplugins.errors import MissingFileError, ModelFileError, OrtpluginsWarning, PassError
from ortplugins.model_io.data_in_place import data_file, data_folders, in_place
from ortplugins.optimization.request import BuildRequest
from ortplugins.runtime.child_process import child_environment, child_python
from ortplugins.runtime.machine import missing_packages
from session_options import OptionError, Plan
from session_options.caller_warnings import warn_caller
from session_options.keys import PREFIX, parse_size

if TYPE_CHECKING:
    from ortplugins.model_io.loading import LoadedModel


# Layout of the cache; another number is another cache.
_FORMAT = 5
# After this time a start tries again what broke in an earlier one.
_RETRY_SECONDS = 60.0
# What a child raises goes on here.
_ERRORS = {cls.__name__: cls for cls in (MissingFileError, ModelFileError, PassError)}
_ERROR_CHARACTERS = 500
_SECONDS = 3600  # for a child, where no pass sets a limit
_IN_PROCESS = "ORTPLUGINS_BUILD_IN_PROCESS"


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


def session_key_content(request: BuildRequest, cache: ArtifactCache) -> KeyContent:
    """Return everything that the entry of a request depends on."""
    content = key_content(request, cache)
    if content is None:  # a new model, or one whose data is missing, which loading reports
        content = key_content(request, cache, list(request.load().data_files))
    if content is None:
        raise MissingFileError(f"{request.name}: its data vanished while it was read")
    return content


def cache_of(plan: Plan) -> ArtifactCache:
    """Return the cache of a plan's sessions."""
    variable, limit = "ORTPLUGINS_CACHE_LIMIT", None
    if plan.cache_limit:
        limit = parse_size(f"{PREFIX}.cache_limit", plan.cache_limit)
    elif text := os.environ.get(variable, ""):
        limit = parse_size(f"environment variable {variable}", text)
    return ArtifactCache(store.cache_root(plan.cache_dir), limit)


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


def build_entry(request: BuildRequest, spare: Path) -> tuple[Path, str]:
    """Build the entry of a request, one process at a time for each model.

    ``spare``, an empty folder, is the cache where the own one cannot be written. Return the
    entry's folder; and ``"built"``, or ``"cache"`` where another process was quicker.
    """
    cache = cache_of(request.plan)
    try:
        return _build_in(cache, request)
    except MissingFileError:
        raise
    except OSError as error:
        if request.plan.hint:
            # Else every start of every worker would measure for a minute.
            raise PassError(
                f"hint {request.plan.hint}: its choice cannot be kept in "
                f"{str(cache.root)!r}, so nothing is measured: {error}"
            ) from error
        warn_caller(
            f"ortplugins works without its cache in {str(cache.root)!r}: {error}",
            OrtpluginsWarning,
        )
    try:
        return _build_in(ArtifactCache(spare), request)
    except MissingFileError:
        raise
    except OSError as error:
        store.remove_tree(spare)
        raise PassError(f"{spare}: nothing can be built there: {error}") from error


def build_in_child(request: BuildRequest, spare: Path) -> tuple[Path, str] | None:
    """Have a child do what :func:`.build_entry` does; None where this process has to."""
    import subprocess

    python = child_python("build")
    if python is None or os.environ.get(_IN_PROCESS) == "1":
        return None
    limits = (item.child_seconds() for item in request.plan.passes)
    seconds = max((limit for limit in limits if limit is not None), default=_SECONDS)
    job = {"request": request.as_json(), "spare": os.fspath(spare)}
    content = request.source if isinstance(request.source, bytes) else b""
    code = "from ortplugins.cache.build import build_for_parent; build_for_parent()"
    try:
        done = subprocess.run(
            # -P: not what lies in the working directory under the name of a module.
            [python, "-P", "-c", code],
            input=json.dumps(job).encode() + b"\n" + content,
            capture_output=True,
            env=child_environment("build"),
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise PassError(
            f"the process that optimises the model took more than {seconds} s and was stopped"
        ) from None
    except OSError:
        return None
    lines = done.stdout.decode(errors="replace").splitlines()
    try:
        answer = json.loads(lines[-1])
    except (IndexError, ValueError):
        tail = done.stderr.decode(errors="replace").strip()[-_ERROR_CHARACTERS:]
        raise PassError(
            f"the process that optimises the model ended with {done.returncode}: {tail}"
        ) from None
    for text in answer["warnings"]:
        warn_caller(text, OrtpluginsWarning)
    if answer["error"] is not None:
        raise _ERRORS[answer["error"]](answer["text"])
    if answer["built"] is None:
        return None
    folder, origin = answer["built"]
    return Path(folder), origin


def build_for_parent() -> None:
    """Do the job on standard input, and end the process."""
    # A graph is many objects and no garbage: looking for some takes a tenth of a build.
    gc.set_threshold(100_000)
    header, _, content = sys.stdin.buffer.read().partition(b"\n")
    # Whatever else prints goes to the error output: the answer is the last line.
    answer: dict[str, Any] = {"built": None, "error": None, "text": "", "warnings": []}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", OrtpluginsWarning)
        try:
            built = _build_job(json.loads(header), content)
            answer["built"] = built and (os.fspath(built[0]), built[1])
        except tuple(_ERRORS.values()) as error:
            kind = next(name for name, cls in _ERRORS.items() if isinstance(error, cls))
            answer.update(error=kind, text=str(error))
    answer["warnings"] = [
        str(item.message) for item in caught if issubclass(item.category, OrtpluginsWarning)
    ]
    print(json.dumps(answer), flush=True)
    sys.stderr.flush()
    os._exit(0)  # somebody waits, and taking hundreds of modules down takes its time


def _build_job(job: dict[str, Any], content: bytes) -> tuple[Path, str] | None:
    try:
        request = BuildRequest.from_json(job["request"], content)
    except OptionError:
        return None  # another version of a pass has other options
    if json.loads(json.dumps(request.as_json())) != job["request"]:
        return None  # so it is; or only the parent knows a pass, and no entry of it was read
    return build_entry(request, Path(job["spare"]))


def _build_in(cache: ArtifactCache, request: BuildRequest) -> tuple[Path, str]:
    """Build in a folder of a cache, and publish it, unless another process just has."""
    digest, _ = _digest(request, cache)
    with cache.build(digest) as folder:
        entry, _ = look_up(request, cache)
        if entry is not None and is_usable(entry, request.plan):
            return entry.folder, "cache"
        loaded = _load(request, cache)
        locations = list(loaded.data_files)
        content = key_content(request, cache, locations)
        if content is None or content.parts["digest"] != digest:
            raise FileNotFoundError("external data vanished while the model was read")
        manifest = _build(request, loaded, folder)
        # A model replaced meanwhile must not be published under the old one's key.
        again = key_content(request, cache, locations)
        if again is None or again.parts != content.parts:
            raise FileNotFoundError("the model changed while it was read")
        entry = cache.publish(content.key, folder, {**manifest, "made_from": content.parts})
    return entry.folder, "built"


def _load(request: BuildRequest, cache: ArtifactCache) -> LoadedModel:
    """Load the model; files named like its external data are hashed on another core.

    Importing onnx and loading the graph take as long as reading most models.
    """
    if isinstance(request.source, bytes):
        return request.load()
    from concurrent.futures import ThreadPoolExecutor

    model = Path(request.name)
    data = model.parent.glob(f"{glob.escape(model.name)}[._]data")
    with ThreadPoolExecutor() as pool:
        pool.map(cache.file_digest, filter(Path.is_file, data))
        return request.load()


def _build(request: BuildRequest, loaded: LoadedModel, folder: Path) -> dict[str, Any]:
    if request.plan.hint:
        from ortplugins.tuning.tune import tune

        manifest = tune(request, loaded, folder).manifest
    else:
        from ortplugins.optimization.build import build_artifact

        manifest = build_artifact(request, loaded, folder)
    return {**manifest, "model": request.name}


def key_content(
    request: BuildRequest, cache: ArtifactCache, locations: Sequence[str] | None = None
) -> KeyContent | None:
    """Return what the key is made from; None where data is missing, or not known where."""
    digest, states = _digest(request, cache)
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
            states |= {**dict.fromkeys(paths[:number], directory.ABSENT), paths[number]: state}
    except (OSError, StopIteration):
        return None
    parts, placed = request.key_parts(), in_place(files)
    if placed is not None and any(x != name for x, name in placed.names.items()):
        parts["data_names"] = placed.names
    return KeyContent({"format": _FORMAT, "digest": digest, "data": data, **parts}, states)


def _digest(request: BuildRequest, cache: ArtifactCache) -> tuple[str, dict[str, str]]:
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
