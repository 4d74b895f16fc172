# SPDX-License-Identifier: MIT
"""GPTQ, AWQ and round-to-nearest, against their definitions; which weights get more bits."""

import contextlib
import itertools
import tracemalloc
from unittest import mock

import numpy as np
import onnx_ir as ir
import pytest
from builders.same_numbers import session
from builders.text_models import model_of, normal
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ortplugins.quantization import BlockFormat, quantize, quantize_blocks
from ortplugins.quantization.methods import awq, half_factor
from ortplugins.quantization.methods import gptq as gptq_module
from ortplugins.quantization.methods.awq import ALPHAS
from ortplugins.quantization.methods.gptq import Gptq
from ortplugins.quantization.methods.nearest import search_blocks

FORM = BlockFormat()
PLAIN = {"ratios": (1.0,), "revisits": 0}
FORMS = [
    BlockFormat(bits, size, symmetric, grid)
    for bits in (4, 8)
    for size in (-1, 16, 24)
    for symmetric, grid in (
        (True, "extreme"),
        (True, "positive"),
        (True, "amax"),
        (False, "extreme"),
    )
]


def gptq(weight, gram, form=FORM, **constants):
    """Quantise with other damping, ratios or visits than the method has."""
    given = {name.upper(): value for name, value in constants.items()}
    with contextlib.ExitStack() as stack:
        for name, value in given.items():
            stack.enter_context(mock.patch.object(gptq_module, name, value))
        return Gptq(gram, form.size_along(len(weight))).quantize(weight, form)


def inputs_and_weights(k=52, widths=(12, 7), tokens=200, seed=0):
    """Activations of a few directions and some noise, a few loud channels; weights."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(tokens, k // 8 + 1)) @ rng.normal(size=(k // 8 + 1, k))
    x += 0.3 * rng.normal(size=x.shape)
    x *= np.exp(1.5 * rng.normal(size=k))
    return x.astype(np.float32), [rng.normal(size=(k, n)).astype(np.float32) for n in widths]


def gram_of(x):
    return x.T @ x / np.float32(len(x))


def problem(k=64, n=40, seed=0):
    x, (weight,) = inputs_and_weights(k, (n,), 2048, seed)
    return weight, gram_of(x)


def damped(gram, relative=1.0, absolute=0.01):
    h = gram.astype(np.float64)
    energy = np.diag(h)
    return h + np.diag(relative * energy + absolute * energy.mean())


def block_of_rows(form, k):
    return np.arange(k) // form.size_along(k)


def dequantize(quantised, form):
    """What DequantizeLinear computes, in float64."""
    codes, scales, zero_points = quantised
    block = block_of_rows(form, len(codes))
    zeros = 0 if zero_points is None else zero_points[block].astype(np.float64)
    return (codes - zeros) * scales[block].astype(np.float64)


def losses(weight, hessian, quantised, form):
    """The error of each column's output, in float64."""
    d = dequantize(quantised, form) - weight
    return (d * (hessian.astype(np.float64) @ d)).sum(axis=0)


def loss(*args):
    return losses(*args).sum()


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


@pytest.mark.parametrize("form", [BlockFormat(4, 8), BlockFormat(4, 7, False)])
def test_codes_are_those_of_the_paper_in_float64(form):
    weight, gram = problem(22, 9)
    size, energy = form.block_size, np.diag(gram)
    rows = sorted(range(22), key=lambda r: -energy[r])
    blocks = [energy[b * size : (b + 1) * size].mean() for b in range(form.blocks(22))]
    rows.sort(key=lambda r: -blocks[r // size])
    codes, scales, zeros = gptq(weight, gram, form, **PLAIN)
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
    if form.grid == "positive" or not form.is_symmetric:
        assert (scales > 0).all()
    if k == 52:
        h = damped(gram)
        done = loss(weight, h, (codes, scales, zeros), form)
        assert done < loss(weight, h, nearest, form)


def test_a_residual_moves_the_weight_by_damped_least_squares():
    k, n = 544, 24  # more rows than are solved for at a time
    weight, gram = problem(k, n)
    residual = gram @ np.random.default_rng(1).normal(0, 0.01, (k, n)).astype(np.float32)
    form = BlockFormat()
    target = weight + np.linalg.solve(damped(gram), residual.astype(np.float64))
    method = Gptq(gram, 32)
    found = dequantize(method.quantize(weight, form, residual), form)
    expected = dequantize(method.quantize(target, form), form)
    assert (np.abs(found - expected) > 1e-4).mean() < 0.01  # ties of rounding
    assert np.abs(target - weight).max() > 0.001


def test_revisits_only_lower_the_loss_until_no_single_code_has_a_better_one():
    weight, gram = problem(96, 50, seed=4)
    for form in (BlockFormat(), BlockFormat(4, 20, False), BlockFormat(scale_type="float16")):
        losses = [
            loss(weight, damped(gram), gptq(weight, gram, form, revisits=r), form)
            for r in (0, 1, 2, 3)
        ]
        assert losses[1] < losses[0]
        assert all(b <= a * (1 + 1e-6) for a, b in itertools.pairwise(losses))
    weight, gram = problem(12, 3, seed=5)
    form = BlockFormat(4, 4)
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
        assert np.isfinite(dequantize(done, form)).all()


def test_the_factor_takes_half_a_square_and_a_panel(monkeypatch):
    monkeypatch.setattr(half_factor, "_PANEL", 64)
    job = Gptq(np.eye(1024, dtype=np.float32), 32)
    tracemalloc.start()
    assert job.factored
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * 1024 * (1024 / 2 + 64)


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
            VT = Transpose(V) [v] v = Gemm <transB = 1> (s, V)
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
    {"method": "gptq", "is_symmetric": False, "quant_format": "QDQ_transposed"},
    {"method": "gptq", "block_size": 16, "share_of_8_bits": 0.3},
])  # fmt: skip
def test_reported_errors_are_those_between_the_two_models(settings):
    model = network()
    op_types = ("MatMul", "Gemm", "Gather")
    result = quantize(
        model,
        calibration_data_reader=SAMPLES,
        op_types=op_types,
        **settings,
    )
    floats, quantised = outputs(model), outputs(result.model)
    rows = {row.node: row for row in result.report.nodes}
    assert len(rows) == len(OUTPUTS) + 3
    for name in OUTPUTS:
        difference = np.linalg.norm(quantised[name] - floats[name])
        error = difference / np.linalg.norm(floats[name])
        assert rows[name].output_error == pytest.approx(error, rel=1e-3), name


