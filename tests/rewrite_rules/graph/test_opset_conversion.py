# SPDX-License-Identifier: MIT
"""A model is converted to a newer opset as a whole, or stays what it was."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from builders.dequantized_models import assert_same_outputs
from builders.same_numbers import session
from builders.text_models import model_of, normal

from rewrite_rules.graph.opset_conversion import convert_opset

X = {"x": normal(2, 8, 4)}


@pytest.mark.parametrize("opset", [9, 13, 17, 18, 21])
def test_numbers_stay_in_subgraphs_too(opset: int, caplog: pytest.LogCaptureFixture):
    text = """g (float[2, 8, 4] x) => (float[2, 8] y) <bool more = {1}> {
        parts = If (more)
            <then_branch = t () => (a) { a = Softmax<axis = 2>(x) },
             else_branch = e () => (b) { b = Relu(x) }>
        y = ReduceMean<axes = [2], keepdims = 0>(parts) }"""
    if opset >= 18:
        text = text.replace("<axes = [2], keepdims", "<keepdims").replace(
            "(parts)", "(parts, last)"
        )
        text = text.replace("{1}>", "{1}, int64[1] last = {2}>")
    model, given = (model_of(text, opset=opset, ir_version=8) for _ in range(2))
    assert convert_opset(model, 23) == ""
    assert model.opset_imports[""] == 23
    assert not caplog.records
    assert_same_outputs(model, ir.to_proto(given), X)


MOVES = {
    "Transpose": "y = Transpose<perm = [1, 0]>(d)",
    "Slice": "y = Slice(d, one, two, one)",
    "two": "t = Transpose<perm = [1, 0]>(d) y = Unsqueeze(t, one)",
    "two readers": "a = Reshape(d, minus) b = Reshape(d, minus) y = Sub(a, b)",
    "beside others": "t = Transpose<perm = [1, 0]>(d) p = MatMul(d, t) y = Squeeze(p)",
    "MaxPool": "i = Unsqueeze(d, none) y = MaxPool<kernel_shape = [2], strides = [2]>(i)",
    "in a branch": """y = If(yes) <then_branch = t () => (a) { a = Transpose(d) },
        else_branch = e () => (b) { b = Relu(d) }>""",
}


@pytest.mark.parametrize("nodes", MOVES.values(), ids=MOVES)
def test_int8_codes_are_moved_themselves(nodes: str):
    """onnxruntime 1.32 opens no such model of opset 21 (``int8_moves`` of reproduce.py)."""
    text = f"""g (float[8, 4] x) => (float y) <float s = {{0.05}}, int8 z = {{3}},
        int64[1] one = {{1}}, int64[1] two = {{2}}, int64[1] minus = {{-1}},
        int64[1] none = {{0}}, bool yes = {{1}}> {{
        q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) {nodes} }}"""
    model, given = (model_of(text, opset=17, ir_version=8) for _ in range(2))
    for each in (model, given):
        each.graph.outputs[0].shape = None
    assert convert_opset(model, 23) == ""
    x = {"x": normal(8, 4)}
    (found,) = session(model, optimised=True).run(None, x)
    np.testing.assert_array_equal(found, session(given).run(None, x)[0])


@pytest.mark.parametrize("opset", [13, 15, 17])
@pytest.mark.parametrize(
    "nodes",
    [
        "a, b = Split(x) y = Sub(a, b)",
        """a, b = Split(x, "") y = Sub(a, b)""",
        "a, b = Split<axis = 1>(x, parts) y = ReduceSumSquare<axes = [1, 2]>(b)",
        "y = ReduceMax(x)",
        "a = ReduceMin<axes = [-1], keepdims = 0>(x) y = ReduceProd<axes = [-1]>(a)",
        "y = BatchNormalization(x, eight, eight, eight, eight)",
        "i = Reshape(x, image) y = RoiAlign<output_height = 2>(i, boxes, where)",
    ],
)
def test_operators_keep_what_they_meant(nodes: str, opset: int):
    text = f"""g (float[2, 8, 4] x) => (float y) <int64[2] parts = {{3, 5}},
        int64[4] image = {{1, 4, 4, 4}}, float[1, 4] boxes = {{0, 0, 3, 3}},
        int64[1] where = {{0}}, float[8] eight = {{1, 2, 3, 4, 5, 6, 7, 8}}> {{ {nodes} }}"""
    model, given = (model_of(text, opset=opset, ir_version=8) for _ in range(2))
    for each in (model, given):
        each.graph.outputs[0].shape = None
    for node in model.graph:
        node.metadata_props["scope"] = "encoder"
    assert convert_opset(model, 21 if "RoiAlign" in nodes else 23) == ""
    # What replaces another node gets its metadata, a constant in front of it none.
    made = [node for node in model.graph if node.op_type != "Constant"]
    assert {node.metadata_props.get("scope") for node in made} == {"encoder"}
    assert_same_outputs(model, ir.to_proto(given), X)


OWN = """<ir_version: 8, opset_import: ["": {0}, "own": 1]>
g (float[2, 8, 4] x) => (float[2, 8, 4] y) {{ y = own.step(x) }}
<domain: "own", opset_import: ["": {1}]> step (x) => (y) {{ y = Relu(x) }}"""
# The converter goes on behind a node that it knows nothing of, and calls all converted.
UNKNOWN = """<ir_version: 10, opset_import: ["": 18]>
g (float x) => (float[2, 8, 4] y) <float[2] one = {1, 1}> {
    made = Identity(x) z = GroupNormalization<num_groups = 2>(made, one, one) y = Relu(z) }"""

ONE = """<ir_version: 8, opset_import: ["": {}]> g ({}{} x) => (float y) {{ {}(x) }}"""
KIND = "float", "[2, 8, 4]"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (OWN.format(17, 13), "imports opset 13"),
        (UNKNOWN, "Missing required shape"),
        (
            ONE.format(17, *KIND, "y = RandomNormalLike"),
            "onnxruntime has no kernel for RandomNormalLike since opset 22",
        ),
        # A function of RandomUniformLike.
        (ONE.format(21, *KIND, "y = Bernoulli"), "no kernel for Bernoulli since opset 22"),
        # ONNX's converter leaves these as they are.
        (ONE.format(12, *KIND, "y = Hardmax"), "misread Hardmax 'y' of opset 12"),
        (ONE.format(10, *KIND, "y = Resize"), "misread Resize 'y' of opset 10"),
        (ONE.format(9, *KIND, "y = Upsample"), "misread Upsample 'y' of opset 9"),
        (
            ONE.format(11, *KIND, "dropped, y = Dropout"),
            "misread Dropout 'dropped' of opset 11",
        ),
        # A float32 beside other floats.
        (ONE.format(10, "float16", "[2]", "y = Clip<max = 1.0>"), "misread Clip 'y'"),
        (ONE.format(10, "double", "[2]", "y = Pad<pads = [1, 1]>"), "misread Pad 'y'"),
        # Scales are repeated by channels that are not known.
        (ONE.format(18, "float", "[N, C]", "y = GroupNormalization"), "misread GroupNorm"),
        (ONE.format(17, *KIND, "y = Own"), ""),
    ],
)
def test_what_no_converter_takes_stays(text: str, reason: str):
    model = ir.from_proto(onnx.parser.parse_model(text))
    for value in model.graph.inputs:
        value.shape = None if "Missing" in reason else value.shape
    before = ir.to_proto(model).SerializeToString()
    found = convert_opset(model, 23)
    assert found
    assert reason in found
    assert ir.to_proto(model).SerializeToString() == before


@pytest.mark.parametrize("opset", [17, 23])
def test_functions_are_inlined(opset: int):
    model = ir.from_proto(onnx.parser.parse_model(OWN.format(opset, opset)))
    assert convert_opset(model, 23) == ""
    assert not model.functions
    np.testing.assert_array_equal([node.op_type for node in model.graph], ["Relu"])
