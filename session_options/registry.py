# SPDX-License-Identifier: MIT
"""Where pass classes are: ours by their names, those of other packages by module and class."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

from session_options.entries import BUILTIN_PASSES, option_key
from session_options.keys import OptionError, closest, options_of
from session_options.passes import Pass


def our_passes() -> dict[str, type[Pass]]:
    """Return our pass classes by name, in the order they run."""
    return {name: find(name) for name in BUILTIN_PASSES}


def find(name: str) -> type[Pass]:
    """Return one of our classes.

    Raises:
        OptionError: If none has the name; names the nearest.
    """
    if (ours := BUILTIN_PASSES.get(name)) is None:
        raise OptionError(
            f"unknown pass {name!r}: {closest(name, BUILTIN_PASSES)}; those of other packages "
            "are given as module:class"
        )
    if isinstance(ours, str):
        ours = BUILTIN_PASSES[name] = _at(ours)
    return ours


def load(place: str) -> type[Pass]:
    """Return the class at ``"module:class"``, which is not one of ours.

    Raises:
        OptionError: If it can't be imported, or is no pass.
    """
    try:
        cls = _at(place)
        if not (isinstance(cls, type) and issubclass(cls, Pass)):
            raise OptionError(f"{cls!r} is not a subclass of ortplugins.Pass")
        cls.validate()
        if cls.name in BUILTIN_PASSES:
            raise OptionError(f"{cls.name!r} is the name of a built-in pass")
    except (Exception, SystemExit) as error:  # a module may do anything while it is imported
        kind = "" if isinstance(error, OptionError) else f"{type(error).__name__}: "
        raise OptionError(f"pass {place!r} cannot be used: {kind}{error}") from error
    return cls


def loaded(places: str) -> Iterator[type[Pass]]:
    """Yield the classes that the entry ``ortplugins.passes`` names, as :func:`load`."""
    yield from map(load, filter(None, map(str.strip, places.split(","))))


def option_keys(places: str) -> Iterator[str]:
    """Yield the keys of the options of such classes."""
    for cls in loaded(places):
        for spec in options_of(cls):
            yield option_key(cls.name, spec.name)


def place_of(cls: type[Pass]) -> str:
    """Return what :func:`load` finds a class by.

    Raises:
        OptionError: If it would find another, or none.
    """
    place = f"{cls.__module__}:{cls.__qualname__}"
    if "<locals>" in place:
        raise OptionError(f"pass {cls.name!r} is defined in a function: put it into a module")
    if load(place) is not cls:
        raise OptionError(f"pass {cls.name!r}: {place!r} is another class")
    return place


def _at(place: str) -> type[Pass]:
    module, _, name = place.partition(":")
    found: type[Pass] = getattr(importlib.import_module(module), name)
    return found
