# SPDX-License-Identifier: MIT
"""A float model is int4 from its first session on, and later ones find it in the cache."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

import ortplugins
from ortplugins.quantization import quantize

PROVIDERS = ["CPUExecutionProvider"]
X = np.random.default_rng(0).normal(size=(5, 64)).astype(np.float32)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    random = np.random.default_rng(1)
    model = ir.from_onnx_text(
        """<ir_version: 10, opset_import: ["": 21]>
        two (float[b, 64] x) => (float[b, 32] y) {
            [body] h = MatMul(x, W0)
            t = Tanh(h)
            [head] y = MatMul(t, W1)
        }""",
        initializers=[
            ir.tensor(random.normal(size=shape).astype(np.float32), name=name)
            for name, shape in {"W0": (64, 96), "W1": (96, 32)}.items()
        ],
    )
    ir.save(model, tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


def start(path: Path, *passes: ortplugins.Pass, **general) -> ortplugins.InferenceSession:
    options = onnxruntime.SessionOptions()
    ortplugins.configure(options, *passes, **general)
    return ortplugins.InferenceSession(path, options, providers=PROVIDERS)


def operators(session: ortplugins.InferenceSession) -> Counter[str]:
    model = ir.load(session.ortplugins_report.artifact)
    return Counter(node.op_type for node in model.graph)


@pytest.mark.parametrize("settings", [{}, {"bits": 8}, {"is_symmetric": False}])
def test_sessions_compute_what_a_quantised_file_does(path, tmp_path, settings):
    options = {"block_size": 16, **settings}
    session = start(path, ortplugins.WeightOnlyQuantization(**options))
    assert operators(session)["MatMulNBits"] == 2
    quantize(path, tmp_path / "file.onnx", quant_format="MatMulNBits", **options)
    file = onnxruntime.InferenceSession(tmp_path / "file.onnx", providers=PROVIDERS)
    (expected,) = file.run(None, {"x": X})
    np.testing.assert_allclose(session.run(None, {"x": X})[0], expected, rtol=1e-5, atol=1e-5)


def test_the_second_start_comes_from_the_cache(path):
    first = start(path, ortplugins.WeightOnlyQuantization())
    second = start(path, ortplugins.WeightOnlyQuantization())
    assert first.ortplugins_report.source == "built"
    assert second.ortplugins_report.source == "cache"
    remark = second.ortplugins_report.fired[0]
    assert (remark.node, remark.pass_name) == ("body", "weight_only_quantization")
    assert remark.reason.startswith("'W0' -> 4 bits, block_size 32, relative error of the")


def test_excluded_nodes_keep_their_weight(path):
    session = start(path, ortplugins.WeightOnlyQuantization(nodes_to_exclude="re:^no, he*d"))
    kinds = operators(session)
    assert (kinds["MatMulNBits"], kinds["MatMul"] + kinds["FusedMatMul"]) == (1, 1)
    (refused,) = session.ortplugins_report.refused
    assert (refused.node, refused.reason) == ("head", "excluded by nodes_to_exclude")


def test_the_fusion_after_it_finds_nothing_left(path):
    passes = ortplugins.DqMatMulNBitsFusion(), ortplugins.WeightOnlyQuantization()
    session = start(path, *passes)
    assert operators(session)["MatMulNBits"] == 2
    assert not session.ortplugins_report.refused


def test_session_entries_switch_it_on(path):
    options = onnxruntime.SessionOptions()
    for key, value in {
        "ortplugins.enable_weight_only_quantization": "1",
        "ortplugins.weight_only_quantization.bits": "8",
        "session.qdq_matmulnbits_accuracy_level": "4",
    }.items():
        options.add_session_config_entry(key, value)
    session = ortplugins.InferenceSession(path, options, providers=PROVIDERS)
    model = ir.load(session.ortplugins_report.artifact)
    products = [node for node in model.graph if node.op_type == "MatMulNBits"]
    assert [node.attributes["bits"].as_int() for node in products] == [8, 8]
    assert [node.attributes["accuracy_level"].as_int() for node in products] == [4, 4]


def test_a_name_that_is_no_node_is_told(path):
    chosen = ortplugins.WeightOnlyQuantization(nodes_to_exclude="haed")
    with pytest.raises(ortplugins.PassError, match="called 'haed'; did you mean 'head'"):
        start(path, chosen, strict=True)
    with pytest.warns(ortplugins.OrtpluginsWarning, match="haed"):
        session = start(path, chosen)
    assert session.ortplugins_report.source == "untouched"


def test_a_model_without_float_weights_runs_as_it_is(path, tmp_path):
    quantize(path, tmp_path / "done.onnx")
    session = start(tmp_path / "done.onnx", ortplugins.WeightOnlyQuantization())
    assert not session.ortplugins_report.fired
    reasons = {remark.reason[:17] for remark in session.ortplugins_report.refused}
    assert reasons == {"already quantised"}


def test_nothing_is_left_in_the_temporary_folder(path, tmp_path, monkeypatch):
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    start(path, ortplugins.WeightOnlyQuantization())
    assert not list(folder.glob("*ortplugins*"))
