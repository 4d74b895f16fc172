# SPDX-License-Identifier: MIT
"""Optimised models on disk: found by what they were made from, built once, published whole.

An entry becomes visible by one rename and leaves by one, so a reader never sees half of one.
The layout of the directory is described in ``directory.py``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ortplugins.artifacts.directory import CacheDirectory, remove_tree
from ortplugins.artifacts.manifest import (
    Entry,
    is_as_published,
    read_manifest,
    write_manifest,
)
from ortplugins.artifacts.source_index import SourceIndex


class ArtifactCache(CacheDirectory):
    """The entries of one cache directory."""

    def __init__(self, root: Path, limit: int | None = None) -> None:
        """Name a directory; nothing is created before something is stored.

        Args:
            root: The directory.
            limit: Bytes that the entries may take after one is published; None for any.
        """
        super().__init__(root)
        self.limit = limit
        self.sources = SourceIndex(self)

    def find(self, key: str) -> Entry | None:
        """Return a published entry whose files are as its builder left them.

        Its last use is now.
        """
        entry = self._load(key)
        return entry if entry is not None and entry.note_use() else None

    def _load(self, key: str) -> Entry | None:
        folder = self.root / "entries" / key
        manifest = read_manifest(folder)
        if manifest is None or not self.is_trusted():
            return None
        entry = Entry(folder, manifest)
        try:
            return entry if is_as_published(folder, manifest) else None
        except OSError:
            return None

    def is_published(self, key: str) -> bool:
        """Whether :meth:`find` finds an entry; the entry is not used."""
        return self._load(key) is not None

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

        Yields:
            An entry, or an empty folder that :meth:`publish` turns into one. What is left of
            the folder is removed at the end.

        Raises:
            OSError: If the directory can't be written.
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
        """Let one process at a time have an entry of a model built.

        Raises:
            OSError: If the directory can't be written.
        """
        return self.lock(f"{digest[:40]}.model")

    def publish(self, key: str, folder: Path, manifest: dict[str, Any]) -> Entry:
        """Make a built folder the entry of its key, and keep the cache below its limit.

        Raises:
            OSError: If it can't be renamed.
        """
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
        """Take an entry out; whoever has it open keeps it until they close it.

        Args:
            key: Its key.
            seen: Its manifest, as it was when it was found wanting. An entry that has another
                one now was built again meanwhile, and stays.

        Raises:
            OSError: If the directory can't be written.
        """
        with self.lock(key), contextlib.suppress(FileNotFoundError):
            if read_manifest(self.root / "entries" / key) == seen:
                remove_tree(self.move_aside(key))

    def move_aside(self, key: str) -> Path:
        """Take an entry out of readers' sight by one rename; return where it is now.

        Raises:
            OSError: If that can't be done; FileNotFoundError if there is none.
        """
        aside = self.make("building") / f"{key}.old.{os.urandom(8).hex()}"
        os.replace(self.root / "entries" / key, aside)
        return aside
