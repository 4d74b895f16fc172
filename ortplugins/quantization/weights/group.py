# SPDX-License-Identifier: MIT
"""Quantises the weights that read one activation: a pure function of references to files.

So the work runs in a thread, in another process or on another machine that sees the same
folder, and gives the same bits everywhere. A weight is worked on in strips of its columns,
which no method mixes, and results go to the files straight away: nothing is ever held whole.
"""

from __future__ import annotations

__all__ = [
    "METHODS",
    "GroupResult",
    "GroupTask",
    "WeightResult",
    "WeightTask",
    "one_blas_thread",
    "quantize_group",
    "this_process",
]

import dataclasses
import functools
import os
import platform
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import threadpoolctl

from ortplugins.errors import QuantizationError
from ortplugins.model_io.tensor_reference import TensorReference
from ortplugins.quantization.methods.awq_clip import search_clip
from ortplugins.quantization.methods.awq_scales import search_scales
from ortplugins.quantization.methods.block_format import BlockFormat
from ortplugins.quantization.methods.gptq import gptq
from ortplugins.quantization.methods.nearest import (
    Codes,
    Floats,
    ZeroPoints,
    dequantize_blocks,
    quantize_blocks,
)
from rewrite_rules.weights.bit_packing import pack_rows

# What each method does: scales per input channel, ratios per block, error feedback.
METHODS = {
    "rtn": (),
    "awq_lite": ("scales",),
    "awq_clip": ("clip",),
    "awq_full": ("scales", "clip"),
    "gptq": ("gptq",),
    "awq_gptq": ("scales", "gptq"),
}
# Float bytes of a strip of columns: with the copies that a method makes, what a worker holds.
_STRIP_BYTES = 4 << 20
# GPTQ factors its Hessian again for every strip.
_GPTQ_STRIP_BYTES = 64 << 20
# Tokens that the error of outputs is measured on.
_ERROR_TOKENS = 128


@dataclasses.dataclass(frozen=True)
class WeightTask:
    """One weight, and the room for its codes.

    Attributes:
        name: Of the weight, for messages.
        weight: float32 or float16, ``[K, N]`` or ``[N, K]``.
        stored_k_last: Whether it is ``[N, K]``.
        form: How it is quantised.
        codes_k_last: Whether codes are stored as ``[N, K]``; scales and zero points follow.
        codes: Room for the packed codes, uint8.
        scales: Room for the scales.
        zero_points: Room for the zero points, a byte each; None when symmetric.
        alternative: The same weight with more bits, to be chosen from later.
    """

    name: str
    weight: TensorReference
    stored_k_last: bool
    form: BlockFormat
    codes_k_last: bool
    codes: TensorReference
    scales: TensorReference
    zero_points: TensorReference | None
    alternative: WeightTask | None = None


@dataclasses.dataclass(frozen=True)
class GroupTask:
    """Weights that share the scales of their input channels.

    Attributes:
        weights: The weights, all of the same K.
        method: One of :data:`METHODS`.
        mean_abs: float32 ``[K]``; None without statistics, as the next two.
        tokens: float32 ``[T, K]``.
        gram: float32 ``[K, K]``.
        coordinator: The process that hands out tasks, as :func:`this_process` calls it; it
            limits its BLAS itself.
        round_scales: Type that ``1 / s`` of the input channels is rounded to.
        alphas: Exponents to try for those; None for the search's own.
        clip_ratios: Ratios to try for what blocks are clipped to; None likewise.
    """

    weights: tuple[WeightTask, ...]
    method: str
    coordinator: str
    mean_abs: TensorReference | None = None
    tokens: TensorReference | None = None
    gram: TensorReference | None = None
    round_scales: str = "float32"
    alphas: tuple[float, ...] | None = None
    clip_ratios: tuple[float, ...] | None = None


@dataclasses.dataclass(frozen=True)
class WeightResult:
    """How far a quantised weight is from its float one.

    Attributes:
        weight_error: Frobenius norm of the difference over the weight's, the scales of input
            channels taken out again.
        output_error: The same of the products with the sampled tokens; NaN without any.
        added_error: Square of the error of the products, for each token, summed over the
            columns; NaN likewise.
        alternative: The same for the alternative.
    """

    weight_error: float
    output_error: float
    added_error: float = float("nan")
    alternative: WeightResult | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class GroupResult:
    """What became of a group; the codes are in the files.

    Attributes:
        weights: In the task's order.
        channel_scales: float32 ``[K]``, what the weights' rows were multiplied by and the
            activation must be divided by; None for 1.
        alpha: Exponent that was chosen for them; NaN for none.
    """

    weights: tuple[WeightResult, ...]
    channel_scales: npt.NDArray[np.float32] | None
    alpha: float


