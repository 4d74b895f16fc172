# SPDX-License-Identifier: MIT
"""What the builder of an entry wrote about it, and whether its files still agree."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ortplugins.artifacts.directory import read_json

if TYPE_CHECKING:
    from pathlib import Path

MANIFEST = "manifest.json"
MODEL = "model.onnx"
KEY_CHARACTERS = 12  # of a key, to people
# A use is written down if the last one is longer ago than this.
USE_SECONDS = 60.0


class Entry(NamedTuple):
    """A published artifact."""

    folder: Path
    manifest: dict[str, Any]

    @property
    def size(self) -> int:
        """Bytes of its files."""
        return int(sum(self.manifest["files"].values()))

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


def is_as_published(folder: str | os.PathLike[str], manifest: Mapping[str, Any]) -> bool:
    """Whether files have the sizes that they were published with."""
    return all(
        os.stat(os.path.join(folder, name)).st_size == size
        for name, size in manifest["files"].items()
    )


def read_manifest(folder: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return the manifest of a folder; None where there is none that can be used."""
    content = read_json(os.path.join(folder, MANIFEST))
    if not isinstance(content, dict) or not isinstance(content.get("created"), float):
        return None
    parts = (content.get(name) for name in ("files", "digests", "data", "made_from"))
    return content if all(isinstance(part, dict) for part in parts) else None


def write_manifest(folder: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """Complete a manifest with sizes, digests and time, and write it."""
    files = sorted(folder.iterdir())
    complete = {
        "data": {},
        **manifest,
        "files": {file.name: file.stat().st_size for file in files},
        "digests": {file.name: file_sha256(file) for file in files},
        "created": time.time(),
    }
    (folder / MANIFEST).write_text(json.dumps(complete), encoding="utf-8")
    return complete


def last_use(folder: Path) -> int:
    """Return what a use changes, nanoseconds; 0 for a folder without a manifest."""
    try:
        return os.stat(folder / MANIFEST).st_mtime_ns
    except FileNotFoundError:
        return 0


def file_sha256(path: Path) -> str:
    """Return the digest of a file."""
    import hashlib

    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
