# SPDX-License-Identifier: MIT
"""Standard operators without a kernel on a CPU give the same numbers by onnxruntime's own."""

import itertools

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from builders.dequantized_models import op_types
from builders.exports import fused
from builders.same_numbers import session
from builders.text_models import add_weights, normal, proto_of
from builders.transformer_parts import (
    UPDATES,
    WIDTH,
    G,
    H,
    causal_convolution,
    linear_attention,
)
from numpy.typing import NDArray

ATTENTION = [("com.microsoft", "LinearAttention")]


def of_attention(
    batch: int, tokens: int, sizes: tuple[int, int] = (3, 5)
) -> dict[str, NDArray]:
    return {"x": normal(batch, tokens, WIDTH), "state": normal(batch, G, *sizes)}


def of_convolution(batch: int, tokens: int, kernel: int = 4) -> dict[str, NDArray]:
    return {"x": normal(batch, 6, tokens), "past": normal(batch, 6, kernel - 1)}


def check(model: onnx.ModelProto, *feeds: dict[str, NDArray]) -> list[tuple[str, str]]:
    """Compare a model with its fusion; return which recurrent operators the main graph has."""
    result = fused(model)[0]
    before, after = session(model), session(result)
    for feed in feeds:
        read = {item.name for item in before.get_inputs()}
        given = {name: array for name, array in feed.items() if name in read}
        pairs = zip(after.run(None, given), before.run(None, given), strict=True)
        for actual, expected in pairs:
            np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
    return [(node.domain, node.op_type) for node in result.graph if len(node.outputs) == 2]


@pytest.mark.parametrize("rule", UPDATES)
def test_linear_linear_attention(rule: str):
    feeds = [of_attention(*sizes) for sizes in ((1, 1), (3, 1), (1, 9), (2, 7))]
    for decay, beta, state, heads in itertools.product(
        (G, 3 * G), (1, G), ("state", ""), (H, G)
    ):
        options = {"decay": decay, "beta": beta, "state": state, "heads": heads}
        assert check(linear_attention(rule, **options), *feeds) == ATTENTION


def test_large_heads_that_the_kernel_multiplies_otherwise():
    sizes = 64, 72
    assert check(linear_attention(sizes=sizes), of_attention(2, 5, sizes)) == ATTENTION


def test_a_scale_that_is_left_out():
    assert (
        check(linear_attention(change=(", scale = 0.3", "")), of_attention(2, 5)) == ATTENTION
    )


@pytest.mark.parametrize("name", ["g", "b"])
def test_sizes_of_decay_and_beta_are_checked(name: str):
    """The kernel reads as many as the queries have tokens, whatever there are."""
    made = {"g": ("g = Neg(g_high)", ""), "b": ("b = Sigmoid(b_any)", "")}[name]
    model = linear_attention(change=made)
    kind = onnx.helper.make_tensor_value_info(name, 1, ["B", "T", G])
    model.graph.input.append(kind)
    feed = of_attention(2, 5) | {name: -np.abs(normal(2, 5, G))}
    assert check(model, feed) == ATTENTION
    before, after = session(model), session(fused(model)[0])
    for wrong in ((1, 5, G), (2, 4, G), (1, 1, G), (2, 6, G), (1, 10, G), (5, 2, G)):
        given = feed | {name: -np.abs(normal(*wrong))}
        try:
            expected = before.run(None, given)
        except Exception:
            with pytest.raises(Exception, match=r"Reshape|decay"):
                after.run(None, given)
        else:
            for pair in zip(after.run(None, given), expected, strict=True):
                np.testing.assert_allclose(*pair, rtol=1e-5, atol=1e-5)


def test_a_convolution_in_front():
    """Its batch is not proved to be that of decay and beta, which are of other values."""
    parts = "q, k_long, v = Split<axis = -1>(turned, parts)"
    change = (
        "q = MatMul(x, wq) k_long = MatMul(x, wk) v = MatMul(x, wv)",
        f"""parts = Constant<value_ints = [18, 6, 10]>() p = MatMul(x, wp)
        channels = Transpose<perm = [0, 2, 1]>(p)
        mixed, now = CausalConvWithState<activation = "silu">(channels, wc, , past)
        turned = Transpose<perm = [0, 2, 1]>(mixed) {parts}""",
    )
    model = linear_attention(change=change)
    past = onnx.helper.make_tensor_value_info("past", 1, ["B", 34, 3])
    model.graph.input.append(past)
    add_weights(model.graph, {"wp": normal(WIDTH, 34) / 4, "wc": normal(34, 1, 4)})
    feeds = [
        of_attention(*sizes) | {"past": normal(sizes[0], 34, 3)}
        for sizes in ((1, 1), (2, 5), (1, 12))
    ]
    assert check(model, *feeds) == [("", "If"), *ATTENTION]


