# SPDX-License-Identifier: MIT
"""Optimised models on disk: found by what they were made from, built once, published whole.

    <root>/sources/<digest of .onnx>.json   locations of the model's external data
    <root>/digests/<path and status>        digest of a large .onnx file
    <root>/entries/<key>/model.onnx ...     a published entry, read-only from then on
    <root>/entries/<key>/manifest.json      its files' sizes, how to open it, the report
    <root>/building/<key>.<random>/         an entry in the making
    <root>/locks/<key>.lock                 held by the one that builds

An entry becomes visible by one rename, so a reader never sees half of one. Nothing here
imports onnx: a hit costs a digest, a few stat calls and one small JSON file.
"""

from __future__ import annotations

__all__ = ["ArtifactCache", "Entry", "cache_root"]

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
MODEL = "model.onnx"
# Layout of the directory; another number is another cache.
_FORMAT = 1
# From this size on, hashing takes a noticeable part of a start.
_MEMO_SIZE = 4 << 20
_SETTLED_SECONDS = 2.0
_NAMES = {
    "entries": re.compile("[0-9a-f]{40}"),
    "sources": re.compile(r"[0-9a-f]{64}\.json"),
    "digests": re.compile("[0-9a-f]{64}"),
    "building": re.compile(r"[0-9a-f]{40}\..+"),
}


def cache_root(chosen: str = "") -> Path:
    """Return the cache directory: the one chosen, ORTPLUGINS_CACHE_DIR, or the user's own."""
    if chosen or (chosen := os.environ.get("ORTPLUGINS_CACHE_DIR", "")):
        return Path(chosen).expanduser().absolute()
    import platformdirs

    return Path(platformdirs.user_cache_dir("ortplugins", appauthor=False))


@dataclasses.dataclass(frozen=True)
class Entry:
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
        """Bytes of all files."""
        return sum(self.manifest["files"].values())

    def damaged_files(self) -> list[str]:
        """Names of the files that are not as they were published; reads them whole."""
        digests = self.manifest.get("digests", {})
        return [name for name in self.manifest["files"] if not self._is_intact(name, digests)]

    def _is_intact(self, name: str, digests: dict[str, str]) -> bool:
        try:
            return _sha256(self.folder / name) == digests.get(name)
        except OSError:
            return False

    @property
    def created(self) -> float:
        """When it was published, seconds since the epoch."""
        return float(self.manifest["created"])


