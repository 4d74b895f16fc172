# SPDX-License-Identifier: MIT
"""DequantizeLinear + MatMul -> MatMulNBits: names, options, refusals.

The layouts and their numbers are those of ``test_layout_matrix.py``.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir
import pytest
from builders.dequantized_models import (
    DequantizedMatMul,
    make_model,
    op_types,
    relative_error,
    run,
)
from builders.layout_matrix import LayoutCase, Quantized
from hypothesis import given, settings
from hypothesis import strategies as st

from rewrite_rules.dq_matmulnbits_fusion.fuse import FusionOptions, fuse
from rewrite_rules.remarks import PassContext, Remark, Remarks

EXACT = FusionOptions(accuracy_level=0, slow_kernels="fuse")
LAYOUTS = ["axis0", "transposed"]
FOUR_AND_EIGHT_BITS = ["int4", "uint4", "int8", "uint8"]


def apply(
    model: ir.Model,
    options: FusionOptions = EXACT,
    providers: tuple[str, ...] = ("CPUExecutionProvider",),
) -> list[Remark]:
    remarks = Remarks("dq_matmulnbits_fusion")
    fuse(model, options, PassContext(remarks, providers))
    # What is noted on the model as a whole has tests of its own.
    return [remark for remark in remarks if remark.node != "model"]


def only(remarks: list[Remark]) -> Remark:
    (remark,) = remarks
    return remark


# Before and after.


@given(
    k=st.integers(1, 150),
    n=st.integers(1, 40),
    block_size=st.sampled_from([16, 32, 64, 128, 256]),
    storage=st.sampled_from([*FOUR_AND_EIGHT_BITS, "int2", "uint2"]),
    layout=st.sampled_from(LAYOUTS),
    zero_points=st.sampled_from(["none", "random", "default"]),
    scale_dtype=st.sampled_from([np.float32, np.float16]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=150, deadline=None)
def test_any_shape_gives_the_numbers_of_the_formula(scale_dtype: type, **shape: object):
    case = DequantizedMatMul(**shape, scale_dtype=scale_dtype)  # type: ignore[arg-type]
    model = case.model()
    feed = case.feed()
    assert only(apply(model)).outcome == "fired"
    (y,) = run(model, {"x": feed})
    # float16 activations are converted at the kernel's edge: half a unit of 11 bits.
    bound = 1e-5 if scale_dtype is np.float32 else 1e-3
    assert relative_error(y, case.reference(feed)) <= bound


def test_node_keeps_its_name_and_the_output_its_name_and_type():
    model = DequantizedMatMul(64, 8, 32).model()
    apply(model)
    (node,) = model.graph
    assert (node.domain, node.name) == ("com.microsoft", "matmul")
    assert (model.graph.outputs[0].name, model.graph.outputs[0].dtype) == (
        "y",
        ir.DataType.FLOAT,
    )


def test_attributes():
    model = DequantizedMatMul(70, 8, 32).model()
    apply(model, FusionOptions(accuracy_level=4, slow_kernels="fuse"))
    (node,) = model.graph
    attributes = {name: attr.as_int() for name, attr in node.attributes.items()}
    assert attributes == {"K": 70, "N": 8, "bits": 4, "block_size": 32, "accuracy_level": 4}


def test_only_what_is_used_stays():
    model = DequantizedMatMul(64, 8, 32, "uint4", zero_points="random").model()
    apply(model)
    assert set(model.graph.initializers) == {
        "w.T.nbits32",
        "w_scale.T.nbits",
        "w_zero_point.T.nbits",
    }


def test_transposed_scales_are_used_as_they_are():
    model = DequantizedMatMul(64, 8, 32, "int4", "transposed").model()
    apply(model)
    assert "w_scale" in model.graph.initializers


# Weights without a fast kernel.


@pytest.mark.parametrize("zero_points", ["none", "random"])
@pytest.mark.parametrize("storage", ["int8", "uint8", "int2", "uint2"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_slow_kernels_become_float_bit_for_bit(layout: str, storage: str, zero_points: str):
    case = DequantizedMatMul(70, 9, 32, storage, layout, zero_points)
    model, feed = case.model(), case.feed()
    (expected,) = run(case.model(), {"x": feed})
    remark = only(apply(model, FusionOptions(accuracy_level=0, slow_kernels="float")))
    assert op_types(model) == ["MatMul"]
    assert "fast CPU kernel at accuracy_level 4 only" in remark.reason
    (y,) = run(model, {"x": feed})
    np.testing.assert_array_equal(y, expected)


def test_eight_bits_fuse_at_accuracy_level_4():
    model = DequantizedMatMul(64, 8, 32, "int8").model()
    apply(model, FusionOptions(accuracy_level=4, slow_kernels="float"))
    assert op_types(model) == ["MatMulNBits"]


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
def test_small_tables_become_float(
    rows: int, storage: str, options: dict[str, object], expected: list[str]
):
    """A batch reads each row several times over; at 64 columns 4 MB are 16,384 rows."""
    weights, ids = Quantized((rows, 64), storage, 1, 32), {"ids": np.int64([0, 39, 7])}
    text = "W = $w  y = Gather (W, ids)"
    model = LayoutCase("table", text, weights, None, inputs=ids).build()
    apply(model, FusionOptions(**{"accuracy_level": 0, "slow_kernels": "float", **options}))
    assert op_types(model) == expected


@pytest.mark.parametrize(
    ("k", "n", "options", "expected"),
    [
        (64, 24, {}, ["MatMul"]),
        (64, 32, {}, ["MatMulNBits"]),
        (64, 24, {"accuracy_level": 4}, ["MatMulNBits"]),
        (64, 24, {"slow_kernels": "fuse"}, ["MatMulNBits"]),
        (65536, 24, {}, ["MatMulNBits"]),
    ],
)
def test_small_weights_become_float_where_n_is_no_multiple_of_16(
    k: int, n: int, options: dict[str, object], expected: list[str]
):
    """The kernel multiplies with what lies in memory behind the last column, denormals say."""
    model = DequantizedMatMul(k, n, 32, "uint4").model()
    apply(model, FusionOptions(**{"accuracy_level": 0, "slow_kernels": "float", **options}))
    assert op_types(model) == expected


def test_slow_kernels_keep():
    model = DequantizedMatMul(64, 8, 32, "int8").model()
    remark = only(apply(model, FusionOptions(accuracy_level=0, slow_kernels="keep")))
    assert remark.outcome == "refused"
    assert op_types(model) == ["DequantizeLinear", "MatMul"]


# Refusals, each by its own words, with the graph as it was.


def refused(model: ir.Model, **kwargs: object) -> str:
    before = ir.to_proto(model).SerializeToString()
    remarks = apply(model, **kwargs)  # type: ignore[arg-type]
    assert [r.outcome for r in remarks] == ["refused"], remarks
    assert ir.to_proto(model).SerializeToString() == before
    return str(remarks[0])


CASE = DequantizedMatMul(64, 8, 32, "uint4", zero_points="random")


def test_refuses_a_weight_that_a_caller_may_override():
    model = CASE.model()
    model.graph.inputs.append(model.graph.initializers["w"])
    assert "weight 'w' is a graph input: a caller may feed another" in refused(model)


def test_refuses_scales_that_a_caller_may_override():
    model = CASE.model()
    model.graph.inputs.append(model.graph.initializers["w_scale"])
    assert "scale 'w_scale' is a graph input" in refused(model)


def test_refuses_a_scale_that_is_computed():
    model = CASE.model()
    model.graph.inputs.append(ir.val("s", ir.DataType.FLOAT, [2, 8]))
    dq = model.graph.node(0)
    dq.replace_input_with(1, model.graph.inputs[-1])
    del model.graph.initializers["w_scale"]
    assert "scale 's' is a graph input" in refused(model)


def test_refuses_blocks_across_the_output_columns():
    model = dataclasses.replace(CASE, k=64, n=64, block_size=32).model()
    dq = model.graph.node(0)
    dq.attributes["axis"] = ir.AttrInt64("axis", 1)
    # On a square weight of 2 blocks only the shape of the scales gives it away.
    assert "in blocks of 32 on axis 1 needs [64, 2]" in refused(model)


def test_refuses_a_scale_for_each_index_of_k():
    model = dataclasses.replace(CASE, zero_points="none").model()
    scale = model.graph.initializers["w_scale"]
    scale.const_value = ir.tensor(np.ones(64, np.float32), name="w_scale")
    dq = model.graph.node(0)
    dq.attributes["axis"] = ir.AttrInt64("axis", 0)
    del dq.attributes["block_size"]
    assert "with a scale for each index of K, has no kernel" in refused(model)


def test_refuses_a_transpose_that_does_not_transpose():
    # The blocks run along N then.
    model = dataclasses.replace(CASE, layout="transposed", k=32, n=32).model()
    model.graph.node(1).attributes["perm"] = ir.AttrInt64s("perm", [0, 1])
    assert "with a scale for each index of K, has no kernel" in refused(model)


def test_refuses_providers_that_read_qdq_themselves():
    message = refused(CASE.model(), providers=("QNNExecutionProvider", "CPUExecutionProvider"))
    assert "QNNExecutionProvider has no MatMulNBits kernel" in message


def test_refuses_a_left_side_whose_other_operand_has_no_known_rank():
    case = dataclasses.replace(CASE, layout="transposed", k=64, n=8)
    values = case.initializers()
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT))
    dq = case.dequantize(values)[0]
    node = ir.node("MatMul", [dq.outputs[0], x], name="left")
    model = make_model([x], [dq, node], values, {"y": node.outputs[0]})
    assert "rank is unknown: infer shapes first" in refused(model)


def test_names_the_consumer_that_no_rule_matches():
    values, x = CASE.initializers(), ir.val("x", ir.DataType.FLOAT, [64, 8])
    (dq,) = CASE.dequantize(values)
    node = ir.node("Mul", [x, dq.outputs[0]], name="mul")
    model = make_model([x], [dq, node], values, {"y": node.outputs[0]})
    message = refused(model)
    assert message.startswith("dq: it feeds input 1 of Mul 'mul'")
    assert message.endswith("it runs at every inference")


def test_refuses_codes_that_the_graph_makes_from_floats():
    values, x = CASE.initializers(), CASE.input()
    _, scale, zero_point = values
    floats = ir.tensor(CASE.weight().astype(np.float32), name="floats")
    weight = ir.Value(
        name="floats",
        const_value=floats,
        shape=floats.shape,
        type=ir.TensorType(ir.DataType.FLOAT),
    )
    attributes = {"axis": 0, "block_size": 32}
    quantize = ir.node("QuantizeLinear", [weight, scale, zero_point], attributes, name="q")
    (dq,) = CASE.dequantize([quantize.outputs[0], scale, zero_point])
    node = ir.node("MatMul", [x, dq.outputs[0]], name="matmul")
    model = make_model(
        [x], [quantize, dq, node], [weight, *values[1:]], {"y": node.outputs[0]}
    )
    message = refused(model)
    assert "dq: its codes are made by QuantizeLinear 'q' from a constant" in message
    assert "fold constants first" in message


def test_a_dequantized_activation_is_no_candidate():
    x = ir.val("x", ir.DataType.UINT8, [4])
    scale = ir.Value(
        name="s",
        const_value=ir.tensor(np.float32(0.5), name="s"),
        shape=ir.Shape([]),
        type=ir.TensorType(ir.DataType.FLOAT),
    )
    node = ir.node("DequantizeLinear", [x, scale])
    model = make_model([x], [node], [scale], {"y": node.outputs[0]})
    assert apply(model) == []


def test_fusing_twice_changes_nothing_more():
    model = CASE.model()
    apply(model)
    before = ir.to_proto(model).SerializeToString()
    assert apply(model) == []
    assert ir.to_proto(model).SerializeToString() == before
