# SPDX-License-Identifier: MIT
"""From a float model to a weight-only quantised one, as a file or as an object.

find the weights -> one walk in the graph's order, and for each activation in it
    statistics, from the model quantised so far
        -> the codes of each weight that reads it, chosen by any executor
        -> appended to a file next to the output
-> DequantizeLinear, and the activations divided whose weights were scaled
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import threadpoolctl

from ortplugins.errors import CalibrationError, ModelFileError
from ortplugins.model_io.loading import ModelLike
from ortplugins.model_io.opset import raise_opset
from ortplugins.model_io.saving import Progress
from ortplugins.quantization.codes import WeightCodes, choose_codes
from ortplugins.quantization.files import QuantizedFile, QuantizeResult
from ortplugins.quantization.methods.awq import search_scales
from ortplugins.quantization.methods.gptq import Gptq
from ortplugins.quantization.methods.nearest import BlockFormat
from ortplugins.quantization.statistics import ActivationStatistics
from ortplugins.quantization.walk import UNREACHED, Walk
from ortplugins.quantization.weights.graph import store_codes, write_codes
from ortplugins.quantization.weights.plan import (
    Group,
    Weight,
    WeightPlan,
    plan_weights,
    reported,
)
from ortplugins.quantization.weights.recipe import Recipe, read_recipe
from ortplugins.quantization.weights.report import QuantizeReport
from ortplugins.quantization.weights.uses import WeightUse, naming
from ortplugins.samples.sources import read_samples
from rewrite_rules.dq_matmulnbits_fusion.fuse import FusionOptions, fuse
from rewrite_rules.graph.initializers import FreshNames
from rewrite_rules.graph.nodes import captures, dequantizer, label
from rewrite_rules.remarks import Outcome, PassContext, Remarks

# The first opset whose DequantizeLinear takes blocks, and the file format that can hold them.
_OPSET, _IR_VERSION = 21, 10
_MORE_BITS = 8
# With fewer, error feedback fits them and nothing else. Four layers of SmolLM2, KL divergence
# to float: .0576 by rounding to nearest; by GPTQ .0589 with 2 tokens, .0468 with 4.
_LEAST_TOKENS = 4
# What is known of the inputs of weights.
Known = dict[Weight, ActivationStatistics | None]
NewWalk = Callable[[], Walk]
# Weights whose codes are chosen ahead, at least.
_AHEAD = 8
# Operators whose results are as many as a run finds, and those that put rows back.
_CHOOSING = frozenset({"Compress", "NonMaxSuppression", "NonZero", "TopK", "Unique"})
_PUT_BACK = frozenset({"ScatterElements", "ScatterND"})


def quantize(
    model: ModelLike,
    output: str | os.PathLike[str] | None = None,
    *,
    recipe: Recipe | str | None = None,
    calibration_data_reader: Any = None,
    calibration_providers: Sequence[Any] = ("CPUExecutionProvider",),
    overwrite: bool = False,
    executor: concurrent.futures.Executor | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
    **settings: Any,
) -> QuantizeResult:
    """Quantise the constant matrices of a model; activations stay in float.

    Args:
        model: Path of an .onnx file or of a folder with one, ``onnx.ModelProto`` or
            ``onnx_ir.Model``; not changed. Weights of a path are mapped, never read whole.
        output: File to write; its data goes to ``<output>.data``.
        recipe: Which weights are quantised, and how: a :class:`Recipe`, or ``"small"``,
            ``"balanced"`` or ``"best"``. By default 4 bits in blocks of 32, rounded to
            nearest.
        calibration_data_reader: Samples, each a dict of input names and arrays: an object with
            ``get_next()``, an iterable, or paths of ``.npz`` files. None for random ones, with
            a warning. With ``method="rtn"`` they only measure the error of outputs.
        calibration_providers: Execution providers that run the samples.
        overwrite: Whether ``output`` may exist.
        executor: Where codes are chosen: any ``concurrent.futures.Executor``, on this machine
            or others; by default threads, one per core. The result is the same, bit for bit.
        dry_run: Only report what would be quantised, and to how many bytes.
        progress: Called as calibration, the work on weights and saving go on, with steps done,
            steps of that stage, and what is being done.
        settings: What the recipe is to have instead: fields of :class:`Recipe` by name, such
            as ``method``, ``bits`` and ``block_size``. ``rules`` are added to its own.

    Returns:
        Path, report and model.

    Raises:
        CalibrationError: If a sample is not a dict of the model's inputs, holds NaN or
            infinite values, or there is none.
        FileExistsError: If ``output`` exists and ``overwrite`` is false.
        MissingFileError, ModelFileError: If the model or its data can't be used,
            or nothing is left to quantise.
        QuantizationError: If a setting is out of range, a recipe is not known, a pattern means
            no node, or a weight holds NaN or infinite values. No output is written, whatever
            is raised.
        TypeError: If a keyword is not a setting; names the closest.
        OSError: If a file can't be written.
    """
    chosen = read_recipe(recipe).with_settings(settings)
    target = None if dry_run else output
    file = QuantizedFile(model, target, overwrite=overwrite, progress=progress)
    written = None
    if isinstance(recipe, str):
        written = {*settings, *dict(settings.get("rules") or ())}
    notes = [] if dry_run else _raise_opset(file.model, chosen)
    plan = plan_weights(file.model, chosen, written)
    if dry_run:
        return QuantizeResult(None, reported(plan, chosen), None)
    with file.scratch() as scratch:
        calibrated: NewWalk | None = None
        says = any(group.activation is not None for group in plan.groups)
        if says and (chosen.needs_samples or calibration_data_reader is not None):
            samples = read_samples(calibration_data_reader, file.model)
            runs = samples, scratch, calibration_providers, progress
            calibrated = functools.partial(Walk, plan.model, *runs)
        stored, names = None if output is None else scratch / "codes", FreshNames(plan.model)
        # What a sum of floats gives depends on how BLAS's threads share it out: strips of
        # columns are shared out instead.
        with threadpoolctl.threadpool_limits(1, user_api="blas"):
            if chosen.share_of_8_bits and calibrated is not None:
                _give_8_bits(plan, chosen.share_of_8_bits, calibrated, executor)
            weights = [weight for group in plan.groups for weight in group.weights]
            total, done = sum(weight.K * weight.N for weight in weights), 0
            for weight, found in _walked(plan, calibrated, executor):
                store_codes(weight, found, stored, names)
                done += weight.K * weight.N
                if progress is not None:
                    progress(done, total, label(weight.uses[0].node))
        if calibrated is not None:
            _note_unreached(plan)
        write_codes(plan, names)
        report = reported(plan, chosen)
        report.notes += notes
        if chosen.for_kernels or chosen.fuse_tables:
            _to_kernels(file.model, chosen, report)
        return file.saved(report)


def _walked(
    plan: WeightPlan,
    calibrated: NewWalk | None,
    executor: concurrent.futures.Executor | None,
    *,
    ranks: bool = False,
) -> Iterator[tuple[Weight, WeightCodes]]:
    """Choose the codes of all weights: of those with an activation when the walk meets it.

    ``ranks`` rounds all to nearest, for what they add to the error of the float model.
    """
    walk = None if calibrated is None else calibrated()
    alone = [group for group in plan.groups if walk is None or group.activation is None]
    met = [group for group in plan.groups if group not in alone]
    # The copy of the model is run for weights that make up for its errors, and no others.
    pairs = not ranks and any(group.method == "gptq" for group in met)
    first: Known = dict.fromkeys(w for group in alone for w in group.weights)
    reached = [] if walk is None else _met(walk, met, ranks)
    for known in itertools.chain([first], reached):
        for weight, found in _chosen(known, executor):
            for use in weight.uses if pairs else ():
                assert walk is not None
                restored = functools.partial(_restored, use, found, weight.form)
                walk.replace(use.node, use.index, restored)
            yield weight, found


def _met(walk: Walk, groups: Sequence[Group], ranks: bool) -> Iterator[Known]:
    """Yield what the weights of a group are to know, where the walk meets its activation."""
    names = {group: str(group.activation and group.activation.name) for group in groups}
    feeding = not ranks and any(group.method == "gptq" for group in groups)
    rows = _chosen_rows(walk.model, groups) if feeding else set()
    for group in sorted(groups, key=lambda group: walk.places.get(names[group], 0)):
        name, k, steps = names[group], group.weights[0].K, group.method != "rtn"
        if ranks:
            found = walk.statistics(name, k, axes=1)
        elif group.method == "gptq" and group.activation not in rows:
            found = walk.paired(name, k)
        else:
            # Searches find the same in twice as many tokens as there are channels.
            most = math.inf if group.method == "gptq" else 2 * k
            found = walk.statistics(name, k, axes=2 * steps, gram_tokens=most)
        yield _known(group, found, ranks)


def _known(group: Group, statistics: ActivationStatistics | None, ranks: bool) -> Known:
    """Return what the weights of a group are to know, and search their channel scales."""
    if statistics is None:
        _round(group, UNREACHED)
    elif group.method == "gptq" and statistics.count < _LEAST_TOKENS:
        _round(group, f"gptq needs {_LEAST_TOKENS} tokens, not {statistics.count}")
    if statistics is None or ranks:
        return dict.fromkeys(group.weights, statistics)
    if group.method == "awq_lite":
        _search_scales(group, statistics)
    if group.channel_scales is not None:
        statistics = statistics.over(group.channel_scales)
    nearest = dataclasses.replace(statistics, gram=None, drift=None)
    factored: dict[int, ActivationStatistics] = {}  # by the size of blocks
    known: Known = {}
    for weight in group.weights:
        known[weight] = nearest if weight.method == "rtn" else statistics
        if weight.method == "gptq":
            assert statistics.gram is not None
            size = weight.form.size_along(weight.K)
            feeding = dataclasses.replace(statistics, feedback=Gptq(statistics.gram, size))
            known[weight] = factored.setdefault(size, feeding)
    return known


def _round(group: Group, reason: str) -> None:
    """Round the weights of a group to nearest, whatever its method."""
    if group.method != "rtn":
        group.reason = reason
    group.method = "rtn"
    for weight in group.weights:
        weight.method = "rtn"


def _search_scales(group: Group, statistics: ActivationStatistics) -> None:
    """Note the scales of the input channels."""
    assert statistics.gram is not None
    with naming(*(weight.name for weight in group.weights)):
        scales, alpha, _ = search_scales(
            [weight.uses[0].matrix for weight in group.weights],
            statistics.mean_abs,
            statistics.gram,
            [weight.form for weight in group.weights],
        )
    if alpha is None:
        return
    # What the activation is multiplied by is stored in its type, the weights': the weight gets
    # exactly the inverse of that.
    with np.errstate(over="ignore"):
        inverse = (1 / scales).astype(group.weights[0].uses[0].matrix.dtype)
    inverse = inverse.astype(np.float32)
    inverse[~(np.isfinite(inverse) & (inverse > 0))] = 1
    group.channel_scales = (1 / inverse).astype(np.float32)


def _chosen(
    known: Known, executor: concurrent.futures.Executor | None
) -> Iterator[tuple[Weight, WeightCodes]]:
    """Have an executor choose codes, of a few weights ahead; yield them in order.

    Without one, threads share weights, and columns where there are fewer weights than cores.
    """
    cores, items = os.cpu_count() or 1, list(known.items())
    workers = max(1, min(cores, len(items)))
    threads, choose = 1, _in_a_worker
    with contextlib.ExitStack() as stack:
        if executor is None:
            threads, choose = max(1, cores // workers), choose_codes
            pool = concurrent.futures.ThreadPoolExecutor(workers, "quantize")
            executor = stack.enter_context(pool)
            for _, inputs in items:
                if inputs and inputs.feedback:  # before several threads ask for it
                    _ = inputs.feedback.factored
        submitted = (
            (w, executor.submit(choose, w.uses[0].matrix, w.form, inputs, threads))
            for w, inputs in items
        )
        waiting = collections.deque(itertools.islice(submitted, max(workers, _AHEAD)))
        while waiting:
            weight, future = waiting.popleft()
            with naming(weight.name):
                found = future.result()
            yield weight, found
            waiting.extend(itertools.islice(submitted, 1))


def _in_a_worker(*task: Any) -> WeightCodes:
    """Choose codes in a process that nobody has told about BLAS."""
    with threadpoolctl.threadpool_limits(1, user_api="blas"):
        return choose_codes(*task)


def _restored(use: WeightUse, found: WeightCodes, form: BlockFormat) -> npt.NDArray[Any]:
    """Return a quantised weight in the type and orientation that a node reads."""
    matrix = found.dequantized(form)
    return (matrix.T if use.wanted_k_last else matrix).astype(use.tensor.dtype.numpy())


def _chosen_rows(model: ir.Model, groups: Iterable[Group]) -> set[ir.Value]:
    """Return the values whose rows depend on weights, as those that go to one expert."""
    changed = {use.node for group in groups for w in group.weights for use in w.uses}
    varying, chosen = set[ir.Value](), set[ir.Value]()
    for node in model.graph:
        reads = [*node.inputs, *captures(node)]
        varies = node in changed or not varying.isdisjoint(reads)
        rows = reads[:1] if node.op_type in _PUT_BACK else reads
        if varies:
            varying.update(node.outputs)
        if (varies and node.op_type in _CHOOSING) or not chosen.isdisjoint(rows):
            chosen.update(node.outputs)
    return chosen


def _note_unreached(plan: WeightPlan) -> None:
    """Count the weights that are rounded to nearest for want of tokens.

    Raises:
        CalibrationError: If no token reaches any that was to be calibrated.
    """
    calibrated = [group for group in plan.groups if group.activation is not None]
    errors = [w.rows[0].output_error for group in calibrated for w in group.weights]
    if errors and all(map(math.isnan, errors)):
        raise CalibrationError(
            "no token of the samples reaches any weight: are they empty, or all padding?"
        )
    names: dict[str, list[str]] = {}
    for group in calibrated:
        if group.reason:
            names.setdefault(group.reason, []).extend(w.name for w in group.weights)
    plan.report.notes.extend(
        f"{len(found)} weights are rounded to nearest, as {reason}: {', '.join(found)}"
        for reason, found in names.items()
    )


def _give_8_bits(
    plan: WeightPlan,
    share: float,
    calibrated: NewWalk,
    executor: concurrent.futures.Executor | None,
) -> None:
    """Give 8 bits to weights that lose most error for each element by them, up to a share.

    The error is the square of what rounding adds to the outputs for each token, by the energy
    of the input channels. Absolute, since layers add to one residual stream: on SmolLM2-135M
    it is the late down_proj that come first. A weight that no longer fits is passed over for
    smaller ones.
    """
    ranked = _walked(plan, calibrated, executor, ranks=True)
    found = {weight: codes.added for weight, codes in ranked}
    gain = {
        weight: added / (weight.K * weight.N)
        for weight, added in found.items()
        if added > 0 and weight.form.bits < _MORE_BITS
    }
    left = share * sum(weight.K * weight.N for weight in found)
    chosen = []
    for weight in sorted(gain, key=gain.__getitem__, reverse=True):
        if left >= weight.K * weight.N:
            chosen.append(weight)
            left -= weight.K * weight.N
    for weight in chosen:
        weight.form, weight.method = dataclasses.replace(weight.form, bits=_MORE_BITS), "rtn"
    if not chosen:
        less = f"{share:g} of all weights is less than any weight that gains"
        plan.note_unused("share_of_8_bits", less if gain else "no weight of 4 bits gains")


def _raise_opset(model: ir.Model, recipe: Recipe) -> list[str]:
    """Convert the model to the opset that its new form needs; return a note of that."""
    notes: list[str] = []
    if not recipe.for_kernels:
        advice = ", or take quant_format='MatMulNBits', which needs no other opset"
        notes = raise_opset(model, _OPSET, "DequantizeLinear in blocks", advice)
    model.ir_version = max(model.ir_version or 0, _IR_VERSION)
    return notes


def _to_kernels(model: ir.Model, recipe: Recipe, report: QuantizeReport) -> None:
    """Fuse what was quantised, or its tables, into MatMulNBits and GatherBlockQuantized."""
    remarks = Remarks("dq_matmulnbits_fusion")
    ours = {node.node for node in report.quantized}
    only = None
    if not recipe.for_kernels:
        gathers = (n for n in model.graph.all_nodes() if n.op_type == "Gather")
        tables = (dequantizer(node.inputs[0]) for node in gathers if label(node) in ours)
        only = {node for node in tables if node is not None}
    options = FusionOptions(recipe.accuracy_level or 0, "fuse")
    fuse(model, options, PassContext(remarks), only)
    for remark in remarks:
        if remark.outcome is Outcome.REFUSED and remark.node in ours:
            raise ModelFileError(
                f"node {remark.node!r} has no MatMulNBits: {remark.reason}; exclude it, or "
                "take quant_format='QDQ'"
            )
