# SPDX-License-Identifier: MIT
"""Sequences, optionals and maps are no tensors, whatever they hold."""

import onnx
import onnx.parser
import onnxruntime as ort
import pytest

import ortplugins
from session_options.registry import BUILTIN_PASSES, find

PASSES = [name for name in BUILTIN_PASSES if name != "weight_only_quantization"]
MODELS = {
    "erased in a branch": """(seq(float[a, b]) s, bool c) => (int64 y) <int64 zero = {0}> {
        y = If (c) <
            then_branch = t () => (int64 n1) {
                less = SequenceErase(s, zero)
                same = Identity(less)
                n1 = SequenceLength(same)
            },
            else_branch = e () => (int64 n2) { n2 = SequenceLength(s) }>
        }""",
    "made empty": """(float[a, b] x) => (float[c, d] y) {
        none = SequenceEmpty<dtype = 1>()
        one = SequenceInsert(none, x)
        y = ConcatFromSequence<axis = 0>(one)
        }""",
    "an optional": """(optional(float[a, b]) attention_mask) => (float[c, d] y) {
        x = OptionalGetElement(attention_mask)
        y = Relu(x)
        }""",
    "a mask of each text": """(seq(int64[batch, n]) attention_mask, float[batch, n, 4] x)
        => (float[batch, n, 4] y) <int64 zero = {0}, int64[1] last = {2}> {
        one = SequenceAt(attention_mask, zero)
        number = Cast<to = 1>(one)
        wide = Unsqueeze(number, last)
        y = Mul(x, wide)
        }""",
    "a map": """(int64[batch, n] attention_mask, float[batch, k] x) => (y) {
        y = ai.onnx.ml.ZipMap<classlabels_int64s = [1, 2, 3]>(x)
        }""",
}


def model_of(text: str) -> onnx.ModelProto:
    header = '<ir_version: 8, opset_import: ["" : 17, "ai.onnx.ml" : 1]>'
    model = onnx.parser.parse_model(f"{header} g {text}")
    if "ZipMap" in text:
        kind = model.graph.output[0].type.sequence_type.elem_type.map_type
        kind.key_type = onnx.TensorProto.INT64
        kind.value_type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    return model


def opened(model: onnx.ModelProto) -> list[tuple[str, str, list[int | str | None]]]:
    session = ort.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return [(v.name, v.type, v.shape) for v in session.get_inputs() + session.get_outputs()]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("passes", [[name] for name in PASSES] + [PASSES], ids=lambda x: x[-1])
@pytest.mark.filterwarnings("error::ortplugins.OrtpluginsWarning")
def test_what_holds_tensors_is_none(name, passes):
    model = model_of(MODELS[name])
    made = [find(each)() for each in passes]
    assert opened(ortplugins.optimize(model, passes=made).model) == opened(model)
