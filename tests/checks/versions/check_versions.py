# SPDX-License-Identifier: MIT
"""The matrix of layouts on every onnxruntime that we speak of: ``make test-versions``.

pytest collects files called ``test_*.py``, so that this one runs only where it is named. It
makes a virtual environment for each version in .cache/onnxruntime-versions, once.
"""

import functools
import hashlib
import itertools
import json
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx_ir as ir
import pytest
from builders.dequantized_models import Quantized
from builders.layout_matrix import LayoutCase, layout_cases
from checks.environments import CACHE, python_with

import ortplugins

VERSIONS = ("1.24.4", "1.27.0", "1.29.0", "1.31.1", "1.32.0")
NEWEST = VERSIONS[-1]
ACCURACY_LEVELS = (0, 4)
POLICIES = ("fuse", "float")
RUNNER = Path(__file__).with_name("run_models.py")
LEVELS = ("plain", "optimised")  # of onnxruntime's optimisers

# Activations rounded to int8 cost a product up to 3e-2 of its greatest number here; wrong zero
# points or scales cost ten times that.
ROUNDED = 5e-2
# All versions round in the same way: what the newest gets from a file, the others get too.
ROUNDED_DIFFERENCE = 2e-3

SHOWN = 25  # failures in one message


def all_cases() -> Iterator[LayoutCase]:
    """The matrix, and weights in graphs around a body, where versions differ most."""
    yield from layout_cases()
    choices = itertools.product(("int4", "uint4", "int8", "uint8"), ("none", "random"), (1, 2))
    for storage, zero_points, depth in choices:
        # x @ W in nested If subgraphs, with W's constants in the main graph.
        text = "W = $w  y0 = MatMul (x, W)"
        for i in range(depth):
            text = f"""y{i + 1} = If (condition) <
                then_branch = then () => (y{i}) {{ {text} }},
                else_branch = other () => (z{i}) {{ z{i} = Identity (x) }}>"""
        yield LayoutCase(
            f"10-captured-{storage}-zp_{zero_points}-depth{depth}",
            text,
            Quantized((64, 64), storage, zero_points=zero_points),
            (3, 64),
            {},
            inputs={"condition": np.array(True)},
            outputs=(f"y{depth}",),
        )


class File(NamedTuple):
    """One optimised file of a case, named as in ``run_models.py``."""

    model: str
    refused: bool = False


# Greatest relative error of a model without and with onnxruntime's optimisers, or why none.
Outcome = float | str


