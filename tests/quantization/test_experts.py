# SPDX-License-Identifier: MIT
"""Mixtures of experts become QMoE: what is found, what is proved, and the numbers."""

import re

import gguf_files
import numpy as np
import onnx
import onnx.numpy_helper
import onnx_ir as ir
import onnxruntime as ort
import pytest
from builders.quantized_files import kinds, read
from builders.text_models import model_of, normal, proto_of
from checkpoint_files import near, renamed

from ortplugins.errors import ModelFileError
from ortplugins.quantization import Rule, quantize
from ortplugins.quantization.experts.read import find_mixtures
from ortplugins.runtime.stock_session import stock_options

E, H, D, K = 4, 32, 48, 2  # experts, sizes of hidden and inner layers, choices

# What torch's exporter writes of transformers' batched_mm experts, [opset 20] Mixtral.
BATCHED = """
    xx = Reshape(x, to_rows)
    l = MatMul(xx, R)
    s = Softmax <axis = -1> (l)
    top, chosen = TopK(s, k)
    sum = ReduceSum <keepdims = 1> (top, last)
    shares = Div(top, sum)
    x1 = Unsqueeze(xx, one)
    spread = Expand(x1, times)
    rows = Reshape(spread, to_rows)
    ids = Reshape(chosen, flat)
    picks = Unsqueeze(ids, last)
    w1 = GatherND(W1, picks)
    column = Unsqueeze(rows, last)
    p1 = MatMul(w1, column)
    h1 = Squeeze(p1, last)
    gate, up = Split <axis = 1, num_outputs = 2> (h1)
    squashed = Sigmoid(gate)
    silu = Mul(gate, squashed)
    hidden = Mul(silu, up)
    w2 = GatherND(W2, picks)
    column2 = Unsqueeze(hidden, last)
    p2 = MatMul(w2, column2)
    h2 = Squeeze(p2, last)
    share = Reshape(shares, flat)
    one_share = Unsqueeze(share, last)
    weighted = Mul(h2, one_share)
    parts = Reshape(weighted, to_parts)
    added = ReduceSum <keepdims = 0> (parts, one)
    shape = Shape(x)
    y = Reshape(added, shape)
"""
# Other forms: lines of the text above, and what stands there instead.
FORMS = """
== Mixtral
== Qwen3, shares as they are
shares = Div(top, sum) -> shares = Identity(top)
== gpt-oss: weights on the right, biases, interleaved halves, clipped; a softmax of the chosen
top, chosen = TopK(s, k) -> top, chosen = TopK(l, k)
sum = ReduceSum <keepdims = 1> (top, last) -> shares = Softmax <axis = 1> (top)
shares = Div(top, sum) ->
w1 = GatherND(W1, picks) -> w1 = GatherND(W1T, picks) b1 = GatherND(B1, picks)
column = Unsqueeze(rows, last) -> column = Unsqueeze(rows, one)
p1 = MatMul(w1, column) -> p1 = MatMul(column, w1)
h1 = Squeeze(p1, last) -> q1 = Squeeze(p1, one) h1 = Add(q1, b1)
gate, up = Split <axis = 1, num_outputs = 2> (h1) ->
    g = Slice(h1, nought, far, one, two) gate = Clip(g, , limit)
    u = Slice(h1, one, far, one, two) up = Clip(u, lower, limit)
squashed = Sigmoid(gate) -> scaled = Mul(gate, alpha) squashed = Sigmoid(scaled)
hidden = Mul(silu, up) -> up1 = Add(up, unit) hidden = Mul(up1, silu)
w2 = GatherND(W2, picks) -> w2 = GatherND(W2T, picks) b2 = GatherND(B2, picks)
column2 = Unsqueeze(hidden, last) -> column2 = Unsqueeze(hidden, one)
p2 = MatMul(w2, column2) -> p2 = MatMul(column2, w2)
h2 = Squeeze(p2, last) -> q2 = Squeeze(p2, one) h2 = Add(q2, b2)
== DeepSeek: sigmoids, a bias that only chooses, shares that are divided and scaled
s = Softmax <axis = -1> (l) -> s = Sigmoid(l) biased = Add(s, some)
top, chosen = TopK(s, k) ->
    greatest, chosen = TopK <sorted = 0> (biased, k)
    top = GatherElements <axis = 1> (s, chosen)
shares = Div(top, sum) -> quotient = Div(top, sum) shares = Mul(quotient, alpha)
== TorchScript repeats by Tile and picks by Gather
spread = Expand(x1, times) ->
    d = Concat <axis = 0> (one, k) i = OneHot(one, three, d) r = Reshape(i, flat)
    spread = Tile(x1, r)
w1 = GatherND(W1, picks) -> w1 = Gather(W1, ids)
w2 = GatherND(W2, picks) -> w2 = Gather(W2, ids)
gate, up = Split <axis = 1, num_outputs = 2> (h1) ->
    gate = Slice(h1, nought, half, last) up = Slice(h1, half, far, last)
== scores of another type
s = Softmax <axis = -1> (l) -> wide = Cast <to = 11> (l) s = Softmax <axis = -1> (wide)
share = Reshape(shares, flat) -> narrow = Cast <to = 1> (shares) share = Reshape(narrow, flat)
== operands swapped
silu = Mul(gate, squashed) -> silu = Mul(squashed, up)
hidden = Mul(silu, up) -> hidden = Mul(gate, silu)
== two matrices
gate, up = Split <axis = 1, num_outputs = 2> (h1) ->
    gate = Identity(h1) v = GatherND(W3, picks) p3 = MatMul(v, column) up = Squeeze(p3, last)
w1 = GatherND(W1, picks) -> w1 = GatherND(W0, picks)
== silu
gate, up = Split <axis = 1, num_outputs = 2> (h1) -> gate = Identity(h1)
w1 = GatherND(W1, picks) -> w1 = GatherND(W0, picks)
silu = Mul(gate, squashed) -> hidden = Mul(gate, squashed)
hidden = Mul(silu, up) ->
== relu
gate, up = Split <axis = 1, num_outputs = 2> (h1) -> hidden = Relu(h1)
w1 = GatherND(W1, picks) -> w1 = GatherND(W0, picks)
squashed = Sigmoid(gate) ->
silu = Mul(gate, squashed) ->
hidden = Mul(silu, up) ->
"""
# What is not proved any more, and the reason.
REFUSED = """
== another activation: activation
squashed = Sigmoid(gate) -> squashed = Tanh(gate)
== a sigmoid of both halves: activation
squashed = Sigmoid(gate) -> z = Mul(gate, up) squashed = Sigmoid(z)
== a sigmoid of the other half's half: activation
squashed = Sigmoid(gate) -> z = Mul(up, alpha) squashed = Sigmoid(z)
hidden = Mul(silu, up) -> hidden = Mul(silu, gate)
== no second half: proved
gate, up = Split <axis = 1, num_outputs = 2> (h1) ->
    gate = Slice(h1, nought, half, one) u = Slice(h1, half, far, one)
    up = Slice(h1, to_half, half, one)
== clipped apart: one limit
hidden = Mul(silu, up) -> c = Clip(up, lower, limit) hidden = Mul(silu, c)
== a gate that is clipped from below: below
squashed = Sigmoid(gate) -> g = Clip(gate, lower, limit) squashed = Sigmoid(g)
silu = Mul(gate, squashed) -> silu = Mul(g, squashed)
== numbers that no TopK chose: TopK
top, chosen = TopK(s, k) -> top, places = TopK(s, k) chosen = Mod(places, k)
== the places of another axis: TopK
top, chosen = TopK(s, k) ->
    st = Transpose <perm = [1, 0]> (s) tt, ct = TopK <axis = 0> (st, k)
    top = Transpose <perm = [1, 0]> (tt) chosen = Transpose <perm = [1, 0]> (ct)
== other experts in the second layer: same numbers
w2 = GatherND(W2, picks) ->
    other = Sub(ids, ids) picks2 = Unsqueeze(other, last) w2 = GatherND(W2, picks2)
== one expert for all: TopK
ids = Reshape(chosen, flat) -> given = Reshape(chosen, flat) ids = Sub(given, given)
== shares that may be negative: positive
shares = Div(top, sum) -> shares = Sub(top, sum)
== shares of logits: positive
top, chosen = TopK(s, k) -> top, chosen = TopK(l, k)
== shares in another order: those of the chosen
share = Reshape(shares, flat) ->
    turned = Transpose <perm = [1, 0]> (shares) share = Reshape(turned, flat)
== shares of the first token: one share each
one_share = Unsqueeze(share, last) -> u = Unsqueeze(share, last) one_share = Gather(u, nought)
== tokens in another order: each token once
spread = Expand(x1, times) -> x0 = Unsqueeze(xx, nought) spread = Expand(x0, times_first)
== the first token for all: one row for each
rows = Reshape(spread, to_rows) -> rows = Gather(xx, nought)
== a sum over tokens: one share each
parts = Reshape(weighted, to_parts) -> parts = Reshape(weighted, to_parts_first)
== no shares: one share each
weighted = Mul(h2, one_share) -> weighted = Mul(h2, h2)
== columns that are rows: proved
h1 = Squeeze(p1, last) -> h1 = Reshape(p1, to_half)
"""


