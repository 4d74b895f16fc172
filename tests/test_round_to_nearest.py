# SPDX-License-Identifier: MIT
"""Round-to-nearest, against its own definition."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ortplugins.quantization import BlockFormat, quantize_blocks
from ortplugins.quantization.methods.nearest import search_blocks

SYMMETRIES = pytest.mark.parametrize("is_symmetric", [True, False])

weights = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=2, max_dims=2, max_side=70),
    elements=st.floats(-(2.0**99), 2.0**99, width=32),
)
forms = st.builds(
    BlockFormat,
    bits=st.sampled_from([2, 4, 8]),
    block_size=st.sampled_from([-1, 1, 7, 16, 32, 128]),
    is_symmetric=st.booleans(),
    grid=st.sampled_from(["extreme", "amax"]),
)


def block_of_rows(form, k):
    return np.arange(k) // form.size_along(k)


def dequantize(codes, scales, zero_points, form):
    """What DequantizeLinear computes, in float64."""
    block = block_of_rows(form, len(codes))
    zeros = 0 if zero_points is None else zero_points[block].astype(np.float64)
    return (codes - zeros) * scales[block].astype(np.float64)


@given(weight=weights, form=forms)
def test_the_error_is_at_most_half_a_step(weight, form):
    codes, scales, zero_points = quantize_blocks(weight, form)
    error = abs(dequantize(codes, scales, zero_points, form) - weight)
    steps = error / abs(scales[block_of_rows(form, len(weight))])
    allowed = np.full(codes.shape, 0.5)
    if form.is_symmetric and form.grid == "extreme":  # its opposite has no code
        allowed[codes == form.highest_code] = 1
    assert (steps <= allowed + 1e-4).all()


@given(weight=weights, form=forms, zeros=st.randoms(use_true_random=False))
def test_zeros_are_exact(weight, form, zeros):
    weight[zeros.randrange(len(weight))] = 0
    result = dequantize(*quantize_blocks(weight, form), form)
    assert (result[weight == 0] == 0).all()


@SYMMETRIES
@pytest.mark.parametrize("scale_type", ["float32", "float16"])
def test_blocks_of_zeros_and_subnormals_divide_by_no_zero(is_symmetric, scale_type):
    weight = np.zeros((64, 2), np.float32)
    weight[:32, 1] = 1e-45
    form = BlockFormat(is_symmetric=is_symmetric, scale_type=scale_type)
    with np.errstate(all="raise", under="ignore"):
        codes, scales, zero_points = quantize_blocks(weight, form)
    assert (scales > 0).all()
    assert not dequantize(codes, scales, zero_points, form).any()


def weighted_errors(weight, quantised, form):
    """Sums of |w| times the squared error, over each block, relative to those of |w|**3."""
    errors = abs(weight) * (dequantize(*quantised, form) - weight.astype(np.float64)) ** 2
    starts = np.arange(0, len(weight), form.size_along(len(weight)))
    sums = np.add.reduceat(np.abs(weight).astype(np.float64) ** 3, starts, axis=0)
    return np.add.reduceat(errors, starts, axis=0) / np.where(sums > 0, sums, 1)


@given(weight=weights, form=forms)
def test_searched_scales_are_never_worse_where_great_weights_count_more(weight, form):
    nearest, searched = quantize_blocks(weight, form), search_blocks(weight, form)
    for one, other in zip(nearest, searched, strict=True):
        assert (one is None) == (other is None)
        assert one is None or (one.dtype, one.shape) == (other.dtype, other.shape)
    assert form.lowest_code <= searched[0].min() <= searched[0].max() <= form.highest_code
    assert np.isfinite(searched[1]).all() and (searched[1] != 0).all()
    before, after = (weighted_errors(weight, done, form) for done in (nearest, searched))
    assert (after <= before + 1e-5).all()
    if not form.is_symmetric or form.grid == "amax" or form.bits == 8:
        assert np.array_equal(nearest[0], searched[0])


def test_a_searched_scale_is_the_best_of_its_codes():
    weight = np.random.default_rng(0).normal(size=(128, 40)).astype(np.float32)
    form = BlockFormat()
    codes, scales, _ = search_blocks(weight, form)
    kept = weighted_errors(weight, (codes, scales, None), form)
    for factor in (0.99, 1.01):
        assert (kept < weighted_errors(weight, (codes, scales * factor, None), form)).all()
    assert (
        kept.sum() < 0.9 * weighted_errors(weight, quantize_blocks(weight, form), form).sum()
    )


def test_the_signed_extreme_gets_the_longer_end():
    weight = np.array([[3.5, -4.0], [-7.0, 4.0], [8.0, -8.0]], np.float32)
    codes, scales, zero_points = quantize_blocks(weight, BlockFormat(block_size=4))
    assert scales.tolist() == [[-1.0, 1.0]]
    assert codes.tolist() == [[-4, -4], [7, 4], [-8, -8]]
    assert zero_points is None


def test_an_asymmetric_range_may_be_wider_than_float32():
    weight = np.array([[3e38], [-3e38]], np.float32)
    _, scales, _ = quantize_blocks(weight, BlockFormat(is_symmetric=False))
    assert np.isfinite(scales).all()


@SYMMETRIES
def test_a_ratio_shrinks_the_range_of_its_block_alone(is_symmetric):
    form = BlockFormat(is_symmetric=is_symmetric)
    weight = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
    ratios = np.ones((2, 3), np.float32)
    ratios[1, 2] = 0.5
    _, plain, _ = quantize_blocks(weight, form)
    _, shrunk, _ = quantize_blocks(weight, form, ratios)
    np.testing.assert_allclose(shrunk / plain, ratios, rtol=1e-6)


def test_float16_scales_that_overflow_raise():
    weight = np.full((32, 1), 1e6, np.float32)
    with pytest.raises(ValueError, match="beyond 65504"):
        quantize_blocks(weight, BlockFormat(scale_type="float16"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bits": 3}, "bits is 3"),
        ({"block_size": 0}, "block_size is 0"),
        ({"block_size": -2}, "block_size is -2"),
        ({"grid": "max"}, "grid is 'max'"),
        ({"scale_type": "float64"}, "scale_type is 'float64'"),
    ],
)
def test_formats_out_of_range_raise(arguments, message):
    with pytest.raises(ValueError, match=message):
        BlockFormat(**arguments)


@pytest.mark.parametrize("shape", [(4,), (0, 4), (4, 0), (1, 2, 3)])
def test_weights_that_are_no_matrix_raise(shape):
    with pytest.raises(ValueError, match="is expected"):
        quantize_blocks(np.ones(shape, np.float32))
