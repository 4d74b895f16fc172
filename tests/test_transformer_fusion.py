# SPDX-License-Identifier: MIT
"""Attention on shared heads, and norms, are fused whoever spelled them."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from builders.dequantized_models import assert_same_outputs, op_types, run
from builders.exports import fused
from builders.text_models import normal, proto_of

# Query heads, key and value heads, size of a head.
H, G, D = 6, 2, 4
R = H // G

# How ``k[B, G, T, D]`` becomes ``k_all[B, H, T, D]``.
_TARGET = """k_b = Shape<start = 0, end = 1>({sizes})
    k_t = Shape<start = 2, end = 3>({sizes})
    k_target = Concat<axis = 0>(k_b, groups, repeats, k_t, head_size)
    k_merged = Concat<axis = 0>(k_b, heads, k_t, head_size)
    k_one = Unsqueeze(k, two)"""
REPEATS = {
    "expand": _TARGET.format(sizes="k")
    + """
    k_many = Expand(k_one, k_target)
    k_all = Reshape(k_many, k_merged)""",
    # torch.onnx by tracing: sizes of -1 are replaced, though there is none.
    "expand where": _TARGET.format(sizes="k")
    + """
    k_rank = Shape(k_target)
    k_ones = ConstantOfShape<value = int64[1] {1}>(k_rank)
    k_minus = Mul(k_ones, minus)
    k_equal = Equal(k_target, k_minus)
    k_sizes = Where(k_equal, k_ones, k_target)
    k_many = Expand(k_one, k_sizes)
    k_all = Reshape(k_many, k_merged)""",
    # torch.onnx by export: sizes of another layer's cache.
    "expand elsewhere": _TARGET.format(sizes="other")
    + """
    k_many = Expand(k_one, k_target)
    k_all = Reshape<allowzero = 1>(k_many, k_merged)""",
    "tile": _TARGET.format(sizes="k")
    + """
    k_many = Tile(k_one, tiles)
    k_all = Reshape(k_many, k_merged)""",
    "concat": _TARGET.format(sizes="k")
    + """
    k_many = Concat<axis = 2>(k_one, k_one, k_one)
    k_all = Reshape(k_many, k_merged)""",
    "gather": "k_all = Gather<axis = 1>(k, interleaved)",
}
# How ``k_all`` becomes the right operand of the scores' MatMul.
LAYOUTS = {
    "transpose": "k_right = Transpose<perm = [0, 1, 3, 2]>(k_all)",
    "through three axes": """k_flat_sizes = Concat<axis = 0>(minus, k_t_now, head_size)
    k_b_now = Shape<start = 0, end = 2>(k_all)
    k_t_now = Shape<start = 2, end = 3>(k_all)
    k_flat = Reshape(k_all, k_flat_sizes)
    k_turned = Transpose<perm = [0, 2, 1]>(k_flat)
    k_back_sizes = Concat<axis = 0>(k_b_now, head_size, k_t_now)
    k_right = Reshape(k_turned, k_back_sizes)""",
    "scaled": """k_turned = Transpose<perm = [0, 1, 3, 2]>(k_all)
    k_right = Mul(scale, k_turned)""",
}


def parsed(text: str, change: tuple[str, str]) -> onnx.ModelProto:
    """Read a model from its text, with a part of it exchanged; ``""`` for none."""
    assert change[0] in text
    return proto_of(text.replace(*change) if change[0] else text)


def attention(
    repeat: str = "expand", layout: str = "transpose", change: tuple[str, str] = ("", "")
) -> onnx.ModelProto:
    """``Softmax(q @ k') @ v`` of ``q[B, H, S, D]`` and repeated heads of k and v."""
    keys = f"{REPEATS[repeat]}\n    {LAYOUTS[layout]}"
    values = REPEATS[repeat].replace("k_", "v_").replace("(k,", "(v,").replace("(k)", "(v)")
    text = f"""attention (float[B, {H}, S, {D}] q, float[B, {G}, T, {D}] k,
    float[B, {G}, T, {D}] v, float[C, {G}, U, {D}] other) => (float[B, {H}, S, {D}] y)
<int64[1] groups = {{{G}}}, int64[1] repeats = {{{R}}}, int64[1] heads = {{{H}}},
 int64[1] head_size = {{{D}}}, int64[1] two = {{2}}, int64[1] minus = {{-1}},
 int64[5] tiles = {{1, 1, {R}, 1, 1}}, float scale = {{0.5}},
 int64[{H}] interleaved = {{{", ".join(str(h // R) for h in range(H))}}}> {{
    {keys}
    {values}
    scores = MatMul(q, k_right)
    weights = Softmax<axis = -1>(scores)
    y = MatMul(weights, v_all)
}}"""
    # The nodes are written in the order of reading.
    graph = ir.from_proto(parsed(text, change))
    graph.graph.sort()
    model = ir.to_proto(graph)
    onnx.checker.check_model(model)
    return model


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
    assert not {"Expand", "Tile", "Gather"} & set(op_types(result))
    for seed, sizes in enumerate(((1, 1, 9), (2, 3, 5), (3, 1, 1), (2, 5, 7))):
        check(result, model, feeds(*sizes, seed=seed))


def test_a_repetition_that_stretches_other_axes_fails_as_loudly():
    """Sizes of another layer's cache that stretched the keys must not go unseen."""
    model = attention("expand elsewhere")
    result, *_ = fused(model)
    inputs = feeds(1, 1, 1) | {"other": feeds(1, 1, 3)["other"]}
    assert run(model, inputs)[0].shape == (1, H, 1, D)
    with pytest.raises(Exception, match="reshape"):
        run(result, inputs)


@pytest.mark.parametrize(
    "nodes", ["y = MatMul(q, k)", "all = Expand(k, heads) y = MatMul(q, all)"]
)
def test_one_head_is_repeated_by_matmul(nodes: str):
    model = proto_of(f"""g (float[B, {H}, S, {D}] q, float[B, 1, {D}, T] k)
        => (float[B, {H}, S, T] y) <int64[4] heads = {{1, {H}, 1, 1}}> {{
            {nodes} }}""")
    result, remarks, _ = fused(model)
    assert remarks["fired"] == [f"{H} query heads share each of 1 heads of 'k'"]
    check(result, model, {"q": normal(2, H, 3, D), "k": normal(2, 1, D, 5)})


SQUARES = {"power": "square = Pow(x, two)", "product": "square = Mul(x, x)"}
INVERSES = {
    "reciprocal": "inverse = Reciprocal(root) normal = Mul(x, inverse)",
    "one over": "inverse = Div(one, root) normal = Mul(inverse, x)",
    "division": "normal = Div(x, root)",
}
ADDENDS = {"a": normal(2, 3, 8), "b": normal(2, 3, 8, seed=1)}
WEIGHTS = {"behind": "y = Mul(normal, weight)", "before": "y = Mul(weight, normal)"}


def rms_norm(
    square: str, inverse: str, weight: str, change: tuple[str, str] = ("", "")
) -> onnx.ModelProto:
    """The root-mean-square norm of ``a + b``; outputs ``y`` and the sum ``x``."""
    text = f"""n (float[2, 3, 8] a, float[2, 3, 8] b) => (float[B, S, 8] y, float[B, S, 8] x)
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
    result, *_ = fused(model)
    assert op_types(result) == ["SkipSimplifiedLayerNormalization"]
    check(result, model, ADDENDS)


def test_norms_share_what_they_read():
    """One sum and one mean under two norms, and the sum read before them."""
    model = rms_norm("power", "division", "behind", ("mean =", "early = Relu(x)\nmean ="))
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


@pytest.mark.parametrize("kind", [np.float16, np.float64])
def test_norms_of_other_types(kind: type):
    model = rms_norm("power", "reciprocal", "behind")
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(kind))
    for tensor in model.graph.initializer:
        array = onnx.numpy_helper.to_array(tensor)
        if tensor.name != "last":
            tensor.CopyFrom(onnx.numpy_helper.from_array(array.astype(kind), tensor.name))
    result, *_ = fused(model)
    assert "ReduceMean" not in op_types(result)
    inputs = {name: array.astype(kind) for name, array in ADDENDS.items()}
    assert_same_outputs(result, model, inputs, rtol=1e-2 if kind is np.float16 else 1e-7)


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
    text = f"""gelu (float[B, 8] x) => (float[B, 8] y)
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
    result, remarks, _ = fused(model)
    assert op_types(result) == ["FastGelu"]
    assert remarks["fired"] == ["FastGelu"]
    check(result, model, {"x": np.linspace(-8, 8, 96, dtype=np.float32).reshape(-1, 8)})


def gathered(change: tuple[str, str]) -> onnx.ModelProto:
    return attention("gather", change=change)


def norm(change: tuple[str, str]) -> onnx.ModelProto:
    return rms_norm("power", "division", "behind", change)


def gelu(change: tuple[str, str]) -> onnx.ModelProto:
    return tanh_gelu("products", "torch, gpt2", "half of x", change)


WEIGHT = "float[8] weight = {1, 2, 3, 4, 5, 6, 7, 8}"


@pytest.mark.parametrize(
    ("made", "old", "new", "left"),
    [
        # Heads in turn, 0 1 0 1 ..., are not the repetition of attention.
        (gathered, "{0, 0, 0, 1, 1, 1}", "{0, 1, 0, 1, 0, 1}", "Gather"),
        (norm, "last = {-1}", "last = {1}", "ReduceMean"),
        (norm, "float two = {2}", "float two = {3}", "ReduceMean"),
        (norm, WEIGHT, "float weight = {3}", "ReduceMean"),
        # The kernel wants a weight for each element of the axis, and does not broadcast one.
        (norm, WEIGHT, "float[1] weight = {3}", "ReduceMean"),
        # A sum that broadcasts has no kernel.
        (norm, "float[2, 3, 8] b)", "float[8] b)", "SimplifiedLayerNormalization"),
        # Names of dimensions are no sizes: one of the terms may be broadcast.
        (norm, "float[2, 3, 8] b)", "float[B, S, 8] b)", "SimplifiedLayerNormalization"),
        (norm, "float[2, 3, 8] a,", "float[B, S, 8] a,", "SimplifiedLayerNormalization"),
        # A weight that makes the last axis longer, and constants that add axes.
        (
            norm,
            "float[2, 3, 8] a, float[2, 3, 8] b",
            "float[2, 3, 1] a, float[2, 3, 1] b",
            "ReduceMean",
        ),
        (norm, "float epsilon = {1e-6}", "float[1, 1, 1, 1] epsilon = {1e-6}", "ReduceMean"),
        (norm, "float epsilon = {1e-6}", "float epsilon = {-1}", "ReduceMean"),
        (gelu, "half = {0.5}", "half = {0.25}", "Tanh"),
        (gelu, "cubic = {0.044715}", "cubic = {0.044}", "Tanh"),
        (gelu, "root = {0.7978845834732056}", "root = {0.798}", "Tanh"),
        (gelu, "Mul(square, x)", "Mul(square, square)", "Tanh"),
        (gelu, "Mul(x, half)", "Mul(cube, half)", "Tanh"),
        (gelu, "float[B, 8] y", "float[B, 8] y, float[B, 8] g", "Tanh"),
        (gelu, "float[B, 8] x)", "float[B, 8] x, float half)", "Tanh"),
        (gelu, "float", "double", "Tanh"),
    ],
)
def test_what_stays(made, old: str, new: str, left: str):
    result, remarks, _ = fused(made((old, new)))
    assert left in op_types(result)
    assert not remarks["refused"]


def test_heads_that_are_mixed_stay_and_are_named():
    """The batch and the heads change places."""
    result, remarks, _ = fused(
        attention(change=("[0, 1, 3, 2]>(k_all)", "[1, 0, 3, 2]>(k_all)"))
    )
    assert op_types(result).count("MatMul") == 2
    assert ["mixes heads" in text for text in remarks["refused"]] == [True]


DRAWS = {
    "Bernoulli": "Bernoulli(x)",
    "Dropout in training": "Dropout(x, ratio, training)",
    "RandomNormal": "RandomNormal<shape = [9]>()",
    "RandomNormalLike": "RandomNormalLike(x)",
    "RandomUniformLike": "RandomUniformLike(x)",
    "Multinomial": "Multinomial<sample_size = 9>(rows)",
    "of a function": "mine.draw(x)",
    "of a custom operator": "com.microsoft.BiasDropout(x, bias, , ratio, training)",
}


@pytest.mark.parametrize("call", DRAWS.values(), ids=DRAWS)
def test_two_draws_stay_two(call: str):
    model = proto_of(
        f"""g (float[9] x, float[1, 9] rows) => (a, b)
        <float ratio = {{0.5}}, bool training = {{1}},
         float[9] bias = {{1, 1, 1, 1, 1, 1, 1, 1, 1}}> {{
            a_draw = {call} b_draw = {call} a = Identity(a_draw) b = Identity(b_draw) }}"""
    )
    for value in model.graph.output:
        value.ClearField("type")
    result, *_ = fused(model)
    first, second = (value.producer().inputs[0] for value in result.graph.outputs)
    assert first is not second


def test_the_sign_of_0_makes_two_nodes():
    model = proto_of("""g (float[9] x) => (float[9] y) {
        a = LeakyRelu<alpha = 0.0>(x) b = LeakyRelu<alpha = 0.0>(x) y = Div(a, b) }""")
    model.graph.node[1].attribute[0].f = -0.0
    result, *_ = fused(model)
    assert op_types(result).count("LeakyRelu") == 2


def test_equal_nodes_are_one():
    model = proto_of("""g (float[9] x) => (float[9] y) {
        a = Relu(x) b = Relu(x) c = Exp(a) d = Exp(b) y = Add(c, d) }""")
    result, *_ = fused(model)
    assert op_types(result) == ["Add", "Exp", "Relu"]
