# SPDX-License-Identifier: MIT
"""``modelopt.onnx.quantization.int4`` as a drop-in: its names, its arguments, our quantizer.

    import modelopt.onnx.quantization.int4 as int4
    import ortplugins.quantization.int4 as int4

A script changes that one line. Names, defaults and values are those of nvidia-modelopt 0.47.0;
``docs/moving-from-modelopt.md`` says what differs, and what was broken. Below :func:`quantize`
lies :func:`.quantize`, which has more to offer: formats, GPTQ, bounded memory, a report.

The primitives compute in the type of their arrays, float16, float32 or float64. With amax the
greatest magnitude of a block, b bits,

    symmetric     s = max(alpha * amax / (2**(b - 1) - 1), 1e-5)
                  codes = clip(rint(w / s), -2**(b - 1), 2**(b - 1) - 1)
    zero points   s = max(hi - lo, 1e-5) / (2**b - 1)    z = clip(-rint(lo / s), 0, 2**b - 1)
                  codes = clip(rint(w / s) + z, 0, 2**b - 1)
"""

from __future__ import annotations

__all__ = [
    "dq_tensor",
    "find_scales",
    "quant_tensor",
    "quantize",
    "quantize_rtn",
    "rtn",
]

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from ortplugins.errors import QuantizationError
from ortplugins.model_io.loading import load_model
from ortplugins.quantization.methods.nearest import BlockFormat
from ortplugins.quantization.modelopt_arguments import (
    name_as_modelopt,
    providers_of,
    rules_of,
    settings_of,
)
from ortplugins.quantization.weights.quantize import quantize as quantize_weights
from ortplugins.quantization.weights.uses import WeightUse, find_uses

Array = npt.NDArray[Any]

_LOG = logging.getLogger(__name__)
# ModelOpt's methods by ours. Error feedback does more than clips, in less time; rtn_trt,
# rtn_trt_dq and awq_clip_trt write operators that only TensorRT has.
_METHODS = {
    "rtn": "rtn",
    "rtn_dq": "rtn",
    "awq_lite": "awq_lite",
    "awq_clip": "awq_clip",
    "awq_full": "awq_gptq",
}
# Scales, or ranges where there are zero points, are raised to this: AutoAWQ's bound.
_LEAST = 1e-5


def quantize(
    onnx_path: str | os.PathLike[str] | onnx.ModelProto,
    calibration_method: str = "awq_lite",
    calibration_data_reader: Any = None,
    calibration_eps: Sequence[str] = ("cpu", "cuda:0", "trt"),
    use_external_data_format: bool = True,
    use_zero_point: bool = False,
    block_size: int | None = None,
    nodes_to_exclude: Sequence[str] | None = (r"/lm_head",),
    log_level: str = "INFO",
    input_shapes_profile: Sequence[Mapping[str, str]] | None = None,
    **kwargs: Any,
) -> onnx.ModelProto:
    """Quantise the weights of MatMul and Gemm to int4, with ModelOpt's arguments.

    ``docs/moving-from-modelopt.md`` says which argument of :func:`.quantize` stands for which
    here, and where results differ. Round to nearest gives ModelOpt's ``rtn_dq``, its names,
    scales and codes; the AWQ methods search as :func:`.quantize` does.

    Args:
        onnx_path: Path of a model, or a model; it is not changed.
        calibration_method: ``"awq_lite"``, ``"awq_clip"``, ``"awq_full"``, ``"rtn_dq"`` or
            ``"rtn"``, which is the same.
        calibration_data_reader: Samples: an iterable of dicts, or an object with
            ``get_next()``. None for random ones, with a warning.
        calibration_eps: Where samples run, in this order: ``"cpu"``, ``"cuda:0"``,
            ``"dml:0"``, ``"trt"``, ``"NvTensorRtRtx"``; absent providers are left out.
        use_external_data_format: Accepted. As ModelOpt's, the result holds all its tensors.
        use_zero_point: Whether codes are unsigned, with zero points.
        block_size: Elements along K that share a scale, 128 by default; -1 for K.
        nodes_to_exclude: Regular expressions for ``re.match`` with names of nodes, or of first
            outputs where nodes have none, that stay in float.
        log_level: ``"INFO"`` or ``"DEBUG"``: the report goes to the logger of this module.
        input_shapes_profile: Options of each provider of ``calibration_eps``, a dict each.
        kwargs: ModelOpt's; others are a TypeError that names the closest one.

    Returns:
        The quantised model, opset 21 or more.

    Raises:
        CalibrationError: If samples do not fit the model, or are none.
        ModelFileError: If the model can't be used, or there is nothing to quantise.
        QuantizationError: If an argument is out of range or asks for what only TensorRT has,
            or a weight holds NaN or infinite values.
        TypeError: If a keyword is not ModelOpt's.
    """
    method = _METHODS.get(calibration_method)
    if method is None:
        raise QuantizationError(
            f"calibration_method is {calibration_method!r}: one of {', '.join(_METHODS)} is "
            "expected; ortplugins.quantization.quantize has GPTQ as well"
        )
    settings = settings_of(kwargs)
    if method == "awq_gptq" and (clips := settings.pop("clip_ratios", None)):
        settings["gptq"] = {"ratios": clips}
    if method != "rtn":
        settings["calibration_data_reader"] = calibration_data_reader
        settings["calibration_providers"] = providers_of(calibration_eps, input_shapes_profile)
    source = load_model(onnx_path).model
    found = (use for _, use in find_uses(source, settings["op_types"]))
    uses = [use for use in found if isinstance(use, WeightUse)]
    result = quantize_weights(
        source,
        method=method,
        block_size=128 if block_size is None else block_size,
        is_symmetric=not use_zero_point,
        grid="amax" if method == "rtn" else "positive",  # TensorRT reads the result
        rules=rules_of(uses, nodes_to_exclude, kwargs),
        **settings,
    )
    if log_level in ("DEBUG", "INFO"):
        _LOG.info("%s", "\n".join([str(result.report), *result.report.notes]))
    model: ir.Model = result.model
    name_as_modelopt(model)
    ir.external_data.load_to_model(model)
    return ir.to_proto(model)