def quantize_group(task: GroupTask) -> GroupResult:
    """Quantise the weights of a group and write their codes, scales and zero points.

    Raises:
        QuantizationError: If a weight holds NaN or infinite values; with its name.
        OSError: If a file can't be read or written.
    """
    if task.coordinator != this_process():
        _limit_blas_for_good()
    steps = METHODS[task.method]
    tokens = None if task.tokens is None else task.tokens.map()
    gram = None if task.gram is None else task.gram.map()
    if gram is None and tokens is not None and ("gptq" in steps or "clip" in steps):
        # There were so few that all of them are here.
        gram = tokens.T @ tokens / np.float32(len(tokens))
    channel_scales, alpha = None, float("nan")
    if "scales" in steps and task.mean_abs is not None:
        channel_scales, alpha = _search_scales(task, tokens, gram)
    if channel_scales is not None:
        tokens = None if tokens is None else tokens / channel_scales
        if gram is not None:
            gram = gram / channel_scales / channel_scales[:, None]
    results = tuple(
        _quantize(weight, task, channel_scales, tokens, gram) for weight in task.weights
    )
    return GroupResult(results, channel_scales, alpha)


def one_blas_thread() -> threadpoolctl.threadpool_limits:
    """Return a context in which BLAS uses one thread, for whoever runs tasks in threads.

    What a sum of floats gives depends on how threads share it out, and threads over weights
    are faster than threads within them. The number of threads is the process's and only one
    Python thread at a time can set it: not those that run tasks.
    """
    return threadpoolctl.threadpool_limits(1, user_api="blas")


def this_process() -> str:
    """Return what tells this process from all others."""
    return f"{platform.node()}:{os.getpid()}"


@functools.cache
def _limit_blas_for_good() -> None:
    """Have BLAS use one thread, in a worker process of somebody's executor."""
    one_blas_thread()


def _search_scales(
    task: GroupTask, tokens: Floats | None, gram: Floats | None
) -> tuple[Floats | None, float]:
    assert task.mean_abs is not None
    weights = [_checked(_matrix(item), item.name) for item in task.weights]
    options: dict[str, Any] = {} if task.alphas is None else {"alphas": task.alphas}
    choice = search_scales(
        weights, task.mean_abs.map(), tokens, gram, task.weights[0].form, **options
    )
    if (choice.scales == 1).all():
        return None, float("nan")
    with np.errstate(over="ignore"):
        inverse = (1 / choice.scales).astype(task.round_scales).astype(np.float32)
    # What the activation is multiplied by is stored in its type: the weight gets exactly the
    # inverse of that.
    usable = np.isfinite(inverse) & (inverse > 0)
    inverse[~usable] = 1
    one = np.float32(1)
    return one / inverse, float("nan") if choice.alpha is None else choice.alpha


def _quantize(
    task: WeightTask,
    group: GroupTask,
    channel_scales: Floats | None,
    tokens: Floats | None,
    gram: Floats | None,
) -> WeightResult:
    """Quantise one weight, and its alternative, strip by strip of the columns."""
    matrix = _matrix(task)
    k, n = matrix.shape
    steps = METHODS[group.method]
    outputs = [
        _Output(item, group.method, _Sink(item, k, n))
        for item in (task, task.alternative)
        if item
    ]
    # An alternative has so many bits that rounding is as good as any search.
    outputs[1:] = [dataclasses.replace(output, method="rtn") for output in outputs[1:]]
    sample = None if tokens is None else tokens[:_ERROR_TOKENS]
    for columns in _strips(k, n, "gptq" in steps and gram is not None):
        strip = _checked(matrix[:, columns], task.name)
        scaled = strip if channel_scales is None else strip * channel_scales[:, None]
        product = None if sample is None else sample @ scaled
        for output in outputs:
            try:
                quantized = _codes(
                    scaled, output.task.form, output.method, group, tokens, gram
                )
            except QuantizationError as error:
                raise QuantizationError(
                    f"weight {task.name!r} cannot be quantised: {error}"
                ) from error
            output.sink.write(columns, *quantized)
            difference = dequantize_blocks(*quantized, output.task.form)
            difference -= scaled
            if sample is not None and product is not None:
                output.sums[2] += _square(sample @ difference) / len(sample)
                output.sums[3] += _square(product) / len(sample)
            if channel_scales is not None:
                difference /= channel_scales[:, None]
            output.sums[0] += _square(difference)
            output.sums[1] += _square(strip)
    result = None
    for output in reversed(outputs):
        output.sink.close()
        result = output.result(sample is not None, result)
    assert result is not None
    return result


