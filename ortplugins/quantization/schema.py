# SPDX-License-Identifier: MIT
"""Fields that say what they take: Python, YAML and the command line have one declaration."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ortplugins.errors import QuantizationError
from rewrite_rules.closest_name import did_you_mean


def setting(
    default: Any,
    expected: str = "",
    fits: Callable[[Any], bool] | None = None,
    *,
    choices: Iterable[Any] = (),
) -> Any:
    """Declare a field: what is expected of it, and whether a value is that; or its choices."""
    given = tuple(choices)
    if given:
        expected, fits = f"one of {given}", given.__contains__
    metadata = {"expected": expected, "fits": fits, "choices": given}
    return dataclasses.field(default=default, metadata=metadata)


def check_settings(instance: Any, what: str = "") -> None:
    """Check the fields of a dataclass; numpy's integers become Python's.

    Raises:
        QuantizationError: If one does not fit; says what is expected.
    """
    for field in dataclasses.fields(instance):
        value = getattr(instance, field.name)
        if is_int(value) and not isinstance(value, int):  # of numpy
            object.__setattr__(instance, field.name, value := int(value))
        expected, fits = field.metadata.get("expected"), field.metadata.get("fits")
        if isinstance(field.default, bool):
            expected, fits = "True or False", lambda value: isinstance(value, bool)
        try:
            fitting = fits is None or fits(value)
        except TypeError:  # no number, or no list
            fitting = False
        if not fitting:
            raise QuantizationError(f"{what}{field.name} is {value!r}: {expected} is expected")


def check_keys(what: str, given: Any, known: Sequence[str]) -> dict[str, Any]:
    """Return a mapping that a file has; refuse what is none, or has other keys."""
    if not isinstance(given, Mapping):
        raise QuantizationError(f"{what} is a {type(given).__name__}: a mapping is expected")
    for name in given:
        if name not in known:
            hint = did_you_mean(str(name), known) or f"; it can have {', '.join(known)}"
            raise QuantizationError(f"{what} has no {name!r}{hint}")
    return dict(given)


def is_int(value: object) -> bool:
    """Whether a value is a whole number; true, YAML's yes, counts as 1 in Python only."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether a value is an int or a float."""
    return isinstance(value, int | float) and not isinstance(value, bool)
