# SPDX-License-Identifier: MIT
"""Quantises the weights of a graph in place, and says what became of each.

find the weights -> watch their activations, in batches that fit into memory
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
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ortplugins.model_io.saving import Progress
from ortplugins.model_io.tensor_reference import ScratchWriter, TensorReference
from ortplugins.quantization.methods.block_format import BlockFormat
from ortplugins.quantization.methods.nearest import Floats
from ortplugins.quantization.statistics.accumulator import ActivationStatistics, pooled
from ortplugins.quantization.statistics.collect import ActivationRequest
from ortplugins.quantization.statistics.paired import PairedModels
from ortplugins.quantization.weights.folds import Fold, apply_folds, find_folds, insert_mul
from ortplugins.quantization.weights.graph import CodeWriter, drop_unused
from ortplugins.quantization.weights.group import (
    METHODS,
    GroupResult,
    GroupTask,
    StoredCodes,
    WeightErrors,
    WeightTask,
    one_blas_thread,
    quantize_group,
    this_process,
    working_bytes,
)
from ortplugins.quantization.weights.plan import (
    Group,
    Weight,
    WeightPlan,
    reported,
)
from ortplugins.quantization.weights.recipe import Recipe
from ortplugins.quantization.weights.report import QuantizeReport
from ortplugins.quantization.weights.run_folder import RunFolder
from ortplugins.quantization.weights.sites import WeightSite
from rewrite_rules.graph.names import FreshNames

_MORE_BITS = 8
# Of each activation: what errors are measured on. Searches look at the second moments.
_SAMPLED_TOKENS = 128

Batch = Mapping[str, ActivationStatistics]
# :func:`.collect` of a model and its samples: statistics by the activation's name, in batches
# that fit into memory.
Calibration = Callable[[Sequence[ActivationRequest]], Iterator[Batch]]


@dataclasses.dataclass(eq=False)
class _Done:
    """A group with what became of it.

    Attributes:
        task: What was asked for.
        result: What was found.
        chosen: Of each weight, which of its outputs is taken.
    """

    group: Group
    task: GroupTask
    result: GroupResult
    chosen: list[int]

    def outputs(self) -> Iterator[tuple[Weight, StoredCodes, WeightErrors, int]]:
        """Yield each weight with its chosen output, and the output's number."""
        for weight, task, errors, number in zip(
            self.group.weights, self.task.weights, self.result.errors, self.chosen, strict=True
        ):
            yield weight, task.outputs[number], errors[number], number

    def uses(self, activation: ir.Value) -> list[tuple[ir.Node, int]]:
        """Return where an activation meets the weights of the group."""
        sites = (site for weight in self.group.weights for site in weight.sites)
        return [(s.node, 1 - s.index) for s in sites if s.activation is activation]


