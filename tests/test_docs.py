# SPDX-License-Identifier: MIT
"""What the documentation says is what the code does."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from typer.testing import CliRunner

import ortplugins
from ortplugins.cli import app

DOCS = Path(__file__).parents[1] / "docs"


def blocks(page: str, language: str) -> list[str]:
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(f"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.fixture
def language_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model.onnx as the pages have it, and samples.npz, in the current folder."""
    random = np.random.default_rng(0)
    layers = "layers.0.self_attn.v_proj", "layers.0.mlp.down_proj", "lm_head"
    text = "e = Gather(table, input_ids)\nh0 = LayerNormalization<axis = -1>(e, norm)\n"
    for i, layer in enumerate(layers):
        text += f'["{layer}"] h{i + 1} = MatMul(h{i}, W{i})\n'
    weights = {f"W{i}": random.normal(size=(64, 64)) for i in range(len(layers))}
    weights |= {"table": random.normal(size=(100, 64)), "norm": np.ones(64)}
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]>
        lm (int64[b, s] input_ids) => (float[b, s, 64] h{len(layers)}) {{ {text} }}"""
    )
    for name, array in weights.items():
        model.graph.initializer.append(
            onnx.numpy_helper.from_array(array.astype(np.float32), name)
        )
    monkeypatch.chdir(tmp_path)
    onnx.save(model, "model.onnx")
    np.savez("samples.npz", input_ids=random.integers(0, 100, (1, 16)))


@pytest.mark.usefixtures("language_model")
def test_the_page_on_orders_runs():
    exec("\n".join(blocks("shape-size-reorder.md", "python")), {})
    for command in "".join(blocks("shape-size-reorder.md", "bash")).splitlines():
        done = CliRunner().invoke(app, shlex.split(command)[1:])
        assert done.exit_code == 0, done.output
    assert {path.name for path in Path().iterdir()} >= {"ordered.onnx", "order.svg"}


@pytest.mark.usefixtures("language_model")
def test_the_page_on_quantisation_runs():
    exec("\n".join(blocks("quantization.md", "python")), {})
    written = {path.name for path in Path().glob("*.onnx")}
    assert {"int4.onnx", "int4-awq.onnx", "int4-mixed.onnx", "int4-same.onnx"} <= written
    commands = "".join(blocks("quantization.md", "bash")).splitlines()
    for command in commands:
        arguments = shlex.split(command, comments=True)
        assert arguments.pop(0) == "ortplugins"
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.output
    assert len(commands) == 2


@pytest.mark.usefixtures("language_model")
def test_the_page_on_mixed_precision_runs(capsys: pytest.CaptureFixture[str]):
    exec("\n".join(blocks("mixed-precision.md", "python")), {})
    told = capsys.readouterr().out
    assert "uint8 -> uint16" in told and "refused 0" in told
    assert "built: fired" in told  # the session's report
    commands = "".join(blocks("mixed-precision.md", "bash")).splitlines()
    for command in commands:
        arguments = shlex.split(command, comments=True)
        assert arguments.pop(0) == "ortplugins"
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.output
        assert "refused 0" in done.output
    assert len(commands) == 3


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
