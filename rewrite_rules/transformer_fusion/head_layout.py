# SPDX-License-Identifier: MIT
"""Heads between a projection and attention: ``[B, S, H * D]`` split, ``[B, H, S, D]``."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import onnx_ir as ir

from rewrite_rules.graph.nodes import made_by
from rewrite_rules.graph.parameters import constant
from rewrite_rules.shapes.dimensions import Dim, known, number
from rewrite_rules.shapes.proved_shapes import ProvedShapes

SPLIT_HEADS = (0, 2, 1, 3)
# Operators that take a part of heads that are packed.
_PARTS = ("Gather", "Slice", "Split", "Squeeze")


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


def before_split(heads: ir.Value, are_split: bool = False) -> ir.Value:
    """Return what is split into ``[B, H, S, D]``; if ``are_split``, into ``[B, S, H, D]``."""
    split = heads if are_split else unsplit(heads)
    node = made_by(split, "Reshape") if are_split or split is not heads else None
    return split if node is None or node.inputs[0] is None else node.inputs[0]


def in_order(heads: ir.Value) -> ir.Value:
    """Return what has the elements of ``[B, H, S, D]`` in order wherever S is 1."""
    value = unsplit(heads)
    while (node := made_by(value, "Reshape")) is not None and node.inputs[0] is not None:
        value = node.inputs[0]
    return value


def keeps_size(size: Dim, own: Dim, facts: ProvedShapes) -> bool:
    """Whether what broadcasts to a size leaves it as it is."""
    parts, others = (facts.unknowns.broadcast_parts(dim) for dim in (size, own))
    return {*parts} <= {(1, ()), *others}


def rows_are(size: Dim, own: Dim, facts: ProvedShapes) -> bool:
    """Whether what broadcasts to texts or tokens leaves them as many as they are.

    It does in each run whose inputs have one batch and length, on one axis each: others may be
    an error. Of what the graph itself cuts, one text for instance, it may make more.
    """
    return keeps_size(size, own, facts) or facts.agree(size, own)


def tokens_of(heads: ir.Value, facts: ProvedShapes) -> tuple[ir.Value, int]:
    """Return what has a row for each text, and its axis of the tokens.

    That is what is split into heads, where it is known to have their B and S.
    """
    split = unsplit(heads)
    if split is heads:
        return heads, 2
    found = read_split(split, facts)
    return split if found is None or found.unproved or found.packed else found.source, 1


def rows(
    op: Any,
    heads: ir.Value,
    facts: ProvedShapes,
    width: int | ir.Value,
    are_split: bool = False,
    asked: bool = False,
) -> ir.Value:
    """Return ``[B, S, H * D]`` of ``[B, H, S, D]``; if ``are_split``, of ``[B, S, H, D]``.

    If ``asked``, a run has said yes to what :meth:`.Sizes.match_heads` asks.
    """
    split = heads if are_split else unsplit(heads)
    if split is heads and not are_split:
        split = op.Transpose(heads, perm=SPLIT_HEADS)
    else:
        found = read_split(split, facts)
        if found is not None and not found.packed and (asked or not found.unproved):
            split = found.source
            if not asked or _is_inferred(split, facts):
                return split
    made: ir.Value = op.Reshape(split, ints(op, 0, 0, width))
    return made


def _is_inferred(value: ir.Value, facts: ProvedShapes) -> bool:
    """Whether onnxruntime infers the last axis; of other values, Attention has heads of 0.

    It reads that of an operand, but not sizes that nodes compute.
    """
    while (node := made_by(value, "RotaryEmbedding")) and (source := node.inputs[0]):
        value = source
    node, dims = value.producer(), facts.dims(value)
    if node is None or node.domain:
        return True
    constants = [each for each in node.inputs if constant(each) is not None]
    ends = [
        facts.numbers(c) if node.op_type == "Reshape" else facts.dims(c) for c in constants
    ]
    return dims is not None and any((end or ())[-1:] == dims[-1:] for end in ends)


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """A Reshape ``[B, S, H * D] -> [B, S, H, D]``, if it keeps B and S.

    Attributes:
        source: What it reads.
        heads, size: H, D.
        unproved: Which of the first axes is not proved to stay; other sizes make other heads
            of the same elements. Exporters take the sizes from whichever input is at hand.
        packed: Whether these heads are a part of the result, ``[B, S, 3, H, D]``.
    """

    source: ir.Value
    heads: int
    size: int
    unproved: tuple[int, ...]
    packed: bool


def read_split(split: ir.Value, facts: ProvedShapes) -> Split | None:
    """Read what splits heads; where all but one of B, S, H and D are proved, that is, too."""
    whole = split
    while (part := made_by(whole, *_PARTS)) is not None and part.inputs[0] is not None:
        whole = part.inputs[0]
    node, packed = made_by(whole, "Reshape"), whole is not split
    if node is None:
        return None
    source = node.inputs[0]
    before, shape = facts.dims(source, 3), facts.dims(split, 4)
    after = facts.dims(node.outputs[0], 5 if packed else 4)
    if source is None or before is None or shape is None or after is None:
        return None
    if (*after[:2], after[-1]) != (*shape[:2], shape[-1]):
        return None  # a part of the texts, of the tokens or of each head
    width, heads, size = number(before[2]), number(shape[2]), number(shape[3])
    kept = [a == b for a, b in zip(before[:2], after[:2], strict=True)]
    proved = sum(kept) + (None not in (heads, size)) >= 2
    if width and heads and size is None and not packed:
        size = width // heads
    others = [number(dim) for dim in after[2:-1] if dim != shape[2]]
    count = math.prod(n or 0 for n in others) * (size or 0)
    if not width or not size or len(others) != len(after) - 4 or not count or width % count:
        return None
    if heads not in (None, width // count):
        return None
    unproved = () if proved else tuple(axis for axis in (0, 1) if not kept[axis])
    return Split(source, width // count, size, unproved, packed)


def count_heads(heads: ir.Value, facts: ProvedShapes, axis: int = 1) -> int | None:
    """Return H of ``[B, H, S, D]``, proved or as :class:`Split` reads it.

    ``axis`` 2: of ``[B, S, H, D]``.
    """
    dims, split = facts.dims(heads, 4), heads if axis == 2 else unsplit(heads)
    proved = None if dims is None else number(dims[axis])
    if proved is not None or (axis == 1 and split is heads):
        return proved
    found = read_split(split, facts)
    return None if found is None else found.heads


def count_query_heads(heads: ir.Value, facts: ProvedShapes) -> int | None:
    """Return H of ``[B, H, S, D]``, or what a Reshape leaves for it.

    That is H if the inputs have one batch and length. One that may be 1 would be repeated.
    """
    dims = facts.dims(heads)
    if dims is None or len(dims) < len(SPLIT_HEADS):
        return None
    return number(dims[-3]) or count_heads(heads, facts) or number_if_agreed(dims[-3], facts)


def number_if_agreed(dim: Dim, facts: ProvedShapes) -> int | None:
    """Return what a size is, left to a Reshape, if the inputs have one batch and length."""
    match facts.unknowns.key(*dim[1]) if len(dim[1]) == 1 else ():
        case "quotient", total, part if facts.agree((1, total[1]), (1, part[1])):
            return number(facts.unknowns.quotient(known(total[0]), known(part[0])))
    return None
