# SPDX-License-Identifier: MIT
"""Installed distributions, by the names of their metadata folders.

``importlib.metadata`` says the same, and takes tens of milliseconds of a start to import.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import NamedTuple


class Distribution(NamedTuple):
    """One installed distribution: its name in lower case with underscores, version, folder."""

    name: str
    version: str
    folder: str


def installed_distributions() -> tuple[Distribution, ...] | None:
    """Return the distributions in the order of ``sys.path``.

    None where folder names do not tell all: an archive, or a folder that cannot be read.
    """
    return _scan(tuple(sys.path))


@functools.cache
def _scan(path: tuple[str, ...]) -> tuple[Distribution, ...] | None:
    found = []
    for entry in path:
        try:
            names = os.listdir(entry or ".")
        except FileNotFoundError:
            continue
        except OSError:
            return None
        for folder in names:
            stem, dot, _ = folder.rpartition(".")
            if not dot or not folder.endswith((".dist-info", ".egg-info")):
                continue
            name, dash, version = stem.partition("-")
            if dash:
                name = name.lower().replace(".", "_")
                version = version.partition("-")[0]  # an egg's Python comes behind it
                found.append(Distribution(name, version, os.path.join(entry, folder)))
    return tuple(found)
