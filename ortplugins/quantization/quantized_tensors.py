# SPDX-License-Identifier: MIT
"""Codes, scales and zero points of a weight as tensors that are computed while they are saved.

Only a strip of the float weight is in memory at a time, and nothing is kept: codes and scales
are saved separately and each reads the weight once. A weight in an external file is mapped.
"""

from __future__ import annotations

__all__ = ["LAYOUTS", "WeightFormat", "codes_tensor", "scales_tensor", "zero_points_tensor"]

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ortplugins.quantization.round_to_nearest import block_grid, quantize_blocks
from rewrite_rules.code_repacking import ChunkedTensor, pack_rows, packed_bytes

Bytes = npt.NDArray[np.uint8]

LAYOUTS = ("axis0", "transposed")

# Float bytes quantised at a time.
_STRIP_BYTES = 8 << 20


@dataclasses.dataclass(frozen=True)
class WeightFormat:
    """How a weight ``[K, N]`` is quantised and stored.

    Attributes:
        bits: 4 or 8.
        block_size: Neighbours along K that share a scale.
        symmetric: Signed codes without zero points; else unsigned ones with.
        layout: ``"axis0"`` stores codes as ``[K, N]``, ``"transposed"`` as ``[N, K]``.

    Raises:
        ValueError: If a value is out of range.
    """

    bits: int = 4
    block_size: int = 32
    symmetric: bool = True
    layout: str = "axis0"

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ValueError(f"bits is {self.bits}: 4 or 8 is expected")
        if self.block_size < 1:
            raise ValueError(f"block_size is {self.block_size}: 1 or more is expected")
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout is {self.layout!r}: one of {LAYOUTS} is expected")

    @property
    def dtype(self) -> ir.DataType:
        """Type of codes and zero points."""
        return ir.DataType[f"{'' if self.symmetric else 'U'}INT{self.bits}"]

    @property
    def transposed(self) -> bool:
        """Whether K is the last axis of the codes."""
        return self.layout == "transposed"

    def shape(self, rows: int, n: int) -> tuple[int, int]:
        """Return the stored shape of ``[rows, n]``."""
        return (n, rows) if self.transposed else (rows, n)


def codes_tensor(weight: ir.TensorProtocol, form: WeightFormat, name: str) -> ir.LazyTensor:
    """Return the codes of a float32 weight ``[K, N]``, in the shape and type of the format.

    Raises:
        ValueError: When it is saved, if the weight holds NaN or infinite values.
    """

    def chunks() -> Iterator[Bytes]:
        for strip in _strips(weight, form):
            codes, _, _ = _named(quantize_blocks, weight, strip, form)
            yield _packed(codes.T if form.transposed else codes, form)

    k, n = weight.shape.numpy()
    return ChunkedTensor(chunks, form.dtype, form.shape(k, n), name)


def scales_tensor(weight: ir.TensorProtocol, form: WeightFormat, name: str) -> ir.LazyTensor:
    """Return the scales, float32 ``[blocks, N]``, or ``[N, blocks]`` where K is last.

    Raises:
        ValueError: As :func:`codes_tensor`.
    """

    def evaluate() -> ir.TensorProtocol:
        scales = [grid[0] for grid in _grids(weight, form)]
        return ir.Tensor(np.concatenate(scales), name=name)

    return ir.LazyTensor(
        evaluate, ir.DataType.FLOAT, ir.Shape(_grid_shape(weight, form)), name=name
    )


def zero_points_tensor(
    weight: ir.TensorProtocol, form: WeightFormat, name: str
) -> ir.LazyTensor:
    """Return the zero points, in the type of the codes and the shape of the scales.

    Raises:
        ValueError: As :func:`codes_tensor`.
    """

    def chunks() -> Iterator[Bytes]:
        # All at once: those of one strip need not end on a whole byte.
        yield _packed(np.concatenate([grid[1] for grid in _grids(weight, form)]), form)

    return ChunkedTensor(chunks, form.dtype, _grid_shape(weight, form), name)


def _strips(weight: ir.TensorProtocol, form: WeightFormat) -> Iterator[npt.NDArray[Any]]:
    """Yield parts of ``[K, N]`` in the order in which their codes are stored.

    Each holds whole blocks and an even number of codes, so that the packed parts just follow
    each other; the last one may not.
    """
    array = _array(weight)
    k, n = array.shape
    unit = 2 if form.transposed else math.lcm(form.block_size, 2)
    line_bytes = array.itemsize * (k if form.transposed else n)
    step = max(unit, _STRIP_BYTES // line_bytes // unit * unit)
    for start in range(0, n if form.transposed else k, step):
        part = slice(start, start + step)
        yield array[:, part] if form.transposed else array[part]


def _grids(
    weight: ir.TensorProtocol, form: WeightFormat
) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
    """Yield each strip's scales and zero points (empty when symmetric), as they are stored."""
    for strip in _strips(weight, form):
        scales, zero_points = _named(block_grid, weight, strip, form)
        offsets = np.zeros((0, 0), np.uint8) if zero_points is None else zero_points
        yield (scales.T, offsets.T) if form.transposed else (scales, offsets)


def _grid_shape(weight: ir.TensorProtocol, form: WeightFormat) -> tuple[int, int]:
    k, n = weight.shape.numpy()
    return form.shape(-(-k // form.block_size), n)


def _array(weight: ir.TensorProtocol) -> npt.NDArray[Any]:
    if isinstance(weight, ir.ExternalTensor):
        # Not numpy(), which keeps a mapping of the file per tensor.
        return packed_bytes(weight).view(np.float32).reshape(weight.shape.numpy())
    return weight.numpy()


def _packed(codes: npt.NDArray[Any], form: WeightFormat) -> Bytes:
    """Pack codes over the flattened array, the first in the low bits, as ONNX stores them."""
    flat = np.ascontiguousarray(codes).reshape(-1).view(np.uint8)
    return pack_rows(flat & np.uint8((1 << form.bits) - 1), form.bits)


def _named(
    quantise: Callable[..., Any],
    weight: ir.TensorProtocol,
    strip: npt.NDArray[Any],
    form: WeightFormat,
) -> Any:
    """Call a function of :mod:`round_to_nearest`; its errors get the weight's name."""
    try:
        return quantise(
            strip, bits=form.bits, block_size=form.block_size, symmetric=form.symmetric
        )
    except ValueError as error:
        raise ValueError(f"weight {weight.name!r} cannot be quantised: {error}") from error
