# SPDX-License-Identifier: MIT
"""Where the elements of a reshaped, transposed tensor lie in the tensor that is stored.

Layout operators between a dequantised weight and its consumer move no number relative to its
scale; they only rename the axes. An axis is therefore kept as runs of adjacent elements,
outermost first, each with the step that it takes through the codes and through the scales:

    stored int4 [N, blocks, 32]   (N, step 32 * blocks), (blocks, step 32), (32, step 1)
    Reshape to [N, K]             (N, step K), (K, step 1)
    Transpose                     (K, step 1), (N, step K)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


@dataclasses.dataclass(frozen=True)
class Run:
    """Neighbours at even steps.

    Element ``i`` has its code at ``i * codes`` and its scale at ``(i // block) * scales``,
    counted in elements of the stored tensors.
    """

    size: int
    codes: int
    scales: int = 0
    block: int = 1

    def __post_init__(self) -> None:
        """Give runs that read one scale only the same form."""
        if self.size <= self.block or self.scales == 0:
            object.__setattr__(self, "scales", 0)
            object.__setattr__(self, "block", 1)


Axis = tuple[Run, ...]


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Steps of a row-major tensor."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def reshape(axes: Sequence[Axis], shape: Sequence[int]) -> tuple[Axis, ...] | None:
    """Regroup the runs for another shape; None where a run, or a ragged block, is cut."""
    rest = [run for axis in axes for run in axis][::-1]  # a stack, the outermost on top
    result = []
    for size in shape:
        axis = []
        while size > 1:
            run = rest.pop()
            if size % run.size == 0:
                axis.append(run)
                size //= run.size
            elif run.size % size == 0 and (parts := _split(run, size)) is not None:
                axis.append(parts[0])
                rest.append(parts[1])
                size = 1
            else:
                return None
        result.append(tuple(axis))
    return tuple(result)


def _split(run: Run, outer: int) -> tuple[Run, Run] | None:
    """Split a run into ``outer`` parts."""
    inner = run.size // outer
    if inner % run.block == 0:
        step = inner // run.block * run.scales
        return Run(outer, inner * run.codes, step), Run(
            inner, run.codes, run.scales, run.block
        )
    if run.block % inner == 0:
        return (
            Run(outer, inner * run.codes, run.scales, run.block // inner),
            Run(inner, run.codes),
        )
    return None


def coalesced(axis: Axis) -> Run | None:
    """One run for the whole axis; None where its elements lie at uneven steps."""
    result = Run(1, 0)
    for run in reversed(axis):
        if run.size == 1:
            continue
        if result.size == 1:
            result = run
            continue
        if run.codes != result.size * result.codes:
            return None
        size = run.size * result.size
        if result.scales == 0:
            result = Run(size, result.codes, run.scales, run.block * result.size)
        elif run.block == 1 and run.scales * result.block == result.size * result.scales:
            result = Run(size, result.codes, result.scales, result.block)
        else:
            return None
    return result


def offsets(axes: Sequence[Axis]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Positions of the codes and of the scales of all elements of some axes, row-major."""
    codes = scales = np.zeros(1, np.int64)
    for run in (run for axis in axes for run in axis):
        step = np.arange(run.size, dtype=np.int64)
        codes = (codes[:, None] + step * run.codes).reshape(-1)
        scales = (scales[:, None] + step // run.block * run.scales).reshape(-1)
    return codes, scales
