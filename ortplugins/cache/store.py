# SPDX-License-Identifier: MIT
"""The store of optimised models: builds, publishes, prunes and shares entries.

An entry appears and disappears by a single rename, so readers never see an incomplete one.
``folder.py`` describes the layout of the directory. A session that hits does not need this
module.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
import time
import warnings
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ortplugins.cache import folder as cache_files
from ortplugins.cache.artifact import (
    ARTIFACT,
    MODEL_CHARACTERS,
    REPORT,
    USE_SECONDS,
    Artifact,
    changed_files,
)
from ortplugins.cache.folder import read_digest
from ortplugins.errors import OrtpluginsWarning
from session_options.entries import CACHE_DIR_KEY, CACHE_LIMIT_KEY
from session_options.keys import parse_size

# A session opens an entry within this time after finding it. Twice USE_SECONDS, because the
# last recorded use may be that much older than the actual one.
_OPENING_SECONDS = 2 * USE_SECONDS
# Files that belong to no entry after this time never will.
_INDEX_SECONDS = 86400.0
KEY_CHARACTERS = 12  # of a key, in output for people
# Default limit of a cache, in bytes.
_DEFAULT_LIMIT = 20 * 10**9
# The fields of an Artifact that the builder provides.
_SAID_BY_BUILDER = (
    "settings", "data", "baked", "has_custom_operators", "free", "initializers", "failed",
    "of_model",
)  # fmt: skip
_NAMES = {
    "entries": re.compile("[0-9a-f]{40}"),
    "index": re.compile(r"[0-9a-f]{40}(\.data)?(\.[0-9]+\.[0-9]+)?"),
    "building": re.compile(r"[0-9a-f]{16}\..+"),
    "locks": re.compile(r"[0-9a-f]{16}\.lock"),
}
# Errors of flock on NFS without its lock daemon, and on some FUSE file systems.
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


class Entry(NamedTuple):
    """What was found in the place of an entry."""

    folder: Path
    artifact: Artifact | None  # None if no session would open it
    size: int  # bytes
    # When a session last used it, to about a minute, in seconds since the epoch; when it was
    # published, if uses cannot be recorded. In the future if the clock was set back.
    last_used: float

    @classmethod
    def at(cls, folder: Path) -> Entry:
        """Look at a folder."""
        artifact = Artifact.read(folder)
        used = os.stat(folder / ARTIFACT if artifact else folder).st_mtime
        used = max(used, artifact.made if artifact else 0)
        return cls(folder, artifact, disk_size(folder), used)

    def __str__(self) -> str:
        """Return the beginning of the key, and the model if it is known."""
        return f"{self.key[:KEY_CHARACTERS]} {self.model}".rstrip()

    @property
    def key(self) -> str:
        """The name of the folder."""
        return self.folder.name

    @property
    def model(self) -> str:
        """The path of the model that it was made from; "bytes" if it had none."""
        return self.artifact.of_model if self.artifact else ""

    @property
    def created(self) -> float:
        """When it was published, seconds since the epoch."""
        return self.artifact.made if self.artifact else 0.0


class ArtifactCache:
    """The entries, index and locks of one cache directory, which is private to the user."""

    def __init__(self, root: Path, limit: int | None = None) -> None:
        """Choose a directory; nothing is created until something is stored."""
        self.root, self.limit = root, limit
        self._has_locks = True

    def is_trusted(self) -> bool:
        """Whether only this user and the administrator can put models here."""
        parts = (self.root / name for name in _NAMES)
        return cache_files.is_private(self.root, *filter(Path.exists, parts))

    def check_trusted(self) -> None:
        """Raise PermissionError if the directory exists and others can write to it."""
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
        """Return only what the cache itself has put into a subdirectory."""
        found = (self.root / name).glob("*")
        return [path for path in found if _NAMES[name].fullmatch(path.name)]

    @contextlib.contextmanager
    def lock(self, key: str, timeout: float = -1) -> Iterator[bool]:
        """Hold the lock of the model that a key belongs to; yield whether it is held.

        If the file system has no locks, there is a warning and nobody waits: several
        processes may build the same entry, and one of them publishes it.
        """
        import filelock

        path = self.make("locks") / f"{key[-MODEL_CHARACTERS:]}.lock"
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
                    "start together may each build the same entry [ORP904]",
                    OrtpluginsWarning,
                    stacklevel=2,
                )
            yield False
            return
        try:
            yield True
        finally:
            lock.release()

    def entries(self) -> list[Entry]:
        """Return all published entries, newest first, without looking at their files.

        Raises:
            PermissionError: As :meth:`check_trusted`.
        """
        self.check_trusted()
        found = [item for item in self.stored() if item.artifact]
        return sorted(found, key=lambda entry: entry.created, reverse=True)

    def stored(self) -> Iterator[Entry]:
        """Yield everything in the place of entries, usable or not."""
        for path in self.own("entries"):
            with contextlib.suppress(OSError):  # removed just now
                yield Entry.at(path)

    @contextlib.contextmanager
    def build(self, model: str) -> Iterator[Path]:
        """Become the builder of a model, by its digest; afterwards enforce the cache's limit.

        Yields an empty folder for :meth:`publish`. Its parent may hold temporary files and is
        removed in the end.
        """
        import tempfile

        building, name = self.make("building"), model[:MODEL_CHARACTERS]
        with self.lock(name) as is_alone:
            if is_alone:  # then any other builder of this model was killed
                for dead in building.glob(f"{name}.*"):
                    remove_tree(dead)
            scratch = Path(tempfile.mkdtemp(prefix=f"{name}.", dir=building))
            try:
                (folder := scratch / "files").mkdir(mode=0o700)
                yield folder
            finally:
                remove_tree(scratch)
        if self.limit is not None:
            with contextlib.suppress(OSError):  # the limit is enforced another time
                prune(self, max_size=self.limit)

    def publish(self, key: str, folder: Path, made: Mapping[str, Any]) -> Artifact:
        """Publish a folder that :func:`.make_entry` has ``made``; return the artifact."""
        (folder / REPORT).write_text(json.dumps(made["report"], indent=1), encoding="utf-8")
        files = {file.name: file.stat() for file in sorted(folder.iterdir())}
        fields = {name: made[name] for name in _SAID_BY_BUILDER}
        Artifact(
            folder,
            files={name: (x.st_size, x.st_mtime_ns) for name, x in files.items()},
            digests={name: read_digest(folder / name) for name in files},
            made=time.time(),
            **fields,
        ).write()
        final = self.make("entries") / key
        if final.exists():  # damaged
            self.remove(key)
        os.replace(folder, final)
        artifact = Artifact.read(final)
        assert artifact is not None
        return artifact

    def discard_damaged(self, artifact: Artifact) -> list[str] | None:
        """Remove an entry if its files changed on disk; return the names of these files.

        None if it was removed or rebuilt since the artifact was read; then it is left alone.
        """
        with self.lock(artifact.key):
            found = Artifact.read(self.root / "entries" / artifact.key)
            if found is None or found.made != artifact.made:
                return None
            try:
                changed = changed_files(found, reads_files=True)
            except OSError as error:  # a file is missing or can't be read
                changed = [os.path.basename(error.filename or found.folder)]
            if changed:
                self.remove(artifact.key)
        return changed

    def remove(self, key: str) -> None:
        """Hide an entry from readers by one rename, then delete it."""
        name = f"{key[-MODEL_CHARACTERS:]}.old.{os.urandom(8).hex()}"
        aside = self.make("building") / name
        os.replace(self.root / "entries" / key, aside)
        remove_tree(aside)


class PruneResult(NamedTuple):
    """What :func:`prune` did; sizes in bytes."""

    removed: tuple[Entry, ...]
    left: tuple[tuple[Entry, str], ...]  # what should have gone, and why it did not
    abandoned: int  # bytes left behind by builders that were killed
    kept: int
    size: int


def prune(
    cache: ArtifactCache,
    max_size: int | None = None,
    older_than: float | None = None,
    *,
    everything: bool = False,
) -> PruneResult:
    """Remove entries unused for ``older_than`` seconds, then the oldest above ``max_size``.

    The least recently used entries go first. Each is renamed and then deleted, so a process
    that has it open keeps it until it closes. Entries stay if they were used within the last
    two minutes, because someone may be about to open them (unless ``everything`` goes), and if
    their model is being built. On Windows, an entry that is open anywhere cannot be renamed
    and stays. Files of the user in this directory are not touched.
    """
    cache.check_trusted()
    stored = list(cache.stored())
    if stored and not os.access(cache.root / "entries", os.W_OK):
        raise PermissionError(
            f"{cache.root}: cannot be written, and nothing was removed; run this as the "
            "user that the directory belongs to, where it is mounted for writing"
        )
    abandoned = _remove_abandoned(cache)
    removed: list[Entry] = []
    left: list[tuple[Entry, str]] = []
    now, size, gone = time.time(), sum(item.size for item in stored), 0
    for item in sorted(stored, key=lambda item: item.last_used):
        # If the clock was set back, uses lie in the future and nothing has expired.
        expired = older_than is not None and now - item.last_used > older_than
        expired |= everything or item.artifact is None  # of an earlier layout, or damaged
        if not expired and (max_size is None or size <= max_size):
            continue
        if not everything and abs(now - item.last_used) < _OPENING_SECONDS:
            left.append((item, "used a moment ago"))
            continue
        try:
            if reason := _remove(cache, item):
                left.append((item, reason))
                continue
            removed.append(item)
        except FileNotFoundError:
            gone += 1  # another process has removed it
        size -= item.size
    _prune_index(cache, whole=everything)
    kept = len(stored) - len(removed) - gone
    return PruneResult(tuple(removed), tuple(left), abandoned, kept, size)


def _remove(cache: ArtifactCache, item: Entry) -> str:
    """Remove an entry unless it was used since we looked; return why it stays, if it does.

    A reader that finds it just before the rename has to rebuild it.
    """
    try:
        with cache.lock(item.key, timeout=0):
            if Entry.at(item.folder).last_used != item.last_used:
                return "used, or built, just now"
            cache.remove(item.key)
    except TimeoutError:
        return "being built, or removed, by another process"
    except PermissionError:
        if os.name != "nt":
            raise
        return "open in a process, and Windows keeps files that are open"
    return ""


def _prune_index(cache: ArtifactCache, *, whole: bool) -> None:
    """Remove outdated records of the index and unused locks, or all of them."""
    used = {path.name[-MODEL_CHARACTERS:] for path in cache.own("entries")}
    for path in cache.own("index"):
        if whole or not _holds(path, used):
            with contextlib.suppress(OSError):
                path.unlink()
    for path in cache.own("locks"):
        if whole or (path.stem not in used and _is_old(path)):
            with contextlib.suppress(OSError), cache.lock(path.stem, timeout=0):
                path.unlink(missing_ok=True)


def _holds(path: Path, used: Container[str]) -> bool:
    """Whether a record of the index is still valid: for a file, or for a model with entries.

    ``used`` are the beginnings of the digests of models that have entries.
    """
    if (fields := cache_files.read_fields(path)) is None:
        return bool(path.suffix) and not _is_old(path)  # it may be being written
    if path.suffix == ".data":
        return fields[0][:MODEL_CHARACTERS] in used
    try:
        return cache_files.state_of(fields[0]) == fields[1]
    except (OSError, IndexError):
        return False


def _is_old(path: Path) -> bool:
    """Whether no process can be about to make use of a file."""
    with contextlib.suppress(OSError):
        return time.time() - os.stat(path).st_mtime > _INDEX_SECONDS
    return False


def share(cache: ArtifactCache) -> None:
    """Let other users read the entries, and none but this one write."""
    names = ("entries", "index")
    paths = [cache.root, *(cache.root / name for name in names)]
    for name in names:
        for path in cache.own(name):
            paths.append(path)
            for parent, folders, files in os.walk(path):
                paths += [Path(parent, inner) for inner in (*folders, *files)]
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            mode = stat.S_IMODE(os.stat(path).st_mode)
            readable = 0o555 if path.is_dir() else 0o444
            if (shared := (mode | readable) & ~0o022) != mode:
                os.chmod(path, shared)


def _remove_abandoned(cache: ArtifactCache) -> int:
    """Remove what builders left that were killed; return its bytes."""
    size = 0
    for dead in cache.own("building"):
        # One that can't be locked is being built, or is not ours to remove.
        model = dead.name.partition(".")[0]
        with contextlib.suppress(OSError), cache.lock(model, timeout=0) as is_alone:
            if is_alone or _is_old(dead):
                size += disk_size(dead)
                remove_tree(dead)
    return size


def cache_of(entries: Mapping[str, str]) -> ArtifactCache:
    """Return the cache of a session with some entries.

    Raises:
        OptionError: If its limit is no size.
    """
    variable, limit = "ORTPLUGINS_CACHE_LIMIT", _DEFAULT_LIMIT
    if text := entries.get(CACHE_LIMIT_KEY):
        limit = parse_size(CACHE_LIMIT_KEY, text)
    elif text := os.environ.get(variable, ""):
        limit = parse_size(f"environment variable {variable}", text)
    return ArtifactCache(Path(cache_files.cache_folder(entries.get(CACHE_DIR_KEY, ""))), limit)


def disk_size(folder: Path) -> int:
    """Return the bytes that removing a folder frees; its files may vanish meanwhile."""
    size = 0
    for parent, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):
                size += os.lstat(os.path.join(parent, name)).st_size
    return size


def remove_tree(folder: Path) -> None:
    """Remove a folder, as far as that can be done."""
    import shutil

    shutil.rmtree(folder, ignore_errors=True)
