# SPDX-License-Identifier: MIT
"""Reads attention whose query heads are grouped in the graph, so that no key is repeated.

    MatMul(Reshape(q[B, H, S, D], [B, G, r, S, D]), Unsqueeze(k'[B, G, D, T], 2))
    MatMul(Reshape(q[B, H, S, D], [B, G, r * S, D]), k'[B, G, D, T])

Masks have the same layouts: an axis of 1 for r, or the rows of one query head r times.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import onnx_ir as ir

from rewrite_rules.graph.refusal import Refusal
from rewrite_rules.masks.node_evaluator import Array
from rewrite_rules.shapes.dimensions import Dim, Dims, number
from rewrite_rules.shapes.proved_shapes import ProvedShapes
from rewrite_rules.transformer_fusion.head_layout import ints


@dataclasses.dataclass(frozen=True)
class GroupedLayout:
    """How scores of query heads are laid out.

    Attributes:
        repeats: How many query heads share a head of the keys, r; 1 for ``[B, H, S, T]``.
        own_axis: Whether r has an axis of its own, ``[B, G, r, S, T]``.
    """

    repeats: int = 1
    own_axis: bool = False

    @property
    def rank(self) -> int:
        """How many axes scores have."""
        return 4 + self.own_axis

    def dims(self, shape: Dims, name: str | None) -> tuple[Dim | None, ...]:
        """Return the sizes of a mask for ``[B, H, S, T]``; None for what a run tells.

        Raises:
            Refusal: If the mask has other axes.
        """
        if len(shape) > self.rank:
            raise Refusal(f"mask {name!r} has {len(shape)} axes, not {self.rank}")
        shape = ((1, ()),) * (self.rank - len(shape)) + shape
        if not self.own_axis:
            return shape if self.repeats == 1 else (*shape[:2], None, shape[3])
        if number(shape[2]) != 1:
            raise Refusal(f"mask {name!r} may differ from head to head")
        return (*shape[:2], *shape[3:])

    def array(self, mask: Array) -> Array:
        """Return the mask for ``[B, H, S, T]``.

        Raises:
            Refusal: If the query heads of a group have different masks.
        """
        if self.own_axis:
            return mask[:, :, 0]
        if self.repeats == 1 or mask.shape[2] % self.repeats:
            return mask
        batch, heads, rows, keys = mask.shape
        each = mask.reshape(batch, heads, self.repeats, rows // self.repeats, keys)
        if not np.array_equal(each, np.broadcast_to(each[:, :, :1], each.shape)):
            raise Refusal("the mask differs from head to head")
        return each[:, :, 0]

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
    node = query.producer()
    if node is None or node.op_type != "Reshape" or node.domain or node.inputs[0] is None:
        return query, GroupedLayout()
    source = node.inputs[0]
    before, after = facts.shape(source), facts.shape(query)
    if not isinstance(before, tuple) or not isinstance(after, tuple) or len(before) != 4:
        return query, GroupedLayout()
    heads = number(before[1])
    if heads is None or heads == groups or heads % groups:
        return query, GroupedLayout()
    repeats = heads // groups
    batch, _, rows, size = before
    own_axis = (batch, (groups, ()), (repeats, ()), rows, size)
    merged = (batch, (groups, ()), facts.unknowns.product(((repeats, ()), rows)), size)
    if after not in (own_axis, merged):
        return query, GroupedLayout()
    return source, GroupedLayout(repeats, after == own_axis)
