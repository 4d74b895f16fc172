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
import math
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
from ortplugins.quantization.methods.nearest import BlockFormat, Floats
from ortplugins.quantization.statistics.accumulator import (
    ActivationRequest,
    ActivationStatistics,
    pooled,
)
from ortplugins.quantization.statistics.collect import Calibration, collect
from ortplugins.quantization.statistics.paired import PairedModels
from ortplugins.quantization.weights.graph import (
    CodeWriter,
    drop_unused,
    find_folds,
    insert_mul,
)
from ortplugins.quantization.weights.group import (
    GroupResult,
    GroupTask,
    StoredCodes,
    WeightErrors,
    WeightTask,
    one_blas_thread,
    quantize_group,
    working_bytes,
)
from ortplugins.quantization.weights.plan import (
    Group,
    QuantizeReport,
    Weight,
    WeightPlan,
    reported,
)
from ortplugins.quantization.weights.recipe import METHODS, Recipe
from ortplugins.quantization.weights.run_folder import NOTHING_KEPT, RunFolder
from ortplugins.quantization.weights.sites import WeightSite
from rewrite_rules.graph.initializers import FreshNames

_MORE_BITS = 8
# Of each activation: what errors are measured on. Searches look at the second moments.
_SAMPLED_TOKENS = 128

Batch = Mapping[str, ActivationStatistics]