def quantize_rtn(
    onnx_model: onnx.ModelProto,
    block_size: int,
    dq_only: bool = False,
    nodes_to_exclude: Sequence[str] = (),
    **kwargs: Any,
) -> onnx.ModelProto:
    """Round to nearest: :func:`quantize` with ``"rtn_dq"``; ``dq_only`` is accepted."""
    kwargs |= {"block_size": block_size, "nodes_to_exclude": nodes_to_exclude}
    return quantize(onnx_model, "rtn_dq", **kwargs)


def find_scales(
    w: Array,
    block_size: int,
    quantize_axis: int = 0,
    alpha: float | Array = 1.0,
    use_zero_point: bool = False,
    num_bits: int = 4,
) -> tuple[Array, Array | None]:
    """Return scales, and zero points where they are asked for, of blocks along an axis.

    Args:
        w: Float ``[K, N]``, or of more axes.
        block_size: Neighbours that share a scale; -1 for all of them. The last block is filled
            up with zeros.
        quantize_axis: The axis that blocks run along.
        alpha: What the range of symmetric blocks shrinks by: a number, or one for each block
            in the order ``[N, blocks]``, flat or not.
        use_zero_point: Whether to make zero points; ``alpha`` is ignored then.
        num_bits: 2, 4 or 8.

    Returns:
        Scales and zero points (or None) in ``w``'s type and shape, but for the axis's blocks.
    """
    form, axis = BlockFormat(num_bits, block_size, not use_zero_point), quantize_axis % w.ndim
    count, size = form.blocks(w.shape[axis]), form.size_along(w.shape[axis])
    before, after = w.shape[:axis], w.shape[axis + 1 :]
    padding = [
        (0, count * size - k if place == axis else 0) for place, k in enumerate(w.shape)
    ]
    blocks = np.pad(w, padding).reshape(*before, count, size, *after)
    if use_zero_point:
        low, high = blocks.min(axis + 1).clip(max=0), blocks.max(axis + 1).clip(min=0)
        scales = (high - low).clip(min=_LEAST) / form.highest_code
        return scales, (-np.rint(low / scales)).clip(0, form.highest_code)
    if isinstance(alpha, np.ndarray) and alpha.ndim:
        alpha = np.moveaxis(alpha.reshape(*before, *after, count), -1, axis)
    return (np.abs(blocks).max(axis + 1) * alpha / form.highest_code).clip(min=_LEAST), None


def rtn(
    w: Array,
    s: Array,
    block_size: int,
    quantize_axis: int = 0,
    zp: Array | None = None,
    num_bits: int = 4,
) -> npt.NDArray[np.int8 | np.uint8]:
    """Return the codes nearest to a weight on given scales, ties to even, of ``w``'s shape.

    They are int8, but for 8 bits with zero points uint8. ``s`` may have fewer blocks than
    ``block_size`` gives, if these divide the axis evenly; else a QuantizationError.
    """
    form = BlockFormat(num_bits, block_size, zp is None)
    scales, zeros = (_spread(grid, w, block_size, quantize_axis) for grid in (s, zp))
    codes = (np.rint(w / scales) + zeros).clip(form.lowest_code, form.highest_code)
    return codes.astype(np.uint8 if num_bits == 8 and zp is not None else np.int8)


def dq_tensor(
    w: Array, s: Array, block_size: int, quantize_axis: int = 0, zp: Array | None = None
) -> Array:
    """Return ``(w - zp) * s`` for codes ``w``, in the type that numpy gives the product."""
    scales, zeros = (_spread(grid, w, block_size, quantize_axis) for grid in (s, zp))
    product: Array = (w.astype(np.result_type(w, s)) - zeros) * scales
    return product


def _spread(grid: Array | None, w: Array, block_size: int, axis: int) -> Array | int:
    """Give each number of a weight its block's; 0 for None."""
    if grid is None:
        return 0
    form, k = BlockFormat(block_size=block_size), w.shape[axis]
    padded, count = form.blocks(k) * form.size_along(k), grid.shape[axis]
    if not count or padded % count:
        raise QuantizationError(
            f"scales have shape {list(grid.shape)}: {form.blocks(k)} blocks of "
            f"{form.size_along(k)} along axis {axis} are expected"
        )
    return grid.repeat(padded // count, axis).take(range(k), axis)


def quant_tensor(
    w: Array,
    block_size: int,
    quantize_axis: int = 0,
    alpha: float | Array = 1.0,
    use_zero_point: bool = False,
    num_bits: int = 4,
) -> tuple[npt.NDArray[np.int8 | np.uint8], Array, Array | None]:
    """Return codes, scales and zero points: :func:`find_scales`, then :func:`rtn`."""
    grid = find_scales(w, block_size, quantize_axis, alpha, use_zero_point, num_bits)
    return rtn(w, grid[0], block_size, quantize_axis, grid[1], num_bits), *grid
