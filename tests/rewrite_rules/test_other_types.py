# SPDX-License-Identifier: MIT
"""Texts, sequences, optionals and maps go through every pass as they are, and quietly."""

import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest
from builders.same_numbers import session
from builders.sessions import CPU, options
from builders.text_cases import text_cases
from onnx import helper

import ortplugins
from session_options.registry import BUILTIN_PASSES, find

T = onnx.TensorProto
FEEDS = {
    "x": np.ones((2, 3), np.float32),
    "attention_mask": np.ones((2, 3), np.int64),
}
NUMBERS = "int64 zero = {0}, int64 one = {1}, int64 two = {2}, int64[1] last = {2}"
MODELS = text_cases(Path(__file__).with_name("other_types.txt"))


def model_of(name: str) -> onnx.ModelProto:
    head, brace, nodes = MODELS[name].nodes.partition(" {")
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 18, "ai.onnx.ml": 4]>
        g {head} <{NUMBERS}>{brace}{nodes}"""
    )
    if "ZipMap" in nodes:
        kind = model.graph.output[0].type.sequence_type.elem_type.map_type
        kind.key_type, kind.value_type.tensor_type.elem_type = T.INT64, T.FLOAT
    if "words" in head:
        tables = {
            "keys_tensor": helper.make_tensor("keys", T.STRING, [2], [b"a", b"b"]),
            "values_tensor": helper.make_tensor("values", T.INT64, [2], [1, 2]),
            "default_tensor": helper.make_tensor("other", T.INT64, [1], [0]),
        }
        encoder = helper.make_node(
            "LabelEncoder", ["words"], ["y"], domain="ai.onnx.ml", **tables
        )
        model.graph.node.insert(0, encoder)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_every_pass_leaves_other_types(name: str, tmp_path):
    model, every = model_of(name), [*BUILTIN_PASSES]
    feeds = FEEDS | {"words": np.array(["a", "b", "c"], object)}
    feeds = {value.name: feeds[value.name] for value in model.graph.input}
    runs = "optional(" not in MODELS[name].nodes and "seq(int64" not in MODELS[name].nodes
    stock = session(model)
    expected = stock.run(None, feeds) if runs else []
    for passes in [*([item] for item in every), every[:-1]]:
        asked = options(*(find(item)() for item in passes), cache_dir=str(tmp_path))
        with warnings.catch_warnings():
            warnings.simplefilter("error", ortplugins.OrtpluginsWarning)
            written = ortplugins.optimize(model, passes=passes).model
            started = ortplugins.InferenceSession(model.SerializeToString(), asked, CPU)
        for opened in (session(written), started):
            ends = zip(
                opened.get_inputs() + opened.get_outputs(),
                stock.get_inputs() + stock.get_outputs(),
                strict=True,
            )
            assert all((a.name, a.type, a.shape) == (b.name, b.type, b.shape) for a, b in ends)
            for one, other in zip(
                opened.run(None, feeds) if runs else [], expected, strict=True
            ):
                np.testing.assert_array_equal(one, other)
