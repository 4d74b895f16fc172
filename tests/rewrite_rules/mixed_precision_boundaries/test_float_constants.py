# SPDX-License-Identifier: MIT
"""Constants of float regions are dequantised ahead, bit for bit, and no others."""

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from builders.dequantized_models import assert_same_outputs, run
from builders.same_numbers import session
from builders.sessions import options, start
from builders.text_models import model_of, normal, proto_of, text_model

import ortplugins
from rewrite_rules.mixed_precision_boundaries.float_region_constants import unpack_constants
from rewrite_rules.remarks import PassContext, Remarks

# A product and its bias, per channel; the activation is float.
FLOAT_REGION = """g (float[2, 3] x) => (float[2, 2] y)
<int8[3, 2] w = {1, -2, 3, 4, -128, 127}, float[2] s = {0.11, 0.5}, int8[2] z = {1, -3},
 int32[2] b = {70000, -5}, float[2] t = {0.001, 0.002}> {
    [dq] v = DequantizeLinear<axis = 1>(w, s, z)
    [dq_bias] c = DequantizeLinear<axis = 0>(b, t)
    [product] p = MatMul(x, v)
    [sum] y = Add(p, c)
}"""
# The same weight under an activation that is quantised.
QUANTISED = """g (float[2, 3] x) => (float[2, 2] y)
<int8[3, 2] w = {1, -2, 3, 4, -128, 127}, float s = {0.11}, int8 z = {1},
 float a = {0.02}, uint8 zero = {128}> {
    [q] codes = QuantizeLinear(x, a, zero)
    [dqx] d = DequantizeLinear(codes, a, zero)
    [dq] v = DequantizeLinear(w, s, z)
    [product] p = MatMul(d, v)
    [qp] pq = QuantizeLinear(p, a, zero)
    [dqp] y = DequantizeLinear(pq, a, zero)
}"""


def unpacked(text: str, limit_mb: int = 1024) -> tuple[ir.Model, Remarks]:
    model = model_of(text)
    remarks = Remarks("mixed_precision_boundaries")
    unpack_constants(model, limit_mb, PassContext(remarks))
    return model, remarks


X = {"x": normal(2, 3)}


def test_constants_of_a_float_region_are_dequantised_ahead():
    model, remarks = unpacked(FLOAT_REGION)
    assert [node.op_type for node in model.graph] == ["MatMul", "Add"]
    assert_same_outputs(model, model_of(FLOAT_REGION), X)
    assert {remark.node for remark in remarks if remark.outcome == "fired"} == {
        "product",
        "sum",
    }
    # The codes are gone with the nodes.
    assert {tensor.dtype for tensor in model.graph.initializers.tensors()} == {
        ir.DataType.FLOAT
    }


@pytest.mark.parametrize("taken", ["w.float", "b.float"])
@pytest.mark.parametrize("is_input", [False, True])
def test_names_of_values_are_not_taken_again(taken, is_input):
    text = FLOAT_REGION.replace("(x, v)", f'("{taken}", v)')
    if is_input:
        text = text.replace("float[2, 3] x", f'float[2, 3] "{taken}"')
    else:
        text = text.replace("[product]", f'"{taken}" = Relu(x) [product]')
    model, _ = unpacked(text)
    onnx.checker.check_model(ir.to_proto(model))
    assert_same_outputs(model, model_of(text), {taken: X["x"]} if is_input else X)


# What stands between a product and its codes, and their zero point, at steps of 0.02:
# onnxruntime takes out what the codes clip by themselves, and makes one operator of the rest.
BETWEEN = [
    ("", 128, True),
    ("r = Relu(p)", 0, True),
    ("r = Relu(p)", 1, False),
    ("r = Clip(p)", 128, True),
    ("r = Clip(p, none, six)", 0, True),
    ("r = Clip(p, none, six)", 1, False),
    ("r = Clip(p, none, five)", 0, False),
    ("r = Clip(p, , six)", 128, True),
    ("least = ReduceMin<keepdims = 0>(x) r = Clip(p, least)", 0, False),
    ("r = Tanh(p)", 128, False),
    # Copies go, and Q and DQ are taken past what only moves data.
    ("r = Identity(p)", 128, True),
    ("r = Dropout(p)", 128, True),
    ("h = Cast<to = 10>(p) r = Cast<to = 1>(h)", 128, False),
    ("r = Transpose<perm = [0, 1]>(p)", 128, True),
    ("u = Unsqueeze(p, first) r = Squeeze(u, first)", 128, True),
    ("r = Reshape(p, sizes)", 128, True),
    ("i = Identity(p) u = Relu(i) r = Reshape(u, sizes)", 0, True),
    ("r = Flatten(p)", 128, False),
]


