# SPDX-License-Identifier: MIT
"""Quantises the weights that read one activation: a pure function of references to files.

So the work runs in a thread, in another process or on another machine that sees the same
folder, and gives the same bits everywhere. A weight is worked on in strips of its columns,
which no method mixes, and results go to the files straight away: nothing is ever held whole.

    search channel scales -> divide what is known of the activation by them
        -> strip by strip: choose codes, write them, measure their errors
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import math
import os
import platform
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import threadpoolctl

from ortplugins.errors import QuantizationError
from ortplugins.quantization.methods.awq import search_clip, search_scales
from ortplugins.quantization.methods.gptq import Gptq
from ortplugins.quantization.methods.nearest import (
    Codes,
    Floats,
    ZeroPoints,
    dequantize_blocks,
    quantize_blocks,
    search_blocks,
)
from ortplugins.quantization.statistics.accumulator import ActivationStatistics, pooled
from ortplugins.quantization.weights.recipe import METHODS, Recipe
from ortplugins.quantization.weights.weight import Errors, Group, Weight
from rewrite_rules.weights.bit_packing import pack_rows

# Float bytes of a strip of columns: with the copies that a method makes, what a worker holds.
_STRIP_BYTES = 4 << 20
# GPTQ rounds row by row, and a call of numpy costs more than a narrow row; but the strips of a
# weight go to several threads.
_GPTQ_STRIP_BYTES, _GPTQ_COLUMNS = 8 << 20, 512
# Tokens that the error of outputs is measured on.
_ERROR_TOKENS = 128
# The relative error of a weight of which nothing is left.
_LOST = 0.9
# Below it, float32 loses digits of sums of squares.
_LEAST_SQUARE = 1e-20


def this_process() -> str:
    """Return the name of this process, on any machine."""
    return f"{platform.node()}:{os.getpid()}"


def quantize_group(group: Group, recipe: Recipe, coordinator: str) -> Group:
    """Write codes, scales and zero points of a group, a worker's copy; note the errors in it.

    ``coordinator`` is the process that hands out groups, and limits its BLAS itself.
    """
    if coordinator != this_process():
        _limit_blas_for_good()
    inputs = _Inputs.of(group, recipe)
    for weight in group.weights:
        _quantize(weight, group, inputs, recipe)
    group.reached = group.is_known
    group.channel_scales, group.alpha = inputs.scales, inputs.alpha
    return group


def working_bytes(group: Group, threads: int) -> int:
    """Return about how many bytes :func:`quantize_group` allocates, at most."""
    steps = METHODS[group.method]
    several = len(group.activations) > 1
    squares = 8 * ("gptq" in steps)  # the factor of H
    if steps:
        # H itself, unless it is mapped as it is, and parts of its sum.
        is_mapped = all("gram" in one for one in group.statistics)
        is_mapped = is_mapped and not several and "scales" not in steps
        squares += 4 * (not is_mapped) + 4 * several
    k, form = group.weights[0].K, group.weights[0].form
    strip = _GPTQ_STRIP_BYTES if "gptq" in steps else _STRIP_BYTES
    block = form.size_along(k) if "gptq" in steps else 0
    return squares * k * k + (6 * strip + 8 * block * block) * threads


def one_blas_thread() -> threadpoolctl.threadpool_limits:
    """Return a context in which BLAS uses one thread, for whoever quantises in threads.

    What a sum of floats gives depends on how threads share it out, and threads over weights
    are faster than threads within them. The number of threads is the process's and only one
    Python thread at a time can set it: not those that quantise groups.
    """
    return threadpoolctl.threadpool_limits(1, user_api="blas")


@functools.cache
def _limit_blas_for_good() -> None:
    """Have BLAS use one thread, in a worker process of somebody's executor."""
    one_blas_thread()


