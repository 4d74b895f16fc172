# SPDX-License-Identifier: MIT
"""Optimised models on disk: found, built once, published whole; pruned, verified, shared.

An entry becomes visible by one rename and leaves by one, so a reader never sees half of one.
The layout of the directory is described in ``directory.py``.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ortplugins.artifacts.directory import (
    KEY_CHARACTERS,
    MANIFEST,
    SETTLED_SECONDS,
    USE_SECONDS,
    CacheDirectory,
    Entry,
    disk_size,
    is_current,
    last_use,
    read_json,
    read_manifest,
    recall,
    remember,
    remove_tree,
    usable_manifest,
    write_json,
    write_manifest,
)

# From this size on, hashing takes a noticeable part of a start.
_MEMO_SIZE = 1 << 20
# Whoever has found an entry opens it within this time. Twice USE_SECONDS: a use may lie that
# much behind the one that was written down.
_OPENING_SECONDS = 2 * USE_SECONDS
# An entry that is being removed is without its manifest for less than this.
_REMOVING_SECONDS = 0.1
# What belongs to no entry after this time will not get one.
_INDEX_SECONDS = 86400.0


class ArtifactCache(CacheDirectory):
    """The entries of one cache directory."""

    def __init__(self, root: Path, limit: int | None = None) -> None:
        """Name a directory; nothing is created before something is stored."""
        super().__init__(root)
        self.limit = limit
        # A cache that cannot be written keeps none on disk.
        self._digests: dict[tuple[int, ...], str] = {}

    def find(self, key: str, *, used: bool = True) -> Entry | None:
        """Return a published entry; see :func:`.usable_manifest`."""
        folder = self.root / "entries" / key
        manifest = usable_manifest(folder, used=used) if self.is_trusted() else None
        return None if manifest is None else Entry(folder, manifest)

    def file_digest(self, path: str | os.PathLike[str]) -> str:
        """Return the SHA-256 of a file; of a large one seen before, without reading it."""
        name, started = os.path.realpath(path), time.time()
        text = f"digest of {name}"
        with open(name, "rb") as file:
            status = os.fstat(file.fileno())
            times = status.st_mtime_ns, status.st_ctime_ns
            identity = (status.st_dev, status.st_ino, status.st_size, *times)
            is_large = status.st_size >= _MEMO_SIZE
            if is_large and (known := self._digests.get(identity) or recall(self.root, text)):
                return known
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if is_large and max(times) / 1e9 < started - SETTLED_SECONDS:
            self._digests[identity] = digest
            remember(self.root, text, digest, [name], started)
        return digest

    def data_locations(self, digest: str) -> list[str] | None:
        """Return the external data locations of a model seen before, None for a new one."""
        content = read_json(self.root / "sources" / f"{digest}.json")
        if not isinstance(content, list) or not all(isinstance(x, str) for x in content):
            return None
        return content

    def remember_data_locations(self, digest: str, locations: Sequence[str]) -> None:
        """Keep the external data locations of a model."""
        write_json(self.make("sources"), f"{digest}.json", sorted(locations))

    def entries(self) -> list[Entry]:
        """Return all published entries, the newest first; their files are not looked at."""
        if not self.is_trusted():
            return []
        found = [
            Entry(path, manifest)
            for path in self.own("entries")
            if (manifest := read_manifest(path)) is not None
        ]
        return sorted(found, key=lambda entry: entry.created, reverse=True)

    @contextlib.contextmanager
    def build(
        self, key: str, is_usable: Callable[[Entry], bool] = lambda _: True
    ) -> Iterator[Path | Entry]:
        """Become the builder of a key, or get the entry that another one has built meanwhile.

        Yields an entry, or an empty folder for :meth:`publish`, removed at the end.
        """
        import tempfile

        building = self.make("building")
        with self.lock(key) as is_alone:
            if (entry := self.find(key)) is not None and is_usable(entry):
                yield entry
                return
            if is_alone:  # whatever else builds this key was killed
                for dead in building.glob(f"{key}.*"):
                    remove_tree(dead)
            folder = Path(tempfile.mkdtemp(prefix=f"{key}.", dir=building))
            try:
                yield folder
            finally:
                remove_tree(folder)

    def publish(self, key: str, folder: Path, manifest: dict[str, Any]) -> Entry:
        """Make a built folder the entry of its key, and keep the cache below its limit."""
        complete = write_manifest(folder, manifest)
        final = self.make("entries") / key
        if final.exists():  # damaged
            remove_tree(self.move_aside(key))
        os.replace(folder, final)
        if self.limit is not None:
            with contextlib.suppress(OSError):  # what is too much goes at another time
                prune(self, max_size=self.limit)
        return Entry(final, complete)

    def discard(self, key: str, seen: dict[str, Any] | None) -> None:
        """Take an entry out, unless it was built again since its manifest was ``seen``."""
        with self.lock(key), contextlib.suppress(FileNotFoundError):
            if read_manifest(self.root / "entries" / key) == seen:
                remove_tree(self.move_aside(key))

    def move_aside(self, key: str) -> Path:
        """Take an entry out of readers' sight by one rename; return where it is now."""
        aside = self.make("building") / f"{key}.old.{os.urandom(8).hex()}"
        os.replace(self.root / "entries" / key, aside)
        return aside


