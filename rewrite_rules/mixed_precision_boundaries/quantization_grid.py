# SPDX-License-Identifier: MIT
"""One description of how an activation is quantised: type, scale and zero point.

    value = (code - zero_point) * scale          code = round(value / scale) + zero_point

Rounded half to even and clipped to the type's range. What a fold or a boundary needs to know
of two grids is answered by running all their codes through both operators.
"""

from __future__ import annotations

import dataclasses
import functools

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from rewrite_rules.remarks import Refusal

# What the activations of onnxruntime's QDQ graphs are stored as.
GRID_TYPES = (ir.DataType.UINT8, ir.DataType.INT8, ir.DataType.UINT16, ir.DataType.INT16)
_LEAST = float(np.finfo(np.float32).smallest_normal)


@dataclasses.dataclass(frozen=True)
class QuantizationGrid:
    """A grid per tensor; its scale is a numpy scalar of the type that values have, too."""

    dtype: ir.DataType
    # A float16 and a float32 of one value are equal; the grids are not.
    scale: np.generic = dataclasses.field(compare=False)
    zero_point: int
    _stored: tuple[str, bytes] = dataclasses.field(init=False, repr=False)

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
        stored = np.asarray(self.scale)
        object.__setattr__(self, "_stored", (stored.dtype.name, stored.tobytes()))

    @staticmethod
    def of_range(
        dtype: ir.DataType,
        rmin: float,
        rmax: float,
        float_dtype: np.dtype[np.generic],
        symmetric: bool = False,
    ) -> QuantizationGrid:
        """Return the grid that onnxruntime's quantiser gives a range of values.

        ``compute_scale_zp`` of onnxruntime/quantization/quant_utils.py. Refused: a range that
        is not finite, or whose scale is too small for the float type.
        """
        if not (np.isfinite(rmin) and np.isfinite(rmax) and rmin <= rmax):
            raise Refusal("ORP312", f"{rmin}..{rmax} is not a range of values")
        low, high = int(dtype.min), int(dtype.max)
        rmin, rmax = min(rmin, 0.0), max(rmax, 0.0)
        if symmetric:
            rmax = max(-rmin, rmax)
            rmin = -rmax
            low = -high if low < 0 else low
        scale = (rmax - rmin) / (high - low)
        if scale < float(ml_dtypes.finfo(float_dtype).smallest_normal):
            if rmax > rmin:
                # onnxruntime gives it the scale 1, which leaves nothing of the values.
                raise Refusal(
                    "ORP308",
                    f"scale {scale:.3g} of {rmin}..{rmax} is not a normal {float_dtype}",
                )
            return QuantizationGrid(dtype, float_dtype.type(1.0), 0)
        middle = np.round((low + high) / 2) if symmetric else np.round(low - rmin / scale)
        return QuantizationGrid(dtype, float_dtype.type(scale), int(middle))

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
    def float_dtype(self) -> np.dtype[np.generic]:
        return np.dtype(type(self.scale))

    @property
    def range(self) -> tuple[np.generic, np.generic]:
        """The ends of the range of values that the grid was made for, of the scale's type.

        Unless it begins or ends at 0, it was moved for the zero point to be a code.
        """
        steps = np.array([self.low - self.zero_point, self.high - self.zero_point], np.float64)
        if self.zero_point not in (self.low, self.high):
            steps += [-0.5, 0.5]
        with np.errstate(over="ignore"):
            low, high = (steps * float(self.scale)).astype(self.float_dtype)
        return low, high

    def codes(self) -> npt.NDArray[np.generic]:
        """All codes of the type, ascending; 256 or 65,536 of them."""
        return np.arange(self.low, self.high + 1).astype(self.dtype.numpy())

    def dequantize(self, codes: npt.ArrayLike) -> npt.NDArray[np.generic]:
        """The values of codes, as DequantizeLinear computes them; of the scale's type."""
        offsets = np.asarray(codes).astype(np.int64) - self.zero_point
        with np.errstate(over="ignore"):  # float16 ends at 65,504
            product = offsets.astype(np.float32) * np.float32(self.scale)
            values: npt.NDArray[np.generic] = product.astype(self.float_dtype)
        return values

    def quantize(
        self, values: npt.ArrayLike, precision: npt.DTypeLike = np.float32
    ) -> npt.NDArray[np.generic]:
        """The codes of values of the scale's type; NaN becomes the smallest code.

        The quotient is rounded to ``precision``: from opset 23 on the scale's type; float32
        before, and in onnxruntime's own operator. Release 1.31 gives some float16 values of
        2^31 steps and more, infinities among them, the code of the other end; no fold or
        boundary rests on such.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            steps = np.asarray(values, np.float32) / np.float32(self.scale)
            steps = np.rint(steps.astype(precision).astype(np.float32))
            clipped = np.clip(
                np.nan_to_num(steps, nan=-np.inf),
                self.low - self.zero_point,
                self.high - self.zero_point,
            )
        codes: npt.NDArray[np.generic] = clipped.astype(np.int64) + self.zero_point
        return codes.astype(self.dtype.numpy())

    def _quantize_both(self, values: npt.ArrayLike) -> list[npt.NDArray[np.generic]]:
        """The codes by each precision of the quotient that an opset has."""
        return [self.quantize(values, each) for each in (np.float32, self.float_dtype)]

    def refine(self, dtype: ir.DataType) -> QuantizationGrid:
        """Return the grid of another type that has every value of this one, bit for bit.

            scale16 = scale8 / 256      code16 = (code8 - min8) * 256 + min16

        256 is a power of two, so no product is rounded; 257, which would use the whole range,
        moves values. Refused: fewer bits, or a smaller scale that is not exact in its type.
        """
        bits = dtype.bitwidth - self.bits
        if bits < 0:
            raise Refusal(
                "ORP310", f"{self.dtype.name.lower()} is not refined to {dtype.name.lower()}"
            )
        scale = self.float_dtype.type(float(self.scale) / (1 << bits))
        zero_point = (self.zero_point - self.low << bits) + int(dtype.min)
        fine = QuantizationGrid(dtype, scale, zero_point)
        if bits and not (self.keeps_values(fine, fine) and self.keeps_codes(self)):
            raise Refusal(
                "ORP308",
                f"scale {float(self.scale)} / 256 as {self.float_dtype} moves values, or they "
                "overflow; have the model in float32, or promote in mode 'float'",
            )
        return fine

    @functools.lru_cache(4096)  # noqa: B019 - models repeat few grids
    def keeps_codes(self, through: QuantizationGrid) -> bool:
        """Return whether ``DQ(self) -> Q(through)`` gives back every code, in its type."""
        if self.dtype != through.dtype or self.float_dtype != through.float_dtype:
            return False
        codes = self.codes()
        values = self.dequantize(codes)
        found = through._quantize_both(values)
        return _all_finite(values) and all(np.array_equal(each, codes) for each in found)

    @functools.lru_cache(4096)  # noqa: B019
    def keeps_values(self, through: QuantizationGrid, after: QuantizationGrid) -> bool:
        """Return whether ``DQ(self) -> Q(through) -> DQ(after)`` keeps each value's bits."""
        if len({self.float_dtype, through.float_dtype, after.float_dtype}) > 1:
            return False
        if through.dtype != after.dtype:  # not a valid graph
            return False
        values = self.dequantize(self.codes())
        found = map(after.dequantize, through._quantize_both(values))
        bits = values.tobytes()
        return _all_finite(values) and all(each.tobytes() == bits for each in found)

    def __str__(self) -> str:
        return f"{self.dtype.name.lower()} {float(self.scale):.6g} @ {self.zero_point}"


def _all_finite(values: npt.NDArray[np.generic]) -> bool:
    """False where float16 overflows; what becomes of infinities depends on the processor."""
    return bool(np.isfinite(values.astype(np.float32)).all())
