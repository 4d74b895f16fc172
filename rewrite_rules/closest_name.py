# SPDX-License-Identifier: MIT
"""The hint in an error about an unknown name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str | None], lead: str = "; ") -> str:
    """Return ``; did you mean 'x'?``, or an empty string if no known name resembles it."""
    by_lower = {item.lower(): item for item in known if item}
    near = difflib.get_close_matches(name.lower(), by_lower)
    return f"{lead}did you mean {by_lower[near[0]]!r}?" if near else ""