def test_error_feedback_makes_up_for_the_errors_before_a_weight():
    model, errors = network(), {}
    for method in ("rtn", "gptq"):
        result = quantize(model, method=method, calibration_data_reader=SAMPLES)
        errors[method] = np.linalg.norm(outputs(result.model)["down"] - outputs(model)["down"])
    assert errors["gptq"] < 0.7 * errors["rtn"]


# AWQ.


def search_scales(weights, x):
    return awq.search_scales(weights, abs(x).mean(axis=0), gram_of(x), [FORM] * len(weights))


def scaled_loss(weight, gram, form, scales):
    """Error of the outputs for each token, of a weight that is quantised times scales."""
    scaled = weight * scales[:, None]
    inputs = gram / np.outer(scales, scales)
    return loss(scaled, inputs, quantize_blocks(scaled, form), form)


def naive_scales(weights, mean_abs, sizes, alpha):
    """The formula, element by element."""
    k = len(mean_abs)
    w_mean = np.zeros(k)
    columns = [
        (w[:, c].astype(float), size)
        for w, size in zip(weights, sizes, strict=True)
        for c in range(w.shape[1])
    ]
    for column, size in columns:
        for i in range(k):
            block = column[i // size * size : (i // size + 1) * size]
            w_mean[i] += abs(column[i]) / max(abs(block)) / len(columns)
    s = [mean_abs[i] ** alpha / w_mean[i] ** (1 - alpha) for i in range(k)]
    return (np.array(s) / np.sqrt(max(s) * min(s))).astype(np.float32)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_scales_are_the_best_of_all_alphas(form):
    x, weights = inputs_and_weights()
    forms = [form, BlockFormat({4: 8, 8: 4}[form.bits], 13)]
    sizes = [each.size_along(52) for each in forms]
    mean_abs, gram = abs(x).mean(axis=0), gram_of(x)
    scales, alpha, losses = awq.search_scales(weights, mean_abs, gram, forms, alphas=ALPHAS)
    candidates = {None: np.ones(52, np.float32)} | {
        a: naive_scales(weights, mean_abs, sizes, a) for a in ALPHAS
    }
    found = {
        a: sum(scaled_loss(w, gram, f, s) for w, f in zip(weights, forms, strict=True))
        for a, s in candidates.items()
    }
    without = found.pop(None)
    assert losses == pytest.approx(found, rel=1e-3)
    assert alpha is None or losses[alpha] == min(losses.values()) < without * 1.001
    np.testing.assert_allclose(scales, candidates[alpha], rtol=1e-4)
    assert scales.dtype == np.float32


def test_silent_channels_and_extremes_are_safe():
    x, weights = inputs_and_weights()
    quiet = [0, 5, 40]
    x[:, quiet] = 0
    for w in weights:
        w[7] = 0
    scales, *_ = search_scales(weights, x)
    assert np.isfinite(scales).all() and (scales > 0).all()
    assert (scales[[*quiet, 7]] == 1).all()
    mean_abs = abs(x).mean(axis=0)
    mean_abs[1], mean_abs[2] = 1e-38, 1e38
    scales, *_ = awq.search_scales(weights, mean_abs, gram_of(x), [FORM] * 2, alphas=(1.0,))
    assert scales.min() >= 1e-4 and scales.max() <= 1e4 * (1 + 1e-6)
    scales, alpha, losses = search_scales(weights, x * 0)
    assert alpha is None and {*losses.values()} == {0} and (scales == 1).all()


# Round-to-nearest.


weights = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=2, max_dims=2, max_side=70),
    elements=st.floats(allow_nan=False, allow_infinity=False, width=32),
)
forms = st.builds(
    BlockFormat,
    bits=st.sampled_from([4, 8]),
    block_size=st.sampled_from([-1, 1, 7, 16, 32, 128]),
    is_symmetric=st.booleans(),
    grid=st.sampled_from(["extreme", "positive", "amax"]),
)


