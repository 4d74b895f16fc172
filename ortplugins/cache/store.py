# SPDX-License-Identifier: MIT
"""Optimised models on disk: found, built once, published whole; pruned, verified, shared.

An entry becomes visible by one rename and leaves by one, so a reader never sees half of one.
``known_starts.py`` describes the layout of the directory. A model given as bytes is found
through this module: what only a builder needs is imported when it builds.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import stat
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ortplugins import known_starts
from ortplugins.cache.key import MODEL_CHARACTERS
from ortplugins.errors import OrtpluginsWarning
from ortplugins.known_starts import MANIFEST
from session_options.caller_warnings import warn_caller
from session_options.keys import PREFIX, parse_size

if TYPE_CHECKING:
    from session_options.plan import Plan

# Whoever has found an entry opens it within this time. Twice USE_SECONDS: a use may lie that
# much behind the one that was written down.
_OPENING_SECONDS = 2 * known_starts.USE_SECONDS
# What belongs to no entry after this time will not get one.
_INDEX_SECONDS = 86400.0
_KEY_LENGTH = 40
KEY_CHARACTERS = 12  # of a key, to people
_CHECKSUM = "checksum"  # of the rest of a manifest
_NAMES = {
    "entries": re.compile("[0-9a-f]{40}"),
    # Those of an earlier layout, and what writers left that were killed.
    "known": re.compile(r"[0-9a-f]{8}\.(memo.*|json)|tmp\w{8}"),
    "building": re.compile(r"[0-9a-f]{16}\..+"),
    "locks": re.compile(r"[0-9a-f]{16}\.lock"),
}
# What flock says on NFS without its lock daemon, and on some FUSE file systems.
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


class Entry(NamedTuple):
    """What lies in the place of an entry, as it was when it was looked at."""

    folder: Path
    manifest: dict[str, Any]  # empty where no session would take it
    size: int  # bytes
    # When a session last took it, to about a minute, in seconds since the epoch: when it was
    # published, where uses cannot be written down. Ahead of a clock that was set back.
    last_used: float

    @classmethod
    def at(cls, folder: Path) -> Entry:
        """Look at a folder."""
        manifest = read_manifest(folder) or {}
        used = os.stat(folder / MANIFEST if manifest else folder).st_mtime
        used = max(used, manifest.get("created", 0))
        return cls(folder, manifest, disk_size(folder), used)

    def __str__(self) -> str:
        """Return the beginning of the key, and the model, where the manifest has it."""
        return f"{self.key[:KEY_CHARACTERS]} {self.manifest.get('model', '')}".rstrip()

    @property
    def key(self) -> str:
        """What the folder is called."""
        return self.folder.name

    @property
    def created(self) -> float:
        """When it was published, seconds since the epoch."""
        return float(self.manifest["created"])

    def damage(self) -> dict[str, str]:
        """Read every file; return what is wrong, by name, with those not as published."""
        if not self.manifest:
            is_there = (self.folder / MANIFEST).exists()
            return {MANIFEST: "cannot be used" if is_there else "missing"}
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
            if _sha256(self.folder / name) != digest:
                return "other digest"
        except FileNotFoundError:
            return "missing"
        except OSError as error:
            return f"cannot be read: {error.strerror}"
        return None


class ArtifactCache:
    """The entries, memos and locks of one cache directory, which is private to the user."""

    def __init__(self, root: Path, limit: int | None = None) -> None:
        """Name a directory; nothing is created before something is stored."""
        self.root, self.limit = root, limit
        self._has_locks = True

    def is_trusted(self) -> bool:
        """Whether nobody but this user, or the administrator, can put models here."""
        parts = (self.root / name for name in _NAMES)
        return known_starts.is_private(self.root, *filter(Path.exists, parts))

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
        found = (self.root / name).glob("*")
        return [path for path in found if _NAMES[name].fullmatch(path.name)]

    @contextlib.contextmanager
    def lock(self, key: str, timeout: float = -1) -> Iterator[bool]:
        """Hold the lock of the model that a key is of; yield whether it is held.

        Where the file system has no locks, a warning says so, and nobody waits: several
        processes may build one entry, and one of them publishes.
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

    def find(self, key: str) -> Entry | None:
        """Return an entry whose files are those that were published, as used now."""
        folder = self.root / "entries" / key
        if not (self.is_trusted() and known_starts.is_private(folder)):
            return None
        try:
            entry = Entry.at(folder)
            changed = self._changed(entry) if entry.manifest else None
            if changed == [] and known_starts.note_use(folder):
                return entry
        except OSError:
            return None
        if changed:
            warn_rebuilt(folder, changed)
        return None

    def find_like(self, parts: Mapping[str, Any], missing: Sequence[str]) -> Entry | None:
        """Return an entry of these parts, but for versions of packages missing here."""

        def compared(made_from: Mapping[str, Any]) -> dict[str, Any]:
            plain: dict[str, Any] = json.loads(json.dumps(made_from))
            for name in missing:
                del plain["versions"][name]
            return plain

        made, wanted = self.made_from(parts["digest"]), compared(parts)
        keys = (key for key, others in made if compared(others) == wanted)
        return next(filter(None, map(self.find, keys)), None)

    def _changed(self, entry: Entry) -> list[str] | None:
        """Return which files are not as published; None where a size says so already.

        By their content where only times differ: copies keep these, or are read once.
        """
        folder, manifest = entry.folder, entry.manifest
        found = {name: os.stat(folder / name) for name in manifest["files"]}
        if any(found[name].st_size != size for name, size in manifest["files"].items()):
            return None
        return [
            name
            for name, time in manifest["times"].items()
            if not known_starts.is_same_time(found[name].st_mtime_ns, time)
            and known_starts.file_digest(folder / name, self.root)[0]
            != manifest["digests"][name]
        ]

    def data_locations(self, digest: str) -> list[str] | None:
        """Return where a model has its external data; None where no entry is made of it."""
        return next((list(parts["data"]) for _, parts in self.made_from(digest)), None)

    def made_from(self, digest: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the keys of a model's entries, and what each key is made from."""
        for path in (self.root / "entries").glob(f"*{digest[:MODEL_CHARACTERS]}"):
            parts = (read_manifest(path) or {}).get("made_from", {})
            if parts.get("digest") == digest:
                yield path.name, parts

    def entries(self) -> list[Entry]:
        """Return all published entries, the newest first; their files are not looked at."""
        found = [item for item in self.stored() if item.manifest] if self.is_trusted() else []
        return sorted(found, key=lambda entry: entry.created, reverse=True)

    def stored(self) -> Iterator[Entry]:
        """Yield what is in the place of entries, usable or not."""
        for path in self.own("entries"):
            with contextlib.suppress(OSError):  # removed just now
                yield Entry.at(path)

    @contextlib.contextmanager
    def build(self, model: str) -> Iterator[Path]:
        """Become the builder of a model, by its digest; at the end keep the cache's limit.

        Yields an empty folder for :meth:`publish`, which is removed.
        """
        import tempfile

        building, name = self.make("building"), model[:MODEL_CHARACTERS]
        with self.lock(name) as is_alone:
            if is_alone:  # whatever else builds from this model was killed
                for dead in building.glob(f"{name}.*"):
                    remove_tree(dead)
            folder = Path(tempfile.mkdtemp(prefix=f"{name}.", dir=building))
            try:
                yield folder
            finally:
                remove_tree(folder)
        if self.limit is not None:
            with contextlib.suppress(OSError):  # what is too much goes at another time
                prune(self, max_size=self.limit)

    def publish(self, key: str, folder: Path, manifest: dict[str, Any]) -> Entry:
        """Make a built folder the entry of its key."""
        files = sorted(folder.iterdir())
        complete = {
            "data": {},
            **manifest,
            "files": {file.name: file.stat().st_size for file in files},
            "times": {file.name: file.stat().st_mtime_ns for file in files},
            "digests": {file.name: _sha256(file) for file in files},
            "created": time.time(),
        }
        write_manifest(folder, complete)
        final = self.make("entries") / key
        if final.exists():  # damaged
            self.remove(key)
        os.replace(folder, final)
        return Entry.at(final)

    def discard(self, key: str, seen: dict[str, Any] | None) -> None:
        """Take an entry out, unless it was built again since its manifest was ``seen``."""
        with self.lock(key), contextlib.suppress(FileNotFoundError):
            if read_manifest(self.root / "entries" / key) == seen:
                self.remove(key)

    def remove(self, key: str) -> None:
        """Hide an entry from readers by one rename, then unlink it."""
        name = f"{key[-MODEL_CHARACTERS:]}.old.{os.urandom(8).hex()}"
        aside = self.make("building") / name
        os.replace(self.root / "entries" / key, aside)
        remove_tree(aside)


class PruneResult(NamedTuple):
    """What :func:`prune` did; sizes in bytes."""

    removed: tuple[Entry, ...]
    left: tuple[tuple[Entry, str], ...]  # what should have gone, and why it has not
    abandoned: int  # bytes that builders left which were killed
    kept: int
    size: int


def prune(
    cache: ArtifactCache,
    max_size: int | None = None,
    older_than: float | None = None,
    *,
    everything: bool = False,
) -> PruneResult:
    """Remove what is unused for ``older_than`` seconds, and what is too much for ``max_size``.

    The least recently used go first. Entries leave by a rename and are unlinked afterwards, so
    a process that has one open keeps it until it closes. Left alone are those used within the
    last two minutes, which someone may be about to open, unless ``everything`` goes; and those
    whose key is being built. On Windows an entry that is open anywhere cannot be renamed, and
    is left. The directory may hold a user's files as well, which stay.
    """
    cache.check_trusted()
    stored = list(cache.stored())
    if stored and not os.access(cache.root / "entries", os.W_OK):
        raise PermissionError(
            f"{cache.root}: cannot be written, and nothing was removed; run this as the "
            "user that the directory belongs to, where it is mounted for writing"
        )
    abandoned = _remove_abandoned(cache)
    chosen, in_use = choose(stored, max_size, older_than, time.time())
    if everything:
        chosen, in_use = list(stored), []
    removed: list[Entry] = []
    left = [(item, "used a moment ago") for item in in_use]
    for item in chosen:
        try:
            if reason := _remove(cache, item):
                left.append((item, reason))
            else:
                removed.append(item)
        except FileNotFoundError:
            stored.remove(item)  # another process was quicker
    _prune_index(cache, whole=everything)
    kept = [item for item in stored if item not in removed]
    return PruneResult(
        tuple(removed), tuple(left), abandoned, len(kept), sum(item.size for item in kept)
    )


def choose(
    stored: Iterable[Entry], max_size: int | None, older_than: float | None, now: float
) -> tuple[list[Entry], list[Entry]]:
    """Choose what to remove, least recently used first; and what someone may be opening."""
    ordered = sorted(stored, key=lambda item: item.last_used)
    size = sum(item.size for item in ordered)
    chosen: list[Entry] = []
    in_use: list[Entry] = []
    for item in ordered:
        # Where the clock was set back, uses lie ahead of it and nothing has expired.
        expired = older_than is not None and now - item.last_used > older_than
        expired |= not item.manifest  # of an earlier layout, or damaged
        if not expired and (max_size is None or size <= max_size):
            continue
        if abs(now - item.last_used) < _OPENING_SECONDS:
            in_use.append(item)
        else:
            chosen.append(item)
            size -= item.size
    return chosen, in_use


def _remove(cache: ArtifactCache, item: Entry) -> str:
    """Remove an entry that was not used since it was looked at; return why it stays, if so.

    A reader that finds it between that and the rename has to have it built again.
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
    """Remove what is known of files that have changed, and unused locks; or all."""
    for path in cache.own("known"):
        if whole or not _holds(path):
            with contextlib.suppress(OSError):
                path.unlink()
    used = {path.name[-MODEL_CHARACTERS:] for path in cache.own("entries")}
    for path in cache.own("locks"):
        if whole or (path.stem not in used and _is_old(path)):
            with contextlib.suppress(OSError), cache.lock(path.stem, timeout=0):
                path.unlink(missing_ok=True)


def _holds(path: Path) -> bool:
    """Whether what a memo says is so still."""
    if (memo := known_starts.read_memo(path)) is None:
        return path.suffix != ".memo" and path.suffix != ".json" and not _is_old(path)
    _, shared, states, found = known_starts.split_memo(memo)
    entries = path.parent.with_name("entries")
    # Of an entry by its key, of a digest, or of no entry.
    is_there = not found or len(found[0]) != _KEY_LENGTH or (entries / found[0]).exists()
    return is_there and known_starts.are_unchanged(states, copied=bool(shared))


def _is_old(path: Path) -> bool:
    """Whether no process can be about to make use of a file."""
    with contextlib.suppress(OSError):
        return time.time() - os.stat(path).st_mtime > _INDEX_SECONDS
    return False


def verify(cache: ArtifactCache) -> Iterator[tuple[Entry, dict[str, str]]]:
    """Compare the files of each entry with their digests; yield it and what is wrong."""
    cache.check_trusted()
    for item in sorted(cache.stored(), key=lambda item: item.key):
        while item.folder.exists():
            damage = item.damage()
            manifest = read_manifest(item.folder) or {}
            # Removed, or built again, while it was read?
            if not damage or (manifest == item.manifest and item.folder.exists()):
                yield item, damage
                break
            item = item._replace(manifest=manifest)


def share(cache: ArtifactCache) -> None:
    """Let other users read the entries, and none but this one write."""
    names = ("entries", "known")
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


def cache_of(plan: Plan) -> ArtifactCache:
    """Return the cache of a plan's sessions."""
    variable, limit = "ORTPLUGINS_CACHE_LIMIT", None
    if plan.cache_limit:
        limit = parse_size(f"{PREFIX}.cache_limit", plan.cache_limit)
    elif text := os.environ.get(variable, ""):
        limit = parse_size(f"environment variable {variable}", text)
    return ArtifactCache(Path(known_starts.cache_folder(plan.cache_dir)), limit)


def warn_rebuilt(folder: Path, damaged: Iterable[str]) -> None:
    """Warn that an entry is built again because files of it changed on disk."""
    text = f"{folder}: {', '.join(damaged)} changed on disk, and is built again"
    warn_caller(text, OrtpluginsWarning)


def disk_size(folder: Path) -> int:
    """Return the bytes that removing a folder frees; its files may vanish meanwhile."""
    size = 0
    for parent, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):
                status = os.lstat(os.path.join(parent, name))
                size += status.st_size if status.st_nlink == 1 else 0
    return size


def remove_tree(folder: Path) -> None:
    """Remove a folder, as far as that can be done."""
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


def read_manifest(folder: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return the manifest of a folder; None where there is none, or not as it was written."""
    try:
        content = json.loads(Path(folder, MANIFEST).read_bytes())
        checksum = content.pop(_CHECKSUM)
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return None
    return content if checksum == _checksum(content) else None


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write the manifest of an entry."""
    content = {**manifest, _CHECKSUM: _checksum(manifest)}
    new = folder / f"{MANIFEST}.new"
    new.write_text(json.dumps(content), encoding="utf-8")
    new.replace(folder / MANIFEST)


def _checksum(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
