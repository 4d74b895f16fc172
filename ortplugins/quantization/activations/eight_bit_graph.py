# SPDX-License-Identifier: MIT
"""From a float model and ranges to the all-8-bit QDQ graph that onnxruntime's quantiser makes.

What onnxruntime's quantiser does otherwise is in :mod:`.onnxruntime_quantizer`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from ortplugins.errors import QuantizationError
from ortplugins.quantization.activations.ranges import Ranges
from rewrite_rules.graph.nodes import label
from rewrite_rules.mixed_precision_boundaries.tensor_overrides import Overrides, TensorOverride

_FLOATS: dict[int, type[np.floating[Any]]] = {
    onnx.TensorProto.FLOAT: np.float32,
    onnx.TensorProto.FLOAT16: np.float16,
}


@dataclasses.dataclass(frozen=True, eq=False)
class EightBitGraph:
    """What onnxruntime's quantiser made.

    Attributes:
        model: The QDQ graph.
        ranges: Of the float tensors, as it used them: the input of a Relu has its output's,
            Softmax 0 to 1.
        renamed: Inputs of the Relu and Clip nodes that are gone, each with the output that
            took its place.
    """

    model: ir.Model
    ranges: dict[str, tuple[float, float]]
    renamed: dict[str, str]


def quantize_to_eight_bits(
    path: Path,
    ranges: Mapping[str, tuple[float, float] | tuple[np.generic, np.generic]],
    overrides: Overrides,
    converted: Collection[str],
    activation_type: ir.DataType,
    weight_type: ir.DataType,
    **settings: Any,
) -> EightBitGraph:
    """Quantise a model.

    Args:
        path: The float model, in a temporary folder: shape inference writes beside it.
        ranges: Of its activations.
        overrides: Those of initializers are passed on; of activations, all but other types.
        converted: Activations that will have two types.
        activation_type: UINT8 or INT8.
        weight_type: Of initializers.
        settings: Further arguments of onnxruntime's QDQQuantizer.

    Raises:
        CalibrationError: If an activation has no range, or an infinite one.
        QuantizationError: If onnxruntime can't quantise the model.
    """
    from onnxruntime.quantization.calibrate import TensorData
    from onnxruntime.quantization.quant_utils import load_model_with_shape_infer

    from ortplugins.quantization.activations.onnxruntime_quantizer import EightBitQuantizer

    proto = load_model_with_shape_infer(path)
    dtypes = _float_types(proto.graph)
    initializers = {tensor.name for tensor in proto.graph.initializer}
    tensors_range, infinite = {}, {}
    fixed = _fixed_ranges(overrides, ranges, initializers, activation_type)
    known = {**ranges, **fixed}
    for name, (low, high) in known.items():
        if not (np.isfinite(low) and np.isfinite(high)):
            if name in ranges:
                infinite[name] = f"its range is {low} to {high}"
            continue
        dtype = dtypes.get(name, getattr(low, "dtype", np.float32))
        ends = (np.asarray(end, dtype) for end in (low, high))
        tensors_range[name] = TensorData(**dict(zip(("lowest", "highest"), ends, strict=True)))
    given = _for_onnxruntime(overrides, initializers, dtypes, activation_type)
    try:
        quantizer = EightBitQuantizer(
            converted,
            infinite,
            dtypes,
            model=proto,
            reduce_range=False,
            weight_qType=_quant_type(weight_type),
            activation_qType=_quant_type(activation_type),
            tensors_range=tensors_range,
            extra_options={"TensorQuantOverrides": given},
            **settings,
        )
        quantizer.quantize_model()
        quantizer.model.topological_sort()
    except QuantizationError:
        raise
    except Exception as error:  # anything, AssertionError among it
        raise QuantizationError(
            f"onnxruntime's quantiser failed: {type(error).__name__}: {error}"
        ) from error
    # onnxruntime adjusts some, then overrides have the last word.
    used = {}
    for name, data in tensors_range.items():
        low, high = (float(end) for end in data.range_value)
        entry = next(iter(overrides.get(name, ())), TensorOverride())
        used[name] = (
            low if entry.rmin is None else entry.rmin,
            high if entry.rmax is None else entry.rmax,
        )
    return EightBitGraph(ir.from_proto(quantizer.model.model), used, quantizer.renamed)


def _float_types(graph: onnx.GraphProto) -> dict[str, type[np.floating[Any]]]:
    values = (*graph.value_info, *graph.input, *graph.output)
    types = {value.name: value.type.tensor_type.elem_type for value in values}
    types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    return {name: _FLOATS[kind] for name, kind in types.items() if kind in _FLOATS}


def _fixed_ranges(
    overrides: Overrides,
    ranges: Mapping[str, Any],
    initializers: Collection[str],
    activation_type: ir.DataType,
) -> Ranges:
    """Ranges of activations that overrides give one: no sample need have reached them."""
    fixed: Ranges = {}
    for name, entries in overrides.items():
        if name in initializers or not entries:
            continue
        entry = entries[0]
        low, high = ranges.get(name, (np.float32(np.nan), np.float32(np.nan)))
        if entry.scale is not None and entry.zero_point is not None:
            codes = np.iinfo((entry.quant_type or activation_type).numpy())
            low = np.float32((int(codes.min) - entry.zero_point) * entry.scale)
            high = np.float32((int(codes.max) - entry.zero_point) * entry.scale)
        low = low if entry.rmin is None else np.float32(entry.rmin)
        high = high if entry.rmax is None else np.float32(entry.rmax)
        fixed[name] = (low, high)
    return fixed


def _for_onnxruntime(
    overrides: Overrides,
    initializers: Collection[str],
    dtypes: Mapping[str, type[np.floating[Any]]],
    activation_type: ir.DataType,
) -> dict[str, list[dict[str, Any]]]:
    """Overrides in the types that onnxruntime wants; of activations what leaves them 8-bit."""
    from ortplugins.quantization.activations.onnxruntime_quantizer import to_onnxruntime

    result: dict[str, list[dict[str, Any]]] = {}
    for name, entries in overrides.items():
        if name not in initializers and entries:
            entry = entries[0]
            if entry.quant_type in (None, activation_type):
                entry = dataclasses.replace(entry, quant_type=activation_type, convert=None)
            else:
                entry = TensorOverride(rmin=entry.rmin, rmax=entry.rmax)
            entries = (entry,)
        result |= to_onnxruntime({name: entries}, dtypes.get(name, np.float32))
    return result


def _quant_type(dtype: ir.DataType) -> Any:
    from onnxruntime.quantization import QuantType

    return next(kind for kind in QuantType if kind.tensor_type == dtype)


def converted_tensors(
    graph: ir.Graph,
    overrides: Overrides,
    promote: Collection[str],
    activation_type: ir.DataType,
) -> frozenset[str]:
    """Return the activations that some node will write, or read, in another type than others.

    Only what the nearest nodes of each named tensor bring about; groups of operators that
    share a type may reach further.
    """
    first = {name: entries[0] for name, entries in overrides.items() if entries}
    named = {*promote} | {
        name
        for name, entry in first.items()
        if entry.quant_type not in (None, activation_type)
    }
    result = {name for name, entry in first.items() if entry.convert is not None}
    activations = [value for value in graph.inputs if value.name not in graph.initializers]
    activations += [value for node in graph for value in node.outputs]
    nodes = {node for node in graph if label(node) in named}
    for value in activations:
        if value.name in named:
            nodes.update(value.consumers())
            if (producer := value.producer()) is not None:
                nodes.add(producer)
    for value in activations:
        writer = value.producer()
        written = value.name in named or writer in nodes
        if writer is not None and any(
            (reader in nodes) != written for reader in value.consumers()
        ):
            result.add(value.name or "")
    return frozenset(result)
