# SPDX-License-Identifier: MIT
"""Quantises the weights of a graph in place, and says what became of each.

find the weights -> watch their activations, in batches that fit into memory
    -> quantise the weights of each activation, anywhere -> put the codes into the graph
    -> divide the activations whose weights were scaled
"""

from __future__ import annotations

__all__ = ["Calibration", "quantize_graph"]

import concurrent.futures
import contextlib
import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from ortplugins.model_io.saving import Progress
from ortplugins.model_io.tensor_reference import ScratchWriter, TensorReference
from ortplugins.quantization.methods.block_format import BlockFormat
from ortplugins.quantization.methods.nearest import Floats
from ortplugins.quantization.statistics.accumulator import ActivationStatistics, pooled
from ortplugins.quantization.weights.allocation import worth_more_bits
from ortplugins.quantization.weights.folds import (
    Fold,
    apply_folds,
    find_folds,
    insert_mul,
)
from ortplugins.quantization.weights.graph import (
    CodeWriter,
    QuantizedWeight,
    drop_unused,
)
from ortplugins.quantization.weights.group import (
    GroupResult,
    GroupTask,
    WeightTask,
    one_blas_thread,
    quantize_group,
    this_process,
)
from ortplugins.quantization.weights.plan import (
    Group,
    QuantizeSettings,
    Weight,
    WeightPlan,
)
from ortplugins.quantization.weights.report import NodeReport, QuantizeReport, counted_once
from rewrite_rules.graph.names import FreshNames

_MORE_BITS = 8
# Statistics by the activation's value, in batches that fit into memory.
Calibration = Callable[[Sequence[Group]], Iterator[dict[ir.Value, ActivationStatistics]]]


@dataclasses.dataclass(frozen=True, eq=False)
class _Done:
    """A group with what became of it."""

    group: Group
    method: str
    task: GroupTask
    result: GroupResult
    promoted: frozenset[int] = frozenset()  # weights that got more bits than were asked for

    def with_alternatives(self, chosen: Collection[int]) -> _Done:
        """Return the group with the alternatives of some of its weights."""
        weights, tasks = list(self.group.weights), list(self.task.weights)
        results = list(self.result.weights)
        for index in chosen:
            task, result = tasks[index].alternative, results[index].alternative
            assert task is not None
            assert result is not None
            weights[index] = dataclasses.replace(weights[index], form=task.form)
            tasks[index], results[index] = task, result
        return _Done(
            dataclasses.replace(self.group, weights=weights),
            self.method,
            dataclasses.replace(self.task, weights=tuple(tasks)),
            dataclasses.replace(self.result, weights=tuple(results)),
            frozenset(chosen),
        )


