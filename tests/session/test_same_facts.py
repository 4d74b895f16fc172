# SPDX-License-Identifier: MIT
"""What a session says of its model, inputs and outputs is what stock onnxruntime says."""

import warnings
from pathlib import Path

import onnx
import onnxruntime
import pytest
from builders.exports import DECODERS, ENCODERS, exported
from builders.layout_matrix import EXHAUSTIVE
from builders.sessions import CPU, PASSES, facts
from builders.text_models import proto_of

import ortplugins

NAMES = [*ENCODERS, *DECODERS][:: 1 if EXHAUSTIVE else 9]


def same_facts(path: Path, *passes: ortplugins.Pass) -> None:
    stock = facts(onnxruntime.InferenceSession(path, providers=CPU))
    options = onnxruntime.SessionOptions()
    ortplugins.configure(options, *passes)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ortplugins.OrtpluginsWarning)
        for _ in range(2):
            assert facts(ortplugins.InferenceSession(path, options, CPU)) == stock


@pytest.mark.parametrize("name", NAMES)
def test_exports(tmp_path, name):
    onnx.save(exported(name), tmp_path / "model.onnx")
    same_facts(tmp_path / "model.onnx", *PASSES)


@pytest.mark.parametrize("version", [None, 0, 3])
@pytest.mark.parametrize("bake", [True, False])
def test_models_with_all_that_a_file_can_say(tmp_path, version, bake):
    proto = proto_of(
        """g (float[b, 3] x) => (float[b, 3] y, int64[2] n) {
            a = Relu(x)  n = Shape(a)  y = Exp(a)
        }"""
    )
    if version is not None:
        proto.model_version = version
    proto.domain, proto.doc_string, proto.graph.doc_string = "org.me", "a model", "a graph"
    proto.producer_name = "exporter"
    proto.metadata_props.add(key="author", value="me")
    onnx.save(proto, tmp_path / "model.onnx")
    options = onnxruntime.SessionOptions()
    ortplugins.configure(options, ortplugins.ShapeSizeReorder(), bake=bake)
    stock = facts(onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=CPU))
    session = ortplugins.InferenceSession(tmp_path / "model.onnx", options, CPU)
    assert session.ortplugins_report.fired and facts(session) == stock
