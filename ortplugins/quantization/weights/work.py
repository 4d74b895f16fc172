# SPDX-License-Identifier: MIT
"""Quantises the weights of a graph in place, and says what became of each.

find the weights -> calibrate their activations, in batches that fit into memory
    -> quantise the weights of each activation, anywhere
    -> if asked for, again in the graph's order, for the inputs that the weights before leave
    -> put the codes into the graph
    -> divide the activations whose weights were scaled
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ortplugins.errors import CalibrationError
from ortplugins.model_io.saving import Progress
from ortplugins.model_io.tensor_reference import ScratchWriter, TensorReference
from ortplugins.quantization.methods.nearest import Floats
from ortplugins.quantization.statistics.accumulator import (
    ActivationRequest,
    ActivationStatistics,
    pooled,
)
from ortplugins.quantization.statistics.collect import Calibration, collect
from ortplugins.quantization.statistics.paired import PairedModels
from ortplugins.quantization.weights.graph import (
    drop_unused,
    find_folds,
    insert_mul,
    read_through_dequantize,
)
from ortplugins.quantization.weights.group import (
    GroupResult,
    GroupTask,
    StoredCodes,
    WeightTask,
    one_blas_thread,
    quantize_group,
    working_bytes,
)
from ortplugins.quantization.weights.plan import (
    UNREACHED,
    Group,
    QuantizeReport,
    Weight,
    WeightPlan,
    reported,
)
from ortplugins.quantization.weights.recipe import METHODS, Recipe
from ortplugins.quantization.weights.run_folder import NOTHING_KEPT, RunFolder
from ortplugins.quantization.weights.uses import WeightUse
from rewrite_rules.graph.initializers import FreshNames

_MORE_BITS = 8
_SHOWN = 8  # names in a note
# Of each activation: what errors are measured on. Searches look at the second moments.
_SAMPLED_TOKENS = 128

Statistics = dict[str, TensorReference]


def quantize_graph(
    plan: WeightPlan,
    recipe: Recipe,
    scratch: Path,
    calibration: Calibration | None = None,
    *,
    executor: concurrent.futures.Executor | None = None,
    max_memory: int = 1 << 30,
    run: RunFolder = NOTHING_KEPT,
    progress: Progress | None = None,
) -> QuantizeReport:
    """Quantise what a plan names; the graph's new tensors lie in files of the scratch folder.

    The folder stays until the model is saved, and every worker of the executor sees it; by
    default threads do the work, one per core, and share ``max_memory``. Without samples, all
    weights are rounded to nearest.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(one_blas_thread())
        quantize, cores = quantize_group, 1
        if executor is None:
            executor = stack.enter_context(
                concurrent.futures.ThreadPoolExecutor(os.cpu_count(), "quantize")
            )
            quantize, cores = _WithinMemory(max_memory), os.cpu_count() or 1
        work = _Work(plan, recipe, scratch, calibration, run, executor, quantize, cores)
        schedule = _schedule(plan, recipe, calibration)
        done = _Counter(progress, schedule)
        for group in work.run(schedule.at_once):
            done.add(group)
        if recipe.share_of_8_bits:
            _choose_more_bits(schedule.at_once, recipe.share_of_8_bits)
        # What no token reaches is done.
        in_order = [group for group in schedule.in_order if METHODS[group.method]]
        if calibration is not None and in_order:
            models = PairedModels(plan.model, calibration)
            for group in work.run_in_order(in_order, models):
                done.add(group)
        if calibration is not None:
            _note_unreached(plan)
    return _rewrite(plan, recipe)


@dataclasses.dataclass(frozen=True)
class _Schedule:
    """Groups that are quantised for inputs of the float model, and then of the quantised."""

    at_once: list[Group]
    in_order: list[Group]


def _schedule(plan: WeightPlan, recipe: Recipe, calibration: Calibration | None) -> _Schedule:
    """Decide which groups wait for those before them in the graph."""
    if calibration is None or not recipe.quantized_inputs:
        return _Schedule(plan.groups, [])
    # With one place in the graph to quantise them at, and a method for it.
    alone = (group for group in plan.groups if len(group.activations) == 1)
    in_order = [group for group in alone if "gptq" in METHODS[group.method]]
    if recipe.share_of_8_bits:  # which is decided by what the float model's inputs find
        return _Schedule(plan.groups, in_order)
    return _Schedule([group for group in plan.groups if group not in in_order], in_order)


