# SPDX-License-Identifier: MIT
"""Installed distributions, by the names of their metadata folders.

``importlib.metadata`` says the same, and takes tens of milliseconds of a start to import.
"""

from __future__ import annotations

__all__ = ["Distribution", "installed_distributions"]

import functools
import os
import re
import sys
from typing import NamedTuple

_FOLDER = re.compile(r"(?P<name>[^-]+)-(?P<version>[^-]+)(-py.*)?\.(dist|egg)-info")


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
            names = sorted(os.listdir(entry or "."))
        except FileNotFoundError:
            continue
        except OSError:
            return None
        for match in filter(None, map(_FOLDER.fullmatch, names)):
            name = match["name"].lower().replace(".", "_")
            found.append(Distribution(name, match["version"], os.path.join(entry, match[0])))
    return tuple(found)
