# SPDX-License-Identifier: MIT
"""What docs/serving.md says of files for servers that take nothing but a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from builders.dequantized_models import DequantizedMatMul
from typer.testing import CliRunner

from ortplugins.cli.app import app

CASE = DequantizedMatMul(256, 192, 32)
EXACT = ("--set", "dq_matmulnbits_fusion.accuracy_level=0")


def outputs(path: Path, level: str = "ORT_ENABLE_ALL") -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    (result,) = session.run(None, {"x": CASE.feed()})
    return np.asarray(result)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    ir.save(CASE.model(), tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


def optimize(model: Path, name: str, *options: str) -> tuple[Path, str]:
    output = model.with_name(name)
    done = CliRunner().invoke(app, ["optimize", str(model), "-o", str(output), *options])
    assert done.exit_code == 0, done.output
    return output, done.output


def test_a_file_runs_in_plain_sessions_and_needs_nothing(model: Path):
    output, told = optimize(model, "fused.onnx", *EXACT)
    assert "sessions on this file need" not in told
    np.testing.assert_allclose(
        outputs(output), outputs(model, "ORT_DISABLE_ALL"), rtol=1e-5, atol=1e-5
    )


def test_a_baked_file_holds_packed_weights_and_says_what_sessions_need(model: Path):
    passes = "--pass", "dq_matmulnbits_fusion", "--pass", "prepacked_weights"
    output, told = optimize(model, "packed.onnx", "--bake", *passes, *EXACT)
    assert "sessions on this file need graph_optimization_level = ORT_DISABLE_ALL" in told
    assert b"prepacked_" in output.read_bytes()
    np.testing.assert_allclose(
        outputs(output, "ORT_DISABLE_ALL"),
        outputs(model, "ORT_DISABLE_ALL"),
        rtol=1e-5,
        atol=1e-5,
    )


def test_without_baking_there_is_nothing_to_pack(model: Path):
    passes = "--pass", "dq_matmulnbits_fusion", "--pass", "prepacked_weights"
    _, told = optimize(model, "unbaked.onnx", *passes)
    assert "refused 1" in told and "--bake" in told
