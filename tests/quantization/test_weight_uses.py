# SPDX-License-Identifier: MIT
"""Which constant matrices are found, how they are read, and which are refused, by name."""

import re
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from builders.quantized_files import FORMATS, kinds, read
from builders.same_numbers import session
from builders.text_models import model_of, normal

from ortplugins.errors import ModelFileError
from ortplugins.quantization import quantize
from ortplugins.quantization.weights.uses import WeightUse, find_uses

K, N = 12, 5


def found(text: str, weights: dict[str, np.ndarray], *op_types: str) -> dict[str, object]:
    """What is found at each node: ``(index, weight, K, N, stored_k_last)``, or the refusal."""
    answers: dict[str, object] = {}
    for node, item in find_uses(model_of(text, weights), op_types or ("MatMul", "Gemm")):
        if isinstance(item, WeightUse):
            weight = item.weight.name
            answers[item.label] = (item.index, weight, item.K, item.N, item.stored_k_last)
        else:
            answers[node.name or node.outputs[0].name] = item
    return answers


RIGHT, LEFT = {"W": normal(K, N)}, {"W": normal(N, K)}


ROWS = (0, "W", K, 9, True)


@pytest.mark.parametrize(
    ("axis", "table", "expected"),
    [
        (0, normal(9, K), ROWS),
        (-2, normal(9, K), ROWS),
        (1, normal(9, K), "axis 0"),
        (-1, normal(9, K), "axis 0"),
        (0, np.ones((9, 4), np.int64), None),  # shapes that are gathered are left in peace
    ],
)
def test_a_table_is_read_along_its_rows(axis, table, expected):
    text = f"g (int64[A] x) => (float[A, N] y) {{ [m] y = Gather <axis = {axis}> (W, x) }}"
    answer = found(text, {"W": table}, "Gather").get("m")
    assert expected in answer if isinstance(expected, str) else answer == expected
    assert found(text, {"W": table}) == {}


def test_rows_that_end_within_a_byte_have_no_kernel():
    text = (
        """g (int64[A] x) => (float[A, 5] y) { [t] h = Gather(W, x) [m] y = MatMul(h, V) }"""
    )
    model = model_of(text, {"W": normal(9, 11), "V": normal(11, N)})
    options = {"op_types": ["MatMul", "Gather"], "quant_format": "MatMulNBits"}
    table, product = quantize(model, **options).report.nodes
    assert (table.bits, product.bits) == (0, 4)
    assert table.reason == "GatherBlockQuantized wants rows of whole bytes, not 11 x 4 bits"


@pytest.mark.parametrize(
    ("angle", "lines", "bits"),
    [
        (np.cos, "c = Unsqueeze(r, one) y = Mul(x, c)", 0),
        (np.sin, "y = Mul(r, x)", 0),
        (np.cos, "s = Mul(x, r) y = Add(s, r)", 4),
        (np.cos, "y = Mul(r, scale)", 4),
        (lambda angles: np.cos(angles + 1e-3 * np.arange(16)), "y = Mul(x, r)", 4),
    ],
)
def test_tables_of_cosines_and_sines_stay_in_float(angle, lines, bits):
    text = f"""g (int64[T] i, float[P, 12] z, float[] x) => (float[P, 5] u, float[] y) {{
        r = Gather(W, i) {lines} u = MatMul(z, V) }}"""
    angles = np.outer(np.arange(40), 1 / 100 ** np.linspace(0, 1, 16))
    weights = {"W": angle(angles).astype(np.float32), "V": normal(K, N)}
    weights |= {"one": np.array([1]), "scale": normal(16)}
    options = {"op_types": ["MatMul", "Gather"]}
    table, _ = quantize(model_of(text, weights), **options).report.nodes
    assert (table.bits, "cosines of positions" in table.reason) == (bits, not bits)
    options["rules"] = {"W": {"keep_float": False}}
    table, _ = quantize(model_of(text, weights), **options).report.nodes
    assert table.bits == 4


