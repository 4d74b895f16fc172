# SPDX-License-Identifier: MIT
"""Follows heads back from the operand of a MatMul to what a kernel reads, by names of axes.

    [B, L, N*D]  -Reshape->  [B, L, N, D]  -Transpose->  [B, N, L, D]  -...->  [B*N, D, L]

Of B texts, N heads with L tokens and D numbers for each. On the way may be Transpose, Mul and
Div by a scalar, Reshapes that merge heads with the batch and split them, and a repetition of
each head for several query heads, with which all of these commute:

    Reshape(Expand(Unsqueeze(K[B, N, L, D], 2), [B, N, r, L, D]), [B, N * r, L, D])
    Reshape(Tile(Unsqueeze(K, 2), [1, 1, r, 1, 1]), ...)

Names are read off ranks and Transposes. That Reshapes make the sizes that are named is proved
or asked elsewhere (:mod:`.sizes`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import onnx_ir as ir

from rewrite_rules.graph.nodes import label, made_by, producer
from rewrite_rules.graph.parameters import constant, ints_attribute, scalar
from rewrite_rules.remarks import Refusal
from rewrite_rules.shapes.dimensions import Dim, known, number
from rewrite_rules.shapes.proved_shapes import ProvedShapes

_MAX_PATH = 14
# Operators that scale, and which of their inputs may be scaled.
_SCALINGS = {"Mul": (0, 1), "Div": (0,)}
SPLIT_HEADS = (0, 2, 1, 3)

Axes = tuple[str, ...]
FIRST, SPLIT, FLAT = ("B", "N", "L", "D"), ("B", "L", "N", "D"), ("B", "L", "ND")


@dataclasses.dataclass(frozen=True, eq=False)
class Heads:
    """Heads from what a MatMul reads of them back to where they come from.

    Attributes:
        path: Values and the names of their axes; the last is what a kernel reads.
        count: N, each head once, if Reshapes keep B and L; None where it is not known.
        size: D, where something is split into heads.
        once: The place on the path where each head is there once.
        repeats: How many query heads share a head.
        merge: The Reshape to ``[B, N * repeats, L, D]``, where its sizes are not proved to be
            those of each head once; else None.
    """

    path: tuple[tuple[ir.Value, Axes], ...]
    count: int | None = None
    size: int | None = None
    once: int = 0
    repeats: int = 1
    merge: ir.Node | None = None

    @property
    def source(self) -> ir.Value:
        """What a kernel reads."""
        return self.path[-1][0]

    @property
    def axes(self) -> Axes:
        """The names of its axes."""
        return self.path[-1][1]

    def scalings(self) -> Iterator[tuple[ir.Node, int]]:
        """Yield Mul and Div nodes by a scalar on the way, and which input each scales."""
        for value, _ in self.path[:-1]:
            if (index := scaled_input(producer(value))) is not None:
                yield producer(value), index

    @property
    def scale(self) -> float:
        """What they are scaled by on the way."""
        return math.prod(factor(*step) for step in self.scalings())

    def reshaped(self) -> Iterator[tuple[ir.Value, Axes]]:
        """Yield what Reshapes make on the way; readers have to see that they do no more.

        ``K`` is N times the repeats. Not what is split into heads, nor merged with repeats.
        """
        for place, (value, axes) in enumerate(self.path[:-1]):
            is_split = self.path[place + 1][1] == FLAT
            if made_by(value, "Reshape") and place != self.once - 1 and not is_split:
                repeated = place < self.once
                yield value, tuple(a.replace("N", "K") if repeated else a for a in axes)

    def repeated(self) -> Heads | None:
        """Return heads up to where each is there once; None where nothing repeats them."""
        path = self.path[: self.once + 1]
        return dataclasses.replace(self, path=path) if self.once else None

    def flat(self, op: Any, facts: ProvedShapes, width: int) -> Any:
        """Emit ``[B, L, N * D]``."""
        value = self.source
        if self.axes == FLAT and _is_inferred(value, facts):
            return value
        if self.axes == FIRST:
            value = op.Transpose(value, perm=SPLIT_HEADS)
        return op.Reshape(value, ints(op, 0, 0, width))

    def apart(self, op: Any, count: int, size: int) -> Any:
        """Emit ``[B, N, L, D]``."""
        value = self.source
        if self.axes == FLAT:
            value = op.Reshape(value, ints(op, 0, 0, count, size))
        return value if self.axes == FIRST else op.Transpose(value, perm=SPLIT_HEADS)


def read_heads(
    operand: ir.Value | None,
    facts: ProvedShapes,
    form: str = "BNLD",
    is_query: bool = False,
    as_they_are: bool = False,
) -> Heads:
    """Follow heads back to a value that a kernel can read.

    ``form`` names four axes of the operand; of queries with five axes these are B, G, R, L and
    D. ``as_they_are``: not past what scales or repeats them.

    Raises:
        Refusal: If no such value is found.
    """
    assert operand is not None
    found = follow_heads(operand, facts, form, is_query, as_they_are)
    for end in range(len(found.path), found.once, -1):
        part = dataclasses.replace(found, path=found.path[:end])
        if part.axes == FLAT:
            return part
        if part.axes in (FIRST, SPLIT):
            dims = facts.dims(part.source, 4) or ()
            heads = dims[part.axes.index("N")]
            count = part.count or number(heads) or number_left(heads, facts)
            return dataclasses.replace(part, count=count, size=None)
    if found.once:
        raise _mixed(operand)
    raise Refusal("ORP602", f"{operand.name!r} is not known to be of heads")


def follow_heads(
    operand: ir.Value,
    facts: ProvedShapes,
    form: str = "BNLD",
    is_query: bool = False,
    as_they_are: bool = False,
) -> Heads:
    """Follow heads as far as they can be, whatever comes of it."""
    rank = len(facts.dims(operand) or ())
    fifth = "GR" if is_query else "N1"
    forms: dict[int, Axes] = {3: ("BN", *form[2:]), 4: (*form,), 5: ("B", *fifth, *form[2:])}
    found = Heads(((operand, forms.get(rank, ())),))
    while len(found.path) < _MAX_PATH and rank:
        value, axes = found.path[-1]
        node = value.producer()
        if node is None or node.domain or axes == FLAT:
            break
        index = scaled_input(node)
        if as_they_are and index is not None:
            break
        can_repeat = found.repeats == 1 and not (as_they_are or is_query)
        if can_repeat and (repeated := _repeated(node, facts)):
            once, groups, repeats, merge = repeated
            if axes[:2] != FIRST[:2] or len(axes) != len(FIRST):
                raise _mixed(operand)
            place = len(found.path)
            found = Heads((*found.path, (once, axes)), groups, None, place, repeats, merge)
            continue
        before = axes if index is not None else _axes_before(node, axes, facts)
        source = node.inputs[index or 0]
        if before is None or source is None:
            break
        sizes = _split_sizes(source, value, facts) if before == FLAT else None
        count, size = sizes or (found.count, None)
        path = *found.path, (source, before)
        found = dataclasses.replace(found, path=path, count=count, size=size)
    return found


def _mixed(operand: ir.Value) -> Refusal:
    return Refusal("ORP603", f"{label(producer(operand))!r} mixes heads with other axes")


def _axes_before(node: ir.Node, axes: Axes, facts: ProvedShapes) -> Axes | None:
    """Return the names of what a node lays out; None where it may do something else."""
    if node.op_type == "Transpose":
        perm, places = ints_attribute(node, "perm"), [*range(len(axes))]
        perm = places[::-1] if perm is None else perm
        return tuple(axes[perm.index(i)] for i in places) if sorted(perm) == places else None
    if "1" in axes and before_unsqueeze(node.outputs[0], facts) is not None:
        return tuple(axis for axis in axes if axis != "1") if axes[2] == "1" else None
    if node.op_type != "Reshape":
        return None
    rank, first, last = len(facts.dims(node.inputs[0]) or ()), axes[:-2], axes[-2:]
    if axes == SPLIT and rank == len(FLAT):
        return FLAT if _split_sizes(node.inputs[0], node.outputs[0], facts) else None
    match rank, first:
        case 3, ("B", "N"):
            return "BN", *last
        case 4, ("BN",) | ("B", "G", "R"):
            return "B", "N", *last
    return None


def _split_sizes(
    source: ir.Value | None, split: ir.Value, facts: ProvedShapes
) -> tuple[int, int] | None:
    """Return N and D of ``[B, L, N * D]`` that is split, if B and L stay."""
    before, after = facts.dims(source, 3), facts.dims(split, 4)
    if before is None or after is None or not (width := number(before[2])):
        return None
    count, size = number(after[2]), number(after[3])
    count, size = count or (size and width // size), size or (count and width // count)
    return (count, size) if count and size and count * size == width else None


def _repeated(
    node: ir.Node, facts: ProvedShapes
) -> tuple[ir.Value, int, int, ir.Node | None] | None:
    """Reshape([B, G, r, T, D] -> [B, G * r, T, D]) of repeated heads: these, G, r, the node.

    By the sizes of what is repeated, or by those that an Expand asks for. What comes out
    decides: exporters take the sizes from whatever tensor was at hand, and no run checks that
    it is this one's. Where they cannot be proved to be K's own, K is expanded to them.
    """
    maker = made_by(node.inputs[0], "Expand", "Tile") if node.op_type == "Reshape" else None
    source = None if maker is None else before_unsqueeze(maker.inputs[0], facts)
    once = facts.dims(source, 4)
    if maker is None or source is None or once is None:
        return None
    target, asked = facts.numbers(node.inputs[1]), None
    if maker.op_type == "Expand":
        asked = facts.numbers(maker.inputs[1])
    for many in (facts.dims(maker.outputs[0]), asked):
        if many is None or len(many) != len(once) + 1:
            continue
        groups, repeats = number(many[1]), number(many[2])
        same = (*many[:2], *many[3:]) == once
        if not groups or not repeats or repeats < 2 or not (same or many is asked):
            continue
        merged = many[0], known(groups * repeats), *many[3:]
        if merged == target or (same and merged == facts.dims(node.outputs[0])):
            return source, groups, repeats, None if same else node
        if many is asked and target is not None:
            text = f"Reshape {label(node)!r} does not merge each head with its repeats"
            raise Refusal("ORP603", text)
    return None


def number_left(dim: Dim, facts: ProvedShapes) -> int | None:
    """Return what a size is that is left to a Reshape, if other sizes that are open stay."""
    match facts.unknowns.key(*dim[1]) if len(dim[1]) == 1 else ():
        case "quotient", total, part if len(total[1]) == len(part[1]):
            return number(facts.unknowns.quotient(known(total[0]), known(part[0])))
    return None


def before_unsqueeze(value: ir.Value | None, facts: ProvedShapes) -> ir.Value | None:
    """Return ``K[B, G, T, D]`` of ``[B, G, 1, T, D]``; None for other values."""
    maker = made_by(value, "Unsqueeze", "Reshape")
    source = None if maker is None else maker.inputs[0]
    once = facts.match(source, "B G T D")
    return source if once and facts.match(value, "B G 1 T D", **once) else None


def scaled_input(node: ir.Node) -> int | None:
    """Return the index of the input that a Mul or Div scales by a number; else None."""
    for index in _SCALINGS.get(node.op_type, ()):
        if scalar(node.inputs[1 - index]) is not None:
            return index
    return None


def factor(node: ir.Node, index: int) -> float:
    """Return the number that a Mul or Div multiplies an input by."""
    scale = scalar(node.inputs[1 - index]) or 0.0
    return scale if node.op_type == "Mul" else 1 / scale if scale else math.inf


def ints(op: Any, *numbers: int | ir.Value) -> Any:
    """Return a list of int64, of numbers and of tensors that hold one each."""
    if any(isinstance(each, ir.Value) for each in numbers):
        parts = [ints(op, each) if isinstance(each, int) else each for each in numbers]
        return op.Concat(*parts, axis=0)
    # An attribute: of a list, onnx_ir has to find out the type.
    return op.Constant(value_ints=ir.AttrInt64s("value_ints", numbers))  # type: ignore[arg-type]


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
