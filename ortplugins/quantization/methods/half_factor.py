# SPDX-License-Identifier: MIT
"""Factors a positive matrix, H = (A + 1) diag(cost) (A + 1)^T, in half a square of memory.

A is strictly upper, and (A + 1)^T the Cholesky factor of H with its rows and columns reversed,
each column over its diagonal. It is made in place, in panels of rows up to the diagonal: for
K = 11,008 it takes 0.5 GB, numpy's own 2.9.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Doubles = npt.NDArray[np.float64]
Floats = npt.NDArray[np.float32]

# Rows of a panel, but for the first.
_PANEL = 512


class HalfFactor:
    """The factor of a matrix; ``cost`` is float32 ``[K]``."""

    def __init__(self, k: int, reversed_rows: Callable[[slice], Doubles]) -> None:
        """Factor H, of which a function makes rows ``[rows, rows.stop]``, reversed.

        Raises:
            numpy.linalg.LinAlgError: If H is not positive.
        """
        edges = [0, *range(k % _PANEL or _PANEL, k + 1, _PANEL)]
        spans = [slice(*both) for both in itertools.pairwise(edges)]
        self._panels = [(span, reversed_rows(span)) for span in spans]
        for index, (span, panel) in enumerate(self._panels):
            done, own = panel[:, : span.start], panel[:, span]
            own -= done @ done.T
            own[:] = np.linalg.cholesky(own)
            inverse = np.linalg.inv(own).T
            for _, below in self._panels[index + 1 :]:
                part = below[:, span]
                part[:] = (part - below[:, : span.start] @ done.T) @ inverse
        diagonal = np.concatenate([panel[:, span].diagonal() for span, panel in self._panels])
        for span, panel in self._panels:
            panel /= diagonal[: span.stop]
        self.cost: Floats = (diagonal[::-1] ** 2).astype(np.float32)

    def rows(self, start: int, stop: int) -> Floats:
        """Return rows of (A + 1)^T up to their diagonal, float32 ``[rows, stop]``."""
        first, last = (len(self.cost) - end for end in (stop, start))
        columns = np.zeros((stop, stop - start), np.float32)
        for span, panel in self._panels:
            if span.stop > first:
                part = panel[max(first - span.start, 0) :, first:last]
                bottom = span.stop - first
                columns[bottom - len(part) : bottom, : part.shape[1]] = part
        return np.ascontiguousarray(columns[::-1, ::-1]).T

    def solve(self, right: Floats) -> Floats:
        """Return H^-1 right, float32 ``[K, N]``."""
        found = right[::-1].copy()
        for span, panel in self._panels:
            found[span] -= panel[:, : span.start] @ found[: span.start]
            found[span] = np.linalg.solve(panel[:, span], found[span])
        found /= self.cost[::-1, None]
        for index, (span, panel) in reversed([*enumerate(self._panels)]):
            later = self._panels[index + 1 :]
            found[span] -= sum(below[:, span].T @ found[at] for at, below in later)
            found[span] = np.linalg.solve(panel[:, span].T, found[span])
        return found[::-1]
