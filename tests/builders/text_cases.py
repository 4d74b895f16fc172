# SPDX-License-Identifier: MIT
"""Cases of a rewrite in a text file: what fires beside what must not, and what is expected.

    # name of the case
    x: N, 8, W                        settings that the test knows
    a = Conv(x, w)  y = Mul(a, c)     nodes in ONNX's textual syntax
    -> Conv                           expected: what is left, or the codes of refusals

A block whose title is ``@name`` has lines for all cases that have the line ``@name``.
``ORTPLUGINS_REWRITE_EXPECTED=1 python -m pytest FILE`` writes what is found into the file, for
you to read in the diff.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import ortplugins
from ortplugins.reasons import code_of

_SETTING = re.compile(r"(\w+): (.+)")
_SHARED = re.compile(r"^@\w+$", re.MULTILINE)
_REWRITE = "ORTPLUGINS_REWRITE_EXPECTED"


class TextCase(NamedTuple):
    path: Path
    name: str
    settings: Mapping[str, str]
    nodes: str
    expected: str

    def expect(self, found: str) -> None:
        """Compare with what is expected, or write it there."""
        if not os.environ.get(_REWRITE):
            assert found == self.expected
            return
        head, name, rest = self.path.read_text().partition(f"# {self.name}\n")
        case, mark, others = rest.partition("\n\n")
        kept = [line for line in case.splitlines() if not line.startswith("-> ")]
        lines = [*kept, *(f"-> {line}" for line in found.splitlines())]
        self.path.write_text(head + name + "\n".join(lines) + (mark or "\n") + others)


def text_cases(path: Path) -> dict[str, TextCase]:
    """Read the cases of a file, by name; they stand apart by an empty line."""
    cases, shared = {}, dict[str, str]()
    for block in path.read_text().strip().split("\n\n"):
        title, _, text = block.partition("\n")
        lines = _SHARED.sub(lambda name: shared[name[0]], text).splitlines()
        if title.startswith("@"):
            shared[title] = "\n".join(lines)
        if not title.startswith("# "):  # a comment between cases
            continue
        settings = dict(found.groups() for line in lines if (found := _SETTING.match(line)))
        expected = [line[3:] for line in lines if line.startswith("-> ")]
        nodes = [
            line for line in lines if not (line.startswith("-> ") or _SETTING.match(line))
        ]
        case = TextCase(path, title[2:], settings, "\n".join(nodes), "\n".join(expected))
        assert case.name not in cases, f"two cases of {path} are called {case.name!r}"
        cases[case.name] = case
    return cases


def codes_of(report: ortplugins.Report) -> list[str]:
    """Return the codes of a report's refusals, sorted, each once."""
    return sorted({code_of(remark.reason) for remark in report.refused})


def markdown(rows: Iterable[Sequence[str]]) -> str:
    """Return rows as a table of a page; an empty one ends a table."""
    return "\n".join("| " + " | ".join(row) + " |" if row else "" for row in rows)


def assert_page_has(page: Path, table: str) -> None:
    """Compare a page with the tables of what tests find; its other lines don't count."""
    text = page.read_text(encoding="utf-8")
    lines = [line for line in table.splitlines() if line and line not in text]
    assert not lines, "\n".join(lines)
