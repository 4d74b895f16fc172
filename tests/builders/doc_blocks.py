# SPDX-License-Identifier: MIT
"""The code blocks of README.md and docs/*.md, and what runs them.

Every block of ``python`` or ``bash`` runs, or has its reason on the line before it::

    <!-- not run: installs from a registry -->

The blocks of one page run in order, in one folder, the Python ones in one namespace.
"""

import dataclasses
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .processes import call

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

RUN = ("python", "bash")
# What a reader cannot run: output, pictures, settings of other programs.
SHOWN = ("", "text", "toml", "json", "dockerfile", "protobuf")

_FENCE, _NOT_RUN = re.compile(r"^ *```", re.M), re.compile(r"^ *<!-- not run", re.M)
_BLOCK = re.compile(
    r"(?:^<!-- not run: (\S[^\n]*\S) -->\n)?^```(\S*)\n(.*?)^```$", re.M | re.S
)
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
_OF_THE_SHELL = re.compile(r"[$`*?~|&;<>(){}]")


@dataclasses.dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    text: str
    reason: str | None = None

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(text: str, page: str) -> Iterator[Block]:
    """Yield the blocks of a page; ValueError for what would neither run nor say why not."""
    fences, reasons = len(_FENCE.findall(text)), len(_NOT_RUN.findall(text))
    for block in _BLOCK.finditer(text):
        reason, language, body = block.groups()
        line = text.count("\n", 0, block.start(3)) + 1
        if language not in (*RUN, *SHOWN) or (reason and language not in RUN):
            raise ValueError(f"{page}:{line}: neither a block that runs nor one to show")
        fences, reasons = fences - 2, reasons - bool(reason)
        yield Block(page, line, language, body, reason)
    if fences or reasons:
        raise ValueError(f"{page}: a fence is open, or a reason is not right before a block")


def commands(script: str) -> list[list[str]] | None:
    """Read a script as calls of ``ortplugins``; None where it takes a shell."""
    calls = []
    for line in script.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if not words:
            continue
        bare = _QUOTED.sub("", line).partition(" #")[0]
        # `ortplugins run` makes another program of its process.
        if words[:2] == ["ortplugins", "run"] or words[0] != "ortplugins":
            return None
        if _OF_THE_SHELL.search(bare):
            return None
        calls.append(words[1:])
    return calls


def run_blocks(blocks: list[Block], call: Callable[[list[str]], int], **names: object) -> None:
    """Run the blocks of one page in this folder; ``call`` returns the status of a command."""
    namespace: dict[str, Any] = {"__name__": "__main__", **names}
    for block in blocks:
        if block.reason is not None or block.language not in RUN:
            continue
        if block.language == "python":
            text = "\n" * (block.line - 1) + block.text  # so that tracebacks name its lines
            exec(compile(text, block.page, "exec", dont_inherit=True), namespace)
        elif (calls := commands(block.text)) is not None:
            for arguments in calls:
                status = call(arguments)
                assert status == 0, f"{block.where}: {arguments} ends with {status}"
        else:
            _run_shell(block)


def _run_shell(block: Block) -> None:
    folder = Path(sys.executable).parent
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    done = call("bash", "-euo", "pipefail", "-c", block.text, PATH=path)
    assert done.returncode == 0, f"{block.where}: {done.returncode}\n{done.stderr}"
    sys.stdout.write(done.stdout)
