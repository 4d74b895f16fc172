# SPDX-License-Identifier: MIT
"""Entries of a cache, by their age."""

import os
import time
from pathlib import Path

from ortplugins.cache.store import ArtifactCache, Entry, read_manifest, write_manifest

DAY = 86400.0


def entries(cache_dir: Path) -> list[Entry]:
    """All of the cache, the one that was used longest ago first."""
    return sorted(ArtifactCache(cache_dir).entries(), key=lambda entry: entry.last_used)


def backdate(folder: Path, seconds: float) -> None:
    """Have an entry published, and used, that long ago."""
    moment, manifest = time.time() - seconds, read_manifest(folder)
    if manifest is None:
        raise FileNotFoundError(folder)
    write_manifest(folder, {**manifest, "created": moment})
    os.utime(folder / "manifest.json", (moment, moment))
