# SPDX-License-Identifier: MIT
"""Reads ``scale * q k' + masks``, the scores that a Softmax makes weights of.

Heads may be merged with the batch, ``[B * H, S, T]``, and be split by Reshapes on the way.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import onnx_ir as ir

from rewrite_rules.graph.nodes import label
from rewrite_rules.graph.parameters import scalar
from rewrite_rules.remarks import Refusal
from rewrite_rules.shapes.dimensions import Dims
from rewrite_rules.shapes.proved_shapes import ProvedShapes
from rewrite_rules.transformer_fusion.heads import factor, ints, scaled_input

# Added to a score, it hides it: no two scores are as far apart as these numbers.
HIDDEN, VISIBLE = -1e8, -5e7
# Half of what lies between float32 numbers of such size is far above any score: added to one,
# a number like this is what it was.
LOWEST = -1e37
_MAX_MASKS = 3
_MASKED = frozenset({"Add", "Where"})
_ONE = (1, ())


@dataclasses.dataclass(frozen=True)
class Mask:
    """A tensor that is added to scores, or says where ``lowest`` stands.

    That number hides a score as if it were added. ``hides`` is the value of a bool tensor that
    hides a score. ``rank``: that of the scores, ``[B * H, S, T]``, ``[B, H, S, T]`` or
    ``[B, G, H / G, S, T]``.
    """

    value: ir.Value
    rank: int
    lowest: float | None = None
    hides: bool = True

    def dims(self, facts: ProvedShapes, heads: int) -> Dims:
        """Return the sizes for ``[B, H, S, T]``; a Refusal for others."""
        dims, name = facts.dims(self.value), self.value.name
        # A number of heads broadcasts to no other: the sum fails unless it is that of scores.
        if dims is None or (self._has_heads(dims) and dims[0][0] % heads):
            raise Refusal("ORP602", f"the axes of mask {name!r} are not known")
        if len(dims) > self.rank:
            raise Refusal("ORP603", f"mask {name!r} has {len(dims)} axes, not {self.rank}")
        if self._has_heads(dims):
            return (dims[0][0] // heads, dims[0][1]), (heads, ()), *dims[1:]
        padded = (*[_ONE] * (max(4, self.rank) - len(dims)), *dims)
        if self.rank > 4 and padded[1:3] != (_ONE, _ONE):
            raise Refusal("ORP603", f"mask {name!r} may differ from head to head")
        return (*padded[:2], *padded[-2:])

    def _has_heads(self, dims: Dims) -> bool:
        return self.rank == len(dims) == 3 and dims[0] != _ONE

    def added(self, op: Any, facts: ProvedShapes, heads: int, total: ir.Value | None) -> Any:
        """Emit ``[B, H, S, T]`` that is added, after a total of other masks."""
        value: Any = self.value
        dims = facts.dims(value) or ()
        if self._has_heads(dims):
            texts = op.Div(op.Shape(value, start=0, end=1), ints(op, heads))
            sizes = ints(op, texts, heads, op.Shape(value, start=1))
            value = op.Reshape(value, sizes, allowzero=1)
        elif len(dims) > 4:
            value = op.Squeeze(value, ints(op, 2))
        elif len(dims) < 4:
            value = op.Unsqueeze(value, ints(op, *range(4 - len(dims))))
        if self.lowest is not None:
            shown = op.Constant(value_float=0.0) if total is None else total
            numbers = [op.Constant(value_float=self.lowest), shown]
            value = op.Where(value, *numbers[:: 1 if self.hides else -1])
        elif total is not None:
            value = op.Add(total, value)
        return value


def read_scores(
    logits: ir.Value | None, facts: ProvedShapes, depth: int = _MAX_MASKS
) -> tuple[ir.Node, float, tuple[Mask, ...], tuple[ir.Value, ...]] | None:
    """Return the MatMul, the scale, the masks and the values on the way; None for others."""
    scale, steps, node = 1.0, list[ir.Value](), None
    while logits is not None and (node := logits.producer()) is not None:
        steps.insert(0, logits)
        if (index := scaled_input(node)) is None:
            break
        scale *= factor(node, index)
        logits = node.inputs[index]
    if logits is None or node is None or node.domain:
        return None
    if node.op_type == "MatMul":
        return node, scale, (), (*steps,)
    if node.op_type == "Reshape":
        found = read_scores(node.inputs[0], facts, depth)
        return found and (found[0], found[1] * scale, found[2], (*found[3], *steps))
    if node.op_type not in _MASKED or not depth:
        return None
    a, b = node.inputs[-2:]
    for scores, other in ((a, b), (b, a)):
        found = read_scores(scores, facts, depth - 1)
        if found is None or other is None:
            continue
        rank = len(facts.dims(scores) or ())
        if node.op_type == "Where":
            mask = _chosen(node, other, other is a, rank)
        else:
            mask = Mask(other, rank)
        if scale != 1:
            raise Refusal("ORP603", f"mask {mask.value.name!r} is scaled with the scores")
        product, inner_scale, masks, before = found
        return product, inner_scale, (*masks, mask), (*before, *steps)
    return None


def _chosen(node: ir.Node, other: ir.Value, hides: bool, rank: int) -> Mask:
    """Read the mask of a Where between scores and a number."""
    lowest, condition = scalar(other), node.inputs[0]
    if lowest is None or condition is None:
        raise Refusal(
            "ORP604", f"Where {label(node)!r} chooses something else than the lowest number"
        )
    return Mask(condition, rank, lowest=lowest, hides=hides)