@dataclasses.dataclass(frozen=True, eq=False)
class _Inputs:
    """What is known of the inputs of a group's weights, divided by the channel scales."""

    scales: Floats | None  # None for 1
    alpha: float
    known: ActivationStatistics
    sample: Floats  # tokens that errors are measured on
    feedback: Gptq | None

    @classmethod
    def of(cls, group: Group, recipe: Recipe) -> _Inputs:
        """Map the statistics, those of several activations together; search the scales."""
        steps, scales, alpha = group.steps, group.channel_scales, group.alpha
        mapped = [{name: each.map() for name, each in one.items()} for one in group.statistics]
        none = np.zeros((0, group.weights[0].K), np.float32)
        known = ActivationStatistics(0, none, none)
        if mapped:
            known = pooled(list(map(ActivationStatistics.of, mapped)))
        if "gptq" in steps or "clip" in steps:
            known = known.with_gram()
        if "scales" in steps:
            scales, alpha = _search_scales(group, recipe, known)
        if scales is not None:
            known = known.over(scales)
        sample, feedback = known.tokens, None
        if len(sample) > _ERROR_TOKENS:
            # A weight with several inputs has the tokens of one after those of the other.
            sample = sample[np.linspace(0, len(sample) - 1, _ERROR_TOKENS).astype(int)]
        if known.gram is not None and "gptq" in steps:
            feedback = Gptq(known.gram, recipe.gptq)
        return cls(scales, alpha, known, sample, feedback)


def _search_scales(
    group: Group, recipe: Recipe, known: ActivationStatistics
) -> tuple[Floats | None, float]:
    """Return the scales of the input channels, None for 1, and their exponent."""
    choice = search_scales(
        [checked_matrix(_matrix(weight), weight.name) for weight in group.weights],
        known.mean_abs,
        known.tokens,
        known.gram,
        [weight.form for weight in group.weights],
        alphas=recipe.alphas,
    )
    if (choice.scales == 1).all():
        return None, math.nan
    # What the activation is multiplied by is stored in its type, the weights': the weight gets
    # exactly the inverse of that.
    with np.errstate(over="ignore"):
        inverse = (1 / choice.scales).astype(group.weights[0].floats.dtype).astype(np.float32)
    inverse[~(np.isfinite(inverse) & (inverse > 0))] = 1
    return np.float32(1) / inverse, math.nan if choice.alpha is None else choice.alpha


def _quantize(weight: Weight, group: Group, inputs: _Inputs, recipe: Recipe) -> None:
    """Quantise a weight, and note its errors."""
    if inputs.feedback is not None:
        inputs.feedback.factor(weight.form)
    matrix, writer = _matrix(weight), _CodesWriter(weight)

    def strip(columns: slice) -> list[float]:
        floats = checked_matrix(matrix[:, columns], weight.name)
        scaled = floats if inputs.scales is None else floats * inputs.scales[:, None]
        codes, scales, zeros = _codes(floats, scaled, weight, group, inputs, recipe)
        writer.write(columns, codes, scales, zeros)
        difference = dequantize_blocks(codes, scales, zeros, weight.form)
        _check_type_holds(difference, scales, weight)
        difference -= scaled
        # A choice between forms rests on the error, so on all tokens.
        return _squares(floats, scaled, difference, inputs, group.undecided)

    with concurrent.futures.ThreadPoolExecutor(group.threads) as pool:
        sums = np.sum(list(pool.map(strip, _strips(matrix, "gptq" in group.steps))), axis=0)
    writer.close(sums, measured=len(inputs.sample) > 0)


def _codes(
    floats: Floats,
    scaled: Floats,
    weight: Weight,
    group: Group,
    inputs: _Inputs,
    recipe: Recipe,
) -> tuple[Codes, Floats, ZeroPoints | None]:
    """Quantise columns by the steps of a method; ``scaled`` are those times the scales."""
    form, known, steps = weight.form, inputs.known, group.steps
    try:
        if inputs.feedback is not None:
            residual = None if known.drift is None else known.drift @ floats
            if residual is not None and inputs.scales is not None:
                residual /= inputs.scales[:, None]
            found = inputs.feedback.quantize(scaled, form, residual)
        elif known.gram is not None and "clip" in steps:
            clipped = search_clip(scaled, known.gram, form, ratios=recipe.clip_ratios)
            found = quantize_blocks(scaled, form, clipped)
        else:
            found = search_blocks(scaled, form, known.energy() if steps else None)
    except QuantizationError as error:
        raise QuantizationError(
            f"weight {weight.name!r} cannot be quantised: {error}"
        ) from error
    return found


