# SPDX-License-Identifier: MIT
"""A float model is int4 from its first session on, and later ones find it in the cache."""

import re
from collections import Counter
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from builders.dequantized_models import run
from builders.sessions import options, start
from builders.text_models import matmul_chain, normal

import ortplugins
from ortplugins.quantization import quantize

X = normal(5, 64)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    model = matmul_chain(["body", "head"], (64, 96, 32), "Tanh")
    ir.save(model, tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


def woq(path: Path, **settings) -> ortplugins.InferenceSession:
    return start(path, options(ortplugins.WeightOnlyQuantization(**settings)))


def operators(session: ortplugins.InferenceSession) -> Counter[str]:
    model = ir.load(session.ortplugins_report.artifact)
    return Counter(node.op_type for node in model.graph)


@pytest.mark.parametrize("bits", [4, 8])
def test_the_report_says_how_far_the_numbers_are_from_the_float_models(path, bits):
    session = woq(path, bits=bits)
    reported = str(session.ortplugins_report)
    assert "vectors stored with the float model are not comparable" in reported
    x = normal(32, 64)
    found, expected = session.run(None, {"x": x})[0], run(str(path), {"x": x})[0]
    actual = (found * expected).sum() / np.linalg.norm(found) / np.linalg.norm(expected)
    cosine = float(re.search(r"cosine ([\d.]+)", reported)[1])
    assert abs(cosine - actual) <= (1 - actual) / 2 + 1e-4
    assert cosine < 1 or bits == 8


@pytest.mark.parametrize("settings", [{}, {"bits": 8}, {"is_symmetric": False}])
def test_sessions_compute_what_a_quantised_file_does(path, tmp_path, settings):
    settings = {"block_size": 16, **settings}
    session = woq(path, **settings)
    assert operators(session)["MatMulNBits"] == 2
    quantize(path, tmp_path / "file.onnx", quant_format="MatMulNBits", **settings)
    (expected,) = run(str(tmp_path / "file.onnx"), {"x": X}, optimised=True)
    np.testing.assert_allclose(session.run(None, {"x": X})[0], expected, rtol=1e-5, atol=1e-5)


def test_the_second_start_comes_from_the_cache_and_leaves_nothing(path, tmp_path, monkeypatch):
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    first, second = woq(path), woq(path)
    assert first.ortplugins_report.source == "built"
    assert second.ortplugins_report.source == "cache"
    remark = second.ortplugins_report.fired[0]
    assert (remark.node, remark.pass_name) == ("body", "weight_only_quantization")
    assert remark.reason.startswith("'W0' -> 4 bits, block_size 32, relative error of the")
    assert not list(folder.glob("*ortplugins*"))


def test_excluded_nodes_keep_their_weight(path):
    session = woq(path, nodes_to_exclude="re:^no, he*d")
    kinds = operators(session)
    assert (kinds["MatMulNBits"], kinds["MatMul"] + kinds["FusedMatMul"]) == (1, 1)
    (refused,) = session.ortplugins_report.refused
    assert (refused.node, refused.reason) == ("head", "kept in float by 'he*d'")


def test_the_fusion_after_it_finds_nothing_left(path):
    passes = ortplugins.DqMatMulNBitsFusion(), ortplugins.WeightOnlyQuantization()
    session = start(path, options(*passes))
    assert operators(session)["MatMulNBits"] == 2
    assert not session.ortplugins_report.refused


def test_session_entries_switch_it_on(path):
    so = onnxruntime.SessionOptions()
    for key, value in {
        "ortplugins.enable_weight_only_quantization": "1",
        "ortplugins.weight_only_quantization.bits": "8",
        "session.qdq_matmulnbits_accuracy_level": "4",
    }.items():
        so.add_session_config_entry(key, value)
    model = ir.load(start(path, so).ortplugins_report.artifact)
    products = [node for node in model.graph if node.op_type == "MatMulNBits"]
    for name, value in {"bits": 8, "accuracy_level": 4}.items():
        assert [node.attributes[name].as_int() for node in products] == [value, value]


def test_a_name_that_is_not_a_node_is_noted(path):
    """One list may be for several models."""
    report = woq(path, nodes_to_exclude="haed").ortplugins_report
    assert "'haed' matches no node" in str(report) and len(report.fired) == 2


def test_a_model_without_float_weights_runs_as_it_is(path, tmp_path):
    quantize(path, tmp_path / "done.onnx")
    report = woq(tmp_path / "done.onnx").ortplugins_report
    assert not report.fired
    assert {remark.reason[:17] for remark in report.refused} == {"already quantised"}
