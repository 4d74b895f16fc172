# SPDX-License-Identifier: MIT
"""The cache directory: where it is, who may write to it, its entries, memos and locks.

    <root>/sources/<digest of .onnx>.json   locations of the model's external data
    <root>/known/<checksum>.json            what was found out about files, until they change
    <root>/entries/<key>/model.onnx ...     a published entry, read-only from then on
    <root>/entries/<key>/manifest.json      its files' sizes and digests, how to open it, the
                                            report; its modification time is the last use
    <root>/building/<key>.<random>/         an entry that is being built
    <root>/locks/<key>.lock                 held by the process that builds

A start on files that an earlier one knew costs a few stat calls and two small JSON files, and
imports this module and ``find_or_build.py`` of this package.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
import sys
import time
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ortplugins.errors import OrtpluginsWarning
from session_options.keys import parse_size

if TYPE_CHECKING:
    from pathlib import Path

MANIFEST = "manifest.json"
MODEL = "model.onnx"
KEY_CHARACTERS = 12  # of a key, to people
# A use is written down if the last one is longer ago than this.
USE_SECONDS = 60.0
_SAMPLED_PAGES, _PAGE_BYTES = 16, 4096
# A file changed a moment ago may change again within the resolution of its time stamps, as in
# git's index.
SETTLED_SECONDS = 2.0
_NAMES = {
    "entries": re.compile("[0-9a-f]{40}"),
    "sources": re.compile(r"[0-9a-f]{64}\.json"),
    "known": re.compile(r"[0-9a-f]{8}\.json"),
    "building": re.compile(r"[0-9a-f]{40}\..+"),
    "locks": re.compile(r"[0-9a-f]{40}(\.model)?\.lock"),
}
# What flock says on NFS without its lock daemon, and on some FUSE file systems.
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
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


def cache_root(chosen: str = "") -> Path:
    """Return the directory of :func:`cache_folder` as a Path."""
    from pathlib import Path

    return Path(cache_folder(chosen))


def cache_limit(chosen: str = "") -> int | None:
    """Return the bytes that the cache may take: as chosen, or by ORTPLUGINS_CACHE_LIMIT."""
    if chosen:
        return parse_size("ortplugins.cache_limit", chosen)
    variable = "ORTPLUGINS_CACHE_LIMIT"
    text = os.environ.get(variable, "")
    return parse_size(f"environment variable {variable}", text) if text else None


class CacheDirectory:
    """One cache directory, private to the user."""

    def __init__(self, root: Path) -> None:
        """Name a directory; nothing is created before something is stored."""
        self.root = root
        self._has_locks = True

    def is_trusted(self) -> bool:
        """Whether nobody but this user, or the administrator, can put models here."""
        return is_private(self.root)

    def check_trusted(self) -> None:
        """Raise PermissionError if the directory exists and others can put models there."""
        if self.root.exists() and not self.is_trusted():
            raise PermissionError(
                f"{self.root}: belongs to another user or others may write to it; "
                "choose another directory, or chmod 700 it"
            )

    def make(self, name: str) -> Path:
        """Return a subdirectory, made with mode 0700."""
        folder = self.root / name
        if not folder.is_dir() and (self.is_trusted() or not self.root.exists()):
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
        self.check_trusted()
        return folder

    def own(self, name: str) -> list[Path]:
        """Return what the cache has put into a subdirectory, and nothing else."""
        return [
            path for path in (self.root / name).glob("*") if _NAMES[name].fullmatch(path.name)
        ]

    @contextlib.contextmanager
    def lock(self, name: str, timeout: float = -1) -> Iterator[bool]:
        """Hold the lock of a key, or of a model; yield whether it is held.

        Where the file system has no locks, a warning says so, and nobody waits: several
        processes may build one entry, and one of them publishes.
        """
        import filelock

        path = self.make("locks") / f"{name}.lock"
        # filelock.Timeout is a TimeoutError.
        lock = filelock.FileLock(path, mode=0o600, timeout=timeout)
        try:
            lock.acquire()
        except (OSError, NotImplementedError) as error:
            if isinstance(error, OSError) and error.errno not in _NO_LOCKS:
                raise
            if self._has_locks:
                self._has_locks = False
                warnings.warn(
                    f"{self.root}: its file system has no locks ({error}), so processes that "
                    "start together may each build the same entry",
                    OrtpluginsWarning,
                    stacklevel=2,
                )
            yield False
            return
        try:
            yield True
        finally:
            lock.release()


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


def disk_size(folder: Path) -> int:
    """Return the bytes that removing a folder frees; its files may vanish meanwhile."""
    size = 0
    for parent, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):
                status = os.lstat(os.path.join(parent, name))
                size += status.st_size if status.st_nlink == 1 else 0
    return size


# A start that finds its entry needs neither of these modules, and each worker would hold them.
def remove_tree(folder: Path) -> None:
    """Remove a folder, as far as that can be done."""
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


def write_json(folder: str | os.PathLike[str], name: str, content: Any) -> None:
    """Write a file that readers see whole or not at all."""
    import tempfile

    with tempfile.NamedTemporaryFile("w", dir=folder, delete=False, encoding="utf-8") as file:
        json.dump(content, file)
    os.replace(file.name, os.path.join(folder, name))


def read_json(path: str | os.PathLike[str]) -> Any:
    """Return the content of a JSON file; None where there is none that can be read."""
    try:
        with open(path, "rb") as file:
            return json.loads(file.read())
    except (OSError, ValueError):
        return None


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


def recall(root: str | os.PathLike[str], text: str) -> str | None:
    """Return what was kept under a text; None where nothing was, or files have changed."""
    known = read_json(os.path.join(root, "known", _memo_name(text)))
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
        write_json(folder, _memo_name(text), {"text": text, "found": found, "files": states})


def _are_unchanged(known: Mapping[str, Any]) -> bool:
    try:
        return all(_state(path) == state for path, state in known["files"].items())
    except (OSError, KeyError, TypeError, AttributeError):
        return False


def is_current(root: str | os.PathLike[str], name: str) -> bool:
    """Whether what is kept in a file of ``known`` is still so."""
    known = read_json(os.path.join(root, "known", name))
    return isinstance(known, dict) and _are_unchanged(known)


def _memo_name(text: str) -> str:
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
