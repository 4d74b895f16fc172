# SPDX-License-Identifier: MIT
"""The cache directory: where it is, who may put models there, its subdirectories and locks.

    <root>/sources/<digest of .onnx>.json   locations of the model's external data
    <root>/known/<checksum>.json            what was found out about files, until they change
    <root>/entries/<key>/model.onnx ...     a published entry, read-only from then on
    <root>/entries/<key>/manifest.json      its files' sizes and digests, how to open it, the
                                            report; its modification time is the last use
    <root>/building/<key>.<random>/         an entry that is being built
    <root>/locks/<key>.lock                 held by the process that builds

A start on files that an earlier one knew costs a few stat calls and two small JSON files, and
imports little more than ``known_starts.py`` and ``manifest.py`` of this package.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
import sys
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ortplugins.errors import OrtpluginsWarning
from session_options.keys import parse_size

if TYPE_CHECKING:
    from pathlib import Path

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
