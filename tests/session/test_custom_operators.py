# SPDX-License-Identifier: MIT
"""Libraries of custom operators, which copies of SessionOptions lack."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from builders.dequantized_models import DequantizedMatMul
from builders.sessions import EXACT, Setting, options, source, start

import ortplugins

CASE = DequantizedMatMul(128, 64, 32)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A library with the operator com.microsoft.Three, which returns [3.0]."""
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("no C compiler")
    path = tmp_path_factory.mktemp("library") / "libthree.so"
    source = Path(__file__).with_name("three.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", path, source], check=True)
    return str(path)


@pytest.mark.parametrize(("item", "expected"), [(EXACT, "built"), (Setting(), "untouched")])
@pytest.mark.filterwarnings("ignore:.*the untouched model runs")
def test_what_only_the_users_own_options_open(item, expected, model_path, monkeypatch):
    """An artifact that needs a setting is not opened without it."""
    so, real = options(item, bake=False), onnxruntime.InferenceSession.__init__

    def own_alone(self: object, model: object, used: object, *args: Any, **more: Any) -> None:
        if used is not so:
            raise RuntimeError("a copy")
        real(self, model, used, *args, **more)

    monkeypatch.setattr(onnxruntime.InferenceSession, "__init__", own_alone)
    assert source(model_path, so) == expected


@pytest.mark.parametrize("other", [None, Setting()])
def test_artifacts_with_custom_operators(other, library, tmp_path):
    """Copies of options lack them, even in a domain that onnxruntime has operators in."""
    nodes = "h = MatMul(x, dq_out) three = com.microsoft.Three(h) y = Add(h, three)"
    model = CASE.model_of(nodes)
    ir.save(model, tmp_path / "model.onnx")
    for expected in ("built", "cache"):
        so = onnxruntime.SessionOptions()
        so.register_custom_ops_library(library)
        ortplugins.configure(so, ortplugins.DqMatMulNBitsFusion(), *([other] if other else []))
        session = start(tmp_path / "model.onnx", so)
        report = session.ortplugins_report
        if other is None:
            assert report.source == expected
        else:
            assert report.source == "untouched"
            assert (
                "libraries of custom operators of SessionOptions cannot be" in report.notes[0]
            )
        assert session.run(None, {"x": np.zeros((1, 128), np.float32)})[0][0, 0] == 3
