# SPDX-License-Identifier: MIT
"""Quantises the weights that read one activation: a pure function of references to files.

So the work runs in a thread, in another process or on another machine that sees the same
folder, and gives the same bits everywhere. A weight is worked on in strips of its columns,
which no method mixes, and results go to the files straight away: nothing is ever held whole.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import math
import os
import platform
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import threadpoolctl

from ortplugins.errors import QuantizationError
from ortplugins.model_io.tensor_reference import ScratchWriter, TensorReference
from ortplugins.quantization.methods.awq import search_clip, search_scales
from ortplugins.quantization.methods.gptq import Gptq
from ortplugins.quantization.methods.nearest import (
    BlockFormat,
    Codes,
    Floats,
    ZeroPoints,
    dequantize_blocks,
    quantize_blocks,
    search_blocks,
)
from ortplugins.quantization.weights.checkpoint import PackedWeight
from ortplugins.quantization.weights.recipe import METHODS, Recipe
from rewrite_rules.weights.bit_packing import pack_rows, unpack_rows

Quantized = tuple[Codes, Floats, ZeroPoints | None]

# Float bytes of a strip of columns: with the copies that a method makes, what a worker holds.
_STRIP_BYTES = 4 << 20
# GPTQ rounds row by row, and a call of numpy costs more than a narrow row; but the strips of a
# weight go to several threads.
_GPTQ_STRIP_BYTES, _GPTQ_COLUMNS = 8 << 20, 512
# Tokens that the error of outputs is measured on.
_ERROR_TOKENS = 128
# Below it, float32 loses digits of sums of squares.
_LEAST_SQUARE = 1e-20


@dataclasses.dataclass(frozen=True)
class StoredCodes:
    """Codes, scales and zero points of one weight ``[K, N]``, in files."""

    K: int
    N: int
    form: BlockFormat
    k_last: bool  # codes are [N, K]; scales and zero points follow
    codes: TensorReference  # packed, uint8
    scales: TensorReference  # float32 or float16, [blocks, N] or [N, blocks]
    zero_points: TensorReference | None  # a byte each, alike; None when symmetric
    # How far the weight is from its float one: the Frobenius norm of the difference over the
    # weight's, scales of channels taken out again; and the same of products with the sampled
    # tokens. NaN where it was not measured.
    weight_error: float = math.nan
    output_error: float = math.nan
    # Square of the error of the products, for each token, summed over the columns: tr(D^T H D)
    # where there are second moments H and another output to choose, else that of the sample.
    added_error: float = math.nan

    @classmethod
    def reserve(
        cls, writer: ScratchWriter, k: int, n: int, form: BlockFormat, k_last: bool
    ) -> StoredCodes:
        """Allocate space for a weight ``[k, n]`` in a file."""
        blocks = form.blocks(k)
        grid = (n, blocks) if k_last else (blocks, n)
        return cls(
            k,
            n,
            form,
            k_last,
            codes=writer.reserve((-(-k * n * form.bits // 8),), np.uint8),
            scales=writer.reserve(grid, np.dtype(form.scale_type)),
            zero_points=None if form.is_symmetric else writer.reserve(grid, np.uint8),
        )

    def dequantized(self) -> Floats:
        """Return the weight that the codes stand for, float32 ``[K, N]``."""
        shape = (self.N, self.K) if self.k_last else (self.K, self.N)
        codes: Codes = unpack_rows(self.codes.map(), self.form.bits)[: self.K * self.N]
        codes = codes.reshape(shape)
        if self.form.is_symmetric:
            spare = np.int8(8 - self.form.bits)
            codes = codes.view(np.int8) << spare >> spare
        scales = self.scales.map()
        zeros = None if self.zero_points is None else self.zero_points.map()
        if self.k_last:
            codes, scales, zeros = codes.T, scales.T, None if zeros is None else zeros.T
        return dequantize_blocks(codes, scales, zeros, self.form)


@dataclasses.dataclass(frozen=True)
class WeightTask:
    """One weight, and where its codes go.

    A second output, of more bits, to be chosen from later, is rounded to nearest.
    """

    name: str
    weight: TensorReference  # float32 or float16, [K, N] or [N, K]
    stored_k_last: bool  # it is [N, K]
    given: PackedWeight | None  # a checkpoint's layer, whose codes are taken
    outputs: tuple[StoredCodes, ...]


def this_process() -> str:
    """Return what tells this process from all others."""
    return f"{platform.node()}:{os.getpid()}"


@dataclasses.dataclass(frozen=True)
class GroupTask:
    """Weights of one K and type that share the scales of their input channels."""

    weights: tuple[WeightTask, ...]
    recipe: Recipe
    method: str
    # The arrays of ActivationStatistics, or of PairedModels.statistics, by name; none where
    # nothing is calibrated, or no token of the samples meets the weights.
    statistics: Mapping[str, TensorReference]
    statistics_key: str | None = None  # in the run folder
    threads: int = 1  # that may share the columns of a weight; it changes no bit
    # The process that hands out tasks, and limits its BLAS itself.
    coordinator: str = dataclasses.field(default_factory=this_process)

    @property
    def steps(self) -> tuple[str, ...]:
        """What the method does; nothing but rounding to nearest without a token."""
        return METHODS[self.method] if self.statistics else ()

    def map(self, name: str) -> Floats | None:
        """Return statistics; None where there are none of this name."""
        found = self.statistics.get(name)
        return None if found is None else found.map()


@dataclasses.dataclass(frozen=True, eq=False)
class GroupResult:
    """What became of a group; the codes are in the files."""

    outputs: tuple[tuple[StoredCodes, ...], ...]  # of each weight, with their errors
    reached: bool  # whether a token of the samples meets the weights
    # float32 [K], what the weights' rows were multiplied by and the activation must be divided
    # by; None for 1, and NaN for the exponent then.
    channel_scales: npt.NDArray[np.float32] | None
    alpha: float


def quantize_group(task: GroupTask) -> GroupResult:
    """Quantise the weights of a group and write their codes, scales and zero points."""
    if task.coordinator != this_process():
        _limit_blas_for_good()
    work = _GroupWork(task)
    outputs = tuple(map(work.quantize, task.weights))
    return GroupResult(outputs, bool(task.statistics), work.channel_scales, work.alpha)


def working_bytes(task: GroupTask, threads: int) -> int:
    """Return about how many bytes :func:`quantize_group` allocates at its peak."""
    steps, squares = task.steps, 0
    if "gptq" in steps:
        squares += 8  # the factor of H
    if steps:
        # H itself, where it is not mapped as it is.
        squares += 4 * ("scales" in steps or "gram" not in task.statistics)
    k = task.weights[0].outputs[0].K
    strip = _GPTQ_STRIP_BYTES if "gptq" in steps else _STRIP_BYTES
    block = task.weights[0].outputs[0].form.size_along(k) if "gptq" in steps else 0
    return squares * k * k + (6 * strip + 8 * block * block) * threads


def one_blas_thread() -> threadpoolctl.threadpool_limits:
    """Return a context in which BLAS uses one thread, for whoever runs tasks in threads.

    What a sum of floats gives depends on how threads share it out, and threads over weights
    are faster than threads within them. The number of threads is the process's and only one
    Python thread at a time can set it: not those that run tasks.
    """
    return threadpoolctl.threadpool_limits(1, user_api="blas")


@functools.cache
def _limit_blas_for_good() -> None:
    """Have BLAS use one thread, in a worker process of somebody's executor."""
    one_blas_thread()


