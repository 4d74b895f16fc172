# SPDX-License-Identifier: MIT
"""What the cache knows of source models: digests of their files, where their data lies."""

from __future__ import annotations

__all__ = ["SourceIndex", "content_digest", "content_key"]

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ortplugins.artifacts.directory import CacheDirectory, read_json, write_json

# Layout of the cache; another number is another cache.
_FORMAT = 1
# From this size on, hashing takes a noticeable part of a start.
_MEMO_SIZE = 4 << 20
_SETTLED_SECONDS = 2.0
_SAMPLED_PAGES, _PAGE_BYTES = 64, 4096


def content_digest(content: bytes) -> str:
    """Return the digest of an .onnx file's bytes."""
    return hashlib.sha256(content).hexdigest()


def content_key(digest: str, data_files: Sequence[Path], parts: dict[str, Any]) -> str | None:
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


class SourceIndex:
    """The part of a cache that saves a start from reading the model."""

    def __init__(self, directory: CacheDirectory) -> None:
        """Name the cache."""
        self._directory = directory

    def file_digest(self, path: str | os.PathLike[str]) -> str:
        """Return the digest of a file; of a large one seen before, without reading it.

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
            name = hashlib.sha256(repr(identity).encode()).hexdigest()
            known = read_json(self._directory.root / "digests" / name)
            if isinstance(known, str) and self._directory.is_trusted():
                return known
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        # As in git's index: a file changed a moment ago may change again within the
        # resolution of its time stamps.
        age = time.time() - max(status.st_mtime, status.st_ctime)
        if age > _SETTLED_SECONDS:
            with contextlib.suppress(OSError):  # whoever builds warns
                write_json(self._directory.make("digests"), name, digest)
        return digest

    def data_locations(self, digest: str) -> list[str] | None:
        """Return the external data locations of a model seen before, None for a new one."""
        content = read_json(self._directory.root / "sources" / f"{digest}.json")
        if not isinstance(content, list) or not all(isinstance(x, str) for x in content):
            return None
        return content

    def remember_data_locations(self, digest: str, locations: Sequence[str]) -> None:
        """Keep the external data locations of a model.

        Raises:
            OSError: If the directory can't be written.
        """
        write_json(self._directory.make("sources"), f"{digest}.json", sorted(locations))


def _sample(path: Path, size: int) -> str:
    """Digest of pages spread over a file: weights exported anew under an old time stamp."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        for number in range(min(_SAMPLED_PAGES, -(-size // _PAGE_BYTES))):
            file.seek(number * max(_PAGE_BYTES, size // _SAMPLED_PAGES))
            digest.update(file.read(_PAGE_BYTES))
    return digest.hexdigest()
