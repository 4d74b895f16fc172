# SPDX-License-Identifier: MIT
"""Breaks the code in one place at a time and expects the nearest tests to notice.

    cd tests/checks/strength
    python -m pytest check_strength.py          all of mutations.txt
    python -m pytest check_strength.py -k grid  those whose line has the word

Below a line with a file, two colons and what to run are mutations of that file: the text to
replace behind ``- ``, the new text behind ``+ ``; both may have several lines. A text
has to occur exactly once in its file; if the code has changed, adapt the mutation to it.
"""

import dataclasses
import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
COPIED = ("ortplugins", "rewrite_rules", "session_options", "tests", "docs", "examples",
          "benchmarks", "pyproject.toml", "README.md")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One place to break, and the tests that have to fail then."""

    file: str
    tests: tuple[str, ...]
    old: str
    new: str

    def __str__(self) -> str:
        line = " ".join((self.new or "nothing").split())
        return f"{Path(self.file).stem}: {line}"[:100]


def read_mutations(text: str) -> list[Mutation]:
    """Read the table."""
    found = []
    for block in re.split(r"^(?=\S.* :: )", text, flags=re.MULTILINE)[1:]:
        header, *_ = block.splitlines()
        file, _, tests = header.partition(" :: ")
        for old, new in re.findall(r"((?:^- .*\n)+)((?:^\+ .*\n)*)", block, re.MULTILINE):
            texts = (re.sub(r"^..", "", each, flags=re.MULTILINE)[:-1] for each in (old, new))
            found.append(Mutation(file, tuple(tests.split(" ")), *texts))
    return found


MUTATIONS = read_mutations(Path(__file__).with_name("mutations.txt").read_text("utf-8"))


@pytest.fixture(scope="session")
def copy(tmp_path_factory):
    """A copy of the project that may be broken."""
    folder = tmp_path_factory.mktemp("project")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.onnx")
            shutil.copytree(source, folder / name, ignore=ignored)
        else:
            shutil.copy(source, folder / name)
    return folder


def run_tests(copy, tests):
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:randomly", "-p",
         "no:cacheprovider", *tests],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip


run_unchanged = functools.cache(run_tests)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_the_nearest_tests_notice(copy, mutation):
    before = run_unchanged(copy, mutation.tests)
    assert before.returncode == 0, f"they fail already: {before.stdout[-1500:]}"
    file = copy / mutation.file
    text = file.read_text("utf-8")
    assert text.count(mutation.old) == 1, f"{mutation.file}: not once: {mutation.old!r}"
    file.write_text(text.replace(mutation.old, mutation.new), "utf-8")
    try:
        done = run_tests(copy, mutation.tests)
    finally:
        file.write_text(text, "utf-8")
    # 1: tests ran, and some failed. An error of collection, or no test at all, proves nothing.
    assert done.returncode == 1, done.stdout[-1500:]
