# SPDX-License-Identifier: MIT
"""How far the outputs of one model are from those of another, over all samples.

error  = sum |y - r|^2 / sum |r|^2     of each output, the mean over the outputs
cosine = y . r / (|y| |r|)             of each sample and output, the mean over all
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclasses.dataclass(frozen=True)
class Deviation:
    """How far outputs are from those of the reference.

    Attributes:
        error: Squared error over all samples relative to the reference's energy, the mean over
            the outputs; infinite where an output is not finite.
        cosine: To the reference, the mean over samples and outputs.
    """

    error: float
    cosine: float


def deviation_of(
    samples: Iterable[tuple[Sequence[npt.NDArray[Any]], Sequence[npt.NDArray[Any]]]],
) -> Deviation:
    """Compare the outputs of each sample with those of the reference, of equal shapes."""
    sums: Any = 0
    cosines = []
    for found, wanted in samples:
        squares = []
        for got, reference in zip(found, wanted, strict=True):
            x, y = got.astype(np.float64).ravel(), reference.astype(np.float64).ravel()
            with np.errstate(invalid="ignore", over="ignore"):
                # Sums and no BLAS: its threads would fight with onnxruntime's, 3 ms a product.
                error = float(np.square(x - y).sum())
                energy = float(np.square(y).sum())
                lengths = math.sqrt(float(np.square(x).sum()) * energy)
                product = float((x * y).sum())
            if not (math.isfinite(error) and math.isfinite(lengths)):
                error, cosine = math.inf, 0.0
            else:
                cosine = product / lengths if lengths else float(error == 0)
            squares.append((error, energy))
            cosines.append(cosine)
        sums += np.array(squares)
    errors, energies = sums.T
    # An output that is 0 in every sample has no energy: its error counts as it is.
    relative = errors / np.where(energies > 0, energies, 1.0)
    return Deviation(float(relative.mean()), float(np.mean(cosines)))
