# SPDX-License-Identifier: MIT
"""Why a session finds no entry: what of its key differs from the nearest one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from ortplugins.artifacts.manifest import Entry
from ortplugins.artifacts.source_index import content_key
from ortplugins.artifacts.store import ArtifactCache


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What the cache has for a session.

    Attributes:
        key: Of the entry that the session looks for.
        is_present: Whether it is there.
        nearest: The entry that differs least; None in an empty cache.
        differences: What differs: part of the key, its value here, its value in the entry;
            None where one of them has no such part.
    """

    key: str
    is_present: bool
    nearest: Entry | None
    differences: tuple[tuple[str, Any, Any], ...]


def explain(cache: ArtifactCache, content: Mapping[str, Any]) -> Explanation:
    """Compare a key with those of the entries in a cache."""
    key = content_key(content)
    here = dict(_flatten(json.loads(json.dumps(content))))
    compared = [
        (entry, _differences(here, dict(_flatten(entry.manifest["made_from"]))))
        for entry in cache.entries()
    ]
    # Of those of the same model, if there are any.
    same_model = [
        (entry, found)
        for entry, found in compared
        if entry.manifest["made_from"].get("digest") == content["digest"]
    ]
    nearest, differences = min(
        same_model or compared, key=lambda pair: len(pair[1]), default=(None, ())
    )
    # An entry with the key may be damaged.
    return Explanation(key, cache.is_published(key), nearest, tuple(differences))


def _differences(
    here: Mapping[str, Any], there: Mapping[str, Any]
) -> list[tuple[str, Any, Any]]:
    return [
        (name, here.get(name), there.get(name))
        for name in sorted(here.keys() | there.keys())
        if here.get(name) != there.get(name)
    ]


def _flatten(content: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested JSON; passes go by their names, not by their places."""
    if isinstance(content, Mapping):
        for key, value in content.items():
            yield from _flatten(value, f"{name}.{key}" if name else key)
    elif isinstance(content, list) and content and isinstance(content[0], Mapping):
        for item in content:
            yield from _flatten(item, f"{name}.{item['pass']}")
    else:
        yield name, content
