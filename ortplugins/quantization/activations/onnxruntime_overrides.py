# SPDX-License-Identifier: MIT
"""Tensor overrides as onnxruntime's own quantiser takes them."""

from __future__ import annotations

__all__ = ["to_onnxruntime"]

from typing import Any

import numpy as np
import numpy.typing as npt
from onnxruntime.quantization import QuantType

from rewrite_rules.mixed_precision_boundaries.tensor_overrides import (
    OverrideError,
    Overrides,
    TensorOverride,
)
from session_options.override_json import quant_type_name


def to_onnxruntime(
    overrides: Overrides, float_dtype: npt.DTypeLike = np.float32
) -> dict[str, list[dict[str, Any]]]:
    """Return what ``extra_options["TensorQuantOverrides"]`` of ``quantize_static`` takes.

    Types become members of its QuantType, scales, zero points and ranges arrays of the type
    that it asserts, consumers a set.

    Args:
        overrides: From :func:`.read_overrides`, for instance.
        float_dtype: Of the model's activations, float32 or float16: the scales' type.

    Raises:
        OverrideError: If a zero point has no ``quant_type`` beside it, or lies outside of it.
    """
    return {
        name: [
            _fields(entry, float_dtype, f"override of tensor {name!r}") for entry in entries
        ]
        for name, entries in overrides.items()
    }


def _fields(override: TensorOverride, real: npt.DTypeLike, what: str) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    quant_type = override.quant_type
    if quant_type is not None:
        fields["quant_type"] = QuantType[quant_type_name(quant_type)]
    if (zero_point := override.zero_point) is not None:
        if quant_type is None:
            raise OverrideError(f"{what}: 'zero_point' needs 'quant_type' beside it")
        try:
            # numpy has no type of 4 bits; ml_dtypes' wrap around silently.
            wide = np.int8 if quant_type.name == "INT4" else np.uint8
            code = np.array(
                zero_point, wide if quant_type.bitwidth < 8 else quant_type.numpy()
            )
        except OverflowError as error:
            raise OverrideError(f"{what}: 'zero_point': {error}") from None
        fields["zero_point"] = code
    for field in ("scale", "rmin", "rmax"):
        if (number := getattr(override, field)) is not None:
            fields[field] = np.array(number, real)
    for field in ("symmetric", "reduce_range", "axis"):
        if (value := getattr(override, field)) is not None:
            fields[field] = value
    if override.convert is not None:
        fields["convert"] = _fields(override.convert, real, f"{what}, 'convert'")
    if override.recv_nodes is not None:
        fields["recv_nodes"] = set(override.recv_nodes)
    return fields