def cases(text: str) -> dict[str, str]:
    """The edits of a text, by what stands behind ``==``."""
    parts = [part.partition("\n") for part in text.split("== ")[1:]]
    return {name.strip(): edits for name, _, edits in parts}


def edited(edits: str, text: str = BATCHED) -> str:
    """Replace lines, ``old -> new``; indented lines belong to the one before."""
    for edit in re.split(r"\n(?=\S)", edits.strip()):
        old, _, new = (part.strip() for part in edit.partition("->"))
        assert old in text, old
        text = text.replace(f" {old}\n" if old else "", f" {new}\n" if old else "")
    return text


def constants(dtype=np.float32, d=D):
    w1, w2 = normal(E, 2 * d, H) / 6, normal(E, H, d, seed=1) / 7
    floats = {
        "R": normal(H, E), "W1": w1, "W0": w1[:, :d], "W3": w1[:, d:], "W2": w2,
        "W1T": w1.swapaxes(1, 2), "W2T": w2.swapaxes(1, 2),
        "B1": normal(E, 2 * d), "B2": normal(E, H), "some": normal(E),
        "alpha": np.array(1.7), "unit": np.array(1.0), "limit": np.array(0.8),
        "lower": np.array(-0.8),
    }  # fmt: skip
    integers = {
        "to_rows": [-1, H], "to_parts": [-1, K, H], "to_parts_first": [K, -1, H],
        "to_half": [-1, d], "flat": [-1], "times": [1, K, 1], "times_first": [K, 1, 1],
        "k": [K], "one": [1], "two": [2], "three": 3, "last": [-1], "nought": [0],
        "half": [d], "far": [1 << 62],
    }  # fmt: skip
    found = {name: np.ascontiguousarray(a, dtype) for name, a in floats.items()}
    return found | {name: np.array(numbers) for name, numbers in integers.items()}