REFUSED = {
    "a stack": ("MatMul(x, W)", normal(2, K, N), r"'W'.*\[2, 12, 5\]"),
    "double": ("MatMul(d, W)", normal(K, N, dtype=np.float64), "'W' is double"),
    "integers": ("MatMul(i, W)", np.ones((K, N), np.int32), "'W' is int32"),
    "bfloat16": ("MatMul(b, W)", normal(K, N).astype(ml_dtypes.bfloat16), "'W' is bfloat16"),
    "nothing": ("MatMul(x, W)", np.zeros((0, N), np.float32), r"'W'.*\[0, 5\]"),
    "cast first": ("MatMul(x, c)", normal(K, N, dtype=np.float16), "'W' goes through Cast"),
    "shaped first": ("MatMul(x, r)", normal(K * N), "'W' goes through Reshape"),
    "transA": ("Gemm <transA = 1> (x, W)", normal(K, N), "a transposed operand"),
    "batches transposed": (
        "com.microsoft.FusedMatMul <transBatchB = 1> (x, W)", normal(K, N), "batches",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_quantised_is_refused_by_name(name):
    line, weight, reason = REFUSED[name]
    text = f"""g (float[P, Q] x) => (float[P, S] y) {{
        d = Cast <to = 11> (x) i = Cast <to = 6> (x) b = Cast <to = 16> (x)
        c = Cast <to = 1> (W) r = Reshape(W, s)
        [m] y = {line}
        [n] z = MatMul(x, V)
    }}"""
    weights = {"W": weight, "V": normal(K, N, seed=1), "s": np.array([K, N])}
    answers = found(text, weights)
    assert answers["n"] == (1, "V", K, N, False)
    assert re.search(reason, answers["m"]), answers["m"]
    report = quantize(model_of(text, weights)).report
    assert [row.node for row in report.quantized] == ["n"]
    assert [(row.node, bool(row.reason)) for row in report.refused] == [("m", True)]


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize(
    ("weights", "other", "nodes"),
    [
        (RIGHT, "W", "[m] y = MatMul(x, W)"),
        (RIGHT, "z", "[m] y = MatMul(x, W) z = Relu(W)"),
        (LEFT, "z", "t = Transpose(W) [m] y = MatMul(x, t) z = Relu(t)"),
    ],
)
def test_a_weight_that_others_read_stays_for_them(weights, other, nodes, layout):
    text = f"g (float[P, 12] x) => (float[P, 5] y, float[12, 5] {other}) {{ {nodes} }}"
    proto = read(quantize(model_of(text, weights), quant_format=layout).model)
    onnx.checker.check_model(proto, full_check=layout != "MatMulNBits")
    assert "W" in [tensor.name for tensor in proto.graph.initializer]
    assert ("Relu" in kinds(proto)) == ("Relu" in nodes)


def test_a_weight_whose_sizes_are_read_is_quantised():
    text = """g (float[P, 12] x) => (float[P, 5] y, int64[2] s, int64 n, int64[1] k) {
        t = Transpose(W) [m] y = MatMul(x, t) s = Shape(t) n = Size(W) k = Shape<start = 1>(W)
    }"""
    proto = read(quantize(model_of(text, LEFT)).model)
    assert "W" not in [tensor.name for tensor in proto.graph.initializer]
    _, *sizes = session(proto).run(None, {"x": normal(2, K)})
    assert [array.tolist() for array in sizes] == [[K, N], K * N, [K]]


QUANTISED = {
    "by blocks": "w = DequantizeLinear <axis = 0, block_size = 4> (codes, scales)",
    "as a whole": "w = DequantizeLinear(codes, scale)",
    "and transposed": """v = DequantizeLinear(codes, scale) u = Transpose(v)
                         w = Transpose <perm = [1, 0]> (u)""",
    "and cast": """v = DequantizeLinear(codes, scale) u = Cast <to = 10> (v)
                   w = Cast <to = 1> (u)""",
    "and back": "q = QuantizeLinear(W, scale) w = DequantizeLinear(q, scale)",
}


@pytest.mark.parametrize("name", QUANTISED)
def test_what_is_quantised_already_is_reported(name):
    text = f"""g (float[P, 12] x) => (float[P, 5] y) {{
        {QUANTISED[name]}
        [m] h = MatMul(x, w)
        [n] y = MatMul(h, V)
    }}"""
    weights = {
        "codes": np.ones((K, N), np.int8), "scales": np.ones((K // 4, N), np.float32),
        "scale": np.float32(1), "V": normal(N, N), **RIGHT,
    }  # fmt: skip
    report = quantize(model_of(text, weights)).report
    assert [row.node for row in report.quantized] == ["n"]
    (row,) = report.refused
    assert row.node == "m"
    assert row.reason.startswith("already quantised")


# What follows the scores l of [scores] l = MatMul(x, R), R [12, 4], and whether they choose
# experts; E is [4, 12], S [4, 12, 12], and [expert] multiplies by W [12, 12].
ROUTERS = {
    "top of softmax": ("""
        s = Softmax(l) v, i = TopK(s, two) m = ReduceSum(v, axis) j = Cast <to = 1> (i)
        k = ReduceSum(j, axis) g = Mul(m, k) t = Mul(x, g) [expert] y = MatMul(t, W)
        """, True),
    "softmax of top, biased": ("""
        b = Add(l, four) v, i = TopK(b, two) s = Softmax(v) g = ReduceSum(s, axis)
        t = Mul(x, g) [expert] y = MatMul(t, W)
        """, True),
    "experts' matrices": ("""
        i = ArgMax <axis = 1, keepdims = 0> (l) e = Gather(S, i) u = Unsqueeze(x, one)
        p = MatMul(u, e) y = Squeeze(p, one)
        """, True),
    "within If": ("""
        s = Sigmoid(l) v, i = TopK(s, two) g = ReduceMax <keepdims = 0> (v)
        c = Cast <to = 9> (g)
        y = If <then_branch = t () => (float[P, 12] a) { a = MatMul(x, W) },
            else_branch = e () => (float[P, 12] b) { b = Neg(x) }> (c)
        """, True),
    "com.microsoft MoE": ("y = com.microsoft.MoE <k = 1> (x, l, S, , S)", True),
    # None of these chooses what is computed.
    "labels": ("s = Softmax(l) v, i = TopK(s, two) y = Identity(v)", False),
    "tokens that come next": ("""
        i = ArgMax <axis = 1, keepdims = 0> (l) e = Gather(E, i) [expert] y = MatMul(e, W)
        """, False),
    "attention over channels": ("s = Softmax(l) y = MatMul(s, E)", False),
    "gated unit": ("s = Sigmoid(l) g = Mul(l, s) y = MatMul(g, E)", False),
    "pooling": ("s = Softmax <axis = 0> (l) y = Mul(l, s)", False),
    "residual": ("r = MatMul(x, V) a = Add(l, r) v, i = TopK(a, two) y = MatMul(v, U)", False),
}  # fmt: skip


def routed(name: str):
    text = f"""g (float[P, 12] x) => (float[] y) {{
        [scores] l = MatMul(x, R)
        {ROUTERS[name][0]}
    }}"""
    weights = {
        "R": normal(12, 4), "W": normal(12, 12), "V": normal(12, 4), "E": normal(4, 12),
        "U": normal(2, 12), "S": normal(4, 12, 12), "four": normal(4), "two": np.array([2]),
        "axis": np.array([1]), "one": np.array([1]), "nought": np.array([0]),
    }  # fmt: skip
    return model_of(text, weights)


@pytest.mark.parametrize("name", ROUTERS)
def test_what_chooses_experts_stays_in_float(name):
    is_router = ROUTERS[name][1]
    model = routed(name)
    answers = {node.name: use for node, use in find_uses(model, ("MatMul",))}
    assert answers["scores"].is_router == is_router
    others = [use for node, use in answers.items() if node != "scores"]
    assert not any(isinstance(use, WeightUse) and use.is_router for use in others)
    if "expert" in answers:
        rows = {row.node: row for row in quantize(model).report.nodes}
        assert (rows["scores"].bits, rows["expert"].bits) == (0 if is_router else 4, 4)
        assert is_router == ("chooses experts" in rows["scores"].reason)


def test_a_rule_quantises_what_chooses_experts():
    model = routed("top of softmax")
    eight = {"R": {"bits": 8, "keep_float": False}}
    for rules, bits in (({":router": {"keep_float": False}}, 4), (eight, 8)):
        (row, *_) = quantize(model, rules=rules).report.nodes
        assert row.bits == bits
    # A rule that says nothing of it leaves it as it is.
    (row, *_) = quantize(model, rules={"scores": {"bits": 8}}).report.nodes
    assert row.bits == 0
    notes = quantize(routed("labels"), rules={":router": {"keep_float": False}}).report.notes
    assert notes == ("the rule for ':router' has no effect: no node is one",)


@pytest.mark.parametrize("pattern", ["*", "sc*", "re:cores"])
def test_a_pattern_of_names_does_not_mean_what_chooses_experts(pattern):
    """As in ``{"*": "float", "*mlp*": {"keep_float": False}}`` of docs/quantization.md."""
    rules: dict[str, Any] = {pattern: {"keep_float": False}}
    (row, *_) = quantize(routed("top of softmax"), rules=rules).report.nodes
    assert (row.node, row.bits) == ("scores", 0) and "':router'" in row.reason
    rules |= {":router": {"keep_float": False}}
    (row, *_) = quantize(routed("top of softmax"), rules=rules).report.nodes
    assert row.bits == 4


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize(("batch", "bits"), [("B, ", 4), ("", 0)])
def test_a_stack_of_one_matrix_is_one_where_the_product_has_its_rank_anyway(
    batch, bits, layout
):
    text = f"g (float[{batch}T, 32] x) => (float[B, T, 32] y) {{ [m] y = MatMul(x, W) }}"
    both = "g (float[B, T, 32] x, float[T, 32] z) => (float[B, T, 32] y, float[C, T, 32] v)"
    model = model_of(text, {"W": normal(1, 32, 32)})
    if not bits:
        with pytest.raises(ModelFileError, match=r"\[1, 32, 32\]: a stack of matrices"):
            quantize(model, quant_format=layout)
        return
    x = normal(2, 5, 32, seed=1)
    found = session(quantize(model, quant_format=layout).model).run(None, {"x": x})[0]
    expected = x @ normal(1, 32, 32)[0]
    assert np.linalg.norm(found - expected) < 0.15 * np.linalg.norm(expected)
    # What reads it as a stack keeps its floats.
    model = model_of(
        f"{both} {{ [m] y = MatMul(x, W) [n] v = MatMul(z, W) }}", {"W": normal(1, 32, 32)}
    )
    rows = {row.node: row.bits for row in quantize(model, quant_format=layout).report.nodes}
    assert rows == {"m": 4, "n": 0}


def residual_stream(layers: int) -> ir.Model:
    """Whose stream is an output, beside that of the head."""
    lines = ["h0 = Identity(x)"]
    for i in range(layers):
        lines.append(f"n{i} = LayerNormalization(h{i}, g) [l{i}] d{i} = MatMul(n{i}, W)")
        lines.append(f"b{i} = Add(d{i}, bias) h{i + 1} = Add(h{i}, b{i})")
    text = f"""g (float[T, 32] x) => (float[T, 32] y, float[T, 32] h{layers}) {{
        {" ".join(lines)} last = LayerNormalization(h{layers}, g)
        [head] l = MatMul(last, V) c = Add(l, bias) t = Tanh(c) y = Mul(t, bias)
    }}"""
    return model_of(
        text,
        {
            "W": normal(32, 32),
            "V": normal(32, 32, seed=1),
            "g": normal(32),
            "bias": normal(32),
        },
    )


def test_a_product_in_a_stream_that_is_an_output_is_no_head():
    uses = [use for _, use in find_uses(residual_stream(3), ("MatMul",))]
    heads = [use.label for use in uses if isinstance(use, WeightUse) and ":head" in use.roles]
    assert heads == ["head"]


def test_long_chains_of_sums_are_followed_in_a_moment():
    lines = " ".join(
        f"a{i + 1} = Add(a{i}, one) m{i + 1} = Mul(a{i + 1}, one)" for i in range(9)
    )
    sums = " ".join(f"s{i + 1} = Add(s{i}, one)" for i in range(1500))
    text = f"""g (float[T, 32] x) => (float[T, 32] y) {{
        [product] a0 = MatMul(x, W) {lines} s0 = Add(a9, one) {sums} y = Softmax(s1500)
    }}"""
    model = model_of(text, {"W": normal(32, 32), "one": normal(1)})
    (use,) = (use for _, use in find_uses(model, ("MatMul",)))
    assert isinstance(use, WeightUse) and use.roles == set()
