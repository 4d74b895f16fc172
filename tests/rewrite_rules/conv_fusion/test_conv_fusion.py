# SPDX-License-Identifier: MIT
"""Scales, offsets and hard swishes fold into convolutions where nothing else changes."""

from collections.abc import Mapping
from typing import NamedTuple

import hypothesis
import numpy as np
import onnx
import pytest
from builders.same_numbers import session
from builders.text_models import T, normal, text_model
from hypothesis import given, settings
from hypothesis import strategies as st

import ortplugins

ROWS, HEIGHT, WIDTH = 2, 6, 8
IMAGE = ("N", 8, "H", "W")
# Constants by name. As wide as there are channels: sizes alone say nothing about axes.
CONSTANTS = {
    "w": normal(8, 8, 1, 1),
    "w3": normal(8, 8, 3, 3),
    "wide": normal(16, 8, 1, 1),
    "depth": normal(8, 1, 3, 3),
    "half": normal(8, 4, 3, 3),  # of two groups
    "up": normal(8, 4, 2, 2),  # of a ConvTranspose with two groups
    "line": normal(8, 8, 3),
    "cube": normal(8, 8, 1, 1, 1),
    "m": normal(8, 8, seed=3),
    "b": normal(8),
    "one": np.float32(1),
    "two": np.float32(2),
    "three": np.float32(3),
    "three1": np.array([3], np.float32),
    "zero": np.float32(0),
    "six": np.float32(6),
    "sixth": np.float32(1 / 6),
    "deep": np.full((1, 1, 1, 1, 1), 2, np.float32),
    "c": np.abs(normal(8, 1, 1)) + 0.5,
    "c4": np.abs(normal(1, 8, 1, 1)) + 0.5,
    "v": np.abs(normal(8, seed=1)) + 0.5,
    "rows": normal(8, 1, 1, 1),
    "column": normal(6, 1),
    "signs": np.array([1, -1, 0, 2, -2, 0.5, 0, 1], np.float32).reshape(8, 1, 1),
    "nan": np.array([1, 1, 1, np.nan, 1, 1, 1, 1], np.float32).reshape(8, 1, 1),
    "infinite": np.full((8, 1, 1), np.inf, np.float32),
    "huge": np.full((8, 1, 1), 3e38, np.float32),
    "tiny": np.full((8, 1, 1), 1e-38, np.float32),
    "magic": np.float32(12582912),
    "magic8": np.float32(49152),  # rounds to 8 bits behind the point
    "hundred": np.float32(100),
    "almost": np.float32(99.99),
    "balanced": normal(8, 1, 1, 1) * np.float32([1, -1] * 4).reshape(1, 8, 1, 1),
    "faint": normal(8, 8, 1, 1) * np.float32(1e-4),
    "double": np.ones((8, 1, 1)),
    "sizes": np.array([1, 8, 1, 1]),
}
CONSTANTS |= {
    "lines": normal(32, 1, 7),
    "lines3": normal(32, 1, 3),
    "pairs": normal(32, 2, 7),
    "b32": normal(32),
    "b16": normal(16),
    "wide3": normal(8, 16, 3, 3),
    "step": np.int64(5),
    "frame": np.int64(12),
    "window": np.hanning(20).astype(np.float32),
    "power": np.hanning(1024).astype(np.float32),
}
_FRAMES = "Transpose Conv Transpose Reshape"
POOLED = "p = GlobalAveragePool(a) q = Conv(p, w, b) gate = HardSigmoid(q)"
SWISH = "t = Add(a, three) u = Clip(t, zero, six) p = Mul(a, u)"


class Case(NamedTuple):
    """Nodes in ONNX's text that make y of x, and the operators, or the reason, expected."""

    nodes: str
    expected: str
    x: tuple[int | str, ...] = IMAGE
    opset: int = 17


