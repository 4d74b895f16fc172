# SPDX-License-Identifier: MIT
"""Reads ``scale * q k' + masks``, the scores that a Softmax makes weights of."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import onnx_ir as ir

from rewrite_rules.graph.nodes import input_of, label, made_by
from rewrite_rules.graph.parameters import constant, constant_ints, int_attribute
from rewrite_rules.remarks import Refusal
from rewrite_rules.shapes.proved_shapes import ProvedShapes
from rewrite_rules.transformer_fusion.masks import Mask
from rewrite_rules.transformer_fusion.repeated_heads import scaled_input

_MAX_MASKS = 3
_LAST = ([-1], [3])
_MASKED = frozenset({"Add", "Sub", "Where"})


@dataclasses.dataclass(frozen=True, eq=False)
class Scores:
    """``scale * MatMul(q, k') + masks``, where ``steps`` are the values on the way.

    ``cap``: ``cap * tanh(scale * MatMul(q, k') / cap)`` stands for the product; 0 for none.
    ``sinks``: a score of each head, ``[1, H, 1, 1]``, that takes a part of the weights.
    """

    product: ir.Node
    scale: float
    masks: tuple[Mask, ...]
    steps: tuple[ir.Value, ...]
    cap: float = 0.0
    sinks: ir.Value | None = None


def read_logits(softmax: ir.Node, cut: ir.Node | None, facts: ProvedShapes) -> Scores | None:
    """Return the scores of a Softmax; ``cut`` takes the weights of sinks away."""
    logits = softmax.inputs[0]
    if cut is None:
        return read_scores(logits)
    less = made_by(logits, "Sub")
    peak = None if less is None else made_by(less.inputs[1], "ReduceMax")
    if less is not None and peak is not None and peak.inputs[0] is less.inputs[0]:
        keeps = int_attribute(peak, "keepdims", 1)
        logits = (
            less.inputs[0] if keeps and constant_ints(input_of(peak, 1)) in _LAST else None
        )
    join = made_by(logits, "Concat")
    cuts = [constant_ints(value) for value in cut.inputs[1:]]
    if join is None or len(join.inputs) != 2 or [int_attribute(join, "axis", 0)] not in _LAST:
        return None
    if not any(cuts in ([[0], [-1], last], [[0], [-1], last, [1]]) for last in _LAST):
        return None
    spread, found = made_by(join.inputs[1], "Expand"), read_scores(join.inputs[0])
    sinks = None if spread is None else spread.inputs[0]
    dims, after, one = facts.dims(sinks, 4), facts.dims(join.inputs[1], 4), (1, ())
    if found is None or dims is None or after is None or after[3] != one:
        return None
    is_of_heads = (dims[0], *dims[2:]) == (one, one, one)
    return dataclasses.replace(found, sinks=sinks) if is_of_heads else None


def read_scores(logits: ir.Value | None, depth: int = _MAX_MASKS) -> Scores | None:
    """Return the scores that a value is; None for other values."""
    inner, scale, steps = unscaled(logits)
    node = None if inner is None else inner.producer()
    if inner is None or node is None or node.domain:
        return None
    steps = inner, *steps
    if node.op_type == "MatMul":
        return Scores(node, scale, (), steps)
    if node.op_type == "Tanh":
        found = read_scores(node.inputs[0], depth)
        if found is not None and (found.masks or found.cap):
            raise Refusal("ORP603", "the scores are soft-capped behind a mask")
        return found and Scores(
            found.product, found.scale * scale, (), (*found.steps, *steps), scale
        )
    if node.op_type not in _MASKED or not depth:
        return None
    a, b = node.inputs[-2:]
    for scores, other in ((a, b), (b, a)):
        found = read_scores(scores, depth - 1)
        if found is None or other is None:
            continue
        if node.op_type == "Where":
            mask = _chosen(node, other, other is a)
        elif node.op_type == "Add" or scores is a:
            mask = Mask(other, subtracted=node.op_type == "Sub")
        else:
            return None
        return dataclasses.replace(
            found,
            scale=found.scale * scale,
            masks=(*found.masks, dataclasses.replace(mask, scale=scale)),
            steps=(*found.steps, *steps),
            cap=found.cap * scale,
        )
    return None


def unscaled(value: ir.Value | None) -> tuple[ir.Value | None, float, tuple[ir.Value, ...]]:
    """Return a value before constants multiply and divide it, their factor, and the steps."""
    scale, steps = 1.0, list[ir.Value]()
    while value is not None and (node := value.producer()) is not None:
        index = scaled_input(node)
        if index is None:
            break
        scale *= factor(node, index)
        steps.append(value)
        value = node.inputs[index]
    return value, scale, tuple(steps[::-1])


def factor(node: ir.Node, index: int) -> float:
    """Return the number that a Mul or Div multiplies an input by."""
    tensor = constant(node.inputs[1 - index])
    assert tensor is not None
    number = float(tensor.numpy().reshape(-1)[0])
    return number if node.op_type == "Mul" else 1 / number if number else math.inf


def _chosen(node: ir.Node, other: ir.Value, hides: bool) -> Mask:
    """Read the mask of a Where between scores and a number."""
    tensor, condition = constant(other), node.inputs[0]
    lowest = float(np.asarray(tensor.numpy()).max()) if tensor and tensor.size else math.nan
    is_one = tensor is not None and tensor.size == 1 and len(tensor.shape.numpy()) <= 1
    if not is_one or condition is None:
        raise Refusal(
            "ORP604", f"Where {label(node)!r} chooses something else than the lowest number"
        )
    return Mask(condition, lowest=lowest, hides=hides)
