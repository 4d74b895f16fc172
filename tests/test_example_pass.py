# SPDX-License-Identifier: MIT
"""The example package of docs/write-a-pass.md: its own tests, and its entry point."""

import os
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from builders.installed_passes import EXAMPLE, installed
from builders.processes import python
from builders.text_models import proto_of

ROOT = Path(__file__).parents[1]
MODEL = 'g (float[n] x) => (float[n] y) { ["one"] d = Dropout (x)  y = Relu (d) }'


SESSION = """
import onnxruntime, ortplugins
so = onnxruntime.SessionOptions()
so.add_session_config_entry("ortplugins.enable_drop_dropout", "1")
session = ortplugins.InferenceSession("model.onnx", so, providers=["CPUExecutionProvider"])
print(session.ortplugins_report)
"""


@pytest.fixture
def ran(tmp_path: Path) -> Callable[..., str]:
    """Runs Python where the package is installed; returns what it printed."""
    path = os.pathsep.join(installed(tmp_path / "site"))

    def run(*arguments: str, cwd: Path) -> str:
        done = python(*arguments, cwd=cwd, PYTHONPATH=path)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def test_its_own_tests_pass(ran):
    quiet = "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "-p", "no:xdist"
    assert "2 passed" in ran("-m", "pytest", *quiet, ".", cwd=EXAMPLE)


def test_its_entry_point_serves_sessions_and_the_command_line(ran, tmp_path):
    onnx.save(proto_of(MODEL), tmp_path / "model.onnx")
    assert "fired 1, refused 0" in ran("-c", SESSION, cwd=tmp_path)
    command = "-m", "ortplugins", "optimize", "model.onnx", "-o", "out.onnx"
    ran(*command, "--pass", "drop_dropout", cwd=tmp_path)
    nodes = onnx.load(tmp_path / "out.onnx").graph.node
    assert [node.op_type for node in nodes] == ["Relu"]


def test_the_page_shows_the_example_as_it_is():
    page = (ROOT / "docs" / "write-a-pass.md").read_text(encoding="utf-8")
    for name in ("acme_passes.py", "test_acme_passes.py"):
        _, code = (EXAMPLE / name).read_text(encoding="utf-8").split("\n", 1)  # the licence
        assert code in page, name
    entry = (EXAMPLE / "pyproject.toml").read_text(encoding="utf-8").split("\n\n")[2]
    assert entry in page
