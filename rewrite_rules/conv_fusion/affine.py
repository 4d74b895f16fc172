# SPDX-License-Identifier: MIT
"""Nodes that compute ``scale * x + offset`` of constants, one number for each channel.

    Mul(x, c)   Add(x, c)   Sub(x, c)   Sub(c, x)   Div(x, c)   BatchNormalization(x, ...)

What makes a constant one number for each channel is the axis that it broadcasts along, never
its number of elements: [C] behind a Conv runs along the width.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from rewrite_rules.conv_fusion.linear import MAX_OFFSET_OF_NORM, Affine, Float64
from rewrite_rules.graph.nodes import made_by
from rewrite_rules.graph.parameters import float_attribute, int_attribute, require_constant
from rewrite_rules.remarks import Refusal
from rewrite_rules.shapes.proved_shapes import ProvedShapes

# Of the pattern of a node: whatever else it has.
ANY = {"_allow_other_inputs": True, "_allow_other_attributes": True}


@dataclasses.dataclass(frozen=True)
class Kind:
    """One spelling; both orders of a sum or product.

    Attributes:
        op_type: The operator.
        scale: Of x, from the constant in float64.
        offset: Of x, from the constant in float64.
        is_first: Whether the constant comes first.
    """

    op_type: str
    scale: Callable[[Float64], Float64] = np.ones_like
    offset: Callable[[Float64], Float64] = np.zeros_like
    is_first: bool = False

    def pattern(self, op: Any, x: Any, c: Any, out: str) -> Any:
        """Return the pattern of the node, of the operand and the constant."""
        operands = (c, x) if self.is_first else (x, c)
        # Of a norm, c is the first of four constants.
        return getattr(op, self.op_type)(*operands, **ANY, _outputs=[out])

    def read(self, array: Float64) -> Affine:
        """Return what it computes with a constant."""
        with np.errstate(divide="ignore"):
            return Affine(np.array(self.scale(array)), np.array(self.offset(array)))


SCALES = (Kind("Mul", scale=lambda c: c), Kind("Div", scale=np.reciprocal))
OFFSETS = (
    Kind("Add", offset=lambda c: c),
    Kind("Sub", offset=np.negative),
    Kind("Sub", lambda c: -np.ones_like(c), lambda c: c, is_first=True),
)
KINDS = (*SCALES, *OFFSETS, Kind("BatchNormalization"))


class Affines:
    """Reads such nodes of one model."""

    def __init__(self, shapes: ProvedShapes) -> None:
        self._shapes = shapes

    def per_channel(
        self, kind: Kind, node: ir.Node, c: ir.Value, channels: int, rank: int, axis: int
    ) -> Affine:
        """Return what a node computes, both [channels], of an operand with these channels.

        ``axis`` is theirs, counted from the end; ``rank`` is the least rank that the operand
        is known to have.
        """
        if kind.op_type == "BatchNormalization":
            if rank - axis != 1:
                raise Refusal("ORP651", "the channels are not its second axis")
            return _normalized(node, channels)
        array = self.constant(c)
        if array.ndim > rank:
            raise Refusal(
                "ORP651", f"constant {c.name!r} may have more axes than its other operand"
            )
        aligned = (1,) * (axis - array.ndim) + array.shape
        others = (size for i, size in enumerate(aligned) if i != len(aligned) - axis)
        if aligned[-axis] not in (1, channels) or any(size != 1 for size in others):
            raise Refusal("ORP651", f"constant {c.name!r} is not one number for each channel")
        return kind.read(np.broadcast_to(array.reshape(-1), channels))

    def constant(self, value: ir.Value) -> Float64:
        """Return a float32 constant in float64, reshaped ones too; refuse other values."""
        reshaped = made_by(value, "Reshape", "Unsqueeze", "Squeeze")
        source = value if reshaped is None else reshaped.inputs[0]
        source, tensor = require_constant(source, "constant")
        shape = tuple(tensor.shape.numpy())
        sizes = shape if reshaped is None else self._shapes.sizes(value)
        if tensor.dtype != ir.DataType.FLOAT or sizes is None:
            raise Refusal(
                "ORP653", f"constant {source.name!r} is not float32 of a known shape"
            )
        return tensor.numpy().astype(np.float64).reshape(sizes)

    def number(self, value: ir.Value | None, like: ir.Value) -> float | None:
        """Return a constant of one element that does not add axes to ``like``; else None."""
        if value is None:
            return None
        try:
            array = self.constant(value)
        except Refusal:
            return None
        if array.size != 1 or array.ndim > self.least_rank(like):
            return None
        return float(array.reshape(()))

    def least_rank(self, value: ir.Value) -> int:
        """Return the rank of a value; 0 where it is not known."""
        return len(self._shapes.dims(value) or ())

    def channels(self, value: ir.Value, rank: int) -> int | None:
        """Return the size of the second axis, of a value of some rank; None if not known."""
        dims = self._shapes.dims(value, rank)
        return None if dims is None or dims[1][1] else dims[1][0]


def _normalized(node: ir.Node, channels: int) -> Affine:
    """Return what a BatchNormalization at inference computes."""
    if int_attribute(node, "training_mode") or not int_attribute(node, "spatial", 1):
        raise Refusal("ORP651", "it normalises by its input, or each element apart")
    parts = []
    for value, role in zip(node.inputs[1:5], ("scale", "bias", "mean", "var"), strict=True):
        value, tensor = require_constant(value, role)
        if tensor.dtype != ir.DataType.FLOAT or math.prod(tensor.shape.numpy()) != channels:
            raise Refusal("ORP651", f"{role} {value.name!r} is not a float32 for each channel")
        parts.append(tensor.numpy().astype(np.float64).reshape(-1))
    scale, bias, mean, variance = parts
    with np.errstate(divide="ignore", invalid="ignore"):
        scale = scale / np.sqrt(variance + float_attribute(node, "epsilon", 1e-5))
        return Affine(scale, bias - mean * scale, MAX_OFFSET_OF_NORM)
