# SPDX-License-Identifier: MIT
"""Optimised models on disk: found by what they were made from, built once, published whole.

    <root>/sources/<digest of .onnx>.json   locations of the model's external data
    <root>/digests/<path and status>        digest of a large .onnx file
    <root>/entries/<key>/model.onnx ...     a published entry, read-only from then on
    <root>/entries/<key>/manifest.json      its files' sizes and digests, how to open it, the
                                            report; its time of change is that of the last use
    <root>/building/<key>.<random>/         an entry in the making
    <root>/locks/<key>.lock                 held by the one that builds

An entry becomes visible by one rename and leaves by one, so a reader never sees half of one.
Nothing here imports onnx: a hit costs a digest, a few stat calls and one small JSON file.
"""

from __future__ import annotations

__all__ = ["ArtifactCache", "Checked", "Collected", "Entry", "Stored", "cache_root"]

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import stat
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
_SAMPLED_PAGES, _PAGE_BYTES = 64, 4096
# A use is written down if the last one is longer ago than this.
_USE_SECONDS = 60.0
# Whoever has found an entry opens it within this time. Twice _USE_SECONDS: a use may lie that
# much behind the one that was written down.
_OPENING_SECONDS = 2 * _USE_SECONDS
# An entry that is taken out is without its manifest for less than this.
_WITHDRAWING_SECONDS = 0.1
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

    @property
    def has_digests(self) -> bool:
        """Whether its builder wrote digests; older versions did not."""
        digests = self.manifest.get("digests")
        return isinstance(digests, dict) and digests.keys() >= self.manifest["files"].keys()

    def damage(self) -> dict[str, str]:
        """Return what is wrong, by file, with those that are not as published; reads them all.

        Of an entry without digests, only missing files and other sizes are seen.
        """
        digests = self.manifest["digests"] if self.has_digests else {}
        found = {
            name: self._difference(name, size, digests.get(name))
            for name, size in self.manifest["files"].items()
        }
        return {name: what for name, what in found.items() if what is not None}

    def damaged_files(self) -> list[str]:
        """Names of the files not known to be as they were published; reads them whole."""
        return list(self.damage() if self.has_digests else self.manifest["files"])

    def _difference(self, name: str, published: int, digest: str | None) -> str | None:
        try:
            size = os.stat(self.folder / name).st_size
            if size != published:
                return f"other size: {size} bytes, published with {published}"
            if digest is not None and _sha256(self.folder / name) != digest:
                return "other digest"
        except FileNotFoundError:
            return "missing"
        except OSError as error:
            return f"cannot be read: {error.strerror}"
        return None

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
            used = max(used, _stamp(self.folder) / 1e9)
        return min(used, time.time())


@dataclasses.dataclass(frozen=True)
class Stored:
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
class Collected:
    """What :meth:`ArtifactCache.collect` did.

    Attributes:
        removed: The least recently used first.
        left: What should have gone, and why it is still there.
        abandoned: Bytes that builders left which were killed.
        kept: How many are in the cache now.
        size: Bytes that they take.
    """

    removed: tuple[Stored, ...]
    left: tuple[tuple[Stored, str], ...]
    abandoned: int
    kept: int
    size: int


@dataclasses.dataclass(frozen=True)
class Checked:
    """What :meth:`ArtifactCache.verify` found out about one entry.

    Attributes:
        key: Its key.
        model: The model that it was made from; empty where the manifest does not tell.
        damage: What is wrong, by file.
        has_digests: As :attr:`Entry.has_digests`.
    """

    key: str
    model: str
    damage: dict[str, str]
    has_digests: bool


