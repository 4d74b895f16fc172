# SPDX-License-Identifier: MIT
"""How scores of query heads are laid out; what a mask hides in made-up runs.

Query heads may be grouped in the graph, so that no key is repeated:

    MatMul(Reshape(q[B, H, S, D], [B, G, r, S, D]), Unsqueeze(k'[B, G, D, T], 2))
    MatMul(Reshape(q[B, H, S, D], [B, G, r * S, D]), k'[B, G, D, T])

Masks have the same layouts: an axis of 1 for r, or the rows of one query head r times.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from rewrite_rules.facts.made_up_batches import Run
from rewrite_rules.graph.nodes import made_by
from rewrite_rules.remarks import Refusal
from rewrite_rules.shapes.dimensions import Dim, Dims, number
from rewrite_rules.shapes.evaluator import Array, CannotEvaluate, GraphEvaluator
from rewrite_rules.shapes.proved_shapes import ProvedShapes
from rewrite_rules.transformer_fusion.head_layout import ints

# What is added to a score that must not count; float16's lowest is -65504.
_LOW = -1e4


@dataclasses.dataclass(frozen=True)
class GroupedLayout:
    """How scores of query heads are laid out.

    ``repeats``: r, how many query heads share a head of the keys; 1 for ``[B, H, S, T]``.
    ``own_axis``: whether r has an axis of its own, ``[B, G, r, S, T]``.
    """

    repeats: int = 1
    own_axis: bool = False

    @property
    def rank(self) -> int:
        """How many axes scores have."""
        return 4 + self.own_axis

    @property
    def in_rows(self) -> bool:
        """Whether query heads are rows of the head that they share."""
        return self.repeats > 1 and not self.own_axis

    def dims(self, shape: Dims, name: str | None) -> tuple[Dim | None, ...]:
        """Return the sizes of a mask for ``[B, H, S, T]``; None for what a run tells."""
        if len(shape) > self.rank:
            raise Refusal(f"mask {name!r} has {len(shape)} axes, not {self.rank}")
        shape = ((1, ()),) * (self.rank - len(shape)) + shape
        if not self.own_axis:
            return shape if self.repeats == 1 else (*shape[:2], None, shape[3])
        if number(shape[2]) != 1:
            raise Refusal(f"mask {name!r} may differ from head to head")
        return (*shape[:2], *shape[3:])

    def array(self, mask: Array) -> Array:
        """Return the mask for ``[B, H, S, T]``, of the first query head of each group."""
        if self.own_axis:
            return mask[:, :, 0]
        return mask if self.repeats == 1 else mask[:, :, : mask.shape[2] // self.repeats]

    def emit(self, op: Any, mask: ir.Value) -> ir.Value:
        """Emit the mask for ``[B, H, S, T]``."""
        made = mask
        if self.own_axis:
            made = op.Squeeze(mask, ints(op, 2))
        elif self.repeats > 1:
            # Rows that are not those of the queries fail where the mask is added, as before.
            rows = op.Div(op.Shape(mask, start=2, end=3), ints(op, self.repeats))
            made = op.Slice(mask, ints(op, 0), rows, ints(op, 2))
        return made


def read_grouped_layout(
    query: ir.Value, groups: int, facts: ProvedShapes
) -> tuple[ir.Value, GroupedLayout]:
    """Return ``q[B, H, S, D]``, and how a Reshape groups it; q itself where none does."""
    node = made_by(query, "Reshape")
    source = None if node is None else node.inputs[0]
    before, after = facts.dims(source, 4), facts.dims(query)
    heads = None if before is None else number(before[1])
    if source is None or before is None or heads in (None, groups) or heads % groups:
        return query, GroupedLayout()
    repeats = heads // groups
    batch, _, rows, size = before
    own_axis = (batch, (groups, ()), (repeats, ()), rows, size)
    merged = (batch, (groups, ()), facts.unknowns.product(((repeats, ()), rows)), size)
    if after not in (own_axis, merged):
        return query, GroupedLayout()
    return source, GroupedLayout(repeats, after == own_axis)


@dataclasses.dataclass(frozen=True)
class Mask:
    """A tensor that is added to scores, or says where ``lowest`` stands instead of one.

    Adding that number is the same: no score is large enough to change it. ``hides`` is the
    value of a bool tensor that hides a score.
    """

    value: ir.Value
    lowest: float | None = None
    hides: bool = True

    def added(self, op: Any, missing: int, total: ir.Value | None) -> Any:
        """Emit what is added, with that many more axes, after a total of other masks."""
        value: Any = (
            op.Unsqueeze(self.value, ints(op, *range(missing))) if missing else self.value
        )
        if self.lowest is None:
            return value if total is None else op.Add(total, value)
        shown = op.Constant(value_float=0.0) if total is None else total
        numbers = [op.Constant(value_float=self.lowest), shown]
        return op.Where(value, *numbers[:: 1 if self.hides else -1])

    def computed(self, array: Array, rank: int) -> Array:
        """Return what is added, given the tensor."""
        array = array.reshape((1,) * (rank - array.ndim) + array.shape)
        return (
            array if self.lowest is None else np.where(array == self.hides, self.lowest, 0.0)
        )


@dataclasses.dataclass(frozen=True)
class Observed:
    """What a mask did in made-up runs, which suggests a form and decides nothing.

    Attributes:
        kind: For remarks: "padding", "causal", "sliding window of 6", or what it is instead.
        causal: Whether no token saw a later one.
    """

    kind: str
    causal: bool


def observe(
    runs: Mapping[Run, GraphEvaluator], mask: Mask, layout: GroupedLayout
) -> Observed | None:
    """Return what a mask of scores does in made-up runs; None where it can't be computed."""
    try:
        arrays = {
            run: layout.array(mask.computed(each.array(mask.value), layout.rank))
            for run, each in runs.items()
        }
    except CannotEvaluate:
        return None
    return _observed(arrays)


def _observed(arrays: Mapping[Run, Array]) -> Observed:
    causal = plain = padding = True
    windows = set()
    for run, array in arrays.items():
        total = run.past + run.length
        try:
            added = np.broadcast_to(array, (run.batch, array.shape[1], run.length, total))
        except (IndexError, ValueError):
            return Observed("other keys", False)
        kept = run.kept()
        # What padding sees is whatever the exporter found handy.
        sees = np.asarray(np.all(added > _LOW, axis=1))[kept[:, run.past :]]
        key = np.arange(total)[None]
        query = np.broadcast_to(np.arange(run.past, total), (run.batch, run.length))
        query = query[kept[:, run.past :]][:, None]
        causal &= not (sees & (key > query)).any()
        visible = np.repeat(kept, kept[:, run.past :].sum(axis=1), axis=0)
        padding &= np.array_equal(sees, visible)
        reach = int(np.max(np.where(sees, query - key, 0), initial=0)) + 1
        plain &= bool(np.isin(added, (0.0, added.min())).all())
        plain &= np.array_equal(sees, visible & (key <= query) & (key > query - reach))
        windows.add((reach, total))
    longest, most = (max(sizes) for sizes in zip(*windows, strict=True))
    windowed = longest < most and all(reach == min(longest, size) for reach, size in windows)
    if not causal:
        return Observed("padding" if padding else "not causal", False)
    if not plain:
        return Observed("causal, with a bias", True)
    return Observed(f"sliding window of {longest}" if windowed else "causal", True)
