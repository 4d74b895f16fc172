# SPDX-License-Identifier: MIT
"""What a user means: by name, by glob, or by regular expression."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Iterable

from ortplugins.errors import QuantizationError
from rewrite_rules.closest_name import did_you_mean

_REGEX = "re:"


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern means what has this name.

    It is a name; a glob where it has one of ``*?[``; a regular expression, found anywhere in
    the name, where it starts with ``re:``.
    """
    # A name with brackets is a name first.
    expression = _expression(pattern)
    return pattern == name or (expression is not None and bool(expression.search(name)))


def check_names(option: str, patterns: Iterable[str], names: Collection[str]) -> None:
    """Refuse patterns of an option that mean none of some names, with the closest of these."""
    wrong = [
        f"{pattern!r} matches no node that can be quantised{_closest(pattern, names)}"
        for pattern in patterns
        if not any(matches(pattern, name) for name in names)
    ]
    if wrong:
        raise QuantizationError(f"{option}: {'; '.join(wrong)}")


def _expression(pattern: str) -> re.Pattern[str] | None:
    """Return what a glob or regular expression stands for; None for a name."""
    if pattern.startswith(_REGEX):
        try:
            return re.compile(pattern.removeprefix(_REGEX))
        except re.error as error:
            raise QuantizationError(
                f"{pattern!r} is not a regular expression: {error}"
            ) from error
    is_glob = any(character in pattern for character in "*?[")
    return re.compile(rf"\A{fnmatch.translate(pattern)}") if is_glob else None


def _closest(pattern: str, names: Collection[str]) -> str:
    """Return the name that a pattern could have meant, or else the first that there is."""
    first = next(iter(names), None)
    plain = pattern.removeprefix(_REGEX).strip("*?^$")
    return did_you_mean(plain, names) or (f"; there is {first!r}" if first else "")
