# SPDX-License-Identifier: MIT
"""One description of how an activation is quantised: type, scale and zero point.

    value = (code - zero_point) * scale          code = round(value / scale) + zero_point

Rounded half to even and clipped to the type's range. What a fold or a boundary needs to know
of two grids is answered by running all their codes through both operators.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from rewrite_rules.remarks import Refusal

# What the activations of onnxruntime's QDQ graphs are stored as.
GRID_TYPES = (ir.DataType.UINT8, ir.DataType.INT8, ir.DataType.UINT16, ir.DataType.INT16)
_LEAST = float(np.finfo(np.float32).smallest_normal)


@dataclasses.dataclass(frozen=True)
class QuantizationGrid:
    """A grid per tensor, of float32 values."""

    dtype: ir.DataType
    scale: np.float32
    zero_point: int

    def __post_init__(self) -> None:
        if self.dtype not in GRID_TYPES:
            raise Refusal(
                "ORP306", f"codes of type {self.dtype.name.lower()} are not activations"
            )
        # A session may take subnormal numbers for 0 (session.set_denormal_as_zero).
        if not _LEAST <= float(self.scale) < np.inf:
            raise Refusal(
                "ORP309", f"scale is {float(self.scale)}; it has to be positive and normal"
            )
        if not self.low <= self.zero_point <= self.high:
            raise Refusal(
                "ORP309",
                f"zero point {self.zero_point} lies outside the range of "
                f"{self.dtype.name.lower()}",
            )

    @property
    def low(self) -> int:
        return int(self.dtype.min)

    @property
    def high(self) -> int:
        return int(self.dtype.max)

    @property
    def bits(self) -> int:
        """Of a code: 8 or 16."""
        return self.dtype.bitwidth

    @property
    def range(self) -> tuple[np.float32, np.float32]:
        """The ends of the range of values that the grid was made for.

        Unless it begins or ends at 0, it was moved for the zero point to be a code.
        """
        steps = np.array([self.low - self.zero_point, self.high - self.zero_point], np.float64)
        if self.zero_point not in (self.low, self.high):
            steps += [-0.5, 0.5]
        with np.errstate(over="ignore"):
            low, high = (steps * float(self.scale)).astype(np.float32)
        return low, high

    def codes(self) -> npt.NDArray[np.generic]:
        """All codes of the type, ascending; 256 or 65,536 of them."""
        return np.arange(self.low, self.high + 1).astype(self.dtype.numpy())

    def dequantize(self, codes: npt.ArrayLike) -> npt.NDArray[np.float32]:
        """The values of codes, as DequantizeLinear computes them."""
        offsets = np.asarray(codes).astype(np.int64) - self.zero_point
        with np.errstate(over="ignore"):
            values: npt.NDArray[np.float32] = offsets.astype(np.float32) * self.scale
        return values

    def quantize(self, values: npt.ArrayLike) -> npt.NDArray[np.generic]:
        """The codes of values; NaN becomes the smallest code."""
        with np.errstate(over="ignore", invalid="ignore"):
            steps = np.rint(np.asarray(values, np.float32) / self.scale)
            clipped = np.clip(
                np.nan_to_num(steps, nan=-np.inf),
                self.low - self.zero_point,
                self.high - self.zero_point,
            )
        codes: npt.NDArray[np.generic] = clipped.astype(np.int64) + self.zero_point
        return codes.astype(self.dtype.numpy())

    @functools.lru_cache(4096)  # noqa: B019 - models repeat few grids
    def refine(self, dtype: ir.DataType) -> QuantizationGrid:
        """Return the grid of another type that has every value of this one, bit for bit.

            scale16 = scale8 / 256      code16 = (code8 - min8) * 256 + min16

        256 is a power of two, so no product is rounded; 257, which would use the whole range,
        moves values. Refused: fewer bits, or a scale so small that this is not exact.
        """
        bits = dtype.bitwidth - self.bits
        if bits < 0:
            raise Refusal(
                "ORP310", f"{self.dtype.name.lower()} is not refined to {dtype.name.lower()}"
            )
        scale = np.float32(float(self.scale) / (1 << bits))
        if scale < _LEAST:
            raise Refusal(
                "ORP308",
                f"scale {float(self.scale):.3g} / 256 is not a normal float32; promote in "
                "mode 'float'",
            )
        zero_point = (self.zero_point - self.low << bits) + int(dtype.min)
        fine = QuantizationGrid(dtype, scale, zero_point)
        values = self.dequantize(self.codes())
        moves = fine.dequantize(fine.quantize(values)).tobytes() != values.tobytes()
        if bits and (moves or not self.keeps_codes(self)):
            raise Refusal(
                "ORP308", f"values of scale {float(self.scale):.3g} overflow, or would move"
            )
        return fine

    @functools.lru_cache(4096)  # noqa: B019
    def keeps_codes(self, through: QuantizationGrid) -> bool:
        """Return whether ``DQ(self) -> Q(through)`` gives back every code, in its type."""
        codes = self.codes()
        values = self.dequantize(codes)
        same = self.dtype == through.dtype and np.array_equal(through.quantize(values), codes)
        # What becomes of infinities, where values overflow, depends on the processor.
        return same and bool(np.isfinite(values).all())

    def __str__(self) -> str:
        return f"{self.dtype.name.lower()} {float(self.scale):.6g} @ {self.zero_point}"
