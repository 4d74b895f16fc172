# SPDX-License-Identifier: MIT
"""The cache's one way in: what a session opens of a request, found or built.

The key is the files' content. What a start found is kept, so that later ones on files that
have not changed since read none of them, see :mod:`ortplugins.known_starts`.
"""

from __future__ import annotations

import gc
import importlib
import json
import mmap
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ortplugins.cache.key import KeyContent, digest_of, key_content
from ortplugins.cache.store import ArtifactCache, Entry, cache_root, remove_tree, warn_rebuilt
from ortplugins.errors import MissingFileError, ModelFileError, OrtpluginsWarning, PassError
from ortplugins.known_starts import MODEL, Artifact, cache_folder, keep, state_of
from ortplugins.optimization.request import BuildRequest
from ortplugins.runtime.child_process import child_environment, child_python
from ortplugins.runtime.machine import missing_packages
from session_options import OptionError
from session_options.caller_warnings import warn_caller
from session_options.keys import PREFIX, parse_size
from session_options.passes import NOTHING_TO_DO, Pass

if TYPE_CHECKING:
    from ortplugins.model_io.loading import LoadedModel
    from session_options.plan import Plan

# Makes the files of an entry in an empty folder, and returns its manifest. A function of a
# module, which a child imports.
Build = Callable[[BuildRequest, "LoadedModel", Path], dict[str, Any]]

# After this time a start tries again what broke in an earlier one.
_RETRY_SECONDS = 60.0


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
        _keep(request, text, artifact, {request.name: state}, started)
        return artifact
    cache = cache_of(request.plan)
    entry, content = _look_up(request, cache)
    if entry is not None and _is_usable(entry, request.plan, warn=True):
        artifact = _artifact_of(entry, "cache", request)
    else:
        entry, artifact = _built(request, build, cache)
        if artifact.temporary is not None:
            return artifact
        _, content = _look_up(request, cache)
    # The files may have changed since the entry was found, or while it was built.
    is_theirs = content is not None and content.is_like(entry.manifest["made_from"])
    if content is not None and is_theirs and not entry.manifest["provisional"]:
        _keep(request, text, artifact, content.states, started)
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
    import tempfile  # with what it needs some milliseconds, which a hit has no use for

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
        spare = Path(temporary.name)
        built = _build_in_child(request, spare, build) or build_entry(request, spare, build)
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
    passes = request.plan.passes
    flags = {
        "baked": manifest["baked"],
        "in_place": data,
        "opened": any(type(item).opened is not Pass.opened for item in passes),
        "trims": any(item.gives_memory_back() for item in passes),
    }
    artifact = Artifact(report, model, settings, " ".join(x for x in flags if flags[x]))
    artifact.source = manifest["model_given"]
    return artifact


def _keep(
    request: BuildRequest,
    text: str | None,
    artifact: Artifact,
    states: dict[str, str],
    started: float,
) -> None:
    """Keep what a start opened, for the next one that depends on the same text and files."""
    plan = request.plan
    if text is None or plan.retry_failed or any(x.checks_digests() for x in plan.passes):
        return
    keep(cache_folder(plan.cache_dir), text, artifact, states, started)


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


# From a request to its entry.


def cache_of(plan: Plan) -> ArtifactCache:
    """Return the cache of a plan's sessions."""
    variable, limit = "ORTPLUGINS_CACHE_LIMIT", None
    if plan.cache_limit:
        limit = parse_size(f"{PREFIX}.cache_limit", plan.cache_limit)
    elif text := os.environ.get(variable, ""):
        limit = parse_size(f"environment variable {variable}", text)
    return ArtifactCache(cache_root(plan.cache_dir), limit)


def session_key_content(request: BuildRequest, cache: ArtifactCache) -> KeyContent:
    """Return everything that the entry of a request depends on."""
    content = key_content(request, cache.root, cache.data_locations)
    if content is None:  # a new model, or one whose data is missing, which loading reports
        locations = list(request.load().data_files)
        content = key_content(request, cache.root, lambda _: locations)
    if content is None:
        raise MissingFileError(f"{request.name}: its data vanished while it was read")
    return content


