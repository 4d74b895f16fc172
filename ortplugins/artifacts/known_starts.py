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
from typing import TYPE_CHECKING, Any

from ortplugins.artifacts.directory import (
    CacheDirectory,
    cache_folder,
    is_private,
    read_json,
    write_json,
)

if TYPE_CHECKING:
    from ortplugins.optimization.request import BuildRequest
    from session_options.plan import Plan

_SAMPLED_PAGES, _PAGE_BYTES = 16, 4096
# A file changed a moment ago may change again within the resolution of its time stamps, as in
# git's index.
SETTLED_SECONDS = 2.0


def find_known_start(root: str, request: BuildRequest) -> tuple[str, dict[str, Any]] | None:
    """Return the entry, its folder and manifest, that an earlier start of a request took."""
    from ortplugins.artifacts.manifest import is_as_published, note_use, read_manifest

    key = recall(root, _text(request)) if _can_be_known(request) else None
    if not isinstance(key, str):
        return None
    folder = os.path.join(root, "entries", key)
    try:
        manifest = read_manifest(folder)
        if manifest is None or not is_as_published(folder, manifest):
            return None
    except OSError:
        return None
    return (folder, manifest) if note_use(folder) else None


def remember_start(
    root: str, request: BuildRequest, key: str, files: Sequence[str], started: float
) -> None:
    """Keep which entry a start took, where a later one may rely on it."""
    if _can_be_known(request):
        remember(root, _text(request), key, files, started)


def lacks_operators(path: str, plan: Plan) -> bool:
    """Whether each pass needs an operator that the model's file does not even name."""
    names = sorted(item.needs_operator for item in plan.passes)
    if plan.hint or not all(names):
        return False
    root, started = cache_folder(plan.cache_dir), time.time()
    text = json.dumps({"lacks": names, "path": path})
    if recall(root, text) is not None:
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
        remember(root, text, "", [path], started)
    return not found


def recall(root: str | os.PathLike[str], text: str) -> str | None:
    """Return what was kept under a text; None where nothing was, or files have changed."""
    known = read_json(os.path.join(root, "known", _name(text)))
    if not isinstance(known, dict) or known.get("text") != text or not is_private(root):
        return None
    found = known.get("found")
    return found if isinstance(found, str) and _are_unchanged(known) else None


def remember(
    root: str | os.PathLike[str],
    text: str,
    found: str,
    files: Sequence[str],
    started: float,
) -> None:
    """Keep what was found under a text, until one of the files changes.

    Not of files that changed just before ``started``, seconds since the epoch, when the first
    of them was looked at; nor in a cache that is read-only.
    """
    with contextlib.suppress(OSError):
        states = {path: _state(path) for path in files}
        if max(states[path][-2] for path in files) / 1e9 > started - SETTLED_SECONDS:
            return
        from pathlib import Path  # a start that is known does without it

        folder = CacheDirectory(Path(root)).make("known")
        write_json(folder, _name(text), {"text": text, "found": found, "files": states})


def _are_unchanged(known: Mapping[str, Any]) -> bool:
    try:
        return all(_state(path) == state for path, state in known["files"].items())
    except (OSError, KeyError, TypeError, AttributeError):
        return False


def is_current(root: str | os.PathLike[str], name: str) -> bool:
    """Whether what is kept in a file of ``known`` is still so."""
    known = read_json(os.path.join(root, "known", name))
    return isinstance(known, dict) and _are_unchanged(known)


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
    """Return what shows that a file is another one, or was written to; last a checksum.

    Of pages spread over it: file systems without a change time of their own (squashfs, say,
    with every time set to one date) could show two files alike.
    """
    file = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    try:
        status, checksum = os.fstat(file), 0
        for number in range(_SAMPLED_PAGES if status.st_size > _PAGE_BYTES else 1):
            os.lseek(file, number * (status.st_size // _SAMPLED_PAGES), os.SEEK_SET)
            checksum = zlib.crc32(os.read(file, _PAGE_BYTES), checksum)
    finally:
        os.close(file)
    newest = max(status.st_mtime_ns, status.st_ctime_ns)
    identity = [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns]
    return [*identity, newest, checksum]
