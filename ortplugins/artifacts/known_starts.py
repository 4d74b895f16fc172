# SPDX-License-Identifier: MIT
"""What earlier starts found for files that have not changed since: no file is read twice.

A shortcut past :mod:`.build`, whose key is the files' content. Here they are compared by path,
identity and a checksum of some pages, and whatever is not known exactly takes the long way.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ortplugins.artifacts.directory import (
    SETTLED_SECONDS,
    CacheDirectory,
    cache_folder,
    file_identity,
    is_private,
    page_checksum,
    read_json,
    write_json,
)

if TYPE_CHECKING:
    from ortplugins.optimization.request import BuildRequest
    from session_options.plan import Plan


class KnownStart(NamedTuple):
    """The entry that an earlier start took."""

    folder: str
    manifest: dict[str, Any]


def find_known_start(root: str, request: BuildRequest) -> KnownStart | None:
    """Return what an earlier start of the same request on the same files took, if it may."""
    from ortplugins.artifacts.manifest import is_as_published, note_use, read_manifest

    key = _recall(root, _text(request)) if _can_be_known(request) else None
    if not isinstance(key, str):
        return None
    folder = os.path.join(root, "entries", key)
    try:
        manifest = read_manifest(folder)
        if manifest is None or not is_as_published(folder, manifest):
            return None
    except OSError:
        return None
    return KnownStart(folder, manifest) if note_use(folder) else None


def remember_start(
    root: str, request: BuildRequest, key: str, files: Sequence[str], started: float
) -> None:
    """Keep which entry a start took, where a later one may rely on it.

    Args:
        root: The cache directory; may be read-only.
        request: What the session asked for.
        key: Of the entry.
        files: The model and its data.
        started: When the first of them was looked at, seconds since the epoch.
    """
    if _can_be_known(request):
        _remember(root, _text(request), key, files, started)


def lacks_operators(path: str, plan: Plan) -> bool:
    """Whether each pass needs an operator that the model's file does not even name."""
    names = sorted(item.needs_operator for item in plan.passes)
    if plan.hint or not all(names):
        return False
    root, started = cache_folder(plan.cache_dir), time.time()
    text = json.dumps({"lacks": names, "path": path})
    if _recall(root, text) is not None:
        return True
    import mmap

    try:
        with (
            open(path, "rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            found = any(content.find(name.encode()) >= 0 for name in names)
    except (OSError, ValueError):  # whoever loads it says what is wrong
        return False
    if not found:
        _remember(root, text, "", [path], started)
    return not found


def _recall(root: str, text: str) -> Any:
    """Return what was kept under a text; None where nothing was, or files have changed."""
    known = read_json(os.path.join(root, "starts", _name(text)))
    if not isinstance(known, dict) or known.get("text") != text or not is_private(root):
        return None
    return known["found"] if _are_unchanged(known) else None


def _remember(root: str, text: str, found: str, files: Sequence[str], started: float) -> None:
    with contextlib.suppress(OSError):
        states = {path: _state(path) for path in files}
        newest = max(os.stat(path).st_mtime for path in files)
        if newest > started - SETTLED_SECONDS:
            return
        from pathlib import Path  # a start that is known does without it

        folder = CacheDirectory(Path(root)).make("starts")
        write_json(folder, _name(text), {"text": text, "found": found, "files": states})


def _are_unchanged(known: Mapping[str, Any]) -> bool:
    try:
        return all(_state(path) == state for path, state in known["files"].items())
    except (OSError, KeyError, TypeError, AttributeError):
        return False


def is_current(root: str | os.PathLike[str], name: str) -> bool:
    """Whether a later start may still make use of a file of ``starts``."""
    known = read_json(os.path.join(root, "starts", name))
    if not isinstance(known, dict) or not isinstance(known.get("found"), str):
        return False
    entry = os.path.join(root, "entries", known["found"])
    return os.path.exists(entry) and _are_unchanged(known)


def _can_be_known(request: BuildRequest) -> bool:
    plan = request.plan
    reads_files = any(item.checks_digests() for item in plan.passes)
    return not isinstance(request.source, bytes) and not plan.retry_failed and not reads_files


def _text(request: BuildRequest) -> str:
    parts = {**request.key_parts(), "path": request.name, "data": request.data_folder}
    return json.dumps(parts, sort_keys=True)


def _name(text: str) -> str:
    # Of two requests of one name the later is kept: the whole text is compared.
    return f"{zlib.crc32(text.encode()):08x}.json"


def _state(path: str) -> list[int]:
    """Return what shows that a file is another one, or was written to."""
    file = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    try:
        status = os.fstat(file)
        return [*file_identity(status), page_checksum(file, status.st_size)]
    finally:
        os.close(file)
