# SPDX-License-Identifier: MIT
"""Attention on shared heads, and norms, are fused whoever spelled them."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.passes.common
import pytest
from builders.attention_graphs import LAYOUTS, REPEATS, D, G, H, R, attention, feeds, parsed
from builders.dequantized_models import op_types, run
from builders.sessions import options, start
from hypothesis import given, settings
from hypothesis import strategies as st

import ortplugins
from rewrite_rules.remarks import PassContext, Remarks
from rewrite_rules.transformer_fusion.fuse import TransformerOptions, fuse_transformer


def fused(model: onnx.ModelProto) -> tuple[ir.Model, dict[str, list[str]]]:
    """The rewritten model, and the reasons of its remarks by outcome."""
    result, remarks = ir.from_proto(model), Remarks("transformer_fusion")
    onnx_ir.passes.common.ShapeInferencePass()(result)
    onnx_ir.passes.common.LiftConstantsToInitializersPass(lift_all_constants=True)(result)
    fuse_transformer(result, TransformerOptions(), PassContext(remarks))
    found: dict[str, list[str]] = {"fired": [], "refused": []}
    for remark in remarks:
        found[remark.outcome.value].append(remark.reason)
    return result, found


def check(result: ir.Model, model: onnx.ModelProto, inputs: dict[str, np.ndarray]) -> None:
    """Compare first outputs without onnxruntime's optimisers."""
    actual, expected = run(result, inputs)[0], run(model, inputs)[0]
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("repeat", REPEATS)
def test_heads_are_read_once(repeat: str, layout: str):
    model = attention(repeat, layout)
    result, remarks = fused(model)
    assert len(remarks["fired"]) == 2
    assert not remarks["refused"]
    assert not {"Expand", "Tile", "Gather"} & set(op_types(result))
    for batch, queries, keys in ((1, 1, 9), (2, 3, 5), (3, 1, 1)):
        inputs = feeds(batch, queries, keys)
        check(result, model, inputs)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(sorted(REPEATS)),
    st.sampled_from(sorted(LAYOUTS)),
    st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 7)),
    st.integers(0, 99),
)
def test_any_sizes(repeat: str, layout: str, sizes: tuple[int, int, int], seed: int):
    model, inputs = attention(repeat, layout), feeds(*sizes, seed=seed)
    result, _ = fused(model)
    check(result, model, inputs)


def test_a_repetition_that_stretches_other_axes_fails_as_loudly():
    """Sizes of another layer's cache that stretched the keys must not go unseen."""
    model = attention("expand elsewhere")
    result, _ = fused(model)
    inputs = feeds(1, 1, 1) | {"other": feeds(1, 1, 3)["other"]}
    assert run(model, inputs)[0].shape == (1, H, 1, D)
    with pytest.raises(Exception, match="reshape"):
        run(result, inputs)


