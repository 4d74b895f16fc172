# SPDX-License-Identifier: MIT
"""From a float model and samples to a QDQ model whose activations have 8 and 16 bits.

    calibrate      onnxruntime's calibrators: a range for each activation
    quantise       onnxruntime's quantiser: everything in 8 bits
    rewrite        mixed_precision_boundaries: regions of 16 bits, or float, into that graph

onnxruntime makes both grids of a tensor from its range, each rounded by itself, and an end
code moves by up to half an 8-bit step on its way into a region. Here the 16-bit grid of a
boundary has every value of the 8-bit one.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import os
import shutil
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from ortplugins.errors import CalibrationError, QuantizationError
from ortplugins.model_io.loading import LoadedModel, ModelLike
from ortplugins.model_io.opset import raise_opset
from ortplugins.model_io.saving import Progress, save_with_data
from ortplugins.quantization.files import QuantizedFile
from ortplugins.quantization.selection import Pattern, check_names, matches
from ortplugins.report import PassReport, Report
from ortplugins.samples.sources import CalibrationSource, read_samples
from rewrite_rules.closest_name import did_you_mean
from rewrite_rules.graph.nodes import all_nodes, input_of, label
from rewrite_rules.graph.parameters import constant
from rewrite_rules.mixed_precision_boundaries.fold_rules import fold_pairs
from rewrite_rules.mixed_precision_boundaries.place import BoundaryOptions, place_boundaries
from rewrite_rules.mixed_precision_boundaries.tensor_overrides import (
    Activation,
    OverrideError,
    Overrides,
    TensorOverride,
    check_overrides,
)
from rewrite_rules.onnxruntime_version import parse_version
from rewrite_rules.remarks import PassContext, Remarks
from session_options.override_json import read_overrides, read_quant_type
from session_options.plan import file_text

_PASS = "mixed_precision_boundaries"
_ACTIVATIONS = (ir.DataType.UINT8, ir.DataType.INT8)
_WEIGHTS = (
    *_ACTIVATIONS,
    *(ir.DataType.UINT16, ir.DataType.INT16, ir.DataType.UINT4, ir.DataType.INT4),
)


@dataclasses.dataclass(frozen=True, eq=False)
class StaticMixedResult:
    """What :func:`quantize_static_mixed` made.

    Attributes:
        path: The file written; None when no output was asked for.
        report: What became of every boundary, and how ranges were found.
        model: The QDQ model, of the type that was given (``onnx_ir.Model`` for a path).
        ranges: Smallest and greatest value of each float activation, as they were used.
    """

    path: Path | None
    report: Report
    model: Any
    ranges: Mapping[str, tuple[float, float]]


def quantize_static_mixed(
    model_input: ModelLike,
    model_output: str | os.PathLike[str] | None = None,
    data: CalibrationSource = None,
    *,
    overrides: str | Mapping[str, Any] | None = None,
    promote: Collection[str] = (),
    mode: str = "int16",
    target: str = "qnn",
    activation_type: str | enum.Enum = "QUInt8",
    weight_type: str | enum.Enum = "QInt8",
    per_channel: bool = True,
    calibrate_method: str | enum.Enum = "MinMax",
    op_types_to_quantize: Sequence[str] | None = None,
    nodes_to_quantize: Sequence[Pattern] = (),
    nodes_to_exclude: Sequence[Pattern] = (),
    ranges: Mapping[str, tuple[float, float]] | None = None,
    calibration_providers: Sequence[Any] = ("CPUExecutionProvider",),
    external_data: bool | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> StaticMixedResult:
    """Quantise weights and activations of a float model, some activations to 16 bits.

    Without ``overrides`` and ``promote`` the graph is the one that onnxruntime's
    ``quantize_static`` makes; with them, Relu and Clip nodes stay, whose work it leaves to the
    range of 8 bits.

    Args:
        model_input: Path of an .onnx file, ``onnx.ModelProto`` or ``onnx_ir.Model``; not
            changed. Float32 or float16. Weights are read whole, as onnxruntime's quantiser
            has them.
        model_output: File to write; large tensors go to ``<output>.data``.
        data: Samples, each a dict of input names and arrays: an object with ``get_next()``, an
            iterable, or paths of ``.npz`` files.
        overrides: onnxruntime's ``TensorQuantOverrides``, as a dict, as JSON, or as
            ``@file.json``; by names of the float model.
        promote: Tensors to give 16 bits, and nodes whose inputs and outputs get them; by names
            of the float model.
        mode: ``"int16"``, or ``"float"``: promoted tensors are not quantised at all, which is
            faster on CPUs.
        target: ``"qnn"`` lays boundaries out as onnxruntime's quantiser does, for compilers
            that run DQ -> Q as one conversion. ``"cpu"`` drops a pair of 16 bits that gives
            back the 8-bit values before it; the numbers are the same.
        activation_type: ``"QUInt8"`` or ``"QInt8"``: of all other activations.
        weight_type: Of initializers: 8, 16 or 4 bits.
        per_channel: Whether weights get a scale for each channel; needs opset 13, to
            which older models are converted.
        calibrate_method: ``"MinMax"``, ``"Entropy"``, ``"Percentile"`` or ``"Distribution"``.
        op_types_to_quantize: Operators; by default those that onnxruntime quantises by
            default.
        nodes_to_quantize: Nodes, by name, glob or regular expression (``re:``); none for all.
        nodes_to_exclude: Nodes to leave in float, in the same way.
        ranges: Of some activations, instead of calibrated ones; of all of them, no ``data`` is
            needed: those of an earlier result, for instance.
        calibration_providers: Execution providers that run the samples.
        external_data: Whether tensors of 1 KiB and more go to the data file; by default as the
            source has them, and always when they are more than 1 GiB.
        overwrite: Whether ``model_output`` may exist.
        progress: Called while tensors are written: done, total, name.

    Returns:
        Path, report, model and ranges.

    Raises:
        CalibrationError: If there is nothing to calibrate with, a sample is bad, or an
            activation has no finite range.
        FileExistsError: If ``model_output`` exists and ``overwrite`` is false.
        MissingFileError, ModelFileError: If the model or its data can't be used.
        OptionError: If the file of overrides can't be read.
        OverrideError: If an override asks for what can't be.
        QuantizationError: If an argument is out of range, a pattern means no node, or
            onnxruntime can't quantise the model. No output is written, whatever is raised.
        OSError: If a file can't be written.
    """
    # It takes a while to import.
    from ortplugins.static_qdq import onnxruntime_quantizer as quantizer

    method = str(getattr(calibrate_method, "name", calibrate_method))
    if method not in quantizer.CALIBRATION_METHODS:
        known = ", ".join(quantizer.CALIBRATION_METHODS)
        raise CalibrationError(f"calibrate_method is {method!r}: one of {known} is expected")
    activation = _quant_type_of(activation_type, "activation_type", _ACTIVATIONS)
    op_types = list(op_types_to_quantize or ()) or quantizer.OP_TYPES
    if isinstance(overrides, str) and overrides.startswith("@"):
        overrides = file_text(overrides[1:], f"overrides are {overrides!r}")
    wanted = BoundaryOptions(
        overrides=read_overrides({} if overrides is None else overrides),
        promote=frozenset(promote),
        mode=mode,
        target=target,
    )
    file = QuantizedFile(
        model_input,
        model_output,
        external_data=external_data,
        overwrite=overwrite,
        progress=progress,
    )
    loaded = file.loaded
    _check_float_model(loaded, op_types_to_quantize)
    least = (13, "a scale per channel") if per_channel else (10, "QuantizeLinear")
    if _has_float16(loaded.model):
        least = (19, "QuantizeLinear of float16")
    raised = raise_opset(loaded.model, *least)
    graph = loaded.model.graph
    _check_names_given(graph, wanted.overrides, wanted.promote, activation, ranges or {})
    weights = _quant_type_of(weight_type, "weight_type", _WEIGHTS)
    settings = {
        "per_channel": per_channel,
        "nodes_to_quantize": _selected_nodes("nodes_to_quantize", nodes_to_quantize, graph),
        "nodes_to_exclude": _selected_nodes("nodes_to_exclude", nodes_to_exclude, graph),
        "op_types_to_quantize": op_types,
    }
    with file.scratch() as scratch:
        path = _staged(loaded.model if raised else model_input, loaded, scratch)
        with quantizer.quiet_quantizer():
            how = method, op_types, calibration_providers
            found, note = _ranges(path, loaded, data, ranges or {}, *how)
            left = _left_over(wanted.overrides, graph.initializers, activation)
            file.model, used = quantizer.quantize_to_eight_bits(
                path,
                found,
                wanted.overrides,
                activation,
                weights,
                all_eight=not (left or wanted.promote),
                removable=_removable(graph),
                **settings,
            )
        wanted = dataclasses.replace(wanted, ranges=used, overrides=left)
        passes = _rewrite(file.model, wanted, calibration_providers)
        notes = (*raised, note, *_inner_nodes(loaded.model, op_types))
        artifact, written = file.written()
    report = Report(passes, "built", notes, os.fspath(artifact or ""))
    return StaticMixedResult(artifact, report, written, used)


def _has_float16(model: ir.Model) -> bool:
    """Whether any tensor of a model is float16: given, stored or made by a Cast."""
    values = [
        *model.graph.inputs,
        *(x for g in model.graphs() for x in g.initializers.values()),
    ]
    return any(value.dtype == ir.DataType.FLOAT16 for value in values) or any(
        node.op_type == "Cast" and node.attributes.get_int("to", 0) == ir.DataType.FLOAT16
        for node in all_nodes(model)
    )


def _quant_type_of(given: object, what: str, known: Sequence[ir.DataType]) -> ir.DataType:
    """Read a type by any of its names."""
    names = ", ".join(kind.name.lower() for kind in known)
    try:
        kind = ir.DataType[read_quant_type(given, what)]
    except OverrideError as error:
        raise QuantizationError(str(error)) from None
    if kind not in known:
        hint = "; name tensors that get 16 in promote" if what == "activation_type" else ""
        raise QuantizationError(f"{what} is {kind.name.lower()}: one of {names}{hint}")
    return kind


def _check_float_model(loaded: LoadedModel, op_types: Sequence[str] | None) -> None:
    """Refuse what onnxruntime's quantiser would make a broken graph of, or nothing."""
    if any(node.op_type == "QuantizeLinear" for node in loaded.model.graph):
        raise QuantizationError(
            f"{loaded.name}: is quantised already: give its 8-bit activations 16 bits with "
            f"the pass 'mixed_precision_boundaries'"
        )
    known = {node.op_type for owner in loaded.model.graphs() for node in owner}
    if op_types and known.isdisjoint(op_types):
        hint, named = did_you_mean(op_types[0], known), ", ".join(map(repr, op_types))
        raise QuantizationError(f"op_types_to_quantize: the model has no {named}{hint}")


