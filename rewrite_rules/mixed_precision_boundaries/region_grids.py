# SPDX-License-Identifier: MIT
"""By which grid an activation is quantised in each of its types.

In this order: what the user's override says; the grid that it has, if the type is its own; the
same grid, moved, if only the sign of the type differs; the whole 16-bit range over calibrated
values, or over a range that is known to begin or end at 0, if nothing converts it from or to
8 bits; the refinement of its 8-bit grid.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import numpy as np
import onnx_ir as ir

from rewrite_rules.graph.refusal import Refusal
from rewrite_rules.mixed_precision_boundaries.quantization_grid import QuantizationGrid
from rewrite_rules.mixed_precision_boundaries.quantized_graph import QuantizedTensor
from rewrite_rules.mixed_precision_boundaries.regions import Groups, Region
from rewrite_rules.mixed_precision_boundaries.tensor_overrides import (
    OverrideError,
    TensorOverride,
)

Grids = dict[tuple[QuantizedTensor, ir.DataType], QuantizationGrid]


def choose_grids(
    region: Region,
    groups: Groups,
    entries: Mapping[tuple[QuantizedTensor, ir.DataType], TensorOverride],
    ranges: Mapping[str, tuple[float, float]],
) -> Grids:
    """Choose the grids of all that a region touches; one for each group and type.

    Refused: 8 bits of a 16-bit activation without parameters, and a scale that its float type
    can't hold. Different parameters for one group are an :class:`OverrideError`.
    """
    members: dict[Hashable, list[QuantizedTensor]] = {}
    for tensor in region.plans:
        members.setdefault(groups.find(tensor), []).append(tensor)
    grids: Grids = {}
    for group in members.values():
        types = dict.fromkeys(
            dtype for tensor in group for dtype in sorted(region.plans[tensor].types())
        )
        for dtype in types:
            if dtype == ir.DataType.FLOAT:
                continue
            try:
                grid = _shared_grid(group, dtype, region, entries, ranges)
            except Refusal as refusal:
                raise Refusal(f"tensor {group[0].name!r}: {refusal}") from None
            for tensor in group:
                grids[tensor, dtype] = grid
    return grids


def _shared_grid(
    group: list[QuantizedTensor],
    dtype: ir.DataType,
    region: Region,
    entries: Mapping[tuple[QuantizedTensor, ir.DataType], TensorOverride],
    ranges: Mapping[str, tuple[float, float]],
) -> QuantizationGrid:
    known = [name for tensor in group for name in tensor.names() if name in ranges]
    span = None
    if known:
        span = min(ranges[name][0] for name in known), max(ranges[name][1] for name in known)
    asked: dict[QuantizationGrid, str] = {}
    for tensor in group:
        if (entry := entries.get((tensor, dtype))) is not None:
            grid = _asked_grid(tensor.grid, dtype, entry, span)
            if grid is not None:
                asked.setdefault(grid, tensor.name)
    if len(asked) > 1:
        (one, first), (other, second) = list(asked.items())[:2]
        raise OverrideError(
            f"tensors {first!r} and {second!r} share parameters, but are asked to be {one} "
            f"and {other}; give both the same"
        )
    if asked:
        return next(iter(asked))
    own = group[0].grid
    if dtype == own.dtype:
        return own
    if dtype.bitwidth > own.bits:
        span = span or _known_range(own)
        # A pair of Q and DQ leads from or to another type of the tensor.
        if any(t.codes_are_read or region.plans[t].types() - {dtype} for t in group):
            span = None
    if dtype.bitwidth == own.bits or (span is None and dtype.bitwidth > own.bits):
        return own.refine(dtype)
    if span is None:
        raise Refusal(
            f"its {dtype.name.lower()} parameters are not known: give 'scale' and "
            "'zero_point', or 'rmin' and 'rmax'"
        )
    return QuantizationGrid.of_range(dtype, *span, own.float_dtype)


def _known_range(grid: QuantizationGrid) -> tuple[float, float] | None:
    """The range that an 8-bit grid was made for, where its codes tell it exactly.

    Those that begin or end at 0 do. Quantisers remove the Relu and Clip that such a range
    stands for, and the refinement would let values pass, by a step of 8 bits.
    """
    if grid.float_dtype != np.float32 or grid.zero_point not in (grid.low, grid.high):
        return None
    low, high = grid.dequantize([grid.low, grid.high])
    return float(low), float(high)


def _asked_grid(
    own: QuantizationGrid,
    dtype: ir.DataType,
    entry: TensorOverride,
    span: tuple[float, float] | None,
) -> QuantizationGrid | None:
    if entry.scale is not None and entry.zero_point is not None:
        return QuantizationGrid(dtype, own.float_dtype.type(entry.scale), entry.zero_point)
    if entry.rmin is None and entry.rmax is None and entry.symmetric is None:
        return None
    low, high = span or tuple(map(float, own.dequantize([own.low, own.high])))
    return QuantizationGrid.of_range(
        dtype,
        low if entry.rmin is None else entry.rmin,
        high if entry.rmax is None else entry.rmax,
        own.float_dtype,
        bool(entry.symmetric),
    )
