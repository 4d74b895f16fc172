# SPDX-License-Identifier: MIT
"""Layers side by side in one weight, as in onnxruntime-genai's models.

The parts may have other bits and blocks: a code of 4 bits is one of 8, and a block of 32 is
two of 16 with the same scale.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ortplugins.quantization.checkpoints.layers import (
    BETWEEN,
    FloatMatrix,
    Found,
    Layer,
    LayerCodes,
    Unreadable,
)


def joined(parts: Sequence[Found]) -> Found:
    """Return what parts of one K are together."""
    name = BETWEEN.join(part.name for part in parts)
    layers = [part for part in parts if isinstance(part, Layer)]
    floats = [part for part in parts if isinstance(part, FloatMatrix)]
    if len(floats) == len(parts):

        def read() -> npt.NDArray[np.float32]:
            matrices = [np.asarray(part.matrix(), np.float32) for part in floats]
            return np.concatenate(matrices, axis=1)

        return FloatMatrix(name, read, k_last=False)
    if reason := "one is in float" if floats else _reason(layers):
        return Unreadable(name, f"in parts that make no weight together ({reason})")
    first, (k, _) = layers[0], layers[0].shape
    sizes = [layer.form.size_along(k) for layer in layers]
    form = dataclasses.replace(
        first.form,
        bits=max(layer.form.bits for layer in layers),
        block_size=first.form.block_size if len(set(sizes)) == 1 else math.gcd(*sizes),
    )
    return dataclasses.replace(
        first,
        name=name,
        shape=(k, sum(layer.shape[1] for layer in layers)),
        form=form,
        read=functools.partial(_read, tuple(layers), form.size_along(k)),
        has_offsets=any(layer.has_offsets for layer in layers),
    )


def _reason(layers: Sequence[Layer]) -> str:
    """Say why layers cannot be one weight; nothing if they can."""
    (k, _), forms = layers[0].shape, [layer.form for layer in layers]
    sizes = [form.size_along(k) for form in forms]
    if not all(form.is_symmetric for form in forms) and (
        len({(form.is_symmetric, form.bits) for form in forms}) > 1
    ):
        return "some have zero points"
    if any(size % math.gcd(*sizes) or k % size for size in sizes):
        return f"blocks of {sizes}"
    if any(layer.shape[1] % 8 for layer in layers[:-1]):
        return "columns that fill no words"
    orders = [None if layer.order is None else layer.order.tobytes() for layer in layers]
    return "rows in different orders" if len(set(orders)) > 1 else ""


def _read(parts: Sequence[Layer], size: int, columns: slice) -> LayerCodes:
    """Read some columns of layers side by side, in blocks of one size."""
    found, left = [], 0
    for part in parts:
        k, width = part.shape
        start, stop = max(columns.start - left, 0), min(columns.stop - left, width)
        left += width
        if start < stop:
            codes = part.load(slice(start, stop))
            found.append(_in_smaller_blocks(codes, part.form.size_along(k) // size))
    offsets = zeros = None
    if any(part.has_offsets for part in parts):
        offsets = [np.zeros_like(c.scales) if c.offsets is None else c.offsets for c in found]
    if found[0].zero_points is not None:
        zeros = [codes.zero_points for codes in found if codes.zero_points is not None]
    return LayerCodes(
        np.concatenate([codes.codes for codes in found], axis=1),
        np.concatenate([codes.scales for codes in found], axis=1),
        None if zeros is None else np.concatenate(zeros, axis=1),
        None if offsets is None else np.concatenate(offsets, axis=1),
    )


def _in_smaller_blocks(codes: LayerCodes, times: int) -> LayerCodes:
    grids = {
        name: numbers.repeat(times, axis=0)
        for name in ("scales", "zero_points", "offsets")
        if (numbers := getattr(codes, name)) is not None
    }
    return dataclasses.replace(codes, **grids)
