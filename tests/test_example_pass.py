# SPDX-License-Identifier: MIT
"""The example package of docs/write-a-pass.md: its own tests, and its entry point."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from builders.example_pass import EXAMPLE, installed

ROOT = Path(__file__).parents[1]
MODEL = """<ir_version: 10, opset_import: ["": 21]>
    g (float[n] x) => (float[n] y) { ["one"] d = Dropout (x)  y = Relu (d) }"""

SESSION = """
import onnxruntime, ortplugins
so = onnxruntime.SessionOptions()
so.add_session_config_entry("ortplugins.enable_drop_dropout", "1")
session = ortplugins.InferenceSession("model.onnx", so, providers=["CPUExecutionProvider"])
print(session.ortplugins_report)
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    path = os.pathsep.join(installed(tmp_path / "site"))
    return {**os.environ, "PYTHONPATH": path}


def run(*arguments: str, env: dict[str, str], cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        env=env,
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_its_own_tests_pass(environment: dict[str, str]):
    quiet = "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "-p", "no:xdist"
    assert "2 passed" in run("-m", "pytest", *quiet, ".", env=environment, cwd=EXAMPLE)


def test_its_entry_point_serves_sessions_and_the_command_line(
    environment: dict[str, str], tmp_path: Path
):
    onnx.save(onnx.parser.parse_model(MODEL), tmp_path / "model.onnx")
    assert "fired 1, refused 0" in run("-c", SESSION, env=environment, cwd=tmp_path)
    command = "-m", "ortplugins", "optimize", "model.onnx", "-o", "out.onnx"
    run(*command, "--pass", "drop_dropout", env=environment, cwd=tmp_path)
    nodes = onnx.load(tmp_path / "out.onnx").graph.node
    assert [node.op_type for node in nodes] == ["Relu"]


def test_the_page_shows_the_example_as_it_is():
    page = (ROOT / "docs" / "write-a-pass.md").read_text(encoding="utf-8")
    for name in ("acme_passes.py", "test_acme_passes.py"):
        _, code = (EXAMPLE / name).read_text(encoding="utf-8").split("\n", 1)  # the licence
        assert code in page, name
    entry = (EXAMPLE / "pyproject.toml").read_text(encoding="utf-8").split("\n\n")[2]
    assert entry in page
