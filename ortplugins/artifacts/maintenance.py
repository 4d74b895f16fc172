# SPDX-License-Identifier: MIT
"""Keeps a cache small and whole while sessions use it: prune, verify, clean, share."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ortplugins.artifacts.directory import disk_size, remove_tree
from ortplugins.artifacts.known_starts import is_current
from ortplugins.artifacts.manifest import (
    KEY_CHARACTERS,
    MANIFEST,
    USE_SECONDS,
    Entry,
    last_use,
    read_manifest,
)
from ortplugins.artifacts.store import ArtifactCache

# Whoever has found an entry opens it within this time. Twice USE_SECONDS: a use may lie that
# much behind the one that was written down.
_OPENING_SECONDS = 2 * USE_SECONDS
# An entry that is being removed is without its manifest for less than this.
_REMOVING_SECONDS = 0.1
# What belongs to no entry after this time will not get one.
_INDEX_SECONDS = 86400.0
# Subdirectories beside those of the entries.
_INDEX = ("sources", "known", "locks")


@dataclasses.dataclass(frozen=True)
class EntryInfo:
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


@dataclasses.dataclass(frozen=True)
class PruneResult:
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


def _prune_index(cache: ArtifactCache) -> None:
    """Remove what is known of models that no entry is made from, and unused locks."""
    manifests = [entry.manifest for entry in cache.entries()]
    sources = {f"{manifest['made_from']['digest']}.json" for manifest in manifests}
    keys = {path.name for path in cache.own("entries")}
    for path in cache.own("sources"):
        if path.name not in sources and _is_old(path):
            path.unlink(missing_ok=True)
    for path in cache.own("known"):
        if not is_current(cache.root, path.name):
            path.unlink(missing_ok=True)
    for path in cache.own("locks"):
        name = path.name.removesuffix(".lock")
        if name not in keys and _is_old(path):
            with contextlib.suppress(OSError), cache.lock(name, timeout=0):
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
                yield dataclasses.replace(item, manifest=manifest), damage
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
    for path in (path for name in _INDEX for path in cache.own(name)):
        with contextlib.suppress(OSError):
            if path.parent.name != "locks":
                path.unlink()
                continue
            with cache.lock(path.name.removesuffix(".lock"), timeout=0):
                path.unlink()
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
