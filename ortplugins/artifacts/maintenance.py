# SPDX-License-Identifier: MIT
"""Keeps a cache small and whole while sessions use it: prune, verify, clean, share."""

from __future__ import annotations

__all__ = ["CollectResult", "EntryInfo", "VerifyResult", "clear", "collect", "share", "verify"]

import contextlib
import dataclasses
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from ortplugins.artifacts.directory import disk_size, remove_tree
from ortplugins.artifacts.manifest import MANIFEST, USE_SECONDS, Entry, last_use, read_manifest
from ortplugins.artifacts.store import ArtifactCache

# Whoever has found an entry opens it within this time. Twice USE_SECONDS: a use may lie that
# much behind the one that was written down.
_OPENING_SECONDS = 2 * USE_SECONDS
# An entry that is being removed is without its manifest for less than this.
_REMOVING_SECONDS = 0.1


@dataclasses.dataclass(frozen=True)
class EntryInfo:
    """What lies in the place of an entry, whether or not a session would take it.

    Attributes:
        key: Its key.
        model: The model that it was made from; empty where the manifest does not tell.
        size: Bytes that it takes.
        last_used: As :attr:`Entry.last_used`, but ahead of a clock that was set back.
        stamp: Changes with every use that is written down.
    """

    key: str
    model: str
    size: int
    last_used: float
    stamp: int


@dataclasses.dataclass(frozen=True)
class CollectResult:
    """What :func:`collect` did.

    Attributes:
        removed: The least recently used first.
        left: What should have gone, and why it is still there.
        abandoned: Bytes that builders left which were killed.
        kept: How many are in the cache now.
        size: Bytes that they take.
    """

    removed: tuple[EntryInfo, ...]
    left: tuple[tuple[EntryInfo, str], ...]
    abandoned: int
    kept: int
    size: int


@dataclasses.dataclass(frozen=True)
class VerifyResult:
    """What :func:`verify` found out about one entry.

    Attributes:
        key: Its key.
        manifest: Its manifest; None where it has none that can be used.
        damage: What is wrong, by file.
    """

    key: str
    manifest: dict[str, object] | None
    damage: dict[str, str]

    @property
    def model(self) -> str:
        """The model that it was made from; empty where the manifest does not tell."""
        return str(self.manifest.get("model", "")) if self.manifest else ""


class EntryInUse(Exception):
    """An entry stays; the text is the reason a user reads."""


def collect(
    cache: ArtifactCache,
    max_size: int | None = None,
    older_than: float | None = None,
    *,
    dry_run: bool = False,
) -> CollectResult:
    """Remove what was not used for long, and the least recently used above a size.

    Entries leave by a rename and are unlinked afterwards, so a process that has one open
    keeps it until it closes. Left alone are those used within the last two minutes, which
    someone may be about to open, and those whose key is being built. On Windows an entry
    that is open anywhere cannot be renamed, and is left.

    Args:
        cache: The cache.
        max_size: Bytes that the entries may take together; any number by default.
        older_than: Seconds without a use after which an entry goes; never by default.
        dry_run: Tell what would go, and remove nothing.

    Returns:
        What went, and what should have gone and did not.

    Raises:
        PermissionError: If the directory is not to be trusted, or can't be written.
        OSError: If something else can't be renamed.
    """
    cache.check_trusted()
    stored = sorted(_stored(cache), key=lambda item: item.last_used)
    if stored and not dry_run and not os.access(cache.root / "entries", os.W_OK):
        raise PermissionError(
            f"{cache.root}: cannot be written, and nothing was removed; run this as the "
            "user that the directory belongs to, where it is mounted for writing"
        )
    abandoned = _clear_abandoned(cache, dry_run)
    size, kept = sum(item.size for item in stored), len(stored)
    removed: list[EntryInfo] = []
    left: list[tuple[EntryInfo, str]] = []
    for item in stored:
        # Where the clock was set back, uses lie ahead of it and nothing has expired.
        expired = older_than is not None and time.time() - item.last_used > older_than
        if not expired and (max_size is None or size <= max_size):
            break  # the others were used later
        try:
            _remove(cache, item, dry_run)
            removed.append(item)
        except EntryInUse as reason:
            left.append((item, str(reason)))
            continue
        except FileNotFoundError:
            pass  # another process was quicker
        size, kept = size - item.size, kept - 1
    return CollectResult(tuple(removed), tuple(left), abandoned, kept, size)