class EntryInfo(NamedTuple):
    """What lies in the place of an entry, whether or not a session would take it.

    ``last_used`` is that of :class:`Entry`, but ahead of a clock that was set back; ``stamp``
    changes with every use that is written down.
    """

    key: str
    manifest: dict[str, Any] | None
    size: int
    last_used: float
    stamp: int

    def __str__(self) -> str:
        """Return the beginning of the key, and the model, where the manifest has it."""
        return f"{self.key[:KEY_CHARACTERS]} {(self.manifest or {}).get('model', '')}".rstrip()


class PruneResult(NamedTuple):
    """What :func:`prune` did; sizes in bytes."""

    removed: tuple[EntryInfo, ...]
    left: tuple[tuple[EntryInfo, str], ...]  # what should have gone, and why it has not
    abandoned: int  # bytes that builders left which were killed
    kept: int
    size: int


class EntryInUse(Exception):
    """An entry stays; the text is the reason a user reads."""


def prune(
    cache: ArtifactCache,
    max_size: int | None = None,
    older_than: float | None = None,
) -> PruneResult:
    """Remove what is unused for ``older_than`` seconds, and what is too much for ``max_size``.

    The least recently used go first. Entries leave by a rename and are unlinked afterwards, so
    a process that has one open keeps it until it closes. Left alone are those used within the
    last two minutes, which someone may be about to open, and those whose key is being built.
    On Windows an entry that is open anywhere cannot be renamed, and is left.
    """
    cache.check_trusted()
    stored = list(_stored(cache))
    if stored and not os.access(cache.root / "entries", os.W_OK):
        raise PermissionError(
            f"{cache.root}: cannot be written, and nothing was removed; run this as the "
            "user that the directory belongs to, where it is mounted for writing"
        )
    abandoned = _remove_abandoned(cache)
    chosen, in_use = choose(stored, max_size, older_than, time.time())
    removed: list[EntryInfo] = []
    left = [(item, "used a moment ago") for item in in_use]
    for item in chosen:
        try:
            _remove(cache, item)
            removed.append(item)
        except EntryInUse as reason:
            left.append((item, str(reason)))
        except FileNotFoundError:
            stored.remove(item)  # another process was quicker
    _prune_index(cache)
    kept = [item for item in stored if item not in removed]
    return PruneResult(
        tuple(removed), tuple(left), abandoned, len(kept), sum(item.size for item in kept)
    )


def choose(
    stored: Iterable[EntryInfo],
    max_size: int | None,
    older_than: float | None,
    now: float,
) -> tuple[list[EntryInfo], list[EntryInfo]]:
    """Choose what to remove, least recently used first; and what someone may be opening."""
    ordered = sorted(stored, key=lambda item: item.last_used)
    size = sum(item.size for item in ordered)
    chosen: list[EntryInfo] = []
    in_use: list[EntryInfo] = []
    for item in ordered:
        # Where the clock was set back, uses lie ahead of it and nothing has expired.
        expired = older_than is not None and now - item.last_used > older_than
        if not expired and (max_size is None or size <= max_size):
            break  # the others were used later
        if abs(now - item.stamp / 1e9) < _OPENING_SECONDS:
            in_use.append(item)
        else:
            chosen.append(item)
            size -= item.size
    return chosen, in_use


