# SPDX-License-Identifier: MIT
"""Defects of other packages that we work around, on new versions: ``make test-versions``.

A test fails where a defect is fixed: drop its workaround, and say so in
docs/onnxruntime-findings.md.
"""

from pathlib import Path

import pytest
from builders.processes import call
from checks.environments import CACHE, python_with
from reproduce import FINDINGS

REPRODUCE = Path(__file__).with_name("reproduce.py")
PAGE = Path(__file__).parents[3] / "docs" / "onnxruntime-findings.md"
# Add the next one here; a version in which one is fixed goes.
VERSIONS = ("1.31.1", "1.32.0")


@pytest.mark.parametrize("name", FINDINGS)
@pytest.mark.parametrize("version", VERSIONS)
def test_the_defect_is_there(version: str, name: str, capsys: pytest.CaptureFixture[str]):
    assert f"`{name}`" in PAGE.read_text(encoding="utf-8")
    requirements = (f"onnxruntime=={version}", "numpy", "onnx==1.23.2", "onnxscript==0.7.2")
    python = python_with(CACHE / "upstream" / version, requirements)
    done = call(python, REPRODUCE, name)
    reported = done.stdout.strip() or f"ends with {done.returncode}: {done.stderr[-500:]}"
    assert done.returncode == 0, reported
    with capsys.disabled():
        print(f"\nonnxruntime {version}: {name}: {reported}", end=" ")
    assert reported != "fixed", (
        f"{name} is fixed in onnxruntime {version}: drop the workaround"
    )
