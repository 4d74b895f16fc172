# SPDX-License-Identifier: MIT
"""ONNX text in, ONNX text out."""

import onnx_ir as ir
from acme_passes import DropDropout

import ortplugins

MODEL = """<ir_version: 10, opset_import: ["": 21]>
    g (float[n] x) => (float[n] y) { ["one"] d = Dropout (x)  ["two"] y = Relu (d) }"""


def test_dropout_goes():
    """What the pass is for."""
    result = ortplugins.optimize(ir.from_onnx_text(MODEL), passes=[DropDropout()])
    assert [node.op_type for node in result.model.graph] == ["Relu"]
    assert [str(remark) for remark in result.report.fired] == ["one: removed"]


def test_a_named_node_stays():
    """What its option is for."""
    result = ortplugins.optimize(
        ir.from_onnx_text(MODEL), passes=[DropDropout(keep_named="one")]
    )
    assert [node.op_type for node in result.model.graph] == ["Dropout", "Relu"]
    assert [str(remark) for remark in result.report.refused] == [
        "one: stays, as keep_named asks"
    ]
