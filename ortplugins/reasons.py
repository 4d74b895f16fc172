# SPDX-License-Identifier: MIT
"""The table of refusals, notes and warnings: a code for each cause, and what to do about it.

``reasons.txt`` has a line for each code, and under it the texts that have that cause, with
``...`` for names and numbers. Remarks are printed with their codes, ``ortplugins explain``
looks them up, and docs/troubleshooting.md has the same table.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import NamedTuple

_ANY = "..."


class Reason(NamedTuple):
    """One cause."""

    code: str
    section: str
    advice: str
    texts: tuple[str, ...]


@functools.cache
def reasons() -> tuple[Reason, ...]:
    """Return the table."""
    found: list[Reason] = []
    section = ""
    for line in Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            section = line[2:]
        elif line.startswith("    "):
            last = found[-1]
            found[-1] = last._replace(texts=(*last.texts, line.strip()))
        elif line:
            code, _, advice = line.partition(" ")
            found.append(Reason(code, section, advice, ()))
    return tuple(found)


@functools.lru_cache(maxsize=4096)
def code_of(text: str) -> str:
    """Return the code of a remark's reason, or of a warning; empty where it has none.

    Of several texts that fit, the one that says most decides.
    """
    return next(
        (code for part, pattern, code in _patterns() if part in text and pattern.search(text)),
        "",
    )


def with_code(text: str) -> str:
    """Return a text with its code behind it, where it has one."""
    code = code_of(text)
    return f"{text} [{code}]" if code else text


@functools.cache
def _patterns() -> tuple[tuple[str, re.Pattern[str], str], ...]:
    """Return the longest fixed part of each text, its pattern and code; most words first."""
    texts = [(text, reason.code) for reason in reasons() for text in reason.texts]
    texts.sort(key=lambda pair: -len(pair[0].replace(_ANY, "")))
    found = []
    for text, code in texts:
        parts = text.split(_ANY)
        # Anything may stand in front of it, and follow.
        pattern = re.compile(r"(?<!\w)" + ".*?".join(map(re.escape, parts)), re.DOTALL)
        found.append((max(parts, key=len), pattern, code))
    return tuple(found)