FIRES = {
    # Behind a convolution.
    "scale": Case("a = Conv(x, w, b) y = Mul(a, c)", "Conv"),
    "scale in front of it": Case("a = Conv(x, w, b) y = Mul(c, a)", "Conv"),
    "offset": Case("a = Conv(x, w) y = Add(a, c4)", "Conv"),
    "difference": Case("a = Conv(x, w) y = Sub(a, c)", "Conv"),
    "difference from": Case("a = Conv(x, w, b) y = Sub(c, a)", "Conv"),
    "quotient": Case("a = Conv(x, w, b) y = Div(a, c)", "Conv"),
    "norm": Case("a = Conv(x, w, b) y = BatchNormalization(a, v, b, b, v)", "Conv"),
    "a chain": Case(
        """a = Conv(x, w, b) d = Identity(a) e = Sub(d, c) f = Mul(e, two)
        g = Cast<to = 1>(f) h = BatchNormalization(g, v, b, b, v) y = Add(h, three1)""",
        "Conv",
    ),
    "zero and negative scales": Case("a = Conv(x, w, b) y = Mul(a, signs)", "Conv"),
    "groups": Case("a = Conv<group = 2, pads = [1, 1, 1, 1]>(x, half) y = Mul(a, c)", "Conv"),
    "depthwise, dilated": Case(
        "a = Conv<group = 8, dilations = [2, 1]>(x, depth) y = Mul(a, c)", "Conv"
    ),
    "padding by rule": Case(
        'a = Conv<auto_pad = "SAME_UPPER">(x, w3, b) d = Mul(a, c) y = Add(d, c)', "Conv"
    ),
    "transposed convolution": Case(
        "a = ConvTranspose<group = 2, strides = [2, 2]>(x, up) y = Mul(a, c)", "ConvTranspose"
    ),
    "one axis": Case(
        "a = Conv<pads = [1, 1]>(x, line) y = Mul(a, column8)", "Conv", x=("N", 8, "W")
    ),
    "three axes": Case("a = Conv(x, cube) y = Mul(a, two)", "Conv", x=("N", 8, 2, 3, 4)),
    "behind a layout": Case(
        "a = Conv(x, w, b) t = Transpose<perm = [0, 2, 3, 1]>(a) d = Sub(t, v) y = Mul(d, v)",
        "Conv Transpose",
    ),
    "reshaped constant": Case("a = Conv(x, w) r = Reshape(v, sizes) y = Add(a, r)", "Conv"),
    "Gemm": Case(
        """a = Gemm<alpha = 0.5, beta = 2.0, transB = 1>(x, m, b) d = Mul(a, v)
        y = Sub(d, three)""",
        "Gemm",
        x=("N", 8),
    ),
    "MatMul": Case(
        "a = MatMul(x, m) d = Add(b, a) e = Mul(d, v) y = Add(e, b)",
        "MatMul Add",
        x=("N", "T", 8),
    ),
    "only the output is read twice": Case(
        "a = Conv(x, w) d = Mul(a, c) e = Relu(d) f = Neg(d) y = Add(e, f)",
        "Conv Relu Neg Add",
    ),
    "a shared weight": Case(
        "a = Conv(x, w) d = Mul(a, c) e = Conv(x, w) y = Add(d, e)", "Conv Conv Add"
    ),
    # In front of it.
    "scale in front": Case("r = Relu(x) a = Mul(r, c) y = Conv(a, w)", "Relu Conv"),
    "scale in front, padded": Case(
        "a = Div(x, c) y = Conv<group = 2, pads = [1, 1, 1, 1]>(a, half)", "Conv"
    ),
    "offset in front": Case("a = Sub(c4, x) y = Conv<group = 8>(a, depth, b)", "Conv"),
    "offset in front of groups": Case("a = Add(x, c4) y = Conv<group = 2>(a, half)", "Conv"),
    "offset in front of one element": Case(
        'a = Add(x, c4) y = Conv<auto_pad = "SAME_LOWER", strides = [2, 2]>(a, w)', "Conv"
    ),
    "norm in front": Case("a = BatchNormalization(x, v, b, b, v) y = Conv(a, w3)", "Conv"),
    "in front of several": Case(
        "r = Relu(x) a = Mul(r, c) d = Conv(a, w) e = Conv(a, w, b) y = Add(d, e)",
        "Relu Conv Conv Add",
    ),
    "in front of a transposed one": Case(
        "a = Mul(x, c) y = ConvTranspose<group = 2>(a, up)", "ConvTranspose"
    ),
    # Hard swish, whose sixth goes where the scale behind it goes.
    "hard swish": Case(
        f"a = Conv(x, w, b) {SWISH} z = Div(p, six) y = Relu(z)",
        "Conv HardSigmoid Mul Relu",
        opset=11,
    ),
    "hard swish by attributes": Case(
        """a = Conv(x, w, b) t = Add(three1, a) u = Clip<min = 0.0, max = 6.0>(t)
        p = Mul(u, a) z = Mul(p, sixth) y = Relu(z)""",
        "Conv HardSigmoid Mul Relu",
        opset=10,
    ),
    "hard swish by Min": Case(
        """a = Conv(x, w, b) t = Add(a, three) l = Max(t, zero) u = Min(l, six)
        p = Mul(a, u) y = Div(p, six)""",
        "Conv HardSigmoid Mul Identity",
    ),
    "hard swish by Max, constants first": Case(
        """a = Conv(x, w, b) t = Add(three, a) l = Min(six, t) u = Max(zero, l)
        p = Mul(u, a) y = Div(p, six)""",
        "Conv HardSigmoid Mul Identity",
    ),
    "hard swish, scaled": Case(
        f"a = Conv(x, w, b) {SWISH} d = Div(p, six) e = Mul(d, c) f = Add(e, c)"
        " y = Conv(f, w)",
        "Conv HardSigmoid Mul Conv",
    ),
    "hard swish, an offset under padding": Case(
        f"""a = Conv(x, wide, b16) {SWISH} d = Div(p, six) e = Mul(d, two) f = Add(e, three1)
        y = Conv<pads = [1, 1, 1, 1]>(f, wide3)""",
        "Conv HardSigmoid Mul BatchNormalization Conv",
    ),
    "an offset, then a scale": Case(
        "a = Conv(x, wide) r = Relu(a) d = Add(r, three1) f = Mul(d, two) y = Relu(f)",
        "Conv Relu BatchNormalization Relu",
    ),
    "an offset under padding": Case(
        """a = Conv(x, wide) r = Relu(a) f = Add(r, three1)
        y = Conv<pads = [1, 1, 1, 1]>(f, wide3)""",
        "Conv Relu BatchNormalization Conv",
    ),
    "hard sigmoid": Case(
        "t = Add(x, three) u = Clip(t, zero, six) s = Div(u, six) y = Mul(x, s)",
        "HardSigmoid Mul",
    ),
    # Along one axis.
    "depthwise along one axis": Case(
        """a = Conv<group = 32, pads = [4, 2], dilations = [2], strides = [3]>(x, lines, b32)
        y = Mul(a, two)""",
        "Unsqueeze Conv Squeeze",
        x=("N", 32, 40),
    ),
    "depthwise along one axis, padded by rule": Case(
        'y = Conv<group = 32, auto_pad = "SAME_UPPER", kernel_shape = [7]>(x, lines)',
        "Unsqueeze Conv Squeeze",
        x=("N", 32, 40),
        opset=11,
    ),
    "frames": Case("y = STFT(x, step, window)", _FRAMES, x=("N", 100, 1)),
    "frames of both sides": Case(
        "y = STFT<onesided = 0>(x, step, , frame)", _FRAMES, x=("N", 100, 1)
    ),
    # Others.
    "two scales": Case(
        "a = Mul(x, c) d = Div(a, c4) e = Relu(d) y = Conv(e, w)", "Mul Relu Conv"
    ),
    "a gate and its input": Case(
        f"a = Conv(x, w, b) {POOLED} d = Mul(a, gate) y = Add(a, d)",
        "Conv GlobalAveragePool Conv HardSigmoid Add Mul",
    ),
}
CONSTANTS["column8"] = normal(8, 1, seed=2)
_BEHIND = "is not one number for each channel"
# The reason that a refusal gives; empty where nothing is refused.
STAYS = {
    "along the width": Case("a = Conv(x, w) y = Mul(a, v)", _BEHIND),
    "along the height": Case("a = Conv(x, w) y = Mul(a, column)", _BEHIND),
    "along the rows": Case("a = Conv(x, w) y = Mul(a, rows)", _BEHIND, x=(8, 8, 6, 8)),
    "the channels of a layout": Case(
        "a = Conv(x, w) t = Transpose<perm = [0, 2, 3, 1]>(a) y = Mul(t, c)", _BEHIND
    ),
    "more axes": Case("a = Conv(x, w) y = Mul(a, deep)", "more axes"),
    "one channel that becomes eight": Case(
        "a = Conv(x, single) y = Mul(a, c)", _BEHIND, x=IMAGE
    ),
    "a norm of another axis": Case(
        """a = Conv(x, w) t = Transpose<perm = [0, 2, 1, 3]>(a)
        y = BatchNormalization(t, v, b, b, v)""",
        "not its second axis",
        x=("N", 8, 8, "W"),
    ),
    "not a number": Case("a = Conv(x, w) y = Mul(a, nan)", "not a number"),
    "infinite": Case("a = Conv(x, w) y = Add(a, infinite)", "infinite"),
    "division by zero": Case("a = Conv(x, w) y = Div(a, signs)", "0 as a divisor"),
    "overflow": Case("a = Conv(x, w) y = Mul(a, huge)", "overflows"),
    "underflow": Case("a = Conv(x, w) y = Mul(a, tiny)", "too small"),
    "rounding by a large number": Case(
        "a = Conv(x, w) d = Add(a, magic) y = Sub(d, magic)", "rounds what it is added to"
    ),
    "rounding to a share": Case(
        "a = Conv(x, w) d = Add(a, magic8) y = Sub(d, magic8)", "rounds what it is added to"
    ),
    "rounding in front": Case(
        "a = Add(x, magic8) d = Sub(a, magic8) y = Conv(d, w)", "rounds what it is added to"
    ),
    "rounding a small weight's result": Case(
        "a = Conv(x, faint) d = Add(a, hundred) e = Abs(d) y = Sub(e, hundred)",
        "rounds what it is added to",
    ),
    "read elsewhere": Case("a = Conv(x, w) d = Mul(a, c) y = Add(a, d)", ""),
    "an operand that is computed": Case("a = Conv(x, w) r = Relu(x) y = Mul(a, r)", ""),
    "a weight that is computed": Case("k = Abs(w) a = Conv(x, k) y = Mul(a, c)", ""),
    "padding would be read": Case(
        "a = Add(x, c4) y = Conv<pads = [0, 0, 1, 0]>(a, w3)", "padding would be read"
    ),
    "padding by rule would be read": Case(
        'a = Add(x, c4) y = Conv<auto_pad = "SAME_LOWER">(a, w3)', "padding would be read"
    ),
    "an offset under a transposed one": Case(
        "a = Add(x, c4) y = ConvTranspose<group = 2>(a, up)", "padding would be read"
    ),
    "another reader in front": Case(
        "a = Mul(x, c) d = Conv(a, w) y = Add(a, d)", "reads 'a' as well"
    ),
    "one channel in front becomes eight": Case(
        "a = Mul(x, c) y = Conv(a, w)", "more axes", x=("N", 1, "H", "W")
    ),
    "channels in front are not known": Case(
        "a = Mul(x, c) y = Conv(a, w)", "more axes", x=("N", "C", "H", "W")
    ),
    "an axis in front that the constant makes": Case(
        "a = Mul(x, c4) y = Conv(a, w)", "more axes", x=(8, "H", "W")
    ),
    "half a Gelu": Case(
        """a = Conv(x, w) d = Div(a, two) e = Erf(d) f = Add(e, one) g = Mul(a, f)
        h = Mul(g, sixth) y = Conv(h, w)""",
        "makes a Gelu of it",
    ),
    "scales along two axes": Case("a = Mul(x, c) y = Mul(a, column)", ""),
    "a bias that is no row": Case(
        "a = Gemm(x, m, bias) y = Mul(a, v)", "does not fit", x=(8, 8)
    ),
    "a bias that makes axes": Case(
        "a = MatMul(x, m) d = Add(a, flat) y = Mul(d, v)", "more axes", x=("N", 8)
    ),
    "a bias that makes axes, of unknown rank": Case(
        "s = Shape(x) e = Reshape(x, s) a = MatMul(e, m) d = Add(a, flat) y = Mul(d, v)",
        "more axes",
        x=("N", 8),
    ),
    "another hard swish": Case(
        "t = Add(x, two) u = Clip(t, zero, six) p = Mul(x, u) y = Div(p, six)", ""
    ),
    "clipped elsewhere": Case(
        "t = Add(x, three) u = Clip(t, zero, three) p = Mul(x, u) y = Div(p, six)", ""
    ),
    "of the sum": Case(
        "t = Add(x, three) u = Clip(t, zero, six) p = Mul(t, u) y = Div(p, six)", ""
    ),
    "of another value": Case(
        "r = Relu(x) t = Add(r, three) u = Clip(t, zero, six) p = Mul(x, u) y = Div(p, six)",
        "",
    ),
    "a gate as large as its input": Case("g = Relu(x) d = Mul(x, g) y = Add(x, d)", ""),
    "a short kernel along one axis": Case(
        "y = Conv<group = 32>(x, lines3)", "", x=("N", 32, 40)
    ),
    "groups of two along one axis": Case(
        "y = Conv<group = 32>(x, pairs)", "", x=("N", 64, 40)
    ),
    "frames of a power of two": Case("y = STFT(x, step, power)", "", x=("N", 2000, 1)),
    "frames of complex numbers": Case(
        "y = STFT<onesided = 0>(x, step, window)", "", x=("N", 100, 2)
    ),
    "frames of an unknown kind": Case("y = STFT(x, step, window)", "", x=("N", 100, "H")),
    "an offset under padding, out of the blocked layout": Case(
        "r = Elu(x) d = Mul(r, c) f = Add(d, c) y = Conv<pads = [1, 1, 1, 1]>(f, w3)",
        "padding would be read",
    ),
    "an offset under padding, behind a layout that is lost": Case(
        """a = Conv(x, wide) r = Elu(a) d = Mul(r, two) f = Add(d, three)
        y = Conv<pads = [1, 1, 1, 1]>(f, wide3)""",
        "padding would be read",
    ),
    "a product in double": Case("a = Conv(x, w) d = Cast<to = 11>(a) y = Mul(d, double)", ""),
}
CONSTANTS["single"] = normal(1, 8, 1, 1)
CONSTANTS["bias"] = normal(8, 1)
CONSTANTS["flat"] = normal(1, 1, 1, 8)


