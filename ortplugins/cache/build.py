# SPDX-License-Identifier: MIT
"""Builds the cache entry that a session needs in a child process, and publishes it.

The build runs in a child process so that a server never sees its peak of memory. The child
reads a job from standard input: a line of JSON and, if the model was given as bytes, its
content. It prints one line of JSON: the manifest of its files, or what went wrong.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ortplugins.cache.artifact import Artifact, Wanted, changed_files, find_entry
from ortplugins.cache.folder import keep_data_locations, temporary_folder
from ortplugins.cache.store import ArtifactCache, cache_of
from ortplugins.errors import MissingFileError, ModelFileError, OrtpluginsWarning, PassError
from ortplugins.runtime.child_process import child_environment, child_python, end_with_parent
from ortplugins.runtime.machine import missing_packages
from session_options import OptionError
from session_options.caller_warnings import warn_caller

if TYPE_CHECKING:
    from ortplugins.optimization.request import BuildRequest

# Errors that are passed on from the child.
_ERRORS = {cls.__name__: cls for cls in (MissingFileError, ModelFileError, PassError, OSError)}
_ERROR_CHARACTERS = 500
_SECONDS = 7200  # that a child may take
_IN_PROCESS = "ORTPLUGINS_BUILD_IN_PROCESS"


def get_or_build(wanted: Wanted) -> tuple[Artifact, str]:
    """Return the entry that a session needs, and its source: "built" or "cache".

    Raises:
        MissingFileError, ModelFileError: If the model cannot be used.
        PassError: If nothing can be built, or the session is strict and a pass has failed.
        OptionError: If the value of an option is invalid.
    """
    if (found := find_entry(wanted)) is not None:
        return found, "cache"
    _warn_of_changes(wanted)
    return build_entry(wanted)


@contextlib.contextmanager
def _read_errors(name: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise MissingFileError(f"{name}: no such model file") from None
    except OSError as error:
        raise ModelFileError(f"{name}: cannot be read: {error}") from error


def _warn_of_changes(wanted: Wanted) -> None:
    with contextlib.suppress(OSError):
        folder = os.path.join(wanted.root, "entries", wanted.known_key() or "")
        if (artifact := Artifact.read(folder)) is not None:
            _warn_rebuilt(folder, changed_files(artifact, reads_files=wanted.reads_files))


def _warn_rebuilt(folder: str, changed: list[str]) -> None:
    """Warn that an entry is rebuilt because files of it changed on disk."""
    if changed:
        text = f"{folder}: {', '.join(changed)} changed on disk, and is built again [ORP905]"
        warn_caller(text, OrtpluginsWarning)


def discard_if_damaged(artifact: Artifact, wanted: Wanted) -> bool:
    """Remove an entry if its files changed on disk; return whether to look for it again."""
    if artifact.model is None:
        return False
    try:
        damaged = ArtifactCache(Path(wanted.root)).discard_damaged(artifact)
    except (OSError, ImportError):  # it is read-only, or filelock is not installed
        return False
    _warn_rebuilt(artifact.folder, damaged or [])
    return damaged != []


def build_entry(wanted: Wanted) -> tuple[Artifact, str]:
    """Build an entry; if the cache can't be written, in one below the temporary folder.

    Raises:
        As :func:`get_or_build`.
    """
    if missing := missing_packages():
        raise PassError(
            f"{wanted.name}: not in the cache {wanted.root!r}, and nothing can be built "
            f"without {', '.join(missing)}: pip install {' '.join(missing)}, or warm the cache"
        )
    cache = cache_of(wanted.entries)
    try:
        return _built_in(wanted, cache)
    except MissingFileError:
        raise
    except OSError as error:
        warn_caller(
            f"cannot write the cache {str(cache.root)!r}: {error}; "
            f"continuing with {temporary_folder()!r} [ORP903]",
            OrtpluginsWarning,
        )
    wanted.root = temporary_folder()
    try:
        return _built_in(wanted, ArtifactCache(Path(wanted.root), cache.limit))
    except MissingFileError:
        raise
    except OSError as refused:
        raise PassError(f"nothing can be built in {wanted.root!r}: {refused}") from refused


def _built_in(
    wanted: Wanted, cache: ArtifactCache, *, is_second: bool = False
) -> tuple[Artifact, str]:
    """Build an entry and publish it; per model, one process at a time.

    If the model was replaced meanwhile, nothing is published, and the new one is built once.
    """
    root = os.fspath(cache.root)
    with _read_errors(wanted.name):
        digest = wanted.model_digest()
    with cache.build(digest) as folder:
        # Another process may have built it in the meantime.
        if (found := find_entry(wanted)) is not None:
            return found, "cache"
        manifest = _made_by_child(wanted, folder)
        if manifest is None:
            manifest = make_entry(wanted, folder)
        key, locations = manifest["key"], manifest["locations"]
        if wanted.model_digest() == digest and wanted.key(digest, locations) == key:
            keep_data_locations(digest, locations, root)
            return cache.publish(key, folder, manifest), "built"
    if is_second:
        raise ModelFileError(f"{wanted.name}: changes while it is read")
    return _built_in(wanted, cache, is_second=True)


def make_in_memory(wanted: Wanted) -> tuple[Artifact, tuple[bytes, bytes | None]]:
    """Make an entry in this process; return what it is, its report, and its model, if any.

    Raises:
        As :func:`get_or_build`.
    """
    from ortplugins.optimization.build import build_artifact

    request = read_request(wanted)
    stages = ("rewrite", "rearrange")  # those that work on a graph
    passes = tuple(x for x in request.plan.passes if any(map(x.takes_part_in, stages)))
    on_files = [x for x in request.plan.passes if x not in passes]
    plan = request.plan._replace(passes=passes)
    request = request._replace(plan=plan, bakes=False, in_memory=True)
    made = build_artifact(request, request.load(), None)
    notes = [f"{x.name} works on files, and in_memory allows none" for x in on_files]
    report = made.pop("report")
    content = json.dumps({**report, "notes": [*report["notes"], *notes]}).encode()
    model = made.pop("content")
    about = {"files": {}, "digests": {}, "made": 0.0, "of_model": wanted.name}
    return Artifact("", **made, **about), (content, model)


def make_entry(wanted: Wanted, folder: Path) -> dict[str, Any]:
    """Make the files of an entry; return its manifest."""
    from concurrent.futures import ThreadPoolExecutor

    from ortplugins.optimization.build import build_artifact

    digest = wanted.model_digest()
    request = read_request(wanted)
    loaded = request.load()
    locations = sorted(loaded.data_files)
    with ThreadPoolExecutor(1) as pool:  # the key needs a digest of all data
        key = pool.submit(wanted.key, digest, locations)
        made = build_artifact(request, loaded, folder)
        return {**made, "of_model": wanted.name, "locations": locations, "key": key.result()}


def read_request(wanted: Wanted) -> BuildRequest:
    """Return the request for the build that a session needs.

    Raises:
        OptionError: If the value of an option is invalid.
    """
    from ortplugins.optimization.request import BuildRequest
    from rewrite_rules.onnxruntime_version import are_cpu_only
    from session_options.entries import OF_ONNXRUNTIME
    from session_options.plan import Plan

    plan = Plan.from_entries(wanted.entries)
    entries = tuple(x for x in wanted.entries.items() if x[0] in OF_ONNXRUNTIME)
    runs_any = wanted.level != "ORT_DISABLE_ALL"
    return BuildRequest(
        source=wanted.model,
        plan=plan,
        providers=wanted.providers,
        data_folder=wanted.data_folder,
        level=wanted.level,
        disabled=wanted.disabled,
        entries=entries,
        bakes=plan.bake and runs_any and are_cpu_only(wanted.providers),
        cpu_arena=wanted.cpu_arena,
    )


def _made_by_child(wanted: Wanted, folder: Path) -> dict[str, Any] | None:
    """Run :func:`make_entry` in a child; return None if this process has to do it."""
    import subprocess

    from session_options.plan import Plan

    Plan.from_entries(wanted.entries)  # errors are raised here
    python = child_python("build")
    if python is None or os.environ.get(_IN_PROCESS) == "1":
        return None
    content = wanted.model if isinstance(wanted.model, bytes) else b""
    job = {
        "model": None if content else wanted.model,
        "wanted": wanted.fields,
        "text": wanted.text,
        "folder": os.fspath(folder),
    }
    code = "from ortplugins.cache.build import make_for_parent; make_for_parent()"
    try:
        done = subprocess.run(
            # -P: don't import modules from the working directory.
            [python, "-P", "-c", code],
            input=json.dumps(job).encode() + b"\n" + content,
            capture_output=True,
            env=child_environment("build", scratch=folder.parent),
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise PassError(
            f"the process that optimises the model took more than {_SECONDS} s and was "
            "stopped [ORP908]"
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
    """Do the job on standard input and end the process."""
    # A graph has many objects but no garbage; collecting it would take a tenth of a build.
    gc.set_threshold(100_000)
    header, _, content = sys.stdin.buffer.read().partition(b"\n")
    job = json.loads(header)
    end_with_parent()
    answer: dict[str, Any] = {"manifest": None, "error": None}
    model = content if job["model"] is None else job["model"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", OrtpluginsWarning)
        try:
            wanted = Wanted(model, **job["wanted"])
            # Otherwise a pass has another version here, or only the parent knows it.
            if wanted.text == job["text"]:
                answer["manifest"] = make_entry(wanted, Path(job["folder"]))
        except OptionError:  # another version of a pass has other options
            pass
        except tuple(_ERRORS.values()) as error:
            kind = next(name for name, cls in _ERRORS.items() if isinstance(error, cls))
            answer["error"] = kind, str(error)
    answer["warnings"] = [
        str(item.message) for item in caught if issubclass(item.category, OrtpluginsWarning)
    ]
    # Anything else that is printed comes first: the answer is the last line.
    print(json.dumps(answer), flush=True)
    sys.stderr.flush()
    os._exit(0)  # the parent waits, and tearing down hundreds of modules takes time
