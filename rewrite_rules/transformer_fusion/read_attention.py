# SPDX-License-Identifier: MIT
"""Reads attention from the nodes that a pattern found; refuses by name what is none."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Container

import onnx_ir as ir

from rewrite_rules.graph.nodes import made_by, producer
from rewrite_rules.graph.parameters import int_attribute
from rewrite_rules.remarks import Refusal
from rewrite_rules.shapes.dimensions import Dim, number
from rewrite_rules.shapes.proved_shapes import ProvedShapes
from rewrite_rules.transformer_fusion.attention_forms import Attention
from rewrite_rules.transformer_fusion.head_layout import (
    SPLIT_HEADS,
    count_query_heads,
    unsplit,
)
from rewrite_rules.transformer_fusion.masks import (
    HIDDEN,
    LOWEST,
    mask_dims,
)
from rewrite_rules.transformer_fusion.repeated_heads import (
    RepeatedHeads,
    read_repeated_heads,
)
from rewrite_rules.transformer_fusion.scores import Scores, factor, read_scores, unscaled

# What a Reshape may ask for instead of a size.
_COPIED = (0, ())


@dataclasses.dataclass(frozen=True)
class Match:
    """The values that the pattern binds.

    ``guarded``: weights that are NaN become 0.
    """

    softmax: ir.Value
    mixed: ir.Value
    out: ir.Value
    guarded: bool


@dataclasses.dataclass(frozen=True, eq=False)
class _Parts:
    """What is read so far: queries before they are scaled, keys and values."""

    match: Match
    facts: ProvedShapes
    scores: Scores
    query: ir.Value
    keys: RepeatedHeads
    values: RepeatedHeads
    scale: float

    @property
    def heads(self) -> int | None:
        """H: the MatMul wants as many as keys have, where they have more than one."""
        asked = count_query_heads(self.query, self.facts)
        shared = self.keys.groups * self.keys.repeats
        found = asked if shared == 1 else shared
        return found if asked == found else None

    @property
    def size(self) -> int | None:
        """D."""
        return _number(self.facts, self.keys.source)


def read_attention(match: Match, facts: ProvedShapes) -> Attention:
    """Return the attention whose result is transposed; a Refusal for anything else."""
    parts = _read_parts(match, facts)
    for whole in (parts.keys, parts.values):
        _note_heads(whole.source.producer(), facts)
    for applies, code, reason in _REFUSALS:
        if applies(parts):
            raise Refusal(code, reason.format(parts.query))
    heads, size, keys = parts.heads, parts.size, parts.keys
    assert heads is not None and size is not None
    found = Attention(
        facts, parts.query, keys, parts.values, parts.scores.masks, parts.scale,
        heads, keys.groups, size, match.guarded, True,
    )  # fmt: skip
    found = dataclasses.replace(found, cached=_is_cached(found, producer(match.mixed)))
    _check_masks(parts, found.cached)
    return found


def _read_parts(match: Match, facts: ProvedShapes) -> _Parts:
    scores = read_scores(producer(match.softmax).inputs[0])
    if scores is None:
        raise Refusal("ORP603", f"{match.softmax.name!r} is not scaled scores and masks")
    keys, values = (
        _heads(operand, what, facts)
        for operand, what in (
            (scores.product.inputs[1], "keys"),
            (producer(match.mixed).inputs[1], "values"),
        )
    )
    if not keys.transposed or values.transposed:
        raise Refusal("ORP603", "keys or values are laid out in another way")
    query, scale, _ = unscaled(scores.product.inputs[0])
    assert query is not None
    scale *= scores.scale
    for node, index in keys.scalings:
        scale *= factor(node, index)
    return _Parts(match, facts, scores, query, keys, values, scale)


def _heads(operand: ir.Value | None, what: str, facts: ProvedShapes) -> RepeatedHeads:
    assert operand is not None
    heads = read_repeated_heads(operand, facts, once=True)
    if heads is None:
        raise Refusal("ORP602", f"{what} {operand.name!r} are not known to be [B, H, T, D]")
    return heads


def _are_read_elsewhere(parts: _Parts) -> bool:
    """Whether scores or weights are, which would be computed twice."""
    match = parts.match
    weights = producer(match.mixed).inputs[0]
    assert weights is not None
    reads = {match.softmax: 1 + match.guarded, weights: 1}
    reads |= dict.fromkeys(parts.scores.steps, 1)
    # Of the result, sizes are read to lay it out.
    sizes = sum(map(_gives_sizes, match.mixed.consumers()))
    reads[match.mixed] = 1 + sizes
    return any(
        value.is_graph_output() or len(value.uses()) > count for value, count in reads.items()
    )


def _gives_sizes(node: ir.Node) -> bool:
    readers = node.outputs[0].consumers() if node.op_type == "Reshape" else (node,)
    return all(reader.op_type == "Shape" for reader in readers)


def _sizes_differ(parts: _Parts) -> bool:
    other = _number(parts.facts, parts.values.source)
    keys, values = parts.keys, parts.values
    return parts.size is None or (parts.size, keys.groups) != (other, values.groups)


def _check_masks(parts: _Parts, cached: bool) -> None:
    """Refuse masks of unknown axes, and where heads share keys of unknown heads."""
    highest, behind = HIDDEN if len(parts.scores.masks) == 1 else LOWEST, 1.0
    for mask in reversed(parts.scores.masks):
        shape, name = parts.facts.dims(mask.value), mask.value.name
        behind *= mask.scale
        if shape is None:
            raise Refusal("ORP602", f"the axes of mask {name!r} are not known")
        dims = mask_dims(shape, name)
        shared = cached and parts.heads != parts.keys.groups
        if mask.lowest is not None and not mask.lowest * behind <= highest:
            low = f"{mask.lowest * behind:g}"
            raise Refusal(
                "ORP604", f"Where by {name!r} puts {low} for scores, which may be as low"
            )
        # One query head would be repeated for the heads of a mask.
        if (shared or parts.heads == 1) and number(dims[1]) not in (1, parts.heads):
            raise Refusal("ORP603", f"mask {name!r} may differ from head to head")


def _moves_heads(parts: _Parts) -> bool:
    """Whether ``[B, H, S, D]`` is not transposed as it is, for the batch of all inputs."""
    node, shape = (
        producer(producer(parts.match.out).inputs[0]),
        parts.facts.dims(parts.query, 4),
    )
    if node.op_type == "MatMul":
        return False
    if shape is None or parts.heads is None:
        return True
    heads = (parts.heads, ())
    return not keeps_order(parts.facts, node, *((d,) for d in (shape[0], heads, *shape[2:])))


def keeps_order(facts: ProvedShapes, reshape: ir.Node, *wanted: Container[Dim | None]) -> bool:
    """Whether a Reshape makes these sizes of as many elements: all but one are proved."""
    is_reshape = reshape.op_type == "Reshape"
    asked = facts.numbers(reshape.inputs[1]) if is_reshape else None
    before = facts.dims(reshape.inputs[0]) if is_reshape else None
    if asked is None or before is None or len(asked) != len(wanted):
        return False
    # The first axes stay where they are.
    stays = len(asked) if len(asked) == len(before) else 2
    copies = not int_attribute(reshape, "allowzero", 0)
    proved = [
        one in sizes or (axis < stays and (one == before[axis] or (copies and one == _COPIED)))
        for axis, (one, sizes) in enumerate(zip(asked, wanted, strict=True))
    ]
    return sum(proved) >= len(wanted) - 1


_REFUSALS: tuple[tuple[Callable[[_Parts], bool], str, str], ...] = (
    (lambda parts: bool(parts.values.scalings), "ORP603", "the values are scaled"),
    (
        lambda parts: parts.keys.repeats != parts.values.repeats,
        "ORP603",
        "keys and values are repeated differently",
    ),
    (
        lambda parts: parts.query.dtype != ir.DataType.FLOAT,
        "ORP605",
        "computes in {0.dtype}, not in float32",
    ),
    # GroupQueryAttention takes 0 for no scale at all, and Attention takes positive ones only.
    (
        lambda parts: not 0 < parts.scale < math.inf,
        "ORP603",
        "its scale is not a positive number",
    ),
    (_are_read_elsewhere, "ORP601", "its scores or weights are read elsewhere"),
    (_sizes_differ, "ORP602", "keys and values are not known to have heads of one size"),
    (
        lambda parts: parts.heads is None,
        "ORP602",
        "how many heads {0.name!r} has is not known",
    ),
    (_moves_heads, "ORP603", "the result is laid out in another way"),
)


def _number(facts: ProvedShapes, heads: ir.Value) -> int | None:
    """The last axis of heads, D."""
    shape = facts.dims(heads, len(SPLIT_HEADS))
    return None if shape is None else number(shape[-1])


def _is_cached(found: Attention, product: ir.Node) -> bool:
    """Whether keys and values are inputs of this graph that come back, longer, as outputs."""
    joins = [made_by(each.source, "Concat") for each in found.both if not each.split]
    here = [node for node in joins if node is not None and node.graph is product.graph]
    return len(here) == len(found.both) and all(map(_appends, here))


def _note_heads(cache: ir.Node | None, facts: ProvedShapes) -> None:
    """Note that what is appended to a cache has its heads: a run fails where it has not."""
    past, new = cache.inputs if cache is not None and _appends(cache) else (None, None)
    held, dims = facts.dims(past, 4), facts.dims(new, 4)
    heads = None if held is None else number(held[1])
    if new is not None and heads and dims is not None and not number(dims[1]):
        facts.note(new, (dims[0], (heads, ()), *dims[2:]))
        if (split := unsplit(new)) is not new:
            facts.note(split, (dims[0], dims[2], (heads, ()), dims[3]))


def _appends(node: ir.Node | None) -> bool:
    """Whether a node appends to an input, ``[B, G, T, D]``, that comes back as an output."""
    if node is None or len(node.inputs) != 2 or int_attribute(node, "axis", 0) not in (2, -2):
        return False
    past = node.inputs[0]
    return past is not None and past.is_graph_input() and node.outputs[0].is_graph_output()