def model_of(case: Case, constants: Mapping[str, np.ndarray] = CONSTANTS) -> onnx.ModelProto:
    model = text_model(case.nodes, (), {"x": (T.FLOAT, case.x)}, opset=case.opset)
    read = {name for node in model.graph.node for name in node.input}
    for name, array in constants.items():
        if name in read:
            tensor = onnx.numpy_helper.from_array(np.asarray(array), name)
            model.graph.initializer.append(tensor)
    if "double" in read:
        model.graph.output[0].type.tensor_type.elem_type = T.DOUBLE
    return model


def fused(model: onnx.ModelProto) -> tuple[onnx.ModelProto, ortplugins.Report]:
    result = ortplugins.optimize(model, passes=["conv_fusion"])
    onnx.checker.check_model(result.model)
    return result.model, result.report


def op_types(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node if node.op_type != "Constant"]


def check_numbers(model: onnx.ModelProto, result: onnx.ModelProto) -> None:
    """Compare with the original without optimisation: as written, and as it runs."""
    sizes = {"N": ROWS, "H": HEIGHT, "W": WIDTH, "T": 3, "C": 8}
    dims = model.graph.input[0].type.tensor_type.shape.dim
    x = normal(*(dim.dim_value or sizes[dim.dim_param] for dim in dims), seed=9)
    (expected,) = session(model).run(None, {"x": x})
    for optimised in (False, True):
        (found,) = session(result, optimised=optimised).run(None, {"x": x})
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("name", FIRES)
def test_it_folds(name: str):
    case = FIRES[name]
    model = model_of(case)
    result, report = fused(model)
    assert op_types(result) == case.expected.split()
    assert report.fired
    assert not report.refused
    check_numbers(model, result)


