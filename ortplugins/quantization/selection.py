# SPDX-License-Identifier: MIT
"""Which nodes a user means: by name, by glob, or by regular expression."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Iterable

from ortplugins.errors import QuantizationError
from rewrite_rules.closest_name import did_you_mean

# A name; a glob where it has one of *?[; a regular expression, found anywhere in the name,
# where it starts with "re:" or was compiled.
Pattern = str | re.Pattern[str]

_REGEX = "re:"


def matches(pattern: Pattern, name: str) -> bool:
    """Whether a pattern means the node of a name."""
    if isinstance(pattern, re.Pattern):
        return pattern.search(name) is not None
    if pattern.startswith(_REGEX):
        try:
            return re.search(pattern.removeprefix(_REGEX), name) is not None
        except re.error as error:
            raise QuantizationError(
                f"{pattern!r} is not a regular expression: {error}"
            ) from error
    # A name with brackets is a name first.
    return pattern == name or (_is_glob(pattern) and fnmatch.fnmatchcase(name, pattern))


def check_names(
    option: str, patterns: Iterable[Pattern], names: Collection[str], *, all_patterns: bool
) -> list[str]:
    """Refuse patterns of an option that mean none of some nodes, with the closest names.

    Return the globs and regular expressions that match nothing, as text, where they need not.
    """
    unmatched = [p for p in patterns if not any(matches(p, name) for name in names)]
    wrong = [p for p in unmatched if all_patterns or _is_name(p)]
    if wrong:
        raise QuantizationError(f"{option}: {'; '.join(_unknown(p, names) for p in wrong)}")
    return [text_of(pattern) for pattern in unmatched]


def _unknown(pattern: Pattern, names: Collection[str]) -> str:
    if not _is_name(pattern):
        return f"{text_of(pattern)!r} matches no node that can be quantised"
    assert isinstance(pattern, str)
    hint = did_you_mean(pattern, names)
    return f"no node that can be quantised is called {pattern!r}{hint}"


def _is_name(pattern: Pattern) -> bool:
    return (
        isinstance(pattern, str) and not pattern.startswith(_REGEX) and not _is_glob(pattern)
    )


def _is_glob(pattern: str) -> bool:
    return any(character in pattern for character in "*?[")


def text_of(pattern: Pattern) -> str:
    """Return a pattern as messages have it."""
    return _REGEX + pattern.pattern if isinstance(pattern, re.Pattern) else pattern
