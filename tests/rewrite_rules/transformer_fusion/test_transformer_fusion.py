# SPDX-License-Identifier: MIT
"""Attention on shared heads, and norms, are fused whoever spelled them."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from builders.dequantized_models import assert_same_outputs, op_types
from builders.exports import fused
from builders.text_models import normal, proto_of
from builders.transformer_parts import LAYOUTS, REPEATS, STAYS, D, G, H, attention, gelu, norm


def feeds(batch: int, queries: int, keys: int, seed: int = 0) -> dict[str, np.ndarray]:
    names = enumerate(("k", "v", "other"), 3 * seed)
    cache = {name: normal(batch, G, keys, D, seed=number) for number, name in names}
    return {"q": normal(batch, H, queries, D, seed=seed), **cache}


def check(result: ir.Model, model: onnx.ModelProto, inputs: dict[str, np.ndarray]) -> None:
    assert_same_outputs(result, model, inputs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("repeat", REPEATS)
def test_heads_are_read_once(repeat: str, layout: str):
    model = attention(repeat, layout)
    result, remarks, _ = fused(model)
    assert len(remarks["fired"]) == 2
    assert not remarks["refused"]
    assert "Tile" not in op_types(result)
    # Of sizes that are not proved to be its own, each head once.
    assert ("Expand" in op_types(result)) == (repeat == "expand elsewhere")
    for seed, sizes in enumerate(((1, 1, 9), (2, 3, 5), (3, 1, 1), (2, 5, 7))):
        check(result, model, feeds(*sizes, seed=seed))


def test_tokens_and_texts_that_a_repetition_stretches_stay_stretched():
    """Sizes of another layer's cache may be those of more tokens, or texts, than there are."""
    model = attention("expand elsewhere")
    result, remarks, _ = fused(model)
    assert len(remarks["fired"]) == 2
    one, other = feeds(1, 2, 1), feeds(3, 2, 5)
    for names in (("other",), ("other", "q")):
        check(result, model, one | {name: other[name] for name in names})
    keys = f"float[{{}}, {G}, T, {D}] k,"
    model = attention("expand elsewhere", "transpose", (keys.format("B"), keys.format(1)))
    check(fused(model)[0], model, feeds(2, 3, 5) | {"k": normal(1, G, 5, D)})


def test_one_head_is_repeated_by_matmul():
    model = proto_of(f"""g (float[B, {H}, S, {D}] q, float[B, 1, {D}, T] k)
        => (float[B, {H}, S, T] y) {{ y = MatMul(q, k) }}""")
    result, remarks, _ = fused(model)
    assert remarks["fired"] == [f"{H} query heads share each of 1 heads of 'k'"]
    check(result, model, {"q": normal(2, H, 3, D), "k": normal(2, 1, D, 5)})


ADDENDS = {"a": normal(2, 3, 8), "b": normal(2, 3, 8, seed=1)}