def _remove(cache: ArtifactCache, item: EntryInfo, dry_run: bool) -> None:
    """Remove an entry that nobody is about to open.

    Raises:
        EntryInUse: If somebody is, and it stays.
        OSError: If it can't be renamed; FileNotFoundError if it is gone.
    """
    if abs(time.time() - item.stamp / 1e9) < _OPENING_SECONDS:
        raise EntryInUse("used a moment ago")
    if dry_run:
        return
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


def _remove_unless_used(cache: ArtifactCache, item: EntryInfo) -> Path:
    """Move an entry aside that was not used since it was looked at; return where it is.

    Its manifest leaves first. A reader that found the entry before has put its mark
    there, and gets it back without having missed a file; later ones find nothing.

    Raises:
        EntryInUse: If it was used, and stays.
        OSError: If it can't be renamed, and stays; FileNotFoundError if it is gone.
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
        model = str(manifest.get("model", "")) if manifest else ""
        used = max(published, stamp / 1e9)
        yield EntryInfo(path.name, model, disk_size(path), used, stamp)


def verify(cache: ArtifactCache) -> Iterator[VerifyResult]:
    """Compare every file of every entry with its digest; yields entry by entry.

    Raises:
        PermissionError: If the directory is not to be trusted.
    """
    cache.check_trusted()
    for path in sorted(cache.own("entries")):
        if (result := _verify_entry(path)) is not None:
            yield result


def _verify_entry(path: Path) -> VerifyResult | None:
    """Check one entry; None when it was removed meanwhile."""
    while path.exists():
        manifest = read_manifest(path)
        if manifest is not None:
            result = VerifyResult(path.name, manifest, Entry(path, manifest).damage())
        else:
            time.sleep(_REMOVING_SECONDS)
            what = "cannot be used" if (path / MANIFEST).exists() else "missing"
            result = VerifyResult(path.name, None, {MANIFEST: what})
        # Removed, or built again, while it was read?
        if not result.damage or (path.exists() and read_manifest(path) == manifest):
            return result
    return None


def clear(cache: ArtifactCache) -> tuple[int, int]:
    """Remove everything that the cache has put into its directory.

    A process that has an entry open keeps it until it closes: the files are unlinked
    only. Another process's build in progress is left alone.

    Returns:
        Number of entries and bytes removed.
    """
    removed = cache.entries()
    # By their names: the directory may be one that holds a user's files as well.
    for path in cache.own("entries"):
        remove_tree(path)
    for path in (*cache.own("sources"), *cache.own("digests")):
        path.unlink(missing_ok=True)
    _clear_abandoned(cache)
    return len(removed), sum(entry.size for entry in removed)


def share(cache: ArtifactCache) -> None:
    """Let other users read the entries, and none but this one write.

    Raises:
        OSError: If the modes can't be changed.
    """
    names = ("entries", "sources", "digests")
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


def _clear_abandoned(cache: ArtifactCache, dry_run: bool = False) -> int:
    """Remove what builders left that were killed; return its bytes."""
    size = 0
    for dead in cache.own("building"):
        # One that can't be locked is being built, or is not ours to remove.
        key = dead.name.partition(".")[0]
        with contextlib.suppress(OSError), cache.lock(key, timeout=0):
            size += disk_size(dead)
            if not dry_run:
                remove_tree(dead)
    return size