def batched(edits: str = "", d: int = D) -> onnx.ModelProto:
    """The model of the text, edited, with the constants that it reads."""
    text = edited(edits)
    used = {name: a for name, a in constants(d=d).items() if re.search(rf"\b{name}\b", text)}
    graph = (
        f"g (float[batch, sequence, {H}] x) => (float[batch, sequence, {H}] y) {{ {text} }}"
    )
    return proto_of(graph, used, opset=20)


OPERATOR = {
    "swiglu": (
        "swiglu_fusion = 1, activation_alpha = 1.702, activation_beta = 1.0, "
        "swiglu_limit = 0.9"
    ),
    "swiglu, plain": "swiglu_fusion = 1",
    "relu": "", "silu": "", "gelu": "", "identity": "",
}  # fmt: skip


INPUTS = "x, l, W1, B1, W2, B2"


def operator(
    kind="swiglu", *, attributes="", dtype="float", normalize=1, inputs=INPUTS, opset=21
):
    """The model of one MoE."""
    activation, extra = kind.split(",")[0], attributes or OPERATOR[kind]
    wide = activation == "swiglu"
    text = f"""g ({dtype}[T, {H}] x) => ({dtype}[T, {H}] y) {{
        [router] l = MatMul(x, R)
        [moe] y = com.microsoft.MoE <k = {K}, activation_type = "{activation}",
            normalize_routing_weights = {normalize}{", " * bool(extra)}{extra}> ({inputs})
    }}"""
    text = text.replace("[moe]", "C2 = Neg(W2) [moe]") if "C2" in inputs else text
    numpy_type = {"float": np.float32, "float16": np.float16}[dtype]
    found = {name: constants(numpy_type)[name] for name in ("R", "W1", "W2", "B1", "B2")}
    if not wide:
        found |= {"W1": found["W1"][:, :D].copy(), "B1": found["B1"][:, :D].copy()}
    return proto_of(text, found, opset=opset)


