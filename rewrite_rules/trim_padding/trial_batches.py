# SPDX-License-Identifier: MIT
"""Made-up batches for a trial of a trimmed model beside the original."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from rewrite_rules.trials import Trial
from rewrite_rules.trim_padding.token_axes import BATCH, Factor, Sequence, sequences_of
from rewrite_rules.trim_padding.token_flow import Evaluated, TokenFlow, Tokens, Value

_LENGTH, _LONG = 24, 160
# Name, rows of (padding in front, real positions), and whether the batch is a long one.
_BATCHES: tuple[tuple[str, tuple[tuple[int, int], ...], int], ...] = (
    ("one token", ((0, 1),), _LENGTH),
    ("odd lengths", ((0, 7), (0, 5), (0, 3)), _LENGTH),
    ("full length", ((0, _LENGTH), (0, _LENGTH)), _LENGTH),
    ("mixed lengths", ((0, 2), (0, 17), (0, 1), (0, 11)), _LENGTH),
    ("left padding", ((5, 19), (0, _LENGTH), (23, 1)), _LENGTH),
    ("padding on both sides", ((3, 9), (0, 14), (0, 4)), _LENGTH),
    ("a row of padding only", ((0, 9), (0, 0), (0, 4)), _LENGTH),
    ("long rows", ((0, 140), (0, 71)), _LONG),
)


def trial_batches(
    model: ir.Model, mask: ir.Value, inputs: Mapping[ir.Value, Value], flow: TokenFlow
) -> Iterator[Trial]:
    """Make the trials; what the model computes at real positions has to be the same."""
    assert mask.shape is not None and mask.dtype is not None
    rng = np.random.default_rng(17)
    rows_fixed, length_fixed = (n if isinstance(n, int) else None for n in mask.shape)
    for name, rows, length in _BATCHES:
        if length_fixed is not None:
            if length == _LONG:
                continue
            length = length_fixed
        if rows_fixed is not None:
            rows = (rows * rows_fixed)[:rows_fixed]
        real = np.zeros((len(rows), length), np.bool_)
        for row, (front, count) in zip(real, rows, strict=True):
            # With a fixed length the rows reach as far as it lets them.
            row[front : length if count == _LENGTH else front + count] = True
        feeds = {
            str(value.name): real.astype(mask.dtype.numpy())
            if isinstance(known, Evaluated)
            else _array(value, known, real.shape, flow.index_limits.get(value, 2), rng)
            for value, known in inputs.items()
            if value.name not in model.graph.initializers
        }
        compared = {str(v.name): _counted(flow.tokens(v), real) for v in model.graph.outputs}
        yield Trial(name, feeds, compared, optional=length == _LONG)


def _array(
    value: ir.Value,
    known: Tokens,
    shape: tuple[int, ...],
    limit: int,
    rng: np.random.Generator,
) -> NDArray[Any]:
    symbols: dict[Factor, Any] = {BATCH: shape[0], Sequence(): shape[1]}
    sizes = [math.prod(symbols.get(f, f) for f in axis) for axis in known.axes or ()]
    assert value.dtype is not None
    dtype = value.dtype.numpy()
    if dtype.kind == "f":
        return rng.standard_normal(sizes).astype(dtype)
    return rng.integers(0, limit, sizes).astype(dtype)


def _counted(known: Tokens, real: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which elements of an output belong to real positions; rows without any do not count."""
    axes = known.axes or ()
    rank = len(axes)
    result: NDArray[np.bool_] = np.ones([1] * rank, np.bool_)
    batch = next((i for i, axis in enumerate(axes) if axis == (BATCH,)), None)
    if batch is not None:
        shape = [1] * rank
        shape[batch] = len(real)
        result = result & real.any(axis=1).reshape(shape)
    for i in (i for i, axis in enumerate(axes) if sequences_of(axis)):
        shape = [1] * rank
        shape[i] = real.shape[1]
        if batch is not None:
            shape[batch] = len(real)
        rows = real.all(axis=0) if batch is None else real if batch < i else real.T
        result = result & rows.reshape(shape)
    return result
