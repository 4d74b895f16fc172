# SPDX-License-Identifier: MIT
"""Which activations of an 8-bit QDQ model deserve 16 bits: as few as a budget allows.

The reference is the same model with all grids of its activations switched off. What shares a
grid (a Reshape's input and output) is promoted as one. What the search finds is rewritten by
:func:`.place_boundaries` and measured; where the rewrite refuses a tensor, the search goes on
without it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import tempfile
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ortplugins.errors import QuantizationError
from ortplugins.model_io.loading import ModelLike, load_model
from ortplugins.model_io.saving import Progress
from ortplugins.optimization.shape_inference import infer_shapes
from ortplugins.quantization.statistics.collect import Calibration
from ortplugins.samples.sources import CalibrationSource, KeptSamples
from ortplugins.static_qdq.search import Promotion, Unit, promote
from ortplugins.static_qdq.switched_model import SwitchedModel, add_switches
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrecisionPlan(Promotion):
    """Which activations to promote, and what it brings; see also :class:`Promotion`.

    Attributes:
        overrides: For the pass MixedPrecisionBoundaries.
        mode: ``"int16"`` or ``"float"``: what was measured.
        activations: Quantised activations in the model.
    """

    overrides: dict[str, tuple[TensorOverride, ...]]
    mode: str
    activations: int

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
        wider = {tensor.name: _WIDER.get(tensor.grid.dtype) for tensor in places}
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

        def overrides(chosen: Sequence[str]) -> dict[str, tuple[TensorOverride, ...]]:
            return {name: (TensorOverride(quant_type=wider[name]),) for name in chosen}

        count = len(graph.tensors)
        found = promote(
            units,
            SwitchedModel(instrumented, names, calibration),
            calibration,
            implied,
            lambda chosen: _rewritten(source, options, overrides(chosen)),
            budget=budget,
            most=math.floor(max_16bit * count) if isinstance(max_16bit, float) else max_16bit,
            of=f"{count} activations promoted",
        )
    return PrecisionPlan(
        **vars(found), overrides=overrides(found.promoted), mode=mode, activations=count
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


def _rewritten(
    model: ir.Model, options: BoundaryOptions, overrides: Overrides
) -> tuple[ir.Model, dict[str, str]]:
    """Rewrite a copy; return it and what was refused, with the reason.

    Of tensors that are refused together, those that are refused alone.
    """

    def attempt(asked: Overrides) -> tuple[ir.Model, list[Remark]]:
        copy, remarks = model.clone(), Remarks("mixed_precision_boundaries")
        place_boundaries(
            copy, dataclasses.replace(options, overrides=asked), PassContext(remarks)
        )
        return copy, [remark for remark in remarks if remark.outcome is Outcome.REFUSED]

    copy, refused = attempt(overrides)
    reasons = {remark.node: remark.reason for remark in refused if remark.node in overrides}
    alone = {name: why for name, why in reasons.items() if attempt({name: overrides[name]})[1]}
    return copy, alone or reasons
