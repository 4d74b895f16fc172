# SPDX-License-Identifier: MIT
"""Entries of a cache, by their age."""

import json
import os
import time
from pathlib import Path

from ortplugins.cache.store import ArtifactCache, Entry

DAY = 86400.0


def entries(cache_dir: Path) -> list[Entry]:
    """All of the cache, the one that was used longest ago first."""
    return sorted(ArtifactCache(cache_dir).entries(), key=lambda entry: entry.last_used)


def backdate(folder: Path, seconds: float) -> None:
    """Have an entry published, and used, that long ago."""
    manifest, moment = folder / "manifest.json", time.time() - seconds
    content = json.loads(manifest.read_text())
    new = manifest.with_suffix(".new")
    new.write_text(json.dumps({**content, "created": moment}))
    os.utime(new, (moment, moment))
    os.replace(new, manifest)
