# SPDX-License-Identifier: MIT
"""What was added to scores in front of a softmax, or hides some of them.

    scores = q k / 8 + bias          each position has to see itself
    masked = Where(causal, scores, -inf) + mask

Where a position sees nothing but what the mask hides, the softmax gives padding a share; and
it does where a bias lifts padding above what the mask takes off. Products of tokens are taken
to be of ordinary size; what is computed from inputs and sizes is asked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import onnx_ir as ir

from rewrite_rules.facts.operator_table import per_token
from rewrite_rules.graph.nodes import made_by
from rewrite_rules.graph.parameters import constant
from rewrite_rules.trim_padding.questions import ORDINARY, How
from rewrite_rules.trim_padding.sample_masks import are_finite
from rewrite_rules.trim_padding.token_axes import sequences_of
from rewrite_rules.trim_padding.token_flow import RESHAPES, Side, TokenFlow

_MOVES = RESHAPES | {
    *("Cast", "Gather", "GatherElements", "GatherND", "Identity", "Slice", "Split", "Tile"),
    "Transpose",
}
_Part = tuple[ir.Node, int, How]


def sees_itself(flow: TokenFlow, scores: ir.Value) -> bool:
    """Return whether each position sees itself, and nothing that the mask hides."""
    return all(part is not None and flow.opens(*part) for part in _parts(flow, scores))


def keeps_order(flow: TokenFlow, node: ir.Node, index: int, how: How) -> bool:
    """Return what :func:`sees_itself` does, for a mask or bias that a node reads."""
    value = node.inputs[index]
    assert value is not None
    if _is_made(flow, value):
        return flow.opens(node, index, how)
    # What says which keys count is no sum that could be asked by part.
    is_float = value.dtype is not None and value.dtype.is_floating_point()
    return how is How.NUMBERS and is_float and sees_itself(flow, value)


def has_infinity(flow: TokenFlow, scores: ir.Value) -> bool:
    """Return whether infinity is added to scores, or takes the place of some."""
    pending, seen = [scores], {scores}
    for value in pending:
        found, tensor, node = flow.value(value), constant(value), value.producer()
        arrays = found.arrays if isinstance(found, Side) else ()
        if not are_finite(arrays if tensor is None else (tensor.numpy(),)):
            return True
        if node is not None and (per_token(node) or _moves(node)):  # samples are not all
            new = [one for one in node.inputs if one is not None and one not in seen]
            seen.update(new)
            pending += new
    return False


def _parts(flow: TokenFlow, scores: ir.Value) -> Iterator[_Part | None]:
    """Yield what is added and what hides; None for what can't be asked."""
    pending, seen = [(scores, False)], {scores}
    for value, grown in pending:
        node = value.producer()
        if node is None or not (per_token(node) or _moves(node) or made_by(value, "Concat")):
            continue
        kind = node.op_type if node.domain == "" else ""
        given = node.inputs[:1] if _moves(node) else node.inputs
        read = {i: one for i, one in enumerate(given) if one is not None}
        made = {i: _bounds(flow, one) for i, one in read.items() if _is_made(flow, one)}
        if kind == "Where":
            yield from _chosen(node, made)
        elif kind in ("Add", "Sub"):
            for i, (low, high) in made.items():
                if max(-low, high) > ORDINARY:
                    is_added = not grown and (kind, i) != ("Sub", 1)
                    yield (node, i, How.NUMBERS) if is_added else None
        elif kind in ("Mul", "Div"):
            for low, high in made.values():
                sizes = (abs(low), abs(high)) if low * high > 0 else (0, abs(low), abs(high))
                factor = max(sizes) if kind == "Mul" else 1 / (min(sizes) or 1e-30)
                grown |= factor > 1
                if not factor <= ORDINARY:
                    yield None
        else:
            for i, (low, high) in made.items():
                clipped = high if i == 1 else -low
                far = {"Max": high, "Min": -low, "Clip": clipped}.get(kind, max(-low, high))
                if far > ORDINARY:
                    yield None
        new = [one for i, one in read.items() if i not in made and one not in seen]
        seen.update(new)
        pending += [(one, grown) for one in new]


def _chosen(node: ir.Node, made: dict[int, tuple[float, float]]) -> Iterator[_Part | None]:
    """Yield the condition of a Where that takes other numbers than scores."""
    for i, how in ((1, How.HIDES), (2, How.NUMBERS)):
        low, high = made.get(i, (0.0, 0.0))
        if high > ORDINARY:
            yield None
        if low < -ORDINARY:
            yield (node, 0, how) if 0 in made else None


def _is_made(flow: TokenFlow, value: ir.Value) -> bool:
    """Whether a value can be asked as a whole; sums of a mask and others are asked by part."""
    axes = () if isinstance(flow.value(value), Side) else flow.tokens(value).axes or ()
    if any(one.low for one in sequences_of(*axes)):
        return False
    return flow.is_made_of_inputs(value) or not flow.roles.sources(value)


def _bounds(flow: TokenFlow, value: ir.Value) -> tuple[float, float]:
    """Return bounds of the numbers of a value, infinite where they are not constant."""
    found, tensor, node = flow.value(value), constant(value), value.producer()
    numbers = None if tensor is None else tensor.numpy()
    if isinstance(found, Side) and not found.varies:
        numbers = found.arrays[0]
    if numbers is not None and numbers.size:
        return float(numbers.min()), float(numbers.max())
    if node is not None and _moves(node) and node.inputs[0] is not None:
        return _bounds(flow, node.inputs[0])
    return -math.inf, math.inf


def _moves(node: ir.Node) -> bool:
    """Whether a node gives numbers of its first input, elsewhere or in another type."""
    return node.op_type in _MOVES and not node.domain
