# SPDX-License-Identifier: MIT
"""What was set on ``SessionOptions``, by the methods that set it.

They have no getter that lists their entries, and to ask for one that is not there takes an
exception of onnxruntime's, 50 microseconds of a start for each of some 40. Nor do they say
which initializers, dimensions or providers were added. So the methods note what they are
called with, for objects that are made after this module is imported: what they do stays the
same. Other objects are asked; so are all where somebody holds a method of onnxruntime's
already, who could call it past the one that notes.
"""

from __future__ import annotations

import functools
import sys
import weakref
from typing import Any

import onnxruntime


class Record:
    """What was set on one object."""

    __slots__ = ("entries", "others")

    def __init__(self) -> None:
        """Nothing was set yet."""
        self.entries: dict[str, str] = {}
        self.others: list[str] = []  # methods that were called, other than for an entry


_records: weakref.WeakKeyDictionary[Any, Record] = weakref.WeakKeyDictionary()


def record_of(options: Any) -> Record | None:
    """Return what was set on an object; None for one that was made before."""
    return _records.get(options)


def _note(cls: type[Any], name: str, note: Any) -> None:
    method = getattr(cls, name)

    @functools.wraps(method)
    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        note(self, *args, **kwargs)
        return result

    setattr(cls, name, noting)


def _note_new(options: Any, *_: Any, **__: Any) -> None:
    _records[options] = Record()


def _note_entry(options: Any, key: Any, value: Any) -> None:
    if (record := _records.get(options)) is not None:
        record.entries[_as_kept(key)] = _as_kept(value)


def _as_kept(text: Any) -> str:
    """Return a text as onnxruntime keeps it: it takes bytes, too, and cuts at a NUL."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "surrogateescape")
    return str(text).partition("\0")[0]


def _install(cls: type[Any]) -> None:
    names = [x for x in dir(cls) if x.startswith(("add_", "register_", "set_", "clear_"))]
    if any(_is_held(cls, name) for name in names):
        return
    for name in names:

        def note(options: Any, *_: Any, name: str = name, **__: Any) -> None:
            if (record := _records.get(options)) is not None:
                record.others.append(name)

        _note(cls, name, _note_entry if name == "add_session_config_entry" else note)
    _note(cls, "__init__", _note_new)


def _is_held(cls: type[Any], name: str) -> bool:
    """Whether anything but its class refers to a method, or it is not onnxruntime's own."""
    if not hasattr(vars(cls).get(name), "__func__"):
        return True
    alone = [object()]
    most = sys.getrefcount(alone[0])
    return (
        sys.getrefcount(vars(cls)[name]) > most
        or sys.getrefcount(vars(cls)[name].__func__) > most
    )


_install(onnxruntime.SessionOptions)
