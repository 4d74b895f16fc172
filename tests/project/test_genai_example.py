# SPDX-License-Identifier: MIT
"""examples/genai on a small folder; onnxruntime-genai generates the same where installed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from builders.decoders import HEAD_SIZE, HEADS, VOCABULARY, genai_decoder, genai_feeds
from builders.dequantized_models import run
from builders.same_numbers import session

from examples.genai.fuse_folder import CONFIG, fuse_folder
from ortplugins.quantization import quantize

LEVEL = "session.qdq_matmulnbits_accuracy_level"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder whose data has a name of its own; of weights, the head alone is dequantised."""
    folder = tmp_path / "given"
    folder.mkdir()
    options = {"save_as_external_data": True, "location": "weights", "size_threshold": 0}
    head = {"rules": {"*": "float", "logits": {"keep_float": False}}, "block_size": 16}
    onnx.save(quantize(genai_decoder(), **head).model, folder / "model.onnx", **options)
    part = {
        "filename": "model.onnx", "session_options": {"log_id": "mine", LEVEL: "0"},
        "num_hidden_layers": 1, "num_key_value_heads": HEADS, "head_size": HEAD_SIZE,
    }  # fmt: skip
    config = {"model": {"context_length": 64, "decoder": part, "vocab_size": VOCABULARY}}
    (folder / CONFIG).write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def change(folder: Path, **parts: Any) -> None:
    content = json.loads((folder / CONFIG).read_text())
    for name, value in parts.items():
        content["model"]["decoder"][name] = value
    (folder / CONFIG).write_text(json.dumps(content))


def test_the_decoder_is_fused_and_everything_else_kept(source: Path, tmp_path: Path):
    target, feeds = tmp_path / "fused", genai_feeds([1, 2, 3])
    expected = session(str(source / "model.onnx"), optimised=True, accuracy_level=0)
    report = fuse_folder(source, target)
    assert len(report.fired) == 1
    assert {path.name for path in target.iterdir()} == {
        CONFIG, "model.onnx", "model.onnx.data", "tokenizer.json",
    }  # fmt: skip
    assert json.loads((target / CONFIG).read_text()) == json.loads(
        (source / CONFIG).read_text()
    )
    (found,) = run(str(target / "model.onnx"), feeds)[:1]
    np.testing.assert_allclose(found, expected.run(["logits"], feeds)[0], rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "level"),
    [({}, 4), ({LEVEL: "1"}, 1), ({"graph_optimization_level": "ORT_DISABLE_ALL"}, 0)],
)
def test_the_level_is_that_of_the_sessions(options, level, source: Path, tmp_path: Path):
    change(source, session_options=options)
    fuse_folder(source, tmp_path / "fused")
    proto = onnx.load(tmp_path / "fused" / "model.onnx", load_external_data=False)
    (node,) = (node for node in proto.graph.node if node.op_type == "MatMulNBits")
    given = {item.name: item.i for item in node.attribute}
    assert given.get("accuracy_level", 0) == level


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            {"session_options": {"provider_options": [{"cuda": {}}]}},
            "provider is cuda, not the",
        ),
        ({"pipeline": [{}]}, "describes a pipeline, not one decoder"),
    ],
)
def test_another_folder_is_refused(parts, message, source: Path, tmp_path: Path):
    change(source, **parts)
    with pytest.raises(ValueError, match=message):
        fuse_folder(source, tmp_path / "fused")
    assert not (tmp_path / "fused").exists()
    change(source, session_options={"provider_options": [{"cpu": {}}]}, pipeline=[])
    fuse_folder(source, tmp_path / "fused")
