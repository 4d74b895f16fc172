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
_MASKED = frozenset({"Add", "Sub", "Where"})


@dataclasses.dataclass(frozen=True, eq=False)
class Scores:
    """``scale * MatMul(q, k') + masks``, where ``steps`` are the values on the way."""

    product: ir.Node
    scale: float
    masks: tuple[Mask, ...]
    steps: tuple[ir.Value, ...]


def read_scores(logits: ir.Value | None, depth: int = _MAX_MASKS) -> Scores | None:
    """Return the scores that a value is; None for other values."""
    inner, scale, steps = unscaled(logits)
    node = None if inner is None else inner.producer()
    if inner is None or node is None or node.domain:
        return None
    steps = inner, *steps
    if node.op_type == "MatMul":
        return Scores(node, scale, (), steps)
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
