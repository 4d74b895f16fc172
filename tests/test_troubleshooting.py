# SPDX-License-Identifier: MIT
"""docs/troubleshooting.md speaks of every refusal, and of none that is gone."""

from __future__ import annotations

import re
from pathlib import Path

from builders.refusal_texts import HOLE, all_texts, covers, refusal_texts

PAGE = Path(__file__).parents[1] / "docs" / "troubleshooting.md"
# First cells of the tables, with what is not a text of the sources left out.
ROWS = [
    row
    for row in re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    if " " in row and not row.startswith("fired 0")
]


def test_there_are_refusals_to_speak_of():
    assert len(list(refusal_texts())) > 100 and len(ROWS) > 100


def test_every_refusal_has_its_row():
    unspoken = [
        f"{where}: {text.replace(HOLE, '...')}"
        for where, text in refusal_texts()
        if not any(covers(row, text) for row in ROWS)
    ]
    assert not unspoken, "\n".join(unspoken)


def test_every_row_is_of_a_text_that_is_there():
    texts = set(all_texts())
    gone = [row for row in ROWS if not any(covers(row, text) for text in texts)]
    assert not gone, "\n".join(gone)
