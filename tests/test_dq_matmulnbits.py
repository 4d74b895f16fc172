# SPDX-License-Identifier: MIT
"""DequantizeLinear + MatMul -> MatMulNBits: names, options, refusals.

The layouts and their numbers are those of ``test_layout_matrix.py``.
"""

import re

import numpy as np
import onnx_ir as ir
import pytest
from builders.dequantized_models import (
    DequantizedMatMul,
    assert_same_outputs,
    fuse_weights,
    op_types,
    run,
)
from builders.layout_matrix import LayoutCase, Quantized
from builders.text_models import text_model

from rewrite_rules.dq_matmulnbits_fusion.fuse import FusionOptions

FLOAT = {"accuracy_level": 0, "slow_kernels": "float"}


def test_the_node_has_the_names_types_and_attributes_of_the_product():
    model = DequantizedMatMul(70, 8, 32, "uint4", zero_points="random").model()
    fuse_weights(model, FusionOptions(accuracy_level=4, slow_kernels="fuse"))
    (node,) = model.graph
    assert (node.domain, node.name) == ("com.microsoft", "matmul")
    output = model.graph.outputs[0]
    assert (output.name, output.dtype) == ("y", ir.DataType.FLOAT)
    attributes = {name: attr.as_int() for name, attr in node.attributes.items()}
    assert attributes == {"K": 70, "N": 8, "bits": 4, "block_size": 32, "accuracy_level": 4}
    # What was packed anew is all that stays.
    codes, scales, zero_points = ("w.T.nbits32", "w_scale.T.nbits", "w_zero_point.T.nbits")
    assert set(model.graph.initializers) == {codes, scales, zero_points}


def test_transposed_scales_are_used_as_they_are():
    model = DequantizedMatMul(64, 8, 32, "int4", "transposed").model()
    fuse_weights(model)
    assert "w_scale" in model.graph.initializers


@pytest.mark.parametrize("zero_points", ["none", "random"])
@pytest.mark.parametrize("storage", ["int8", "uint8", "int2", "uint2"])
@pytest.mark.parametrize("layout", ["axis0", "transposed"])
def test_slow_kernels_become_float_bit_for_bit(layout, storage, zero_points):
    case = DequantizedMatMul(70, 9, 32, storage, layout, zero_points)
    model, feed = case.model(), case.feed()
    (expected,) = run(case.model(), {"x": feed})
    (remark,) = fuse_weights(model, FusionOptions(**FLOAT))
    assert op_types(model) == ["MatMul"]
    assert "fast CPU kernel at accuracy_level 4 only" in remark.reason
    (y,) = run(model, {"x": feed})
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize(
    ("rows", "storage", "options", "expected"),
    [
        (512, "uint4", {}, ["Gather"]),
        (512, "uint4", {"float_limit_mb": 0}, ["GatherBlockQuantized"]),
        (512, "uint4", {"slow_kernels": "fuse"}, ["GatherBlockQuantized"]),
        (512, "uint4", {"slow_kernels": "keep"}, ["GatherBlockQuantized"]),
        (512, "uint8", {}, ["GatherBlockQuantized"]),
        (17000, "uint4", {}, ["GatherBlockQuantized"]),
    ],
)
def test_small_tables_become_float(rows, storage, options, expected):
    """A batch reads each row several times over; at 64 columns 4 MB are 16,384 rows."""
    weights, ids = Quantized((rows, 64), storage, 1, 32), {"ids": np.int64([0, 39, 7])}
    text = "W = $w  y = Gather (W, ids)"
    model = LayoutCase("table", text, weights, None, inputs=ids).build()
    fuse_weights(model, FusionOptions(**{**FLOAT, **options}))
    assert op_types(model) == expected


KEPT = ["DequantizeLinear", "MatMul"]


@pytest.mark.parametrize(
    ("k", "n", "storage", "options", "outcome", "expected"),
    [
        # The kernel multiplies with what lies in memory behind the last column, denormals say,
        # where N is not a multiple of 16.
        (64, 24, "uint4", {}, "fired", ["MatMul"]),
        (64, 32, "uint4", {}, "fired", ["MatMulNBits"]),
        (64, 24, "uint4", {"accuracy_level": 4}, "fired", ["MatMulNBits"]),
        (64, 24, "uint4", {"slow_kernels": "fuse"}, "fired", ["MatMulNBits"]),
        (65536, 24, "uint4", {}, "fired", ["MatMulNBits"]),
        # 8 bits have a fast kernel at level 4.
        (64, 8, "int8", {"accuracy_level": 4}, "fired", ["MatMulNBits"]),
        (64, 8, "int8", {"slow_kernels": "keep"}, "refused", KEPT),
    ],
)
def test_a_slow_kernel_is_taken_where_nothing_is_faster(
    k, n, storage, options, outcome, expected
):
    model = DequantizedMatMul(k, n, 32, storage).model()
    (remark,) = fuse_weights(model, FusionOptions(**{**FLOAT, **options}))
    assert (remark.outcome, op_types(model)) == (outcome, expected)


