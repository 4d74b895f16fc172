# SPDX-License-Identifier: MIT
"""Lends a user's ``SessionOptions`` to one session with a few of them changed.

onnxruntime copies the options when a session is created. They cannot be copied whole from
Python (custom-op libraries stay behind), so they are changed and put back, by one thread at a
time.
"""

from __future__ import annotations

__all__ = ["lent"]

import contextlib
import threading
from collections.abc import Iterator, Mapping

import onnxruntime

from session_options.keys import parse_bool, stored

_lock = threading.Lock()


@contextlib.contextmanager
def lent(
    options: onnxruntime.SessionOptions, settings: Mapping[str, str | int | bool]
) -> Iterator[onnxruntime.SessionOptions]:
    """Yield the options with settings changed; they come back as they were.

    Args:
        options: The user's.
        settings: As ``Pass.session_settings`` returns them: a key with a dot is an entry, one
            without an attribute, whose value may be the name of an enumeration's member, or
            "0" or "1" for a bool.
    """
    if not settings:
        yield options
        return
    with _lock:
        before = {name: _get(options, name) for name in settings}
        try:
            for name, value in settings.items():
                _set(options, name, value)
            yield options
        finally:
            for name, value in before.items():
                _set(options, name, value)


def _get(options: onnxruntime.SessionOptions, name: str) -> str | int | bool:
    if "." in name:
        # Entries cannot be removed again: one that was not set comes back as the default.
        return stored(options, name) or "0"
    value = getattr(options, name)
    return str(value.name) if hasattr(value, "name") else value


def _set(options: onnxruntime.SessionOptions, name: str, value: str | int | bool) -> None:
    if "." in name:
        options.add_session_config_entry(name, str(value))
        return
    kind = type(getattr(options, name))
    if isinstance(value, str):
        value = parse_bool(name, value) if kind is bool else getattr(kind, value)
    setattr(options, name, value)
