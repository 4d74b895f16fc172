# SPDX-License-Identifier: MIT
"""What the documentation says is what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import onnx_ir as ir
import pytest
from typer.testing import CliRunner

import ortplugins
from ortplugins.cli import app

DOCS = Path(__file__).parents[1] / "docs"


def test_the_table_of_session_options_is_the_passes_own():
    table = CliRunner().invoke(app, ["passes", "--format", "markdown"]).output
    assert table.strip() in (DOCS / "session-options.md").read_text(encoding="utf-8")


def test_the_example_pass_works(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (code,) = re.findall(
        "```python\n(.*?)```", (DOCS / "write-a-pass.md").read_text(), re.DOTALL
    )
    (tmp_path / "acme_passes.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    from acme_passes import DropDropout

    model = ir.from_onnx_text("""<ir_version: 10, opset_import: ["": 21]>
        g (float[n] x) => (float[n] y) { d = Dropout (x)  y = Relu (d) }""")
    result = ortplugins.optimize(model, passes=[DropDropout()])
    assert [node.op_type for node in result.model.graph] == ["Relu"]
    assert len(result.report.fired) == 1
