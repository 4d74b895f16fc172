# SPDX-License-Identifier: MIT
"""Which passes there are: ours, and those of installed packages."""

from __future__ import annotations

__all__ = [
    "NO_ENTRY_POINTS",
    "PassWarning",
    "find",
    "pass_names",
    "registered_passes",
    "resolve",
    "ship",
    "version_of",
]

import functools
import os
from typing import TYPE_CHECKING

from session_options.builtin_passes import BUILTIN_PASSES
from session_options.caller_warnings import warn_caller
from session_options.installed import installed_distributions
from session_options.keys import OptionError, closest
from session_options.passes import Pass

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINT_GROUP = "ortplugins.passes"
NO_ENTRY_POINTS = "ORTPLUGINS_NO_ENTRY_POINTS"


class PassWarning(UserWarning):
    """A pass of another package cannot be used."""


# Passes of ours whose work is done in a room above this one.
_SHIPPED: list[type[Pass]] = []


def ship(cls: type[Pass]) -> None:
    """Have a pass count as one of ours; for the package that this one is installed with.

    Entry points would do it, too, but finding those takes each session's start milliseconds.
    """
    if cls not in _SHIPPED:
        cls.validate(cls.name)
        _SHIPPED.append(cls)


def _ours() -> tuple[type[Pass], ...]:
    return (*BUILTIN_PASSES, *_SHIPPED)


def pass_names() -> tuple[str, ...]:
    """Return the names of all passes, ours first; nothing of other packages is imported."""
    ours = [cls.name for cls in _ours()]
    return (*ours, *sorted(_entry_points()))


def registered_passes() -> dict[str, type[Pass]]:
    """Return every usable pass class by name; broken ones warn and are left out."""
    found = {name: find(name) for name in pass_names()}
    return {name: cls for name, cls in found.items() if cls is not None}


def resolve(name: str) -> type[Pass]:
    """Return a pass class by its name.

    Raises:
        OptionError: If there is none of that name, or it cannot be used.
    """
    if name not in pass_names():
        raise OptionError(f"unknown pass {name!r}: {closest(name, pass_names())}")
    if (cls := find(name)) is None:
        raise OptionError(f"pass {name!r} cannot be used; the warning before says why")
    return cls


def find(name: str) -> type[Pass] | None:
    """Return the class of a name from :func:`pass_names`; warn and return None if broken."""
    for cls in _ours():
        if cls.name == name:
            return cls
    entry_point = _entry_points()[name]
    try:
        cls = entry_point.load()
        if not (isinstance(cls, type) and issubclass(cls, Pass)):
            raise OptionError(f"{cls!r} is no subclass of ortplugins.Pass")
        cls.validate(name)
    except (Exception, SystemExit) as error:  # whatever it does, sessions must start
        warn_caller(
            f"ortplugins skips pass {name!r} of {entry_point.value!r}: "
            f"{type(error).__name__}: {error}",
            PassWarning,
        )
        return None
    return cls


def version_of(name: str) -> str:
    """Return the version of the package that a pass comes from; empty for ours."""
    point = _entry_points().get(name)
    return "" if point is None or point.dist is None else point.dist.version


def _entry_points() -> dict[str, EntryPoint]:
    if os.environ.get(NO_ENTRY_POINTS) == "1":
        return {}
    return _installed_entry_points()


def _any_package_may_have_passes() -> bool:
    """Whether a package names our group; true where only importlib.metadata can tell."""
    distributions = installed_distributions()
    if distributions is None:
        return True
    group = ENTRY_POINT_GROUP.encode()
    for item in distributions:
        try:
            with open(os.path.join(item.folder, "entry_points.txt"), "rb") as file:
                if group in file.read():
                    return True
        except OSError:  # it has no entry points
            continue
    return False


@functools.cache
def _installed_entry_points() -> dict[str, EntryPoint]:
    """Scan the installed packages, once per process: it takes milliseconds."""
    if not _any_package_may_have_passes():
        return {}
    # Heavy: 3 MB of every worker's memory, and 10 ms of its start.
    import importlib.metadata

    ours = {cls.name: "ortplugins" for cls in _ours()}
    found: dict[str, EntryPoint] = {}
    for point in sorted(importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)):
        if point.name in ours or point.name in found:
            first = ours.get(point.name) or found[point.name].value
            warn_caller(
                f"ortplugins skips pass {point.name!r} of {point.value!r}: {first!r} has the "
                "name already",
                PassWarning,
            )
            continue
        found[point.name] = point
    return found