class _InUse(Exception):
    """An entry stays; the text is the reason a user reads."""


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
            data_files: External data files; path, size, time of change and a sample of the
                content count.
            parts: Everything else that the result depends on, as JSON.
        """
        files = []
        for path in data_files:
            try:
                status = os.stat(path)
                sample = _sample(path, status.st_size)
            except OSError:
                return None
            files.append([str(path), status.st_size, status.st_mtime_ns, sample])
        content = {"format": _FORMAT, "digest": digest, "data": files, **parts}
        text = json.dumps(content, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:40]

    def find(self, key: str) -> Entry | None:
        """Return a published entry whose files are as its builder left them.

        Its last use is now.
        """
        entry = self._load(key)
        return entry if entry is not None and _note_use(entry.folder / MANIFEST) else None

    def _load(self, key: str) -> Entry | None:
        folder = self.root / "entries" / key
        manifest = _read_manifest(folder)
        if manifest is None or not self._trusted():
            return None
        try:
            for name, size in manifest["files"].items():
                if os.stat(folder / name).st_size != size:
                    return None
        except OSError:
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

        building = self._make("building")
        with filelock.FileLock(self._lock_path(key), mode=0o600):
            if (entry := self.find(key)) is not None:
                yield entry
                return
            # The lock is ours: whatever else builds this key was killed.
            for dead in building.glob(f"{key}.*"):
                _remove_tree(dead)
            folder = Path(_make_folder(prefix=f"{key}.", dir=building))
            try:
                yield folder
            finally:
                _remove_tree(folder)

    @contextlib.contextmanager
    def one_at_a_time(self, digest: str) -> Iterator[None]:
        """Let one process at a time have an entry of a model built.

        Raises:
            OSError: If the directory can't be written.
        """
        import filelock

        self._make("locks")
        with filelock.FileLock(self.root / "locks" / f"{digest[:40]}.model.lock", mode=0o600):
            yield

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
        with contextlib.suppress(FileNotFoundError):  # by another process, just now
            _remove_tree(self._bury(key))

    def _bury(self, key: str) -> Path:
        """Take an entry out of readers' sight by one rename.

        Raises:
            OSError: If that can't be done; FileNotFoundError if there is none.
        """
        grave = self._make("building") / f"{key}.old.{os.urandom(8).hex()}"
        os.replace(self.root / "entries" / key, grave)
        return grave

    def entries(self) -> list[Entry]:
        """Return all published entries, the newest first."""
        paths = self._ours("entries")
        found = [entry for path in paths if (entry := self._load(path.name)) is not None]
        return sorted(found, key=lambda entry: entry.created, reverse=True)

    def clear(self) -> tuple[int, int]:
        """Remove everything that this class has put into the directory.

        A process that has an entry open keeps it until it closes: the files are unlinked
        only. Another process's build in progress is left alone.

        Returns:
            Number of entries and bytes removed.
        """
        removed = self.entries()
        # By their names: the directory may be one that holds a user's files as well.
        for path in self._ours("entries"):
            _remove_tree(path)
        for path in (*self._ours("sources"), *self._ours("digests")):
            path.unlink(missing_ok=True)
        self._clear_abandoned()
        return len(removed), sum(entry.size for entry in removed)

    def collect(
        self,
        max_size: int | None = None,
        older_than: float | None = None,
        *,
        dry_run: bool = False,
    ) -> Collected:
        """Remove what was not used for long, and the least recently used above a size.

        Entries leave by a rename and are unlinked afterwards, so a process that has one open
        keeps it until it closes. Left alone are those used within the last two minutes, which
        someone may be about to open, and those whose key is being built. On Windows an entry
        that is open anywhere cannot be renamed, and is left.

        Args:
            max_size: Bytes that the entries may take together; any number by default.
            older_than: Seconds without a use after which an entry goes; never by default.
            dry_run: Tell what would go, and remove nothing.

        Returns:
            What went, and what should have gone and did not.

        Raises:
            PermissionError: If the directory is not to be trusted, or can't be written.
            OSError: If something else can't be renamed.
        """
        self._check_trusted()
        stored = sorted(self._stored(), key=lambda item: item.last_used)
        if stored and not dry_run and not os.access(self.root / "entries", os.W_OK):
            raise PermissionError(
                f"{self.root}: cannot be written, and nothing was removed; run this as the "
                "user that the directory belongs to, where it is mounted for writing"
            )
        abandoned = self._clear_abandoned(dry_run)
        size, kept = sum(item.size for item in stored), len(stored)
        removed: list[Stored] = []
        left: list[tuple[Stored, str]] = []
        for item in stored:
            # Where the clock was set back, uses lie ahead of it and nothing has expired.
            expired = older_than is not None and time.time() - item.last_used > older_than
            if not expired and (max_size is None or size <= max_size):
                break  # the others were used later
            try:
                self._take_out(item, dry_run)
                removed.append(item)
            except _InUse as reason:
                left.append((item, str(reason)))
                continue
            except FileNotFoundError:
                pass  # another process was quicker
            size, kept = size - item.size, kept - 1
        return Collected(tuple(removed), tuple(left), abandoned, kept, size)

    def _take_out(self, item: Stored, dry_run: bool) -> None:
        """Remove an entry that nobody is about to open.

        Raises:
            _InUse: If somebody is, and it stays.
            OSError: If it can't be renamed; FileNotFoundError if it is gone.
        """
        import filelock

        if abs(time.time() - item.stamp / 1e9) < _OPENING_SECONDS:
            raise _InUse("used a moment ago")
        if dry_run:
            return
        try:
            with filelock.FileLock(self._lock_path(item.key), mode=0o600, timeout=0):
                grave = self._withdraw(item)
        except filelock.Timeout:
            raise _InUse("being built, or removed, by another process") from None
        except PermissionError:
            if os.name != "nt":
                raise
            raise _InUse("open in a process, and Windows keeps files that are open") from None
        _remove_tree(grave)

    def _withdraw(self, item: Stored) -> Path:
        """Bury an entry that was not used since it was looked at; return where.

        Its manifest leaves first. A reader that found the entry before has put its mark
        there, and gets it back without having missed a file; later ones find nothing.

        Raises:
            _InUse: If it was used, and stays.
            OSError: If it can't be renamed, and stays; FileNotFoundError if it is gone.
        """
        entry = self.root / "entries" / item.key
        manifest, hidden = entry / MANIFEST, entry / f"{MANIFEST}.hidden"
        if not item.stamp:
            if manifest.exists():
                raise _InUse("built just now")
            return self._bury(item.key)
        os.replace(manifest, hidden)
        try:
            if os.stat(hidden).st_mtime_ns != item.stamp:
                raise _InUse("used just now")
            return self._bury(item.key)
        except BaseException:
            os.replace(hidden, manifest)
            raise

    def _stored(self) -> Iterator[Stored]:
        """Yield what is in the place of entries, usable or not."""
        for path in self._ours("entries"):
            manifest = _read_manifest(path)
            try:
                published = manifest["created"] if manifest else os.stat(path).st_mtime
                stamp = _stamp(path)
            except OSError:  # taken out just now
                continue
            model = str(manifest.get("model", "")) if manifest else ""
            used = max(published, stamp / 1e9)
            yield Stored(path.name, model, _disk_size(path), used, stamp)

    def verify(self) -> Iterator[Checked]:
        """Compare every file of every entry with its digest; yields entry by entry.

        Raises:
            PermissionError: If the directory is not to be trusted.
        """
        self._check_trusted()
        for path in sorted(self._ours("entries")):
            if (checked := self._check(path)) is not None:
                yield checked

    def _check(self, path: Path) -> Checked | None:
        """Check one entry; None when it was taken out meanwhile."""
        while path.exists():
            manifest = _read_manifest(path)
            if manifest is not None:
                entry = Entry(path, manifest)
                model, digests = str(manifest.get("model", "")), entry.has_digests
                checked = Checked(path.name, model, entry.damage(), digests)
            else:
                time.sleep(_WITHDRAWING_SECONDS)
                what = "cannot be used" if (path / MANIFEST).exists() else "missing"
                checked = Checked(path.name, "", {MANIFEST: what}, True)
            # Removed, or built anew, while it was read?
            if not checked.damage or (path.exists() and _read_manifest(path) == manifest):
                return checked
        return None

    def share(self) -> None:
        """Let other users read the entries, and none but this one write.

        Raises:
            OSError: If the modes can't be changed.
        """
        names = ("entries", "sources", "digests")
        paths = [self.root, *(self.root / name for name in names)]
        for name in names:
            for path in self._ours(name):
                paths.append(path)
                for parent, folders, files in os.walk(path):
                    paths += [Path(parent, inner) for inner in (*folders, *files)]
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                mode = stat.S_IMODE(os.stat(path).st_mode)
                readable = 0o555 if path.is_dir() else 0o444
                if (shared := (mode | readable) & ~0o022) != mode:
                    os.chmod(path, shared)

    def _clear_abandoned(self, dry_run: bool = False) -> int:
        """Remove what builders left that were killed; return its bytes."""
        import filelock

        size = 0
        for dead in self._ours("building"):
            # One that can't be locked is being built, or is not ours to remove.
            with contextlib.suppress(OSError):
                lock = self._lock_path(dead.name.partition(".")[0])
                with filelock.FileLock(lock, mode=0o600, timeout=0):
                    size += _disk_size(dead)
                    if not dry_run:
                        _remove_tree(dead)
        return size

    def _lock_path(self, key: str) -> Path:
        return self._make("locks") / f"{key}.lock"

    def _ours(self, name: str) -> list[Path]:
        """Return what this class has put into a subdirectory, and nothing else."""
        return [
            path for path in (self.root / name).glob("*") if _NAMES[name].fullmatch(path.name)
        ]

    def _make(self, name: str) -> Path:
        """Return a subdirectory, made with mode 0700."""
        folder = self.root / name
        if not folder.is_dir() and (self._trusted() or not self.root.exists()):
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
        self._check_trusted()
        return folder

    def _check_trusted(self) -> None:
        """Raise PermissionError if there is a directory and others can put models there."""
        if self.root.exists() and not self._trusted():
            raise PermissionError(
                f"{self.root}: belongs to another user or others may write to it; "
                "choose another directory, or chmod 700 it"
            )

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


def _note_use(manifest: Path) -> bool:
    """Write down that an entry is used now; return False if it was taken out meanwhile.

    Its manifest's time of change does for that: it is the smallest file, which matters where
    an overlay copies a whole file first. Nothing is written twice in a minute, nor while the
    clock is behind an earlier use.
    """
    try:
        if time.time() - os.stat(manifest).st_mtime >= _USE_SECONDS:
            os.utime(manifest)
    except FileNotFoundError:
        return False
    except OSError:
        pass  # a read-only cache
    return True


def _stamp(folder: Path) -> int:
    """Return what a use changes; 0 for a folder without a manifest."""
    try:
        return os.stat(folder / MANIFEST).st_mtime_ns
    except FileNotFoundError:
        return 0


def _disk_size(folder: Path) -> int:
    """Return the bytes of all files below a folder, which may vanish meanwhile."""
    size = 0
    for parent, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):
                size += os.lstat(os.path.join(parent, name)).st_size
    return size


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return a manifest that names files of its folder only, None where there is no such."""
    content = _read_json(folder / MANIFEST)
    if not isinstance(content, dict) or not isinstance(files := content.get("files"), dict):
        return None
    if not isinstance(content.get("created"), int | float):
        return None
    if any(os.path.basename(name) != name or type(files[name]) is not int for name in files):
        return None
    return content


# A start that finds its entry needs neither of these modules, and each worker would hold them.
def _remove_tree(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


def _make_folder(*, prefix: str, dir: Path) -> str:
    import tempfile

    return tempfile.mkdtemp(prefix=prefix, dir=dir)


def _sample(path: Path, size: int) -> str:
    """Digest of pages spread over a file: weights exported anew under an old time stamp."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        for number in range(min(_SAMPLED_PAGES, -(-size // _PAGE_BYTES))):
            file.seek(number * max(_PAGE_BYTES, size // _SAMPLED_PAGES))
            digest.update(file.read(_PAGE_BYTES))
    return digest.hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_json(folder: Path, name: str, content: Any) -> None:
    import tempfile

    with tempfile.NamedTemporaryFile("w", dir=folder, delete=False, encoding="utf-8") as file:
        json.dump(content, file)
    os.replace(file.name, folder / name)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