def _check_names_given(
    graph: ir.Graph,
    overrides: Overrides,
    promote: Collection[str],
    activation_type: ir.DataType,
    ranges: Mapping[str, tuple[float, float]],
) -> None:
    """Check every name that the user gave, before samples are run."""
    values = [*graph.inputs, *(value for node in graph for value in node.outputs)]
    activations = {
        value.name or "": Activation(activation_type, frozenset(map(label, value.consumers())))
        for value in values
        if value.name not in graph.initializers
    }
    initializers = {
        name: tuple(value.const_value.shape.numpy())
        for name, value in graph.initializers.items()
        if value.const_value is not None
    }
    nodes = {label(node) for node in graph}
    check_overrides(overrides, activations, initializers, nodes)
    for what, names, known in (
        ("promote", promote, [*activations, *initializers, *nodes]),
        ("ranges", ranges, activations),
    ):
        for name in names:
            if name not in known:
                hint = did_you_mean(name, known)
                raise QuantizationError(f"{what}: the model has no {name!r}{hint}")
    for name, (low, high) in ranges.items():
        if not (np.isfinite(low) and np.isfinite(high) and low <= high):
            raise QuantizationError(
                f"ranges[{name!r}] is {low} to {high}: two finite numbers are expected, the "
                "smaller first"
            )


