# SPDX-License-Identifier: MIT
"""How far the outputs of one model are from those of another, over all samples.

error  = sum |y - r|^2 / sum |r|^2     of each output, the mean over the outputs
cosine = y . r / (|y| |r|)             of each sample and output, the mean over all
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
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


class Comparison:
    """Adds up what makes a :class:`Deviation`, sample by sample."""

    def __init__(self, outputs: int) -> None:
        self._error = np.zeros(outputs)
        self._energy = np.zeros(outputs)
        self._cosines: list[float] = []

    def add(
        self, found: Sequence[npt.NDArray[Any]], wanted: Sequence[npt.NDArray[Any]]
    ) -> None:
        """Take in the outputs of one sample, of equal shapes."""
        for i, (got, reference) in enumerate(zip(found, wanted, strict=True)):
            x, y = got.astype(np.float64).ravel(), reference.astype(np.float64).ravel()
            with np.errstate(invalid="ignore", over="ignore"):
                # Sums and no BLAS: its threads would fight with onnxruntime's, 3 ms a product.
                error = float(np.square(x - y).sum())
                energy = float(np.square(y).sum())
                lengths = math.sqrt(float(np.square(x).sum()) * energy)
                product = float((x * y).sum())
            finite = math.isfinite(error) and math.isfinite(lengths)
            self._error[i] += error if finite else math.inf
            self._energy[i] += energy
            if not finite:
                self._cosines.append(0.0)
            elif lengths == 0:
                self._cosines.append(float(error == 0))
            else:
                self._cosines.append(product / lengths)

    def result(self) -> Deviation:
        """Return what all samples add up to."""
        # An output that is 0 in every sample has no energy: its error counts as it is.
        energy = np.where(self._energy > 0, self._energy, 1.0)
        return Deviation(
            float(np.mean(self._error / energy)), float(np.mean(self._cosines or [1.0]))
        )
