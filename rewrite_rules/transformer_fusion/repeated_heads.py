# SPDX-License-Identifier: MIT
"""Reads a MatMul operand that repeats each key or value head for several query heads.

    Reshape(Expand(Unsqueeze(K[B, G, T, D], 2), [B, G, r, T, D]), [B, G * r, T, D])
    Reshape(Tile(Unsqueeze(K, 2), [1, 1, r, 1, 1]), ...)
    Reshape(Concat(Unsqueeze(K, 2), ... r times, axis=2), ...)
    Gather(K, [0, 0, ..., 1, 1, ...], axis=1)
    Expand(K[B, 1, T, D], [B, r, T, D])

and behind it, on the way to the MatMul: Transpose, Mul and Div by a scalar, and Reshapes that
merge heads with the batch and split them. All of these commute with the repetition.

What comes out decides, whatever sizes were asked for. Exporters take those of Expand from
whatever tensor was at hand, and no run checks that it is this one's. Where they cannot be
proved to be K's own, K is reshaped to them: that costs nothing, and fails where Expand would
have stretched another axis as well.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence

import onnx_ir as ir

from rewrite_rules.graph.nodes import label, made_by
from rewrite_rules.graph.parameters import constant, int_attribute, ints_attribute
from rewrite_rules.remarks import Refusal
from rewrite_rules.shapes.dimensions import Dim, Shape, number
from rewrite_rules.shapes.proved_shapes import ProvedShapes
from rewrite_rules.transformer_fusion.head_layout import count_heads

_HEADS = 1
_RANK = 4
_MAX_CHAIN = 12
# What the MatMul reads of [B, H, T, D], and of [B, T, H, D].
_HEADS_FIRST = ((0, 1, 2, 3), (0, 1, 3, 2))
_HEADS_SPLIT = ((0, 2, 1, 3), (0, 2, 3, 1))
# Operators that scale, and which of their inputs may be scaled.
_SCALINGS = {"Mul": (0, 1), "Div": (0,)}


@dataclasses.dataclass(frozen=True, eq=False)
class RepeatedHeads:
    """Heads, each of which several query heads share.

    Attributes:
        source: ``[B, G, T, D]``, each head once.
        groups, repeats: G, and how many query heads share a head, r.
        merge: The Reshape to ``[B, G * r, T, D]``, where its sizes are not proved to be those
            of ``source``; else None.
        transposed: Whether the MatMul reads ``[B, G * r, D, T]``.
        split: Whether ``source`` is ``[B, T, G, D]`` instead; its heads are not repeated.
        scalings: Mul and Div nodes by a scalar on the way, and which input each scales.
        reshaped: What Reshapes make, and which axes are the last two: of all heads as one
            batch, again of each, or with an axis for the query heads that share one. Readers
            have to see that they do no more.
    """

    source: ir.Value
    groups: int
    repeats: int
    merge: ir.Node | None = None
    transposed: bool = False
    split: bool = False
    scalings: tuple[tuple[ir.Node, int], ...] = ()
    reshaped: tuple[tuple[ir.Value, tuple[int, ...]], ...] = ()

    @property
    def length_axis(self) -> int:
        """The axis of ``source`` that counts keys."""
        return 1 if self.split else 2


def read_repeated_heads(
    operand: ir.Value, facts: ProvedShapes, once: bool = False
) -> RepeatedHeads | None:
    """Read the right operand of a MatMul; None where it repeats no head.

    ``once`` reads heads that are not repeated as well.
    """
    chain: list[tuple[ir.Node, int]] = []
    value: ir.Value | None = operand
    while value is not None and len(chain) < _MAX_CHAIN:
        node = value.producer()
        if node is None or node.domain:
            break
        reader = _READERS.get(node.op_type, _cache if once else None)
        found = None if reader is None else reader(node, facts)
        if found is not None:
            found = _laid_out(found, value, chain, facts)
            if found.split:
                raise Refusal("ORP603", f"{label(chain[0][0])!r} mixes heads with other axes")
            return found
        passes = node.op_type == "Transpose" or _moves_batch(node, facts)
        index = 0 if passes else scaled_input(node)
        if index is None:
            break
        chain.append((node, index))
        value = node.inputs[index]
    return _own_heads(operand, chain, facts) if once else None


def _moves_batch(node: ir.Node, facts: ProvedShapes) -> bool:
    """Whether a Reshape may make ``[B * H, T, D]`` of ``[B, H, T, D]``, or split it again.

    Or ``[B, H, 1, T, D]``, as an Unsqueeze does.
    """
    if before_unsqueeze(node.outputs[0], facts) is not None:
        return True
    ends = [facts.dims(value) or () for value in (node.inputs[0], node.outputs[0])]
    return node.op_type == "Reshape" and {_RANK - 1, _RANK} == {*map(len, ends)}


def _laid_out(
    found: RepeatedHeads,
    source: ir.Value,
    chain: Sequence[tuple[ir.Node, int]],
    facts: ProvedShapes,
) -> RepeatedHeads:
    """Follow the axes of heads through a chain, from its end, to the MatMul."""
    axes, reshaped = [*range(_RANK)], list[tuple[ir.Value, tuple[int, ...]]]()
    for node, _ in chain[::-1]:
        rank = len(facts.dims(node.outputs[0]) or ())
        if node.op_type in ("Reshape", "Unsqueeze"):
            reshaped.append((node.outputs[0], tuple(axes[2:])))
        elif node.op_type == "Transpose":
            perm = ints_attribute(node, "perm") or [*range(rank)][::-1]
            if rank < _RANK:  # [B * H, T, D]
                perm = [perm[0], *(axis + 1 for axis in perm)]
            elif rank > _RANK:  # [B, H, 1, T, D]
                perm = [axis - (axis > 2) for axis in perm if axis != perm[2]]
            axes = [axes[axis] for axis in perm]
    dims = facts.dims(source, _RANK) or ()
    for order in (*_HEADS_FIRST, *_HEADS_SPLIT):
        # An axis of size 1 may be anywhere.
        if all(
            a == b or dims[a] == dims[b] == (1, ()) for a, b in zip(axes, order, strict=True)
        ):
            break
    else:
        raise Refusal("ORP603", f"{label(chain[-1][0])!r} mixes heads with other axes")
    return dataclasses.replace(
        found,
        transposed=order[3] != _RANK - 1,
        split=order not in _HEADS_FIRST,
        scalings=tuple(step for step in chain[::-1] if step[0].op_type in _SCALINGS),
        reshaped=tuple(reshaped),
    )


def _own_heads(
    operand: ir.Value, chain: Sequence[tuple[ir.Node, int]], facts: ProvedShapes
) -> RepeatedHeads | None:
    """Read heads that nothing repeats, from the first value that has an axis for them.

    No guess: a MatMul has the batch and heads in front, and the Transposes between say where.
    """
    values = [operand, *(node.inputs[index] for node, index in chain)]
    for count in range(len(chain), -1, -1):
        source = values[count]
        if source is None or facts.dims(source, _RANK) is None:
            continue
        with contextlib.suppress(Refusal):
            found = _laid_out(RepeatedHeads(source, 1, 1), source, chain[:count], facts)
            groups = count_heads(source, facts, 2 if found.split else _HEADS)
            if groups is not None:
                return dataclasses.replace(found, groups=groups)
    return None


def _cache(node: ir.Node, facts: ProvedShapes) -> RepeatedHeads | None:
    """Read Concat(past, new) of ``[B, G, T, D]`` on T."""
    if node.op_type != "Concat" or len(node.inputs) != 2:
        return None
    if facts.dims(node.outputs[0], _RANK) is None:
        return None
    # What is fed has as many heads as declared; new ones that have others fit no MatMul.
    past = facts.dims(node.inputs[0])
    groups = None if past is None else number(past[_HEADS])
    if groups is None or int_attribute(node, "axis", 0) % _RANK != 2:
        return None
    return RepeatedHeads(node.outputs[0], groups, 1)


def _merged(node: ir.Node, facts: ProvedShapes) -> RepeatedHeads | None:
    """Reshape([B, G, r, T, D] -> [B, G * r, T, D]) of repeated heads."""
    maker = made_by(node.inputs[0], "Concat", "Expand", "Tile")
    if maker is None:
        return None
    source = _unsqueezed(maker, facts)
    once = facts.dims(source, _RANK)
    if source is None or once is None:
        return None
    after, groups = facts.dims(maker.outputs[0], _RANK + 1), number(once[1])
    repeats = None if after is None else number(after[2])
    if groups is not None and repeats is not None and repeats > 1:
        merged = (once[0], (groups * repeats, ()), *once[2:])
        is_repeated = after == (*once[:2], (repeats, ()), *once[2:])
        made = facts.dims(node.outputs[0]), facts.numbers(node.inputs[1])
        if is_repeated and merged in made:
            return RepeatedHeads(source, groups, repeats)
    return _merged_as_asked(node, maker, source, facts)


def _merged_as_asked(
    node: ir.Node, maker: ir.Node, source: ir.Value, facts: ProvedShapes
) -> RepeatedHeads | None:
    """Read the same where the sizes asked for are not proved to be those of ``source``."""
    repeated = _repeated_sizes(maker, facts.shape(source), facts)
    if repeated is None:
        return None
    groups, repeats = number(repeated[1]), number(repeated[2])
    target = facts.numbers(node.inputs[1])
    if groups is None or repeats is None or repeats < 2 or target is None:
        return None
    heads_once = (repeated[0], (groups, ()), *repeated[3:])
    if target != (repeated[0], (groups * repeats, ()), *repeated[3:]):
        raise Refusal(
            "ORP603", f"Reshape {label(node)!r} does not merge each head with its repeats"
        )
    same = facts.shape(source) == heads_once
    return RepeatedHeads(source, groups, repeats, None if same else node)


def _unsqueezed(node: ir.Node, facts: ProvedShapes) -> ir.Value | None:
    """``K[B, G, T, D]`` of a node that repeats ``[B, G, 1, T, D]`` on the third axis."""
    values = set(node.inputs if node.op_type == "Concat" else node.inputs[:1])
    value = values.pop()
    return None if values or value is None else before_unsqueeze(value, facts)


def before_unsqueeze(value: ir.Value, facts: ProvedShapes) -> ir.Value | None:
    """Return ``K[B, G, T, D]`` of ``[B, G, 1, T, D]``; None for other values."""
    maker = made_by(value, "Unsqueeze", "Reshape")
    source = None if maker is None else maker.inputs[0]
    before = facts.dims(source, _RANK)
    if before is None:
        return None
    return source if facts.shape(value) == (*before[:2], (1, ()), *before[2:]) else None


def _repeated_sizes(
    node: ir.Node, before: Shape, facts: ProvedShapes
) -> tuple[Dim | None, ...] | None:
    """``[B, G, r, T, D]`` as Expand is asked for it, or as Tile and Concat make it."""
    assert isinstance(before, tuple)
    if node.op_type == "Concat":
        on_repeats = int_attribute(node, "axis", 0) in (2, -3)
        return (*before[:2], (len(node.inputs), ()), *before[2:]) if on_repeats else None
    asked = facts.numbers(node.inputs[1])
    if asked is None or len(asked) != _RANK + 1:
        return None
    if node.op_type == "Expand":
        return asked
    once = (1, ())
    if (*asked[:2], *asked[3:]) != (once,) * _RANK:
        return None
    return (*before[:2], asked[2], *before[2:])


def _gathered(node: ir.Node, facts: ProvedShapes) -> RepeatedHeads | None:
    """Gather(K, [0, 0, ..., 1, 1, ...], axis=1): repeat_interleave."""
    source, tensor = node.inputs[0], constant(node.inputs[1])
    shape = facts.dims(source, _RANK)
    if source is None or shape is None or tensor is None:
        return None
    groups = number(shape[_HEADS])
    if groups is None or int_attribute(node, "axis", 0) % _RANK != _HEADS:
        return None
    array = tensor.numpy()
    repeats, rest = divmod(array.size, groups)
    if array.ndim != 1 or rest or repeats < 2:
        return None
    if array.tolist() != [head for head in range(groups) for _ in range(repeats)]:
        return None
    return RepeatedHeads(source, groups, repeats)


def _expanded_single_head(node: ir.Node, facts: ProvedShapes) -> RepeatedHeads | None:
    """Expand(K[B, 1, T, D], [B, r, T, D])."""
    source = node.inputs[0]
    before, after = facts.dims(source, _RANK), facts.dims(node.outputs[0], _RANK)
    if source is None or before is None or after is None or number(before[_HEADS]) != 1:
        return None
    repeats = number(after[_HEADS])
    if repeats is None or repeats < 2:
        return None
    if (before[0], *before[2:]) != (after[0], *after[2:]):
        raise Refusal("ORP602", f"Expand {label(node)!r} may stretch more than the heads")
    return RepeatedHeads(source, 1, repeats)


def scaled_input(node: ir.Node) -> int | None:
    """Return the index of the input that a Mul or Div scales by a number; else None."""
    for index in _SCALINGS.get(node.op_type, ()):
        tensor = constant(node.inputs[1 - index])
        if tensor is not None and tensor.size == 1 and len(tensor.shape.numpy()) <= 1:
            return index
    return None


_READERS = {"Gather": _gathered, "Expand": _expanded_single_head, "Reshape": _merged}