def _removable(graph: ir.Graph) -> dict[str, tuple[float, float]]:
    """Return the least and greatest value of each Relu and Clip that alone reads its input.

    The key is the name of its output. An end that is not constant is set so that no range
    fits it, and the node stays.
    """
    found = {}
    for node in graph:
        value = node.inputs[0] if node.op_type in ("Clip", "Relu") else None
        if value is None or value.is_graph_output() or len(value.uses()) > 1:
            continue
        ends = [0.0 if node.op_type == "Relu" else -math.inf, math.inf]
        for index, attribute in enumerate(("min", "max")):
            if attribute in node.attributes:  # before opset 11
                ends[index] = node.attributes[attribute].as_float()
            elif (end := input_of(node, index + 1)) is not None:
                tensor = constant(end)
                ends[index] = -ends[index] if tensor is None else float(tensor.numpy().item())
        found[node.outputs[0].name or ""] = (ends[0], ends[1])
    return found


def _selected_nodes(option: str, patterns: Sequence[Pattern], graph: ir.Graph) -> list[str]:
    """Return the names of the nodes that patterns mean."""
    names = [node.name for node in graph if node.name]
    check_names(option, patterns, names)
    return [name for name in names if any(matches(pattern, name) for pattern in patterns)]


def _staged(model: ModelLike, loaded: LoadedModel, folder: Path) -> Path:
    """Save a model as it was given into a folder: onnxruntime writes beside it."""
    path = folder / "model.onnx"
    if isinstance(model, onnx.ModelProto):
        proto = onnx.ModelProto()
        proto.CopyFrom(model)
        onnx.save_model(
            proto, os.fspath(path), save_as_external_data=True, location="model.onnx.data"
        )
    elif isinstance(model, ir.Model):
        save_with_data(loaded.model, path)
    else:
        # Not by onnx_ir: constants are initializers there, quantised in another way.
        path = folder / Path(model).name
        for name, file in {path.name: Path(model), **loaded.data_files}.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, folder / name)
    return path


