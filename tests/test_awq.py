# SPDX-License-Identifier: MIT

import numpy as np
import pytest
from builders.text_models import model_of

from ortplugins.quantization import quantize
from ortplugins.quantization.methods import awq
from ortplugins.quantization.methods.awq import ALPHAS
from ortplugins.quantization.methods.nearest import (
    BlockFormat,
    dequantize_blocks,
    quantize_blocks,
)

FORMS = [
    BlockFormat(bits, size, symmetric)
    for bits in (2, 4, 8)
    for size in (-1, 16, 24)
    for symmetric in (True, False)
]


PLAIN = BlockFormat()


def search_scales(weights, mean_abs, x, gram, forms=None, **options):
    forms = forms or [BlockFormat()] * len(weights)
    return awq.search_scales(weights, mean_abs, x, gram, forms, **options)


def search_clip(weight, gram, form=PLAIN, **options):
    return awq.search_clip(weight, gram, form, **options)


def problem(k=52, widths=(12, 7), tokens=200, seed=0):
    """A few loud channels; weights; tokens, their mean |x| and Gram matrix."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(tokens, k)) * np.exp(1.5 * rng.normal(size=k))
    x = x.astype(np.float32)
    weights = [rng.normal(size=(k, n)).astype(np.float32) for n in widths]
    return weights, abs(x).mean(axis=0), x, x.T @ x / np.float32(tokens)


def output_loss(weight, x, form, scales=None, ratios=None):
    """Error of the outputs for each token, by the products themselves, in float64."""
    s = np.ones(len(weight), np.float32) if scales is None else scales
    w = dequantize_blocks(*quantize_blocks(weight * s[:, None], form, ratios), form)
    y = (x / s).astype(np.float64) @ w - x.astype(np.float64) @ weight
    return float(np.square(y).sum() / len(x))


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
    return np.array(s) / np.sqrt(max(s) * min(s))


@pytest.mark.parametrize("use_gram", [True, False])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_scales_are_the_best_of_all_alphas(form, use_gram):
    weights, mean_abs, x, gram = problem()
    forms = [form, BlockFormat({2: 8, 4: 2, 8: 4}[form.bits], 13)]
    sizes = [each.size_along(52) for each in forms]
    choice = search_scales(
        weights,
        mean_abs,
        None if use_gram else x,
        gram if use_gram else None,
        forms,
        alphas=ALPHAS,
    )
    candidates = {None: np.ones(52, np.float32)} | {
        a: naive_scales(weights, mean_abs, sizes, a).astype(np.float32) for a in ALPHAS
    }
    losses = {
        a: sum(output_loss(w, x, f, s) for w, f in zip(weights, forms, strict=True))
        for a, s in candidates.items()
    }
    assert choice.loss == pytest.approx(losses[choice.alpha], rel=1e-3)
    assert choice.loss == pytest.approx(min(losses.values()), rel=1e-3)
    np.testing.assert_allclose(choice.scales, candidates[choice.alpha], rtol=1e-4)
    assert choice.scales.dtype == np.float32


@pytest.mark.parametrize("seed", range(3))
def test_by_default_the_search_goes_on_around_the_best(seed):
    weights, mean_abs, x, gram = problem(seed=seed)
    tenths = search_scales(weights, mean_abs, x, gram, alphas=ALPHAS)
    finer = search_scales(weights, mean_abs, x, gram)
    assert finer.loss <= tenths.loss
    assert abs(finer.alpha - tenths.alpha) < 0.06


@pytest.mark.parametrize("seed", range(5))
def test_scales_are_never_worse_than_none(seed):
    weights, mean_abs, x, gram = problem(96, (300, 77, 5), seed=seed)
    choice = search_scales(weights, mean_abs, x, gram)
    worse = search_scales(weights, mean_abs, x, gram, alphas=())
    assert worse.alpha is None and (worse.scales == 1).all()
    assert choice.loss < worse.loss
    whole = [
        sum(output_loss(w, x, BlockFormat(), s) for w in weights)
        for s in (choice.scales, None)
    ]
    assert whole[0] < whole[1]  # what a sample of the columns finds holds for all
    assert choice.scales.max() * choice.scales.min() == pytest.approx(1, rel=1e-3)


def test_silent_channels_and_extremes_are_safe():
    weights, mean_abs, x, gram = problem()
    quiet = [0, 5, 40]
    x[:, quiet] = 0
    mean_abs[quiet] = 0
    gram[quiet] = gram[:, quiet] = 0
    for w in weights:
        w[7] = 0
    choice = search_scales(weights, mean_abs, x, gram)
    assert np.isfinite(choice.scales).all() and (choice.scales > 0).all()
    assert (choice.scales[[*quiet, 7]] == 1).all()
    mean_abs[1], mean_abs[2] = 1e-38, 1e38
    choice = search_scales(weights, mean_abs, x, gram, alphas=(1.0,))
    assert choice.scales.min() >= 1e-4 and choice.scales.max() <= 1e4 * (1 + 1e-6)
    nothing = search_scales(weights, mean_abs * 0, x * 0, gram * 0)
    assert nothing.alpha is None and nothing.loss == 0 and (nothing.scales == 1).all()


def test_scales_too_large_for_float16_are_passed_over():
    weights, mean_abs, x, gram = problem()
    loud = [w * np.float32(4e4) for w in weights]
    form = BlockFormat(scale_type="float16")
    choice = search_scales(loud, mean_abs, x, gram, [form] * 2)
    for w in loud:
        quantize_blocks(w * choice.scales[:, None], form)  # raises if it is too large


def damped_loss(errors, x, relative=1.0):
    """For each column, the error of the outputs and of each channel's own, in float64."""
    energy = np.square(x.astype(np.float64)).mean(axis=0)
    y = x.astype(np.float64) @ errors
    return np.square(y).mean(axis=0) + relative * (energy @ np.square(errors))


