# SPDX-License-Identifier: MIT
"""Axes that are renamed keep pointing at the same codes and scales: numpy is the judge."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rewrite_rules.weights.strided_axes import Run, coalesced, offsets, reshape, row_major


def quantised(shape: tuple[int, ...], axis: int, block: int):
    """Axes of a tensor in blocks along one axis, and the positions that they stand for."""
    scale_shape = [-(-n // block) if i == axis else n for i, n in enumerate(shape)]
    steps, scale_steps = row_major(shape), row_major(scale_shape)
    axes = tuple(
        (Run(n, steps[i], scale_steps[i], block if i == axis else 1),)
        for i, n in enumerate(shape)
    )
    codes = np.arange(math.prod(shape)).reshape(shape)
    scales = np.arange(math.prod(scale_shape)).reshape(scale_shape)
    scales = np.repeat(scales, block, axis=axis).take(range(shape[axis]), axis=axis)
    return axes, codes, scales


def check(axes, codes, scales):
    at, scale_at = offsets(axes)
    np.testing.assert_array_equal(at, codes.reshape(-1))
    # A run that reads one scale only starts where the tensor does: same scale, same place.
    np.testing.assert_array_equal(scale_at, scales.reshape(-1))


@st.composite
def shapes(draw, size: int) -> tuple[int, ...]:
    rest, shape = size, []
    while rest > 1 and len(shape) < 4:
        factor = draw(st.sampled_from([n for n in range(1, rest + 1) if rest % n == 0]))
        shape.append(factor)
        rest //= factor
    return (*shape, rest) if draw(st.booleans()) else (rest, *shape)


@given(data=st.data(), size=st.sampled_from([1, 12, 24, 48, 64, 70, 96]))
@settings(max_examples=300, deadline=None)
def test_any_renaming_points_at_the_same_numbers(data, size: int):
    shape = data.draw(shapes(size))
    axis = data.draw(st.integers(0, len(shape) - 1))
    axes, codes, scales = quantised(shape, axis, data.draw(st.sampled_from([1, 2, 4, 7, 32])))
    check(axes, codes, scales)
    for _ in range(data.draw(st.integers(1, 4))):
        if data.draw(st.booleans()):
            perm = data.draw(st.permutations(range(codes.ndim)))
            axes = tuple(axes[i] for i in perm)
            codes, scales = codes.transpose(perm), scales.transpose(perm)
        else:
            shape = data.draw(shapes(size))
            result = reshape(axes, shape)
            if result is None:  # refused, which is always right
                continue
            axes, codes, scales = result, codes.reshape(shape), scales.reshape(shape)
        check(axes, codes, scales)
        for i, axis_runs in enumerate(axes):
            run = coalesced(axis_runs)
            if run is not None:
                assert run.size == codes.shape[i]
                np.testing.assert_array_equal(offsets([(run,)]), offsets([axis_runs]))


def test_blocks_join_to_the_axis_that_they_are_of():
    # [N, blocks, 32] is [N, K] in blocks of 32.
    axes, _, _ = quantised((6, 4, 32), 2, 32)
    result = reshape(axes, (6, 128))
    assert result is not None
    assert [coalesced(axis) for axis in result] == [Run(6, 128, 4), Run(128, 1, 1, 32)]


def test_a_ragged_block_is_not_cut():
    axes, _, _ = quantised((2, 70), 1, 32)
    assert reshape(axes, (2, 7, 10)) is None
    assert reshape(axes, (2, 1, 70)) is not None


def test_sizes_without_a_common_factor_are_not_cut():
    axes, _, _ = quantised((6, 4), 0, 2)
    assert reshape(axes, (8, 3)) is None