def _look_up(
    request: BuildRequest, cache: ArtifactCache
) -> tuple[Entry | None, KeyContent | None]:
    """Return the entry of a request, and its key's content; None where there is none yet."""
    content = key_content(request, cache.root, cache.data_locations)
    if content is None:
        return None, None
    entry = cache.find(content.key)
    if entry is None and missing_packages():
        # Built where they are installed, whose versions are not known here.
        made = cache.made_from(content.parts["digest"])
        keys = (key for key, parts in made if content.is_like(parts))
        entry = next(filter(None, map(cache.find, keys)), None)
    return entry, content


def _is_usable(entry: Entry, plan: Plan, *, warn: bool = False) -> bool:
    """Whether a session may open an entry; else it is built again."""
    if any(item.checks_digests() for item in plan.passes) and (damaged := entry.damage()):
        if warn:
            warn_rebuilt(entry.folder, damaged)
        return False
    # Workers that start together don't all try again what has just failed.
    is_old = abs(time.time() - entry.created) > _RETRY_SECONDS
    retries = (is_old and entry.manifest["provisional"]) or (
        plan.retry_failed and entry.manifest["failed"]
    )
    return not retries or bool(missing_packages())


# Building. A child is a process of its own, so that a server never sees the peak. The parent
# writes a job to its standard input: a line of JSON, then the model's bytes where it was given
# as bytes. The child prints, as one line of JSON, where the entry is, or what went wrong.

# What a child raises goes on here.
_ERRORS = {cls.__name__: cls for cls in (MissingFileError, ModelFileError, PassError)}
_ERROR_CHARACTERS = 500
_SECONDS = 3600  # for a child, where no pass sets a limit
_IN_PROCESS = "ORTPLUGINS_BUILD_IN_PROCESS"


def build_entry(request: BuildRequest, spare: Path, build: Build) -> tuple[Path, str]:
    """Build the entry of a request, one process at a time for each model.

    ``spare``, an empty folder, is the cache where the own one cannot be written. Return the
    entry's folder; and ``"built"``, or ``"cache"`` where another process was quicker.
    """
    cache = cache_of(request.plan)
    try:
        return _build_in(cache, request, build)
    except MissingFileError:
        raise
    except OSError as error:
        if reason := request.has_to_be_kept:
            text = f"it cannot be kept in {str(cache.root)!r}: {error}"
            raise PassError(f"{reason}, as {text}") from error
        warn_caller(
            f"ortplugins works without its cache in {str(cache.root)!r}: {error}",
            OrtpluginsWarning,
        )
    try:
        return _build_in(ArtifactCache(spare), request, build)
    except MissingFileError:
        raise
    except OSError as error:
        remove_tree(spare)
        raise PassError(f"{spare}: nothing can be built there: {error}") from error


def _build_in_child(
    request: BuildRequest, spare: Path, build: Build
) -> tuple[Path, str] | None:
    """Have a child do what :func:`.build_entry` does; None where this process has to."""
    import subprocess

    python = child_python("build")
    if python is None or os.environ.get(_IN_PROCESS) == "1":
        return None
    limits = (item.child_seconds() for item in request.plan.passes)
    seconds = max((limit for limit in limits if limit is not None), default=_SECONDS)
    job = {
        "request": request.as_json(),
        "spare": os.fspath(spare),
        "build": [build.__module__, build.__qualname__],
    }
    content = request.source if isinstance(request.source, bytes) else b""
    code = "from ortplugins.cache.get_or_build import build_for_parent; build_for_parent()"
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
    module, name = job["build"]
    build = getattr(importlib.import_module(module), name)
    return build_entry(request, Path(job["spare"]), build)


def _build_in(cache: ArtifactCache, request: BuildRequest, build: Build) -> tuple[Path, str]:
    """Build in a folder of a cache, and publish it, unless another process just has."""
    digest, _ = digest_of(request, cache.root)
    with cache.build(digest) as folder:
        entry, _ = _look_up(request, cache)
        if entry is not None and _is_usable(entry, request.plan):
            return entry.folder, "cache"
        loaded = request.load()
        locations = list(loaded.data_files)
        content = key_content(request, cache.root, lambda _: locations)
        if content is None or content.parts["digest"] != digest:
            raise FileNotFoundError("external data vanished while the model was read")
        manifest = build(request, loaded, folder)
        # A model replaced meanwhile must not be published under the old one's key.
        again = key_content(request, cache.root, lambda _: locations)
        if again is None or again.parts != content.parts:
            raise FileNotFoundError("the model changed while it was read")
        made_from = {"model": request.name, "made_from": content.parts}
        entry = cache.publish(content.key, folder, {**manifest, **made_from})
    return entry.folder, "built"