def quantize_graph(
    plan: WeightPlan,
    settings: QuantizeSettings,
    scratch: Path,
    *,
    calibration: Calibration | None = None,
    executor: concurrent.futures.Executor | None = None,
    progress: Progress | None = None,
) -> QuantizeReport:
    """Quantise what a plan names; the graph's new tensors lie in files of the scratch folder.

    Args:
        plan: Of :func:`~ortplugins.quantization.weights.plan.plan_weights`.
        settings: The same as there.
        scratch: A folder that stays until the model is saved, and that every worker of the
            executor sees.
        calibration: Yields statistics of activations; None for a method that needs none.
        executor: Where the work runs; threads, one per core, by default.
        progress: Called after each group: done, total, name of a node.

    Raises:
        CalibrationError: If a sample or an activation can't be used.
        ValueError: If a weight holds NaN or infinite values.
        OSError: If a file can't be written.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(one_blas_thread())
        if executor is None:
            executor = stack.enter_context(
                concurrent.futures.ThreadPoolExecutor(os.cpu_count(), "quantize")
            )
        work = _Work(settings, scratch, executor, progress, len(plan.groups))
        done = list(work.run(plan.groups, calibration))
    by_group = {id(item.group): item for item in done}
    results = [by_group[id(group)] for group in plan.groups]
    if settings.share_of_8_bits:
        results = _with_more_bits(results, settings.share_of_8_bits)
    return _rewrite(plan, settings, results)


class _Work:
    """Sends groups to an executor and collects what comes back."""

    def __init__(
        self,
        settings: QuantizeSettings,
        scratch: Path,
        executor: concurrent.futures.Executor,
        progress: Progress | None,
        total: int,
    ) -> None:
        self._settings = settings
        self._scratch = scratch
        self._executor = executor
        self._progress = progress
        self._total = total
        self._finished = 0
        self._numbers = itertools.count()
        self._sources = ScratchWriter(scratch / "weights")

    def run(self, groups: Sequence[Group], calibration: Calibration | None) -> Iterator[_Done]:
        """Quantise groups: those with statistics batch by batch, then the others."""
        left = {id(group): group for group in groups}
        if calibration is not None:
            watched = [group for group in groups if group.activations]
            for number, batch in enumerate(calibration(watched)):
                ready = [g for g in left.values() if g.activations and _covers(batch, g)]
                for group in ready:
                    del left[id(group)]
                path = self._scratch / f"statistics{number}"
                writer = ScratchWriter(path)
                yield from self._batch(
                    [(g, _statistics(g, batch, writer, self._settings)) for g in ready]
                )
                path.unlink(missing_ok=True)
        yield from self._batch([(group, {}) for group in left.values()])

    def _batch(
        self, groups: Sequence[tuple[Group, dict[str, TensorReference]]]
    ) -> Iterator[_Done]:
        """Quantise groups whose statistics are known; the largest first, or it comes last."""
        groups = sorted(groups, key=lambda item: -sum(w.K * w.N for w in item[0].weights))
        futures: dict[
            concurrent.futures.Future[GroupResult], tuple[Group, str, GroupTask]
        ] = {}
        try:
            for group, statistics in groups:
                method = self._settings.method if statistics else "rtn"
                task = self._task(group, method, statistics)
                futures[self._executor.submit(quantize_group, task)] = (group, method, task)
            for future, (group, method, task) in futures.items():
                result = future.result()
                self._finished += 1
                if self._progress is not None:
                    name = group.weights[0].sites[0].label
                    self._progress(self._finished, self._total, name)
                yield _Done(group, method, task, result)
        except BaseException:
            for future in futures:
                future.cancel()
            concurrent.futures.wait(futures)
            raise

    def _task(
        self, group: Group, method: str, statistics: dict[str, TensorReference]
    ) -> GroupTask:
        return GroupTask(
            tuple(self._weight_task(weight) for weight in group.weights),
            method,
            this_process(),
            **statistics,
            alphas=self._settings.alphas,
            clip_ratios=self._settings.clip_ratios,
            # Activations have their weights' type, and these scales of the same type.
            round_scales=group.weights[0].form.scale_type,
        )

    def _weight_task(self, weight: Weight) -> WeightTask:
        task = self._room(weight, weight.form, self._sources.refer_to(weight.tensor))
        if self._settings.share_of_8_bits and weight.form.bits < _MORE_BITS:
            form = dataclasses.replace(weight.form, bits=_MORE_BITS)
            return dataclasses.replace(task, alternative=self._room(weight, form, task.weight))
        return task

    def _room(self, weight: Weight, form: BlockFormat, source: TensorReference) -> WeightTask:
        """Make a task, and files for what comes out of it."""
        k, n = weight.K, weight.N
        k_last = self._settings.codes_k_last or weight.sites[0].activation is None
        # A file for each weight: whoever works on it may write while others do.
        writer = ScratchWriter(self._scratch / f"codes{next(self._numbers)}")
        blocks = form.blocks(k)
        grid = (n, blocks) if k_last else (blocks, n)
        return WeightTask(
            name=weight.value.name or "",
            weight=source,
            stored_k_last=weight.stored_k_last,
            form=form,
            codes_k_last=k_last,
            codes=writer.reserve((-(-k * n * form.bits // 8),), np.uint8),
            scales=writer.reserve(grid, np.dtype(form.scale_type)),
            zero_points=None if form.is_symmetric else writer.reserve(grid, np.uint8),
        )


def _covers(batch: dict[ir.Value, ActivationStatistics], group: Group) -> bool:
    return all(activation in batch for activation in group.activations)


def _statistics(
    group: Group,
    batch: dict[ir.Value, ActivationStatistics],
    writer: ScratchWriter,
    settings: QuantizeSettings,
) -> dict[str, TensorReference]:
    """Write a group's statistics for its workers."""
    found = pooled([batch[activation] for activation in group.activations])
    references = {
        "mean_abs": writer.append(found.mean_abs),
        "tokens": writer.append(found.tokens),
    }
    if found.gram is not None and settings.needs_gram:
        references["gram"] = writer.append(found.gram)
    return references


def _with_more_bits(results: Sequence[_Done], share: float) -> list[_Done]:
    """Give more bits to weights where they take away the most error, as far as they go."""
    places = [(i, j) for i, done in enumerate(results) for j in range(len(done.group.weights))]
    errors, sizes = [], []
    for i, j in places:
        result, weight = results[i].result.weights[j], results[i].group.weights[j]
        measured = result.alternative is not None and not math.isnan(result.added_error)
        errors.append(result.added_error if measured else 0.0)
        sizes.append(weight.K * weight.N)
    chosen = {places[index] for index in worth_more_bits(errors, sizes, share)}
    return [
        done.with_alternatives({i for number, i in chosen if number == position})
        for position, done in enumerate(results)
    ]


