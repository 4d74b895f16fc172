# SPDX-License-Identifier: MIT
"""Masks of scores, and how scores of query heads are laid out.

Query heads may be grouped in the graph, so that no key is repeated:

    MatMul(Reshape(q[B, H, S, D], [B, G, r, S, D]), Unsqueeze(k'[B, G, D, T], 2))
    MatMul(Reshape(q[B, H, S, D], [B, G, r * S, D]), k'[B, G, D, T])

Masks have the same layouts: an axis of 1 for r, or the rows of one query head r times.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import onnx_ir as ir

from rewrite_rules.graph.nodes import made_by
from rewrite_rules.remarks import Refusal
from rewrite_rules.shapes.dimensions import Dim, Dims, number
from rewrite_rules.shapes.proved_shapes import ProvedShapes
from rewrite_rules.transformer_fusion.head_layout import ints

# Added to a score, it hides it: no two scores are as far apart as these numbers.
HIDDEN, VISIBLE = -1e8, -5e7
# Half of what lies between float32 numbers of such size is far above any score: added to one,
# a number like this is what it was.
LOWEST = -1e37


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
            raise Refusal("ORP603", f"mask {name!r} has {len(shape)} axes, not {self.rank}")
        shape = ((1, ()),) * (self.rank - len(shape)) + shape
        if not self.own_axis:
            return shape if self.repeats == 1 else (*shape[:2], None, shape[3])
        if number(shape[2]) != 1:
            raise Refusal("ORP603", f"mask {name!r} may differ from head to head")
        return (*shape[:2], *shape[3:])

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
    """A tensor that is added to scores, or subtracted, or says where ``lowest`` stands.

    That number hides a score as if it were added. ``hides`` is the value of a bool tensor that
    hides a score; ``scale`` multiplies what it makes of the scores.
    """

    value: ir.Value
    lowest: float | None = None
    hides: bool = True
    subtracted: bool = False
    scale: float = 1.0

    @property
    def replaces(self) -> bool:
        """Whether scores that it hides count for nothing, NaN and all."""
        return self.lowest is not None

    def added(self, op: Any, missing: int, total: ir.Value | None) -> Any:
        """Emit what is added, with that many more axes, after a total of other masks."""
        value: Any = (
            op.Unsqueeze(self.value, ints(op, *range(missing))) if missing else self.value
        )
        if self.lowest is not None:
            shown = op.Constant(value_float=0.0) if total is None else total
            numbers = [op.Constant(value_float=self.lowest), shown]
            value = op.Where(value, *numbers[:: 1 if self.hides else -1])
        elif total is not None:
            value = op.Sub(total, value) if self.subtracted else op.Add(total, value)
        elif self.subtracted:
            value = op.Neg(value)
        return value if self.scale == 1 else op.Mul(value, op.Constant(value_float=self.scale))
