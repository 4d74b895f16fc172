# SPDX-License-Identifier: MIT
"""ModelOpt's numeric primitives, by its names, with its values bit for bit.

Compared with nvidia-modelopt 0.47.0 on float16, float32 and float64 arrays; arithmetic is done
in the type of the arrays, as there. With amax the greatest magnitude of a block, b bits,

    symmetric     s = max(alpha * amax / (2**(b - 1) - 1), 1e-5)
                  codes = clip(rint(w / s), -2**(b - 1), 2**(b - 1) - 1)
    zero points   s = max(hi - lo, 1e-5) / (2**b - 1)    z = clip(-rint(lo / s), 0, 2**b - 1)
                  codes = clip(rint(w / s) + z, 0, 2**b - 1)
    awq           s = clip(x^a / w^(1 - a), 1e-4, 1e4) / sqrt(max * min)

``docs/moving-from-modelopt.md`` lists the values of ModelOpt's that are mistakes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ortplugins.errors import QuantizationError
from ortplugins.quantization.methods.nearest import (
    BlockFormat,
    dequantize_blocks,
    in_blocks,
    round_to_grid,
)

Array = npt.NDArray[Any]

# Scales, or ranges where there are zero points, are raised to this: AutoAWQ's bound.
_LEAST = 1e-5


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
        w: Float ``[K, N]``. Further axes may follow where ``quantize_axis`` is 0.
        block_size: Neighbours that share a scale; -1 for all of them. The last block is filled
            up with zeros.
        quantize_axis: 0, 1 or -1.
        alpha: What the range of symmetric blocks shrinks by: a number, or one for each block
            in the order ``[N, blocks]``, flat or not, such as ``AWQClipHelper.best_alpha``.
        use_zero_point: Whether to make zero points; ``alpha`` is ignored then.
        num_bits: 2, 4 or 8.

    Returns:
        Scales and zero points (or None) in ``w``'s type and shape, but for the axis's blocks.

    Raises:
        QuantizationError: If an argument is out of range.
    """
    matrix = _along_rows(w, quantize_axis)
    form = BlockFormat(num_bits, block_size, not use_zero_point)
    blocks = in_blocks(matrix, form.size_along(len(matrix)))
    if use_zero_point:
        low, high = blocks.min(axis=1).clip(max=0), blocks.max(axis=1).clip(min=0)
        scales = (high - low).clip(min=_LEAST) / form.highest_code
        zeros = (-np.rint(low / scales)).clip(0, form.highest_code)
        return _along_axis(scales, w, quantize_axis), _along_axis(zeros, w, quantize_axis)
    ratios = alpha
    if isinstance(alpha, np.ndarray) and alpha.ndim:
        ratios = alpha.reshape(matrix.shape[1], len(blocks)).T
    scales = (np.abs(blocks).max(axis=1) * ratios / form.highest_code).clip(min=_LEAST)
    return _along_axis(scales, w, quantize_axis), None


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
    matrix = _along_rows(w, quantize_axis)
    scales, zeros, form = _grid(matrix, s, block_size, quantize_axis, zp, num_bits)
    codes = _along_axis(round_to_grid(matrix, scales, zeros, form), w, quantize_axis)
    return codes if num_bits == 8 else codes.view(np.int8)


def dq_tensor(
    w: Array, s: Array, block_size: int, quantize_axis: int = 0, zp: Array | None = None
) -> Array:
    """Return ``(w - zp) * s`` for codes ``w``, in the type that numpy gives the product."""
    dtype = np.result_type(w, s)
    codes = _along_rows(w, quantize_axis)
    scales, zeros, form = _grid(codes, s.astype(dtype), block_size, quantize_axis, zp, 8)
    product = dequantize_blocks(codes, scales, zeros, form)
    # A code times a float16 scale is exact in float32, so this rounds once.
    return _along_axis(product, w, quantize_axis).astype(dtype, copy=False)


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


def get_act_scale(x: Array) -> Array:
    """Return the mean of abs(x) over tokens, ``[T, K]`` to ``[K]``."""
    mean: Array = np.abs(x).mean(0)
    return mean


def get_weight_scale(weight: Array, block_size: int | None = None) -> Array:
    """Return abs(w) over its block's greatest, its mean over columns: ``[K, N]`` to ``[K]``.

    Blocks are of ``block_size`` adjacent rows; None and -1 stand for K.
    """
    tiny = np.finfo(weight.dtype).tiny
    return relative_magnitude(weight, -1 if block_size is None else block_size, tiny)


def relative_magnitude(weight: Array, block_size: int, least: Any) -> Array:
    """Return the mean over columns of abs(w) / (its block's greatest + least), ``[K]``."""
    size = BlockFormat(block_size=block_size).size_along(len(weight))
    blocks = np.abs(in_blocks(weight, size))
    relative = blocks / (blocks.max(axis=1, keepdims=True) + least)
    mean: Array = relative.reshape(-1, weight.shape[1])[: len(weight)].mean(1)
    return mean


def get_scale(x_max: Array, w_max: Array, alpha: float) -> Array:
    """Return AWQ's scales ``[K]``: ``x^alpha / w^(1 - alpha)``, normalised."""
    tiny = np.finfo(w_max.dtype).tiny
    scales = (x_max**alpha / (w_max ** (1 - alpha) + tiny)).clip(1e-4, 1e4)
    normalised: Array = scales / np.sqrt(scales.max() * scales.min())
    return normalised


def _grid(
    matrix: Array, s: Array, block_size: int, axis: int, zp: Array | None, num_bits: int
) -> tuple[Array, Array | None, BlockFormat]:
    """Lay scales and zero points out as ``[blocks, N]``; the form has their block size."""
    scales = _along_rows(s, axis)
    wanted = BlockFormat(num_bits, block_size, zp is None)
    size = wanted.size_along(len(matrix))
    padded = wanted.blocks(len(matrix)) * size
    if not len(scales) or padded % len(scales):
        raise QuantizationError(
            f"scales have shape {list(s.shape)}: {padded // size} blocks of {size} along axis "
            f"{axis} are expected"
        )
    form = BlockFormat(num_bits, padded // len(scales), zp is None)
    return scales, None if zp is None else _along_rows(zp, axis), form


def _along_rows(array: Array, axis: int) -> Array:
    """Return ``[axis, others]``."""
    if axis == 0 and array.ndim:
        return array.reshape(len(array), -1)
    if axis in (1, -1) and array.ndim == 2:
        return array.T
    raise QuantizationError(
        f"axis {axis} of an array of shape {list(array.shape)}: 0, or 1 of a matrix, is "
        "expected"
    )


def _along_axis(matrix: Array, like: Array, axis: int) -> Array:
    """Undo :func:`_along_rows`."""
    return matrix.reshape(len(matrix), *like.shape[1:]) if axis == 0 else matrix.T
