# SPDX-License-Identifier: MIT
"""Builds an entry of the cache that is not there, here or in a child.

A child is a process of its own, so that a server never sees the peak. The parent writes a job
to its standard input: a line of JSON, then the model's bytes where it was given as bytes. The
child builds the entry and prints, as one line of JSON, where it is, or what went wrong.
"""

from __future__ import annotations

import gc
import glob
import importlib
import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ortplugins.cache import store
from ortplugins.cache.key import cache_of, digest_of, is_usable, key_content, look_up
from ortplugins.cache.store import ArtifactCache
from ortplugins.errors import MissingFileError, ModelFileError, OrtpluginsWarning, PassError
from ortplugins.optimization.request import BuildRequest
from ortplugins.runtime.child_process import child_environment, child_python
from session_options import OptionError
from session_options.caller_warnings import warn_caller

if TYPE_CHECKING:
    from ortplugins.model_io.loading import LoadedModel

# Makes the files of an entry in an empty folder, and returns its manifest. A function of a
# module, which a child imports.
Build = Callable[[BuildRequest, "LoadedModel", Path], dict[str, Any]]


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
        store.remove_tree(spare)
        raise PassError(f"{spare}: nothing can be built there: {error}") from error


def build_in_child(
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
    module, name = job["build"]
    build = getattr(importlib.import_module(module), name)
    return build_entry(request, Path(job["spare"]), build)


def _build_in(cache: ArtifactCache, request: BuildRequest, build: Build) -> tuple[Path, str]:
    """Build in a folder of a cache, and publish it, unless another process just has."""
    digest, _ = digest_of(request, cache)
    with cache.build(digest) as folder:
        entry, _ = look_up(request, cache)
        if entry is not None and is_usable(entry, request.plan):
            return entry.folder, "cache"
        loaded = _load(request, cache)
        locations = list(loaded.data_files)
        content = key_content(request, cache, locations)
        if content is None or content.parts["digest"] != digest:
            raise FileNotFoundError("external data vanished while the model was read")
        manifest = build(request, loaded, folder)
        # A model replaced meanwhile must not be published under the old one's key.
        again = key_content(request, cache, locations)
        if again is None or again.parts != content.parts:
            raise FileNotFoundError("the model changed while it was read")
        made_from = {"model": request.name, "made_from": content.parts}
        entry = cache.publish(content.key, folder, {**manifest, **made_from})
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
