# SPDX-License-Identifier: MIT
"""The cache directory, as far as a start that finds its entry reads it.

    <root>/known/<checksum>.json            what was found out about files, until they change
    <root>/entries/<key>/model.onnx ...     a published entry, read-only from then on; the key
                                            ends with the beginning of the model's digest
    <root>/entries/<key>/manifest.json      its files' sizes and digests, how to open it, the
                                            report; its modification time is the last use
    <root>/building/<model>.<random>/       an entry that is being built; <model> as in the key
    <root>/locks/<model>.lock               held by the process that builds

A start on files that an earlier one knew costs a few stat calls and two small JSON files, and
imports this module and ``find_or_build.py`` of this package; ``store.py`` writes.
"""

from __future__ import annotations

import json
import os
import stat
import sys
import time
import zlib
from typing import Any

MANIFEST = "manifest.json"
MODEL = "model.onnx"
# A use is written down if the last one is longer ago than this.
USE_SECONDS = 60.0
_SAMPLED_PAGES, _PAGE_BYTES = 16, 4096
_PLATFORM: str = sys.platform


def cache_folder(chosen: str = "") -> str:
    """Return the cache directory: the one chosen, ORTPLUGINS_CACHE_DIR, or the user's own."""
    if chosen or (chosen := os.environ.get("ORTPLUGINS_CACHE_DIR", "")):
        return os.path.abspath(os.path.expanduser(chosen))
    if _PLATFORM == "linux":  # importing platformdirs takes longer than the rest of a hit
        base = os.environ.get("XDG_CACHE_HOME", "").strip() or os.path.expanduser("~/.cache")
        return os.path.join(base, "ortplugins")
    import platformdirs

    return platformdirs.user_cache_dir("ortplugins", appauthor=False)


def is_private(root: str | os.PathLike[str]) -> bool:
    """Whether nobody but this user, or the administrator, can write to a directory."""
    if not hasattr(os, "geteuid"):
        return True  # Windows: the user's cache directory is private by its ACL
    try:
        status = os.stat(root)
    except OSError:
        return False
    others_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return status.st_uid in (os.geteuid(), 0) and not others_write


def read_json(path: str | os.PathLike[str]) -> Any:
    """Return the content of a JSON file; None where there is none that can be read."""
    try:
        with open(path, "rb") as file:
            return json.loads(file.read())
    except (OSError, ValueError):
        return None


def note_use(folder: str | os.PathLike[str]) -> bool:
    """Write down that an entry is used now; return False if it was removed meanwhile.

    The manifest's modification time does for that: it is the smallest file, which matters
    where an overlay copies a whole file first. Nothing is written twice in a minute, nor
    while the clock is behind an earlier use.
    """
    manifest = os.path.join(folder, MANIFEST)
    try:
        if time.time() - os.stat(manifest).st_mtime >= USE_SECONDS:
            os.utime(manifest)
    except FileNotFoundError:
        return False
    except OSError:
        pass  # a read-only cache
    return True


def usable_manifest(
    folder: str | os.PathLike[str], *, used: bool = True
) -> dict[str, Any] | None:
    """Return the manifest of an entry whose files have the sizes they were published with.

    The entry's last use is now, unless ``used`` is false.
    """
    manifest = read_manifest(folder)
    try:
        if manifest is None or any(
            os.stat(os.path.join(folder, name)).st_size != size
            for name, size in manifest["files"].items()
        ):
            return None
    except OSError:
        return None
    return manifest if not used or note_use(folder) else None


def read_manifest(folder: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return the manifest of a folder; None where there is none that can be used."""
    content = read_json(os.path.join(folder, MANIFEST))
    if not isinstance(content, dict) or not isinstance(content.get("created"), float):
        return None
    parts = (content.get(name) for name in ("files", "digests", "data", "made_from"))
    return content if all(isinstance(part, dict) for part in parts) else None


def recall(root: str | os.PathLike[str], text: str) -> str | None:
    """Return what was kept under a text; None where nothing was, or files have changed."""
    known = read_json(os.path.join(root, "known", memo_name(text)))
    if not isinstance(known, dict) or known.get("text") != text or not is_private(root):
        return None
    found = known.get("found")
    return found if isinstance(found, str) and are_unchanged(known) else None


def are_unchanged(known: Any) -> bool:
    """Whether the files that something was found out about are as they were."""
    try:
        return all(state_of(path) == state for path, state in known["files"].items())
    except (OSError, KeyError, TypeError, AttributeError):
        return False


def memo_name(text: str) -> str:
    """Return the name of a memo; of two texts of one name the later is kept."""
    return f"{zlib.crc32(text.encode()):08x}.json"


def state_of(path: str) -> list[int]:
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
