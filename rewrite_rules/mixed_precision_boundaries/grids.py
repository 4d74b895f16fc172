# SPDX-License-Identifier: MIT
"""By which grid an activation is quantised in each type that a region has it in.

The tensors that data movement passes on have one grid for each type: the first of
:data:`PRECEDENCE` that there is.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from rewrite_rules.mixed_precision_boundaries.quantization_grid import QuantizationGrid
from rewrite_rules.mixed_precision_boundaries.quantized_graph import QuantizedTensor
from rewrite_rules.mixed_precision_boundaries.regions import Groups, Overridden, Region
from rewrite_rules.mixed_precision_boundaries.tensor_overrides import (
    OverrideError,
    TensorOverride,
)
from rewrite_rules.remarks import Refusal


def choose_grids(region: Region, groups: Groups, overridden: Overridden) -> None:
    """Choose the grids of all that a region touches; one for each group and type.

    Refused: 8 bits of a 16-bit activation without parameters, and a scale that its float type
    can't hold. Different parameters for one group are an :class:`OverrideError`.
    """
    members: dict[int, list[QuantizedTensor]] = {}
    for tensor in region.plans:
        members.setdefault(id(groups.find(tensor)), []).append(tensor)
    for group in members.values():
        types = dict.fromkeys(
            dtype for tensor in group for dtype in sorted(region.plans[tensor].types())
        )
        for dtype in types:
            if dtype == ir.DataType.FLOAT:
                continue
            try:
                grid = _shared_grid(_Wanted(group, dtype, region, overridden))
            except Refusal as refusal:
                raise Refusal(refusal.code, f"tensor {group[0].name!r}: {refusal}") from None
            for tensor in group:
                region.plans[tensor].grids[dtype] = grid


@dataclasses.dataclass(frozen=True)
class _Wanted:
    """A type that tensors of one grid are to have."""

    tensors: list[QuantizedTensor]
    dtype: ir.DataType
    region: Region
    overridden: Overridden

    @property
    def own(self) -> QuantizationGrid:
        """The grid that they have, or are given in the type that they keep."""
        tensor = self.tensors[0]
        keeps = self.region.plans[tensor].produced == tensor.grid.dtype
        return (keeps and self.asked(tensor.grid.dtype)) or tensor.grid

    def asked(self, dtype: ir.DataType) -> QuantizationGrid | None:
        """Return the grid that overrides of any of the tensors ask for."""
        asked: dict[QuantizationGrid, str] = {}
        for tensor in self.tensors:
            _, override = self.overridden.get(tensor, ("", TensorOverride()))
            for entry in filter(None, (override, override.convert)):
                if (entry.quant_type or tensor.grid.dtype) == dtype:
                    grid = _asked_grid(tensor.grid, dtype, entry)
                    if grid is not None:
                        asked.setdefault(grid, tensor.name)
        if len(asked) > 1:
            (one, first), (other, second) = list(asked.items())[:2]
            raise OverrideError(
                f"tensors {first!r} and {second!r} share parameters, but are asked to be "
                f"{one} and {other}; give both the same"
            )
        return next(iter(asked), None)


def _asked(wanted: _Wanted) -> QuantizationGrid | None:
    """What the user's override says."""
    return wanted.asked(wanted.dtype)


def _own(wanted: _Wanted) -> QuantizationGrid | None:
    """The grid that it has, if the type is its own."""
    return wanted.own if wanted.dtype == wanted.own.dtype else None


def _other_sign(wanted: _Wanted) -> QuantizationGrid | None:
    """The same grid, moved, if only the sign of the type differs."""
    same = wanted.dtype.bitwidth == wanted.own.bits
    return wanted.own.refine(wanted.dtype) if same else None


def _refined(wanted: _Wanted) -> QuantizationGrid | None:
    """The refinement of the grid that it has, which holds each of its values."""
    finer = wanted.dtype.bitwidth > wanted.own.bits
    return wanted.own.refine(wanted.dtype) if finer else None


PRECEDENCE = (_asked, _own, _other_sign, _refined)


def _shared_grid(wanted: _Wanted) -> QuantizationGrid:
    found = next((grid for choose in PRECEDENCE if (grid := choose(wanted))), None)
    if found is None:
        raise Refusal(
            "ORP312",
            f"its {wanted.dtype.name.lower()} parameters are not known: give 'scale' and "
            "'zero_point', or 'rmin' and 'rmax'",
        )
    return found


def _asked_grid(
    own: QuantizationGrid, dtype: ir.DataType, entry: TensorOverride
) -> QuantizationGrid | None:
    if entry.scale is not None and entry.zero_point is not None:
        return QuantizationGrid(dtype, np.float32(entry.scale), entry.zero_point)
    if entry.rmin is None and entry.rmax is None and entry.symmetric is None:
        return None
    low, high = map(float, own.dequantize([own.low, own.high]))
    low = low if entry.rmin is None else entry.rmin
    high = high if entry.rmax is None else entry.rmax
    return QuantizationGrid.of_range(dtype, low, high, bool(entry.symmetric))
