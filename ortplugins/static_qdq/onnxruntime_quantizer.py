# SPDX-License-Identifier: MIT
"""onnxruntime's calibrators and quantiser: ranges of samples, and the all-8-bit QDQ graph.

Tensors that would share the parameters of a dequantised weight stay as they are; onnxruntime
waits for them without end. A Softmax in float16 gets a float16 scale.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import itertools
import logging
import os
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
from onnxruntime.quantization import (
    CalibrationMethod,
    QDQQuantizer,
    QuantType,
    create_calibrator,
)
from onnxruntime.quantization.calibrate import TensorData
from onnxruntime.quantization.quant_utils import load_model_with_shape_infer
from onnxruntime.quantization.registry import QDQRegistry, QLinearOpsRegistry

from ortplugins.errors import CalibrationError, QuantizationError
from ortplugins.samples.sources import Feed
from rewrite_rules.mixed_precision_boundaries.tensor_overrides import (
    OverrideError,
    Overrides,
    TensorOverride,
)

OP_TYPES = sorted({*QLinearOpsRegistry, *QDQRegistry})
"""All operators that onnxruntime can quantise."""

_FLOATS: dict[int, type[np.floating[Any]]] = {
    onnx.TensorProto.FLOAT: np.float32,
    onnx.TensorProto.FLOAT16: np.float16,
}


# Names that unnamed nodes have while they are quantised.
_UNNAMED = "ortplugins.unnamed_"
# What onnxruntime adds to the name of a tensor.
_SUFFIXES = (
    *("_scale", "_zero_point", "_quantized", "_quantized_scale", "_quantized_zero_point"),
    *("_QuantizeLinear_Input", "_QuantizeLinear_Output", "_DequantizeLinear_Output"),
)
CALIBRATION_METHODS = ("MinMax", "Entropy", "Percentile", "Distribution")

# Smallest and greatest value of each activation, of the activation's own type: from float16
# onnxruntime computes another scale than from the same number in float32.
Ranges = dict[str, tuple[np.generic, np.generic]]


def calibrate(
    path: Path,
    samples: Sequence[Feed],
    method: str,
    op_types: Sequence[str],
    providers: Sequence[Any],
) -> Ranges:
    """Return the range of each activation of a model, beside which onnxruntime writes."""
    try:
        calibrator = create_calibrator(
            path,
            list(op_types),
            augmented_model_path=os.fspath(path.with_name("augmented.onnx")),
            calibrate_method=CalibrationMethod[method],
            use_external_data_format=True,
            providers=list(providers),
        )
        take = functools.partial(next, iter(samples), None)
        calibrator.collect_data(types.SimpleNamespace(get_next=take))
        found = calibrator.compute_data()
    except Exception as error:  # whatever the session or numpy raise
        raise CalibrationError(
            f"onnxruntime's {method} calibrator failed: {type(error).__name__}: {error}"
        ) from error
    return {
        name: tuple(np.asarray(end).reshape(-1)[0] for end in data.range_value)
        for name, data in found.items()
    }


@contextlib.contextmanager
def quiet_quantizer() -> Iterator[None]:
    """Keep onnxruntime's quantiser from printing to stdout and to the root logger."""

    def others(record: logging.LogRecord) -> bool:
        return os.path.join("onnxruntime", "quantization") not in record.pathname

    root = logging.getLogger()
    # Without any handler, logging.warning() would give the root one that stays.
    handler = logging.NullHandler()
    root.addHandler(handler)
    root.addFilter(others)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        root.removeFilter(others)
        root.removeHandler(handler)


