# SPDX-License-Identifier: MIT
"""``ortplugins explain``: what to do about a refusal or a warning."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ortplugins.errors import UsageError
from ortplugins.reasons import REASONS


def explain(what: str = "", /) -> None:
    """Explain a refusal by its code or its text; without either, list all.

    Args:
        what: A code such as ORP101, a remark with its code, or words.
    """
    if not what:
        print("\n".join(_lists()))
        return
    named = re.findall(r"ORP\d+", what.upper())
    found = [
        (code, section, advice)
        for section, rows in REASONS.items()
        for code, advice in rows.items()
        if code in named or (not named and what.lower() in f"{section}: {advice}".lower())
    ]
    if not found:
        raise UsageError(
            f"no refusal has the code or the words {what!r}: 'ortplugins explain' lists all"
        )
    for code, section, advice in found:
        print(f"{code}  {section}\n  {advice}")


def _lists() -> Iterator[str]:
    """Yield all codes as the lists of docs/troubleshooting.md."""
    for section, rows in REASONS.items():
        yield from (f"\n### {section}", "")
        yield from (f"- `{code}`: {advice}" for code, advice in rows.items())