def run(model, x):
    content = read(model).SerializeToString()
    session = ort.InferenceSession(
        content, stock_options(), providers=["CPUExecutionProvider"]
    )
    (y,) = session.run(None, {session.get_inputs()[0].name: x})
    return y


def operators(model) -> list[str]:
    return kinds(read(model))


def decoded(model, index):
    """The matrices [E, N, K] of a QMoE, as its description reads them."""
    proto = read(model)
    (node,) = [node for node in proto.graph.node if node.op_type == "QMoE"]
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    bits = attributes["expert_weight_bits"]
    tensors = {t.name: onnx.numpy_helper.to_array(t) for t in proto.graph.initializer}
    packed, scales = (tensors[name] for name in node.input[3 * index - 1 : 3 * index + 1])

    def spread(array):
        codes = array[..., None] >> np.arange(0, 8, bits, dtype=np.uint8) & ((1 << bits) - 1)
        return codes.reshape(*array.shape[:-1], -1).astype(np.int64)

    codes, zeros = spread(packed), 1 << (bits - 1)
    size = attributes["block_size"]
    if len(node.input) > 11 and node.input[10 + index]:
        zeros = spread(tensors[node.input[10 + index]])[..., : codes.shape[-1] // size]
        zeros = np.repeat(zeros, size, -1)
    return (codes - zeros) * np.repeat(scales.astype(np.float64), size, -1)


def with_weights(proto, weights):
    """The float model with other numbers in its initializers."""
    other = onnx.ModelProto.FromString(proto.SerializeToString())
    for tensor in other.graph.initializer:
        if tensor.name in weights:
            dtype = onnx.numpy_helper.to_array(tensor).dtype
            array = weights[tensor.name].astype(dtype)
            tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    return other


def one_layer(weight, dtype="float"):
    n, k = weight.shape
    ends = f"({dtype}[T, {k}] x) => ({dtype}[T, {n}] y)"
    return model_of(f"g {ends} {{ y = Gemm <transB = 1> (x, W) }}", {"W": weight})


def far(actual, expected):
    return np.abs(actual - expected).max() / np.abs(expected).max()


@pytest.mark.parametrize(
    ("kind", "normalize", "settings", "dtype", "bound"),
    [
        *((kind, 1, {"bits": 4}, "float", 1e-5) for kind in OPERATOR),
        ("relu", 0, {"bits": 4}, "float", 1e-5),
        ("swiglu", 0, {"is_symmetric": False, "grid": "amax"}, "float16", 5e-3),
        # Whose activations have 8 bits.
        ("swiglu", 1, {"bits": 8, "is_symmetric": False}, "float", 3e-2),
    ],
    ids=str,
)
def test_the_operator_computes_with_its_experts_rounded_one_by_one(
    kind, normalize, settings, dtype, bound
):
    settings = settings | {"block_size": 16}
    model = operator(kind, dtype=dtype, normalize=normalize)
    result = quantize(model, **settings)
    assert operators(result.model).count("QMoE") == 1
    assert not {"MoE", "NonZero", "DequantizeLinear"} & set(operators(result.model))
    # Each expert as if it were alone.
    weights = constants(np.float16 if dtype == "float16" else np.float32)
    rounded = {}
    for index, name in ((1, "W1"), (2, "W2")):
        (given,) = [
            onnx.numpy_helper.to_array(t) for t in model.graph.initializer if t.name == name
        ]
        rounded[name] = decoded(result.model, index)
        for expert in range(E):
            alone = quantize(one_layer(given[expert], dtype), **settings).model
            wanted = run(alone, np.eye(given.shape[2], dtype=weights["R"].dtype))
            assert far(rounded[name][expert], wanted.T.astype(np.float64)) < 1e-3
    x = normal(40, H, dtype=weights["R"].dtype)
    expected = run(with_weights(model, rounded), x).astype(np.float64)
    assert far(run(result.model, x), expected) < bound
    assert far(run(result.model, x), run(model, x).astype(np.float64)) < 0.4


@pytest.mark.parametrize("name", cases(FORMS))
def test_chosen_matrices_are_one_operator_and_products_of_standard_onnx(name):
    model = batched(cases(FORMS)[name])
    x = normal(2, 9, H)
    exact = run(model, x)
    ((_, mixture),) = find_mixtures(ir.from_proto(model))
    assert not isinstance(mixture, str), mixture
    kernel = quantize(model, quant_format="MatMulNBits", block_size=16, bits=8)
    portable = quantize(model, block_size=16)
    assert operators(kernel.model).count("QMoE") == 1
    assert "QMoE" not in operators(portable.model)
    assert all(not node.domain for node in read(portable.model).graph.node)
    assert far(run(kernel.model, x), exact) < 3e-2
    # The matrices of both are the same, and those of no other expert.
    fine = quantize(model, quant_format="MatMulNBits", block_size=16).model
    assert far(run(fine, x), run(portable.model, x)) < 1e-5
    assert kernel.report.coverage.share > 0.9
    assert operators(kernel.model).count("MatMulNBits") == 0


@pytest.mark.parametrize("name", cases(REFUSED))
def test_what_is_not_proved_stays(name):
    ((_, found),) = find_mixtures(ir.from_proto(batched(cases(REFUSED)[name])))
    assert isinstance(found, str) and name.partition(": ")[2] in found


SPARSE = "swiglu_fusion = 1, use_sparse_mixer = 1"
OPERATORS_REFUSED = {
    "fc3": ({"inputs": "x, l, W1, , W2, , W1"}, "no fc3"),
    "a sparse mixer": ({"attributes": SPARSE}, "use_sparse_mixer"),
    "halves behind each other": ({"attributes": "swiglu_fusion = 2"}, "swiglu_fusion=1"),
    "geglu": ({"kind": "geglu", "attributes": "swiglu_fusion = 1"}, "no activation 'geglu'"),
    "an old opset": ({"opset": 12}, "opset 12"),
    "weights that are computed": ({"inputs": "x, l, W1, , C2"}, "computed at run time"),
    "weights of other sizes": ({"kind": "relu", "inputs": "x, l, W2, , W2"}, r"48\].*fit e"),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATORS_REFUSED)
def test_what_the_kernel_does_not_compute_is_refused_with_a_reason(name):
    how, reason = OPERATORS_REFUSED[name]
    model = ir.from_proto(operator(**how))
    ((node, found),) = find_mixtures(model)
    assert node.name == "moe" and re.search(reason, found)
    with pytest.raises(ModelFileError, match=f"moe: .*({reason})"):
        quantize(model)


PARTS = {
    "one in other bits": ({"rules": {"W1.2": {"bits": 8}}}, "bits or block_size"),
    "one in float": ({"rules": {"W2.0": "float"}}, "stay in float"),
    "no whole blocks": ({"block_size": 32}, "whole blocks"),
    "no blocks": ({"block_size": -1}, "whole blocks"),
    "two bits": ({"bits": 2}, "4 or 8 bits"),
}


@pytest.mark.parametrize(
    ("name", "quant_format"),
    [("one in float", "QDQ"), *((name, "MatMulNBits") for name in PARTS)],
)
def test_experts_that_do_not_fit_into_one_operator_stay_products(name, quant_format):
    settings, reason = PARTS[name]
    model = operator("swiglu")
    result = quantize(model, **{"block_size": 16, "quant_format": quant_format} | settings)
    assert any(
        re.search(f"'moe' are no QMoE: .*{reason}", note) for note in result.report.notes
    )
    assert operators(result.model).count("NonZero") == E
    assert not {"MoE", "QMoE"} & set(operators(result.model))
    x = normal(20, H)
    exact = run(model, x)
    assert far(run(result.model, x), exact) < (2 if settings.get("bits") == 2 else 0.4)


@pytest.mark.parametrize("opset", [17, 21])  # one is converted
@pytest.mark.parametrize("pattern", ["moe", "W1", "*W2*", "re:^W1$"])
def test_experts_that_a_rule_keeps_in_float_stay_the_operator(pattern, opset):
    model = operator("swiglu", opset=opset)
    rules = [Rule(pattern, keep_float=True), Rule(":router", keep_float=False)]
    report = (result := quantize(model, rules=rules, block_size=16)).report
    assert operators(result.model).count("MoE") == 1
    (row,) = [row for row in report.refused if row.node == "moe"]
    assert row.reason == f"kept in float by {pattern!r}"
    # A rule that names the operator, or a stack, is for all experts.
    wide = quantize(model, rules=[Rule(pattern, bits=8)], block_size=16).report
    assert {row.bits for row in wide.quantized if "W1" in row.weight} <= {4, 8}


def test_a_router_that_is_quantised_already_is_left_as_it_is():
    rules = [Rule(":router", keep_float=False), Rule("moe", keep_float=True)]
    first = quantize(operator("swiglu"), rules=rules, block_size=16).model
    assert "DequantizeLinear" in operators(first) and "MoE" in operators(first)
    result = quantize(first, block_size=16)
    assert "QMoE" in operators(result.model)
    (row,) = [row for row in result.report.refused if row.node == "router"]
    assert row.reason.startswith("already quantised")
    x = normal(20, H)
    assert far(run(result.model, x), run(first, x)) < 0.4


@pytest.mark.parametrize(
    "settings", [{}, {"rules": {"W1.2": {"bits": 8}}}], ids=["one", "many"]
)
@pytest.mark.parametrize("normalize", [0, 1])
def test_of_equal_scores_the_same_are_taken(settings, normalize):
    model = operator("relu", normalize=normalize)
    model = with_weights(model, {"R": np.zeros((H, E))})
    result = quantize(model, bits=8, block_size=16, **settings)
    x = normal(20, H)
    assert far(run(result.model, x), run(model, x)) < 5e-2


def test_statistics_of_an_expert_are_of_its_tokens_alone():
    model = operator("relu", normalize=0)
    weights = constants()
    router = weights["R"].copy()
    router[0, 3] = -1e3  # nothing goes to the last
    x = np.concatenate([np.ones((600, 1), np.float32), normal(600, H - 1)], axis=1)
    model = with_weights(model, {"R": router})
    settings = {"method": "gptq", "block_size": 16}
    result = quantize(model, calibration_data_reader=[{"x": x}], **settings)
    scores = x @ router
    chosen = np.argsort(-scores, axis=1)[:, :K]
    for expert in range(E - 1):
        tokens = x[(chosen == expert).any(axis=1)]
        alone = one_layer(weights["W1"][expert, :D])
        wanted = quantize(alone, calibration_data_reader=[{"x": tokens}], **settings).model
        wanted = run(wanted, np.eye(H, dtype=np.float32)).T
        assert np.mean(np.abs(decoded(result.model, 1)[expert] - wanted) < 1e-5) > 0.99
    (note,) = [note for note in result.report.notes if "no token" in note]
    assert note.endswith("W1.3, W2.3")
    assert {row.method for row in result.report.quantized if row.weight.endswith(".3")} == {
        "rtn"
    }


@pytest.mark.parametrize(
    "settings",
    [{"method": "awq_lite"}, {"method": "awq_gptq"}, {"share_of_8_bits": 0.5},
     {"method": "gptq", "quantized_inputs": True}, {"recipe": "best", "block_size": 16}],
    ids=str,
)  # fmt: skip
def test_every_method_leaves_experts_one_form(settings):
    model = operator("swiglu")
    samples = [{"x": normal(50, H, seed=seed)} for seed in range(2)]
    result = quantize(model, calibration_data_reader=samples, **{"block_size": 16} | settings)
    assert operators(result.model).count("QMoE") == 1
    x = normal(20, H)
    assert far(run(result.model, x), run(model, x)) < 0.5


def test_experts_that_get_other_tokens_in_the_quantised_model_are_not_compared_with_float():
    model = operator("swiglu")
    text = """[before] x1 = Gemm(x, M)"""
    (first, *_) = proto_of(
        f"g (float[T, {H}] x) => (float[T, {H}] x1) {{ {text} }}"
    ).graph.node
    for node in model.graph.node:
        node.input[:] = ["x1" if name == "x" else name for name in node.input]
    model.graph.node.insert(0, first)
    model.graph.initializer.append(onnx.numpy_helper.from_array(normal(H, H), "M"))
    settings = {
        "method": "gptq",
        "block_size": 16,
        "calibration_data_reader": [{"x": normal(90, H)}],
    }
    rules = {"before": {"bits": 2}}
    paired = quantize(model, quantized_inputs=True, rules=rules, **settings).model
    alone = quantize(model, rules=rules, **settings).model
    assert (decoded(paired, 1) == decoded(alone, 1)).all()


def test_stacks_in_files_are_not_copied_and_older_opsets_converted(tmp_path):
    model = operator("swiglu")
    model.opset_import[0].version = 17
    path = tmp_path / "m.onnx"
    ir.save(ir.from_proto(model), path, external_data="m.data", size_threshold_bytes=0)
    result = quantize(path, tmp_path / "q.onnx", block_size=16)
    loaded = onnx.load(tmp_path / "q.onnx")
    x = normal(20, H)
    assert far(run(loaded, x), run(quantize(model, block_size=16).model, x)) < 1e-6
    assert result.report.coverage.quantized_elements == E * (2 * D * H + H * D)


STACKS = {"gate": (E, 64, H), "up": (E, 64, H), "down": (E, H, 64)}
MODULE = "model.layers.0.mlp.experts"
BIASED = """
h1 = Squeeze(p1, last) -> q1 = Squeeze(p1, last) b1 = GatherND(B1, picks) h1 = Add(q1, b1)
h2 = Squeeze(p2, last) -> q2 = Squeeze(p2, last) b2 = GatherND(B2, picks) h2 = Add(q2, b2)
"""


@pytest.mark.parametrize(
    ("types", "quant_format", "kernels"),
    [
        (("Q4_0", "Q4_0", "Q4_0"), "MatMulNBits", {"QMoE"}),
        (("Q8_0", "Q4_0", "Q8_0"), "MatMulNBits", {"QMoE"}),
        (("Q4_1", "Q4_1", "Q4_1"), "MatMulNBits", {"MatMulNBits"}),
        (("Q4_0", "Q4_0", "Q8_0"), "MatMulNBits", {"MatMulNBits"}),
        (("Q4_0", "Q4_0", "F16"), "MatMulNBits", {"MatMulNBits"}),
        (("Q4_0", "Q8_0", "Q5_1"), "QDQ", {"DequantizeLinear"}),
    ],
    ids=str,
)
def test_experts_of_llama_cpp_keep_their_numbers(tmp_path, types, quant_format, kernels):
    pytest.importorskip("gguf")
    path, tensors, weights, biases = tmp_path / "m.gguf", {}, {}, {}
    for seed, (name, kind) in enumerate(zip(STACKS, types, strict=True)):
        e, n, k = STACKS[name]
        stored, weight = gguf_files.blocks(kind, e * n, k, seed)
        tensors[f"blk.0.ffn_{name}_exps.weight"] = stored.reshape(e, n, -1), kind
        weights[name], biases[name] = weight.reshape(e, n, k), normal(e, n, seed=seed)
        tensors[f"blk.0.ffn_{name}_exps.bias"] = biases[name], None
    gguf_files.save_gguf(path, tensors)
    stored = {"W2": weights["down"], "B2": biases["down"]}
    for name, parts in (("W1", weights), ("B1", biases)):
        stored[name] = np.concatenate([parts["gate"], parts["up"]], axis=1)
    rounded = with_weights(batched(BIASED, d=64), stored)
    given = {name: near(array) for name, array in stored.items()}
    model = ir.from_proto(with_weights(rounded, given))
    names = {"W1": "gate_up_proj", "W2": "down_proj"}
    names |= {"B1": "gate_up_proj_bias", "B2": "down_proj.bias"}
    model = renamed(model, {name: f"{MODULE}.{new}" for name, new in names.items()})
    result = quantize(model, checkpoint=path, quant_format=quant_format)
    written = set(operators(result.model))
    assert kernels == written & {"QMoE", "MatMulNBits", "DequantizeLinear"}
    x = normal(2, 9, H)
    bound = 3e-2 if types[0] == "Q8_0" else 1e-5  # QMoE rounds activations to 8 bits
    assert far(run(result.model, x), run(rounded, x)) < bound
    assert not any("of the checkpoint" in note for note in result.report.notes)
    with pytest.raises(ModelFileError, match="moe: no codes of its experts are in the chec"):
        quantize(operator("relu"), checkpoint=path)


def test_a_loop_that_torchscript_traced_is_refused_by_name():
    text = f"""g (float[T, {H}] x, int64[n] hit) => (float[T, N] y) {{
        i = Gather <axis = 0> (hit, first) [pick] w = Gather(W1, i)
        t = Transpose <perm = [1, 0]> (w) y = MatMul(x, t) }}"""
    model = model_of(text, {"W1": constants()["W1"], "first": np.array(0)})
    ((node, found),) = find_mixtures(model)
    assert node.name == "pick" and "batched_mm" in found
    with pytest.raises(ModelFileError, match="pick: experts: a loop that TorchScript traced"):
        quantize(model)
