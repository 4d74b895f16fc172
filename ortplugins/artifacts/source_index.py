# SPDX-License-Identifier: MIT
"""What the cache knows of source models: digests of their files, where their data lies."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from ortplugins.artifacts.directory import (
    SETTLED_SECONDS,
    CacheDirectory,
    file_identity,
    page_checksum,
    read_json,
    write_json,
)

# Layout of the cache; another number is another cache.
_FORMAT = 2
# From this size on, hashing takes a noticeable part of a start.
_MEMO_SIZE = 1 << 20


def content_digest(content: bytes) -> str:
    """Return the digest of an .onnx file's bytes."""
    return hashlib.sha256(content).hexdigest()


def key_content(
    digest: str, data: Mapping[str, str], parts: Mapping[str, Any]
) -> dict[str, Any]:
    """Return everything that an artifact depends on.

    Args:
        digest: Digest of the .onnx file.
        data: Digests of the external data files, by the location that the model has for them.
        parts: Everything else that the result depends on, as JSON.
    """
    return {"format": _FORMAT, "digest": digest, "data": dict(data), **parts}


def content_key(content: Mapping[str, Any]) -> str:
    """Return the key of an artifact, given what :func:`key_content` returned."""
    text = json.dumps(content, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:40]


class SourceIndex:
    """The part of a cache that saves a start from reading the model.

    A file's digest is kept under its path, device, inode, size and times, with a checksum of
    pages spread over it.
    """

    def __init__(self, directory: CacheDirectory) -> None:
        """Name the cache."""
        self._directory = directory
        # Of this object's lifetime, without the path: another name needs no second reading.
        self._digests: dict[tuple[int, ...], str] = {}

    def file_digest(self, path: str | os.PathLike[str]) -> str:
        """Return the SHA-256 of a file; of a large one seen before, without reading it.

        Raises:
            OSError: If the file can't be read.
        """
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_size < _MEMO_SIZE:
                return hashlib.file_digest(file, "sha256").hexdigest()
            if (known := self._known(path, status, file)) is not None:
                return known
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            # As in git's index: a file changed a moment ago may change again within the
            # resolution of its time stamps.
            age = time.time() - max(status.st_mtime, status.st_ctime)
            if age > SETTLED_SECONDS:
                self._remember(path, status, file, digest)
        return digest

    def is_current(self, memo: Path) -> bool:
        """Whether a kept digest is that of a file as it is now."""
        content = read_json(memo)
        if not isinstance(content, dict) or not isinstance(content.get("path"), str):
            return False
        try:
            return _memo_name(content["path"], os.stat(content["path"])) == memo.name
        except (OSError, ValueError):
            return False

    def _known(
        self, path: str | os.PathLike[str], status: os.stat_result, file: BinaryIO
    ) -> str | None:
        if (digest := self._digests.get(file_identity(status))) is not None:
            return digest
        memo = read_json(self._directory.root / "digests" / _memo_name(path, status))
        if not isinstance(memo, dict) or not self._directory.is_trusted():
            return None
        digest = memo.get("digest")
        if not isinstance(digest, str) or memo.get("sample") != page_checksum(
            file.fileno(), status.st_size
        ):
            return None
        self._digests[file_identity(status)] = digest
        return digest

    def _remember(
        self,
        path: str | os.PathLike[str],
        status: os.stat_result,
        file: BinaryIO,
        digest: str,
    ) -> None:
        self._digests[file_identity(status)] = digest
        memo = {
            "path": os.path.realpath(path),
            "digest": digest,
            "sample": page_checksum(file.fileno(), status.st_size),
        }
        with contextlib.suppress(OSError):  # whoever builds warns
            write_json(self._directory.make("digests"), _memo_name(path, status), memo)

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


def _memo_name(path: str | os.PathLike[str], status: os.stat_result) -> str:
    text = repr((os.path.realpath(path), file_identity(status)))
    return hashlib.sha256(text.encode()).hexdigest()
