# SPDX-License-Identifier: MIT
"""QuantizationGrid computes what onnxruntime's QuantizeLinear and DequantizeLinear compute."""

import functools

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime
import pytest
from builders.same_numbers import session
from builders.text_models import proto_of

from rewrite_rules.mixed_precision_boundaries.quantization_grid import (
    GRID_TYPES,
    QuantizationGrid,
)
from rewrite_rules.remarks import Refusal

UINT8, INT8, UINT16, INT16 = GRID_TYPES
EIGHT_BITS, SIXTEEN_BITS = (UINT8, INT8), (UINT16, INT16)


@functools.cache
def operators(dtype: ir.DataType) -> onnxruntime.InferenceSession:
    """Both operators, scale and zero point as inputs, as no optimiser sees them."""
    kind = dtype.name.lower()
    model = proto_of(f"""g (float[n] x, {kind}[m] q, float s, {kind} z)
        => ({kind}[n] codes, float[m] values) {{
        codes = QuantizeLinear(x, s, z)  values = DequantizeLinear(q, s, z) }}""")
    return session(model)


def by_onnxruntime(
    grid: QuantizationGrid, values: npt.NDArray[np.generic], codes: npt.NDArray[np.generic]
) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.generic]]:
    feeds = {
        "x": values,
        "q": codes,
        "s": np.array(grid.scale),
        "z": np.array(grid.zero_point, grid.dtype.numpy()),
    }
    quantized, dequantized = operators(grid.dtype).run(None, feeds)
    return quantized, dequantized


def random_grids(dtype: ir.DataType, count: int, seed: int = 0) -> list[QuantizationGrid]:
    random = np.random.default_rng(seed)
    info = np.finfo(np.float32)
    edges = [info.tiny, info.max, 1.0, 2.0**-10]
    # From the smallest normal number to the largest that still has a range.
    exponents = random.uniform(np.log2(float(info.tiny)), np.log2(float(info.max)), count)
    low, high = (np.iinfo(dtype.numpy()).min, np.iinfo(dtype.numpy()).max)
    grids = []
    for scale in [*edges, *2.0**exponents]:
        zero_point = int(
            random.choice([low, 0 if low else 128, high, *random.integers(low, high, 3)])
        )
        grids.append(QuantizationGrid(dtype, np.float32(scale), zero_point))
    return grids


def values_for(grid: QuantizationGrid, random: np.random.Generator) -> npt.NDArray[np.generic]:
    """Values on codes, half way between, about and beyond the ends, and NaN."""
    steps = random.integers(grid.low - 3, grid.high + 4, 500) - grid.zero_point
    steps = np.concatenate([steps, steps + 0.5, steps + random.uniform(-0.5, 0.5, steps.size)])
    with np.errstate(over="ignore"):
        values = (steps * float(grid.scale)).astype(np.float32)
    info = np.finfo(np.float32)
    ends = [0.0, -0.0, np.inf, -np.inf, info.max, info.min, info.tiny, info.smallest_subnormal]
    # One step of the float beside the ties.
    with np.errstate(over="ignore"):
        beside = np.nextafter(values, np.float32(np.inf))
    return np.concatenate([values, beside, np.array(ends, np.float32)])


@pytest.mark.parametrize("dtype", GRID_TYPES)
def test_it_computes_what_onnxruntime_computes(dtype):
    random = np.random.default_rng(1)
    for grid in random_grids(dtype, 60):
        values = values_for(grid, random)
        quantized, dequantized = by_onnxruntime(grid, values, grid.codes())
        np.testing.assert_array_equal(grid.quantize(values), quantized, str(grid))
        assert grid.dequantize(grid.codes()).tobytes() == dequantized.tobytes(), str(grid)


@pytest.mark.parametrize("fine", SIXTEEN_BITS)
@pytest.mark.parametrize("coarse", EIGHT_BITS)
def test_refined_grids_give_back_every_code_and_value(coarse, fine):
    for grid in random_grids(coarse, 60, seed=2):
        if not 2.0**-118 <= float(grid.scale) < 2.0**120:
            continue  # below, the scale loses bits; above, values overflow
        refined = grid.refine(fine)
        assert refined.dtype is fine
        codes = grid.codes()
        _, values = by_onnxruntime(grid, np.zeros(1, np.float32), codes)
        fine_codes, _ = by_onnxruntime(refined, values, np.zeros(1, fine.numpy()))
        _, fine_values = by_onnxruntime(refined, values, fine_codes)
        codes_again, _ = by_onnxruntime(grid, fine_values, codes)
        assert fine_values.tobytes() == values.tobytes(), str(grid)
        np.testing.assert_array_equal(codes_again, codes, str(grid))
        # Code for code as the formula says; and nothing inside the old range is clipped.
        expected = (codes.astype(int) - grid.low) * 256 + refined.low
        np.testing.assert_array_equal(fine_codes, expected)


def test_refinement_ends_where_scales_have_no_room():
    smallest = QuantizationGrid(UINT8, np.float32(2.0**-118), 128)
    assert float(smallest.refine(UINT16).scale) == 2.0**-126
    with pytest.raises(Refusal, match="is not a normal float32"):
        QuantizationGrid(UINT8, np.float32(2.0**-119), 128).refine(UINT16)


def test_values_that_overflow_stand_for_no_code():
    grid = QuantizationGrid(UINT8, np.finfo(np.float32).max, 0)
    assert not grid.keeps_codes(grid)
    # Only the last code overflows, and comes back where infinities are clipped.
    grid = QuantizationGrid(UINT8, np.float32(np.finfo(np.float32).max / 254.5), 0)
    assert np.isinf(grid.dequantize([254, 255])).tolist() == [False, True]
    assert not grid.keeps_codes(grid)
    with pytest.raises(Refusal, match="overflow"):
        grid.refine(UINT16)


@pytest.mark.parametrize(("source", "target"), [(UINT8, INT8), (UINT16, INT16), (INT8, UINT8)])
def test_another_sign_has_the_same_values(source, target):
    grid = QuantizationGrid(source, np.float32(0.1), 7)
    other = grid.refine(target)
    assert other.dtype == target
    assert other.dequantize(other.codes()).tobytes() == grid.dequantize(grid.codes()).tobytes()
