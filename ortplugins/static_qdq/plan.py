# SPDX-License-Identifier: MIT
"""Which activations of an 8-bit QDQ model deserve 16 bits: as few as a budget allows.

1. Each grid is switched on alone, all others off: the error at the outputs that it causes by
   itself ranks it. What shares a grid (a Reshape's input and output) is one unit. The
   reference is the model with all grids of its activations switched off.
2. From all on, grids are switched off in that order until the budget is met.
3. What is found is rewritten by :func:`.place_boundaries` and measured; where the rewrite
   refuses a tensor, or falls short of its simulation, the search goes on.

Errors add up where they are small, so the order of step 1 is hard to beat: on MiniLM-L6 (96
activations), from 1 to 24 promoted, a search that measures twelve candidates at each step
finds sets whose error is smaller by 4 % at most.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
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
from rewrite_rules.graph.nodes import is_quantize_linear
from rewrite_rules.mixed_precision_boundaries.place import BoundaryOptions, place_boundaries
from rewrite_rules.mixed_precision_boundaries.quantized_graph import (
    QuantizedGraph,
    QuantizedTensor,
)
from rewrite_rules.mixed_precision_boundaries.regions import Groups, sharing_groups
from rewrite_rules.mixed_precision_boundaries.tensor_overrides import Overrides, TensorOverride
from rewrite_rules.remarks import Outcome, PassContext, Remark, Remarks
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


@dataclasses.dataclass(frozen=True)
class CurvePoint:
    """A step of the search.

    Attributes:
        promoted: Number of activations that have more bits.
        added: Those that are new; none for the first point.
        deviation: Of the outputs, simulated.
    """

    promoted: int
    added: tuple[str, ...]
    deviation: Deviation


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrecisionPlan:
    """Which activations to promote, and what it brings.

    Attributes:
        overrides: For the pass MixedPrecisionBoundaries.
        mode: ``"int16"`` or ``"float"``: what was measured.
        activations: Quantised activations in the model.
        ranking: All units, the worst in 8 bits first.
        curve: Simulated error against number of promoted activations, step by step.
        before: Deviation of the model with nothing promoted.
        after: With what was promoted, measured on the model as it was made.
        notes: What stood in the way.
        promoted: The chosen activations, the most worthwhile first.
    """

    overrides: dict[str, tuple[TensorOverride, ...]]
    mode: str
    activations: int
    ranking: tuple[Unit, ...]
    curve: tuple[CurvePoint, ...]
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
            With a budget: whichever is met first.
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
        groups, implied = sharing_groups(graph), _implication(places)
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
            implied,
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


def _implication(
    places: Sequence[QuantizedTensor],
) -> Callable[[Collection[str]], list[str]]:
    """Return what tells the tensors between nodes of a region: no 8 bits are left of them."""
    around: dict[str, set[ir.Node]] = {}
    for tensor in places:
        nodes = {node for node in tensor.consumers() if not is_quantize_linear(node)}
        if tensor.producer is not None:
            nodes.add(tensor.producer)
        around.setdefault(tensor.name, set()).update(nodes)
    inner = dict.fromkeys(
        tensor.name
        for tensor in places
        if tensor.producer is not None and tensor.consumers() and not tensor.is_output
    )

    def implied(names: Collection[str]) -> list[str]:
        region = set[ir.Node]().union(*(around[name] for name in names))
        return [name for name in inner if name not in names and around[name] <= region]

    return implied


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
    implied: Callable[[Collection[str]], Collection[str]],
    *,
    budget: float | None,
    most: int | None,
    count: int,
) -> PrecisionPlan:
    """Promote one unit after the other and measure, until the budget is met.

    ``implied`` returns the names that have more bits as soon as others have. ``options``
    have an override for each. ``budget`` is the cosine to reach, ``most`` how many names, of
    ``count``, may be promoted.
    """
    switched.refer_to(switched.values())
    measured = list(_each_alone(units, switched, calibration))
    ordered = sorted(measured, key=lambda unit: -unit.error / len(unit.names))
    unit_of = {name: unit for unit in measured for name in unit.names}
    banned: set[Unit] = set()

    def deviation(promoted: Iterable[Unit]) -> Deviation:
        off = {switch for unit in promoted for switch in unit.switches}
        return switched.compare(switched.values(frozenset(switched.switches) - off))

    def with_next(promoted: Sequence[Unit]) -> tuple[Unit, ...]:
        """Add the next of the ranking that may be promoted, and what it implies."""
        for unit in ordered:
            if unit not in promoted and unit not in banned:
                closed = dict.fromkeys([*promoted, unit])
                names = implied([name for each in closed for name in each.names])
                found = (unit_of[name] for name in names if name in unit_of)
                closed |= dict.fromkeys(each for each in found if each not in banned)
                if most is None or _count(closed) <= most:
                    return tuple(closed)
        return ()

    promoted: tuple[Unit, ...] = ()
    now = before = deviation(())
    curve = [CurvePoint(0, (), before)]
    wanted, notes = budget, list[str]()
    while True:
        while (wanted is None or now.cosine < wanted) and (more := with_next(promoted)):
            calibration.progress(_count(promoted), most or _count(units), "promoting")
            added = tuple(name for u in more if u not in promoted for name in u.names)
            promoted, now = more, deviation(more)
            curve.append(CurvePoint(_count(promoted), added, now))
        names = tuple(name for unit in promoted for name in unit.names)
        chosen = {name: options.overrides[name] for name in names}
        mixed, refused = _rewritten(model, dataclasses.replace(options, overrides=chosen))
        if refused:
            notes += [f"{name} stays: {reason}" for name, reason in refused.items()]
            banned |= {unit_of[name] for name in refused}
            promoted = tuple(unit for unit in promoted if unit not in banned)
            now = deviation(promoted)
            continue
        after = switched.compare(SwitchedModel(mixed, (), calibration).values())
        if wanted is None or budget is None or after.cosine >= budget:
            break
        if not with_next(promoted):
            text = (
                f"a cosine of {budget:.6g} is not reached: it is {after.cosine:.6g} with "
                f"{len(names)} of {count} activations promoted"
            )
            if most is None:
                raise QuantizationError(text)
            notes.append(f"{text}, as many as max_16bit allows")
            break
        # What is made is less exact than its simulation by so much.
        wanted = now.cosine + (budget - after.cosine) + 1e-6
    return PrecisionPlan(
        overrides=chosen,
        mode=options.mode,
        activations=count,
        ranking=tuple(sorted(measured, key=lambda unit: -unit.error)),
        curve=tuple(curve),
        before=before,
        after=after,
        notes=tuple(notes),
        promoted=names,
    )


def _each_alone(
    units: Sequence[Unit], switched: SwitchedModel, calibration: Calibration
) -> Iterator[Unit]:
    """Yield units with the error of each."""
    for done, unit in enumerate(units):
        calibration.progress(done, len(units), f"ranking {unit.names[0]}")
        error = switched.compare(switched.values(unit.switches)).error
        yield dataclasses.replace(unit, error=error)


def _count(units: Iterable[Unit]) -> int:
    return sum(len(unit.names) for unit in units)


def _rewritten(model: ir.Model, options: BoundaryOptions) -> tuple[ir.Model, dict[str, str]]:
    """Rewrite a copy; return it and what was refused, with the reason.

    Of tensors that are refused together, those that are refused alone.
    """

    def attempt(asked: Overrides) -> tuple[ir.Model, list[Remark]]:
        copy, remarks = model.clone(), Remarks("mixed_precision_boundaries")
        place_boundaries(
            copy, dataclasses.replace(options, overrides=asked), PassContext(remarks)
        )
        return copy, [remark for remark in remarks if remark.outcome is Outcome.REFUSED]

    overrides = options.overrides
    copy, refused = attempt(overrides)
    reasons = {remark.node: remark.reason for remark in refused if remark.node in overrides}
    alone = {name: why for name, why in reasons.items() if attempt({name: overrides[name]})[1]}
    return copy, alone or reasons