def _squares(
    floats: Floats, scaled: Floats, difference: Floats, inputs: _Inputs, of_all_tokens: bool
) -> list[float]:
    """Return squares: of errors and the weight, of errors and the product for each token.

    The last of five is the product's error again, or tr(D^T H D) of all tokens.
    """
    error = wanted_square = added = 0.0
    known, sample = inputs.known, inputs.sample
    if len(sample):
        product = wanted = sample @ scaled
        if known.float_tokens is not None:
            wanted = known.float_tokens @ floats
        error = _square(sample @ difference + (product - wanted)) / len(sample)
        wanted_square, added = _square(wanted) / len(sample), error
        if of_all_tokens and known.gram is not None:
            added = float(np.vdot(difference, known.gram @ difference))
        added *= known.unit**2
    if inputs.scales is not None:
        difference /= inputs.scales[:, None]
    return [_square(difference), _square(floats), error, wanted_square, added]


def _matrix(weight: Weight) -> npt.NDArray[Any]:
    """The weight as ``[K, N]``, mapped."""
    mapped = weight.floats.map()
    return mapped.T if weight.stored_k_last else mapped


def checked_matrix(matrix: npt.NDArray[Any], name: str) -> Floats:
    """Return a copy in float32; a QuantizationError where it holds NaN or infinite values."""
    copy = np.ascontiguousarray(matrix, np.float32)
    # A sum is not finite if one of its terms isn't; it may also overflow, so look again.
    with np.errstate(over="ignore", invalid="ignore"):
        suspicious = not np.isfinite(copy.sum())
    if suspicious and not np.isfinite(copy).all():
        raise QuantizationError(
            f"weight {name!r} cannot be quantised: it holds NaN or infinite values"
        )
    return copy


def _check_type_holds(matrix: Floats, scales: Floats, weight: Weight) -> None:
    """Refuse codes of a weight that stand for a matrix beyond its type."""
    given = weight.floats.dtype
    with np.errstate(over="ignore"):
        reach = float(abs(scales).max()) * (1 << weight.form.bits)
        if reach > np.finfo(given).max and not np.isfinite(matrix.astype(given)).all():
            raise QuantizationError(
                f"weight {weight.name!r} cannot be quantised: its codes stand for numbers "
                f"beyond {given}: take more bits, or grid 'amax'"
            )


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


class _CodesWriter:
    """Packs codes into their place on disk as strips of columns come in, in any order.

    ONNX packs codes densely over the flattened tensor, so a strip's place is known only where
    rows start on whole bytes; codes of other shapes are kept, a byte each, to the end.
    """

    def __init__(self, weight: Weight) -> None:
        self.weight = weight
        aligned = weight.k_last or weight.N * weight.form.bits % 8 == 0
        self._kept = None if aligned else np.empty((weight.K, weight.N), np.uint8)
        self._codes = weight.codes.map("r+")
        self._scales = weight.scales.map("r+")
        zeros = weight.zero_points
        self._zero_points = None if zeros is None else zeros.map("r+")

    def write(
        self, columns: slice, codes: Codes, scales: Floats, zeros: ZeroPoints | None
    ) -> None:
        """Store the codes of some columns."""
        k, bits = self.weight.K, self.weight.form.bits
        unsigned = codes.view(np.uint8) & np.uint8((1 << bits) - 1)
        if self._kept is not None:
            self._kept[:, columns] = unsigned
        elif self.weight.k_last:
            # Strips start at a multiple of 8 rows, so on a whole byte.
            packed = pack_rows(np.ascontiguousarray(unsigned.T).reshape(-1), bits)
            start = columns.start * k * bits // 8
            self._codes[start : start + packed.size] = packed
        else:
            first, last = columns.start * bits // 8, columns.stop * bits // 8
            self._codes.reshape(k, -1)[:, first:last] = pack_rows(unsigned, bits)
        grids = ((self._scales, scales), (self._zero_points, zeros))
        for target, numbers in grids:
            if target is not None and numbers is not None:
                (target.T if self.weight.k_last else target)[:, columns] = numbers

    def close(self, sums: npt.NDArray[np.float64], *, measured: bool) -> None:
        """Store what had to be kept; note the errors of these sums of squares."""
        if self._kept is not None:
            self._codes[:] = pack_rows(self._kept.reshape(-1), self.weight.form.bits)
        weight, output = np.sqrt(sums[:4:2] / np.where(sums[1:4:2] > 0, sums[1:4:2], 1))
        given, stored = self.weight.floats.dtype, self.weight.form.scale_type
        if weight > _LOST and given != stored == "float16":
            raise QuantizationError(
                f"weight {self.weight.name!r} cannot be quantised: its scales are below "
                "float16's least number; leave out half_scales"
            )
        self.weight.errors = Errors(float(weight))
        if measured:
            self.weight.errors = Errors(float(weight), float(output), float(sums[4]))
