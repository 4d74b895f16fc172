# SPDX-License-Identifier: MIT
"""Breaks the code at places drawn at random, and expects the nearest tests to notice.

``make test-strength COUNT=60 SEED=1``. A place is a comparison, an ``and``, ``or`` or ``not``,
or a number within a function. Read what was not noticed: some changes mean nothing, such as a
number that only costs time; others ask for a test.
"""

import ast
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[3]
COPIED = ("ortplugins", "rewrite_rules", "session_options", "tests", "docs", "examples",
          "benchmarks", "pyproject.toml", "README.md")  # fmt: skip
_MOST_SECONDS = 300
COUNT, SEED = (int(os.environ.get(f"ORTPLUGINS_{name}", 0)) for name in ("COUNT", "SEED"))
# Where the tests of a folder are, unless they have its name.
RULES = "tests/rewrite_rules"
OVERRIDES = f"{RULES}/mixed_precision_boundaries"
ELSEWHERE = {
    "ortplugins": ("tests/measurement", "tests/cli", "tests/tuning"),
    "ortplugins/cache": ("tests/cache", "tests/session/test_in_memory.py"),
    "ortplugins/cli": ("tests/cli", "tests/cache", "tests/measurement", "tests/tuning"),
    "ortplugins/measurement": ("tests/measurement", "tests/cli/test_testing.py"),
    "ortplugins/model_io": (
        "tests/model_io",
        "tests/optimization/test_optimize.py",
        "tests/session/test_same_facts.py",
        "tests/session/test_given_options.py",
        f"{RULES}/test_bad_input.py",
    ),
    "ortplugins/optimization": (
        "tests/optimization/test_optimize.py",
        "tests/optimization/test_smoke_check.py",
        "tests/cache/test_data_in_place.py",
        "tests/session/test_session.py",
        f"{RULES}/prepacked_weights/test_prepacked_weights.py",
    ),
    "ortplugins/runtime": ("tests/runtime", "tests/cli", "tests/session"),
    "ortplugins/samples": (
        "tests/samples",
        "tests/measurement",
        "tests/quantization/test_calibration.py",
        "tests/quantization/test_quantize_bad_input.py",
    ),
    "ortplugins/session": ("tests/session", "tests/cli", "tests/cache"),
    "rewrite_rules": ("tests/session_options", f"{RULES}/dq_matmulnbits_fusion"),
    "rewrite_rules/dq_matmulnbits_fusion": (
        f"{RULES}/dq_matmulnbits_fusion",
        f"{RULES}/weights",
    ),
    "rewrite_rules/facts": (
        f"{RULES}/facts",
        "tests/samples",
        f"{RULES}/dq_matmulnbits_fusion",
        f"{RULES}/mixed_precision_boundaries",
        f"{RULES}/conv_fusion",
        f"{RULES}/trim_padding",
    ),
    "rewrite_rules/graph": (
        f"{RULES}/graph",
        f"{RULES}/test_bad_input.py",
        f"{RULES}/dq_matmulnbits_fusion",
        f"{RULES}/mixed_precision_boundaries",
        f"{RULES}/conv_fusion",
        f"{RULES}/transformer_fusion/test_transformer_fusion.py",
        "tests/static_qdq",
        f"{RULES}/shape_size_reorder/test_shape_sources.py",
    ),
    "rewrite_rules/shapes": (f"{RULES}/shapes", f"{RULES}/shape_size_reorder"),
    "rewrite_rules/weights": (f"{RULES}/weights", f"{RULES}/test_bad_input.py"),
    "session_options": ("tests/session_options", "tests/session", OVERRIDES),
    "session_options/builtin_passes": ("tests/session_options", OVERRIDES),
}
OPPOSITES = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is",
}  # fmt: skip


class Mutation(NamedTuple):
    """A place of a file, in bytes, and what is written there instead."""

    file: str
    line: int
    start: int
    end: int
    new: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {' '.join(self.new.split())}"[:100]

    @property
    def tests(self) -> tuple[str, ...]:
        folder = "/".join(self.file.split("/")[:2][: self.file.count("/")])
        return ELSEWHERE.get(folder, (f"tests/{folder.removeprefix('ortplugins/')}",))


def mutations(file: str) -> Iterator[Mutation]:
    """Yield what can be changed within the functions of a file."""
    content = (ROOT / file).read_bytes()
    lines = [0]
    for line in content.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))

    def place(node: ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        start = lines[node.lineno - 1] + node.col_offset
        return start, lines[node.end_lineno - 1] + node.end_col_offset

    def source(node: ast.expr) -> str:
        return content[slice(*place(node))].decode()

    def changed(node: ast.AST) -> str:
        match node:
            case ast.Compare(left, [one], [right]):
                return f"({source(left)} {OPPOSITES[type(one)]} {source(right)})"
            case ast.BoolOp(kind, values):
                other = " or " if isinstance(kind, ast.And) else " and "
                return f"({other.join(f'({source(value)})' for value in values)})"
            case ast.UnaryOp(ast.Not(), operand):
                return f"({source(operand)})"
            case ast.Constant(int() as number) if not isinstance(number, bool):
                return str(number + 1)
        return ""

    tree = ast.parse(content)
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    for node in {inner for each in functions for inner in ast.walk(each)}:
        if new := changed(node):
            assert isinstance(node, ast.expr)
            yield Mutation(file, node.lineno, *place(node), new)


def drawn(count: int, seed: int) -> list[Mutation]:
    """Draw mutations from the folders of the three packages in turn."""
    chosen = random.Random(seed)
    folders: dict[str, list[Mutation]] = {}
    for package in ("rewrite_rules", "session_options", "ortplugins"):
        for path in sorted((ROOT / package).rglob("*.py")):
            file = str(path.relative_to(ROOT))
            folder = "/".join(file.split("/")[:2][: file.count("/")])
            folders.setdefault(folder, []).extend(sorted(mutations(file)))
    found = [items for items in folders.values() if items]
    chosen.shuffle(found)
    return [chosen.choice(found[number % len(found)]) for number in range(count)]


@pytest.fixture(scope="session")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
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


@pytest.mark.parametrize("mutation", drawn(COUNT or 60, SEED), ids=str)
def test_the_nearest_tests_notice(copy: Path, mutation: Mutation):
    file = copy / mutation.file
    content = file.read_bytes()
    new = mutation.new.encode()
    assert all((copy / path).exists() for path in mutation.tests)
    file.write_bytes(content[: mutation.start] + new + content[mutation.end :])
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:randomly", "-p",
             "no:cacheprovider", *mutation.tests],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=_MOST_SECONDS,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return  # a test hangs
    finally:
        file.write_bytes(content)
    # 1: a test failed. A module refuses to be imported, 2: by a test, 4: by conftest.py.
    assert done.returncode in (1, 2, 4), done.stdout[-1500:]
