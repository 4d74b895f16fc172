# SPDX-License-Identifier: MIT
"""The cache's one way in: what a session opens of a request, found or built.

The key is the files' content. What a start found is kept, so that later ones on files that
have not changed since read none of them, see :mod:`ortplugins.known_starts`.
"""

from __future__ import annotations

import contextlib
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

from ortplugins.cache.key import KeyContent, key_content
from ortplugins.cache.store import ArtifactCache, Entry, cache_of, warn_rebuilt
from ortplugins.errors import MissingFileError, ModelFileError, OrtpluginsWarning, PassError
from ortplugins.known_starts import MODEL, Artifact, cache_folder, keep, state_of
from ortplugins.optimization.request import BuildRequest
from ortplugins.runtime.child_process import child_environment, child_python
from ortplugins.runtime.machine import missing_packages
from session_options import OptionError
from session_options.caller_warnings import warn_caller
from session_options.passes import NOTHING_TO_DO

if TYPE_CHECKING:
    from ortplugins.model_io.loading import LoadedModel

# Makes the files of an entry in an empty folder, and returns its manifest. A function of a
# module, which a child imports.
Build = Callable[[BuildRequest, "LoadedModel", Path], dict[str, Any]]

# After this time a start tries again what broke in an earlier one.
_RETRY_SECONDS = 60.0


def get_or_build(request: BuildRequest, build: Build, text: str | None = None) -> Artifact:
    """Return what a session opens: of the entry of a request, which is found or built.

    It is kept under the ``text`` of a start, for the next one that depends on the same text
    and files.

    Raises:
        MissingFileError, ModelFileError: If the model cannot be used.
        PassError: If nothing can be built.
    """
    plan, started, origin = request.plan, time.time(), "cache"
    if (states := _without_operators(request)) is not None:
        # A Report would take milliseconds to import.
        remark = {"node": "model", "outcome": "note", "reason": NOTHING_TO_DO}
        passes = [{"name": x.name, "seconds": 0.0, "remarks": [remark]} for x in plan.passes]
        empty = {"source": "untouched", "notes": (), "artifact": "", "fired": 0}
        artifact = Artifact({**empty, "passes": passes})
    else:
        cache = cache_of(plan)
        entry, content = _find(request, cache, warn=True)
        if entry is None:
            try:
                entry, content, origin = _built(request, build, cache, content)
            except MissingFileError:
                raise
            except OSError as error:
                return _built_apart(request, build, cache, content, error)
        artifact, states = _artifact_of(entry, origin, request), content.states
        if entry.manifest["provisional"]:
            return artifact
    if not (text is None or plan.retry_failed or any(x.checks_digests() for x in plan.passes)):
        keep(cache_folder(plan.cache_dir), text, artifact, states, started)
    return artifact