@pytest.mark.parametrize("tokens", [9, 200])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_clip_is_the_best_ratio_given_the_other_blocks(form, tokens):
    (weight, _), _, x, gram = problem(tokens=tokens)
    ratios = (1.0, 0.8, 0.6, 0.9)
    done = search_clip(weight, gram, form, ratios=ratios, visits=20)
    blocks = form.blocks(52)
    assert done.dtype == np.float32 and done.shape == (blocks, 12)
    assert set(np.unique(done)) <= set(np.array(ratios, np.float32))

    def errors(r):
        return dequantize_blocks(*quantize_blocks(weight, form, r), form) - weight

    kept = damped_loss(errors(done), x)
    for b in range(blocks):
        for ratio in ratios:
            other = done.copy()
            other[b] = ratio
            assert (damped_loss(errors(other), x) >= kept * (1 - 1e-3)).all()


@pytest.mark.parametrize("tokens", [3, 500])
@pytest.mark.parametrize(("k", "n"), [(1, 1), (5, 1), (33, 7), (96, 300)])
@pytest.mark.parametrize("size", [1, 32, 128, -1])
def test_clip_of_any_shape_is_never_worse_than_nearest(k, n, size, tokens):
    (weight,), _, x, gram = problem(k, (n,), tokens)
    for form in (BlockFormat(4, size), BlockFormat(2, size, False)):
        for visits in (1, 2):
            ratios = search_clip(weight, gram, form, visits=visits)
            losses = [
                damped_loss(
                    dequantize_blocks(*quantize_blocks(weight, form, r), form) - weight, x
                )
                for r in (None, ratios)
            ]
            assert (losses[1] <= losses[0] * (1 + 1e-4) + 1e-9).all()


def test_clip_without_ratios_or_energy_is_one():
    (weight, _), _, _, gram = problem()
    assert (search_clip(weight, gram, ratios=()) == 1).all()
    assert (search_clip(weight, gram * 0) == 1).all()


def test_memory_layout_does_not_matter():
    weights, mean_abs, x, gram = problem()
    fortran = [np.asfortranarray(w) for w in weights]
    one, two = (search_scales(w, mean_abs, x, gram) for w in (weights, fortran))
    assert np.array_equal(one.scales, two.scales) and one.loss == two.loss
    assert np.array_equal(search_clip(weights[0], gram), search_clip(fortran[0], gram))


def test_weights_of_different_bits_are_searched_as_what_they_are():
    (a, b), _, x, _ = problem(64, (24, 24))
    lines = ["[a] i = MatMul(x, A)", "[b] j = MatMul(x, B)"]
    found = []
    for order in (lines, lines[::-1]):
        text = (
            f"g (float[T, 64] x) => (float[T, 24] i, float[T, 24] j) {{ {' '.join(order)} }}"
        )
        report = quantize(
            model_of(text, {"A": a, "B": b}),
            method="awq_lite",
            node_config={"a": {"bits": 8}, "b": {"bits": 2, "block_size": 8}},
            calibration_data_reader=[{"x": x}],
        ).report
        found.append({row.node: (row.alpha, row.weight_error) for row in report.nodes})
    assert found[0] == found[1]


@pytest.mark.parametrize("count", [100, 2000])  # all tokens are kept, or second moments
def test_scales_of_blocks_fit_the_energy_of_their_channels(count):
    (weight,), mean_abs, x, gram = problem(128, (64,), tokens=count)
    model = model_of(
        "g (float[T, 128] x) => (float[T, 64] y) { [a] y = MatMul(x, W) }", {"W": weight}
    )
    [row] = quantize(model, method="awq_lite", calibration_data_reader=[{"x": x}]).report.nodes
    scales = search_scales([weight], mean_abs, None, gram).scales
    nearest = output_loss(weight, x, BlockFormat(), scales) * count
    nearest /= np.square(x.astype(np.float64) @ weight).sum()
    assert row.output_error**2 < 0.9 * nearest
