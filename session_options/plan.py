# SPDX-License-Identifier: MIT
"""From ``SessionOptions`` to an ordered plan, and back."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from session_options import keys
from session_options.entries import (
    BUILTIN_PASSES,
    HINT_KEY,
    PASSES_KEY,
    PREFIX,
    enable_key,
    given_entries,
    option_key,
    stored,
)
from session_options.keys import Option, OptionError, Scalar
from session_options.passes import Pass
from session_options.presets import PRESETS
from session_options.registry import find, load, loaded, option_keys, place_of

# Bytes of a session entry's value; onnxruntime says so in a RuntimeError.
_LONGEST_VALUE = 8192


class Plan(NamedTuple):
    """What to do to a model before the session.

    Attributes:
        passes: In the order they run. The others are those of :data:`GENERAL_OPTIONS`.
    """

    passes: tuple[Pass, ...] = ()
    cache_dir: str = ""
    cache_limit: str = ""
    strict: bool = False
    bake: bool = True
    in_memory: bool = False
    hint: str = ""

    def __bool__(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.passes)

    @classmethod
    def from_entries(cls, entries: Mapping[str, str]) -> Plan:
        """Read the plan that session entries describe; others than ours are left alone.

        Raises:
            OptionError: If an entry is unknown, names the nearest; or has an impossible value.
        """
        _check_keys(entries)
        hint, others = (entries.get(key) or "" for key in (HINT_KEY, PASSES_KEY))
        keys.check_choice(HINT_KEY, hint, _HINT)
        enabling = {name: enable_key(name) for name in BUILTIN_PASSES}
        named = [
            n for n, key in enabling.items() if keys.parse_bool(key, entries.get(key, "0"))
        ]
        if hint and (named or others):
            listed = ", ".join(filter(None, (*named, others)))
            raise OptionError(f"{HINT_KEY} chooses the passes: leave it out, or {listed}")
        classes = [find(name) for name in (PRESETS[hint].passes if hint else named)]
        classes += loaded(others)
        passes = [
            each(**_given(entries, f"{PREFIX}.{each.name}", keys.options_of(each)))
            for each in classes
        ]
        if not passes:
            return cls()
        return make_plan(passes, **_given(entries, PREFIX, GENERAL_OPTIONS))


_GENERAL_HELP = {
    "cache_dir": (
        "Where optimised models are kept; else the environment variable ORTPLUGINS_CACHE_DIR, "
        "else the user's cache directory."
    ),
    "cache_limit": (
        "Size that the cache is kept below, 10GB for instance: the least recently used "
        "entries go first; else the environment variable ORTPLUGINS_CACHE_LIMIT, else 20GB."
    ),
    "strict": "Raise an exception inside a pass; else warn, and run the other passes.",
    "bake": "Keep onnxruntime's own optimisations in the cache, too (CPU sessions).",
    "in_memory": (
        "Build in this process at each start, and write nothing to the disk: for models that "
        "a program decrypts. Without bake, and without passes that work on files."
    ),
    "hint": (
        "What to optimise for: exact passes and session settings, the same on every machine, "
        "in place of passes; `ortplugins tune` measures others."
    ),
}
GENERAL_OPTIONS = tuple(
    Option(name, Plan._field_defaults[name], help, ("", *PRESETS) if name == "hint" else ())
    for name, help in _GENERAL_HELP.items()
)
_HINT = next(spec for spec in GENERAL_OPTIONS if spec.name == "hint")


def make_plan(passes: Sequence[Pass], **general: Any) -> Plan:
    """Order passes into a plan."""
    if limit := general.get("cache_limit"):
        keys.parse_size(f"{PREFIX}.cache_limit", limit)
    names = [item.name for item in passes]
    for name in names:
        if names.count(name) > 1:
            raise OptionError(f"pass {name!r} is given twice")
    return Plan(tuple(sorted(passes, key=lambda item: (item.position, item.name))), **general)


def read(options: Any | None) -> Plan:
    """Read the plan that the entries of ``SessionOptions`` describe.

    Args:
        options: ``onnxruntime.SessionOptions``, or None.

    Returns:
        The plan; empty when no pass is switched on.

    Raises:
        OptionError: If an ortplugins entry has an impossible value; names key and value.
    """
    if options is None:
        return Plan()
    return Plan.from_entries(given_entries(functools.partial(stored, options), option_keys))


def _check_keys(entries: Mapping[str, str]) -> None:
    """Refuse entries of ours that nobody reads."""
    others = {cls.name: cls for cls in loaded(entries.get(PASSES_KEY, ""))}
    for key in entries:
        if not key.startswith(f"{PREFIX}.") or key == PASSES_KEY:
            continue
        name, dot, option = key.removeprefix(f"{PREFIX}.").partition(".")
        if dot:
            known = [spec.name for spec in keys.options_of(others.get(name) or find(name))]
            if option not in known:
                raise OptionError(f"unknown option {key!r}: {keys.closest(option, known)}")
        elif name.startswith("enable_"):
            find(name.removeprefix("enable_"))
        elif name not in (general := [spec.name for spec in GENERAL_OPTIONS]):
            raise OptionError(f"unknown option {key!r}: {keys.closest(name, general)}")


def configure(options: Any, *passes: Pass, **general: Scalar) -> None:
    """Write passes and their options into ``SessionOptions``, checked.

    Args:
        options: ``onnxruntime.SessionOptions``; gets one entry per pass and per option.
        *passes: Instances of pass classes, for instance ``DqMatMulNBitsFusion()``.
        **general: Options that belong to no pass, a name of :data:`GENERAL_OPTIONS` each:
            ``cache_dir="/var/cache/models"``; ``hint="latency"`` in place of passes.

    Raises:
        OptionError: If a pass is not registered or comes twice, an option is unknown, or its
            value is longer than a session entry may be.
    """
    write_entries(options, entries_of(passes, **general))


def write_entries(options: Any, entries: Mapping[str, str]) -> None:
    """Write session entries into ``SessionOptions``.

    Raises:
        OptionError: If onnxruntime would refuse one, or cut its value.
    """
    for key, text in entries.items():
        entry = f"session entry {key!r} is {text!r}"
        try:
            _, size = key.encode(), len(text.encode())
        except UnicodeEncodeError:
            raise OptionError(f"{entry}: not UTF-8") from None
        if size > _LONGEST_VALUE:
            raise OptionError(
                f"{key} has {size:,} bytes; a session entry holds {_LONGEST_VALUE:,} at most: "
                "optimize() and enabled() take any length"
            )
        if "\0" in text:  # onnxruntime would cut the value there
            raise OptionError(f"{entry}: holds a NUL")
    for key, text in entries.items():
        try:
            options.add_session_config_entry(key, text)
        except RuntimeError as error:
            raise OptionError(f"session entry {key!r} is {text!r}: {error}") from None


def entries_of(
    passes: Sequence[Pass | str],
    settings: Mapping[str, Scalar] = {},
    /,
    **general: Scalar,
) -> dict[str, str]:
    """Return the session entries of passes and of options that belong to none.

    For a pass given as an object they are all its options; for one that is given by its
    name, or as ``"module:class"``, those in ``settings``, ``{"<pass>.<option>": value}``.
    """
    specs = {spec.name: spec for spec in GENERAL_OPTIONS}
    entries: dict[str, str] = {}
    for name, value in general.items():
        if name not in specs:
            raise OptionError(f"unknown option {name!r}: {keys.closest(name, specs)}")
        keys.check_choice(f"{PREFIX}.{name}", value, specs[name])
        entries[f"{PREFIX}.{name}"] = keys.format_value(value)
    classes: dict[str, type[Pass]] = {}
    names: dict[str, str] = {}  # of classes, by what they are given as
    for item in [passes] if isinstance(passes, str) else passes:
        if not isinstance(item, Pass | str):
            raise OptionError(f"{item!r} is neither a pass nor the name of one")
        if isinstance(item, Pass):
            cls = type(item)
        else:
            cls = load(item) if ":" in item else find(item)
        if cls.name in classes:
            raise OptionError(f"pass {cls.name!r} is given twice")
        classes[cls.name] = cls
        names[item if isinstance(item, str) else cls.name] = cls.name
        entries |= _entries_of_pass(item) if isinstance(item, Pass) else {}
    entries |= _enabling(classes.values())
    for key, value in settings.items():
        name, _, option = key.removeprefix(f"{PREFIX}.").rpartition(".")
        name = names.get(name, name)
        if name not in classes:
            raise OptionError(
                f"option {key!r}: {name!r} is not among the passes {list(classes)}"
            )
        entries[option_key(name, option)] = keys.format_value(value)
    Plan.from_entries(entries)
    return entries


def _enabling(classes: Iterable[type[Pass]]) -> dict[str, str]:
    """Return the entries that switch passes on."""
    entries, others = {}, []
    for cls in classes:
        if cls.name in BUILTIN_PASSES and find(cls.name) is cls:
            entries[enable_key(cls.name)] = "1"
        else:
            others.append(place_of(cls))
    return entries | ({PASSES_KEY: ",".join(others)} if others else {})


def _entries_of_pass(item: Pass) -> dict[str, str]:
    return {
        option_key(item.name, spec.name): keys.format_value(getattr(item, spec.name))
        for spec in keys.options_of(type(item))
    }


def plan_from_settings(passes: Sequence[Pass | str], settings: Mapping[str, Scalar]) -> Plan:
    """Make a plan from passes, or their names with ``{"<pass>.<option>": value}``."""
    passes = [passes] if isinstance(passes, str) else passes
    objects = [item for item in passes if isinstance(item, Pass)]
    others = [item for item in passes if not isinstance(item, Pass)]
    named = Plan.from_entries(entries_of(others, settings)).passes
    return make_plan([*objects, *named])


def _given(
    entries: Mapping[str, str], prefix: str, specs: Iterable[Option]
) -> dict[str, Scalar]:
    """Return the values of options whose keys begin with a prefix, of those that are set."""
    return {
        spec.name: keys.parse_value(key, entries[key], spec)
        for spec in specs
        if (key := f"{prefix}.{spec.name}") in entries
    }
