# SPDX-License-Identifier: MIT
"""Where the scales of a weight lie, cut into a matrix: the same for every element."""

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rewrite_rules.weights.dequantized_operand import Run, _cut

SIZES = st.sampled_from([1, 2, 3, 4, 6, 8])


@st.composite
def weights(draw: st.DrawFn) -> tuple[Run, Run, Run]:
    """As DequantizeLinear has them: a scale per index of an axis, or per block along it."""
    outer, size, inner = draw(SIZES), draw(SIZES), draw(SIZES)
    block = draw(st.sampled_from([0, 1, 2, 4, 8, 16]))
    if not block:
        return Run(outer), Run(size, 1), Run(inner)
    return Run(outer, -(-size // block) * inner), Run(size, inner, block), Run(inner, 1)


def scales_of(*runs: Run) -> list[int]:
    parts = (np.arange(run.size) // run.block * run.step for run in runs)
    return sum(np.ix_(*parts)).ravel().tolist()


@settings(max_examples=500)
@given(weights(), st.data())
def test_a_matrix_reads_the_same_scales(runs, data):
    count = math.prod(run.size for run in runs)
    columns = data.draw(st.sampled_from([n for n in range(1, count + 1) if count % n == 0]))
    matrix = _cut(runs, columns)
    if matrix is not None:
        assert matrix[1].size == columns
        assert scales_of(*matrix) == scales_of(*runs)