@pytest.mark.parametrize("inputs", ["x, w", "x, w, b", "x, w, , past", "x, w, b, past"])
@pytest.mark.parametrize("activation", ["", '<activation = "silu">', '<activation = "swish">'])
def test_a_convolution_of_few_tokens(inputs: str, activation: str):
    all_sizes = ((1, 1), (3, 1), (2, 3), (2, 8), (1, 9), (3, 20))
    for kernel in (1, 2, 4, 7):
        model = causal_convolution(inputs, kernel=kernel, activation=activation)
        feeds = [of_convolution(*sizes, kernel) for sizes in all_sizes]
        assert check(model, *feeds) == [("", "If")]
        model = causal_convolution(inputs, kernel=kernel, activation=activation, tokens="1")
        found = check(model, *feeds[:2])
        assert found == [("com.microsoft", "CausalConvWithState")]


FIT = "LinearAttention: the sizes of its queries, keys and values are not known to fit"
FIRST = "first = Constant<value_ints = [0]>() end = Constant<value_ints = [1]>()"
STAYS = {
    # The function spreads the values of one text over all of them, with heads of another size.
    "values of one text": (
        linear_attention(
            change=(
                "v = MatMul(x, wv)",
                f"{FIRST} w = MatMul(x, wv) v = Slice(w, first, end, first)",
            )
        ),
        FIT,
    ),
    "keys of one token": (
        linear_attention(
            change=(
                "k = LpNormalization<axis = -1>(k_long)",
                f"{FIRST} k = Slice(k_long, first, end, end)",
            )
        ),
        FIT,
    ),
    # The kernel divides by their size.
    "heads of no size": (linear_attention(sizes=(0, 5)), FIT),
    "heads of keys of another size": (
        linear_attention(change=("kv_num_heads = 2", "kv_num_heads = 3")),
        FIT,
    ),
    "many tokens": (
        causal_convolution(tokens="9"),
        "CausalConvWithState: nodes are faster for 9",
    ),
    # The nodes take a past of any length.
    "a past of another length": (
        causal_convolution(change=("6, 3] past", "6, 2] past")),
        "CausalConvWithState: the length of its past is not known",
    ),
    "a past of any length": (
        causal_convolution(change=("6, 3] past", "6, P] past"), tokens="1"),
        "CausalConvWithState: the length of its past is not known",
    ),
    "float16": (
        linear_attention(
            change=("q = MatMul(x, wq)", "q_wide = MatMul(x, wq) q = Cast<to=10>(q_wide)")
        ),
        "LinearAttention: computes in FLOAT16",
    ),
}


@pytest.mark.parametrize("case", STAYS)
def test_what_stays(case: str):
    model, reason = STAYS[case]
    result, remarks, _ = fused(model)
    assert [text.startswith(reason) for text in remarks["refused"]] == [True]
    assert [node.domain for node in result.graph if len(node.outputs) == 2] == [""]


@pytest.mark.parametrize("change", [{"domain": "mine"}, {"opset": 29}])
def test_operators_of_others_stay(change: dict[str, int | str]):
    model = ir.from_proto(linear_attention())
    model.opset_imports[""] = change.get("opset", 27)
    for node in model.graph:
        if node.op_type == "LinearAttention":
            node.domain = change.get("domain", "")
    result = fused(ir.to_proto(model))[0]
    assert "com.microsoft" not in {node.domain for node in result.graph}
    assert "LinearAttention" in op_types(result)


SPECIAL = np.array([[0.0, -0.0, 3.0, -3.0, 90.0, -90.0, np.inf, -np.inf, np.nan]], np.float32)


@pytest.mark.parametrize("alpha", ["", "<alpha = 1.702>", "<alpha = 0.0>", "<alpha = -2.0>"])
def test_swish(alpha: str):
    model = proto_of(
        f"m (float[B, 9] x) => (float[B, 9] y) {{ y = Swish{alpha}(x) }}", opset=24
    )
    result = fused(model)[0]
    assert op_types(result) == ["QuickGelu"]
    for feed in ({"x": SPECIAL}, {"x": 4 * normal(5, 9)}):
        actual, expected = (session(each).run(None, feed)[0] for each in (result, model))
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