@pytest.mark.parametrize("name", STAYS)
def test_it_stays(name: str):
    case = STAYS[name]
    model = model_of(case)
    result, report = fused(model)
    assert op_types(result) == op_types(model)
    assert not report.fired
    reasons = [remark.reason for remark in report.refused]
    assert any(case.expected in reason for reason in reasons) if case.expected else not reasons


@pytest.mark.parametrize(
    "nodes",
    [
        "a = Conv(x, w) d = Add(a, hundred) y = Sub(d, hundred)",
        "a = Conv(x, w) d = Add(a, hundred) y = Sub(d, almost)",
        "a = Add(x, hundred) d = Sub(a, hundred) y = Conv(d, w)",
        "a = Add(x, hundred) y = Conv(a, balanced)",
        "a = Conv(x, w) d = Add(a, hundred) e = Sub(d, hundred) y = Conv(e, w)",
    ],
)
def test_offsets_that_cancel_keep_what_they_round(nodes: str):
    """Activations of 1e-3 lose bits beside 100."""
    model = model_of(Case(nodes, ""))
    result, _ = fused(model)
    x = {"x": 1e-3 * normal(ROWS, 8, HEIGHT, WIDTH)}
    (expected,), (found,) = (session(each).run(None, x) for each in (model, result))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def scaled_with_inputs(*names: str, opset: int = 17) -> onnx.ModelProto:
    """Return a scaled convolution of which some constants are inputs as well."""
    model = model_of(Case("a = Conv(x, w, b) y = Mul(a, c)", "", opset=opset))
    for name in names:
        shape = CONSTANTS[name].shape
        model.graph.input.append(onnx.helper.make_tensor_value_info(name, T.FLOAT, shape))
    return model