def _rewrite(
    plan: WeightPlan, settings: QuantizeSettings, results: Sequence[_Done]
) -> QuantizeReport:
    """Put everything into the graph."""
    # All folds are looked for in the float graph, before any weight of it is replaced.
    folds: dict[ir.Value, list[Fold] | None] = {}
    quantized = {
        weight: _quantized(weight, done.task.weights[index])
        for done in results
        for index, weight in enumerate(done.group.weights)
    }
    divided: dict[ir.Value, list[Floats]] = {weight.value: [] for weight in quantized}
    by_value = {weight.value: codes for weight, codes in quantized.items()}
    for done in results:
        scales = done.result.channel_scales
        if scales is not None:
            for activation in done.group.activations:
                found = None
                if settings.fold_scales:
                    found = find_folds(activation, _uses(done.group, activation), scales)
                if found and not all(_divisible(by_value, fold, scales) for fold in found):
                    found = None
                folds[activation] = found
    names = FreshNames(plan.model)
    writer = CodeWriter(names)
    for done in results:
        scales = done.result.channel_scales
        if scales is None:
            continue
        for activation in done.group.activations:
            found = folds[activation]
            if found is not None:
                apply_folds(found, scales, divided)
            else:
                # An activation has its weights' type, whether or not the model says so.
                dtype = done.group.weights[0].tensor.dtype
                insert_mul(activation, _uses(done.group, activation), scales, dtype, names)
    rows: dict[str, list[NodeReport]] = {}
    for row in plan.refused:
        rows.setdefault(row.node, []).append(row)
    for done in results:
        folded = "" if done.result.channel_scales is None else _how(done.group, folds)
        for index, weight in enumerate(done.group.weights):
            for scales in divided[weight.value]:
                _divide_columns(quantized[weight], scales)
            for site in weight.sites:
                writer.read_through_dequantize(site, quantized[weight])
            size = settings.stored_bytes(weight)
            for row in _rows(weight, size, done, index, folded):
                rows.setdefault(row.node, []).append(row)
    for done in results:
        for weight in done.group.weights:
            drop_unused(weight.value)
    nodes = counted_once(rows[name].pop(0) for name in plan.order)
    return QuantizeReport(settings.method, nodes, tuple(plan.notes))


def _uses(group: Group, activation: ir.Value) -> list[tuple[ir.Node, int]]:
    """Where an activation meets the weights of its group."""
    return [
        (site.node, 1 - site.index)
        for weight in group.weights
        for site in weight.sites
        if site.activation is activation
    ]


def _how(group: Group, folds: dict[ir.Value, list[Fold] | None]) -> str:
    return "mul" if any(folds[a] is None for a in group.activations) else "folded"


def _quantized(weight: Weight, task: WeightTask) -> QuantizedWeight:
    return QuantizedWeight(
        weight.value,
        weight.stored_k_last,
        weight.K,
        weight.N,
        weight.form,
        task.codes_k_last,
        task.codes,
        task.scales,
        task.zero_points,
    )


def _divisible(
    quantized: dict[ir.Value, QuantizedWeight], fold: Fold, divisor: Floats
) -> bool:
    """Whether the scales of a quantised weight can be divided without losing digits."""
    weight = quantized.get(fold.constant)
    if weight is None or weight.form.scale_type == "float32":
        return True
    scales = weight.scales.map()
    with np.errstate(over="ignore"):
        exact = scales.astype(np.float32) / (divisor[:, None] if weight.k_last else divisor)
        error = abs(exact.astype(scales.dtype).astype(np.float32) - exact)
    return bool((error <= abs(exact) * np.finfo(scales.dtype).eps).all())


def _divide_columns(weight: QuantizedWeight, divisor: Floats) -> None:
    """Divide the columns of a quantised weight: its scales are, its codes stay."""
    scales = weight.scales.map("r+")
    scales /= divisor[:, None] if weight.k_last else divisor


def _rows(
    weight: Weight, size: int, done: _Done, index: int, folded: str
) -> Iterator[NodeReport]:
    result = done.result.weights[index]
    for position, site in enumerate(weight.sites):
        yield NodeReport(
            node=site.label,
            op_type=site.node.op_type,
            weight=weight.value.name or "",
            K=weight.K,
            N=weight.N,
            bits=weight.form.bits,
            block_size=weight.form.block_size,
            method="rtn" if index in done.promoted else done.method,
            alpha=done.result.alpha if done.result.channel_scales is not None else math.nan,
            folded=folded,
            weight_error=result.weight_error,
            output_error=result.output_error,
            bytes_before=weight.nbytes,
            bytes_after=0 if position else size,
            reason=done.group.reason,
        )