class _GroupWork:
    """A group at work: its statistics, behind what its input channels are scaled by."""

    def __init__(self, task: GroupTask) -> None:
        self._task = task
        tokens, gram, steps = task.map("tokens"), task.map("gram"), task.steps
        if gram is None and tokens is not None and ("gptq" in steps or "clip" in steps):
            # There were so few that all of them are here.
            gram = tokens.T @ tokens / np.float32(len(tokens))
        unit = task.map("unit")
        self._unit = 1.0 if unit is None else float(unit.item())
        self.channel_scales, self.alpha = None, float("nan")
        if "scales" in steps:
            self.channel_scales, self.alpha = self._search_scales(tokens, gram)
        if (scales := self.channel_scales) is not None:
            tokens = None if tokens is None else tokens / scales
            if gram is not None:
                gram = gram / scales
                gram /= scales[:, None]
        self._tokens, self._gram = tokens, gram
        self._sample = tokens
        if tokens is not None and len(tokens) > _ERROR_TOKENS:
            # A weight with several inputs has the tokens of one after those of the other.
            self._sample = tokens[np.linspace(0, len(tokens) - 1, _ERROR_TOKENS).astype(int)]
        self._float_tokens, self._drift = task.map("float_tokens"), task.map("drift")
        self._feedback = None
        if gram is not None and "gptq" in steps:
            self._feedback = Gptq(gram, task.recipe.gptq)

    def _search_scales(
        self, tokens: Floats | None, gram: Floats | None
    ) -> tuple[Floats | None, float]:
        weights = self._task.weights
        mean_abs = self._task.map("mean_abs")
        assert mean_abs is not None
        choice = search_scales(
            [_checked(_matrix(item), item.name) for item in weights],
            mean_abs,
            tokens,
            gram,
            [item.outputs[0].form for item in weights],
            alphas=self._task.recipe.alphas,
        )
        if (choice.scales == 1).all():
            return None, float("nan")
        # What the activation is multiplied by is stored in its type, the weights': the weight
        # gets exactly the inverse of that.
        with np.errstate(over="ignore"):
            inverse = (1 / choice.scales).astype(weights[0].weight.dtype).astype(np.float32)
        inverse[~(np.isfinite(inverse) & (inverse > 0))] = 1
        return np.float32(1) / inverse, float("nan") if choice.alpha is None else choice.alpha

    def quantize(self, task: WeightTask) -> tuple[StoredCodes, ...]:
        """Quantise one weight strip by strip of the columns; return its outputs."""
        if self._feedback is not None:
            self._feedback.factor(task.outputs[0].form)
        work = _WeightWork(task)
        by_rows = "gptq" in self._task.steps
        with concurrent.futures.ThreadPoolExecutor(self._task.threads) as pool:
            strips = _strips(work.matrix, by_rows)
            sums = np.sum(list(pool.map(functools.partial(self._strip, work), strips)), axis=0)
        return tuple(
            sink.close(each, measured=self._sample is not None)
            for sink, each in zip(work.sinks, sums, strict=True)
        )

    def _strip(self, work: _WeightWork, columns: slice) -> npt.NDArray[np.float64]:
        """Quantise columns for each output; return the sums of :meth:`_measure` for each."""
        name = work.task.name
        strip = _checked(work.matrix[:, columns], name)
        scales = self.channel_scales
        scaled = strip if scales is None else strip * scales[:, None]
        rows = []
        for number, sink in enumerate(work.sinks):
            form = sink.stored.form
            try:
                if work.given:
                    quantized = _columns(work.given, columns)
                elif number:
                    quantized = search_blocks(scaled, form)
                else:
                    quantized = self._codes(strip, scaled, form)
            except QuantizationError as error:
                raise QuantizationError(
                    f"weight {name!r} cannot be quantised: {error}"
                ) from error
            sink.write(columns, *quantized)
            difference = dequantize_blocks(*quantized, form)
            difference -= scaled
            # A choice between outputs rests on the error, so on all tokens.
            rows.append(self._measure(strip, scaled, difference, len(work.sinks) > 1))
        return np.array(rows)

    def _measure(
        self, strip: Floats, scaled: Floats, difference: Floats, of_all_tokens: bool
    ) -> list[float]:
        """Return squares: of errors and the weight, of errors and the product for each token.

        The last of five is the product's error again, or tr(D^T H D) of all tokens.
        """
        error = wanted_square = added = 0.0
        if self._sample is not None:
            product = wanted = self._sample @ scaled
            if self._float_tokens is not None:
                wanted = self._float_tokens @ strip
            count = len(self._sample)
            error = _square(self._sample @ difference + (product - wanted)) / count
            wanted_square, added = _square(wanted) / count, error
            if of_all_tokens and self._gram is not None:
                added = float(np.vdot(difference, self._gram @ difference))
        if self.channel_scales is not None:
            difference /= self.channel_scales[:, None]
        squares = [_square(difference), _square(strip), error, wanted_square]
        return [*squares, added * self._unit**2]

    def _codes(self, strip: Floats, scaled: Floats, form: BlockFormat) -> Quantized:
        """Quantise columns, as they are and scaled, by the group's method."""
        if self._feedback is not None:
            residual = None if self._drift is None else self._drift @ strip
            if residual is not None and self.channel_scales is not None:
                residual /= self.channel_scales[:, None]
            return self._feedback.quantize(scaled, form, residual)
        if "clip" in self._task.steps:
            assert self._gram is not None
            ratios = self._task.recipe.clip_ratios
            clipped = search_clip(scaled, self._gram, form, ratios=ratios)
            return quantize_blocks(scaled, form, clipped)
        if not self._task.steps:
            return search_blocks(scaled, form)
        if form.bits == 2:  # the fit makes weights smaller, and all outputs with them
            return quantize_blocks(scaled, form)
        if self._gram is not None:
            return search_blocks(scaled, form, np.diagonal(self._gram))
        assert self._tokens is not None
        return search_blocks(scaled, form, np.square(self._tokens).mean(axis=0))


