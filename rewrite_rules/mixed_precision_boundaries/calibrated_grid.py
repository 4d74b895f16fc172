# SPDX-License-Identifier: MIT
"""The grid that spans a range of values, by onnxruntime's formula."""

from __future__ import annotations

__all__ = ["grid_of_range"]

import numpy as np
import onnx_ir as ir

from rewrite_rules.graph.refusal import Refusal
from rewrite_rules.mixed_precision_boundaries.quantization_grid import QuantizationGrid


def grid_of_range(
    dtype: ir.DataType,
    rmin: float,
    rmax: float,
    float_dtype: np.dtype[np.generic],
    symmetric: bool = False,
) -> QuantizationGrid:
    """The grid that onnxruntime's quantiser gives a range.

    ``compute_scale_zp`` of onnxruntime/quantization/quant_utils.py: the range is made to hold
    0; ``scale = (rmax - rmin) / (high - low)`` in float64, ``zero_point = low - rmin / scale``
    half to even. A symmetric one spans ``-absmax..absmax``, with the type's middle for the
    zero point; signed types then leave their lowest code unused.

    Args:
        dtype: Of the codes.
        rmin: Smallest value.
        rmax: Greatest value.
        float_dtype: Type of the scale and of the values.
        symmetric: As described.

    Raises:
        Refusal: If the range is not finite, or its scale too small for the float type.
    """
    if not (np.isfinite(rmin) and np.isfinite(rmax) and rmin <= rmax):
        raise Refusal(f"{rmin}..{rmax} is no range of values")
    info = np.iinfo(dtype.numpy())
    low, high = int(info.min), int(info.max)
    rmin, rmax = min(rmin, 0.0), max(rmax, 0.0)
    if symmetric:
        rmax = max(-rmin, rmax)
        rmin = -rmax
        low = -high if low < 0 else low
    scale = (rmax - rmin) / (high - low)
    if scale < float(np.finfo(np.float32 if float_dtype.itemsize == 4 else np.float16).tiny):
        if rmax > rmin:
            # onnxruntime gives it the scale 1, which leaves nothing of the values.
            raise Refusal(f"scale {scale:.3g} of {rmin}..{rmax} is no normal {float_dtype}")
        return QuantizationGrid(dtype, float_dtype.type(1.0), 0)
    middle = np.round((low + high) / 2) if symmetric else np.round(low - rmin / scale)
    return QuantizationGrid(dtype, float_dtype.type(scale), int(middle))
