# SPDX-License-Identifier: MIT
"""The session entries that a start depends on, read as they were given.

``SessionOptions`` cannot list its entries, and to ask for one that was never set takes an
exception of onnxruntime's, 50 microseconds of a start. So only the options of passes that are
switched on are asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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
    STRICT_KEY,
    Lookup,
    are_passes_installed,
    enable_key,
    option_key,
)


def given_entries(ask: Lookup, switched: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return ours of the entries that a session was given; none where no pass is on.

    Args:
        ask: Returns an entry of the session's options.
        switched: Entries that count for options which name no pass themselves.
    """
    enabling = {enable_key(name): name for name in _pass_names()}
    own = _found(ask, (HINT_KEY, *enabling))
    entries = own
    if switched is not None and not (own.get(HINT_KEY) or own.keys() & enabling.keys()):
        entries = {**switched}
    on = [name for key, name in enabling.items() if entries.get(key, "0") != "0"]
    if hint := entries.get(HINT_KEY):
        from session_options.presets import PRESETS

        on += PRESETS[hint].passes if hint in PRESETS else ()
    elif not on:
        return {}
    general = (CACHE_DIR_KEY, CACHE_LIMIT_KEY, STRICT_KEY, BAKE_KEY, IN_MEMORY_KEY)
    keys = [key for name in on for key in _option_keys(name)]
    return {**entries, **_found(ask, (*general, *keys))}


def entries_of_onnxruntime(ask: Lookup) -> dict[str, str]:
    """Return those of onnxruntime's entries that an optimised model depends on."""
    return _found(ask, (DATA_FOLDER_KEY, *OF_ONNXRUNTIME))


def _pass_names() -> Iterable[str]:
    if not are_passes_installed():
        return BUILTIN_PASSES
    from session_options.registry import pass_names

    return pass_names()


def _option_keys(name: str) -> Iterable[str]:
    if name in OPTIONS:
        return [option_key(name, option) for option in OPTIONS[name]]
    from session_options.keys import options_of
    from session_options.registry import find

    if (cls := find(name)) is None:
        return ()
    specs = options_of(cls)
    own = [option_key(name, spec.name) for spec in specs]
    return [*own, *(spec.onnxruntime_key for spec in specs if spec.onnxruntime_key)]


def _found(ask: Lookup, keys: Iterable[str]) -> dict[str, str]:
    pairs = ((key, ask(key)) for key in keys)
    return {key: text for key, text in pairs if text is not None}