@dataclasses.dataclass(eq=False)
class _Done:
    """A group with what became of it."""

    group: Group
    task: GroupTask
    result: GroupResult
    # Of which weights the second output is taken.
    more_bits: set[int] = dataclasses.field(default_factory=set)

    def outputs(self) -> Iterator[tuple[Weight, StoredCodes, WeightErrors, bool]]:
        """Yield each weight with its chosen output, and whether that has more bits."""
        both = zip(self.group.weights, self.task.weights, self.result.errors, strict=True)
        for index, (weight, task, errors) in enumerate(both):
            more = index in self.more_bits
            yield weight, task.outputs[more], errors[more], more

    def uses(self, activation: ir.Value) -> list[tuple[ir.Node, int]]:
        """Return where an activation meets the weights of the group."""
        sites = (site for weight in self.group.weights for site in weight.sites)
        return [(s.node, 1 - s.index) for s in sites if s.activation is activation]


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
        work = _Work(plan.model, recipe, scratch, calibration, run, executor, quantize, cores)
        first, second = plan.groups, []
        if calibration is not None and recipe.quantized_inputs:
            # With one place in the graph to quantise them at, and a method for it.
            alone = (group for group in plan.groups if len(group.activations) == 1)
            second = [group for group in alone if "gptq" in METHODS[group.method]]
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

        take_in(work.run(first))
        if recipe.share_of_8_bits:
            _choose_more_bits([by_group[group] for group in first], recipe.share_of_8_bits)
        if calibration is not None and second:
            models = PairedModels(plan.model, calibration)
            take_in(work.run_in_order(second, by_group, models))
    return _rewrite(plan, recipe, [by_group[group] for group in plan.groups])


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

    _model: ir.Model
    _recipe: Recipe
    _scratch: Path
    _calibration: Calibration | None
    _run: RunFolder
    _executor: concurrent.futures.Executor
    _quantize: Callable[[GroupTask], GroupResult]
    _cores: int  # of threads that groups share

    def __post_init__(self) -> None:
        self._watched: dict[Group, str] = {}  # the keys of statistics in the run folder
        self._numbers = itertools.count()
        self._sources = ScratchWriter(self._scratch / "weights")

    def run(self, groups: Sequence[Group]) -> Iterator[_Done]:
        """Quantise groups: those with statistics batch by batch, then the others."""
        left = dict.fromkeys(groups)
        if self._calibration is not None:
            requests = self._requests(groups)
            kept = self._kept_statistics(groups, requests)
            yield from self._batch(kept)
            for group, _ in kept:
                del left[group]
            names = {name for group in left for name in group.names}
            wanted = [[r for r in together if r.name in names] for together in requests]
            wanted = [together for together in wanted if together]
            for batch in collect(self._model, wanted, self._calibration) if wanted else ():
                ready = [g for g in left if g.activations and g.names[0] in batch]
                for group in ready:
                    del left[group]
                writer = self._writer("statistics")
                kept = [(group, self._statistics(group, batch, writer)) for group in ready]
                del batch  # in files now
                yield from self._batch(kept)
                writer.path.unlink(missing_ok=True)
        yield from self._batch([(group, {}) for group in left])

    def run_in_order(
        self, groups: Sequence[Group], found: Mapping[Group, _Done], models: PairedModels
    ) -> Iterator[_Done]:
        """Quantise groups of one activation each, for the inputs that those before leave.

        ``found`` is what became of others, and in a first round of these.
        """
        fixed = [done for group, done in found.items() if group not in groups]
        for done in fixed:
            _replace_weights(models, done)
        # Codes depend on all of those before them.
        before: object = [
            (self._codes_key(done.task, done.group), sorted(done.more_bits)) for done in fixed
        ]
        for group in sorted(groups, key=lambda group: models.places.get(group.names[0], 0)):
            forms = [weight.form for weight in group.weights]
            if group in found:
                forms = [stored.form for _, stored, *_ in found[group].outputs()]
            weights = tuple(map(self._task, group.weights, forms))
            task = GroupTask(weights, self._recipe, group.method, {}, self._cores)
            self._watched[group] = self._run.key(codes_before=before)
            before = key = self._codes_key(task, group)
            result = self._run.codes(key, task)
            if result is None:
                (request,) = self._requests([group])[0]
                writer = self._writer("statistics")
                statistics = models.statistics(request, writer)
                watched = dataclasses.replace(task, statistics=statistics)
                result = self._executor.submit(self._quantize, watched).result()
                writer.path.unlink()
                self._run.keep_codes(key, task, result)
            done = _Done(group, task, result)
            _replace_weights(models, done)
            yield done

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
    ) -> list[tuple[Group, dict[str, TensorReference]]]:
        """Return the groups whose statistics the run folder has; note the keys of all."""
        # What is kept of an activation depends on those that it is watched with.
        together = {request.name: each for each in requests for request in each}
        found = []
        for group in groups:
            if not group.activations:
                continue
            names = group.names
            asked = [dataclasses.astuple(request) for request in together[names[0]]]
            self._watched[group] = self._run.key(
                activations=names, requests=sorted(asked, key=str)
            )
            statistics = self._run.statistics(self._watched[group])
            if statistics is not None:
                found.append((group, statistics))
        return found

    def _codes_key(self, task: GroupTask, group: Group) -> str:
        recipe = self._recipe
        return self._run.key(
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
            options=(recipe.alphas, recipe.clip_ratios, dataclasses.asdict(recipe.gptq)),
        )

    def _statistics(
        self, group: Group, batch: Batch, writer: ScratchWriter
    ) -> dict[str, TensorReference]:
        """Write a group's statistics for its workers."""
        given = pooled([batch[name] for name in group.names]).arrays()
        if self._run.keeps:
            return self._run.keep_statistics(self._watched[group], given)
        return {name: writer.append(array) for name, array in given.items()}

    def _batch(
        self, groups: Sequence[tuple[Group, dict[str, TensorReference]]]
    ) -> Iterator[_Done]:
        """Quantise groups whose statistics are known; the largest first, or it comes last."""
        groups = sorted(groups, key=lambda item: -item[0].elements)
        futures: dict[Any, tuple[Group, GroupTask, str]] = {}
        try:
            for group, statistics in groups:
                weights = tuple(map(self._task, group.weights))
                method = group.method if statistics else "rtn"
                threads = max(1, self._cores // len(groups))
                task = GroupTask(weights, self._recipe, method, statistics, threads)
                key = self._codes_key(task, group)
                kept = self._run.codes(key, task)
                if kept is None:
                    futures[self._executor.submit(self._quantize, task)] = (group, task, key)
                else:
                    yield _Done(group, task, kept)
            for future, (group, task, key) in futures.items():
                result = future.result()
                self._run.keep_codes(key, task, result)
                yield _Done(group, task, result)
        except BaseException:
            for future in futures:
                future.cancel()
            concurrent.futures.wait(futures)
            raise

    def _task(self, weight: Weight, decided: BlockFormat | None = None) -> WeightTask:
        """Return the task of a weight in one form; two where that is yet to be decided."""
        forms = [decided or weight.form]
        if decided is None and self._recipe.share_of_8_bits and forms[0].bits < _MORE_BITS:
            forms.append(dataclasses.replace(weight.form, bits=_MORE_BITS))
        site, size = weight.sites[0], (weight.K, weight.N)
        k_last = self._recipe.quant_format != "QDQ" or weight.is_table
        source = self._sources.refer_to(site.tensor)
        # A file for each: whoever works on it may write while others do.
        outputs = (
            StoredCodes.reserve(self._writer("codes"), *size, form, k_last) for form in forms
        )
        name = site.weight.name or ""
        return WeightTask(name, source, site.stored_k_last, weight.given, tuple(outputs))


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
            done.more_bits.add(index)
            left -= size


def _rewrite(plan: WeightPlan, recipe: Recipe, results: Sequence[_Done]) -> QuantizeReport:
    """Put everything into the graph."""
    names = FreshNames(plan.model)
    by_value = {w.value: stored for done in results for w, stored, *_ in done.outputs()}
    divided, apart = _divide_activations(recipe, results, by_value, names)
    writer = CodeWriter(names)
    rows: dict[Weight, dict[str, Any]] = {}
    for done in results:
        row: dict[str, Any] = {"reason": done.group.reason}
        if done.result.channel_scales is not None:
            folded = apart.isdisjoint(done.group.activations)
            row |= {"folded": "folded" if folded else "mul", "alpha": done.result.alpha}
        for weight, stored, errors, more in done.outputs():
            for divisor in divided[weight.value]:
                # The codes stay.
                stored_scales = stored.scales.map("r+")
                stored_scales /= divisor[:, None] if stored.k_last else divisor
            for site in weight.sites:
                writer.read_through_dequantize(site, stored)
            rows[weight] = row | {
                "form": stored.form,
                "method": "rtn" if more else done.task.method,
                "weight_error": errors.weight,
                "output_error": errors.output,
            }
    for value in by_value:
        drop_unused(value)
    return reported(plan, recipe, rows)


def _divide_activations(
    recipe: Recipe,
    results: Sequence[_Done],
    by_value: Mapping[ir.Value, StoredCodes],
    names: FreshNames,
) -> tuple[dict[ir.Value, list[Floats]], set[ir.Value]]:
    """Divide activations by what their weights' rows were multiplied by.

    Return what is to divide the output columns of weights that are quantised as well, and the
    activations that a Mul of their own divides.
    """
    divided: dict[ir.Value, list[Floats]] = {value: [] for value in by_value}
    found = []
    # All folds are looked for in the float graph, before any weight of it is replaced.
    for done in results:
        if (scales := done.result.channel_scales) is None:
            continue
        for activation in done.group.activations:
            uses, folds = done.uses(activation), None
            if recipe.fold_scales:
                folds = find_folds(activation, uses, scales)
            if folds and not all(_divisible(by_value.get(f.constant), scales) for f in folds):
                folds = None
            # An activation has its weights' type, whether or not the model says so.
            dtype = done.group.weights[0].sites[0].tensor.dtype
            found.append((folds, activation, uses, scales, dtype))
    for folds, activation, uses, scales, dtype in found:
        if folds is None:
            insert_mul(activation, uses, scales, dtype, names)
        for fold in folds or ():
            if fold.constant in divided:
                divided[fold.constant].append(scales)
            else:
                fold.constant.const_value = fold.quotient(scales)
    return divided, {activation for folds, activation, *_ in found if folds is None}


def _divisible(stored: StoredCodes | None, divisor: Floats) -> bool:
    """Whether the scales of a quantised weight can be divided without losing digits."""
    if stored is None or stored.form.scale_type == "float32":
        return True
    scales = stored.scales.map()
    with np.errstate(over="ignore"):
        exact = scales.astype(np.float32) / (divisor[:, None] if stored.k_last else divisor)
        error = abs(exact.astype(scales.dtype).astype(np.float32) - exact)
    return bool((error <= abs(exact) * np.finfo(scales.dtype).eps).all())
