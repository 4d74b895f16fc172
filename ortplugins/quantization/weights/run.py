# SPDX-License-Identifier: MIT
"""Quantises the weights of a graph in place, and says what became of each.

find the weights -> calibrate their activations, in batches that fit into memory
    -> quantise the weights of each activation, anywhere
    -> choose what gets 8 bits
    -> if asked for, again in the graph's order, for the inputs that the weights before leave
    -> put the codes into the graph, and divide the activations whose weights were scaled
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ortplugins.errors import CalibrationError
from ortplugins.model_io.saving import Progress
from ortplugins.quantization.kv_cache import quantize_caches
from ortplugins.quantization.methods.nearest import Floats
from ortplugins.quantization.statistics.accumulator import (
    ActivationRequest,
    ActivationStatistics,
)
from ortplugins.quantization.statistics.collect import Calibration, collect
from ortplugins.quantization.statistics.paired import PairedModels
from ortplugins.quantization.tensor_reference import ScratchWriter, TensorReference
from ortplugins.quantization.w8a8 import quantize_products
from ortplugins.quantization.weights.graph import write_codes
from ortplugins.quantization.weights.plan import WeightPlan, reported
from ortplugins.quantization.weights.quantize_group import (
    one_blas_thread,
    quantize_group,
    this_process,
    working_bytes,
)
from ortplugins.quantization.weights.recipe import METHODS, Recipe
from ortplugins.quantization.weights.report import QuantizeReport
from ortplugins.quantization.weights.uses import WeightUse
from ortplugins.quantization.weights.weight import UNREACHED, Group, Weight
from rewrite_rules.graph.nodes import captures

_MORE_BITS = 8
_SHOWN = 8  # names in a note
# Operators whose results are as many as a run finds, and those that put rows back.
_CHOOSING = frozenset({"Compress", "NonMaxSuppression", "NonZero", "TopK", "Unique"})
_PUT_BACK = frozenset({"ScatterElements", "ScatterND"})
# Of each activation: what errors are measured on. Searches look at the second moments.
_SAMPLED_TOKENS = 128


def quantize_graph(
    plan: WeightPlan,
    recipe: Recipe,
    scratch: Path,
    calibration: Calibration | None = None,
    *,
    executor: concurrent.futures.Executor | None = None,
    max_memory: int = 1 << 30,
    progress: Progress | None = None,
) -> QuantizeReport:
    """Quantise what a plan names; the graph's new tensors lie in files of the scratch folder.

    The folder stays until the model is saved, and every worker of the executor sees it; by
    default threads do the work, one per core, and share ``max_memory``. Without samples, all
    weights are rounded to nearest.
    """
    if recipe.for_integers:
        quantize_products(plan, recipe, calibration)
        return _with_caches(plan, recipe, calibration)
    run = _Run(plan, recipe, scratch, calibration, executor, max_memory)
    at_once, in_order = _schedule(plan, recipe, calibration)
    total, done = sum(group.elements for group in (*at_once, *in_order)), 0
    with one_blas_thread():
        for group in itertools.chain(
            run.at_once(at_once, in_order), run.in_order(at_once, in_order)
        ):
            done += group.elements
            if progress is not None:
                progress(done, total, group.weights[0].uses[0].label)
    if calibration is not None:
        _note_unreached(plan)
    write_codes(plan, recipe, ScratchWriter(scratch / "scales"))
    return _with_caches(plan, recipe, calibration)


def _with_caches(
    plan: WeightPlan, recipe: Recipe, calibration: Calibration | None
) -> QuantizeReport:
    """Quantise the caches, too, if the recipe says so; report all."""
    if recipe.kv_bits and calibration is not None:
        plan.notes.append(quantize_caches(plan.model, calibration))
    return reported(plan, recipe)


def _schedule(
    plan: WeightPlan, recipe: Recipe, calibration: Calibration | None
) -> tuple[list[Group], list[Group]]:
    """Return the groups that are quantised for inputs of the float model, and of the other."""
    if calibration is None or not recipe.quantized_inputs:
        return plan.groups, []
    # With one place in the graph to quantise them at, and a method for it; where both models
    # have the same tokens.
    chosen = _chosen_rows(plan)
    alone = (group for group in plan.groups if len(group.activations) == 1)
    in_order = [
        group
        for group in alone
        if "gptq" in METHODS[group.method] and chosen.isdisjoint(group.activations)
    ]
    if recipe.share_of_8_bits:  # which is decided by what the float model's inputs find
        return plan.groups, in_order
    return [group for group in plan.groups if group not in in_order], in_order


def _chosen_rows(plan: WeightPlan) -> set[ir.Value]:
    """Return the values whose rows depend on weights, as those that go to one expert."""
    changed = {use.node for group in plan.groups for w in group.weights for use in w.uses}
    varying, chosen = set[ir.Value](), set[ir.Value]()
    for node in plan.model.graph:
        reads = [*node.inputs, *captures(node)]
        varies = node in changed or not varying.isdisjoint(reads)
        rows = reads[:1] if node.op_type in _PUT_BACK else reads
        if varies:
            varying.update(node.outputs)
        if (varies and node.op_type in _CHOOSING) or not chosen.isdisjoint(rows):
            chosen.update(node.outputs)
    return chosen


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
    names = [weight.name for group in unreached for weight in group.weights]
    if names:
        shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
        plan.notes.append(
            f"{len(names)} weights are rounded to nearest, as no token of the samples reaches "
            f"them: {shown}"
        )


@dataclasses.dataclass(eq=False)
class _Run:
    """Sends groups to an executor and collects what comes back."""

    _plan: WeightPlan
    _recipe: Recipe
    _scratch: Path
    _calibration: Calibration | None
    _executor: concurrent.futures.Executor | None
    _max_memory: int

    def __post_init__(self) -> None:
        self._numbers = itertools.count()
        self._floats = ScratchWriter(self._scratch / "weights")

    def at_once(self, groups: Sequence[Group], again: Sequence[Group]) -> Iterator[Group]:
        """Quantise groups for inputs of the float model; then choose what gets 8 bits.

        Some are quantised ``again`` afterwards, and get their codes of 8 bits then.
        """
        for group in groups:
            group.undecided = self._recipe.share_of_8_bits > 0
        for ready in self._calibrated(groups):
            yield from self._quantized(ready)
        chosen = _gain_most(groups, self._recipe.share_of_8_bits)
        if self._recipe.share_of_8_bits and not chosen:
            share = f"{self._recipe.share_of_8_bits:g} of all weights"
            self._plan.notes.append(
                f"share_of_8_bits has no effect: {share} is less than any weight that gains"
            )
        parts = []
        for group in groups:
            wide = {w: _with_more_bits(w) for w in group.weights if w in chosen}
            if wide and not (group in again and METHODS[group.method]):
                parts.append(self._part(group, list(wide.values())))
            group.undecided = False
            group.weights = [wide.get(weight, weight) for weight in group.weights]
        for _ in self._quantized(parts):
            pass  # these are weights of the groups

    def _part(self, group: Group, weights: list[Weight]) -> Group:
        """Return some weights of a group that is done, to be rounded behind its scales."""
        # Errors are measured on tokens; see _calibrated.
        return dataclasses.replace(
            group,
            weights=weights,
            method="rtn",
            statistics=[
                {k: v for k, v in one.items() if k != "gram"} for one in group.statistics
            ],
            undecided=False,
        )

    def in_order(self, done: Sequence[Group], groups: Sequence[Group]) -> Iterator[Group]:
        """Quantise groups of one activation each, for the inputs that those before leave.

        Groups that are done and not among these stay; so does what no token reaches.
        """
        groups = [group for group in groups if METHODS[group.method]]
        if self._calibration is None or not groups:
            return
        models = PairedModels(self._plan.model, self._calibration)
        fixed = [group for group in done if group not in groups]
        for group in fixed:
            _replace_weights(models, group)
        for group in sorted(groups, key=lambda group: models.places.get(group.names[0], 0)):
            yield from self._quantized([group], models)
            _replace_weights(models, group)

    def _calibrated(self, groups: Sequence[Group]) -> Iterator[list[Group]]:
        """Yield groups as soon as their statistics are known; those without any come last."""
        waiting = [group for group in groups if group.activations and self._calibration]
        last = [group for group in groups if group not in waiting]
        requests = self._requests(waiting)
        known: dict[str, dict[str, TensorReference]] = {}
        batches: Iterable[dict[str, ActivationStatistics | None]] = ()
        if requests and self._calibration is not None:
            batches = collect(self._plan.model, requests.values(), self._calibration)
        for batch in batches:
            for name in list(batch):  # nothing holds them once they are in files
                known[name] = self._keep(batch.pop(name))
            ready = [group for group in waiting if known.keys() >= set(group.names)]
            waiting = [group for group in waiting if group not in ready]
            for group in ready:
                group.statistics = [known[name] for name in group.names if known[name]]
            yield ready
            for name in known.keys() - {name for group in waiting for name in group.names}:
                self._forget(known.pop(name))
        yield last

    def _keep(self, found: ActivationStatistics | None) -> dict[str, TensorReference]:
        """Write statistics to files of their own, to be removed one by one."""
        arrays = {} if found is None else found.arrays()
        return {
            name: ScratchWriter(self._scratch / f"{name}{next(self._numbers)}").append(array)
            for name, array in arrays.items()
        }

    def _forget(self, statistics: Mapping[str, TensorReference]) -> None:
        """Remove statistics that nobody reads any more."""
        for name, reference in statistics.items():
            # Tokens are read again where some weights get 8 bits.
            if name == "gram" or not self._recipe.share_of_8_bits:
                Path(reference.path).unlink(missing_ok=True)

    def _quantized(
        self, groups: Sequence[Group], models: PairedModels | None = None
    ) -> Iterator[Group]:
        """Quantise groups whose statistics are known, or found by running two models.

        The largest come first, or they would come last. Without an executor, as many threads
        work as there are cores, and as fit into the memory.
        """
        ordered = sorted(groups, key=lambda group: -group.elements)
        if self._executor is not None:
            yield from self._sent(ordered, self._executor, 1, models)
            return
        cores = os.cpu_count() or 1
        shares = [(n, cores // n) for n in range(min(cores, max(1, len(groups))), 0, -1)]
        shares += [(1, n) for n in range(cores - 1, 0, -1)]

        def share(group: Group) -> tuple[int, int]:
            """How many groups like one fit at once, and the threads that each of them has."""
            fitting = (
                s for s in shares if s[0] * working_bytes(group, s[1]) <= self._max_memory
            )
            return next(fitting, (1, 1))

        for (workers, threads), alike in itertools.groupby(ordered, share):
            with concurrent.futures.ThreadPoolExecutor(workers, "quantize") as executor:
                yield from self._sent(alike, executor, threads, models)

    def _sent(
        self,
        groups: Iterable[Group],
        executor: concurrent.futures.Executor,
        threads: int,
        models: PairedModels | None,
    ) -> Iterator[Group]:
        """Have an executor quantise groups."""
        quantize = functools.partial(
            quantize_group, recipe=self._recipe, coordinator=this_process()
        )
        futures: dict[concurrent.futures.Future[Group], Group] = {}
        paired = ScratchWriter(self._scratch / f"paired{next(self._numbers)}")
        try:
            for group in groups:
                self._prepare(group, threads)
                if models is not None:
                    (request,) = self._requests([group]).values()
                    found = models.statistics(request, paired)
                    group.statistics = [found] if found else []
                writer = ScratchWriter(self._scratch / f"codes{next(self._numbers)}")
                for weight in group.weights:
                    weight.make_room(writer)
                futures[executor.submit(quantize, group.for_worker())] = group
            for future, group in futures.items():
                group.take_in(future.result())
                yield group
        except BaseException:
            for future in futures:
                future.cancel()
            concurrent.futures.wait(futures)
            raise
        paired.path.unlink(missing_ok=True)

    def _requests(self, groups: Iterable[Group]) -> dict[str, ActivationRequest]:
        """Ask for each activation once, for the most that a group wants of it, by its name."""
        found: dict[str, ActivationRequest] = {}
        for group in groups:
            steps, k = METHODS[group.method], group.weights[0].K
            # Feedback between rows needs all tokens; searches of scales and ranges find the
            # same in twice as many as there are channels.
            tokens = math.inf if "gptq" in steps else 2 * k
            for name in group.names:
                request = ActivationRequest(name, k, bool(steps), _SAMPLED_TOKENS, tokens)
                both = request, found.get(name, request)
                found[name] = max(both, key=lambda r: (r.gram, r.gram_tokens))
        return found

    def _prepare(self, group: Group, threads: int) -> None:
        """Say where floats are, and how codes are to lie."""
        group.threads = threads
        for weight in group.weights:
            weight.k_last = self._recipe.quant_format != "QDQ" or weight.is_table
            weight.floats = self._floats.refer_to(weight.uses[0].tensor)


def _replace_weights(models: PairedModels, group: Group) -> None:
    """Have the quantised model compute with what became of a group."""
    for weight in group.weights:
        for use in weight.uses:
            restored = functools.partial(_restored, use, weight, group.channel_scales)
            models.replace(use.node, use.index, restored)


def _restored(
    use: WeightUse, weight: Weight, channel_scales: Floats | None
) -> npt.NDArray[Any]:
    """Return a quantised weight in the type and orientation that a node reads."""
    matrix = weight.dequantized()
    if channel_scales is not None:
        matrix /= channel_scales[:, None]
    return (matrix.T if use.wanted_k_last else matrix).astype(use.tensor.dtype.numpy())


def _gain_most(groups: Sequence[Group], share: float) -> set[Weight]:
    """Return the weights that lose most error for each element by more bits, up to a share.

    The error is tr(D^T H D), D = dequantised - W, H = X^T X / count: the square of what is
    added to the outputs for each token. Absolute, since layers add to one residual stream: on
    SmolLM2-135M it is the late down_proj that come first. A weight that no longer fits is
    passed over for smaller ones.
    """
    weights = [weight for group in groups for weight in group.weights]
    left = share * sum(weight.elements for weight in weights)

    def gain(weight: Weight) -> float:
        # One that was not measured, or has these bits already, gains nothing.
        fixed = weight.form.bits >= _MORE_BITS
        added = 0.0 if fixed else np.nan_to_num(weight.errors.added)
        return float(added / weight.elements)

    chosen = set()
    for weight in sorted(weights, key=gain, reverse=True):
        if gain(weight) > 0 and weight.elements <= left:
            chosen.add(weight)
            left -= weight.elements
    return chosen


def _with_more_bits(weight: Weight) -> Weight:
    form = dataclasses.replace(weight.form, bits=_MORE_BITS)
    return dataclasses.replace(weight, form=form, method="rtn")