def test_what_old_files_list_as_inputs_folds():
    """Before version 4 of the format all initializers are inputs, which no caller may feed."""
    model = scaled_with_inputs("w", "b", "c", opset=9)
    model.ir_version = 3
    result, _ = fused(model)
    assert op_types(result) == ["Conv"]
    assert [value.name for value in result.graph.input] == ["x"]
    check_numbers(model, result)


@pytest.mark.parametrize("name", ["w", "c", "b"])
def test_what_a_caller_may_feed_stays(name: str):
    result, report = fused(scaled_with_inputs(name))
    assert op_types(result) == ["Conv", "Mul"]
    (remark,) = report.refused
    assert f"{name!r} is a graph input" in remark.reason


@pytest.mark.parametrize(
    ("nodes", "output"),
    [
        ("a = Conv(x, w, b) y = Mul(a, c)", "a"),
        ("r = Relu(x) a = Mul(r, c) y = Conv(a, w)", "a"),
        ("a = Conv(x, w, b) t = Transpose<perm = [0, 2, 3, 1]>(a) y = Mul(t, v)", "t"),
        ("a = Mul(x, c) d = Mul(a, c4) y = Conv(d, w3)", "a"),
        (f"a = Conv(x, w) {SWISH} y = Div(p, two)", "u"),
    ],
)
def test_an_output_within_stays(nodes: str, output: str):
    model = model_of(Case(nodes, ""))
    model.graph.output.append(onnx.helper.make_tensor_value_info(output, T.FLOAT, None))
    result, _ = fused(model)
    x = {"x": normal(ROWS, 8, HEIGHT, WIDTH)}
    for found, expected in zip(
        session(result).run(None, x), session(model).run(None, x), strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


SUBGRAPHS = {
    "an outer value is read within": (
        "a = Conv(x, w) d = Mul(a, c)",
        "e = Neg(a)",
        ["Conv", "Mul", "If", "Neg"],
    ),
    "an outer value is a result within": (
        "a = Conv(x, w) d = Mul(a, c)",
        "e = Identity(a)",
        ["Conv", "Mul", "If", "Identity"],
    ),
    "only the scale is within": (
        "a = Conv(x, w) d = Relu(x)",
        "e = Mul(a, c)",
        ["Conv", "Relu", "If", "Mul"],
    ),
    "only the convolution is within": (
        "a = Mul(x, c) d = Relu(x)",
        "e = Conv(a, w)",
        ["Mul", "Relu", "If", "Conv"],
    ),
    "both are within": (
        "d = Relu(x)",
        "k = Conv(x, w) e = Mul(k, c)",
        ["Relu", "If", "Conv"],
    ),
}


@pytest.mark.parametrize("name", SUBGRAPHS)
def test_subgraphs_read_what_they_read(name: str):
    outer, inner, expected = SUBGRAPHS[name]
    model = model_of(
        Case(
            f"""{outer} s = ReduceSum<keepdims = 0>(x) p = Greater(s, zero)
            i = If (p) <then_branch = t () => (e) {{ {inner} }},
                        else_branch = f () => (g) {{ g = Abs(d) }}>
            y = Add(d, i)""",
            "",
        )
    )
    given = {tensor.name for tensor in model.graph.initializer}
    for name in {"w", "c"} - given:
        tensor = onnx.numpy_helper.from_array(CONSTANTS[name], name)
        model.graph.initializer.append(tensor)
    for branch in next(node for node in model.graph.node if node.op_type == "If").attribute:
        branch.g.output[0].type.tensor_type.elem_type = T.FLOAT
    result, _ = fused(model)
    (condition,) = (node for node in result.graph.node if node.op_type == "If")
    then = next(a.g for a in condition.attribute if a.name == "then_branch")
    skipped = {"ReduceSum", "Greater", "Add", "Constant"}
    found = [node.op_type for node in (*result.graph.node, *then.node)]
    assert sorted(kind for kind in found if kind not in skipped) == sorted(expected)
    for sign in (1, -1):
        x = {"x": sign * np.abs(normal(ROWS, 8, HEIGHT, WIDTH))}
        (wanted,), (got,) = (session(each).run(None, x) for each in (model, result))
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


def test_half_precision_stays():
    """A product in float16 rounds where the folded one does not."""
    model = model_of(Case("a = Conv(x, w, b) y = Mul(a, c)", ""))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = T.FLOAT16
    for tensor in model.graph.initializer:
        array = onnx.numpy_helper.to_array(tensor).astype(np.float16)
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    result, report = fused(model)
    assert op_types(result) == ["Conv", "Mul"]
    assert "weight 'w' is float16" in report.refused[0].reason


PAIR = "f = QuantizeLinear(a, q, z) g = DequantizeLinear(f, q, z)"
QDQ = {
    "q": np.float32(0.05),
    "z": np.uint8(128),
    "codes": np.clip(normal(8, 8, 1, 1) * 30, -127, 127).astype(np.int8),
    "z8": np.int8(0),
}


@pytest.mark.parametrize(
    "nodes",
    [
        "k = DequantizeLinear(codes, q, z8) a = Conv(d, k) e = Mul(a, c)",
        f"a = Conv(d, w) {PAIR} e = Mul(g, c)",
        f"a = Mul(d, c) {PAIR} e = Conv(g, w)",
    ],
)
def test_nothing_moves_across_quantisation(nodes: str):
    text = f"h = QuantizeLinear(x, q, z) d = DequantizeLinear(h, q, z) {nodes}"
    text += " i = QuantizeLinear(e, q, z) y = DequantizeLinear(i, q, z)"
    model = model_of(Case(text, ""), {**CONSTANTS, **QDQ})
    result, report = fused(model)
    assert op_types(result) == op_types(model)
    assert not report.fired


INTEGERS = {
    "k8": np.clip(normal(8, 1, 3, 3) * 50, -128, 127).astype(np.int8),
    "k8z": np.int8(-3),
    "kz": np.uint8(121),
    "kzs": np.arange(118, 126).astype(np.uint8),
    "dense8": np.clip(normal(8, 8, 3, 3) * 50, -128, 127).astype(np.int8),
    "ks": np.float32(0.02),
    "kss": np.linspace(0.01, 0.03, 8, dtype=np.float32).reshape(8, 1, 1),
    "q": np.float32(0.05),
    "z0": np.uint8(128),
}
INTEGERS["k"] = (INTEGERS["k8"].astype(int) + 128).astype(np.uint8)
INTEGERS["dense"] = (INTEGERS["dense8"].astype(int) + 128).astype(np.uint8)
DYNAMIC = "q8, s, z = DynamicQuantizeLinear(x)"
DEPTHWISE = "i = ConvInteger<group = 8, pads = [1, 1, 1, 1]>"
SCALED = "f = Cast<to = 1>(i) t = Mul(s, ks) y = Mul(f, t)"
SCALED_TWICE = "f = Cast<to = 1>(i) e = Mul(f, s) g = Cast<to = 1>(i) y = Sub(e, g)"


def integers(nodes: str, **options: str) -> tuple[onnx.ModelProto, ortplugins.OptimizeResult]:
    """Return a model of integer convolutions, and what becomes of it."""
    model = model_of(Case(nodes, ""), {**CONSTANTS, **INTEGERS})
    named = {f"conv_fusion.{name}": value for name, value in options.items()}
    return model, ortplugins.optimize(model, passes=["conv_fusion"], options=named)


def results_of(*models: onnx.ModelProto) -> list[np.ndarray]:
    x = {"x": normal(ROWS, 8, HEIGHT, WIDTH)}
    return [session(model).run(None, x)[0] for model in models]


@pytest.mark.parametrize(
    "convolution",
    ["i = ConvInteger(q8, dense8, z, k8z)", "i = ConvInteger<group = 8>(q8, k8, z)"],
)
def test_weights_of_integers_lose_their_sign(convolution: str):
    model, result = integers(f"{DYNAMIC} {convolution} {SCALED}")
    (node,) = (node for node in result.model.graph.node if node.op_type == "ConvInteger")
    constants = {tensor.name: tensor.data_type for tensor in result.model.graph.initializer}
    assert [constants[node.input[index]] for index in (1, 3)] == [T.UINT8] * 2
    np.testing.assert_array_equal(*results_of(model, result.model))


FLOATS = {
    "signed": (f"{DEPTHWISE}(q8, k8, z, k8z) {SCALED}", ("k8", "k8z", "ks")),
    "unsigned": (f"{DEPTHWISE}(q8, k, z, kz) {SCALED}", ("k", "kz", "ks")),
    "no zero point": (f"{DEPTHWISE}(q8, k8, z) {SCALED}", ("k8", "zero", "ks")),
    "zero points of channels": (f"{DEPTHWISE}(q8, k, z, kzs) {SCALED}", ("k", "kzs", "ks")),
    "scales of channels": (
        f"{DEPTHWISE}(q8, k, z, kz) f = Cast<to = 1>(i) t = Mul(kss, s) y = Mul(t, f)",
        ("k", "kz", "kss"),
    ),
    "scales one by one": (
        f"{DEPTHWISE}(q8, k, z, kz) f = Cast<to = 1>(i) e = Mul(f, s) y = Mul(e, ks)",
        ("k", "kz", "ks"),
    ),
}


@pytest.mark.parametrize("name", FLOATS)
def test_depthwise_integers_become_floats(name: str):
    """The result is the float model's, of which the integers are further away."""
    nodes, constants = FLOATS[name]
    model, result = integers(f"{DYNAMIC} {nodes}", slow_kernels="float")
    assert op_types(result.model) == ["Conv"]
    k, z, scale = ({**CONSTANTS, **INTEGERS}[key].astype(np.float32) for key in constants)
    weight = (k - z.reshape(-1, 1, 1, 1)) * scale.reshape(-1, 1, 1, 1)
    plain = model_of(
        Case("y = Conv<group = 8, pads = [1, 1, 1, 1]>(x, weight)", ""), {"weight": weight}
    )
    found, floats = results_of(result.model, plain)
    greatest = np.abs(floats).max()
    np.testing.assert_allclose(found, floats, rtol=0, atol=1e-6 * greatest)
    if name != "zero points of channels":  # which onnxruntime does not run
        (original,) = results_of(model)
        assert 1e-4 < np.abs(original - found).max() / greatest < 0.02


def test_codes_that_others_read_stay_beside_floats():
    nodes = f"{DYNAMIC} {DEPTHWISE}(q8, k, z, kz) f = Cast<to = 1>(i) t = Mul(s, ks)"
    nodes += " e = Mul(f, t) g = DequantizeLinear(q8, s, z) y = Add(e, g)"
    model, result = integers(nodes, slow_kernels="float")
    assert op_types(result.model) == [
        "DynamicQuantizeLinear",
        "Conv",
        "DequantizeLinear",
        "Add",
    ]
    original, found = results_of(model, result.model)
    np.testing.assert_allclose(found, original, rtol=0, atol=0.02 * np.abs(original).max())


_UNSCALED = "not multiplied by the scale"
INTEGERS_STAY = {
    "dense": (f"{DYNAMIC} i = ConvInteger(q8, dense, z, kz) {SCALED}", ""),
    "given in integers": (
        f"q8 = QuantizeLinear(x, q, z0) s = Abs(q) {DEPTHWISE}(q8, k, z0) {SCALED}",
        "its input is given in integers",
    ),
    "another zero point": (
        f"{DYNAMIC} {DEPTHWISE}(q8, k, z0, kz) {SCALED}",
        "its zero point is not the one",
    ),
    "no zero point": (
        f"{DYNAMIC} {DEPTHWISE}(q8, k) {SCALED}",
        "its zero point is not the one",
    ),
    "another scale": (
        f"{DYNAMIC} {DEPTHWISE}(q8, k, z) f = Cast<to = 1>(i) y = Mul(f, ks)",
        _UNSCALED,
    ),
    "the scale squared": (
        f"{DYNAMIC} {DEPTHWISE}(q8, k, z) {SCALED.replace('ks', 's')}",
        _UNSCALED,
    ),
    "integers that are read twice": (
        f"{DYNAMIC} {DEPTHWISE}(q8, k, z) {SCALED_TWICE}",
        _UNSCALED,
    ),
}


@pytest.mark.parametrize("name", INTEGERS_STAY)
def test_other_integers_stay(name: str):
    nodes, reason = INTEGERS_STAY[name]
    model, result = integers(nodes, slow_kernels="float")
    assert op_types(result.model) == op_types(model)
    reasons = [remark.reason for remark in result.report.refused]
    assert any(reason in each for each in reasons) if reason else not reasons


def test_depthwise_integers_stay_unless_asked_for():
    model, result = integers(f"{DYNAMIC} {DEPTHWISE}(q8, k, z, kz) {SCALED}")
    assert op_types(result.model) == op_types(model)
    (remark,) = result.report.refused
    assert "slow_kernels=float" in remark.reason


# Each makes {o} of {a}; {e} is an earlier value.
STEPS = (
    "{o} = Mul({a}, c)",
    "{o} = Mul(two, {a})",
    "{o} = Mul({a}, signs)",
    "{o} = Mul({a}, v)",
    "{o} = Div({a}, c)",
    "{o} = Add({a}, c4)",
    "{o} = Add(v8, {a})",
    "{o} = Sub({a}, three1)",
    "{o} = Sub(c, {a})",
    "{o} = BatchNormalization({a}, v, b, b, v)",
    "{o} = Identity({a})",
    "{o} = Relu({a})",
    "{o} = HardSwish({a})",
    "{o} = Add({a}, {e})",
    "{o} = Conv({a}, w, b)",
    "{o} = Conv<pads = [1, 1, 1, 1]>({a}, w3)",
    "{o} = Conv<group = 8, pads = [0, 1, 2, 1]>({a}, depth, b)",
    "{o} = ConvTranspose<group = 2, strides = [1, 2]>({a}, up)",
    """{o}t = Add({a}, three) {o}u = Clip({o}t, zero, six) {o}p = Mul({a}, {o}u)
    {o} = Div({o}p, six)""",
    """{o}t = Transpose<perm = [0, 2, 3, 1]>({a}) {o}m = Mul({o}t, v) {o}n = Add({o}m, b)
    {o} = Transpose<perm = [0, 3, 1, 2]>({o}n)""",
    """{o}g = GlobalAveragePool({a}) {o}s = Sigmoid({o}g) {o}p = Mul({a}, {o}s)
    {o} = Add({o}p, {a})""",
)
CONSTANTS["v8"] = normal(8, 1, 1, seed=5)


def chain(steps: list[str], shown: int) -> onnx.ModelProto:
    """Return a net of steps; one of its values is read once more at the end."""
    values, lines = ["x"], []
    for number, step in enumerate(steps):
        earlier = values[(shown + number) % len(values)]
        lines.append(step.format(a=values[-1], o=f"s{number}", e=earlier))
        values.append(f"s{number}")
    again = f"again = ReduceMean<keepdims = 0>({values[shown % len(values)]})"
    return model_of(Case(f"{' '.join(lines)} {again} y = Add({values[-1]}, again)", ""))


@settings(max_examples=40)
@given(st.lists(st.sampled_from(STEPS), min_size=1, max_size=9), st.integers(0, 9))
def test_chains_give_the_same_numbers(steps: list[str], shown: int):
    model = chain(steps, shown)
    x = {"x": normal(2, 8, 8, 8, seed=4)}
    try:
        (expected,) = session(model).run(None, x)
    except Exception:  # sizes that do not broadcast
        hypothesis.assume(False)
    result, _ = fused(model)
    for optimised in (False, True):
        (found,) = session(result, optimised=optimised).run(None, x)
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * np.abs(expected).max())
