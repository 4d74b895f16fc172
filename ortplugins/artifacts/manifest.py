# SPDX-License-Identifier: MIT
"""What the builder of an entry wrote about it, and whether its files still agree."""

from __future__ import annotations

__all__ = [
    "MANIFEST",
    "MODEL",
    "USE_SECONDS",
    "Entry",
    "file_sha256",
    "is_as_published",
    "last_use",
    "link_status",
    "note_use",
    "read_manifest",
    "write_manifest",
]

import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ortplugins.artifacts.directory import read_json, write_json

if TYPE_CHECKING:
    from pathlib import Path

MANIFEST = "manifest.json"
MODEL = "model.onnx"
# A use is written down if the last one is longer ago than this.
USE_SECONDS = 60.0


class Entry(NamedTuple):
    """A published artifact.

    Attributes:
        folder: Where its files are.
        manifest: What its builder wrote about it.
    """

    folder: Path
    manifest: dict[str, Any]

    @property
    def model(self) -> Path | None:
        """The model to open; None when the original runs as it is."""
        return self.folder / MODEL if MODEL in self.manifest["files"] else None

    @property
    def size(self) -> int:
        """Bytes of its own files; not of those that are hard links to the source's."""
        links, files = self.manifest["links"], self.manifest["files"]
        return sum(int(size) for name, size in files.items() if name not in links)

    @property
    def linked_size(self) -> int:
        """Bytes of files that are hard links to the source's."""
        return int(sum(self.manifest["files"].values())) - self.size

    @property
    def created(self) -> float:
        """When it was published, seconds since the epoch."""
        return float(self.manifest["created"])

    @property
    def last_used(self) -> float:
        """When a session last took it, to about a minute, seconds since the epoch.

        Where uses cannot be written down, when it was published. A time ahead of the clock,
        which was set back, counts as now.
        """
        used = self.created
        with contextlib.suppress(OSError):
            used = max(used, last_use(self.folder) / 1e9)
        return min(used, time.time())

    def damage(self) -> dict[str, str]:
        """Read every file; return what is wrong, by name, with those not as published."""
        digests = self.manifest["digests"]
        found = {
            name: self._difference(name, size, digests[name])
            for name, size in self.manifest["files"].items()
        }
        return {name: what for name, what in found.items() if what is not None}

    def damaged_files(self) -> list[str]:
        """Return the names of the files that are not as they were published."""
        return list(self.damage())

    def _difference(self, name: str, published: int, digest: str) -> str | None:
        try:
            size = os.stat(self.folder / name).st_size
            if size != published:
                return f"other size: {size} bytes, published with {published}"
            if file_sha256(self.folder / name) != digest:
                return "other digest"
        except FileNotFoundError:
            return "missing"
        except OSError as error:
            return f"cannot be read: {error.strerror}"
        return None

    def copy_linked(self, name: str) -> None:
        """Put a copy in the place of a hard link.

        Raises:
            OSError: If it can't be written.
        """
        import shutil

        path = self.folder / name
        copy = path.with_name(f"{name}.copy")
        shutil.copyfile(path, copy)
        os.replace(copy, path)
        del self.manifest["links"][name]
        write_json(self.folder, MANIFEST, self.manifest)

    def note_use(self) -> bool:
        """Write down that the entry is used now; return False if it was removed meanwhile.

        The manifest's modification time does for that: it is the smallest file, which matters
        where an overlay copies a whole file first. Nothing is written twice in a minute, nor
        while the clock is behind an earlier use.
        """
        return note_use(self.folder)


def note_use(folder: str | os.PathLike[str]) -> bool:
    """Do what :meth:`Entry.note_use` does."""
    manifest = os.path.join(folder, MANIFEST)
    try:
        if time.time() - os.stat(manifest).st_mtime >= USE_SECONDS:
            os.utime(manifest)
    except FileNotFoundError:
        return False
    except OSError:
        pass  # a read-only cache
    return True


def is_as_published(
    folder: str | os.PathLike[str],
    manifest: Mapping[str, Any],
    digest_of: Callable[[str], str] | None,
) -> bool:
    """Whether files have the sizes, and linked ones the content, they were published with.

    Args:
        folder: Of the entry.
        manifest: Its manifest.
        digest_of: Reads the digest of a link whose status changed; None to refuse it.

    Raises:
        OSError: If a file is missing.
    """
    links = manifest["links"]
    for name, size in manifest["files"].items():
        path = os.path.join(folder, name)
        status = os.stat(path)
        if status.st_size != size:
            return False
        # Copied with the whole cache? Or written to, through its other name?
        if (
            name in links
            and link_status(status) != links[name]["status"]
            and (digest_of is None or digest_of(path) != manifest["digests"][name])
        ):
            return False
    return True


def read_manifest(folder: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return a manifest that names files of its folder only; None where there is no such."""
    content = read_json(os.path.join(folder, MANIFEST))
    if not isinstance(content, dict) or not isinstance(files := content.get("files"), dict):
        return None
    if not isinstance(content.get("created"), int | float):
        return None
    if any(os.path.basename(name) != name or type(files[name]) is not int for name in files):
        return None
    parts = [content.get(name) for name in ("digests", "links", "made_from")]
    if not all(isinstance(part, dict) for part in parts):
        return None
    is_complete = content["digests"].keys() >= files.keys() >= content["links"].keys()
    return content if is_complete else None


def write_manifest(
    folder: Path, manifest: dict[str, Any], known: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Complete a manifest with sizes, digests and time, and write it.

    Args:
        folder: Files of the entry.
        manifest: What the builder says; ``links`` has the sources of hard links by name.
        known: Digests of files that need not be read.

    Raises:
        OSError: If it can't be written.
    """
    stats = {file.name: file.stat() for file in sorted(folder.iterdir())}
    known = known or {}
    complete = {
        **manifest,
        "files": {name: status.st_size for name, status in stats.items()},
        "digests": {name: known.get(name) or file_sha256(folder / name) for name in stats},
        "links": {
            name: {"source": source, "status": link_status(stats[name])}
            for name, source in manifest.get("links", {}).items()
            if name in stats
        },
        "created": time.time(),
    }
    (folder / MANIFEST).write_text(json.dumps(complete), encoding="utf-8")
    return complete


def link_status(status: os.stat_result) -> list[int]:
    """Return what shows that a linked file was written to, or is another one."""
    return [status.st_ino, status.st_mtime_ns]


def last_use(folder: Path) -> int:
    """Return what a use changes, nanoseconds; 0 for a folder without a manifest."""
    try:
        return os.stat(folder / MANIFEST).st_mtime_ns
    except FileNotFoundError:
        return 0


def file_sha256(path: Path) -> str:
    """Return the digest of a file.

    Raises:
        OSError: If it can't be read.
    """
    import hashlib

    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
