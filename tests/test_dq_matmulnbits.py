# SPDX-License-Identifier: MIT
"""DequantizeLinear + MatMul -> MatMulNBits: before, after, and the numbers."""

from __future__ import annotations

import dataclasses

import ml_dtypes
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
    return list(remarks)


def only(remarks: list[Remark]) -> Remark:
    (remark,) = remarks
    return remark


# Before and after.


@pytest.mark.parametrize("zero_points", ["none", "random", "default"])
@pytest.mark.parametrize("storage", FOUR_AND_EIGHT_BITS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fuses_exactly(layout: str, storage: str, zero_points: str):
    case = DequantizedMatMul(64, 48, 32, storage, layout, zero_points)
    model = case.model()
    feed = case.feed()
    assert only(apply(model)).outcome == "fired"
    assert op_types(model) == ["MatMulNBits"]
    (y,) = run(model, {"x": feed})
    assert relative_error(y, case.reference(feed)) <= 1e-5


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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_signed_codes_without_zero_points_need_none(layout: str):
    model = DequantizedMatMul(64, 8, 32, "int4", layout).model()
    apply(model)
    (node,) = model.graph
    assert len(node.inputs) == 3


def test_unsigned_codes_without_zero_points_get_zeros():
    model = DequantizedMatMul(64, 8, 32, "uint4").model()
    apply(model)
    (node,) = model.graph
    assert node.inputs[3] is not None
    assert not node.inputs[3].const_value.numpy().any()


def test_zero_points_in_the_middle_are_left_out():
    model = DequantizedMatMul(64, 8, 32, "uint4", zero_points="default").model()
    apply(model)
    (node,) = model.graph
    assert len(node.inputs) == 3


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


@pytest.mark.parametrize("rank", [1, 3, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_activations_of_any_rank(layout: str, rank: int):
    case = DequantizedMatMul(64, 8, 32, layout=layout)
    model = case.model()
    shape = {1: [64], 3: ["a", "b", 64], 4: ["a", "b", "c", 64]}[rank]
    model.graph.inputs[0].shape = ir.Shape(shape)
    feed = np.random.default_rng(0).standard_normal([2] * (rank - 1) + [64]).astype(np.float32)
    apply(model)
    assert op_types(model) == ["MatMulNBits"]
    (y,) = run(model, {"x": feed})
    assert y.shape == case.reference(feed).shape
    assert relative_error(y, case.reference(feed)) <= 1e-5


# Sharing.


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_dequantize_for_two_matmuls_is_stored_once(layout: str):
    case = DequantizedMatMul(64, 8, 32, layout=layout)
    values, x = case.initializers(), case.input()
    nodes = case.dequantize(values)
    weight = nodes[-1].outputs[0]
    first = ir.node("MatMul", [x, weight], name="first")
    doubled = ir.node("Add", [x, x])
    second = ir.node("MatMul", [doubled.outputs[0], weight], name="second")
    model = make_model(
        [x],
        [*nodes, first, doubled, second],
        values,
        {"a": first.outputs[0], "b": second.outputs[0]},
    )
    feed = case.feed()
    assert [r.outcome for r in apply(model)] == ["fired", "fired"]
    assert op_types(model) == ["Add", "MatMulNBits", "MatMulNBits"]
    assert len(model.graph.initializers) == 2
    a, b = run(model, {"x": feed})
    assert relative_error(a, case.reference(feed)) <= 1e-5
    assert relative_error(b, case.reference(2 * feed)) <= 1e-5


def test_two_dequantizes_of_one_weight_are_stored_once():
    case = DequantizedMatMul(64, 8, 32, "uint4", zero_points="random")
    values, x = case.initializers(), case.input()
    nodes, outputs = [], {}
    for name in ("a", "b"):
        nodes += case.dequantize(values, f"dq_{name}")
        nodes.append(ir.node("MatMul", [x, nodes[-1].outputs[0]], name=name))
        outputs[f"y_{name}"] = nodes[-1].outputs[0]
    model = make_model([x], nodes, values, outputs)
    apply(model)
    assert op_types(model) == ["MatMulNBits", "MatMulNBits"]
    assert len(model.graph.initializers) == 3
    feed = case.feed()
    for y in run(model, {"x": feed}):
        assert relative_error(y, case.reference(feed)) <= 1e-5


def test_one_square_weight_read_both_ways():
    # The same bytes, once as [K, N] and once as [N, K]: two different weights.
    one = DequantizedMatMul(32, 32, 32, "int4", "axis0")
    x = one.input()
    codes, scale = one.initializers()
    row_scale = one.initializers("row")[1]
    row_scale.const_value = ir.tensor(row_scale.const_value.numpy().T.copy(), name="row_scale")
    row_scale.shape = ir.Shape([32, 1])
    nodes = [
        ir.node("DequantizeLinear", [codes, scale], {"axis": 0, "block_size": 32}),
        ir.node("DequantizeLinear", [codes, row_scale], {"axis": 1, "block_size": 32}),
    ]
    nodes.append(ir.node("Transpose", nodes[1].outputs, {"perm": [1, 0]}))
    nodes.append(ir.node("MatMul", [x, nodes[0].outputs[0]]))
    nodes.append(ir.node("MatMul", [x, nodes[2].outputs[0]]))
    outputs = {"a": nodes[3].outputs[0], "b": nodes[4].outputs[0]}
    model = make_model([x], nodes, [codes, scale, row_scale], outputs)
    feed = one.feed()
    expected = run(model, {"x": feed})
    apply(model)
    assert op_types(model) == ["MatMulNBits", "MatMulNBits"]
    for actual, wanted in zip(run(model, {"x": feed}), expected, strict=True):
        assert relative_error(actual, wanted) <= 1e-5


def test_a_dequantize_that_is_also_an_output_stays_for_it():
    case = DequantizedMatMul(64, 8, 32)
    values, x = case.initializers(), case.input()
    (dq,) = case.dequantize(values)
    matmul = ir.node("MatMul", [x, dq.outputs[0]], name="matmul")
    model = make_model(
        [x], [dq, matmul], values, {"w_float": dq.outputs[0], "y": matmul.outputs[0]}
    )
    remarks = apply(model)
    assert [(r.node, r.outcome) for r in remarks] == [("matmul", "fired"), ("dq", "refused")]
    assert "graph output" in remarks[1].reason
    w, y = run(model, {"x": case.feed()})
    assert relative_error(w, case.weight()) <= 1e-6
    assert relative_error(y, case.reference(case.feed())) <= 1e-5


def test_matmul_relu_chain_fuses_whole():
    # onnxruntime 1.31 leaves all but the last of these unfused.
    cases = [DequantizedMatMul(64, 64, 32, seed=i) for i in range(3)]
    x = cases[0].input()
    value, nodes, initializers = x, [], []
    for i, case in enumerate(cases):
        values = case.initializers(f"w{i}")
        initializers += values
        nodes += case.dequantize(values, f"dq{i}")
        nodes.append(ir.node("MatMul", [value, nodes[-1].outputs[0]], name=f"matmul{i}"))
        nodes.append(ir.node("Relu", nodes[-1].outputs))
        value = nodes[-1].outputs[0]
    model = make_model([x], nodes, initializers, {"y": value})
    feed = cases[0].feed()
    (expected,) = run(model, {"x": feed})
    apply(model)
    assert op_types(model).count("MatMulNBits") == 3
    (actual,) = run(model, {"x": feed}, optimised=True)
    assert relative_error(actual, expected) <= 1e-5


def test_a_name_that_the_model_has_already_is_not_overwritten():
    case = DequantizedMatMul(64, 8, 32)
    model = case.model()
    taken = ir.tensor(np.float32([1.0]), name="w.T.nbits32")
    model.graph.register_initializer(
        ir.Value(
            name=taken.name,
            const_value=taken,
            shape=taken.shape,
            type=ir.TensorType(taken.dtype),
        )
    )
    node = model.graph.node(-1)
    add = ir.node(
        "Add", [node.outputs[0], model.graph.initializers["w.T.nbits32"]], name="add"
    )
    model.graph.append(add)
    add.outputs[0].name, add.outputs[0].dtype = "z", ir.DataType.FLOAT
    model.graph.outputs[0] = add.outputs[0]
    feed = case.feed()
    apply(model)
    assert "w.T.nbits32_1" in model.graph.initializers
    (z,) = run(model, {"x": feed})
    assert relative_error(z, case.reference(feed) + 1) <= 1e-5


def test_dequantize_inside_an_if_body_and_its_weights_outside():
    case = DequantizedMatMul(64, 8, 32)
    values, x = case.initializers(), case.input()
    condition = ir.val("condition", ir.DataType.BOOL, [])

    def body(name: str) -> ir.Graph:
        nodes = case.dequantize(values, f"dq_{name}")
        nodes.append(ir.node("MatMul", [x, nodes[-1].outputs[0]], name=f"matmul_{name}"))
        output = nodes[-1].outputs[0]
        output.name, output.dtype = f"y_{name}", ir.DataType.FLOAT
        return ir.Graph([], [output], nodes=nodes, name=name)

    branches = {"then_branch": body("then"), "else_branch": body("else")}
    node = ir.node("If", [condition], branches)
    model = make_model([x, condition], [node], values, {"y": node.outputs[0]})
    assert [r.outcome for r in apply(model)] == ["fired", "fired"]
    feed = case.feed()
    (y,) = run(model, {"x": feed, "condition": np.array(True)})
    assert relative_error(y, case.reference(feed)) <= 1e-5


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


def test_refuses_blocks_without_a_kernel():
    model = dataclasses.replace(CASE, block_size=8).model()
    assert "block_size 8 of weight 'w' has no kernel" in refused(model)


@pytest.mark.parametrize("block_size", [24, 48])
def test_refuses_block_sizes_that_are_no_power_of_2(block_size: int):
    model = dataclasses.replace(CASE, block_size=block_size, k=96).model()
    assert f"block_size {block_size} of weight 'w' is no power of 2" in refused(model)


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


def test_refuses_scales_of_another_shape():
    model = CASE.model()
    scale = model.graph.initializers["w_scale"]
    scale.const_value = ir.tensor(np.ones((3, 8), np.float32), name="w_scale")
    assert (
        "has shape [3, 8]: weight 'w' of shape [64, 8] in blocks of 32 on axis 0 needs [2, 8]"
        in refused(model)
    )


def test_refuses_zero_points_of_another_type():
    model = CASE.model()
    zero_point = model.graph.initializers["w_zero_point"]
    zero_point.const_value = ir.tensor(np.zeros((2, 8), np.uint8), name="w_zero_point")
    zero_point.dtype = ir.DataType.UINT8
    assert "zero point 'w_zero_point' is uint8 but weight 'w' is uint4" in refused(model)


def test_refuses_bfloat16_scales():
    model = CASE.model()
    scale = model.graph.initializers["w_scale"]
    scale.const_value = ir.tensor(np.ones((2, 8), ml_dtypes.bfloat16), name="w_scale")
    assert "float32 or float16 scales fuse" in refused(model)


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
