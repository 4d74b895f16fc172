# SPDX-License-Identifier: MIT
"""What a user wants of the quantisation of single tensors: onnxruntime's overrides, checked.

The fields are those of ``TensorQuantOverrides`` in onnxruntime's quantiser, as plain values.
"""

from __future__ import annotations

__all__ = ["Overrides", "TensorOverride"]

import dataclasses
from collections.abc import Mapping

import onnx_ir as ir


@dataclasses.dataclass(frozen=True)
class TensorOverride:
    """How a tensor (or one channel of an initializer) is to be quantised; None: as it is.

    Attributes:
        quant_type: Type of the codes.
        scale: Step between two codes; with ``zero_point`` or not at all.
        zero_point: Code of the value 0.
        symmetric: Whether the range is made symmetric about 0.
        reduce_range: Whether one bit is left unused; initializers only.
        rmin: Smallest value, instead of the calibrated one.
        rmax: Greatest value.
        axis: Of an initializer quantised per channel.
        convert: The second type of an activation, for some of its consumers.
        recv_nodes: In a ``convert``: names of the consumers that get it (unnamed nodes are
            called by their first output); None: all.
    """

    quant_type: ir.DataType | None = None
    scale: float | None = None
    zero_point: int | None = None
    symmetric: bool | None = None
    reduce_range: bool | None = None
    rmin: float | None = None
    rmax: float | None = None
    axis: int | None = None
    convert: TensorOverride | None = None
    recv_nodes: frozenset[str] | None = None


# Per tensor: one entry, or one for each channel of an initializer.
Overrides = Mapping[str, tuple[TensorOverride, ...]]