def quantize_graph(
    plan: WeightPlan,
    recipe: Recipe,
    scratch: Path,
    *,
    calibration: Calibration | None = None,
    paired: Callable[[], PairedModels] | None = None,
    executor: concurrent.futures.Executor | None = None,
    max_memory: int = 1 << 30,
    run: RunFolder | None = None,
    progress: Progress | None = None,
) -> QuantizeReport:
    """Quantise what a plan names; the graph's new tensors lie in files of the scratch folder.

    Args:
        plan: Of :func:`~ortplugins.quantization.weights.plan.plan_weights`.
        recipe: The same as there.
        scratch: A folder that stays until the model is saved, and that every worker of the
            executor sees.
        calibration: Yields statistics of activations; None for a method that needs none.
        paired: Makes what runs the model and its quantised copy, for weights that are to see
            the inputs that they get; None where they see the float model's.
        executor: Where the work runs; threads, one per core, by default.
        max_memory: Bytes that those threads may take together; a group that needs more is
            worked on alone.
        run: Where statistics and codes are kept, and looked for first.
        progress: Called after each group: elements done, in all, name of a node.

    Raises:
        CalibrationError: If a sample or an activation can't be used.
        QuantizationError: If a weight holds NaN or infinite values.
        OSError: If a file can't be written.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(one_blas_thread())
        quantize, cores = quantize_group, 1
        if executor is None:
            executor = stack.enter_context(
                concurrent.futures.ThreadPoolExecutor(os.cpu_count(), "quantize")
            )
            quantize, cores = _WithinMemory(max_memory), os.cpu_count() or 1
        work = _Work(recipe, scratch, executor, quantize, cores, run)
        first, second = plan.groups, []
        if paired is not None:
            second = [group for group in plan.groups if _sees_quantized_inputs(group)]
            if not recipe.share_of_8_bits:  # which is decided by what a first round finds
                first = [group for group in plan.groups if group not in second]
        by_group: dict[Group, _Done] = {}
        left = total = sum(group.elements for group in (*first, *second))

        def take_in(rounds: Iterator[_Done]) -> None:
            nonlocal left
            for done in rounds:
                by_group[done.group] = done
                left -= done.group.elements
                if progress is not None:
                    progress(total - left, total, done.group.weights[0].sites[0].label)

        take_in(work.run(first, calibration))
        if recipe.share_of_8_bits:
            _choose_more_bits([by_group[group] for group in first], recipe.share_of_8_bits)
        if paired is not None and second:
            take_in(work.run_in_order(second, by_group, paired()))
    return _rewrite(plan, recipe, [by_group[group] for group in plan.groups])


def _sees_quantized_inputs(group: Group) -> bool:
    """Whether there is one place in the graph to quantise a group at, and a method for it."""
    return "gptq" in METHODS[group.method] and len(group.activations) == 1


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
        task = dataclasses.replace(task, threads=threads)
        need = min(working_bytes(task, threads), self._size)
        with self._changed:
            self._changed.wait_for(lambda: need <= self._free)
            self._free -= need
        try:
            return quantize_group(task)
        finally:
            with self._changed:
                self._free += need
                self._changed.notify_all()


class _Work:
    """Sends groups to an executor and collects what comes back."""

    def __init__(
        self,
        recipe: Recipe,
        scratch: Path,
        executor: concurrent.futures.Executor,
        quantize: Callable[[GroupTask], GroupResult],
        cores: int,
        run: RunFolder | None,
    ) -> None:
        self._recipe = recipe
        self._scratch = scratch
        self._executor = executor
        self._quantize = quantize
        self._cores = cores  # of threads that groups share
        self._run = run
        self._watched: dict[Group, str] = {}  # the keys of statistics in the run folder
        self._numbers = itertools.count()
        self._sources = ScratchWriter(scratch / "weights")

    def run(self, groups: Sequence[Group], calibration: Calibration | None) -> Iterator[_Done]:
        """Quantise groups: those with statistics batch by batch, then the others."""
        left = dict.fromkeys(groups)
        if calibration is not None:
            requests = self._requests(groups)
            if self._run is not None:
                kept = self._kept_statistics(groups, requests, self._run)
                yield from self._batch(kept)
                for group, _ in kept:
                    del left[group]
                names = {a.name for group in left for a in group.activations}
                requests = [request for request in requests if request.name in names]
            for batch in calibration(requests) if requests else ():
                ready = [g for g in left if g.activations and g.activations[0].name in batch]
                for group in ready:
                    del left[group]
                path = self._scratch / f"statistics{next(self._numbers)}"
                writer = ScratchWriter(path)
                kept = [(group, self._statistics(group, batch, writer)) for group in ready]
                del batch  # in files now
                yield from self._batch(kept)
                path.unlink(missing_ok=True)
        yield from self._batch([(group, {}) for group in left])

    def run_in_order(
        self, groups: Sequence[Group], found: Mapping[Group, _Done], models: PairedModels
    ) -> Iterator[_Done]:
        """Quantise groups of one activation each, for the inputs that those before leave.

        Args:
            groups: The groups.
            found: What became of others, and in a first round of these.
            models: The float model and the quantised one, not run yet.
        """
        fixed = [done for group, done in found.items() if group not in groups]
        for done in fixed:
            _replace_weights(models, done)
        before: object = None
        if self._run is not None:
            before = [
                (self._codes_key(done.group, done.task, self._run), done.chosen)
                for done in fixed
            ]
        places = {
            group: models.places.get(group.activations[0].name or "", 0) for group in groups
        }
        for group in sorted(groups, key=places.__getitem__):
            forms = [weight.form for weight in group.weights]
            if group in found:
                forms = [stored.form for _, stored, *_ in found[group].outputs()]
            weights = zip(group.weights, forms, strict=True)
            tasks = tuple(self._task(weight, [form]) for weight, form in weights)
            task = self._group_task(group.method, tasks, {}, self._cores)
            result = None
            if self._run is not None:
                # Codes depend on all of those before them.
                self._watched[group] = self._run.key(codes_before=before)
                before = self._codes_key(group, task, self._run)
                result = self._run.codes(before, task)
            if result is None:
                path = self._scratch / f"statistics{next(self._numbers)}"
                statistics = models.statistics(
                    group.activations[0].name or "",
                    group.weights[0].K,
                    _SAMPLED_TOKENS,
                    ScratchWriter(path),
                )
                watched = self._group_task(group.method, tasks, statistics, self._cores)
                result = self._executor.submit(self._quantize, watched).result()
                path.unlink()
                if self._run is not None:
                    self._run.keep_codes(str(before), task, result)
            done = _Done(group, task, result, [0] * len(tasks))
            _replace_weights(models, done)
            yield done

    def _requests(self, groups: Sequence[Group]) -> list[ActivationRequest]:
        """Ask for each activation once, for all groups that share it."""
        requests: dict[str, ActivationRequest] = {}
        for number, group in enumerate(groups):
            steps, k = METHODS[group.method], group.weights[0].K
            for activation in group.activations:
                wanted = ActivationRequest(
                    activation.name or "",
                    k,
                    gram=bool(steps),
                    max_tokens=_SAMPLED_TOKENS,
                    # Feedback between rows needs all, and so may the next run; searches of
                    # scales and ranges find the same in twice as many as there are channels.
                    gram_tokens=None if "gptq" in steps or self._run else 2 * k,
                    group=str(number),
                )
                asked = requests.setdefault(wanted.name, wanted)
                if asked is not wanted:
                    # A rule has given weights of one activation other methods.
                    for name, item in requests.items():
                        if item.group == asked.group:
                            requests[name] = dataclasses.replace(item, group=wanted.group)
                    more = wanted.gram and (not asked.gram or wanted.gram_tokens is None)
                    requests[wanted.name] = dataclasses.replace(
                        wanted if more else asked, group=wanted.group
                    )
        return list(requests.values())

    def _kept_statistics(
        self, groups: Sequence[Group], requests: Sequence[ActivationRequest], run: RunFolder
    ) -> list[tuple[Group, dict[str, TensorReference]]]:
        """Return the groups whose statistics the run folder has; note the keys of all."""
        labels = {request.name: request.group for request in requests}
        found = []
        for group in groups:
            if not group.activations:
                continue
            names = [activation.name or "" for activation in group.activations]
            # What is kept of an activation depends on those that it is watched with.
            asked = [
                (r.name, r.k, r.gram, r.max_tokens, r.gram_tokens)
                for r in requests
                if r.group == labels[names[0]]
            ]
            self._watched[group] = run.key(activations=names, requests=sorted(asked, key=str))
            statistics = run.statistics(self._watched[group])
            if statistics is not None:
                found.append((group, statistics))
        return found

    def _codes_key(self, group: Group, task: GroupTask, run: RunFolder) -> str:
        return run.key(
            method=task.method,
            statistics=self._watched.get(group),
            weights=[
                (
                    weight.name,
                    weight.stored_k_last,
                    weight.given and dataclasses.asdict(weight.given),
                    [(dataclasses.asdict(o.form), o.k_last) for o in weight.outputs],
                )
                for weight in task.weights
            ],
            options=(task.alphas, task.clip_ratios, dataclasses.asdict(task.gptq)),
        )

    def _statistics(
        self, group: Group, batch: Batch, writer: ScratchWriter
    ) -> dict[str, TensorReference]:
        """Write a group's statistics for its workers."""
        found = pooled([batch[activation.name or ""] for activation in group.activations])
        arrays = {"mean_abs": found.mean_abs, "tokens": found.tokens, "gram": found.gram}
        given = {name: array for name, array in arrays.items() if array is not None}
        if self._run is not None:
            return self._run.keep_statistics(self._watched[group], given)
        return {name: writer.append(array) for name, array in given.items()}

    def _batch(
        self, groups: Sequence[tuple[Group, dict[str, TensorReference]]]
    ) -> Iterator[_Done]:
        """Quantise groups whose statistics are known; the largest first, or it comes last."""
        groups = sorted(groups, key=lambda item: -item[0].elements)
        futures: dict[concurrent.futures.Future[GroupResult], tuple[Group, GroupTask]] = {}
        try:
            for group, statistics in groups:
                weights = tuple(self._task(w, self._forms(w)) for w in group.weights)
                method = group.method if statistics else "rtn"
                threads = max(1, self._cores // len(groups))
                task = self._group_task(method, weights, statistics, threads)
                kept = None
                if self._run is not None:
                    kept = self._run.codes(self._codes_key(group, task, self._run), task)
                if kept is None:
                    futures[self._executor.submit(self._quantize, task)] = (group, task)
                else:
                    yield _Done(group, task, kept, [0] * len(group.weights))
            for future, (group, task) in futures.items():
                result = future.result()
                if self._run is not None:
                    key = self._codes_key(group, task, self._run)
                    self._run.keep_codes(key, task, result)
                yield _Done(group, task, result, [0] * len(group.weights))
        except BaseException:
            for future in futures:
                future.cancel()
            concurrent.futures.wait(futures)
            raise

    def _group_task(
        self,
        method: str,
        weights: tuple[WeightTask, ...],
        statistics: Mapping[str, TensorReference],
        threads: int,
    ) -> GroupTask:
        return GroupTask(
            weights,
            method,
            this_process(),
            **statistics,
            alphas=self._recipe.alphas,
            clip_ratios=self._recipe.clip_ratios,
            gptq=self._recipe.gptq,
            threads=threads,
        )

    def _forms(self, weight: Weight) -> list[BlockFormat]:
        forms = [weight.form]
        if self._recipe.share_of_8_bits and weight.form.bits < _MORE_BITS:
            forms.append(dataclasses.replace(weight.form, bits=_MORE_BITS))
        return forms

    def _task(self, weight: Weight, forms: Sequence[BlockFormat]) -> WeightTask:
        site = weight.sites[0]
        tables = any(each.activation is None for each in weight.sites)
        k_last = self._recipe.quant_format != "QDQ" or tables
        return WeightTask(
            site.weight.name or "",
            self._sources.refer_to(site.tensor),
            site.stored_k_last,
            weight.given,
            tuple(
                # A file for each: whoever works on it may write while others do.
                StoredCodes.reserve(
                    ScratchWriter(self._scratch / f"codes{next(self._numbers)}"),
                    weight.K,
                    weight.N,
                    form,
                    k_last,
                )
                for form in forms
            ),
        )


def _replace_weights(models: PairedModels, done: _Done) -> None:
    """Have the quantised model compute with what became of a group."""
    for weight, stored, *_ in done.outputs():
        for site in weight.sites:
            restored = functools.partial(_restored, site, stored, done.result.channel_scales)
            models.replace(site.node.outputs[0].name or "", site.index, restored)


def _restored(
    site: WeightSite, stored: StoredCodes, channel_scales: Floats | None
) -> npt.NDArray[Any]:
    """Return a quantised weight in the type and orientation that a node reads."""
    weight = stored.dequantized()
    if channel_scales is not None:
        weight /= channel_scales[:, None]
    return (weight.T if site.wanted_k_last else weight).astype(site.tensor.dtype.numpy())


def _choose_more_bits(results: Sequence[_Done], share: float) -> None:
    """Give more bits to weights that lose most error for each element, as far as they go.

    The error is tr(D^T H D), D = dequantised - W, H = X^T X / count: the square of what is
    added to the outputs for each token. Absolute, since layers add to one residual stream: on
    SmolLM2-135M it is the late down_proj that come first. A weight that no longer fits is
    passed over for smaller ones.
    """
    worth = []
    for done in results:
        for index, (weight, errors) in enumerate(
            zip(done.group.weights, done.result.errors, strict=True)
        ):
            size = weight.K * weight.N
            # One that was not measured, or has these bits already, gains nothing.
            gain = errors[0].added if len(errors) > 1 else 0.0
            worth.append((gain / size, size, done, index))
    left = share * sum(size for _, size, *_ in worth)
    for gain, size, done, index in sorted(worth, key=lambda item: -np.nan_to_num(item[0])):
        if gain > 0 and size <= left:
            done.chosen[index] = 1
            left -= size


def _rewrite(plan: WeightPlan, recipe: Recipe, results: Sequence[_Done]) -> QuantizeReport:
    """Put everything into the graph."""
    by_value = {w.value: stored for done in results for w, stored, *_ in done.outputs()}
    # What is to divide the output columns of weights that get quantised as well.
    divided: dict[ir.Value, list[Floats]] = {value: [] for value in by_value}
    scaled = [
        (done, activation, scales)
        for done in results
        if (scales := done.result.channel_scales) is not None
        for activation in done.group.activations
    ]
    # All folds are looked for in the float graph, before any weight of it is replaced.
    folds: dict[ir.Value, list[Fold] | None] = {}
    for done, activation, scales in scaled:
        found = None
        if recipe.fold_scales:
            found = find_folds(activation, done.uses(activation), scales)
        if found and not all(_divisible(by_value.get(f.constant), scales) for f in found):
            found = None
        folds[activation] = found
    names = FreshNames(plan.model)
    for done, activation, scales in scaled:
        if (found := folds[activation]) is not None:
            apply_folds(found, scales, divided)
        else:
            # An activation has its weights' type, whether or not the model says so.
            dtype = done.group.weights[0].sites[0].tensor.dtype
            insert_mul(activation, done.uses(activation), scales, dtype, names)
    writer = CodeWriter(names)
    rows: dict[Weight, dict[str, Any]] = {}
    for done in results:
        row: dict[str, Any] = {"reason": done.group.reason}
        if done.result.channel_scales is not None:
            apart = any(folds[activation] is None for activation in done.group.activations)
            row |= {"folded": "mul" if apart else "folded", "alpha": done.result.alpha}
        for weight, stored, errors, number in done.outputs():
            for divisor in divided[weight.value]:
                # The codes stay.
                stored_scales = stored.scales.map("r+")
                stored_scales /= divisor[:, None] if stored.k_last else divisor
            for site in weight.sites:
                writer.read_through_dequantize(site, stored)
            rows[weight] = row | {
                "form": stored.form,
                "method": weight.given.method
                if weight.given
                else "rtn"
                if number
                else done.task.method,
                "weight_error": errors.weight,
                "output_error": errors.output,
            }
    for value in by_value:
        drop_unused(value)
    return reported(plan, recipe, rows)


def _divisible(stored: StoredCodes | None, divisor: Floats) -> bool:
    """Whether the scales of a quantised weight can be divided without losing digits."""
    if stored is None or stored.form.scale_type == "float32":
        return True
    scales = stored.scales.map()
    with np.errstate(over="ignore"):
        exact = scales.astype(np.float32) / (divisor[:, None] if stored.k_last else divisor)
        error = abs(exact.astype(scales.dtype).astype(np.float32) - exact)
    return bool((error <= abs(exact) * np.finfo(scales.dtype).eps).all())
