# SPDX-License-Identifier: MIT
"""Which passes there are: ours, and those of installed packages."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from typing import TYPE_CHECKING, NamedTuple

from session_options.caller_warnings import warn_caller
from session_options.keys import OptionError, closest
from session_options.passes import Pass

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINT_GROUP = "ortplugins.passes"
NO_ENTRY_POINTS = "ORTPLUGINS_NO_ENTRY_POINTS"


class PassWarning(UserWarning):
    """A pass of another package cannot be used."""


_PACKAGE = "session_options.builtin_passes"

# Our pass classes by name, or where they are: a start imports those that it switches on.
BUILTIN_PASSES: dict[str, str | type[Pass]] = {
    "trim_padding": f"{_PACKAGE}.trim_padding:TrimPadding",
    "mixed_precision_boundaries": (
        f"{_PACKAGE}.mixed_precision_boundaries:MixedPrecisionBoundaries"
    ),
    "dq_matmulnbits_fusion": f"{_PACKAGE}.dq_matmulnbits_fusion:DqMatMulNBitsFusion",
    "transformer_fusion": f"{_PACKAGE}.transformer_fusion:TransformerFusion",
    "conv_fusion": f"{_PACKAGE}.conv_fusion:ConvFusion",
    "shape_size_reorder": f"{_PACKAGE}.shape_size_reorder:ShapeSizeReorder",
    "prepacked_weights": f"{_PACKAGE}.prepacked_weights:PrepackedWeights",
}


def pass_names() -> tuple[str, ...]:
    """Return the names of all passes, ours first; nothing of other packages is imported."""
    return (*BUILTIN_PASSES, *sorted(_entry_points()))


def registered_passes() -> dict[str, type[Pass]]:
    """Return every usable pass class by name; broken ones warn and are left out."""
    found = {name: find(name) for name in pass_names()}
    return {name: cls for name, cls in found.items() if cls is not None}


def resolve(name: str) -> type[Pass]:
    """Return a pass class by its name."""
    if name not in pass_names():
        raise OptionError(f"unknown pass {name!r}: {closest(name, pass_names())}")
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
    entry_point = _entry_points()[name]
    try:
        cls = entry_point.load()
        if not (isinstance(cls, type) and issubclass(cls, Pass)):
            raise OptionError(f"{cls!r} is not a subclass of ortplugins.Pass")
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


def _may_have_passes(distribution: Distribution) -> bool:
    """Whether a package names our group."""
    try:
        with open(os.path.join(distribution.folder, "entry_points.txt"), "rb") as file:
            return ENTRY_POINT_GROUP.encode() in file.read()
    except OSError:  # it has no entry points
        return False


@functools.cache
def _installed_entry_points() -> dict[str, EntryPoint]:
    """Scan the installed packages, once per process: it takes milliseconds."""
    distributions = installed_distributions()
    if distributions is not None and not any(map(_may_have_passes, distributions)):
        return {}
    # Heavy: 3 MB of every worker's memory, and 10 ms of its start.
    import importlib.metadata

    found: dict[str, EntryPoint] = {}
    for point in sorted(importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)):
        if point.name in BUILTIN_PASSES or point.name in found:
            first = found[point.name].value if point.name in found else "ortplugins"
            warn_caller(
                f"ortplugins skips pass {point.name!r} of {point.value!r}: {first!r} has the "
                "name already",
                PassWarning,
            )
            continue
        found[point.name] = point
    return found


class Distribution(NamedTuple):
    """One installed distribution: its name in lower case with underscores, version, folder.

    One in development has no version in the folder's name.
    """

    name: str
    version: str
    folder: str


def installed_distributions() -> tuple[Distribution, ...] | None:
    """Return the distributions in the order of ``sys.path``, by their metadata folders.

    None where folder names do not tell all: an archive, or a folder that cannot be read.
    ``importlib.metadata`` says the same, and takes tens of milliseconds of a start to import.
    """
    return _scan(tuple(entry for entry in sys.path if isinstance(entry, str)))


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
            name, _, version = stem.partition("-")
            name = name.lower().replace(".", "_")
            version = version.partition("-")[0]  # an egg's Python comes behind it
            found.append(Distribution(name, version, os.path.join(entry, folder)))
    return tuple(found)