def _ranges(
    path: Path,
    loaded: LoadedModel,
    data: CalibrationSource,
    given: Mapping[str, tuple[float, float]],
    method: str,
    op_types: Sequence[str],
    providers: Sequence[Any],
) -> tuple[dict[str, Any], str]:
    """Ranges from samples, those given on top; and a note on them."""
    if data is None:
        if given:
            return dict(given), f"ranges of {len(given)} tensors as given"
        raise CalibrationError("no calibration data: give samples of real inputs, or ranges")
    from ortplugins.static_qdq.onnxruntime_quantizer import calibrate

    samples = read_samples(data, loaded.model)
    found = calibrate(path, samples, method, op_types, providers)
    note = f"ranges of {len(found)} tensors from {len(samples)} samples, {method}"
    return {**found, **given}, note


def _inner_nodes(model: ir.Model, op_types: Collection[str]) -> Iterator[str]:
    """Note how many nodes onnxruntime's quantiser does not visit."""
    graphs = [*model.graphs(), *model.functions.values()]
    inner = [node for graph in graphs if graph is not model.graph for node in graph]
    if count := sum(node.op_type in op_types for node in inner):
        yield f"{count} nodes of subgraphs and functions stay in float"


def _left_over(
    overrides: Overrides, initializers: Mapping[str, Any], activation_type: ir.DataType
) -> Overrides:
    """Return what is left to do in the 8-bit graph."""
    left: dict[str, tuple[TensorOverride, ...]] = {}
    for name, (entry, *_) in overrides.items():
        if name in initializers:
            continue
        if entry.quant_type in (None, activation_type):
            # The rest of it is in the graph.
            entry = TensorOverride(quant_type=entry.quant_type, convert=entry.convert)
        elif not entry.symmetric:
            # So are its bounds; as bounds of 16 bits, they would be of another grid than the
            # 8 bits beyond a boundary.
            entry = dataclasses.replace(entry, rmin=None, rmax=None)
        if entry not in (TensorOverride(), TensorOverride(quant_type=activation_type)):
            left[name] = (entry,)
    return left


def _rewrite(
    model: ir.Model, options: BoundaryOptions, providers: Sequence[Any]
) -> tuple[PassReport, ...]:
    """Place the boundaries; remarks on each."""
    import onnxruntime

    if not (options.overrides or options.promote):
        return ()
    names = tuple(item if isinstance(item, str) else item[0] for item in providers)
    remarks = Remarks(_PASS)
    context = PassContext(remarks, names, parse_version(onnxruntime.__version__))
    start = time.perf_counter()
    place_boundaries(model, options, context)
    fold_pairs(model, options.target, context)
    model.graph.sort()
    return (PassReport(_PASS, time.perf_counter() - start, tuple(remarks)),)
