# SPDX-License-Identifier: MIT
"""Reads ``scale * q k' + masks``, the scores that a Softmax makes weights of."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import onnx_ir as ir

from rewrite_rules.graph.nodes import label
from rewrite_rules.graph.parameters import constant
from rewrite_rules.remarks import Refusal
from rewrite_rules.transformer_fusion.masks import Mask
from rewrite_rules.transformer_fusion.repeated_heads import scaled_input

_MAX_MASKS = 3
# Half of what lies between float32 numbers of such size is far above any score.
_NO_SCORE_CHANGES = -1e37


@dataclasses.dataclass(frozen=True, eq=False)
class Scores:
    """``scale * MatMul(q, k') + masks``, where ``steps`` are the values on the way."""

    product: ir.Node
    scale: float
    masks: tuple[Mask, ...]
    steps: tuple[ir.Value, ...]


def read_scores(logits: ir.Value | None, depth: int = _MAX_MASKS) -> Scores | None:
    """Return the scores that a value is; None for other values."""
    found = _product(logits)
    if found is not None:
        return found
    node = None if logits is None else logits.producer()
    if logits is None or node is None or node.op_type not in ("Add", "Where") or not depth:
        return None
    a, b = node.inputs[-2:]
    for scores, other in ((a, b), (b, a)):
        found = read_scores(scores, depth - 1)
        if found is not None and other is not None and not node.domain:
            chosen = node.op_type == "Where"
            mask = _chosen(node, other, other is a) if chosen else Mask(other)
            added = (*found.masks, mask), (*found.steps, logits)
            return dataclasses.replace(found, masks=added[0], steps=added[1])
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


def _product(scores: ir.Value | None) -> Scores | None:
    """Read the MatMul behind scores, and what scales it."""
    inner, scale, steps = unscaled(scores)
    node = None if inner is None else inner.producer()
    if inner is None or node is None or node.domain:
        return None
    if node.op_type == "Tanh" and _product(node.inputs[0]) is not None:
        raise Refusal("the scores are soft-capped")
    return Scores(node, scale, (), (inner, *steps)) if node.op_type == "MatMul" else None


def _chosen(node: ir.Node, other: ir.Value, hides: bool) -> Mask:
    """Read the mask of a Where between scores and a number."""
    tensor, condition = constant(other), node.inputs[0]
    lowest = float(np.asarray(tensor.numpy()).max()) if tensor and tensor.size else math.nan
    is_one = tensor is not None and tensor.size == 1 and len(tensor.shape.numpy()) <= 1
    if not is_one or condition is None or not lowest <= _NO_SCORE_CHANGES:
        raise Refusal(f"Where {label(node)!r} chooses something else than the lowest number")
    return Mask(condition, lowest, hides)