@dataclasses.dataclass(frozen=True, eq=False)
class _Output:
    """Where the codes of a weight go, and how far they turned out to be from it."""

    task: WeightTask
    method: str
    sink: _Sink
    # Squares of: error and weight, error and product for each token.
    sums: npt.NDArray[np.float64] = dataclasses.field(default_factory=lambda: np.zeros(4))

    def result(self, measured: bool, alternative: WeightResult | None) -> WeightResult:
        """Sum up."""
        ratios = np.sqrt(self.sums[::2] / np.where(self.sums[1::2] > 0, self.sums[1::2], 1))
        nan = float("nan")
        return WeightResult(
            float(ratios[0]),
            float(ratios[1]) if measured else nan,
            float(self.sums[2]) if measured else nan,
            alternative,
        )


def _codes(
    weight: Floats,
    form: BlockFormat,
    method: str,
    group: GroupTask,
    tokens: Floats | None,
    gram: Floats | None,
) -> tuple[Codes, Floats, ZeroPoints | None]:
    steps = METHODS[method]
    if "gptq" in steps and gram is not None:
        return gptq(weight, gram, form)
    ratios = None
    if "clip" in steps and (tokens is not None or gram is not None):
        options: dict[str, Any] = {}
        if group.clip_ratios is not None:
            options["ratios"] = group.clip_ratios
        ratios = search_clip(weight, tokens, gram, form, **options)
    return quantize_blocks(weight, form, ratios)


def _matrix(task: WeightTask) -> npt.NDArray[Any]:
    """The weight as ``[K, N]``, mapped."""
    mapped = task.weight.map()
    return mapped.T if task.stored_k_last else mapped


def _checked(matrix: npt.NDArray[Any], name: str) -> Floats:
    """Copy to float32.

    Raises:
        QuantizationError: If it holds NaN or infinite values.
    """
    copy = np.ascontiguousarray(matrix, np.float32)
    # A sum is not finite if one of its terms isn't; it may also overflow, so look again.
    with np.errstate(over="ignore", invalid="ignore"):
        suspicious = not np.isfinite(copy.sum())
    if suspicious and not np.isfinite(copy).all():
        raise QuantizationError(
            f"weight {name!r} cannot be quantised: it holds NaN or infinite values"
        )
    return copy


def _strips(k: int, n: int, whole_hessian: bool) -> Iterator[slice]:
    size = _GPTQ_STRIP_BYTES if whole_hessian else _STRIP_BYTES
    # Whole bytes of packed codes in both layouts, whatever the bits: 8 columns at least.
    width = max(8, size // (4 * k) // 8 * 8)
    for start in range(0, n, width):
        yield slice(start, min(start + width, n))


def _square(array: npt.NDArray[Any]) -> float:
    flat = array.reshape(-1)
    return float(np.dot(flat, flat))


class _Sink:
    """Packs codes into their place on disk as strips of columns come in.

    ONNX packs codes densely over the flattened tensor, so a strip's place is known only where
    rows start on whole bytes; codes of other shapes are kept, a byte each, to the end.
    """

    def __init__(self, task: WeightTask, k: int, n: int) -> None:
        self._task = task
        self._k, self._n = k, n
        self._bits = task.form.bits
        aligned = task.codes_k_last or n * self._bits % 8 == 0
        self._kept = None if aligned else np.empty((k, n), np.uint8)
        self._codes = task.codes.map("r+")
        self._scales = task.scales.map("r+")
        self._zero_points = None if task.zero_points is None else task.zero_points.map("r+")

    def write(
        self, columns: slice, codes: Codes, scales: Floats, zero_points: ZeroPoints | None
    ) -> None:
        """Store the codes ``[K, columns]``, scales and zero points ``[blocks, columns]``."""
        task, bits = self._task, self._bits
        unsigned = codes.view(np.uint8) & np.uint8((1 << bits) - 1)
        if self._kept is not None:
            self._kept[:, columns] = unsigned
        elif task.codes_k_last:
            # Strips start at a multiple of 8 rows, so on a whole byte.
            packed = pack_rows(np.ascontiguousarray(unsigned.T).reshape(-1), bits)
            start = columns.start * self._k * bits // 8
            self._codes[start : start + packed.size] = packed
        else:
            first, last = columns.start * bits // 8, columns.stop * bits // 8
            rows = self._codes.reshape(self._k, -1)
            rows[:, first:last] = pack_rows(unsigned, bits)
        for target, numbers in ((self._scales, scales), (self._zero_points, zero_points)):
            if target is not None and numbers is not None:
                if task.codes_k_last:
                    target[columns] = numbers.T
                else:
                    target[:, columns] = numbers

    def close(self) -> None:
        """Store what had to be kept."""
        if self._kept is not None:
            self._codes[:] = pack_rows(self._kept.reshape(-1), self._bits)