def _without_operators(request: BuildRequest) -> dict[str, str] | None:
    """Return the state of a model's file that does not name any operator the passes need.

    None where it names one, or where a pass looks at every model.
    """
    names = [item.needs_operator for item in request.plan.passes]
    if request.session_settings or not all(names) or isinstance(request.source, bytes):
        return None
    try:
        states = {request.name: state_of(request.name)}
        with (
            open(request.name, "rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            is_named = any(content.find(name.encode()) >= 0 for name in names)
    except (OSError, ValueError):  # the load says what is wrong
        return None
    return None if is_named else states


def _artifact_of(entry: Entry, origin: str, request: BuildRequest) -> Artifact:
    manifest, model, flags = entry.manifest, None, ""
    settings, report = dict(manifest["session_settings"]), manifest["report"]
    if MODEL in manifest["files"]:
        data, model = manifest["data"], os.path.join(entry.folder, MODEL)
        settings |= request.data_settings(data, entry.folder)
        report = {**report, "artifact": model}
        named = {"baked": manifest["baked"], "in_place": data}
        flags = " ".join(name for name, holds in named.items() if holds)
    else:
        settings = {}
    settings = {**dict(request.session_settings), **settings}
    source = origin if model or settings else "untouched"
    artifact = Artifact({**report, "source": source}, model, settings, flags)
    artifact.source = manifest["model_given"]
    return artifact


def _find(
    request: BuildRequest, cache: ArtifactCache, *, warn: bool = False
) -> tuple[Entry | None, KeyContent]:
    """Return the entry of a request that a session may open, and what its key is made from."""
    content = key_content(request, cache.root, cache.data_locations)
    plan, missing = request.plan, missing_packages()
    entry = cache.find(content.key) if content.is_known else None
    if entry is None and missing:  # built where they are installed, in versions not known here
        entry = cache.find_like(content.parts, missing)
    if entry is None:
        return None, content
    if any(item.checks_digests() for item in plan.passes) and (damaged := entry.damage()):
        if warn:
            warn_rebuilt(entry.folder, damaged)
        return None, content
    # Workers that start together don't all try again what has just failed.
    is_old = abs(time.time() - entry.created) > _RETRY_SECONDS
    retries = (is_old and entry.manifest["provisional"]) or (
        plan.retry_failed and entry.manifest["failed"]
    )
    return None if retries and not missing else entry, content


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


# Building. A child is a process of its own, so that a server never sees the peak. It gets a
# job on its standard input: a line of JSON, then the model's bytes where it was given as
# bytes. It prints, as one line of JSON, the manifest of the files that it made, or what went
# wrong.

# What a child raises goes on here.
_ERRORS = {cls.__name__: cls for cls in (MissingFileError, ModelFileError, PassError, OSError)}
_ERROR_CHARACTERS = 500
_SECONDS = 3600  # for a child, where no pass sets a limit
_IN_PROCESS = "ORTPLUGINS_BUILD_IN_PROCESS"


def _built(
    request: BuildRequest, build: Build, cache: ArtifactCache, content: KeyContent
) -> tuple[Entry, KeyContent, str]:
    """Build an entry and publish it, one process at a time for each model.

    Return it, and ``"built"``; or ``"cache"`` where another process was quicker.
    """
    if missing := missing_packages():
        raise PassError(
            f"{request.name}: not in the cache {str(cache.root)!r}, and nothing can be built "
            f"without {', '.join(missing)}: pip install {' '.join(missing)}, or warm the cache"
        )
    with cache.build(content.parts["digest"]) as folder:
        entry, content = _find(request, cache)
        if entry is not None:
            return entry, content, "cache"
        manifest = _made_by_child(request, build, cache.root, folder)
        if manifest is None:
            manifest = _make(request, build, cache.root, folder)
        # A model replaced meanwhile must not be published under the old one's key.
        made_from = manifest["made_from"]
        content = key_content(request, cache.root, lambda _: list(made_from["data"]))
        if content.key != KeyContent(made_from, {}).key:
            raise FileNotFoundError("the model changed while it was read")
        return cache.publish(content.key, folder, manifest), content, "built"


def _built_apart(
    request: BuildRequest,
    build: Build,
    cache: ArtifactCache,
    content: KeyContent,
    error: OSError,
) -> Artifact:
    """Build for one session, in a temporary folder, as its cache cannot be written."""
    import tempfile  # with what it needs some milliseconds, which others have no use for

    root = str(cache.root)
    warn_caller(f"ortplugins works without its cache in {root!r}: {error}", OrtpluginsWarning)
    with contextlib.ExitStack() as unused:
        try:
            temporary = tempfile.TemporaryDirectory(prefix="ortplugins-")
            unused.callback(temporary.cleanup)
            other = ArtifactCache(Path(temporary.name))
            entry, _, origin = _built(request, build, other, content)
        except MissingFileError:
            raise
        except OSError as refused:
            text = f"nothing can be built in a temporary folder: {refused}"
            raise PassError(text) from refused
        artifact = _artifact_of(entry, origin, request)
        artifact.temporary = temporary
        unused.pop_all()
        return artifact


def _make(request: BuildRequest, build: Build, root: Path, folder: Path) -> dict[str, Any]:
    """Make the files of an entry; return its manifest, with what they were made from."""
    loaded = request.load()
    locations = list(loaded.data_files)
    content = key_content(request, root, lambda _: locations)
    if not content.is_known:
        raise FileNotFoundError("external data vanished while the model was read")
    manifest = build(request, loaded, folder)
    return {**manifest, "model": request.name, "made_from": content.parts}


def _made_by_child(
    request: BuildRequest, build: Build, root: Path, folder: Path
) -> dict[str, Any] | None:
    """Have a child do what :func:`_make` does; None where this process has to."""
    import subprocess

    python = child_python("build")
    if python is None or os.environ.get(_IN_PROCESS) == "1":
        return None
    limits = (item.child_seconds() for item in request.plan.passes)
    seconds = max((limit for limit in limits if limit is not None), default=_SECONDS)
    job = {
        "request": request.as_json(),
        "build": [build.__module__, build.__qualname__],
        "folders": [os.fspath(root), os.fspath(folder)],
    }
    content = request.source if isinstance(request.source, bytes) else b""
    code = "from ortplugins.cache.get_or_build import make_for_parent; make_for_parent()"
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
        name, text = answer["error"]
        raise _ERRORS[name](text)
    manifest: dict[str, Any] | None = answer["manifest"]
    return manifest


def make_for_parent() -> None:
    """Do the job on standard input, and end the process."""
    # A graph is many objects and no garbage: looking for some takes a tenth of a build.
    gc.set_threshold(100_000)
    header, _, content = sys.stdin.buffer.read().partition(b"\n")
    job = json.loads(header)
    answer: dict[str, Any] = {"manifest": None, "error": None}
    request = None
    with contextlib.suppress(OptionError):  # another version of a pass has other options
        request = BuildRequest.from_json(job["request"], content)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", OrtpluginsWarning)
        try:
            # Else a pass has another version here, or only the parent knows it.
            if request and json.loads(json.dumps(request.as_json())) == job["request"]:
                module, name = job["build"]
                build = getattr(importlib.import_module(module), name)
                answer["manifest"] = _make(request, build, *map(Path, job["folders"]))
        except tuple(_ERRORS.values()) as error:
            kind = next(name for name, cls in _ERRORS.items() if isinstance(error, cls))
            answer["error"] = kind, str(error)
    answer["warnings"] = [
        str(item.message) for item in caught if issubclass(item.category, OrtpluginsWarning)
    ]
    # Whatever else prints comes before it: the answer is the last line.
    print(json.dumps(answer), flush=True)
    sys.stderr.flush()
    os._exit(0)  # somebody waits, and taking hundreds of modules down takes its time
