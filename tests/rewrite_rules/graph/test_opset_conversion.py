# SPDX-License-Identifier: MIT
"""A model is converted to a newer opset as a whole, or stays what it was."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from builders.dequantized_models import assert_same_outputs
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


OWN = """<ir_version: 8, opset_import: ["": {0}, "own": 1]>
g (float[2, 8, 4] x) => (float[2, 8, 4] y) {{ y = own.step(x) }}
<domain: "own", opset_import: ["": {1}]> step (x) => (y) {{ y = Relu(x) }}"""
# The converter goes on behind a node that it knows nothing of, and calls all converted.
UNKNOWN = """<ir_version: 10, opset_import: ["": 18]>
g (float x) => (float[2, 8, 4] y) <float[2] one = {1, 1}> {
    made = Identity(x) z = GroupNormalization<num_groups = 2>(made, one, one) y = Relu(z) }"""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (OWN.format(17, 13), "imports opset 13"),
        (UNKNOWN, "Missing required shape"),
        (
            '<ir_version: 8, opset_import: ["": 17]> g (float x) => (float y) { y = Own(x) }',
            "",
        ),
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


def test_functions_are_inlined():
    model = ir.from_proto(onnx.parser.parse_model(OWN.format(17, 17)))
    assert convert_opset(model, 23) == ""
    assert not model.functions
    np.testing.assert_array_equal([node.op_type for node in model.graph], ["Relu"])
