# SPDX-License-Identifier: MIT
"""Session keys and their string values, derived from the fields of a pass class."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

# What an option can be; its default says which.
Scalar = bool | int | float | str


class OptionError(ValueError):
    """An option has a value, or a pass has a name, that nobody knows."""


class Option(NamedTuple):
    """One option of a pass, as its field describes it; :func:`option` says what is what."""

    name: str
    default: Scalar
    help: str
    choices: tuple[Scalar, ...] = ()
    least: int | None = None


def option(
    default: Any,
    help: str,
    *,
    choices: Iterable[Scalar] = (),
    least: int | None = None,
) -> Any:
    """Declare a field of a pass class.

    Args:
        default: Value when nothing is set; its type is the option's type.
        help: One sentence for documentation and command line.
        choices: Allowed values; empty when any of the type will do.
        least: The smallest number allowed; None for any that is finite.
    """
    import dataclasses

    declared = Option("", default, help, tuple(choices), least)
    return dataclasses.field(default=default, metadata={"option": declared})


def options_of(cls: type) -> tuple[Option, ...]:
    """Return the options of a pass class in the order of its fields."""
    import dataclasses

    result = []
    for field in dataclasses.fields(cls):
        default: Any = field.default
        if "option" not in field.metadata or type(default) not in (bool, int, float, str):
            raise TypeError(
                f"{cls.__name__}.{field.name}: declare it with session_options.option() and a "
                "default of type bool, int, float or str"
            )
        result.append(field.metadata["option"]._replace(name=field.name))
    return tuple(result)


_SIZE_UNITS = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgt", 1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}


def parse_size(key: str, text: str) -> int:
    """Read a size in bytes: 500MB and 10GB are powers of 1000, 1GiB is a power of 1024."""
    if (size := parse_amount(text, _SIZE_UNITS)) is None:
        raise OptionError(f"{key} is {text!r}; expected a size such as 500MB, 10GB or 1GiB")
    return int(size)


def parse_amount(text: str, units: Mapping[str, int]) -> float | None:
    """Read a number with one of the units; None for anything else."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *([a-z]*)", text.strip().lower())
    return float(found[1]) * units[found[2]] if found and found[2] in units else None


def parse_dims(key: str, text: str) -> dict[str, int]:
    """Read sizes of dimensions: ``batch=1,seq=512``."""
    sizes = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, equals, size = (piece.strip() for piece in part.rpartition("="))
        if not (name and equals and size.isdecimal()):
            raise OptionError(
                f"{key} is {text!r}: {part!r} is not NAME=SIZE, as in batch=1,seq=512"
            )
        if name in sizes:
            raise OptionError(f"{key} is {text!r}: {name!r} has two sizes")
        sizes[name] = int(size)
    return sizes


def parse_pairs(items: Iterable[str], sign: str = "=") -> dict[str, str]:
    """Read texts ``KEY=VALUE``, or with another sign between them, each key once."""
    pairs: dict[str, str] = {}
    for item in items:
        key, found, value = item.partition(sign)
        if not found:
            raise OptionError(f"{item!r} is not KEY{sign}VALUE")
        if key in pairs:
            raise OptionError(f"{key!r} is given twice")
        pairs[key] = value
    return pairs


def format_value(value: Scalar) -> str:
    """Return a value as a session entry; booleans are ``"0"`` and ``"1"``."""
    return str(int(value)) if isinstance(value, bool) else str(value)


def parse_bool(key: str, text: str) -> bool:
    """Read a boolean entry."""
    if text not in ("0", "1"):
        raise OptionError(f'{key} is {text!r}; expected "0" or "1"')
    return text == "1"


def parse_value(key: str, text: str, spec: Option) -> Scalar:
    """Read an entry as the option's type."""
    value: Scalar
    if isinstance(spec.default, bool):
        value = parse_bool(key, text)
    elif isinstance(spec.default, str):
        value = text
    else:
        kind = type(spec.default)
        try:
            value = kind(text)
        except ValueError:
            raise OptionError(
                f"{key} is {text!r}; expected a value of type {kind.__name__}"
            ) from None
    check_choice(key, value, spec)
    return value


def check_choice(key: str, value: object, spec: Option) -> None:
    """Check a value of an option."""
    if type(value) is not type(spec.default):
        raise OptionError(f"{key} is {value!r}; expected a {type(spec.default).__name__}")
    if spec.choices and value not in spec.choices:
        known = ", ".join(filter(None, map(str, spec.choices)))  # "" stands for none of them
        raise OptionError(f"{key} is {value!r}; expected one of {known}")
    if isinstance(value, int | float) and not math.isfinite(value):
        raise OptionError(f"{key} is {value!r}; expected a finite number")
    if isinstance(value, int | float) and spec.least is not None and value < spec.least:
        raise OptionError(f"{key} is {value!r}; expected {spec.least} or more")


def closest(name: str, known: Iterable[str]) -> str:
    """Return a hint for an unknown name: the closest match, and all that are known."""
    from rewrite_rules.closest_name import did_you_mean

    known = sorted(known)
    hint = did_you_mean(name, known, lead="")
    return f"{hint} known: {', '.join(known) or 'none'}".lstrip()
