# SPDX-License-Identifier: MIT
"""Texts, sequences and optionals go through every pass as they are, without a warning."""

import warnings

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from builders.same_numbers import session
from builders.text_models import proto_of
from onnx import helper

import ortplugins
from ortplugins.errors import OrtpluginsWarning
from session_options.registry import BUILTIN_PASSES, find

T = onnx.TensorProto
X = {"x": np.ones((2, 3), np.float32)}
TEXTS = {"words": np.array(["a", "b", "c"], object)}


def labels() -> onnx.ModelProto:
    texts = helper.make_tensor("keys", T.STRING, [2], [b"a", b"b"])
    numbers = helper.make_tensor("values", T.INT64, [2], [1, 2])
    other = helper.make_tensor("other", T.INT64, [1], [0])
    node = {"domain": "ai.onnx.ml", "keys_tensor": texts, "values_tensor": numbers}
    nodes = [
        helper.make_node("LabelEncoder", ["words"], ["y"], default_tensor=other, **node),
        helper.make_node("Shape", ["y"], ["n"]),
    ]
    ends = (
        [helper.make_tensor_value_info("words", T.STRING, ["n"])],
        [
            helper.make_tensor_value_info(name, T.INT64, [size])
            for name, size in (("y", "n"), ("n", 1))
        ],
    )
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("ai.onnx.ml", 4)]
    return helper.make_model(
        helper.make_graph(nodes, "labels", *ends), opset_imports=imports, ir_version=10
    )


BODIES = {
    "a sequence that a branch shortens": """
        parts = SplitToSequence<axis = 0>(x) n = SequenceLength(parts) some = Greater(n, one)
        y = If(some) <then_branch = t () => (int64 a) {
                less = SequenceErase(parts, zero) same = Identity(less)
                a = SequenceLength(same) },
            else_branch = e () => (int64 b) { b = SequenceLength(parts) }>""",
    "an empty sequence of a type": """
        none = SequenceEmpty<dtype = 1>() one_part = SequenceInsert(none, x)
        first = SequenceAt(one_part, zero) shape = Shape(first) y = Gather(shape, one)""",
    "an optional": """
        held = Optional(x) same = Identity(held) is = OptionalHasElement(same)
        inner = OptionalGetElement(same) r = Relu(inner) s = Size(r) y = Add(s, zero)""",
    "a loop over a sequence": """
        none = SequenceEmpty<dtype = 1>() always = Greater(one, zero)
        all = Loop(two, always, none) <body = b (int64 i, bool go, seq(float[A, B]) held)
            => (bool on, seq(float[A, B]) more) {
            on = Identity(go) more = SequenceInsert(held, x) }>
        joined = ConcatFromSequence<axis = 0>(all) t = Transpose(joined) s = Shape(t)
        y = Gather(s, one)""",
}
MODELS = {
    name: proto_of(f"""g (float[A, B] x) => (int64 y)
        <int64 zero = {{0}}, int64 one = {{1}}, int64 two = {{2}}> {{ {nodes} }}""", opset=18)
    for name, nodes in BODIES.items()
} | {"labels of texts": labels()}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_every_pass_leaves_other_types(name: str, tmp_path):
    model = MODELS[name]
    feeds = {v.name: (X | TEXTS)[v.name] for v in model.graph.input}
    expected = session(model).run(None, feeds)
    for item in BUILTIN_PASSES:
        options = ort.SessionOptions()
        ortplugins.configure(options, find(item)(), cache_dir=str(tmp_path))
        with warnings.catch_warnings():
            warnings.simplefilter("error", OrtpluginsWarning)
            written = ortplugins.optimize(model, passes=[item]).model
            started = ortplugins.InferenceSession(
                model.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
        for opened in (session(written), started):
            for one, other in zip(opened.run(None, feeds), expected, strict=True):
                np.testing.assert_array_equal(one, other)