class _WeightWork:
    """A weight at work, and where its outputs go."""

    def __init__(self, task: WeightTask) -> None:
        self.task, self.matrix = task, _matrix(task)
        self.sinks = [_Sink(output) for output in task.outputs]
        self.given = task.given and task.given.load(task.outputs[0].form.is_symmetric)


def _columns(given: Quantized, columns: slice) -> Quantized:
    codes, scales, zeros = given
    return codes[:, columns], scales[:, columns], None if zeros is None else zeros[:, columns]


def _matrix(task: WeightTask) -> npt.NDArray[Any]:
    """The weight as ``[K, N]``, mapped."""
    mapped = task.weight.map()
    return mapped.T if task.stored_k_last else mapped


def _checked(matrix: npt.NDArray[Any], name: str) -> Floats:
    """Copy to float32."""
    copy = np.ascontiguousarray(matrix, np.float32)
    # A sum is not finite if one of its terms isn't; it may also overflow, so look again.
    with np.errstate(over="ignore", invalid="ignore"):
        suspicious = not np.isfinite(copy.sum())
    if suspicious and not np.isfinite(copy).all():
        raise QuantizationError(
            f"weight {name!r} cannot be quantised: it holds NaN or infinite values"
        )
    return copy


def _strips(matrix: npt.NDArray[Any], by_rows: bool) -> Iterator[slice]:
    k, n = matrix.shape
    size, columns = (_GPTQ_STRIP_BYTES, _GPTQ_COLUMNS) if by_rows else (_STRIP_BYTES, n + 7)
    # Whole bytes of packed codes in both layouts, whatever the bits: 8 columns at least.
    width = max(8, min(size // (4 * k), columns) // 8 * 8)
    for start in range(0, n, width):
        yield slice(start, min(start + width, n))


def _square(array: npt.NDArray[Any]) -> float:
    """Return the sum of squares, also where float32 has no such number."""
    flat = array.reshape(-1)
    with np.errstate(over="ignore", under="ignore"):
        total = float(np.dot(flat, flat))
    if _LEAST_SQUARE < total < math.inf:
        return total
    return float(np.dot(flat, flat.astype(np.float64)))


class _Sink:
    """Packs codes into their place on disk as strips of columns come in, in any order.

    ONNX packs codes densely over the flattened tensor, so a strip's place is known only where
    rows start on whole bytes; codes of other shapes are kept, a byte each, to the end.
    """

    def __init__(self, stored: StoredCodes) -> None:
        self.stored = stored
        aligned = stored.k_last or stored.N * stored.form.bits % 8 == 0
        self._kept = None if aligned else np.empty((stored.K, stored.N), np.uint8)
        self._codes = stored.codes.map("r+")
        self._scales = stored.scales.map("r+")
        zeros = stored.zero_points
        self._zero_points = None if zeros is None else zeros.map("r+")

    def write(
        self, columns: slice, codes: Codes, scales: Floats, zero_points: ZeroPoints | None
    ) -> None:
        """Store the codes ``[K, columns]``, scales and zero points ``[blocks, columns]``."""
        k, bits = self.stored.K, self.stored.form.bits
        unsigned = codes.view(np.uint8) & np.uint8((1 << bits) - 1)
        if self._kept is not None:
            self._kept[:, columns] = unsigned
        elif self.stored.k_last:
            # Strips start at a multiple of 8 rows, so on a whole byte.
            packed = pack_rows(np.ascontiguousarray(unsigned.T).reshape(-1), bits)
            start = columns.start * k * bits // 8
            self._codes[start : start + packed.size] = packed
        else:
            first, last = columns.start * bits // 8, columns.stop * bits // 8
            self._codes.reshape(k, -1)[:, first:last] = pack_rows(unsigned, bits)
        for target, numbers in ((self._scales, scales), (self._zero_points, zero_points)):
            if target is not None and numbers is not None:
                (target.T if self.stored.k_last else target)[:, columns] = numbers

    def close(self, sums: npt.NDArray[np.float64], *, measured: bool) -> StoredCodes:
        """Store what had to be kept; return it with the errors of these sums of squares."""
        if self._kept is not None:
            self._codes[:] = pack_rows(self._kept.reshape(-1), self.stored.form.bits)
        weight, output = np.sqrt(sums[:4:2] / np.where(sums[1:4:2] > 0, sums[1:4:2], 1))
        output, added = (output, sums[4]) if measured else (np.nan, np.nan)
        return dataclasses.replace(
            self.stored,
            weight_error=float(weight),
            output_error=float(output),
            added_error=float(added),
        )
