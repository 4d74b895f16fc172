# SPDX-License-Identifier: MIT
"""Reads a MatMul operand that repeats each key or value head for several query heads.

    Reshape(Expand(Unsqueeze(K[B, G, T, D], 2), [B, G, r, T, D]), [B, G * r, T, D])
    Reshape(Tile(Unsqueeze(K, 2), [1, 1, r, 1, 1]), ...)

and behind it, on the way to the MatMul: Transpose, Mul and Div by a scalar, and Reshapes that
merge heads with the batch and split them. All of these commute with the repetition.

What comes out decides, whatever sizes were asked for. Exporters take those of Expand from
whatever tensor was at hand, and no run checks that it is this one's. Where they cannot be
proved to be K's own, K is expanded to them, each head once.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence

import onnx_ir as ir

from rewrite_rules.graph.nodes import label, made_by
from rewrite_rules.graph.parameters import constant, ints_attribute
from rewrite_rules.remarks import Refusal
from rewrite_rules.shapes.dimensions import known, number
from rewrite_rules.shapes.proved_shapes import ProvedShapes
from rewrite_rules.transformer_fusion.head_layout import count_heads

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
        found = _merged(node, facts) if node.op_type == "Reshape" else None
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
            rank = rank or len(perm)
            if not _RANK - 1 <= rank == len(perm) <= _RANK + 1:
                raise Refusal("ORP602", f"how many axes {label(node)!r} has is not known")
            if rank < _RANK:  # [B * H, T, D]
                perm = [perm[0], *(axis + 1 for axis in perm)]
            elif rank > _RANK:  # [B, H, 1, T, D]
                perm = [axis - (axis > 2) for axis in perm if axis != perm[2]]
            axes = [axes[axis] for axis in perm]
    dims = facts.dims(source, _RANK) or ((0, ()),) * _RANK  # none is known to be 1
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
            groups = count_heads(source, facts, 1 + found.split)
            if groups is not None:
                return dataclasses.replace(found, groups=groups)
    return None


def _merged(node: ir.Node, facts: ProvedShapes) -> RepeatedHeads | None:
    """Reshape([B, G, r, T, D] -> [B, G * r, T, D]) of repeated heads.

    By the sizes of what is repeated, or by those that an Expand asks for.
    """
    maker = made_by(node.inputs[0], "Expand", "Tile")
    source = None if maker is None else before_unsqueeze(maker.inputs[0], facts)
    once = facts.dims(source, _RANK)
    if maker is None or source is None or once is None:
        return None
    target, asked = facts.numbers(node.inputs[1]), None
    if maker.op_type == "Expand":
        asked = facts.numbers(maker.inputs[1])
    for many in (facts.dims(maker.outputs[0]), asked):
        if many is None or len(many) != _RANK + 1:
            continue
        groups, repeats = number(many[1]), number(many[2])
        same = (*many[:2], *many[3:]) == once
        if not groups or not repeats or repeats < 2 or not (same or many is asked):
            continue
        merged = many[0], known(groups * repeats), *many[3:]
        if merged == target or (same and merged == facts.dims(node.outputs[0])):
            return RepeatedHeads(source, groups, repeats, None if same else node)
        if many is asked and target is not None:
            text = f"Reshape {label(node)!r} does not merge each head with its repeats"
            raise Refusal("ORP603", text)
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
        tensor = constant(node.inputs[1 - index])
        if tensor is not None and tensor.size == 1 and len(tensor.shape.numpy()) <= 1:
            return index
    return None
