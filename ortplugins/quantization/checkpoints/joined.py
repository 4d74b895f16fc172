# SPDX-License-Identifier: MIT
"""Layers side by side in one weight, as in onnxruntime-genai's models.

The parts may have other bits and blocks: a code of 4 bits is one of 8, and a block of 32 is
two of 16 with the same scale.
"""

from __future__ import annotations

import dataclasses
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
from ortplugins.quantization.methods.nearest import BlockFormat


def joined(parts: Sequence[Found]) -> Found:
    """Return what parts are together."""
    name = BETWEEN.join(part.name for part in parts)
    layers = [part for part in parts if isinstance(part, Layer)]
    floats = [part for part in parts if isinstance(part, FloatMatrix)]
    if len(floats) == len(parts):

        def read() -> npt.NDArray[np.float32]:
            matrices = [np.asarray(part.matrix(), np.float32) for part in floats]
            return np.concatenate(matrices, axis=1)

        return FloatMatrix(name, read, k_last=False)
    whole = JoinedLayer(name, tuple(layers))
    if len(layers) == len(parts) and not (reason := whole.reason()):
        return whole
    reason = reason if len(layers) == len(parts) else "one is in float"
    return Unreadable(name, f"in parts that make no weight together ({reason})")


@dataclasses.dataclass(frozen=True)
class JoinedLayer(Layer):
    """Layers of one K."""

    parts: tuple[Layer, ...]

    @property
    def method(self) -> str:
        """What made the first."""
        return self.parts[0].method

    @property
    def has_offsets(self) -> bool:
        """Whether a part has some."""
        return any(part.has_offsets for part in self.parts)

    def reason(self) -> str:
        """Say why they cannot be one weight; nothing if they can."""
        forms, orders = self._forms("float32"), [part.order() for part in self.parts]
        (k, _), first = self.shape(), forms[0]
        sizes = [form.size_along(k) for form in forms]
        if len({form.is_symmetric for form in forms}) > 1 or any(
            not form.is_symmetric and form.bits != first.bits for form in forms
        ):
            return "some have zero points"
        if any(size % math.gcd(*sizes) or k % size for size in sizes):
            return f"blocks of {sizes}"
        if any(part.shape()[1] % 8 for part in self.parts[:-1]):
            return "columns that fill no words"
        if any(not np.array_equal(order, orders[0]) for order in orders):  # type: ignore[arg-type]
            return "rows in different orders"
        return ""

    def shape(self) -> tuple[int, int]:
        """Return K and N."""
        shapes = [part.shape() for part in self.parts]
        return shapes[0][0], sum(n for _, n in shapes)

    def form(self, scale_type: str) -> BlockFormat:
        """Return the form that holds the codes of all."""
        forms, (k, _) = self._forms(scale_type), self.shape()
        sizes = [form.size_along(k) for form in forms]
        size = forms[0].block_size if len(set(sizes)) == 1 else math.gcd(*sizes)
        bits = max(form.bits for form in forms)
        return dataclasses.replace(forms[0], bits=bits, block_size=size)

    def order(self) -> npt.NDArray[np.int64] | None:
        """Return the order of all."""
        return self.parts[0].order()

    def load(self, columns: slice, is_symmetric: bool) -> LayerCodes:
        """Read some columns."""
        (k, _), found, left = self.shape(), [], 0
        size = self.form("float32").size_along(k)
        for part, form in zip(self.parts, self._forms("float32"), strict=True):
            width = part.shape()[1]
            start, stop = max(columns.start - left, 0), min(columns.stop - left, width)
            left += width
            if start < stop:
                codes = part.load(slice(start, stop), is_symmetric)
                found.append(_in_smaller_blocks(codes, form.size_along(k) // size))
        offsets = None
        if self.has_offsets:
            offsets = np.concatenate(
                [np.zeros_like(c.scales) if c.offsets is None else c.offsets for c in found],
                axis=1,
            )
        zeros = [codes.zero_points for codes in found if codes.zero_points is not None]
        return LayerCodes(
            np.concatenate([codes.codes for codes in found], axis=1),
            np.concatenate([codes.scales for codes in found], axis=1),
            np.concatenate(zeros, axis=1) if zeros else None,
            offsets,
            found[0].order,
        )

    def _forms(self, scale_type: str) -> list[BlockFormat]:
        return [part.form(scale_type) for part in self.parts]


def _in_smaller_blocks(codes: LayerCodes, times: int) -> LayerCodes:
    grids = {
        name: numbers.repeat(times, axis=0)
        for name in ("scales", "zero_points", "offsets")
        if (numbers := getattr(codes, name)) is not None
    }
    return dataclasses.replace(codes, **grids)
