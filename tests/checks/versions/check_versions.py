# SPDX-License-Identifier: MIT
"""The matrix of layouts on every onnxruntime that we speak of: ``make test-versions``.

pytest collects files called ``test_*.py``, so that this one runs only where it is named. It
makes a virtual environment for each version in .cache/onnxruntime-versions, once.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from builders.dequantized_models import Quantized
from builders.layout_matrix import LayoutCase, layout_cases
from checks.environments import CACHE, python_with

import ortplugins

VERSIONS = ("1.22.1", "1.24.4", "1.27.0", "1.29.0", "1.31.1", "1.32.0")
NEWEST = VERSIONS[-1]
ACCURACY_LEVELS = (0, 4)
RUNNER = Path(__file__).with_name("run_models.py")
LEVELS = ("plain", "optimised")  # of onnxruntime's optimisers

# Activations rounded to int8 cost a product up to 3e-2 of its greatest number here; wrong zero
# points or scales cost ten times that. Layers with Tanh or Clip between them amplify it.
ROUNDED = 5e-2
ROUNDED_CHAIN = 0.5
# All versions round in the same way: what the newest gets from a file, the others get too.
ROUNDED_DIFFERENCE = 2e-3

SHOWN = 25  # failures in one message


# The models.


@dataclasses.dataclass(frozen=True)
class Variant:
    """One optimised file of a case; the model is named as in ``run_models.py``."""

    model: str
    remarks: tuple[str, ...]
    refused: bool
    largest_block: int  # of its MatMulNBits, 0 without one

    def names(self, version: str) -> bool:
        """Whether a remark speaks of a version."""
        text = f"onnxruntime {version.rpartition('.')[0]} "
        return any(text in remark for remark in self.remarks)


# Accuracy level, slow_kernels, version; None for the installed one.
Settings = tuple[int, str, str | None]


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Every file of every case, by name of the case."""

    folder: Path
    cases: dict[str, LayoutCase]
    originals: dict[str, str]
    variants: dict[Settings, dict[str, Variant]]

    def models(self, version: str) -> list[str]:
        wanted = set(self.originals.values())
        for (level, _, target), variants in self.variants.items():
            newest_too = level == 4 and version == NEWEST
            if target in (None, version) or newest_too:
                wanted |= {variant.model for variant in variants.values()}
        return sorted(wanted)


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


def write_case(corpus: Corpus, case: LayoutCase) -> None:
    """Write the case's numbers, its original and every variant; equal files once."""
    folder = corpus.folder / case.name
    folder.mkdir()
    feeds = {f"feed:{name}": array for name, array in case.feeds.items()}
    outputs = {f"output:{index}": array for index, array in enumerate(case.reference)}
    np.savez(folder / "numbers.npz", **feeds, **outputs)

    def write(model: ir.Model) -> str:
        content = ir.to_proto(model).SerializeToString()
        stem = hashlib.sha256(content).hexdigest()[:16]
        (folder / f"{stem}.onnx").write_bytes(content)
        return f"{case.name}/{stem}"

    original = case.build()
    corpus.originals[case.name] = write(original)
    for (level, policy, version), variants in corpus.variants.items():
        fusion = ortplugins.DqMatMulNBitsFusion(accuracy_level=level, slow_kernels=policy)
        result = ortplugins.optimize(original, passes=[fusion], onnxruntime_version=version)
        remarks = tuple(map(str, result.report.remarks))
        nodes = (node for node in result.model.graph if node.op_type == "MatMulNBits")
        largest = max((node.attributes["block_size"].as_int() for node in nodes), default=0)
        variants[case.name] = Variant(
            write(result.model), remarks, bool(result.report.refused), largest
        )


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Corpus]:
    settings: list[Settings] = []
    for level in ACCURACY_LEVELS:
        settings.append((level, "fuse", None))
        settings += itertools.product([level], ("fuse", "float"), VERSIONS)
    cases = {case.name: case for case in all_cases()}
    folder = tmp_path_factory.mktemp("versions")
    corpus = Corpus(folder, cases, {}, {item: {} for item in settings})
    for case in cases.values():
        write_case(corpus, case)
    yield corpus
    shutil.rmtree(folder)


# The versions.