class _Counter:
    """Reports how many elements of weights are done."""

    def __init__(self, show: Progress | None, schedule: _Schedule) -> None:
        self._show, self._done = show, 0
        groups = (*schedule.at_once, *schedule.in_order)
        self._total = sum(group.elements for group in groups)

    def add(self, group: Group) -> None:
        """Report that a group is done."""
        self._done += group.elements
        if self._show is not None:
            self._show(self._done, self._total, group.weights[0].uses[0].label)


def _note_unreached(plan: WeightPlan) -> None:
    """Name the weights that no sample says anything about.

    Raises:
        CalibrationError: If these are all that were to be calibrated.
    """
    calibrated = [group for group in plan.groups if group.activations]
    if calibrated and not any(group.reached for group in calibrated):
        raise CalibrationError(
            "no token of the samples reaches any weight: are they empty, or padding?"
        )
    unreached = [group for group in calibrated if group.reason == UNREACHED]
    names = [weight.value.name or "" for group in unreached for weight in group.weights]
    if names:
        shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
        plan.notes.append(
            f"{len(names)} weights are rounded to nearest, as no token of the samples reaches "
            f"them: {shown}"
        )


class _WithinMemory:
    """Quantises a group as soon as there is memory for it."""

    def __init__(self, size: int) -> None:
        self._size = self._free = size
        self._changed = threading.Condition()

    def __call__(self, task: GroupTask) -> GroupResult:
        """Wait, if others have taken the memory; a group that needs more than all gets all."""
        threads = task.threads
        while threads > 1 and working_bytes(task, threads) > self._size:
            threads -= 1
        need = min(working_bytes(task, threads), self._size)
        with self._changed:
            self._changed.wait_for(lambda: need <= self._free)
            self._free -= need
        try:
            return quantize_group(dataclasses.replace(task, threads=threads))
        finally:
            with self._changed:
                self._free += need
                self._changed.notify_all()


