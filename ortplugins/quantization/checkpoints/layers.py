# SPDX-License-Identifier: MIT
"""What a checkpoint has of a weight, whatever its format.

Layer             codes in their file; small enough to send to another process
FloatMatrix       a matrix that the checkpoint has in float
UnreadableError   raised where ONNX cannot hold the format as it is
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ortplugins.errors import ModelFileError
from ortplugins.quantization.methods.nearest import (
    BlockFormat,
    Codes,
    Floats,
    ZeroPoints,
    dequantize_blocks,
)
from ortplugins.quantization.weights.uses import WeightUse

# Codes of 2 bits have .8 and more, other weights 0. Columns that are this much smaller than
# the mean may be rounded to 0, where a tensor has one scale.
_LEAST_COSINE, _SMALL = 0.25, 0.25
BETWEEN = " + "  # the names of parts


class UnreadableError(ModelFileError):
    """A layer has no codes as ONNX has them; the reason says what to do."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"tensor {name!r} of the checkpoint is {reason}")


@dataclasses.dataclass(frozen=True, eq=False)
class LayerCodes:
    """Codes of some columns.

    Attributes:
        codes: ``[K, n]``, a byte each: int8 where the form is symmetric, else uint8.
        scales: float32 ``[blocks, n]``.
        zero_points: uint8 ``[blocks, n]``; None where the form is symmetric.
        offsets: float32 ``[blocks, n]``, added to all weights of a block; None for 0.
        order: Which row of the weight each row of codes is; None where all are in place.
    """

    codes: Codes
    scales: Floats
    zero_points: ZeroPoints | None = None
    offsets: Floats | None = None
    order: npt.NDArray[np.int64] | None = None

    def dequantized(self, form: BlockFormat) -> Floats:
        """Return what they stand for, float32 ``[K, n]``, rows in the weight's order."""
        found = dequantize_blocks(self.codes, self.scales, self.zero_points, form)
        if self.offsets is not None:
            k = len(found)
            found += np.repeat(self.offsets, form.size_along(k), axis=0)[:k]
        if self.order is not None:
            in_place = np.empty_like(found)
            in_place[self.order] = found
            return in_place
        return found


@dataclasses.dataclass(frozen=True, eq=False)
class Layer:
    """Codes of one weight in a checkpoint.

    Attributes:
        name: What the checkpoint calls it.
        method: What made the codes, or their type.
        shape: K and N.
        form: Of the codes.
        read: Reads some columns, of which the first is a multiple of 8.
        has_offsets: Whether blocks have offsets.
        order: As in :class:`LayerCodes`.
    """

    name: str
    method: str
    shape: tuple[int, int]
    form: BlockFormat
    read: Callable[[slice], LayerCodes]
    has_offsets: bool = False
    order: npt.NDArray[np.int64] | None = None

    def load(self, columns: slice) -> LayerCodes:
        """Read some columns; the first is a multiple of 8."""
        return dataclasses.replace(self.read(columns), order=self.order)

    def columns(self, columns: slice) -> Floats:
        """Return some columns of the weight, float32 ``[K, n]``."""
        return self.load(columns).dequantized(self.form)


@dataclasses.dataclass(frozen=True, eq=False)
class FloatMatrix:
    """A float matrix, in its file."""

    name: str
    shape: tuple[int, ...]  # K and N
    read: Callable[[slice], npt.NDArray[Any]]  # some columns, of any float type

    def columns(self, columns: slice) -> Floats:
        """Return some columns, float32 ``[K, n]``."""
        return np.asarray(self.read(columns), np.float32)

    def put(self, use: WeightUse) -> None:
        """Give a weight of the graph these numbers; they are read when the model is saved."""
        old, value = use.tensor, use.weight

        def stored() -> ir.TensorProtocol:
            numbers, own = self.columns(slice(0, self.shape[1])), old.numpy()
            check_columns(self.name, numbers, own.T if use.stored_k_last else own)
            return as_tensor(self.name, numbers.T if use.stored_k_last else numbers, old)

        value.const_value = ir.LazyTensor(
            stored, old.dtype, ir.Shape(old.shape.numpy()), name=value.name
        )


Found = Layer | FloatMatrix


def check_columns(name: str, found: Floats, floats: npt.NDArray[Any], first: int = 0) -> None:
    """Refuse columns ``[K, n]`` of a layer of which one is not that of the float weight.

    AWQ's have rows that are scaled, which leaves most of a cosine.
    """
    own = np.asarray(floats, np.float32)
    sizes, of_own = (np.linalg.norm(each, axis=0) for each in (found, own))
    near = np.einsum("kn,kn->n", found, own) >= _LEAST_COSINE * sizes * of_own
    wrong = ~near & (sizes > 0) & (of_own > _SMALL * of_own.mean())
    if wrong.any():
        raise ModelFileError(
            f"layer {name!r} of the checkpoint is not the weight of the model: column "
            f"{first + int(wrong.argmax())} of its transpose is another; give a checkpoint of "
            "this model, its rows in this order"
        )


