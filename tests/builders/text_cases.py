# SPDX-License-Identifier: MIT
"""Cases of a rewrite in a text file: what fires beside what must not, and what is expected.

    # name of the case -> Conv        what is left, or the codes of refusals
    x: N, 8, W                        settings that the test knows
    a = Conv(x, w)  y = Mul(a, c)     nodes in ONNX's textual syntax

What is expected may also be in lines of its own, ``-> Conv``. A line ``each op k: Mul two |
Add one`` makes two cases, with these words in the place of ``{op}`` and ``{k}``. Lines below
``# @name`` are for all cases with the line ``@name``; empty ones, and ``##``, are ignored.
``ORTPLUGINS_REWRITE_EXPECTED=1 python -m pytest FILE`` writes what is found into the file, for
you to read in the diff, but into no case that is one of several.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from onnxscript.rewriter import RewriteRuleClassBase

import ortplugins

_SETTING = re.compile(r"(\w+): (.+)")
_EACH = re.compile(r"^each (.+): (.+)\n", re.MULTILINE)
_SHARED = re.compile(r"^@\w+$", re.MULTILINE)
_BLOCK = re.compile(r"^# (.+)\n((?:(?!# ).*\n)*)", re.MULTILINE)
_TEXTS = re.compile(r"(?<=^```text\n)(?:(?!```).*\n)*", re.MULTILINE)
_ARROW = " -> "
_TITLE_WIDTH = 100
_REWRITE = "ORTPLUGINS_REWRITE_EXPECTED"


class TextCase(NamedTuple):
    path: Path
    name: str
    settings: Mapping[str, str]
    nodes: str
    expected: str

    def expect(self, found: str) -> None:
        """Compare with what is expected, or write it there."""
        text = self.path.read_text()
        titles = {block[1].partition(_ARROW)[0] for block in _BLOCK.finditer(text)}
        if not os.environ.get(_REWRITE) or self.name not in titles:
            assert found == self.expected
            return

        def rewritten(block: re.Match[str]) -> str:
            if block[1].partition(_ARROW)[0] != self.name:
                return block[0]
            title, lines = f"# {self.name}", block[2].splitlines()
            lines = [line for line in lines if not line.startswith("-> ")]
            if "\n" in found or len(title + _ARROW + found) > _TITLE_WIDTH:
                lines += [f"-> {line}" for line in found.splitlines()]
            else:
                title += _ARROW + found
            return "\n".join([title, *lines, ""])

        self.path.write_text(_BLOCK.sub(rewritten, text))


def text_cases(path: Path) -> dict[str, TextCase]:
    """Read the cases of a file, by name."""
    cases, shared = {}, dict[str, str]()
    for block in _BLOCK.finditer(path.read_text()):
        text = _SHARED.sub(lambda line: shared[line[0]], block[2])
        if block[1].startswith("@"):
            shared[block[1]] = text.rstrip("\n")
            continue
        for title, lines in _each(block[1], text):
            name, _, expected = title.partition(_ARROW)
            settings = dict(found.groups() for x in lines if (found := _SETTING.match(x)))
            expected = expected or "\n".join(x[3:] for x in lines if x.startswith("-> "))
            nodes = [x for x in lines if not (x.startswith("-> ") or _SETTING.match(x))]
            assert name not in cases, f"two cases of {path} are called {name!r}"
            cases[name] = TextCase(path, name, settings, "\n".join(nodes), expected)
    return cases


def _each(title: str, text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the title and the lines of a case, for each of what it is written for."""
    found = _EACH.search(text)
    names, rows = found.groups() if found else ("", "")
    for row in rows.split(" | "):
        case = f"{title}\n{_EACH.sub('', text)}"
        for name, word in zip(names.split(), row.split(), strict=True):
            case = case.replace(f"{{{name}}}", word)
        one, *lines = case.splitlines()
        yield one, [line for line in lines if line and not line.startswith("##")]


def codes_of(report: ortplugins.Report) -> list[str]:
    """Return the codes of a report's refusals, sorted, each once."""
    return sorted({remark.code for remark in report.refused})


def markdown(rows: Iterable[Sequence[str]]) -> str:
    """Return rows as a table of a page; an empty one ends a table."""
    return "\n".join("| " + " | ".join(row) + " |" if row else "" for row in rows)


def assert_laws_on_page(
    page: Path,
    rules: Sequence[ModuleType],
    cases: Mapping[str, TextCase],
    left: Callable[[str], str],
) -> None:
    """Compare a page's block of rules with the cases that have a line ``law: NAME``.

    There is a case for each rule class of the modules whose docstring is a law, ``a -> b``;
    ``left`` shortens what is expected. A line
    ``before: TEXT`` says shorter than nodes what a test finds at the start. With
    ``ORTPLUGINS_REWRITE_EXPECTED`` the block is written.
    """
    rows = []
    for case in cases.values():
        if (law := case.settings.get("law")) is not None:
            given = f"x[{case.settings['x']}]: " if "x" in case.settings else ""
            nodes = case.settings.get("before", case.nodes)
            rows.append((law, given + nodes, left(case.expected)))
    block = "".join(map(_as_text, rows))
    laws = {
        name
        for module in rules
        for name, found in vars(module).items()
        if isinstance(found, type)
        and issubclass(found, RewriteRuleClassBase)
        and found.__module__ == module.__name__
        and " -> " in (found.__doc__ or "")
    }
    assert laws == {law for law, *_ in rows}
    text = page.read_text(encoding="utf-8")
    if os.environ.get(_REWRITE):
        # Of several blocks of a page, the one with a rule of these modules.
        known = re.compile(f"^({'|'.join(laws)})$", re.MULTILINE)
        text = _TEXTS.sub(lambda m: block if known.search(m[0]) else m[0], text)
        page.write_text(text, encoding="utf-8")
    else:
        assert f"```text\n{block}```" in text


def _as_text(row: tuple[str, str, str]) -> str:
    """Return a law, what is before and what after, in lines of at most 100 characters."""
    law, before, after = row
    lines = [law]
    for part in (*re.split(r"\n|  +", before.strip()), f"-> {after}"):
        if len(lines) > 1 and len(lines[-1]) + len(part) < 97:
            lines[-1] += f"   {part}"
        else:
            lines.append(f"    {part}")
    return "\n".join([*lines, ""])


def assert_page_has(page: Path, table: str) -> None:
    """Compare a page with the tables of what tests find; its other lines don't count."""
    text = page.read_text(encoding="utf-8")
    lines = [line for line in table.splitlines() if line and line not in text]
    assert not lines, "\n".join(lines)
