# SPDX-License-Identifier: MIT
"""From a float model and samples to a QDQ model whose activations have 8 and 16 bits.

    quantise       onnxruntime's quantize_static: everything in 8 bits
    rewrite        mixed_precision_boundaries: regions of 16 bits, or float, into that graph

onnxruntime makes both grids of a tensor from its range, each rounded by itself, and an end
code moves by up to half an 8-bit step on its way into a region. Here the 16-bit grid of a
boundary has every value of the 8-bit one.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Collection, Sequence
from typing import Any

import onnx_ir as ir
from onnxruntime.quantization import CalibrationMethod, QuantType

from ortplugins.errors import CalibrationError, QuantizationError
from ortplugins.model_io.loading import ModelLike, same_kind
from ortplugins.model_io.opset import raise_opset
from ortplugins.model_io.saving import Progress, has_data_file
from ortplugins.optimization.optimize import OptimizeResult, optimize
from ortplugins.optimization.shape_inference import infer_shapes
from ortplugins.quantization.files import QuantizedFile
from ortplugins.quantization.selection import check_names, matches
from ortplugins.samples.sources import read_samples
from ortplugins.static_qdq.onnxruntime_quantizer import quantize_to_eight_bits
from ortplugins.static_qdq.plan import PrecisionPlan, plan_precision
from rewrite_rules.closest_name import did_you_mean
from rewrite_rules.graph.nodes import all_nodes, label
from session_options import MixedPrecisionBoundaries


@dataclasses.dataclass(frozen=True, eq=False)
class StaticMixedResult(OptimizeResult):
    """What :func:`quantize_static_mixed` made; the report also says what stays in float.

    Attributes:
        plan: What was promoted by ``budget`` and ``max_16bit``; None without.
    """

    plan: PrecisionPlan | None = None


def quantize_static_mixed(
    model_input: ModelLike,
    model_output: str | os.PathLike[str] | None = None,
    data: Any = None,
    *,
    promote: Collection[str] = (),
    budget: float | None = None,
    max_16bit: float | None = None,
    mode: str = "int16",
    nodes_to_exclude: Sequence[str] = (),
    calibration_providers: Sequence[Any] = ("CPUExecutionProvider",),
    overwrite: bool = False,
    progress: Progress | None = None,
    **settings: Any,
) -> StaticMixedResult:
    """Quantise weights and activations of a float model, some activations to 16 bits.

    A model that is quantised already keeps its grids, and gets those of 16 bits. Of a float
    model where nothing is promoted, the graph is the one that onnxruntime's
    ``quantize_static`` makes; else Relu and Clip nodes stay, whose work it leaves to the range
    of 8 bits.

    Args:
        model_input: Path of an .onnx file, ``onnx.ModelProto`` or ``onnx_ir.Model``; not
            changed. Float32 or float16, or a QDQ graph. Weights of float models are read
            whole, as onnxruntime's quantiser has them.
        model_output: File to write; large tensors go to ``<output>.data``.
        data: Samples, each a dict of input names and arrays: an object with ``get_next()``, an
            iterable, or paths of ``.npz`` files.
        promote: Tensors to give 16 bits, and nodes whose inputs and outputs get them; by names
            of the float model.
        budget: Cosine of the outputs to those of unquantised activations that is to be
            reached, above 0 and below 1: what else is promoted is found, as little as it
            takes.
        max_16bit: Share of the activations, 0 to 1, that may be promoted so. Conversions where
            regions begin and end don't count.
        mode: ``"int16"``, or ``"float"``: promoted tensors are not quantised at all, which is
            faster on CPUs.
        nodes_to_exclude: Nodes to leave in float, by name, glob or regular expression
            (``re:``).
        calibration_providers: Execution providers that run the samples.
        overwrite: Whether ``model_output`` may exist.
        progress: Called while tensors are written: done, total, name.
        settings: Other arguments of ``quantize_static``: activation_type (QUInt8 by default),
            weight_type, per_channel (true by default; needs opset 13, to which older models
            are converted), calibrate_method, op_types_to_quantize.

    Returns:
        Path, report and model.

    Raises:
        CalibrationError: If there is nothing to calibrate with, a sample is bad, or an
            activation has no finite range.
        FileExistsError: If ``model_output`` exists and ``overwrite`` is false.
        MissingFileError, ModelFileError: If the model or its data can't be used.
        OptionError: If the mode is unknown.
        QuantizationError: If an argument is out of range, a pattern means no node,
            onnxruntime can't quantise the model, or no promotion reaches the budget. No output
            is written, whatever is raised.
        OSError: If a file can't be written.
    """
    usual = {
        "activation_type": QuantType.QUInt8,
        "weight_type": QuantType.QInt8,
        "per_channel": True,
        "calibrate_method": CalibrationMethod.MinMax,
    }
    of_quantiser = [*nodes_to_exclude, *settings]
    settings = usual | settings
    activation = ir.DataType(settings["activation_type"].tensor_type)
    if activation not in (ir.DataType.UINT8, ir.DataType.INT8):
        raise QuantizationError(
            f"activation_type is {activation.name.lower()}: name tensors that get 16 bits in "
            "promote"
        )
    for name, value in (("budget", budget), ("max_16bit", max_16bit)):
        if value is not None and not 0 <= value <= 1:
            raise QuantizationError(f"{name} is {value}; expected 0 to 1")
    for name, names in (("promote", promote), ("nodes_to_exclude", nodes_to_exclude)):
        if isinstance(names, str):
            raise QuantizationError(f"{name} is {names!r}; expected a list of names")
    plans = budget is not None or max_16bit is not None
    if mode == "float" and not (promote or plans):
        raise QuantizationError("mode has no effect: nothing is promoted")
    wanted = functools.partial(MixedPrecisionBoundaries, mode=mode)
    wanted(promote=",".join(promote))  # what it refuses, it refuses before samples are run
    file = QuantizedFile(model_input, model_output, overwrite=overwrite)
    model = file.model
    is_quantized = any(node.op_type == "QuantizeLinear" for node in model.graph)
    if is_quantized and (of_quantiser or not (promote or plans)):
        what = f"{of_quantiser[0]!r} has no effect" if of_quantiser else "nothing to promote"
        raise QuantizationError(f"{file.loaded.name}: is already quantised: {what}")
    notes = [] if is_quantized else _prepared(model, settings["per_channel"])
    _check_names_given(model.graph, promote)
    names = [label(node) for node in model.graph]
    check_names("nodes_to_exclude", nodes_to_exclude, names)
    excluded = [
        name for name in names if any(matches(each, name) for each in nodes_to_exclude)
    ]
    if data is None:
        raise CalibrationError("no calibration data: give samples of real inputs")
    samples = read_samples(data, model)
    plan = None
    with file.scratch() as scratch:
        if not is_quantized:
            method = settings["calibrate_method"]
            # Its grid may have negative values.
            below_0 = method is CalibrationMethod.Distribution
            model, floats = quantize_to_eight_bits(
                model,
                scratch,
                samples,
                keep_relu=bool(below_0 or promote or plans),
                nodes_to_exclude=excluded,
                calibration_providers=[*calibration_providers],
                **settings,
            )
            notes += [f"ranges from {len(samples)} samples, {method.name}", *floats]
            graph = file.model.graph
            if inner := sum(node.graph is not graph for node in all_nodes(file.model)):
                notes.append(f"{inner} nodes of subgraphs and functions stay in float")
        if plans:
            plan = plan_precision(
                model,
                samples,
                scratch,
                budget=budget,
                max_16bit=max_16bit,
                providers=calibration_providers,
                progress=progress,
            )
    promoted = [*promote, *(plan.promoted if plan else ())]
    result = optimize(
        model,
        model_output,
        passes=[wanted(promote=",".join(promoted))] if promoted else [],
        providers=[
            each if isinstance(each, str) else each[0] for each in calibration_providers
        ],
        external_data=has_data_file(file.loaded, model),
        overwrite=overwrite,
        progress=progress,
    )
    report = dataclasses.replace(result.report, notes=(*notes, *result.report.notes))
    changed = {"report": report, "model": same_kind(model_input, result.model)}
    return StaticMixedResult(**vars(result) | changed, plan=plan)


def _prepared(model: ir.Model, by_channel: bool) -> list[str]:
    """Give a float model shapes and the opset that it is quantised in; return notes."""
    infer_shapes(model)
    least = (13, "a scale per channel") if by_channel else (10, "QuantizeLinear")
    read = (value for node in all_nodes(model) for value in node.inputs)
    if any(value is not None and value.dtype is ir.DataType.FLOAT16 for value in read):
        least = (19, "QuantizeLinear of float16")
    raised = raise_opset(model, *least)
    if raised:
        infer_shapes(model)
    return raised


def _check_names_given(graph: ir.Graph, promote: Collection[str]) -> None:
    """Check that promoted tensors and nodes are in the model, before samples are run."""
    values = [*graph.inputs, *(value for node in graph for value in node.outputs)]
    known = [*(value.name or "" for value in values), *map(label, graph)]
    for name in promote:
        if name not in known:
            raise QuantizationError(
                f"promote: no activation or node is {name!r}{did_you_mean(name, known)}"
            )
