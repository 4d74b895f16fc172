# SPDX-License-Identifier: MIT
"""The session entries that a start depends on, read as they were given.

``SessionOptions`` cannot list its entries, and to ask for one that was never set takes an
exception of onnxruntime's, 50 microseconds of a start. So only the options of passes that are
switched on are asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from session_options.entries import (
    BAKE_KEY,
    BUILTIN_PASSES,
    CACHE_DIR_KEY,
    CACHE_LIMIT_KEY,
    DATA_FOLDER_KEY,
    HINT_KEY,
    IN_MEMORY_KEY,
    OF_ONNXRUNTIME,
    OPTIONS,
    PASSES_KEY,
    STRICT_KEY,
    Lookup,
    enable_key,
    option_key,
)

if TYPE_CHECKING:
    from session_options.keys import SessionConfig

_ENABLING = {enable_key(name): name for name in BUILTIN_PASSES}


def stored(options: SessionConfig, key: str) -> str | None:
    """Return a session entry, or None if it was never set."""
    try:
        return str(options.get_session_config_entry(key))
    except RuntimeError:  # there is none
        return None


def given_entries(ask: Lookup, switched: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return ours of the entries that a session was given; none where no pass is on.

    Args:
        ask: Returns an entry of the session's options.
        switched: Entries that count for options which name no pass themselves.
    """
    own = _found(ask, (HINT_KEY, PASSES_KEY, *_ENABLING))
    names_passes = own.get(HINT_KEY) or own.get(PASSES_KEY) or own.keys() & _ENABLING.keys()
    entries = own if switched is None or names_passes else {**switched}
    on = [name for key, name in _ENABLING.items() if entries.get(key, "0") != "0"]
    places = entries.get(PASSES_KEY)
    if hint := entries.get(HINT_KEY):
        from session_options.presets import PRESETS

        on += PRESETS[hint].passes if hint in PRESETS else ()
    elif not (on or places):
        return {}
    general = (CACHE_DIR_KEY, CACHE_LIMIT_KEY, STRICT_KEY, BAKE_KEY, IN_MEMORY_KEY)
    keys = [option_key(name, option) for name in on for option in OPTIONS[name]]
    keys += _option_keys(places) if places else ()
    return {**entries, **_found(ask, (*general, *keys))}


def entries_of_onnxruntime(ask: Lookup) -> dict[str, str]:
    """Return those of onnxruntime's entries that an optimised model depends on."""
    return _found(ask, (DATA_FOLDER_KEY, *OF_ONNXRUNTIME))


def _option_keys(places: str) -> Iterator[str]:
    """Yield the entries that passes of other packages read."""
    from session_options.keys import options_of
    from session_options.registry import loaded

    for cls in loaded(places):
        for spec in options_of(cls):
            yield option_key(cls.name, spec.name)


def _found(ask: Lookup, keys: Iterable[str]) -> dict[str, str]:
    pairs = ((key, ask(key)) for key in keys)
    return {key: text for key, text in pairs if text is not None}