def _remove(cache: ArtifactCache, item: EntryInfo) -> None:
    """Remove an entry that nobody is about to open."""
    try:
        with cache.lock(item.key, timeout=0):
            aside = _remove_unless_used(cache, item)
    except TimeoutError:
        raise EntryInUse("being built, or removed, by another process") from None
    except PermissionError:
        if os.name != "nt":
            raise
        raise EntryInUse("open in a process, and Windows keeps files that are open") from None
    remove_tree(aside)


def _prune_index(cache: ArtifactCache, *, whole: bool = False) -> None:
    """Remove what is known of models that no entry is made from, and unused locks; or all."""
    used = {f"{entry.manifest['made_from']['digest']}.json" for entry in cache.entries()}
    used |= {f"{path.name}.lock" for path in cache.own("entries")}
    for path in (path for name in ("sources", "known", "locks") for path in cache.own(name)):
        if path.parent.name == "known":
            stale = not is_current(cache.root, path.name)
        else:
            stale = path.name not in used and _is_old(path)
        if whole or stale:
            is_lock = path.parent.name == "locks"
            lock = cache.lock(path.stem, timeout=0) if is_lock else contextlib.nullcontext()
            with contextlib.suppress(OSError), lock:
                path.unlink(missing_ok=True)


def _is_old(path: Path) -> bool:
    """Whether no process can be about to make use of a file."""
    with contextlib.suppress(OSError):
        return time.time() - os.stat(path).st_mtime > _INDEX_SECONDS
    return False


def _remove_unless_used(cache: ArtifactCache, item: EntryInfo) -> Path:
    """Move an entry aside that was not used since it was looked at; return where it is.

    Its manifest leaves first. A reader that found the entry before has put its mark
    there, and gets it back without having missed a file; later ones find nothing.
    """
    entry = cache.root / "entries" / item.key
    manifest, hidden = entry / MANIFEST, entry / f"{MANIFEST}.hidden"
    if not item.stamp:
        if manifest.exists():
            raise EntryInUse("built just now")
        return cache.move_aside(item.key)
    os.replace(manifest, hidden)
    try:
        if os.stat(hidden).st_mtime_ns != item.stamp:
            raise EntryInUse("used just now")
        return cache.move_aside(item.key)
    except BaseException:
        os.replace(hidden, manifest)
        raise


def _stored(cache: ArtifactCache) -> Iterator[EntryInfo]:
    """Yield what is in the place of entries, usable or not."""
    for path in cache.own("entries"):
        manifest = read_manifest(path)
        try:
            published = manifest["created"] if manifest else os.stat(path).st_mtime
            stamp = last_use(path)
        except OSError:  # removed just now
            continue
        used = max(published, stamp / 1e9)
        yield EntryInfo(path.name, manifest, disk_size(path), used, stamp)


def verify(cache: ArtifactCache) -> Iterator[tuple[EntryInfo, dict[str, str]]]:
    """Compare the files of each entry with their digests; yield it and what is wrong."""
    cache.check_trusted()
    for item in sorted(_stored(cache), key=lambda item: item.key):
        while (path := cache.root / "entries" / item.key).exists():
            manifest = read_manifest(path)
            if manifest is not None:
                damage = Entry(path, manifest).damage()
            else:
                time.sleep(_REMOVING_SECONDS)
                what = "cannot be used" if (path / MANIFEST).exists() else "missing"
                damage = {MANIFEST: what}
            # Removed, or built again, while it was read?
            if not damage or (path.exists() and read_manifest(path) == manifest):
                yield item._replace(manifest=manifest), damage
                break


def clean(cache: ArtifactCache) -> tuple[int, int]:
    """Remove all that the cache has put into its directory; return number and bytes.

    Entries leave by a rename, so no reader sees half of one; a process that has an entry open
    keeps it until it closes. Another process's build in progress is left alone.
    """
    cache.check_trusted()
    removed = list(_stored(cache))
    # By their names: the directory may be one that holds a user's files as well.
    for item in removed:
        with contextlib.suppress(FileNotFoundError):  # by another process, just now
            remove_tree(cache.move_aside(item.key))
    _remove_abandoned(cache)
    _prune_index(cache, whole=True)
    return len(removed), sum(item.size for item in removed)


def share(cache: ArtifactCache) -> None:
    """Let other users read the entries, and none but this one write."""
    names = ("entries", "sources", "known")
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
        key = dead.name.partition(".")[0]
        with contextlib.suppress(OSError), cache.lock(key, timeout=0) as is_alone:
            if is_alone or _is_old(dead):
                size += disk_size(dead)
                remove_tree(dead)
    return size