OVER = ("Reciprocal(root)", "Div(one, root)")
SPELLINGS: dict[str, list[tuple[str, str]]] = {
    "as it is": [],
    "factors turned round": [("Mul(x, inverse)", "Mul(inverse, x)")],
    "one over the root": [OVER],
    "the weight before": [OVER, ("Mul(normal, weight)", "Mul(weight, normal)")],
    "an axis from the front": [("last = {-1}", "last = {2}")],
    "an epsilon with axes": [("float epsilon", "float[1, 1] epsilon")],
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_norm_and_its_residual_are_one_node(spelling: str):
    model = norm(*SPELLINGS[spelling])
    result, *_ = fused(model)
    assert op_types(result) == ["SkipSimplifiedLayerNormalization"]
    check(result, model, ADDENDS)


COPIES = (
    "Identity({0})", "Dropout({0})", "Dropout({0}, epsilon, off)", "Cast<to = 1>({0})",
    "Concat<axis = 0>({0})", "Transpose<perm = [0, 1, 2]>({0})", "Reshape({0}, kept)",
)  # fmt: skip


@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("value", ["x", "mean", "root", "inverse", "normal"])
def test_copies_between_matched_nodes_are_gone_before(copy: str, value: str):
    model = norm()
    node = onnx.parser.parse_node(f"{value}_copy = {copy.format(value)}")
    where = next(i for i, made in enumerate(model.graph.node) if value in made.output)
    for reader in model.graph.node:
        for index, name in enumerate(reader.input):
            if name == value:
                reader.input[index] = f"{value}_copy"
    model.graph.node.insert(where + 1, node)
    for name, array in {"kept": np.array([0, 0, -1]), "off": np.array(False)}.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    result, *_ = fused(model)
    assert op_types(result) == ["SkipSimplifiedLayerNormalization"]
    check(result, model, ADDENDS)


def test_norms_share_what_they_read():
    """One sum and one mean under two norms, and the sum read before them."""
    model = norm(("mean =", "early = Relu(x)\nmean ="))
    again = onnx.helper.make_node("Mul", ["weight", "normal"], ["again"])
    twice = onnx.helper.make_node("Mul", ["y", "again"], ["both"])
    model.graph.node.extend([again, twice])
    for name in ("early", "both"):
        model.graph.output.append(onnx.helper.make_tensor_value_info(name, 1, None))
    result, *_ = fused(model)
    assert op_types(result) == [
        *("Mul", "Relu", "SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization")
    ]
    check(result, model, ADDENDS)


def test_gelu_by_tanh_is_one_node():
    model = gelu()
    result, remarks, _ = fused(model)
    assert op_types(result) == remarks["fired"] == ["FastGelu"]
    check(result, model, {"x": np.linspace(-8, 8, 96, dtype=np.float32).reshape(-1, 8)})


@pytest.mark.parametrize("name", STAYS)
def test_what_stays(name: str):
    change, made = STAYS[name].settings, gelu if "gelu" in name else norm
    result, remarks, _ = fused(made((change["old"], change["new"])))
    assert STAYS[name].expected in op_types(result)
    assert not remarks["refused"]


def test_heads_that_are_mixed_stay_and_are_named():
    """The batch and the heads change places."""
    turned = "[0, 1, 3, 2]>(k_all)", "[1, 0, 3, 2]>(k_all)"
    result, remarks, _ = fused(attention("expand", "transpose", turned))
    assert op_types(result).count("MatMul") == 2
    assert ["mixes heads" in text for text in remarks["refused"]] == [True]


CALLS = {
    "Relu(x)": 1, "LeakyRelu<alpha = 0.0>(x)": 1, "Bernoulli(x)": 2, "RandomUniformLike(x)": 2,
    "Dropout(x, ratio, training)": 2, "RandomNormal<shape = [9]>()": 2, "mine.draw(x)": 2,
    "Multinomial<sample_size = 9>(rows)": 2, "RandomNormalLike(x)": 2,
    "com.microsoft.BiasDropout(x, rows, , ratio, training)": 2,
}  # fmt: skip


def fused_by_kernels(model: onnx.ModelProto) -> ir.Model:
    """Fuse a model of the opset that has kernels: below, nothing is made equal."""
    model.opset_import[0].version = 23
    return fused(model)[0]


@pytest.mark.parametrize(("call", "left"), CALLS.items())
def test_equal_nodes_are_one_and_draws_stay_two(call: str, left: int):
    model = proto_of(f"""g (float[9] x, float[1, 9] rows) => (a, b)
        <float ratio = {{0.5}}, bool training = {{1}}> {{
            one = {call} other = {call} a = Identity(one) b = Identity(other) }}""")
    for value in model.graph.output:
        value.ClearField("type")
    result = fused_by_kernels(model)
    assert len({value.producer().inputs[0] for value in result.graph.outputs}) == left


def test_the_sign_of_0_makes_two_nodes():
    model = proto_of("""g (float[9] x) => (float[9] y) {
        a = LeakyRelu<alpha = 0.0>(x) b = LeakyRelu<alpha = 0.0>(x) y = Div(a, b) }""")
    model.graph.node[1].attribute[0].f = -0.0
    result = fused_by_kernels(model)
    assert op_types(result).count("LeakyRelu") == 2


def test_nodes_with_other_absent_outputs_are_two():
    model = proto_of("""g (int64[M] i) => (int64[K] places, int64[L] first) {
        u, , inverse = Unique<sorted = 1>(i) v, index = Unique<sorted = 1>(i)
        places = Abs(inverse) first = Abs(index) }""")
    del model.graph.node[1].output[2:]
    model.graph.node[1].output.extend(["", ""])
    model.graph.node[0].output.append("")
    result = fused_by_kernels(model)
    check(result, model, {"i": np.array([5, 3, 5, 9, 3])})


@pytest.mark.parametrize("opset", [17, 23, 24])
def test_attention_in_a_function_is_fused(opset: int):
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": {opset}, "own": 1]>
        g (float[B, S, 16] x) => (float[B, S, 16] y) <int64[4] split = {{0, 0, 2, 8}},
            int64[3] flat = {{0, 0, 16}}> {{ y = own.attend(x, split, flat) }}
        <domain: "own", opset_import: ["": {opset}]> attend (x, split, flat) => (y) {{
            heads = Reshape(x, split) q = Transpose<perm = [0, 2, 1, 3]>(heads)
            k = Transpose<perm = [0, 2, 3, 1]>(heads) s = MatMul(q, k)
            w = Softmax<axis = 3>(s) m = MatMul(w, q)
            t = Transpose<perm = [0, 2, 1, 3]>(m) y = Reshape(t, flat) }}""")
    result, remarks, _ = fused(model)
    assert remarks["fired"]
    check(result, model, {"x": normal(2, 5, 16)})
