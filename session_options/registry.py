# SPDX-License-Identifier: MIT
"""Which passes there are: ours, and those of installed packages."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING

from session_options.caller_warnings import warn_caller
from session_options.entries import (
    BUILTIN_PASSES,
    ENTRY_POINT_GROUP,
    are_passes_installed,
)
from session_options.keys import OptionError, closest
from session_options.passes import Pass

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


class PassWarning(UserWarning):
    """A pass of another package cannot be used."""


def pass_names() -> tuple[str, ...]:
    """Return the names of all passes, ours first; nothing of other packages is imported."""
    others = sorted(_installed_entry_points()) if are_passes_installed() else ()
    return (*BUILTIN_PASSES, *others)


def registered_passes() -> dict[str, type[Pass]]:
    """Return every usable pass class by name; broken ones warn and are left out."""
    found = {name: find(name) for name in pass_names()}
    return {name: cls for name, cls in found.items() if cls is not None}


def check_name(name: str) -> None:
    """Refuse a name that no pass has."""
    if name not in pass_names():
        raise OptionError(f"unknown pass {name!r}: {closest(name, pass_names())}")


def resolve(name: str) -> type[Pass]:
    """Return a pass class by its name."""
    check_name(name)
    if (cls := find(name)) is None:
        raise OptionError(f"pass {name!r} cannot be used; the warning before says why")
    return cls


def find(name: str) -> type[Pass] | None:
    """Return the class of a name from :func:`pass_names`; warn and return None if broken."""
    if (ours := BUILTIN_PASSES.get(name)) is not None:
        if isinstance(ours, str):
            module, _, attribute = ours.partition(":")
            ours = BUILTIN_PASSES[name] = getattr(importlib.import_module(module), attribute)
        return ours
    entry_point = _installed_entry_points()[name]
    try:
        cls = entry_point.load()
        if not (isinstance(cls, type) and issubclass(cls, Pass)):
            raise OptionError(f"{cls!r} is not a subclass of ortplugins.Pass")
        cls.validate(name)
    except (Exception, SystemExit) as error:  # whatever it does, sessions must start
        warn_caller(
            f"ortplugins skips pass {name!r} of {entry_point.value!r}: "
            f"{type(error).__name__}: {error} [ORP909]",
            PassWarning,
        )
        return None
    return cls


def version_of(name: str) -> str:
    """Return the version of the package that a pass comes from; empty for ours."""
    point = None if name in BUILTIN_PASSES else _installed_entry_points().get(name)
    return "" if point is None or point.dist is None else point.dist.version


@functools.cache
def _installed_entry_points() -> dict[str, EntryPoint]:
    """Scan the installed packages, once per process: it takes tens of milliseconds."""
    import importlib.metadata

    found: dict[str, EntryPoint] = {}
    for point in sorted(importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)):
        if point.name in BUILTIN_PASSES or point.name in found:
            first = found[point.name].value if point.name in found else "ortplugins"
            warn_caller(
                f"ortplugins skips pass {point.name!r} of {point.value!r}: {first!r} has the "
                "name already [ORP909]",
                PassWarning,
            )
            continue
        found[point.name] = point
    return found
