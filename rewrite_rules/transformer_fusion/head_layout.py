# SPDX-License-Identifier: MIT
"""Heads between a projection and attention: ``[B, S, H * D]`` split, ``[B, H, S, D]``."""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir

from rewrite_rules.graph.nodes import made_by, producer
from rewrite_rules.shapes.dimensions import Dim, number
from rewrite_rules.shapes.proved_shapes import ProvedShapes

SPLIT_HEADS = (0, 2, 1, 3)


def ints(op: Any, *numbers: int | ir.Value) -> Any:
    """Return a list of int64, of numbers and of tensors that hold one each."""
    if any(isinstance(each, ir.Value) for each in numbers):
        parts = [ints(op, each) if isinstance(each, int) else each for each in numbers]
        return op.Concat(*parts, axis=0)
    # An attribute: of a list, onnx_ir has to find out the type.
    return op.Constant(value_ints=ir.AttrInt64s("value_ints", numbers))  # type: ignore[arg-type]


def is_transposed_heads(value: ir.Value) -> bool:
    """Whether a value is ``Transpose(..., [0, 2, 1, 3])``."""
    node = made_by(value, "Transpose")
    perm = None if node is None else node.attributes.get("perm")
    return perm is not None and tuple(perm.as_ints()) == SPLIT_HEADS


def unsplit(heads: ir.Value) -> ir.Value:
    """Return ``[B, S, H, D]`` of ``[B, H, S, D]``, where a Transpose makes it; else itself."""
    node = heads.producer() if is_transposed_heads(heads) else None
    return heads if node is None or node.inputs[0] is None else node.inputs[0]


def in_order(heads: ir.Value) -> ir.Value:
    """Return what has the elements of ``[B, H, S, D]`` in order wherever S is 1."""
    value = unsplit(heads)
    while (node := made_by(value, "Reshape")) is not None and node.inputs[0] is not None:
        value = node.inputs[0]
    return value


def batch_and_length(op: Any, heads: ir.Value, facts: ProvedShapes) -> list[Any]:
    """Emit B and S of ``[B, H, S, D]``, from what is split into heads where that is known."""
    source, length = tokens_of(heads, facts)
    return [op.Shape(source, start=axis, end=axis + 1) for axis in (0, length)]


def token_dims(heads: ir.Value, facts: ProvedShapes) -> tuple[Dim, Dim] | None:
    """Return what is proved of :func:`batch_and_length`; None where the rank is not known."""
    source, length = tokens_of(heads, facts)
    dims = facts.dims(source)
    return None if dims is None else (dims[0], dims[length])


def same_tokens(one: ir.Value, other: ir.Value, facts: ProvedShapes) -> tuple[bool, bool]:
    """Whether B and S of two ``[B, H, S, D]`` are proved to be the same.

    Either as they are, or as what is split into heads: a run in which these differ splits
    other heads, and fails.
    """
    dims = [facts.dims(heads, 4) for heads in (one, other)]
    pairs = [[None if each is None else (each[0], each[2]) for each in dims]]
    pairs.append([token_dims(heads, facts) for heads in (one, other)])
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    same = [any(a[axis] == b[axis] for a, b in known) for axis in (0, 1)]
    return same[0], same[1]


def tokens_of(heads: ir.Value, facts: ProvedShapes) -> tuple[ir.Value, int]:
    """Return what has a row for each text, and its axis of the tokens."""
    split = unsplit(heads)
    if split is heads:
        return heads, 2
    source = producer(split).inputs[0] if count_heads(split, facts) else split
    assert source is not None
    return source, 1


def rows(
    op: Any,
    heads: ir.Value,
    facts: ProvedShapes,
    width: int | ir.Value,
    are_split: bool = False,
) -> ir.Value:
    """Return ``[B, S, H * D]`` of ``[B, H, S, D]``; if ``are_split``, of ``[B, S, H, D]``."""
    split = heads if are_split else unsplit(heads)
    if split is heads and not are_split:
        split = op.Transpose(heads, perm=SPLIT_HEADS)
    elif count_heads(split, facts):
        return producer(split).inputs[0]  # type: ignore[return-value]
    made: ir.Value = op.Reshape(split, ints(op, 0, 0, width))
    return made


def count_heads(split: ir.Value, facts: ProvedShapes, exact: bool = True) -> int | None:
    """Return H of a Reshape ``[B, S, H * D] -> [B, S, H, D]``, for the batch of all inputs.

    Unless ``exact``, a Reshape back to H * D has to check S.
    """
    node = made_by(split, "Reshape")
    if node is None:
        return None if exact else _count_packed(split, facts)
    before, asked = facts.dims(node.inputs[0], 3), facts.numbers(node.inputs[1])
    width = None if before is None else number(before[2])
    if before is None or width is None or asked is None or len(asked) != 4:
        return None
    batch, length, heads, size = map(number, asked)
    if size is None or size < 1 or width % size or heads not in (-1, width // size):
        return None
    # The batch of another input counts as this one's; a number may merge rows.
    if batch not in (None, 0, -1, number(before[0])):
        return None
    is_length = not exact or asked[1] in (before[1], (0, ()))
    same = heads != -1 if length == -1 else is_length
    return width // size if same else None


def _count_packed(split: ir.Value, facts: ProvedShapes) -> int | None:
    """Return H of a part of a Reshape ``[B, S, 3 * H * D] -> [B, S, 3, H, D]``."""
    node = split.producer()
    while node is not None and node.op_type in ("Gather", "Slice", "Split", "Squeeze"):
        node = None if node.inputs[0] is None else node.inputs[0].producer()
    if node is None or node.op_type != "Reshape" or node.inputs[0] is None:
        return None
    before, after = facts.dims(node.inputs[0], 3), facts.dims(node.outputs[0], 5)
    shape = facts.dims(split, 4)
    if before is None or after is None or shape is None or shape[2] not in after[2:]:
        return None
    width = number(before[2])
    others = [number(dim) for dim in after[2:] if dim != shape[2]]
    if width is None or len(others) != 2 or None in others:
        return None
    count = math.prod(size for size in others if size is not None)
    return width // count if count and width % count == 0 else None