class ArtifactCache:
    """One cache directory, private to the user."""

    def __init__(self, root: Path) -> None:
        """Name a directory; nothing is created before something is stored."""
        self.root = root

    @staticmethod
    def digest(content: bytes) -> str:
        """Return the digest of an .onnx file's bytes."""
        return hashlib.sha256(content).hexdigest()

    def file_digest(self, path: str | os.PathLike[str]) -> str:
        """Return the digest of an .onnx file; of a large one seen before, without reading it.

        Raises:
            OSError: If the file can't be read.
        """
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_size < _MEMO_SIZE:
                return hashlib.file_digest(file, "sha256").hexdigest()
            identity = (
                os.path.realpath(path),
                status.st_dev,
                status.st_ino,
                status.st_size,
                status.st_mtime_ns,
                status.st_ctime_ns,
            )
            memo = self.root / "digests" / hashlib.sha256(repr(identity).encode()).hexdigest()
            known = _read_json(memo)
            if isinstance(known, str) and self._trusted():
                return known
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        # As in git's index: a file changed a moment ago may change again within the
        # resolution of its time stamps.
        age = time.time() - max(status.st_mtime, status.st_ctime)
        if age > _SETTLED_SECONDS:
            with contextlib.suppress(OSError):  # a cache that can't be written is told later
                _write_json(self._make("digests"), memo.name, digest)
        return digest

    def data_locations(self, digest: str) -> list[str] | None:
        """Return the external data locations of a model seen before, None for a new one."""
        content = _read_json(self.root / "sources" / f"{digest}.json")
        if not isinstance(content, list) or not all(isinstance(x, str) for x in content):
            return None
        return content

    def remember_data_locations(self, digest: str, locations: Sequence[str]) -> None:
        """Keep the external data locations of a model.

        Raises:
            OSError: If the directory can't be written.
        """
        _write_json(self._make("sources"), f"{digest}.json", sorted(locations))

    @staticmethod
    def key(digest: str, data_files: Sequence[Path], parts: dict[str, Any]) -> str | None:
        """Return the key of an artifact, or None when a data file is missing.

        Args:
            digest: Digest of the .onnx file.
            data_files: External data files; path, size and time of change count.
            parts: Everything else that the result depends on, as JSON.
        """
        files = []
        for path in data_files:
            try:
                status = os.stat(path)
            except OSError:
                return None
            files.append([str(path), status.st_size, status.st_mtime_ns])
        content = {"format": _FORMAT, "digest": digest, "data": files, **parts}
        text = json.dumps(content, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:40]

    def find(self, key: str) -> Entry | None:
        """Return a published entry whose files are as its builder left them."""
        folder = self.root / "entries" / key
        manifest = _read_json(folder / MANIFEST)
        if not isinstance(manifest, dict) or not self._trusted():
            return None
        try:
            for name, size in manifest["files"].items():
                if os.path.basename(name) != name or os.stat(folder / name).st_size != size:
                    return None
        except (KeyError, AttributeError, TypeError, OSError):
            return None
        return Entry(folder, manifest)

    @contextlib.contextmanager
    def build(self, key: str) -> Iterator[Path | Entry]:
        """Become the builder of a key, or get the entry that another one has built meanwhile.

        Yields:
            An entry, or an empty folder that :meth:`publish` turns into one. What is left of
            the folder is removed at the end.

        Raises:
            OSError: If the directory can't be written.
        """
        import filelock

        locks, building = self._make("locks"), self._make("building")
        with filelock.FileLock(locks / f"{key}.lock", mode=0o600):
            if (entry := self.find(key)) is not None:
                yield entry
                return
            # The lock is ours: whatever else builds this key was killed.
            for dead in building.glob(f"{key}.*"):
                shutil.rmtree(dead, ignore_errors=True)
            folder = Path(tempfile.mkdtemp(prefix=f"{key}.", dir=building))
            try:
                yield folder
            finally:
                shutil.rmtree(folder, ignore_errors=True)

    def publish(self, key: str, folder: Path, manifest: dict[str, Any]) -> Entry:
        """Make a built folder the entry of its key.

        Raises:
            OSError: If it can't be renamed.
        """
        complete = write_manifest(folder, manifest)
        final = self._make("entries") / key
        if final.exists():  # damaged, or find() had returned it
            self.discard(key)
        os.replace(folder, final)
        return Entry(final, complete)

    def discard(self, key: str) -> None:
        """Take an entry out of the cache; whoever has it open keeps it until they close it.

        Raises:
            OSError: If the directory can't be written.
        """
        grave = Path(tempfile.mkdtemp(prefix=f"{key}.old.", dir=self._make("building")))
        with contextlib.suppress(FileNotFoundError):  # by another process, just now
            os.replace(self.root / "entries" / key, grave / "entry")
        shutil.rmtree(grave, ignore_errors=True)

    def entries(self) -> list[Entry]:
        """Return all published entries, the newest first."""
        paths = self._ours("entries")
        found = [entry for path in paths if (entry := self.find(path.name)) is not None]
        return sorted(found, key=lambda entry: entry.created, reverse=True)

    def clear(self) -> tuple[int, int]:
        """Remove everything that this class has put into the directory.

        A process that has an entry open keeps it until it closes: the files are unlinked
        only. Another process's build in progress is left alone.

        Returns:
            Number of entries and bytes removed.
        """
        import filelock

        removed = self.entries()
        # By their names: the directory may be one that holds a user's files as well.
        for path in self._ours("entries"):
            shutil.rmtree(path, ignore_errors=True)
        for path in (*self._ours("sources"), *self._ours("digests")):
            path.unlink(missing_ok=True)
        for dead in self._ours("building"):
            lock = self.root / "locks" / f"{dead.name.partition('.')[0]}.lock"
            with contextlib.suppress(filelock.Timeout), filelock.FileLock(lock, timeout=0):
                shutil.rmtree(dead, ignore_errors=True)
        return len(removed), sum(entry.size for entry in removed)

    def _ours(self, name: str) -> list[Path]:
        """Return what this class has put into a subdirectory, and nothing else."""
        return [
            path for path in (self.root / name).glob("*") if _NAMES[name].fullmatch(path.name)
        ]

    def _make(self, name: str) -> Path:
        """Return a subdirectory, made with mode 0700."""
        folder = self.root / name
        if not folder.is_dir():
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
        if not self._trusted():
            raise PermissionError(
                f"{self.root}: belongs to another user or others may write to it; "
                "choose another directory, or chmod 700 it"
            )
        return folder

    def _trusted(self) -> bool:
        """Whether nobody but this user, or the administrator, can put models here."""
        if not hasattr(os, "geteuid"):
            return True  # Windows: the user's cache directory is private by its ACL
        try:
            status = os.stat(self.root)
        except OSError:
            return False
        others_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        return status.st_uid in (os.geteuid(), 0) and not others_write


def write_manifest(folder: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """Complete a manifest with sizes, digests and time, and write it.

    Raises:
        OSError: If it can't be written.
    """
    sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    digests = {name: _sha256(folder / name) for name in sizes}
    complete = {**manifest, "files": sizes, "digests": digests, "created": time.time()}
    (folder / MANIFEST).write_text(json.dumps(complete), encoding="utf-8")
    return complete


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_json(folder: Path, name: str, content: Any) -> None:
    with tempfile.NamedTemporaryFile("w", dir=folder, delete=False, encoding="utf-8") as file:
        json.dump(content, file)
    os.replace(file.name, folder / name)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
