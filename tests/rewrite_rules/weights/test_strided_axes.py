# SPDX-License-Identifier: MIT
"""Runs of codes and scales: joined and regrouped they name the same elements."""

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rewrite_rules.weights.strided_axes import Run, coalesced, offsets, reshape

SIZES = st.sampled_from([1, 2, 3, 4, 6, 8])
MANY = settings(max_examples=500)


@st.composite
def axes(draw):
    """Runs as layouts have them, outer ones at multiples of the inner ones or not."""
    runs, codes, scales = [], 1, 1
    for _ in range(draw(st.integers(1, 3))):
        size, block = draw(SIZES), draw(st.sampled_from([1, 2, 4]))
        runs.append(
            Run(size, codes, draw(st.sampled_from([scales, scales, 2 * scales, 0])), block)
        )
        codes *= size * draw(st.sampled_from([1, 1, 1, 2]))
        scales *= math.ceil(size / block)
    return tuple(runs[::-1])


@MANY
@given(axes())
def test_a_joined_axis_names_the_same_elements(axis):
    joined = coalesced(axis)
    if joined is not None:
        for one, several in zip(offsets([(joined,)]), offsets([axis]), strict=True):
            np.testing.assert_array_equal(one, several)


@MANY
@given(axes(), st.data())
def test_another_shape_names_the_same_elements(axis, data):
    count = math.prod(run.size for run in axis)
    first = data.draw(st.sampled_from([n for n in range(1, count + 1) if count % n == 0]))
    regrouped = reshape([axis], (first, count // first))
    if regrouped is not None:
        assert [math.prod(run.size for run in part) for part in regrouped] == [
            first,
            count // first,
        ]
        for one, other in zip(offsets(regrouped), offsets([axis]), strict=True):
            np.testing.assert_array_equal(one, other)