@pytest.mark.parametrize(("between", "zero_point", "in_integers"), BETWEEN)
def test_what_onnxruntime_computes_in_integers_keeps_its_codes(
    tmp_path, between, zero_point, in_integers
):
    text = QUANTISED.replace("(pq, a, zero)", "(pq, a, z2)")
    text = text.replace(
        "[qp] pq = QuantizeLinear(p, a, zero)",
        f"""{between}
        [qp] pq = QuantizeLinear({"r" if between else "p"}, a, z2)""",
    )
    numbers = """float none = {0}, float five = {5}, float six = {6}, int64[1] first = {0},
     int64[2] sizes = {2, 2}"""
    text = text.replace("<int8", f"<{numbers}, uint8 z2 = {{{zero_point}}}, int8", 1)
    session(model_of(text), optimised=True, final=tmp_path / "final.onnx")
    final = {node.op_type for node in onnx.load(tmp_path / "final.onnx").graph.node}
    assert ("QLinearMatMul" in final) == in_integers
    model, remarks = unpacked(text)
    dequantized = [node.op_type for node in model.graph].count("DequantizeLinear")
    assert (dequantized, len(remarks)) == ((3, 0) if in_integers else (2, 1))


@pytest.mark.parametrize("side", ["(codes, a, zero)", "(w, s, z)"])
@pytest.mark.parametrize("move", ["Identity(u)", "Dropout(u)", "Transpose<perm = [1, 0]>(u)"])
def test_moved_operands_of_integers_keep_their_codes(tmp_path, move, side):
    text = QUANTISED.replace(f"DequantizeLinear{side}", f"{move} ", 1)
    text = text.replace(
        "[dqx] d" if "codes" in side else "[dq] v",
        f"""
        [dq_moved] u = DequantizeLinear{side}
        {"d" if "codes" in side else "v"}""",
    )
    if "Transpose" in move:
        text = text.replace(
            "float[2, 3] x", "float[3, 2] x" if "codes" in side else "float[2, 2] x"
        )
    session(model_of(text), optimised=True, final=tmp_path / "final.onnx")
    final = {node.op_type for node in onnx.load(tmp_path / "final.onnx").graph.node}
    assert "QLinearMatMul" in final
    _, remarks = unpacked(text)
    assert not list(remarks)


# Where nothing quantises a product of codes, onnxruntime makes MatMulIntegerToFloat or QGemm,
# without a look at scales that their kernels don't take.
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("limit_mb", [0, 9])
@pytest.mark.parametrize(
    ("scales", "axis", "product"),
    [
        # Of a stack of matrices.
        ((2,), "axis = 0", "MatMul(d, stack)"),
        ((64,), "axis = 1", "MatMul(d, stack)"),
        ((64,), "axis = 2", "MatMul(d, stack)"),
        ((4, 64), "axis = 0, block_size = 16", "MatMul(d, v)"),
        ((64, 4), "axis = 1, block_size = 16", "MatMul(d, v)"),
        ((64,), "axis = 0", "MatMul(d, v)"),
        ((1, 64), "axis = 0, block_size = 64", "MatMul(d, v)"),
        ((64,), "axis = 1", "MatMul(v, t)"),
        ((4, 64), "axis = 0, block_size = 16", "Gemm(d, v)"),
        ((4, 64), "axis = 0, block_size = 16", "Gemm(d, v, b)"),
        ((64,), "axis = 1", "Gemm<transB = 1>(d, v)"),
        ((64,), "axis = 0", "Gemm<transB = 1>(d, v)"),
    ],
)
def test_a_product_in_float_runs_whatever_scales_its_weight_has(
    scales, axis, product, limit_mb, fuse
):
    rng = np.random.default_rng(0)
    constants = {
        "w": rng.integers(-64, 65, (2, 64, 64)["stack" not in product :], np.int8),
        "s": rng.random(scales, np.float32) / 100,
        "b": rng.random(64, np.float32),
        "a": np.float32(0.05),
        "z": np.uint8(128),
    }
    text = f"""c = QuantizeLinear(x, a, z)  d = DequantizeLinear(c, a, z)
        t = Transpose<perm = [1, 0]>(d)
        v = DequantizeLinear<{axis}>(w, s)  p = {product.replace("stack", "v")}
        q = QuantizeLinear(p, a, z)  y = DequantizeLinear(q, a, z)"""
    model = text_model(text, constants, {"x": (1, [3, 64])})
    asked = [
        ortplugins.MixedPrecisionBoundaries(promote="p", mode="float", float_limit_mb=limit_mb)
    ]
    if fuse:
        asked.append(ortplugins.DqMatMulNBitsFusion(accuracy_level=0))
    result = ortplugins.optimize(model, passes=asked).model
    feeds = {"x": normal(3, 64)}
    exact = run(result, feeds)[0]
    assert run(result, feeds, optimised=True)[0] == pytest.approx(exact, abs=1e-3)


