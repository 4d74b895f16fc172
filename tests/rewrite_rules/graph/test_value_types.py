# SPDX-License-Identifier: MIT
"""Types are derived as onnx infers them, and behind operators that it does not know."""

import onnx_ir as ir
import onnx_ir.passes.common
import pytest
from builders.exports import exported
from builders.text_models import model_of

from rewrite_rules.graph.value_types import derive_types


def types(model: ir.Model) -> dict[str | None, ir.DataType | None]:
    return {value.name: value.dtype for node in model.graph for value in node.outputs}


@pytest.mark.parametrize(
    "name", ["llama-dynamo-sdpa", "gemma3-torchscript-eager", "deberta2-torchscript-eager"]
)
def test_types_are_those_that_onnx_infers(name: str):
    model, inferred = (ir.from_proto(exported(name)) for _ in range(2))
    for node in model.graph:
        for value in node.outputs:
            value.type = value.shape = None
    onnx_ir.passes.common.ShapeInferencePass()(inferred)
    derive_types(model)
    assert types(model) == types(inferred)


def test_types_behind_operators_of_onnxruntime():
    model = model_of("""g (float16[B, 32] x, uint8[16, 1, 16] codes, float16[16] scales,
        int64[B] ids, float16[16] weight) => (y) {
        a = com.microsoft.MatMulNBits<K = 32, N = 16, block_size = 32>(x, codes, scales)
        b = com.microsoft.GatherBlockQuantized(codes, ids, scales)
        normal, , , total = com.microsoft.SkipSimplifiedLayerNormalization(a, b, weight)
        wide = Cast<to = 1>(normal)
        is_greater = Greater(wide, wide)
        size = Size(total)
        unknown = own.Step(x)
        behind = Relu(unknown)
        namesake = own.QuickGelu(wide)
        y = com.microsoft.QuickGelu(wide) }""")
    for node in model.graph:
        for value in node.outputs:
            value.type = value.shape = None
    derive_types(model)
    found = {name: dtype and dtype.name for name, dtype in types(model).items() if name}
    half = dict.fromkeys(("a", "b", "normal", "total"), "FLOAT16")
    others = {"wide": "FLOAT", "is_greater": "BOOL", "size": "INT64", "y": "FLOAT"}
    assert found == half | others | dict.fromkeys(("unknown", "behind", "namesake"))
