# SPDX-License-Identifier: MIT
"""Which rows of an activation are tokens, and which are padding, by the masks that are fed.

A mask is about the activations that have its sizes in a sample:

    [batch, sequence, K]    [sequence, batch, K]    [batch sequence, K]

Where no input is as long as the mask, it counts the tokens of a cache too, and the new ones
are its last. All of that is observed: enough to leave padding out of statistics, but no
rewrite rests on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from rewrite_rules.facts.input_roles import Kind, role_of


class TokenRows:
    """The tokens of a model's activations."""

    def __init__(self, graph: ir.Graph) -> None:
        fed = {str(value.name): role_of(value) for value in graph.inputs}
        self._masks = [name for name, role in fed.items() if role.kind is Kind.MASK]
        self._tokens = [
            (name, role.axes.index("sequence"))
            for name, role in fed.items()
            if "sequence" in role.axes
        ]

    def real(
        self, shape: tuple[int, ...], feed: Mapping[str, NDArray[Any]]
    ) -> NDArray[np.bool_] | None:
        """Return which rows, ``shape[:-1]``, are tokens; None where all may be."""
        found = np.ones(shape[:-1], np.bool_)
        lengths = {feed[name].shape[axis] for name, axis in self._tokens if name in feed}
        for mask in (feed[name] for name in self._masks if name in feed):
            if mask.ndim != 2:
                continue
            # A float mask of zeros is added to scores, and of nothing but tokens.
            is_added = (mask < 0).any() or (mask.dtype.kind == "f" and not mask.any())
            kept = mask >= 0 if is_added else mask != 0
            if len(lengths) == 1 and (new := min(lengths)) < kept.shape[1]:
                kept = kept[:, kept.shape[1] - new :]
            for placed in (kept, kept.T, kept.reshape(-1)):
                if placed.shape == found.shape:
                    found &= placed
                    break
        return None if found.all() else found
