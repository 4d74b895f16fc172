# SPDX-License-Identifier: MIT
"""What earlier starts found for files that have not changed since: no file is read twice.

A shortcut past :mod:`.build`, whose key is the files' content. Here they are compared by path,
identity and a checksum of some pages, and whatever is not known exactly takes the long way.
"""

from __future__ import annotations

__all__ = ["KnownStart", "find_known_start", "remember_start"]

import contextlib
import json
import os
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from ortplugins.artifacts.directory import (
    file_identity,
    is_private,
    page_checksum,
    read_json,
    write_json,
)
from ortplugins.artifacts.manifest import is_as_published, note_use, read_manifest
from ortplugins.optimization.request import BuildRequest

# A file changed a moment ago may change again within the resolution of its time stamps.
_SETTLED_SECONDS = 2.0


class KnownStart(NamedTuple):
    """What an earlier start took.

    Attributes:
        folder: Of the entry; empty where no pass has anything to do.
        manifest: Of the entry.
    """

    folder: str
    manifest: dict[str, Any]


def find_known_start(root: str, request: BuildRequest) -> KnownStart | None:
    """Return what an earlier start of the same request on the same files took, if it may.

    Args:
        root: The cache directory.
        request: What the session asks for.
    """
    if not _can_be_known(request):
        return None
    text = _text(request)
    known = read_json(os.path.join(root, "starts", _name(text)))
    if not isinstance(known, dict) or known.get("request") != text or not is_private(root):
        return None
    try:
        if any(_state(path) != state for path, state in known["files"].items()):
            return None
        if known["key"] is None:
            return KnownStart("", {})
        folder = os.path.join(root, "entries", known["key"])
        manifest = read_manifest(folder)
        if manifest is None or not is_as_published(folder, manifest, None):
            return None
    except (OSError, KeyError, TypeError, AttributeError):
        return None
    return KnownStart(folder, manifest) if note_use(folder) else None


def remember_start(
    root: str, request: BuildRequest, key: str | None, files: Sequence[str], started: float
) -> None:
    """Keep what a start took, where a later one may rely on it; a cache may be read-only.

    Args:
        root: The cache directory.
        request: What the session asked for.
        key: Of the entry; None where no pass has anything to do.
        files: What the decision was made from.
        started: When the first of them was looked at, seconds since the epoch.
    """
    if not _can_be_known(request):
        return
    with contextlib.suppress(OSError):
        states = {path: _state(path) for path in files}
        newest = max(os.stat(path).st_mtime for path in files)
        if newest > started - _SETTLED_SECONDS:
            return
        folder = os.path.join(root, "starts")
        if not os.path.isdir(folder):
            os.makedirs(root, mode=0o700, exist_ok=True)
            os.mkdir(folder, mode=0o700)
        text = _text(request)
        if is_private(root):
            content = {"request": text, "key": key, "files": states}
            write_json(folder, _name(text), content)


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
    """Return what shows that a file is another one, or was written to.

    Raises:
        OSError: If it can't be read.
    """
    file = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    try:
        status = os.fstat(file)
        return [*file_identity(status), page_checksum(file, status.st_size)]
    finally:
        os.close(file)
