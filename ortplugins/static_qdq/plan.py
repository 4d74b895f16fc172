# SPDX-License-Identifier: MIT
"""Which activations of an 8-bit QDQ model deserve 16 bits: as few as a budget allows.

1. Each grid is switched on alone, all others off: the error at the outputs that it causes by
   itself ranks it. What shares a grid (a Reshape's input and output) is one unit. The
   reference is the model with all grids of its activations switched off.
2. The first of the ranking are rewritten by :func:`.place_boundaries`, and measured: as many
   as may be, or the fewest that meet the budget, by bisection.

Errors add up where they are small, so this order is hard to beat: on MiniLM-L6 (96
activations), from 1 to 24 promoted, a search that measures twelve candidates at each step
finds sets whose error is smaller by 4 % at most.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ortplugins.errors import QuantizationError
from ortplugins.model_io.loading import ModelLike, load_model
from ortplugins.model_io.saving import Progress
from ortplugins.optimization.shape_inference import infer_shapes
from ortplugins.quantization.calibration import Calibration
from ortplugins.samples.sources import CalibrationSource, KeptSamples
from ortplugins.static_qdq.switched_model import Deviation, SwitchedModel, add_switches
from rewrite_rules.mixed_precision_boundaries.place import BoundaryOptions, place_boundaries
from rewrite_rules.mixed_precision_boundaries.quantized_graph import (
    QuantizedGraph,
    QuantizedTensor,
)
from rewrite_rules.mixed_precision_boundaries.regions import Groups, sharing_groups
from rewrite_rules.mixed_precision_boundaries.tensor_overrides import TensorOverride
from rewrite_rules.remarks import Outcome, PassContext, Remarks
from session_options.override_json import format_overrides

_WIDER = {ir.DataType.UINT8: ir.DataType.UINT16, ir.DataType.INT8: ir.DataType.INT16}


@dataclasses.dataclass(frozen=True)
class Unit:
    """What gets more bits together.

    Attributes:
        names: An activation, or several that share a grid; these are counted.
        switches: That are on as long as it has 8 bits.
        operator: What computes the first activation; empty for an input of the graph.
        error: At the outputs, with only this in 8 bits: see :class:`Deviation`. NaN before it
            is measured.
    """

    names: tuple[str, ...]
    switches: tuple[str, ...]
    operator: str
    error: float = math.nan


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrecisionPlan:
    """Which activations to promote, and what it brings.

    Attributes:
        overrides: For the pass MixedPrecisionBoundaries.
        mode: ``"int16"`` or ``"float"``: what was measured.
        activations: Quantised activations in the model.
        ranking: All units, the worst in 8 bits first.
        curve: Deviations that were measured, by number of promoted activations.
        before: Deviation of the model with nothing promoted.
        after: With what was promoted, measured on the model as it was made.
        notes: What stood in the way.
        promoted: The chosen activations, the most worthwhile first.
    """

    overrides: dict[str, tuple[TensorOverride, ...]]
    mode: str
    activations: int
    ranking: tuple[Unit, ...]
    curve: dict[int, Deviation]
    before: Deviation
    after: Deviation
    notes: tuple[str, ...]
    promoted: tuple[str, ...]

    def to_json(self) -> str:
        """Return the overrides, as the pass reads them."""
        return format_overrides(self.overrides)


def plan_precision(
    model: ModelLike,
    data: CalibrationSource,
    *,
    budget: float | None = None,
    max_16bit: float | None = None,
    mode: str = "int16",
    target: str = "cpu",
    providers: Sequence[Any] = ("CPUExecutionProvider",),
    progress: Progress | None = None,
) -> PrecisionPlan:
    """Choose the activations of a QDQ model that get 16 bits.

    Args:
        model: Path of an .onnx file, ``onnx.ModelProto`` or ``onnx_ir.Model``; not changed.
        data: Samples, as for :func:`.quantize`.
        budget: Cosine of the outputs to the reference's that is to be reached, above 0 and
            below 1.
        max_16bit: How many tensors may be promoted: a number (int), or a share of all
            activations (float, 0 to 1). Conversions where regions begin and end don't count.
            With a budget: the most that may be taken to meet it.
        mode: What the rewrite makes of them, ``"int16"`` or ``"float"``.
        target: ``"cpu"`` or ``"qnn"``, as for the pass.
        providers: Execution providers that run the samples.
        progress: Called with what is done, of how much, and what it is.

    Raises:
        CalibrationError: If samples can't be used or onnxruntime fails.
        MissingFileError, ModelFileError: If a model can't be used.
        OverrideError: If mode or target is none.
        QuantizationError: If the model has no 8-bit activation, an option is out of range, the
            models don't fit together, or the budget can't be reached: tells the best that is.
    """
    options = BoundaryOptions(mode=mode, target=target)
    _check_limits(budget, max_16bit)
    if data is None:
        raise QuantizationError(
            "no data: planning takes real samples, as random ones give another ranking"
        )
    # Weights stay where they are: sessions map them.
    source = load_model(model, map_inline=True).model
    with tempfile.TemporaryDirectory(prefix="ortplugins-") as folder:
        samples = KeptSamples(data, source, scratch=Path(folder))
        progress = progress or Calibration.progress
        calibration = Calibration(samples, Path(folder), providers, progress=progress)
        infer_shapes(source)
        instrumented = source.clone()
        graph = QuantizedGraph(instrumented)
        places = _places(graph, instrumented.graph)
        # Before the graph is changed. Activations of one name are one, too.
        groups = sharing_groups(graph)
        for first, second in itertools.pairwise(sorted(places, key=lambda place: place.name)):
            if first.name == second.name:
                groups.union(first, second)
        wider = {
            tensor.name: (TensorOverride(quant_type=_WIDER[tensor.grid.dtype]),)
            for tensor in places
            if tensor.grid.dtype in _WIDER
        }
        names = add_switches(instrumented, places)
        units = _units(groups, places, names)
        if not units:
            text = (
                "the model has no activation of 8 bits between a QuantizeLinear and a "
                "DequantizeLinear: quantise it first, to a QDQ graph"
            )
            for name, reason in [*graph.refused.items()][:1]:
                text += f" (of {name!r}: {reason})"
            raise QuantizationError(text)
        count = len(graph.tensors)
        return _search(
            source,
            dataclasses.replace(options, overrides=wider),
            units,
            SwitchedModel(instrumented, names, calibration),
            calibration,
            budget=budget,
            most=math.floor(max_16bit * count) if isinstance(max_16bit, float) else max_16bit,
            count=count,
        )


def _check_limits(budget: float | None, max_16bit: float | None) -> None:
    if budget is None and max_16bit is None:
        raise QuantizationError("give a budget, max_16bit or both")
    if budget is not None and not 0 < budget < 1:
        raise QuantizationError(
            f"budget is {budget}: a cosine above 0 and below 1 is expected"
        )
    is_share = not isinstance(max_16bit, int)
    if max_16bit is not None and (max_16bit < 0 or (is_share and max_16bit > 1)):
        raise QuantizationError(
            f"max_16bit is {max_16bit}: a number, or a share of 0.0 to 1.0, is expected"
        )


def _places(graph: QuantizedGraph, main: ir.Graph) -> list[QuantizedTensor]:
    """Return the activations whose grid can be switched off."""
    return [
        tensor
        for tensor in graph.tensors
        if tensor.quantize is not None
        and tensor.quantize.graph is main
        and tensor.dequantizes
        and all(node.graph is main for node in tensor.dequantizes)
        and not tensor.codes_are_read
    ]


def _units(
    groups: Groups, places: Sequence[QuantizedTensor], switches: Sequence[str]
) -> list[Unit]:
    """Return the groups of 8-bit activations."""
    members: dict[int, list[tuple[QuantizedTensor, str]]] = {}
    for tensor, switch in zip(places, switches, strict=True):
        if tensor.grid.dtype in _WIDER:
            members.setdefault(id(groups.find(tensor)), []).append((tensor, switch))
    units = []
    for group in members.values():
        tensors = tuple(dict.fromkeys(tensor.name for tensor, _ in group))
        node = group[0][0].producer
        operator = "" if node is None else node.op_type
        units.append(Unit(tensors, tuple(switch for _, switch in group), operator))
    return units


def _search(
    model: ir.Model,
    options: BoundaryOptions,
    units: Sequence[Unit],
    switched: SwitchedModel,
    calibration: Calibration,
    *,
    budget: float | None,
    most: int | None,
    count: int,
) -> PrecisionPlan:
    """Promote the first units of the ranking, as many as may be or as the budget needs.

    ``options`` have an override for each name. ``budget`` is the cosine to reach, ``most`` how
    many names, of ``count``, may be promoted.
    """
    switched.refer_to(switched.values())
    ranking = sorted(_each_alone(units, switched, calibration), key=lambda unit: -unit.error)
    before = switched.compare(switched.values(switched.switches))
    left = count if most is None else most
    ordered = []
    for unit in sorted(ranking, key=lambda unit: -unit.error / len(unit.names)):
        if len(unit.names) <= left:
            ordered.append(unit)
            left -= len(unit.names)

    tried: dict[int, tuple[tuple[str, ...], dict[str, str], Deviation]] = {}

    def cosine(size: int) -> float:
        """Promote the first units; return how near the outputs are, and keep the rest."""
        calibration.progress(len(tried), len(ordered).bit_length(), "promoting")
        names = [name for unit in ordered[:size] for name in unit.names]
        mixed, refused = _rewritten(model, options, names)
        kept = tuple(name for name in names if name not in refused)
        found = switched.compare(SwitchedModel(mixed, (), calibration).values())
        tried[size] = kept, refused, found
        return found.cosine

    low, high = 0, len(ordered)
    if cosine(high) >= (math.inf if budget is None else budget):
        while low < high:  # fewer may do
            middle = (low + high) // 2
            if cosine(middle) >= (budget or 0):
                high = middle
            else:
                low = middle + 1
    promoted, refused, after = tried[high]
    notes = [f"{name} stays: {reason}" for name, reason in refused.items()]
    if budget is not None and after.cosine < budget:
        text = (
            f"a cosine of {budget:.6g} is not reached: it is {after.cosine:.6g} with "
            f"{len(promoted)} of {count} activations promoted"
        )
        if most is None:
            raise QuantizationError(text)
        notes.insert(0, f"{text}, as many as max_16bit allows")
    measured = {len(kept): found for kept, _, found in tried.values()}
    return PrecisionPlan(
        overrides={name: options.overrides[name] for name in promoted},
        mode=options.mode,
        activations=count,
        ranking=tuple(ranking),
        curve={0: before, **dict(sorted(measured.items()))},
        before=before,
        after=after,
        notes=tuple(notes),
        promoted=promoted,
    )


def _each_alone(
    units: Sequence[Unit], switched: SwitchedModel, calibration: Calibration
) -> Iterator[Unit]:
    """Yield units with the error of each."""
    for done, unit in enumerate(units):
        calibration.progress(done, len(units), f"ranking {unit.names[0]}")
        error = switched.compare(switched.values(unit.switches)).error
        yield dataclasses.replace(unit, error=error)


def _rewritten(
    model: ir.Model, options: BoundaryOptions, names: Sequence[str]
) -> tuple[ir.Model, dict[str, str]]:
    """Rewrite a copy; return it and what was refused, with the reason.

    Of tensors that are refused together, those that are refused alone.
    """

    def attempt(wanted: Iterable[str]) -> tuple[ir.Model, dict[str, str]]:
        copy, remarks = model.clone(), Remarks("mixed_precision_boundaries")
        asked = {name: options.overrides[name] for name in wanted}
        chosen = dataclasses.replace(options, overrides=asked)
        place_boundaries(copy, chosen, PassContext(remarks))
        found = (remark for remark in remarks if remark.outcome is Outcome.REFUSED)
        return copy, {remark.node: remark.reason for remark in found if remark.node in asked}

    refused: dict[str, str] = {}
    while True:
        copy, found = attempt(name for name in names if name not in refused)
        if not found:
            return copy, refused
        alone = {name: why for name, why in found.items() if attempt([name])[1]}
        refused |= alone or found
