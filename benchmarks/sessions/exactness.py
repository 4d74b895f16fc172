# SPDX-License-Identifier: MIT
"""Differences of every fused form to onnxruntime without optimisation on the original."""

from __future__ import annotations

from pathlib import Path

import ortplugins
from benchmarks.figures.bounds import Figure
from tests.builders.dequantized_models import DequantizedMatMul, relative_error, run

SHAPES = ((1024, 512, 32), (1000, 333, 64), (70, 33, 32), (4096, 64, 128))
FORMS = ("int4", "uint4", "int8", "uint8")


def measure_exactness(folder: Path, rounds: int) -> list[Figure]:
    """Compare at accuracy levels 0 and 4, over layouts, types, zero points and shapes."""
    del folder, rounds
    figures = []
    for layout in ("axis0", "transposed"):
        for storage in FORMS:
            worst = {0: 0.0, 4: 0.0}
            for k, n, block_size in SHAPES:
                for zero_points in ("none", "random"):
                    case = DequantizedMatMul(k, n, block_size, storage, layout, zero_points)
                    for level in worst:
                        worst[level] = max(worst[level], _difference(case, level))
            what = f"{storage}, {'[K,N] axis 0' if layout == 'axis0' else '[N,K] + Transpose'}"
            figures.append(Figure(f"{what}, accuracy level 0", worst[0], bound=1e-5))
            figures.append(Figure(f"{what}, accuracy level 4", worst[4]))
    return figures


def _difference(case: DequantizedMatMul, level: int) -> float:
    feed = case.feed(rows=5)
    (expected,) = run(case.model(), {"x": feed})
    # slow_kernels="fuse": the kernel is what is measured here.
    fusion = ortplugins.DqMatMulNBitsFusion(accuracy_level=level, slow_kernels="fuse")
    result = ortplugins.optimize(case.model(), passes=[fusion])
    assert len(result.report.fired) == 1
    (actual,) = run(result.model, {"x": feed}, optimised=True)
    return relative_error(actual, expected)