def python_of(version: str) -> Path:
    requirements = (f"onnxruntime=={version}", "numpy")
    return python_with(CACHE / "onnxruntime-versions" / version, requirements)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one version made of one model: its greatest relative error, or why none."""

    off: float | None
    error: str = ""

    def within(self, bound: float) -> bool:
        """Whether it ran, with the right numbers."""
        return self.off is not None and self.off <= bound

    def __str__(self) -> str:
        return self.error if self.off is None else f"relative error {self.off:.1e}"


Outcomes = dict[tuple[str, str], Outcome]  # by model and level


def run_models(python: Path, folder: Path, models: list[str]) -> Outcomes:
    """Run all models in one process, or as many as crashes make necessary."""
    outcomes: Outcomes = {}
    while models:
        child = subprocess.run(
            [python, RUNNER, folder],
            input="\n".join(models),
            capture_output=True,
            text=True,
            timeout=600,
        )
        for line in child.stdout.splitlines():
            reported = json.loads(line)
            off = reported["off"] if reported["off"] is not None else float("inf")
            error = reported["error"] or ""
            where = (reported["model"], reported["level"])
            outcomes[where] = Outcome(None if error else off, error)
        left = [model for model in models if (model, LEVELS[-1]) not in outcomes]
        if child.returncode == 0 and not left:
            break
        assert left and child.returncode < 0, f"{RUNNER.name} failed: {child.stderr}"
        for level in LEVELS:
            crash = Outcome(None, f"crash, signal {-child.returncode}")
            outcomes.setdefault((left[0], level), crash)
        models = left[1:]
    return outcomes


@pytest.fixture(scope="session")
def outcomes(corpus: Corpus):
    """Outcomes of a version; each version runs once."""

    @functools.cache
    def of(version: str) -> Outcomes:
        return run_models(python_of(version), corpus.folder, corpus.models(version))

    return of


# The judgement.


def bound(case: LayoutCase, accuracy_level: int) -> float:
    if accuracy_level != 4:
        return case.tolerance
    return ROUNDED_CHAIN if "chain_of" in case.name else max(case.tolerance, ROUNDED)


class Judge:
    """Judges the files of one version at one accuracy level."""

    def __init__(self, corpus: Corpus, outcomes, version: str, accuracy_level: int) -> None:
        self.corpus = corpus
        self.version = version
        self.accuracy_level = accuracy_level
        self.here: Outcomes = outcomes(version)
        # Exactness has a bound of its own; rounded numbers are compared across versions.
        self.newest: Outcomes = outcomes(NEWEST) if accuracy_level == 4 else {}
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []

    def add(self, name: str, variant: Variant, reported: bool) -> None:
        """Judge a file; ``reported`` if inspect says that this version has no right kernel."""
        faults = [level for level in LEVELS if not self._agrees(name, variant, level)]
        if not faults:
            self.counts["agree"] += 1
        elif not self._original_runs(name):
            self.counts["original does not run"] += 1
        elif reported:
            silent = any(self.here[variant.model, at].off is not None for at in faults)
            what = "would give wrong numbers" if silent else "would not run"
            self.counts[f"reported by inspect ({what})"] += 1
        elif all(variant.refused and not self._original_right(name, at) for at in faults):
            self.counts["left as it was, original fails alike"] += 1
        else:
            self.counts["WRONG"] += 1
            said = {at: str(self.here[variant.model, at]) for at in faults}
            if len(set(said.values())) == 1:
                said = {" and ".join(said): next(iter(said.values()))}
            self.failures += [f"{name}, {at}: {text}" for at, text in said.items()]

    def conclude(self, what: str, capsys: pytest.CaptureFixture[str]) -> None:
        """Print the counts; fail if anything is wrong without an excuse."""
        counts = ", ".join(f"{number} {kind}" for kind, number in self.counts.items())
        with capsys.disabled():
            print(f"\n{self.version} level {self.accuracy_level}, {what}: {counts}", end=" ")
        more = len(self.failures) - SHOWN
        lines = self.failures[:SHOWN] + ([f"and {more} more"] if more > 0 else [])
        if self.failures:
            pytest.fail("\n".join([f"{self.version}, {what}", *lines]), pytrace=False)

    def _agrees(self, name: str, variant: Variant, level: str) -> bool:
        outcome, case = self.here[variant.model, level], self.corpus.cases[name]
        if not outcome.within(bound(case, self.accuracy_level)):
            return False
        newest = self.newest.get((variant.model, level))
        return (
            newest is None
            or newest.off is None
            or outcome.within(newest.off + max(ROUNDED_DIFFERENCE, case.tolerance))
        )

    def _original_runs(self, name: str) -> bool:
        original = self.corpus.originals[name]
        return any(self.here[original, level].off is not None for level in LEVELS)

    def _original_right(self, name: str, level: str) -> bool:
        original = self.corpus.originals[name]
        return self.here[original, level].within(self.corpus.cases[name].tolerance)


@pytest.fixture(params=ACCURACY_LEVELS, ids="level{}".format)
def accuracy_level(request: pytest.FixtureRequest) -> int:
    return request.param


# Session-wide, and first in the lists of fixtures: what can't be installed costs no models.
@pytest.fixture(params=VERSIONS, scope="session")
def version(request: pytest.FixtureRequest) -> str:
    python_of(request.param)
    return request.param


@pytest.fixture
def judge(version: str, corpus: Corpus, outcomes, accuracy_level: int) -> Judge:
    return Judge(corpus, outcomes, version, accuracy_level)


def test_one_file_for_all(judge: Judge, capsys: pytest.CaptureFixture[str]):
    """What the installed version gets, the others run, unless inspect says they can't."""
    variants = judge.corpus.variants
    inspected = variants[judge.accuracy_level, "fuse", judge.version]
    for name, variant in variants[judge.accuracy_level, "fuse", None].items():
        if variant.largest_block > 256 and judge.version < "1.32":
            judge.counts["blocks that 1.32 brought"] += 1
        else:
            judge.add(name, variant, reported=inspected[name].names(judge.version))
    judge.conclude("one file for all", capsys)


@pytest.mark.parametrize("policy", ["fuse", "float"])
def test_file_for_the_version(judge: Judge, policy: str, capsys: pytest.CaptureFixture[str]):
    for name, variant in judge.corpus.variants[
        judge.accuracy_level, policy, judge.version
    ].items():
        judge.add(name, variant, reported=False)
    judge.conclude(f"file for it, slow_kernels={policy}", capsys)


def test_inspect_denies_no_kernel_that_is_right(version: str, corpus: Corpus, outcomes):
    """At level 0; at level 4 what is wrong depends on shapes too."""
    here: Outcomes = outcomes(version)
    one_file, inspected = corpus.variants[0, "fuse", None], corpus.variants[0, "fuse", version]
    denied = [
        name
        for name, case in corpus.cases.items()
        if inspected[name].names(version)
        and all(here[one_file[name].model, level].within(case.tolerance) for level in LEVELS)
    ]
    assert denied == []