@dataclasses.dataclass(eq=False)
class _Work:
    """Sends groups to an executor and collects what comes back."""

    _plan: WeightPlan
    _recipe: Recipe
    _scratch: Path
    _calibration: Calibration | None
    _run: RunFolder
    _executor: concurrent.futures.Executor
    _quantize: Callable[[GroupTask], GroupResult]
    _cores: int  # of threads that groups share

    def __post_init__(self) -> None:
        self._keys: dict[Group, str] = {}  # the keys of statistics in the run folder
        self._numbers = itertools.count()
        self._sources = ScratchWriter(self._scratch / "weights")

    def run(self, groups: Sequence[Group]) -> Iterator[Group]:
        """Quantise groups: those with statistics batch by batch, then the others."""
        left = dict.fromkeys(groups, Statistics())
        if self._calibration is not None:
            requests = self._requests(groups)
            kept = self._kept_statistics(groups, requests)
            yield from self._batch(kept)
            for group in kept:
                del left[group]
            names = {name for group in left for name in group.names}
            wanted = [[r for r in together if r.name in names] for together in requests]
            wanted = [together for together in wanted if together]
            model = self._plan.model
            for batch in collect(model, wanted, self._calibration) if wanted else ():
                ready = [g for g in left if g.activations and g.names[0] in batch]
                for group in ready:
                    del left[group]
                writer = self._writer("statistics")
                found = {group: self._statistics(group, batch, writer) for group in ready}
                del batch  # in files now
                yield from self._batch(found)
                writer.path.unlink(missing_ok=True)
        yield from self._batch(left)

    def run_in_order(self, groups: Sequence[Group], models: PairedModels) -> Iterator[Group]:
        """Quantise groups of one activation each, for the inputs that those before leave."""
        fixed = [group for group in self._plan.groups if group not in groups]
        for group in fixed:
            _replace_weights(models, group)
        # Codes depend on all of those before them.
        before: object = [
            (self._run.codes_key(group.task), [weight.form.bits for weight in group.weights])
            for group in fixed
        ]
        for group in sorted(groups, key=lambda group: models.places.get(group.names[0], 0)):
            self._keys[group] = self._run.key(codes_before=before)
            group.task = task = self._task(group, {}, self._cores)
            before = self._run.codes_key(task)
            result = self._run.codes(task)
            if result is None:
                (request,) = self._requests([group])[0]
                writer = self._writer("statistics")
                statistics = models.statistics(request, writer)
                ready = dataclasses.replace(task, statistics=statistics)
                result = self._executor.submit(self._quantize, ready).result()
                writer.path.unlink(missing_ok=True)
                self._run.keep_codes(task, result)
            group.take_in(result)
            _replace_weights(models, group)
            yield group

    def _writer(self, kind: str) -> ScratchWriter:
        """Return the writer of a new file."""
        return ScratchWriter(self._scratch / f"{kind}{next(self._numbers)}")

    def _requests(self, groups: Sequence[Group]) -> list[list[ActivationRequest]]:
        """Ask for each activation once, together with those of all groups that share it."""
        found: list[dict[str, ActivationRequest]] = []
        for group in groups:
            steps, k = METHODS[group.method], group.weights[0].K
            # Feedback between rows needs all tokens, and so may the next run; searches of
            # scales and ranges find the same in twice as many as there are channels.
            tokens = math.inf if "gptq" in steps or self._run.keeps else 2 * k
            wanted = {
                name: ActivationRequest(name, k, bool(steps), _SAMPLED_TOKENS, tokens)
                for name in group.names
            }
            for asked in [asked for asked in found if not wanted.keys().isdisjoint(asked)]:
                # A rule has given weights of one activation other methods.
                found.remove(asked)
                for name, request in asked.items():
                    both = request, wanted.get(name, request)
                    wanted[name] = max(both, key=lambda r: (r.gram, r.gram_tokens))
            if wanted:
                found.append(wanted)
        return [list(requests.values()) for requests in found]

    def _kept_statistics(
        self, groups: Sequence[Group], requests: Sequence[Sequence[ActivationRequest]]
    ) -> dict[Group, Statistics]:
        """Return the groups whose statistics the run folder has; note the keys of all."""
        # What is kept of an activation depends on those that it is calibrated with.
        together = {request.name: each for each in requests for request in each}
        found = {}
        for group in groups:
            if not group.activations:
                continue
            names = group.names
            asked = [dataclasses.astuple(request) for request in together[names[0]]]
            self._keys[group] = self._run.key(
                activations=names, requests=sorted(asked, key=str)
            )
            statistics = self._run.statistics(self._keys[group])
            if statistics is not None:
                found[group] = statistics
        return found

    def _statistics(
        self,
        group: Group,
        batch: Mapping[str, ActivationStatistics | None],
        writer: ScratchWriter,
    ) -> Statistics:
        """Write a group's statistics for its workers."""
        found = [batch[name] for name in group.names]
        reached = [statistics for statistics in found if statistics is not None]
        given = pooled(reached).arrays() if reached else {}
        if self._run.keeps:
            return self._run.keep_statistics(self._keys[group], given)
        return {name: writer.append(array) for name, array in given.items()}

    def _batch(self, groups: Mapping[Group, Statistics]) -> Iterator[Group]:
        """Quantise groups whose statistics are known; the largest first, or it comes last."""
        threads = max(1, self._cores // max(1, len(groups)))
        futures: dict[concurrent.futures.Future[GroupResult], Group] = {}
        try:
            for group in sorted(groups, key=lambda group: -group.elements):
                group.task = self._task(group, groups[group], threads)
                kept = self._run.codes(group.task)
                if kept is None:
                    futures[self._executor.submit(self._quantize, group.task)] = group
                else:
                    group.take_in(kept)
                    yield group
            for future, group in futures.items():
                result = future.result()
                self._run.keep_codes(group.task, result)
                group.take_in(result)
                yield group
        except BaseException:
            for future in futures:
                future.cancel()
            concurrent.futures.wait(futures)
            raise

    def _task(self, group: Group, statistics: Statistics, threads: int) -> GroupTask:
        weights = tuple(map(self._weight_task, group.weights))
        key = self._keys.get(group)
        return GroupTask(weights, self._recipe, group.method, statistics, key, threads)

    def _weight_task(self, weight: Weight) -> WeightTask:
        """Return the task of a weight in one form; in two where that is yet to be decided."""
        forms, undecided = [weight.form], self._recipe.share_of_8_bits and not weight.outputs
        if undecided and weight.form.bits < _MORE_BITS:
            forms.append(dataclasses.replace(weight.form, bits=_MORE_BITS))
        use, size = weight.uses[0], (weight.K, weight.N)
        # onnxruntime (1.32) reads rows of 2 bits that end within a byte wrongly.
        within_byte = any(form.bits == 2 for form in forms) and weight.N % 4 != 0
        k_last = self._recipe.quant_format != "QDQ" or weight.is_table or within_byte
        source = self._sources.refer_to(use.tensor)
        # A file for each: whoever works on it may write while others do.
        outputs = (
            StoredCodes.reserve(self._writer("codes"), *size, form, k_last) for form in forms
        )
        name = use.weight.name or ""
        return WeightTask(name, source, use.stored_k_last, weight.given, tuple(outputs))


def _replace_weights(models: PairedModels, group: Group) -> None:
    """Have the quantised model compute with what became of a group."""
    for weight in group.weights:
        for use in weight.uses:
            restored = functools.partial(_restored, use, weight.stored, group.channel_scales)
            models.replace(use.node.outputs[0].name or "", use.index, restored)


def _restored(
    use: WeightUse, stored: StoredCodes, channel_scales: Floats | None
) -> npt.NDArray[Any]:
    """Return a quantised weight in the type and orientation that a node reads."""
    weight = stored.dequantized()
    if channel_scales is not None:
        weight /= channel_scales[:, None]
    return (weight.T if use.wanted_k_last else weight).astype(use.tensor.dtype.numpy())


def _choose_more_bits(groups: Sequence[Group], share: float) -> None:
    """Give more bits to weights that lose most error for each element, as far as they go.

    The error is tr(D^T H D), D = dequantised - W, H = X^T X / count: the square of what is
    added to the outputs for each token. Absolute, since layers add to one residual stream: on
    SmolLM2-135M it is the late down_proj that come first. A weight that no longer fits is
    passed over for smaller ones.
    """
    worth = []
    for weight in (weight for group in groups for weight in group.weights):
        size = weight.K * weight.N
        # One that was not measured, or has these bits already, gains nothing.
        gain = weight.stored.added_error if len(weight.outputs) > 1 else 0.0
        worth.append((gain / size, size, weight))
    left = share * sum(size for _, size, _ in worth)
    for gain, size, weight in sorted(worth, key=lambda item: -np.nan_to_num(item[0])):
        if gain > 0 and size <= left:
            del weight.outputs[0]
            weight.form, weight.method = weight.stored.form, "rtn"
            left -= size


def _rewrite(plan: WeightPlan, recipe: Recipe) -> QuantizeReport:
    """Put everything into the graph."""
    names = FreshNames(plan.model)
    weights = [weight for group in plan.groups for weight in group.weights]
    by_value = {weight.value: weight.stored for weight in weights}
    divided = _divide_activations(plan, recipe, by_value, names)
    for weight in weights:
        stored = weight.stored
        for divisor in divided[weight.value]:
            # The codes stay.
            stored_scales = stored.scales.map("r+")
            stored_scales /= divisor[:, None] if stored.k_last else divisor
        read_through_dequantize(weight.uses, stored, names)
    for value in by_value:
        drop_unused(value)
    return reported(plan, recipe)


def _divide_activations(
    plan: WeightPlan,
    recipe: Recipe,
    by_value: Mapping[ir.Value, StoredCodes],
    names: FreshNames,
) -> dict[ir.Value, list[Floats]]:
    """Divide activations by what their weights' rows were multiplied by.

    Return what is to divide the output columns of weights that are quantised as well.
    """
    divided: dict[ir.Value, list[Floats]] = {value: [] for value in by_value}
    found = []
    # All folds are looked for in the float graph, before any weight of it is replaced.
    for group in plan.groups:
        if (scales := group.channel_scales) is None:
            continue
        group.folded = "folded"
        for activation in group.activations:
            uses, folds = group.reads_of(activation), None
            if recipe.fold_scales:
                folds = find_folds(activation, uses, scales)
            if folds and not all(_divisible(by_value.get(f.constant), scales) for f in folds):
                folds = None
            if folds is None:
                group.folded = "mul"
            # An activation has its weights' type, whether or not the model says so.
            dtype = group.weights[0].uses[0].tensor.dtype
            found.append((folds, activation, uses, scales, dtype))
    for folds, activation, uses, scales, dtype in found:
        if folds is None:
            insert_mul(activation, uses, scales, dtype, names)
        for fold in folds or ():
            if fold.constant in divided:
                divided[fold.constant].append(scales)
            else:
                fold.constant.const_value = fold.quotient(scales)
    return divided


def _divisible(stored: StoredCodes | None, divisor: Floats) -> bool:
    """Whether the scales of a quantised weight can be divided without losing digits."""
    if stored is None or stored.form.scale_type == "float32":
        return True
    scales = stored.scales.map()
    with np.errstate(over="ignore"):
        exact = scales.astype(np.float32) / (divisor[:, None] if stored.k_last else divisor)
        error = abs(exact.astype(scales.dtype).astype(np.float32) - exact)
    return bool((error <= abs(exact) * np.finfo(scales.dtype).eps).all())
