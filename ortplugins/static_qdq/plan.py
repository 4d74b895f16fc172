# SPDX-License-Identifier: MIT
"""Which activations of an 8-bit QDQ model deserve 16 bits: those that cost the outputs most.

Each grid is switched on alone, all others off: the error at the outputs that it causes by
itself ranks it. What shares a grid (a Reshape's input and output) is one unit. One session
serves all settings, as opening one folds and packs all weights; a switch is an input:

    x -> Q -> DQ -> consumers        x -> Where(switch, Q -> DQ, Clip) -> consumers

Past the grid a value is clipped to the grid's range and not rounded: what a grid of infinitely
many codes would do. Plain ``x`` would be another function, as onnxruntime's quantiser drops a
Relu or Clip whose range the grid has. With the outputs r of the model that has all grids off,

    error  = sum |y - r|^2 / sum |r|^2     the sums over all samples,
    cosine = y . r / (|y| |r|)             and of both the mean over the outputs

Errors add up where they are small, so this order is hard to beat: on MiniLM-L6 (96
activations), from 1 to 24 promoted, a search that measures twelve candidates at each step
finds sets whose error is smaller by 4 % at most.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime

from ortplugins.errors import QuantizationError
from ortplugins.measurement.difference import DifferenceSum
from ortplugins.model_io.saving import Progress, save_with_data
from ortplugins.optimization.shape_inference import infer_shapes
from ortplugins.runtime.stock_session import fetch, open_model
from ortplugins.samples.made_up import Feed
from rewrite_rules.graph.initializers import FreshNames, new_initializer
from rewrite_rules.mixed_precision_boundaries.quantized_graph import (
    QuantizedGraph,
    QuantizedTensor,
)
from rewrite_rules.mixed_precision_boundaries.regions import sharing_groups

_EIGHT_BITS = (ir.DataType.UINT8, ir.DataType.INT8)
_COMPARED = frozenset({"tensor(float)", "tensor(float16)", "tensor(double)"})


@dataclasses.dataclass(frozen=True)
class Deviation:
    """How far outputs are from those of unquantised activations.

    Attributes:
        error: Squared error over all samples relative to the reference's energy, the mean over
            the outputs; infinite where an output is not finite.
        cosine: To the reference, over all samples, the mean over the outputs.
    """

    error: float
    cosine: float


@dataclasses.dataclass(frozen=True)
class Unit:
    """What gets more bits together.

    Attributes:
        names: An activation, or several that share a grid; these are counted.
        switches: That are on as long as it has 8 bits.
        operator: What computes the first activation; empty for an input of the graph.
        error: At the outputs, with only this in 8 bits; NaN before it is measured.
    """

    names: tuple[str, ...]
    switches: tuple[str, ...]
    operator: str
    error: float = math.nan


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrecisionPlan:
    """Which activations to promote, and what it brings.

    Attributes:
        promoted: The chosen activations, the most worthwhile first.
        ranking: All units, the worst in 8 bits first.
        activations: Quantised activations in the model.
        before: Deviation of the model with nothing promoted.
        after: With the grids of what was promoted switched off.
    """

    promoted: tuple[str, ...]
    ranking: tuple[Unit, ...]
    activations: int
    before: Deviation
    after: Deviation


def plan_precision(
    model: ir.Model,
    samples: Sequence[Feed],
    scratch: Path,
    *,
    budget: float | None,
    max_16bit: float | None,
    providers: Sequence[Any],
    progress: Progress | None,
) -> PrecisionPlan:
    """Choose the activations of a QDQ model, which is not changed, that get 16 bits.

    A copy is written to ``scratch``, a folder. Other arguments are those of
    :func:`.quantize_static_mixed`.

    Raises:
        CalibrationError: If onnxruntime fails.
        QuantizationError: If the model has no 8-bit activation, or no promotion reaches the
            budget: tells the best that is.
    """
    switched = model.clone()
    infer_shapes(switched)
    graph = QuantizedGraph(switched)
    count = len(graph.tensors)
    units, switches = _switched_units(graph, switched)
    if not units:
        raise QuantizationError(
            "the model has no 8-bit activation between a QuantizeLinear and a "
            "DequantizeLinear with float32 scales: quantise a float32 model, to a QDQ graph"
        )
    opened = _open(switched, scratch, providers)
    measure = functools.partial(_measured, opened, samples, switches, progress)
    before, *alone = measure([switches, *(unit.switches for unit in units)])
    ranking = [
        dataclasses.replace(unit, error=found.error)
        for unit, found in zip(units, alone, strict=True)
    ]
    ranking.sort(key=lambda unit: -unit.error)
    # A share is rarely a float: .29 of 100 are 29.
    most = math.floor(1e-9 + count * (1 if max_16bit is None else max_16bit))
    ordered = list(_within(ranking, most))

    def promoting(size: int) -> Deviation:
        off = {name for unit in ordered[:size] for name in unit.switches}
        return measure([[name for name in switches if name not in off]])[0]

    size = len(ordered)
    if budget is not None:
        size = bisect.bisect_left(range(size + 1), budget, key=lambda n: promoting(n).cosine)
        if size > len(ordered):
            best = promoting(len(ordered)).cosine
            raise QuantizationError(
                f"a cosine of {budget:.6g} is not reached: the best is {best:.6g}, with "
                f"{sum(len(unit.names) for unit in ordered)} of {count} activations "
                "promoted"
            )
    return PrecisionPlan(
        promoted=tuple(name for unit in ordered[:size] for name in unit.names),
        ranking=tuple(ranking),
        activations=count,
        before=before,
        after=promoting(size),
    )


def _within(ranking: Sequence[Unit], most: int) -> Iterator[Unit]:
    """Yield what may be promoted, what brings most for each activation first."""
    for unit in sorted(ranking, key=lambda unit: -unit.error / len(unit.names)):
        if len(unit.names) <= most:
            yield unit
            most -= len(unit.names)


def _switched_units(graph: QuantizedGraph, model: ir.Model) -> tuple[list[Unit], list[str]]:
    """Give each grid that can be switched off its switch, in place.

    Return the units of 8 bits, and all switches.
    """
    places = [
        tensor
        for tensor in graph.tensors
        if tensor.quantize is not None and tensor.dequantizes and not tensor.codes_are_read
    ]
    # Before the graph is changed. Activations of one name are one, too.
    groups = sharing_groups(graph)
    for first, second in itertools.pairwise(sorted(places, key=lambda place: place.name)):
        if first.name == second.name:
            groups.union(first, second)
    names = FreshNames(model)
    members: dict[int, list[tuple[QuantizedTensor, str]]] = {}
    operators = {
        tensor: "" if tensor.producer is None else tensor.producer.op_type for tensor in places
    }
    switches = [_add_switch(model.graph, place, names) for place in places]
    for tensor, switch in zip(places, switches, strict=True):
        if tensor.grid.dtype in _EIGHT_BITS:
            members.setdefault(id(groups.find(tensor)), []).append((tensor, switch))
    units = [
        Unit(
            tuple(dict.fromkeys(tensor.name for tensor, _ in group)),
            tuple(switch for _, switch in group),
            operators[group[0][0]],
        )
        for group in members.values()
    ]
    return units, switches


def _add_switch(graph: ir.Graph, place: QuantizedTensor, names: FreshNames) -> str:
    """Add a bool input that chooses between a grid and a Clip to its range; return its name.

    Outputs of the graph keep their names.
    """
    assert place.quantize is not None and place.source is not None
    name = names.take("ortplugins.grid")
    flag = ir.Value(name=name, shape=ir.Shape([]), type=ir.TensorType(ir.DataType.BOOL))
    graph.inputs.append(flag)
    # Clip has no constants as inputs before opset 11.
    low, high = (
        new_initializer(graph, ir.tensor(np.asarray(end), name=names.take(f"{name}.end")))
        for end in place.grid.range
    )
    above = ir.node("Max", [place.source, low])
    clip = ir.node("Min", [above.outputs[0], high])
    for node in (above, clip):
        node.name = node.outputs[0].name = names.take(f"{name}.clip")
    place.quantize.prepend([above, clip])
    for node in place.dequantizes:
        old, clipped = node.outputs[0], clip.outputs[0]
        choice = ir.node("Where", [flag, clipped, clipped], name=names.take(f"{name}.choice"))
        (new,) = choice.outputs
        new.name, new.type, new.shape = old.name, old.type, old.shape
        old.name = names.take(f"{old.name}_on_grid")
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        choice.replace_input_with(1, old)
        node.append(choice)
    return name


def _open(
    model: ir.Model, folder: Path, providers: Sequence[Any]
) -> onnxruntime.InferenceSession:
    """Open a session on a model with switches."""
    model.graph.sort()
    save_with_data(model, folder / "switched.onnx")
    # It computes as the graph says: every Q and DQ stays what it is. But constants are folded:
    # MiniLM-L6, 8 samples, runs in 0.1 s instead of 0.3.
    entries = ("session.disable_quant_qdq", "session.disable_double_qdq_remover")
    settings = dict.fromkeys(entries, "1")
    return open_model(folder / "switched.onnx", "basic", providers, settings)


def _measured(
    session: onnxruntime.InferenceSession,
    samples: Sequence[Feed],
    switches: Collection[str],
    progress: Progress | None,
    settings: Sequence[Collection[str]],
) -> list[Deviation]:
    """Measure each setting, the switches that are on, against all switched off."""
    names = [item.name for item in session.get_outputs() if item.type in _COMPARED]
    if not names:
        raise QuantizationError(
            "the model has no output of type float, float16 or double whose error could "
            "be measured: add the one before the last operator as an output"
        )

    def run(on: Collection[str], index: int) -> list[npt.NDArray[Any]]:
        flags = {name: np.array(name in on) for name in switches}
        return fetch(session, names, samples[index] | flags, f"sample {index}")

    sums = [[DifferenceSum(name) for name in names] for _ in settings]
    for index in range(len(samples)):
        reference = run((), index)
        for name, array in zip(names, reference, strict=True):
            if not np.isfinite(array).all():
                raise QuantizationError(
                    f"output {name!r} holds NaN or infinite values for sample {index}, "
                    "all grids switched off: nothing can be compared with it; leave that "
                    "sample out"
                )
        for place, (on, found) in enumerate(zip(settings, sums, strict=True)):
            if progress is not None:
                done, total = index * len(sums) + place, len(samples) * len(sums)
                progress(done, total, f"measuring, sample {index}")
            for each, wanted, array in zip(found, reference, run(on, index), strict=True):
                each.add(wanted, array)
    results = [[each.result() for each in found] for found in sums]
    return [
        Deviation(
            statistics.fmean(each.relative_rms**2 for each in found),
            statistics.fmean(each.cosine for each in found),
        )
        for found in results
    ]