@pytest.mark.parametrize(
    ("outputs", "computes_in_float"),
    [
        ("p", False),
        ("p, mean", False),
        ("p, , scale", False),
        ("p, , ", False),
        ("p, y2", True),
    ],
)
def test_outputs_that_nothing_reads_do_not_make_a_group_float(outputs, computes_in_float):
    more = ", float[2, 1] y2" if computes_in_float else ""
    text = f"""g (float[2, 4] x) => (float[2, 4] y{more})
    <int8[4] w = {{1, -2, 3, 4}}, float s = {{0.11}}, int8 z = {{1}}, float a = {{0.02}},
     uint8 zero = {{128}}> {{
        codes = QuantizeLinear(x, a, zero)
        d = DequantizeLinear(codes, a, zero)
        v = DequantizeLinear(w, s, z)
        {outputs} = LayerNormalization(d, v)
        pq = QuantizeLinear(p, a, zero)
        y = DequantizeLinear(pq, a, zero)
    }}"""
    item = ortplugins.MixedPrecisionBoundaries(mode="float")
    model = ortplugins.optimize(proto_of(text), passes=[item]).model
    node = next(node for node in model.graph.node if node.op_type == "LayerNormalization")
    constants = {tensor.name for tensor in model.graph.initializer}
    assert (node.input[1] in constants) is computes_in_float


def test_a_constant_of_both_serves_both():
    text = QUANTISED.replace("[dqp] y =", "other = MatMul(x, v) [dqp] m =")
    model, _ = unpacked(text.replace("(pq, a, zero)", "(pq, a, zero) y = Add(m, other)"))
    first, second = (node for node in model.graph if node.op_type == "MatMul")
    assert first.inputs[1].producer().op_type == "DequantizeLinear"
    assert second.inputs[1].is_initializer()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("(w, s, z)", "(w, s, z)"), "above what float_limit_mb=0 leaves"),
        (("int32[2] b = {70000, -5}, float[2] t", "int32[2] b = {70000, -5}, float[1, 2] t"),
         "needs [], [1] or, for axis 0, [2]"),
    ],
)  # fmt: skip
def test_what_stays_is_reported(change, reason):
    _, remarks = unpacked(
        FLOAT_REGION.replace(*change), limit_mb=0 if "above" in reason else 9
    )
    reported = [remark.reason for remark in remarks if remark.outcome == "refused"]
    assert any(reason in text and "runs at every inference" in text for text in reported), (
        reported
    )


def quantised_chain(folder: Path) -> Path:
    """Write two products with int8 weights of 256 KB, every activation in 8 bits.

    Without VNNI onnxruntime's kernel adds two products u8 * s8 in 16 bits and saturates:
    weights of 7 bits stay below that, so every machine computes the same.
    """
    rng = np.random.default_rng(1)
    pair = "{0}_q = QuantizeLinear ({0}, s, z)  {0}_d = DequantizeLinear ({0}_q, s, z)".format
    text = f"""{pair("x")}
        v0 = DequantizeLinear (w0, t)  [m0] m0 = MatMul (x_d, v0)  {pair("m0")}
        v1 = DequantizeLinear (w1, t)  [m1] m1 = MatMul (m0_d, v1)  {pair("m1")}
        y = Relu (m1_d)"""
    constants = {
        **{name: rng.integers(-64, 65, (512, 512), np.int8) for name in ("w0", "w1")},
        "s": np.float32(0.05),
        "z": np.uint8(128),
        "t": np.float32(0.002),
    }
    path = folder / "chain.onnx"
    onnx.save(text_model(text, constants, {"x": (1, ["n", 512])}), path)
    return path


def test_a_session_has_float_weights_in_the_region_only(tmp_path):
    path = quantised_chain(tmp_path)
    item = ortplugins.MixedPrecisionBoundaries(promote="m1", mode="float")
    opened = start(path, options(item, strict=True))
    artifact = ir.load(opened.ortplugins_report.artifact)
    sizes = {
        (tensor.dtype, tensor.size)
        for tensor in artifact.graph.initializers.tensors()
        if tensor.size > 1000
    }
    assert (ir.DataType.FLOAT, 512 * 512) in sizes
    # The graph's file stays small: new data lie beside it.
    assert Path(opened.ortplugins_report.artifact).stat().st_size < 400_000
    written = ortplugins.optimize(path, tmp_path / "o.onnx", passes=[item])
    x = normal(3, 512)
    expected = run(str(written.path), {"x": x})[0]
    # Quantised products may round otherwise: by one step of the output's grid.
    np.testing.assert_allclose(opened.run(None, {"x": x})[0], expected, atol=0.051)
