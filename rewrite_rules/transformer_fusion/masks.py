# SPDX-License-Identifier: MIT
"""Masks of scores."""

from __future__ import annotations

import dataclasses
from typing import Any

import onnx_ir as ir

from rewrite_rules.remarks import Refusal
from rewrite_rules.shapes.dimensions import Dims
from rewrite_rules.transformer_fusion.head_layout import ints

# Added to a score, it hides it: no two scores are as far apart as these numbers.
HIDDEN, VISIBLE = -1e8, -5e7
# Half of what lies between float32 numbers of such size is far above any score: added to one,
# a number like this is what it was.
LOWEST = -1e37


_RANK = 4


def mask_dims(shape: Dims, name: str | None) -> Dims:
    """Return the sizes of a mask for ``[B, H, S, T]``."""
    if len(shape) > _RANK:
        raise Refusal("ORP603", f"mask {name!r} has {len(shape)} axes, not {_RANK}")
    return ((1, ()),) * (_RANK - len(shape)) + shape


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