def refused(model: ir.Model, **kwargs: object) -> str:
    before = ir.to_proto(model).SerializeToString()
    remarks = fuse_weights(model, **kwargs)  # type: ignore[arg-type]
    assert [r.outcome for r in remarks] == ["refused"], remarks
    assert ir.to_proto(model).SerializeToString() == before
    return str(remarks[0])


CASE = DequantizedMatMul(64, 8, 32, "uint4", zero_points="random")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("w", "weight 'w' is a graph input: a caller may feed another"),
        ("w_scale", "scale 'w_scale' is a graph input"),
    ],
)
@pytest.mark.parametrize("default", [True, False])
def test_refuses_what_a_caller_may_override(name, words, default):
    model = CASE.model()
    model.graph.inputs.append(model.graph.initializers[name])
    if not default:
        del model.graph.initializers[name]
    assert words in refused(model)


def test_refuses_providers_that_read_qdq_themselves():
    message = refused(CASE.model(), providers=("QNNExecutionProvider", "CPUExecutionProvider"))
    assert "QNNExecutionProvider has no MatMulNBits kernel" in message


DQ = "[dq] d = DequantizeLinear <axis = 1, block_size = 32> (w, s, z)"
BIASED = {
    "one number for each column": ("[mm] m = MatMul (x, dq_out) [add] y = Add (m, b)", (8,)),
    "one number for each row": ("[mm] m = MatMul (x, dq_out) [add] y = Add (m, b)", (8, 1)),
    "one of each row of a Gemm": ("[gemm] y = Gemm (x, dq_out, b)", (8, 1)),
    "a whole matrix": ("[mm] m = MatMul (x, dq_out) [add] y = Add (b, m)", (8, 8)),
    "another axis": ("[mm] m = MatMul (x, dq_out) [add] y = Add (m, b)", (8, 1, 1)),
}


@pytest.mark.parametrize("name", BIASED)
def test_only_what_is_the_same_for_all_rows_is_a_bias(name):
    text, shape = BIASED[name]
    case = DequantizedMatMul(64, 8, 32, "uint4")
    model = case.model_of(text)
    numbers = np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape)
    bias = ir.tensor(numbers, name="b")
    model.graph.register_initializer(ir.Value(name="b", const_value=bias))
    read = next(value for node in model.graph for value in node.inputs if value.name == "b")
    read.replace_all_uses_with(model.graph.initializers["b"])
    expected = model.clone()
    fuse_weights(model, FusionOptions(accuracy_level=0, slow_kernels="fuse"))
    assert "MatMulNBits" in op_types(model)
    assert ("Add" in op_types(model)) == (shape != (8,))
    assert_same_outputs(model, expected, {"x": case.feed(8)}, rtol=1e-5, atol=1e-3)


REFUSALS = {
    "a zero point of int32 codes": (
        "[dq] d = DequantizeLinear (wide, one, offset)  [mm] y = MatMul (x, d)",
        [8, 8],
        "zero point 'offset' of int32 codes is not 0",
    ),
    "a left side whose other operand has no known rank": (
        f"{DQ}  [left] y = MatMul (d, x)",
        None,
        "rank is unknown: infer shapes first",
    ),
    "a consumer that no rule matches": (
        f"{DQ}  [mul] y = Mul (x, d)",
        [8, 64],
        "it feeds input 1 of Mul 'mul'",
    ),
    "codes that the graph makes from floats": (
        f"""[q] w = QuantizeLinear <axis = 1, block_size = 32> (floats, s, z)
        {DQ}  [left] y = MatMul (d, x)""",
        [64, "n"],
        "codes are made by QuantizeLinear 'q' from a constant",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_names_why_it_refuses(name):
    text, shape, words = REFUSALS[name]
    weight = "floats" if "floats" in text else "w"
    constants = {
        weight: np.ones((8, 64), np.float32 if weight == "floats" else np.uint8),
        "s": np.ones((8, 2), np.float32),
        "z": np.zeros((8, 2), np.uint8),
        "wide": np.ones((8, 64), np.int32),
        "one": np.float32(0.5),
        "offset": np.int32(3),
    }
    named = set(re.findall(r"\w+", text))
    constants = {key: array for key, array in constants.items() if key in named}
    assert words in refused(ir.from_proto(text_model(text, constants, {"x": (1, shape)})))


def test_a_dequantized_activation_is_no_candidate():
    inputs = {"x": (2, [4])}
    model = text_model("y = DequantizeLinear (x, s)", {"s": np.float32(0.5)}, inputs)
    assert fuse_weights(ir.from_proto(model)) == []


def test_fusing_twice_changes_nothing_more():
    model = CASE.model()
    fuse_weights(model)
    before = ir.to_proto(model)
    assert fuse_weights(model) == []
    assert ir.to_proto(model) == before
