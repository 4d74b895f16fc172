# SPDX-License-Identifier: MIT
"""onnxruntime's quantiser with four changes, and tensor overrides as it takes them.

It removes a Relu or Clip that the 8-bit range does itself: not where one side of it will be
of another type, and the removed name is kept. A tensor without a range is an error that names
it. Tensors that would share the parameters of one that is never quantised are an error; there,
they are waited for without end. A Softmax in float16 gets a float16 scale.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
from onnxruntime.quantization import QDQQuantizer, QuantType
from onnxruntime.quantization.calibrate import TensorData

from ortplugins.errors import CalibrationError, QuantizationError
from rewrite_rules.mixed_precision_boundaries.tensor_overrides import (
    OverrideError,
    Overrides,
    TensorOverride,
)
from session_options.override_json import quant_type_name

_OVERRIDDEN = (
    "try_replacing_upstream_output",
    "adjust_tensor_ranges",
    "_make_tensor_scale_zp_initializers",
    "_quantize_sharing_param_tensors",
)


class EightBitQuantizer(QDQQuantizer):  # type: ignore[misc]  # onnxruntime has no types
    """Makes an 8-bit QDQ graph.

    Attributes:
        renamed: Inputs of the Relu and Clip nodes that are gone, each with the output that
            took its place.
    """

    def __init__(
        self,
        converted: Collection[str],
        infinite: Mapping[str, str],
        dtypes: Mapping[str, type[np.floating[Any]]],
        **arguments: Any,
    ) -> None:
        """Take what onnxruntime's class takes, and more.

        Args:
            converted: Activations that will have two types.
            infinite: Why some activations have no range.
            dtypes: Float types of tensors.
            arguments: For the base class.

        Raises:
            QuantizationError: If the base class lacks a method that is overridden here.
        """
        for name in _OVERRIDDEN:
            if not callable(getattr(QDQQuantizer, name, None)):
                raise QuantizationError(
                    f"onnxruntime {onnxruntime.__version__}: its QDQQuantizer has no method "
                    f"{name!r}; quantize_static_mixed needs it, as onnxruntime 1.31 has it"
                )
        self._converted, self._infinite, self._dtypes = converted, infinite, dtypes
        self.renamed: dict[str, str] = {}
        super().__init__(**arguments)

    def try_replacing_upstream_output(self, upstream: str, output: str) -> bool:
        """Remove a Relu or Clip between two tensors, if both will have one type."""
        if upstream in self._converted or output in self._converted:
            return False
        replaced = bool(super().try_replacing_upstream_output(upstream, output))
        if replaced:
            self.renamed[upstream] = output
        return replaced

    def adjust_tensor_ranges(self) -> None:
        """Adjust ranges; those of Softmax, which become float32, get their type back."""
        super().adjust_tensor_ranges()
        for name, data in self.tensors_range.items():
            ends = [end.astype(self._dtypes.get(name, end.dtype)) for end in data.range_value]
            self.tensors_range[name] = TensorData(lowest=ends[0], highest=ends[1])

    def _make_tensor_scale_zp_initializers(self, name: str) -> Any:
        if name not in self.quantization_params:
            raise CalibrationError(
                f"tensor {name!r} can't be quantised: "
                f"{self._infinite.get(name, 'it has no calibrated range')}; give it one in "
                "ranges or as rmin and rmax in overrides, or name its nodes in "
                "nodes_to_exclude"
            )
        return super()._make_tensor_scale_zp_initializers(name)

    def _quantize_sharing_param_tensors(self) -> None:
        known, waiting = set(self.quantized_value_map), dict(self.tensors_to_quantize)
        while ready := [
            name
            for name, info in waiting.items()
            if info.quant_para_provider and info.quant_para_provider.input_name in known
        ]:
            known.update(ready)
            for name in ready:
                del waiting[name]
        if waiting:
            raise QuantizationError(
                f"tensor {next(iter(waiting))!r} would share the scale of one that is "
                "not quantised here: name its node in nodes_to_exclude"
            )
        super()._quantize_sharing_param_tensors()


def to_onnxruntime(
    overrides: Overrides, float_dtype: npt.DTypeLike = np.float32
) -> dict[str, list[dict[str, Any]]]:
    """Return what ``extra_options["TensorQuantOverrides"]`` of ``quantize_static`` takes.

    Types become members of its QuantType, scales, zero points and ranges arrays of the type
    that it asserts, consumers a set.

    Args:
        overrides: From :func:`.read_overrides`, for instance.
        float_dtype: Of the model's activations, float32 or float16: the scales' type.

    Raises:
        OverrideError: If a zero point has no ``quant_type`` beside it, or lies outside of it.
    """
    return {
        name: [
            _fields(entry, float_dtype, f"override of tensor {name!r}") for entry in entries
        ]
        for name, entries in overrides.items()
    }


def _fields(override: TensorOverride, real: npt.DTypeLike, what: str) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    quant_type = override.quant_type
    if quant_type is not None:
        fields["quant_type"] = QuantType[quant_type_name(quant_type)]
    if (zero_point := override.zero_point) is not None:
        if quant_type is None:
            raise OverrideError(f"{what}: 'zero_point' needs 'quant_type' beside it")
        try:
            # numpy has no type of 4 bits; ml_dtypes' wrap around silently.
            wide = np.int8 if quant_type.name == "INT4" else np.uint8
            code = np.array(
                zero_point, wide if quant_type.bitwidth < 8 else quant_type.numpy()
            )
        except OverflowError as error:
            raise OverrideError(f"{what}: 'zero_point': {error}") from None
        fields["zero_point"] = code
    for field in ("scale", "rmin", "rmax"):
        if (number := getattr(override, field)) is not None:
            fields[field] = np.array(number, real)
    for field in ("symmetric", "reduce_range", "axis"):
        if (value := getattr(override, field)) is not None:
            fields[field] = value
    if override.convert is not None:
        fields["convert"] = _fields(override.convert, real, f"{what}, 'convert'")
    if override.recv_nodes is not None:
        fields["recv_nodes"] = set(override.recv_nodes)
    return fields