@given(weight=weights, form=forms, row=st.integers(0, 69))
def test_the_error_is_at_most_half_a_step_and_zeros_are_exact(weight, form, row):
    weight[row % len(weight)] = 0
    quantised = codes, scales, _ = quantize_blocks(weight, form)
    found = dequantize(quantised, form)
    steps = abs(found - weight) / abs(scales[block_of_rows(form, len(weight))])
    allowed = np.full(codes.shape, 0.5)
    if form.is_symmetric and form.grid == "extreme":  # its opposite has no code
        allowed[codes == form.highest_code] = 1
    assert (steps <= allowed + 1e-4).all()
    assert (found[weight == 0] == 0).all()
    starts = np.arange(0, len(weight), form.size_along(len(weight)))
    low, high = (
        end.reduceat(weight.astype(float), starts) for end in (np.minimum, np.maximum)
    )
    if not form.is_symmetric:
        reach = (high.clip(min=0) - low.clip(max=0)) / form.highest_code
    elif form.grid == "extreme":
        reach = np.where(high > -low, high, low) / form.lowest_code
    elif form.grid == "positive":
        reach = np.maximum(high / form.highest_code, low / form.lowest_code)
    else:
        reach = np.maximum(high, -low) / form.highest_code
    least = np.finfo(np.float32).tiny  # what a smaller one, of either sign, is raised to
    np.testing.assert_allclose(scales, reach, rtol=1e-5, atol=2.1 * least)


@pytest.mark.parametrize("is_symmetric", [True, False])
@pytest.mark.parametrize("scale_type", ["float32", "float16"])
def test_blocks_of_zeros_and_subnormals_divide_by_no_zero(is_symmetric, scale_type):
    weight = np.zeros((64, 2), np.float32)
    weight[:32, 1] = 1e-45
    form = BlockFormat(is_symmetric=is_symmetric, scale_type=scale_type)
    with np.errstate(all="raise", under="ignore"):
        quantised = quantize_blocks(weight, form)
    assert (quantised[1] > 0).all()
    assert not dequantize(quantised, form).any()


def weighted_errors(weight, quantised, form):
    """Sums of |w| times the squared error, over each block, relative to those of |w|**3."""
    errors = abs(weight) * (dequantize(quantised, form) - weight) ** 2
    starts = np.arange(0, len(weight), form.size_along(len(weight)))
    sums = np.add.reduceat(np.abs(weight).astype(np.float64) ** 3, starts, axis=0)
    return np.add.reduceat(errors, starts, axis=0) / np.where(sums > 0, sums, 1)


@given(weight=weights, form=forms)
@example(weight=np.full((1, 1), 5e-39, np.float32), form=BlockFormat(is_symmetric=False))
def test_searched_scales_are_never_worse_where_great_weights_count_more(weight, form):
    nearest, searched = quantize_blocks(weight, form), search_blocks(weight, form)
    for one, other in zip(nearest, searched, strict=True):
        assert (one is None) == (other is None)
        assert one is None or (one.dtype, one.shape) == (other.dtype, other.shape)
    assert form.lowest_code <= searched[0].min() <= searched[0].max() <= form.highest_code
    assert np.isfinite(searched[1]).all() and (searched[1] != 0).all()
    before, after = (weighted_errors(weight, done, form) for done in (nearest, searched))
    assert (after <= before + 1e-5).all()
    if form.grid == "positive" and form.is_symmetric:
        assert (searched[1] > 0).all()
    if form.grid == "amax" or form.bits == 8:
        assert np.array_equal(nearest[0], searched[0])


@pytest.mark.parametrize(
    ("shape", "form", "message"),
    [
        ((4, 4), {"scale_type": "float64"}, "scale_type is 'float64'"),
        ((4, 4), {"grid": "max"}, "grid is 'max'"),
        ((4, 4), {"block_size": -2}, "block_size is -2"),
        ((32, 1), {"scale_type": "float16"}, "beyond 65504"),
        *(((*shape,), {}, "expected") for shape in ((4,), (0, 4), (4, 0), (1, 2, 3))),
    ],
)
def test_what_cannot_be_rounded_raises(shape, form, message):
    with pytest.raises(ValueError, match=message):
        quantize_blocks(np.full(shape, 1e6, np.float32), BlockFormat(**form))