class Matrix:
    """The files of every case, by the case's name, and what each version makes of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cases = {case.name: case for case in all_cases()}
        self.originals: dict[str, str] = {}
        for name, case in self.cases.items():
            (folder / name).mkdir()
            feeds = {f"feed:{name}": array for name, array in case.feeds.items()}
            outputs = {f"output:{index}": array for index, array in enumerate(case.reference)}
            np.savez(folder / name / "numbers.npz", **feeds, **outputs)
            self.originals[name] = self._written(name, case.build())

    def _written(self, name: str, model: ir.Model) -> str:
        content = ir.to_proto(model).SerializeToString()
        stem = f"{name}/{hashlib.sha256(content).hexdigest()[:16]}"  # equal files once
        (self.folder / f"{stem}.onnx").write_bytes(content)
        return stem

    @functools.cache  # noqa: B019
    def files(self, accuracy_level: int, policy: str, version: str) -> dict[str, File]:
        """Optimise every case for a version."""
        fusion = ortplugins.DqMatMulNBitsFusion(accuracy_level, slow_kernels=policy)
        found = {}
        for name, case in self.cases.items():
            result = ortplugins.optimize(
                case.build(), passes=[fusion], onnxruntime_version=version
            )
            found[name] = File(
                self._written(name, result.model),
                bool(result.report.refused),
            )
        return found

    @functools.cache  # noqa: B019
    def outcomes(self, version: str) -> dict[tuple[str, str], Outcome]:
        """Run what concerns a version; by model and level of the optimisers."""
        settings = [*itertools.product(ACCURACY_LEVELS, POLICIES, [version])]
        settings += [(0, "fuse", NEWEST)]
        if version == NEWEST:
            settings += itertools.product([4], POLICIES, VERSIONS)
        models = {file.model for each in settings for file in self.files(*each).values()}
        return run_models(version, self.folder, sorted({*models, *self.originals.values()}))


def python_of(version: str) -> Path:
    requirements = (f"onnxruntime=={version}", "numpy")
    return python_with(CACHE / "onnxruntime-versions" / version, requirements)


def run_models(
    version: str, folder: Path, models: list[str]
) -> dict[tuple[str, str], Outcome]:
    """Run all models in one process, or as many as crashes make necessary."""
    outcomes: dict[tuple[str, str], Outcome] = {}
    while models:
        child = subprocess.run(
            [python_of(version), RUNNER, folder],
            input="\n".join(models),
            capture_output=True,
            text=True,
            timeout=600,
        )
        for line in child.stdout.splitlines():
            found = json.loads(line)
            off = found["off"] if found["off"] is not None else float("inf")
            outcomes[found["model"], found["level"]] = found["error"] or off
        left = [model for model in models if (model, LEVELS[-1]) not in outcomes]
        if child.returncode == 0 and not left:
            break
        assert left and child.returncode < 0, f"{RUNNER.name} failed: {child.stderr}"
        for level in LEVELS:
            outcomes.setdefault((left[0], level), f"crash, signal {-child.returncode}")
        models = left[1:]
    return outcomes


def is_right(outcome: Outcome, bound: float) -> bool:
    return isinstance(outcome, float) and outcome <= bound


class Judge:
    """Judges files on one version at one accuracy level."""

    def __init__(self, matrix: Matrix, version: str, accuracy_level: int) -> None:
        self.matrix, self.version, self.accuracy_level = matrix, version, accuracy_level
        self.here = matrix.outcomes(version)
        # Exactness has a bound of its own; rounded numbers are compared across versions.
        self.newest = matrix.outcomes(NEWEST) if accuracy_level == 4 else {}

    def judge(self, name: str, file: File) -> tuple[str, str]:
        """Say what became of a file, and what is wrong."""
        faults = [level for level in LEVELS if not self._agrees(name, file, level)]
        originals = {at: self.here[self.matrix.originals[name], at] for at in LEVELS}
        said = {at: self.here[file.model, at] for at in faults}
        tolerance = self.matrix.cases[name].tolerance
        if not faults:
            return "agree", ""
        if all(isinstance(outcome, str) for outcome in originals.values()):
            return "original does not run", ""
        if file.refused and not any(is_right(originals[at], tolerance) for at in faults):
            return "left as it was, original fails alike", ""
        return "WRONG", f"{name}: {said}"

    def _agrees(self, name: str, file: File, level: str) -> bool:
        outcome, case = self.here[file.model, level], self.matrix.cases[name]
        bound = case.tolerance
        if self.accuracy_level == 4:
            bound = max(bound, ROUNDED)
            newest = self.newest.get((file.model, level))
            if isinstance(newest, float):
                bound = min(bound, newest + max(ROUNDED_DIFFERENCE, case.tolerance))
        return is_right(outcome, bound)

    def judge_all(self, policy: str, files: dict[str, File], capsys) -> None:
        """Print the counts; fail if anything is wrong without an excuse."""
        counts, failures = Counter[str](), list[str]()
        for name, file in files.items():
            kind, failure = self.judge(name, file)
            counts[kind] += 1
            failures += [failure] if failure else []
        text = ", ".join(f"{number} {kind}" for kind, number in counts.items())
        with capsys.disabled():
            print(f"\n{self.version} level {self.accuracy_level}, {policy}: {text}", end=" ")
        more = [f"and {len(failures) - SHOWN} more"] * (len(failures) > SHOWN)
        if failures:
            pytest.fail("\n".join([*failures[:SHOWN], *more]), pytrace=False)


@pytest.fixture(scope="session")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    folder = tmp_path_factory.mktemp("versions")
    yield Matrix(folder)
    shutil.rmtree(folder)


# Session-wide, and first in the lists of fixtures: what can't be installed costs no models.
@pytest.fixture(params=VERSIONS, scope="session")
def version(request: pytest.FixtureRequest) -> str:
    python_of(request.param)
    return request.param


@pytest.mark.parametrize("level", ACCURACY_LEVELS)
@pytest.mark.parametrize("policy", POLICIES)
def test_file_for_the_version(version: str, matrix: Matrix, policy: str, level: int, capsys):
    files = matrix.files(level, policy, version)
    Judge(matrix, version, level).judge_all(policy, files, capsys)


def test_no_kernel_is_denied_that_is_right(version: str, matrix: Matrix):
    """At level 0; at level 4 what is wrong depends on shapes too."""
    here, newest = matrix.outcomes(version), matrix.files(0, "fuse", NEWEST)
    denied = [
        name
        for name, file in matrix.files(0, "fuse", version).items()
        if file.refused
        and not newest[name].refused
        and all(
            is_right(here[newest[name].model, at], matrix.cases[name].tolerance)
            for at in LEVELS
        )
    ]
    assert denied == []
