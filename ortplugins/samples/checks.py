# SPDX-License-Identifier: MIT
"""A sample against the inputs of the model that it is for.

Arrays are taken as they are or refused: a cast that nobody asked for hides that a reader was
written for another model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ortplugins.errors import CalibrationError
from rewrite_rules.closest_name import did_you_mean


def checked_sample(
    sample: Any, inputs: Mapping[str, ir.Value], optional: frozenset[str], what: str
) -> dict[str, npt.NDArray[Any]]:
    """Return a sample whose arrays have the types and shapes of the inputs."""
    if not isinstance(sample, Mapping):
        raise CalibrationError(
            f"{what} is a {type(sample).__name__}: a dict, input name -> array, is expected"
        )
    for name in sample:
        if name not in inputs:
            raise CalibrationError(
                f"{what} has {name!r}, which is not an input of the model"
                f"{_closest(str(name), inputs)}"
            )
    missing = [name for name in inputs if name not in sample and name not in optional]
    if missing:
        raise CalibrationError(f"{what} lacks the inputs {', '.join(map(repr, missing))}")
    return {
        name: _checked_array(sample[name], value, f"{what}: input {name!r}")
        for name, value in inputs.items()
        if name in sample
    }


def _closest(name: str, inputs: Mapping[str, ir.Value]) -> str:
    if hint := did_you_mean(name, inputs):
        return hint
    return f"; it has {', '.join(map(repr, list(inputs)[:8]))}" if inputs else ""


def _checked_array(item: Any, value: ir.Value, what: str) -> npt.NDArray[Any]:
    array = _as_array(item, value.dtype, what)
    _check_dtype(array, value.dtype, what)
    _check_shape(array, value.shape, what)
    floating = value.dtype is not None and value.dtype.is_floating_point()
    if floating and not np.isfinite(array).all():
        raise CalibrationError(f"{what} holds NaN or infinite values")
    return array


def _as_array(item: Any, dtype: ir.DataType | None, what: str) -> npt.NDArray[Any]:
    try:
        # Tensors of other packages say that they are arrays; objects of any class do not.
        if not hasattr(item, "__array__"):
            raise TypeError
        array = np.asarray(item)
    except Exception:  # tensors on another device
        raise CalibrationError(
            f"{what} is a {type(item).__name__} that is not an array: give a numpy array"
        ) from None
    if dtype is ir.DataType.STRING and array.dtype.kind == "O":
        return array.astype(np.str_)
    return array


def _check_dtype(array: npt.NDArray[Any], dtype: ir.DataType | None, what: str) -> None:
    if dtype is None or (dtype is ir.DataType.STRING and array.dtype.kind == "U"):
        return
    if dtype is ir.DataType.STRING or array.dtype != dtype.numpy():
        expected = "str" if dtype is ir.DataType.STRING else str(dtype.numpy())
        raise CalibrationError(
            f"{what} is {array.dtype}, but the model takes {expected}: convert it, as with "
            f"array.astype({expected!r})"
        )


def _check_shape(array: npt.NDArray[Any], shape: ir.Shape | None, what: str) -> None:
    if shape is None:
        return
    expected = "[" + ", ".join(str(dim) for dim in shape) + "]"
    if array.ndim != len(shape):
        hint = "; is the batch axis missing?" if array.ndim == len(shape) - 1 else ""
        raise CalibrationError(
            f"{what} has shape {list(array.shape)}, but the model takes {expected}{hint}"
        )
    for size, dim in zip(array.shape, shape, strict=True):
        # PaddlePaddle writes -1 for an open dimension.
        if isinstance(dim, int) and dim >= 0 and size != dim:
            raise CalibrationError(
                f"{what} has shape {list(array.shape)}, but the model takes {expected}"
            )
