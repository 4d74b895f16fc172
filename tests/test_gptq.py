# SPDX-License-Identifier: MIT
"""GPTQ, against the algorithm of the paper; and which weights deserve more bits."""

import itertools
import tracemalloc

import numpy as np
import onnx_ir as ir
import pytest
from builders.same_numbers import session
from builders.text_models import model_of, normal

from ortplugins.quantization import quantize
from ortplugins.quantization.methods import gptq as gptq_module
from ortplugins.quantization.methods.gptq import Gptq, GptqOptions
from ortplugins.quantization.methods.nearest import (
    BlockFormat,
    dequantize_blocks,
    quantize_blocks,
)

FORM = BlockFormat()
PLAIN = {"ratios": (1.0,), "revisits": 0}
FORMS = [
    BlockFormat(bits, size, symmetric, grid)
    for bits in (2, 4, 8)
    for size in (-1, 16, 24)
    for symmetric, grid in ((True, "extreme"), (True, "amax"), (False, "extreme"))
]


def gptq(weight, gram, form=FORM, **options):
    return Gptq(gram, GptqOptions(**options)).quantize(weight, form)


def correlated(rng, k, tokens=2048):
    """Activations of a few directions and some noise, channels of different energy."""
    x = rng.normal(size=(tokens, k // 8 + 1)) @ rng.normal(size=(k // 8 + 1, k))
    x += 0.3 * rng.normal(size=x.shape)
    x *= np.exp(rng.normal(size=k))
    return x.astype(np.float32)


def problem(k=64, n=40, seed=0):
    rng = np.random.default_rng(seed)
    x = correlated(rng, k)
    return rng.normal(size=(k, n)).astype(np.float32), x.T @ x / np.float32(len(x))


def damped(gram, relative=1.0, absolute=0.01):
    h = gram.astype(np.float64)
    energy = np.diag(h)
    return h + np.diag(relative * energy + absolute * energy.mean())


def loss(weight, hessian, quantized, form):
    d = dequantize_blocks(*quantized, form).astype(np.float64) - weight
    return float(np.sum(d * (hessian @ d)))


def paper(weight, hessian, order, form):
    """The paper's algorithm, row by row, in float64, with the inverse."""
    k, n = weight.shape
    size = form.size_along(k)
    w = weight.astype(np.float64)
    codes = np.zeros((k, n), int)
    scales = np.zeros((form.blocks(k), n))
    zeros = np.zeros((form.blocks(k), n))
    inverse = np.linalg.inv(hessian[np.ix_(order, order)])
    upper = np.linalg.cholesky(inverse).T
    for i, row in enumerate(order):
        b = row // size
        if i == 0 or order[i - 1] // size != b:
            block = w[b * size : (b + 1) * size].astype(np.float32)
            scale, zero = quantize_blocks(
                block, BlockFormat(form.bits, -1, form.is_symmetric, form.grid)
            )[1:]
            scales[b] = scale[0]
            zeros[b] = 0 if zero is None else zero[0]
        for c in range(n):
            code = np.rint(w[row, c] / scales[b, c]) + zeros[b, c]
            codes[row, c] = min(max(code, form.lowest_code), form.highest_code)
            error = w[row, c] - (codes[row, c] - zeros[b, c]) * scales[b, c]
            for j in range(i + 1, k):
                w[order[j], c] -= error / upper[i, i] * upper[i, j]
    return codes, scales, zeros


def same(one, other):
    return [a if a is None else (a.dtype, a.tobytes()) for a in one] == [
        a if a is None else (a.dtype, a.tobytes()) for a in other
    ]


@pytest.mark.parametrize("order", ["natural", "energy"])
@pytest.mark.parametrize("form", [BlockFormat(4, 8), BlockFormat(4, 7, False)])
def test_codes_are_those_of_the_paper_in_float64(form, order):
    weight, gram = problem(22, 9)
    size, energy = form.block_size, np.diag(gram)
    rows = sorted(range(22), key=lambda r: -energy[r] if order == "energy" else r)
    blocks = [energy[b * size : (b + 1) * size].mean() for b in range(form.blocks(22))]
    rows.sort(key=lambda r: -blocks[r // size] if order == "energy" else r // size)
    codes, scales, zeros = gptq(weight, gram, form, order=order, **PLAIN)
    expected = paper(weight, damped(gram), rows, form)
    # A tie within the last bits of float32 may round the other way; none does here.
    assert np.array_equal(codes, expected[0])
    np.testing.assert_allclose(scales, expected[1], rtol=1e-5)
    if zeros is not None:
        assert np.array_equal(zeros, expected[2])


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_diagonal_gram_is_rounding_to_nearest(form):
    weight, gram = problem(52, 11)
    for diagonal in (np.eye(52), np.diag(np.diag(gram)), np.zeros((52, 52))):
        done = gptq(weight, diagonal.astype(np.float32), form, **PLAIN)
        assert same(done, quantize_blocks(weight, form))


SHAPES = [(52, 11), (1, 1), (1, 5), (5, 1), (33, 7), (65, 129)]


@pytest.mark.parametrize(("k", "n"), SHAPES)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_types_shapes_and_codes_in_range(form, k, n):
    weight, gram = problem(k, n)
    codes, scales, zeros = gptq(weight, gram, form)
    nearest = quantize_blocks(weight, form)
    assert codes.dtype == nearest[0].dtype and codes.shape == nearest[0].shape
    assert scales.dtype == np.float32 and scales.shape == nearest[1].shape
    assert (zeros is None) == form.is_symmetric
    assert codes.min() >= form.lowest_code and codes.max() <= form.highest_code
    assert np.isfinite(scales).all() and (scales != 0).all()
    if k == 52:
        h = damped(gram)
        done = loss(weight, h, (codes, scales, zeros), form)
        assert done < loss(weight, h, nearest, form)


@pytest.mark.parametrize("symmetric", [True, False])
def test_output_error_on_correlated_inputs_is_a_third(symmetric):
    rng = np.random.default_rng(3)
    x = rng.normal(size=(4096, 64)) @ rng.normal(size=(64, 512))
    x = (x + 0.5 * rng.normal(size=x.shape)).astype(np.float32)
    weight = rng.normal(size=(512, 256)).astype(np.float32)
    gram = x.T @ x / np.float32(len(x))
    form = BlockFormat(is_symmetric=symmetric)
    errors = [
        loss(weight, gram, done, form) ** 0.5
        for done in (
            quantize_blocks(weight, form),
            gptq(weight, gram, form, relative_damping=0.0),
            gptq(weight, gram, form),
        )
    ]
    assert errors[1] < errors[0] / 3
    assert errors[2] < errors[0] / 1.8  # damping gives some of it up, for unseen inputs


def test_what_outputs_lack_moves_the_weight_by_damped_least_squares():
    k, n = 544, 24  # more rows than are solved for at a time
    weight, gram = problem(k, n)
    lacking = gram @ np.random.default_rng(1).normal(0, 0.01, (k, n)).astype(np.float32)
    form = BlockFormat()
    target = weight + np.linalg.solve(damped(gram), lacking.astype(np.float64))
    method = Gptq(gram, GptqOptions())
    found = dequantize_blocks(*method.quantize(weight, form, lacking), form)
    expected = dequantize_blocks(*method.quantize(target, form), form)
    assert (np.abs(found - expected) > 1e-4).mean() < 0.01  # ties of rounding
    assert np.abs(target - weight).max() > 0.001


def test_revisits_only_lower_the_loss_until_no_single_code_has_a_better_one():
    weight, gram = problem(96, 50, seed=4)
    for form in (BlockFormat(), BlockFormat(2, 20, False), BlockFormat(scale_type="float16")):
        losses = [
            loss(weight, damped(gram), gptq(weight, gram, form, revisits=r), form)
            for r in (0, 1, 2, 3)
        ]
        assert losses[1] < losses[0]
        assert all(b <= a * (1 + 1e-6) for a, b in itertools.pairwise(losses))
    weight, gram = problem(12, 3, seed=5)
    form = BlockFormat(2, 4)
    done = gptq(weight, gram, form, revisits=20)
    h = damped(gram)
    kept = loss(weight, h, done, form)
    for row, column in np.ndindex(weight.shape):
        for code in range(form.lowest_code, form.highest_code + 1):
            codes = done[0].copy()
            codes[row, column] = code
            assert loss(weight, h, (codes, *done[1:]), form) > kept * (1 - 1e-5)


def test_dead_channels_are_rounded_to_nearest_and_singular_grams_work():
    weight, gram = problem(64, 16)
    dead = [3, 4, 40]
    gram[dead] = gram[:, dead] = 0
    form = BlockFormat()
    for damping in (0.0, 0.01):
        codes, scales, _ = gptq(
            weight, gram, form, damping=damping, relative_damping=0, revisits=0
        )
        nearest = np.rint(weight[dead] / scales[[0, 0, 1]]).clip(-8, 7)
        # The range of a block is that of its moved rows: it may clip, but moves no dead row.
        assert np.array_equal(codes[dead], nearest)
    one = np.ones((2, 64), np.float32)
    for singular in (one.T @ one, np.diag(np.eye(64)[5])):
        done = gptq(weight, singular.astype(np.float32), form, damping=0, relative_damping=0)
        assert np.isfinite(dequantize_blocks(*done, form)).all()


@pytest.mark.parametrize("unit", [1e-30, 1e-6, 1e12, 1e30])
def test_the_unit_of_the_gram_changes_nothing(unit):
    weight, gram = problem()
    done = gptq(weight, gram.astype(np.float64), **PLAIN)
    other = gptq(weight, gram.astype(np.float64) * unit, **PLAIN)
    assert (done[0] != other[0]).mean() < 0.01


def test_the_factor_takes_its_own_room_and_a_few_squares(monkeypatch):
    monkeypatch.setattr(gptq_module, "_PANEL", 64)
    job = Gptq(np.eye(1024, dtype=np.float32), GptqOptions())
    tracemalloc.start()
    job.factor(BlockFormat())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak - 8 * 1024**2 < 8 * 1024 * 64  # the columns of a panel


def test_zero_weights_and_layouts_of_memory():
    weight, gram = problem()
    weight[:32] = 0
    done = gptq(weight, gram)
    assert np.isfinite(dequantize_blocks(*done, BlockFormat())).all()
    assert same(done, gptq(np.asfortranarray(weight), gram))
    nothing = np.zeros((64, 5), np.float32)
    assert not dequantize_blocks(*gptq(nothing, gram), BlockFormat()).any()


@pytest.mark.parametrize(
    ("share", "wider"), [(0.0, ""), (0.11, "a"), (0.2, "ac"), (0.96, "ab"), (1.0, "abc")]
)
def test_8_bits_go_where_each_byte_removes_the_most_error(share, wider):
    # For each element, a errs a hundred times as much as c and b 25 times; b is the greatest.
    rng = np.random.default_rng(0)
    model = model_of(
        """g (float[T, 32] x) => (float[T, 32] i, float[T, 288] j, float[T, 16] k) {
            [a] i = MatMul(x, A) [b] j = MatMul(x, B) [c] k = MatMul(x, C)
        }""",
        {
            name: (scale * rng.normal(size=(32, n))).astype(np.float32)
            for name, scale, n in (("A", 10, 32), ("B", 5, 288), ("C", 1, 16))
        },
    )
    samples = [{"x": rng.normal(size=(50, 32)).astype(np.float32)}]
    for method in ("rtn", "gptq"):
        report = quantize(
            model, method=method, share_of_8_bits=share, calibration_data_reader=samples
        ).report
        assert "".join(row.node for row in report.nodes if row.bits == 8) == wider


def test_8_bits_are_chosen_by_all_tokens_and_not_by_a_sample():
    # The first of 3000 tokens is a sink, as texts begin with one: it makes most of a's error.
    text = """g (float[T, 32] x, float[T, 32] z) => (float[T, 32] i, float[T, 32] j) {
        [a] i = MatMul(x, A) [b] j = MatMul(z, B)
    }"""
    rng = np.random.default_rng(0)
    x, z, *weights = (
        rng.normal(size=(n, 32)).astype(np.float32) for n in (3000, 3000, 32, 32)
    )
    x[0] *= 1000
    model = model_of(text, dict(zip("AB", weights, strict=True)))
    report = quantize(
        model,
        method="gptq",
        share_of_8_bits=0.5,
        calibration_data_reader=[{"x": x, "z": 1.2 * z}],
    ).report
    assert [row.node for row in report.nodes if row.bits == 8] == ["a"]


# Weights that are quantised for the inputs that they get in the quantised model.


D, TOKENS = 32, 96
OUTPUTS = ("q", "k", "v", "o", "up", "down")


def network() -> ir.Model:
    """Products of every layout; a table and a subgraph without statistics; two late reads."""
    return model_of(
        f"""g (int64[T] ids, float[T, {D}] x)
            => (float[T, {D}] q, float[T, {D}] k, float[T, {D}] v, float[T, {D}] o,
                float[T, {2 * D}] up, float[T, {D}] down) {{
            e = Gather(E, ids) s = Add(e, x)
            [q] q = MatMul(s, Q) [k] k = Gemm <transB = 1> (s, K)
            VT = Transpose(V) [v] v = com.microsoft.FusedMatMul <transB = 1> (s, V)
            [w] w = MatMul(s, VT) qk = Mul(q, k) n = Tanh(qk)
            [o] o = MatMul(n, O) some = ReduceMax <keepdims = 0> (o)
            condition = Greater(some, zero)
            r = If (condition) <
                then_branch = t () => (float[T, {D}] a) {{ [in] a = MatMul(o, S) }},
                else_branch = f () => (float[T, {D}] b) {{ b = Identity(s) }}>
            vw = Add(v, w) sr = Add(r, vw) z = Add(sr, s)
            [up] up = MatMul(z, U) y = Relu(up) [down] down = MatMul(y, W)
        }}""",
        {
            **{name: 0.3 * normal(D, D, seed=seed) for seed, name in enumerate("QKVOS")},
            "E": normal(50, D, seed=6),
            "U": 0.3 * normal(D, 2 * D, seed=7),
            "W": 0.3 * normal(2 * D, D, seed=8),
            "zero": np.zeros((), np.float32),
        },
    )


SAMPLES = [
    {"ids": np.arange(TOKENS // 2) % 50, "x": normal(TOKENS // 2, D, seed=seed)}
    for seed in range(2)
]


def outputs(model: ir.Model) -> dict[str, np.ndarray]:
    """Return each output for all samples together."""
    opened = session(model, optimised=True, accuracy_level=0)
    found = [opened.run(list(OUTPUTS), sample) for sample in SAMPLES]
    return {name: np.concatenate(each) for name, *each in zip(OUTPUTS, *found, strict=True)}


@pytest.mark.parametrize("settings", [
    {"method": "gptq"},
    {"method": "gptq", "bits": 2, "is_symmetric": False, "quant_format": "QDQ_transposed"},
    {"method": "awq_gptq", "block_size": 16, "share_of_8_bits": 0.3},
])  # fmt: skip
def test_reported_errors_are_those_between_the_two_models(settings):
    model = network()
    op_types = ("MatMul", "Gemm", "Gather")
    result = quantize(
        model,
        calibration_data_reader=SAMPLES,
        op_types=op_types,
        quantized_inputs=True,
        **settings,
    )
    floats, quantised = outputs(model), outputs(result.model)
    rows = {row.node: row for row in result.report.nodes}
    assert len(rows) == len(OUTPUTS) + 3
    for name in OUTPUTS:
        difference = np.linalg.norm(quantised[name] - floats[name])
        error = difference / np.linalg.norm(floats[name])
        assert rows[name].output_error == pytest.approx(error, rel=1e-3), name