def joined(parts: Sequence[Found]) -> Found:
    """Return what parts of one K are side by side, as in onnxruntime-genai's models.

    They may have other bits and blocks: a code of 4 bits is one of 8, and a block of 32 is two
    of 16 with the same scale.

    Raises:
        UnreadableError: If they make no weight together.
    """
    name = BETWEEN.join(part.name for part in parts)
    layers = [part for part in parts if isinstance(part, Layer)]
    (k, _), shapes = parts[0].shape, [part.shape for part in parts]
    shape = k, sum(n for _, n in shapes)
    if not layers:
        return FloatMatrix(name, shape, functools.partial(_floats, tuple(parts)))
    if reason := "one is in float" if len(layers) < len(parts) else _apart(layers):
        raise UnreadableError(name, f"in parts that make no weight together ({reason})")
    first, sizes = layers[0], [layer.form.size_along(k) for layer in layers]
    form = dataclasses.replace(
        first.form,
        bits=max(layer.form.bits for layer in layers),
        block_size=first.form.block_size if len(set(sizes)) == 1 else math.gcd(*sizes),
    )
    return dataclasses.replace(
        first,
        name=name,
        shape=shape,
        form=form,
        read=functools.partial(_codes, tuple(layers), form.size_along(k)),
        has_offsets=any(layer.has_offsets for layer in layers),
    )


def _apart(layers: Sequence[Layer]) -> str:
    """Say why layers cannot be one weight; nothing if they can."""
    (k, _), forms = layers[0].shape, [layer.form for layer in layers]
    sizes = [form.size_along(k) for form in forms]
    kinds = {(form.is_symmetric, form.bits) for form in forms}
    if len(kinds) > 1 and not all(form.is_symmetric for form in forms):
        return "some have zero points"
    if any(size % math.gcd(*sizes) or k % size for size in sizes):
        return f"blocks of {sizes}"
    if any(layer.shape[1] % 8 for layer in layers[:-1]):
        return "columns that fill no words"
    orders = {None if layer.order is None else layer.order.tobytes() for layer in layers}
    return "rows in different orders" if len(orders) > 1 else ""


def _places(parts: Sequence[Found], columns: slice) -> Iterator[tuple[int, slice]]:
    """Yield the parts that some columns are in, by number, and which of theirs these are."""
    left = 0
    for number, part in enumerate(parts):
        width = part.shape[1]
        start, stop = max(columns.start - left, 0), min(columns.stop - left, width)
        left += width
        if start < stop:
            yield number, slice(start, stop)


def _floats(parts: Sequence[Found], columns: slice) -> Floats:
    found = [parts[number].columns(own) for number, own in _places(parts, columns)]
    return np.concatenate(found, axis=1)


def _codes(parts: Sequence[Layer], size: int, columns: slice) -> LayerCodes:
    """Read some columns of layers side by side, in blocks of one size."""
    grids: dict[str, list[npt.NDArray[Any]]] = {}
    codes = []
    for number, own in _places(parts, columns):
        found, times = (
            (part := parts[number]).load(own),
            part.form.size_along(part.shape[0]) // size,
        )
        codes.append(found.codes)
        given = {"scales": found.scales, "zero_points": found.zero_points}
        if any(each.has_offsets for each in parts):
            none = np.zeros_like(found.scales)
            given["offsets"] = none if found.offsets is None else found.offsets
        for name, grid in given.items():
            if grid is not None:
                grids.setdefault(name, []).append(grid.repeat(times, axis=0))
    whole = {name: np.concatenate(found, axis=1) for name, found in grids.items()}
    return LayerCodes(np.concatenate(codes, axis=1), **whole)


def as_tensor(
    name: str, numbers: npt.NDArray[Any], old: ir.TensorProtocol
) -> ir.TensorProtocol:
    """Return numbers of a checkpoint in the type of a tensor of the graph."""
    with np.errstate(over="ignore"):
        converted = np.ascontiguousarray(numbers).astype(old.dtype.numpy())
    if not np.isfinite(converted).all():
        raise ModelFileError(
            f"tensor {name!r} of the checkpoint has numbers beyond {old.dtype.name.lower()}"
        )
    return ir.Tensor(converted, dtype=old.dtype, name=old.name)
