# SPDX-License-Identifier: MIT
"""Optimised models on disk: found by what they were made from, built once, published whole.

An entry becomes visible by one rename and leaves by one, so a reader never sees half of one.
The layout of the directory is described in ``directory.py``.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ortplugins.artifacts.directory import (
    CacheDirectory,
    read_json,
    remove_tree,
    write_json,
)
from ortplugins.artifacts.known_starts import SETTLED_SECONDS, recall, remember
from ortplugins.artifacts.manifest import (
    Entry,
    is_as_published,
    note_use,
    read_manifest,
    write_manifest,
)

# From this size on, hashing takes a noticeable part of a start.
_MEMO_SIZE = 1 << 20


class ArtifactCache(CacheDirectory):
    """The entries of one cache directory."""

    def __init__(self, root: Path, limit: int | None = None) -> None:
        """Name a directory; nothing is created before something is stored."""
        super().__init__(root)
        self.limit = limit
        # A cache that cannot be written keeps none on disk.
        self._digests: dict[tuple[int, ...], str] = {}

    def find(self, key: str, *, used: bool = True) -> Entry | None:
        """Return a published entry whose files are as its builder left them.

        Its last use is now, unless ``used`` is false.
        """
        folder = self.root / "entries" / key
        manifest = read_manifest(folder)
        if manifest is None or not self.is_trusted():
            return None
        try:
            if is_as_published(folder, manifest) and (not used or note_use(folder)):
                return Entry(folder, manifest)
        except OSError:
            pass
        return None

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

    def one_at_a_time(self, digest: str) -> contextlib.AbstractContextManager[bool]:
        """Let one process at a time have an entry of a model built."""
        return self.lock(f"{digest[:40]}.model")

    def publish(self, key: str, folder: Path, manifest: dict[str, Any]) -> Entry:
        """Make a built folder the entry of its key, and keep the cache below its limit."""
        complete = write_manifest(folder, manifest)
        final = self.make("entries") / key
        if final.exists():  # damaged
            remove_tree(self.move_aside(key))
        os.replace(folder, final)
        if self.limit is not None:
            from ortplugins.artifacts.maintenance import prune

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