def test_heads_that_matmul_repeats_itself():
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
    g (float[B, {H}, S, {D}] q, float[B, 1, {D}, T] k) => (float[B, {H}, S, T] y) {{
        y = MatMul(q, k)
    }}""")
    result, remarks = fused(model)
    assert remarks["fired"] == [f"{H} query heads share each of 1 heads of 'k'"]
    rng = np.random.default_rng(0)
    inputs = {
        name: rng.standard_normal(shape).astype(np.float32)
        for name, shape in (("q", (2, H, 3, D)), ("k", (2, 1, D, 5)))
    }
    check(result, model, inputs)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        # Heads in turn, 0 1 0 1 ..., are not the repetition of attention.
        ("interleaved = {0, 0, 0, 1, 1, 1}", "interleaved = {0, 1, 0, 1, 0, 1}", None),
        # The batch and the heads change places.
        ("perm = [0, 1, 3, 2]>(k_all)", "perm = [1, 0, 3, 2]>(k_all)", "mixes heads"),
    ],
)  # fmt: skip
def test_what_stays(old: str, new: str, reason: str | None):
    repeat = "gather" if "interleaved" in old else "expand"
    result, remarks = fused(attention(repeat, change=(old, new)))
    assert op_types(result).count("MatMul") == 2
    assert [reason in text for text in remarks["refused"]] == ([True] if reason else [])


# Norms.

SQUARES = {"power": "square = Pow(x, two)", "product": "square = Mul(x, x)"}
INVERSES = {
    "reciprocal": "inverse = Reciprocal(root) normal = Mul(x, inverse)",
    "one over": "inverse = Div(one, root) normal = Mul(inverse, x)",
    "division": "normal = Div(x, root)",
}
WEIGHTS = {"behind": "y = Mul(normal, weight)", "before": "y = Mul(weight, normal)"}


def rms_norm(
    square: str, inverse: str, weight: str, change: tuple[str, str] = ("", "")
) -> onnx.ModelProto:
    """The root-mean-square norm of ``a + b``; outputs ``y`` and the sum ``x``."""
    text = f"""<ir_version: 10, opset_import: ["": 21]>
    norm (float[B, S, 8] a, float[B, S, 8] b) => (float[B, S, 8] y, float[B, S, 8] x)
    <float two = {{2}}, float one = {{1}}, float epsilon = {{1e-6}}, int64[1] last = {{-1}},
     float[8] weight = {{1, 2, 3, 4, 5, 6, 7, 8}}> {{
        x = Add(a, b)
        {SQUARES[square]}
        mean = ReduceMean<keepdims = 1>(square, last)
        shifted = Add(mean, epsilon)
        root = Sqrt(shifted)
        {INVERSES[inverse]}
        {WEIGHTS[weight]}
    }}"""
    return parsed(text, change)


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("inverse", INVERSES)
@pytest.mark.parametrize("square", SQUARES)
def test_a_norm_and_its_residual_are_one_node(square: str, inverse: str, weight: str):
    model = rms_norm(square, inverse, weight)
    result, _ = fused(model)
    assert op_types(result) == ["SkipSimplifiedLayerNormalization"]
    rng = np.random.default_rng(0)
    inputs = {name: rng.standard_normal((2, 3, 8)).astype(np.float32) for name in "ab"}
    for actual, expected in zip(run(result, inputs), run(model, inputs), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("old", "new", "left"),
    [
        ("last = {-1}", "last = {1}", "ReduceMean"),
        ("float two = {2}", "float two = {3}", "ReduceMean"),
        ("float[8] weight = {1, 2, 3, 4, 5, 6, 7, 8}", "float weight = {3}", "ReduceMean"),
        # The kernel wants a weight for each element of the axis, and does not broadcast one.
        ("float[8] weight = {1, 2, 3, 4, 5, 6, 7, 8}", "float[1] weight = {3}", "ReduceMean"),
        # A sum that broadcasts has no kernel.
        ("float[B, S, 8] b)", "float[8] b)", "SimplifiedLayerNormalization"),
    ],
)
def test_norms_that_stay(old: str, new: str, left: str):
    result, _ = fused(rms_norm("power", "division", "behind", (old, new)))
    assert left in op_types(result)


def test_norms_share_what_they_read():
    """One sum and one mean under two norms, and the sum read before them."""
    model = rms_norm("power", "division", "behind", ("mean =", "early = Relu(x)\nmean ="))
    again = onnx.helper.make_node("Mul", ["weight", "normal"], ["again"])
    twice = onnx.helper.make_node("Mul", ["y", "again"], ["both"])
    model.graph.node.extend([again, twice])
    for name in ("early", "both"):
        model.graph.output.append(onnx.helper.make_tensor_value_info(name, 1, None))
    result, _ = fused(model)
    assert sorted(op_types(result)) == [
        *("Mul", "Relu", "SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization")
    ]
    rng = np.random.default_rng(0)
    inputs = {name: rng.standard_normal((2, 3, 8)).astype(np.float32) for name in "ab"}
    for actual, expected in zip(run(result, inputs), run(model, inputs), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5)


@pytest.mark.parametrize("kind", [np.float16, np.float64])
def test_norms_of_other_types(kind: type):
    model = rms_norm("power", "reciprocal", "behind")
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(kind))
    for tensor in model.graph.initializer:
        array = onnx.numpy_helper.to_array(tensor)
        if tensor.name != "last":
            tensor.CopyFrom(onnx.numpy_helper.from_array(array.astype(kind), tensor.name))
    result, _ = fused(model)
    assert "ReduceMean" not in op_types(result)
    rng = np.random.default_rng(0)
    inputs = {name: rng.standard_normal((2, 3, 8)).astype(kind) for name in "ab"}
    for actual, expected in zip(run(result, inputs), run(model, inputs), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-2 if kind is np.float16 else 1e-7)


# Activations.

POWERS = {
    "pow": "square = Pow(x, two) cube = Pow(x, three)",
    "products": "square = Mul(x, x) cube = Mul(square, x)",
}
INNERS = {
    "torch, gpt2": "c = Mul(cube, cubic) b = Add(x, c) a = Mul(b, root)",
    "bloom": "c = Mul(x, cubic) d = Mul(c, x) b = Add(d, one) e = Mul(x, root) a = Mul(e, b)",
    "a square": "c = Mul(square, cubic) b = Add(one, c) e = Mul(root, x) a = Mul(e, b)",
}
LASTS = {
    "half of x": "h = Mul(x, half) y = Mul(h, g)",
    "half of all": "h = Mul(x, g) y = Mul(h, half)",
    "half of the sum": "h = Mul(g, half) y = Mul(x, h)",
}


def tanh_gelu(
    powers: str, inner: str, last: str, change: tuple[str, str] = ("", "")
) -> onnx.ModelProto:
    text = f"""<ir_version: 10, opset_import: ["": 21]>
    gelu (float[B, 8] x) => (float[B, 8] y)
    <float one = {{1}}, float two = {{2}}, float three = {{3}}, float half = {{0.5}},
     float cubic = {{0.044715}}, float root = {{0.7978845834732056}}> {{
        {POWERS[powers]} {INNERS[inner]} t = Tanh(a) g = Add(t, one) {LASTS[last]}
    }}"""
    return parsed(text, change)


@pytest.mark.parametrize("last", LASTS)
@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize("powers", POWERS)
@pytest.mark.parametrize("exchanged", [False, True])
def test_gelu_by_tanh_is_one_node(powers: str, inner: str, last: str, exchanged: bool):
    model = tanh_gelu(powers, inner, last)
    for node in model.graph.node if exchanged else ():
        if node.op_type in ("Add", "Mul"):
            node.input[:] = node.input[::-1]
    result, remarks = fused(model)
    assert op_types(result) == ["FastGelu"]
    assert remarks["fired"] == ["FastGelu"]
    check(result, model, {"x": np.linspace(-8, 8, 96, dtype=np.float32).reshape(-1, 8)})


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("half = {0.5}", "half = {0.25}"),
        ("cubic = {0.044715}", "cubic = {0.044}"),
        ("root = {0.7978845834732056}", "root = {0.798}"),
        ("Mul(square, x)", "Mul(square, square)"),
        ("Mul(x, half)", "Mul(cube, half)"),
        ("float[B, 8] y", "float[B, 8] y, float[B, 8] g"),
        ("float[B, 8] x)", "float[B, 8] x, float half)"),
        ("float", "double"),
    ],
)
def test_other_uses_of_tanh_stay(old: str, new: str):
    result, _ = fused(tanh_gelu("products", "torch, gpt2", "half of x", (old, new)))
    assert "Tanh" in op_types(result)


def test_a_session_fuses_and_says_what():
    so = options(ortplugins.TransformerFusion(), strict=True)
    session = start(attention().SerializeToString(), so)
    (report,) = session.ortplugins_report.passes
    assert [remark.reason for remark in report.remarks] == [
        f"{R} query heads share each of {G} heads of {name!r}" for name in ("k", "v")
    ]
    inputs = feeds(2, 3, 5)
    expected = run(attention(), inputs)[0]
    np.testing.assert_allclose(session.run(None, inputs)[0], expected, rtol=1e-5, atol=1e-6)
