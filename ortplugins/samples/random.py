# SPDX-License-Identifier: MIT
"""Random inputs made from a model's signature, for users who have no data at hand.

Only float inputs and token ids are random. A mask is all ones, positions count up, a cache is
empty: anything else would run, and show activations that no real input has.

Dimensions that the model leaves open are guessed by name and place:

    contains "past", is no sum    0    the length of a cache
    contains "batch"              1
    first axis, no name           1
    any other                    32    tokens, "past + sequence", "total_sequence_length"
"""

from __future__ import annotations

__all__ = ["random_feeds"]

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

# Length of what is open and neither a batch nor a cache.
_LENGTH = 32
# Ids stay below this: how many rows an embedding has cannot be read from the signature.
_IDS = 10


def random_feeds(
    inputs: Sequence[ir.Value], *, count: int = 8, seed: int = 0
) -> Iterator[dict[str, npt.NDArray[Any]]]:
    """Yield ``count`` feeds; the same ones for the same seed.

    Args:
        inputs: Tensors that must be fed, with their types and shapes.
        count: How many feeds.
        seed: Seed of numpy's default generator.
    """
    rng = np.random.default_rng(seed)
    for _ in range(count):
        yield {value.name or "": _random_array(value, rng) for value in inputs}


def _random_array(value: ir.Value, rng: np.random.Generator) -> npt.NDArray[Any]:
    name = (value.name or "").lower()
    dtype = value.dtype or ir.DataType.FLOAT
    shape = _guessed_shape(value)
    if dtype is ir.DataType.STRING:
        return np.full(shape, "text")
    if dtype is ir.DataType.BOOL:
        return np.ones(shape, np.bool_)
    if dtype.is_floating_point():
        return rng.standard_normal(shape, np.float32).astype(dtype.numpy())
    if "mask" in name:
        array: npt.NDArray[Any] = np.ones(shape)
    elif "position" in name and shape:
        array = np.broadcast_to(np.arange(shape[-1]), shape)
    elif "type" in name or "segment" in name:
        array = np.zeros(shape)
    elif "seqlens_k" in name:  # onnxruntime-genai: the last position of each row
        array = np.full(shape, _LENGTH - 1)
    elif "total" in name and len(shape) <= 1:
        array = np.full(shape, _LENGTH)
    else:
        array = rng.integers(0, _IDS, shape)
    return array.astype(dtype.numpy())


def _guessed_shape(value: ir.Value) -> tuple[int, ...]:
    if value.shape is None:
        return (1, _LENGTH)
    return tuple(
        dim if isinstance(dim, int) and dim >= 0 else _guessed_size(_symbol(dim), axis)
        for axis, dim in enumerate(value.shape)
    )


def _guessed_size(name: str | None, axis: int) -> int:
    label = (name or "").lower()
    if "past" in label and "+" not in label:
        return 0
    if "batch" in label or (axis == 0 and not label):
        return 1
    return _LENGTH


def _symbol(dim: int | ir.SymbolicDim) -> str | None:
    """Name an open dimension; PaddlePaddle writes -1 for one without a name."""
    return None if isinstance(dim, int) else dim.value