def quantize_to_eight_bits(
    path: Path,
    ranges: Mapping[str, tuple[float, float] | tuple[np.generic, np.generic]],
    overrides: Overrides,
    activation_type: ir.DataType,
    weight_type: ir.DataType,
    *,
    all_eight: bool,
    removable: Mapping[str, tuple[float, float]],
    **settings: Any,
) -> tuple[ir.Model, dict[str, tuple[float, float]]]:
    """Quantise the model of a temporary folder, where shape inference writes.

    Overrides of initializers are passed on; of activations, all but other types. A Relu or
    Clip whose range the 8 bits have goes, as in onnxruntime, if ``all_eight`` activations keep
    these and ``removable`` has its output's name, with the least and greatest value of that.
    Return the QDQ graph, and the ranges of float tensors as they were used: the input of a
    Relu has its output's, Softmax 0 to 1.
    """
    proto = load_model_with_shape_infer(path)
    dtypes = _float_types(proto.graph)
    initializers = {tensor.name for tensor in proto.graph.initializer}
    known: dict[str, Any] = dict(ranges)
    given: dict[str, list[dict[str, Any]]] = {}
    for name, entries in overrides.items():
        if name not in initializers:
            entry = entries[0]
            known[name] = _fixed_range(entry, ranges.get(name), activation_type)
            if entry.quant_type in (None, activation_type):
                entry = dataclasses.replace(entry, quant_type=activation_type, convert=None)
            else:
                entry = TensorOverride(rmin=entry.rmin, rmax=entry.rmax)
            entries = (entry,)
        what = dtypes.get(name, np.float32), f"override of tensor {name!r}"
        given[name] = [to_onnxruntime(entry, *what) for entry in entries]
    tensors_range = {}
    for name, (low, high) in known.items():
        if not (np.isfinite(low) and np.isfinite(high)):
            continue
        dtype = dtypes.get(name, getattr(low, "dtype", np.float32))
        ends = {"lowest": np.asarray(low, dtype), "highest": np.asarray(high, dtype)}
        tensors_range[name] = TensorData(**ends)
    try:
        quantizer = _EightBitQuantizer(
            dtypes,
            removable,
            model=proto,
            reduce_range=False,
            weight_qType=_quant_type(weight_type),
            activation_qType=_quant_type(activation_type),
            tensors_range=tensors_range,
            extra_options={
                "TensorQuantOverrides": given,
                "QDQKeepRemovableActivations": not all_eight,
            },
            **settings,
        )
        model = quantizer.quantized()
    except QuantizationError:
        raise
    except Exception as error:  # anything, AssertionError among it
        text = str(error)
        if found := re.search(r"not specified for param (.*?)\. In static mode", text):
            raise CalibrationError(
                f"tensor {found[1]!r} has no finite range: give it one in ranges or as rmin "
                "and rmax in overrides, or name its nodes in nodes_to_exclude"
            ) from error
        raise QuantizationError(
            f"onnxruntime's quantiser failed: {type(error).__name__}: {text}"
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
    return model, used


class _EightBitQuantizer(QDQQuantizer):  # type: ignore[misc]  # onnxruntime has no types
    """Makes an 8-bit QDQ graph."""

    def __init__(
        self,
        dtypes: Mapping[str, type[np.floating[Any]]],
        removable: Mapping[str, tuple[float, float]],
        **arguments: Any,
    ) -> None:
        """Take the types of all tensors, and what Relu and Clip nodes that may go write."""
        self._dtypes, self._removable = dtypes, removable
        graph = arguments["model"].graph
        self._names = {name for node in graph.node for name in node.output}
        self._names |= {value.name for value in (*graph.input, *graph.initializer)}
        readers: dict[str, set[tuple[object, ...]]] = {}
        for number, node in enumerate(graph.node):
            # It tells readers of a shared bias from each other by name.
            node.name = node.name or f"{_UNNAMED}{number}"
            transposed = [item.i for item in node.attribute if item.name == "transB"]
            for index, name in enumerate(node.input):
                readers.setdefault(name, set()).add((node.op_type, index, *transposed))
        # Channels that readers count along other axes, or Gather takes the scales of; and of
        # a stack, for which MatMulIntegerToFloat has no kernel.
        self._per_tensor = {
            tensor.name
            for tensor in graph.initializer
            for kinds in [readers.get(tensor.name, set())]
            if len(kinds) > 1 or (len(tensor.dims) > 2 and ("MatMul", 1) in kinds)
        }
        super().__init__(**arguments)

    def quantized(self) -> ir.Model:
        """Quantise; refuse a model of which nothing is, or that has a name which is needed."""
        self.quantize_model()
        if not any(node.op_type == "QuantizeLinear" for node in self.model.nodes()):
            raise QuantizationError(
                "nothing to quantise: no chosen node of the main graph has float32 or float16 "
                "inputs and an operator that onnxruntime quantises"
            )
        for name in self.quantized_value_map:
            for suffix in _SUFFIXES:
                if name + suffix in self._names:
                    raise QuantizationError(
                        f"onnxruntime's quantiser names a tensor {name + suffix!r}, which the "
                        "model has already: rename it there"
                    )
        model: ir.Model = ir.from_proto(self.model.model)
        model.graph.sort()  # onnxruntime's own overlooks what subgraphs read
        for node in model.graph:
            if (node.name or "").startswith(_UNNAMED):
                node.name = None
        return model

    def adjust_tensor_ranges(self) -> None:
        """Adjust ranges; those of Softmax, which become float32, get their type back.

        What a Relu or Clip reads keeps its own range where others read it, too.
        """
        before = dict(self.tensors_range)
        super().adjust_tensor_ranges()
        for node in self.model.nodes():
            if node.op_type in ("Clip", "Relu") and node.output[0] not in self._removable:
                self.tensors_range |= {n: before[n] for n in node.input[:1] if n in before}
        for name, data in self.tensors_range.items():
            ends = [end.astype(self._dtypes.get(name, end.dtype)) for end in data.range_value]
            self.tensors_range[name] = TensorData(lowest=ends[0], highest=ends[1])

    def try_replacing_upstream_output(self, upstream: str, output: str) -> bool:
        """Drop a Relu or Clip, unless its grid has values that it never writes.

        Each grid has 0, which may be below a Clip's lower end; and it may be symmetric.
        """
        if output not in self._removable or output not in self.quantization_params:
            return False
        grid, (low, high) = self.quantization_params[output].original, self._removable[output]
        codes, scale = np.iinfo(grid["zero_point"].dtype), float(grid["scale"])
        least, greatest = ((end - int(grid["zero_point"])) for end in (codes.min, codes.max))
        if least * scale < low - scale or high + scale < greatest * scale:
            return False
        return bool(super().try_replacing_upstream_output(upstream, output))

    def _dup_initializer(self, initializer: onnx.TensorProto) -> onnx.TensorProto:
        """Add a copy of a bias, with a number behind its name that no tensor has."""
        copy = onnx.TensorProto()
        copy.CopyFrom(initializer)
        names = (f"{initializer.name}{number}" for number in itertools.count())
        copy.name = next(name for name in names if name not in self._names)
        self._names.add(copy.name)
        self.model.add_initializer(copy)
        return copy

    def is_tensor_per_channel(
        self, tensor_name: str, default_axis: int, op_type: str | None = None
    ) -> tuple[bool, int | None]:
        """Whether a weight has a scale for each channel, and along which axis these are."""
        if tensor_name in self._per_tensor:
            return False, None
        found: tuple[bool, int | None] = super().is_tensor_per_channel(
            tensor_name, default_axis, op_type
        )
        return found

    def quantize_bias_tensor(
        self,
        node_name: str,
        bias_name: str,
        input_name: str,
        weight_name: str,
        beta: float = 1.0,
    ) -> None:
        """Quantise a bias of one number for each scale of its weight; others stay in float.

        A Gemm's ``beta`` goes into its bias: onnxruntime sets it to 1, whatever it is.
        """
        bias = self.model.get_initializer(bias_name)
        if bias is not None and beta != 1:
            scaled = np.asarray(onnx.numpy_helper.to_array(bias) * float(beta))
            bias = self.model.get_initializer(self._dup_initializer(bias).name)
            bias.CopyFrom(onnx.numpy_helper.from_array(scaled, bias.name))
            self.model.replace_input_of_nodes(bias_name, bias.name, {node_name})
            bias_name = bias.name
        axis = getattr(self.tensors_to_quantize.get(weight_name), "axis", None)
        channels = None if axis is None else [self.initializers[weight_name].dims[axis]]
        if bias is None or channels in (None, [*bias.dims]):
            super().quantize_bias_tensor(node_name, bias_name, input_name, weight_name)

    def quantize_output_same_as_input(
        self, output_name: str, input_name: str, node_name: str
    ) -> None:
        """Share the parameters of a tensor, unless it is quantised in the model already."""
        known = self.is_tensor_quantized(input_name)
        if known and input_name not in self.tensor_to_producing_dq:
            super().quantize_output_same_as_input(output_name, input_name, node_name)


def to_onnxruntime(
    override: TensorOverride, real: npt.DTypeLike = np.float32, what: str = "override"
) -> dict[str, Any]:
    """Return an entry as ``TensorQuantOverrides`` of ``quantize_static`` takes it.

    Types become members of its QuantType; scales, zero points and ranges arrays of the type
    that it asserts, ``real`` where they are not codes. Errors call the entry ``what``.
    """
    fields: dict[str, Any] = {
        field.name: value
        for field in dataclasses.fields(override)
        if (value := getattr(override, field.name)) is not None
    }
    if (quant_type := override.quant_type) is not None:
        fields["quant_type"] = _quant_type(quant_type)
    if override.zero_point is not None:
        if quant_type is None:
            raise OverrideError(f"{what}: 'zero_point' needs 'quant_type' beside it")
        # numpy has no type of 4 bits; ml_dtypes' wrap around silently.
        wide = np.int8 if quant_type.name == "INT4" else np.uint8
        dtype = wide if quant_type.bitwidth < 8 else quant_type.numpy()
        fields["zero_point"] = np.array(override.zero_point, dtype)
    for field in fields.keys() & {"scale", "rmin", "rmax"}:
        fields[field] = np.array(fields[field], real)
    if override.convert is not None:
        fields["convert"] = to_onnxruntime(override.convert, real, f"{what}, 'convert'")
    return fields


def _float_types(graph: onnx.GraphProto) -> dict[str, type[np.floating[Any]]]:
    values = (*graph.value_info, *graph.input, *graph.output)
    types = {value.name: value.type.tensor_type.elem_type for value in values}
    types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    return {name: _FLOATS[kind] for name, kind in types.items() if kind in _FLOATS}


def _fixed_range(
    entry: TensorOverride, known: Any, activation_type: ir.DataType
) -> tuple[np.generic, np.generic]:
    """Return the range of an activation with an override: no sample need have reached it."""
    low, high = known or (np.float32(np.nan), np.float32(np.nan))
    if entry.scale is not None and entry.zero_point is not None:
        codes = np.iinfo((entry.quant_type or activation_type).numpy())
        low = np.float32((int(codes.min) - entry.zero_point) * entry.scale)
        high = np.float32((int(codes.max) - entry.zero_point) * entry.scale)
    low = low if entry.rmin is None else np.float32(entry.rmin)
    high = high if entry.rmax is None else np.float32(entry.rmax)
    return low, high


def _quant_type(dtype: ir.DataType) -> Any:
    return next(kind for kind in QuantType if kind.tensor_type == dtype)
