# SPDX-License-Identifier: MIT
"""Attributes of nodes, checked: a model may hold any type and number."""

from __future__ import annotations

__all__ = ["axes_of", "axis_of", "float_attribute", "int_attribute"]

import math
from collections.abc import Sequence

import onnx_ir as ir

from rewrite_rules.graph.refusal import Refusal


def int_attribute(node: ir.Node, name: str, default: int) -> int:
    """Read an attribute.

    Raises:
        Refusal: If it is there and no int.
    """
    attribute = node.attributes.get(name)
    if attribute is None:
        return default
    if attribute.type is not ir.AttributeType.INT or attribute.is_ref():
        raise Refusal(f"attribute {name!r} of {node.op_type} is {_kind(attribute)}, no int")
    return attribute.as_int()


def float_attribute(node: ir.Node, name: str, default: float) -> float:
    """Read an attribute.

    Raises:
        Refusal: If it is there and no finite float.
    """
    attribute = node.attributes.get(name)
    if attribute is None:
        return default
    if attribute.type is not ir.AttributeType.FLOAT or attribute.is_ref():
        raise Refusal(f"attribute {name!r} of {node.op_type} is {_kind(attribute)}, no float")
    if not math.isfinite(attribute.as_float()):
        raise Refusal(f"attribute {name!r} of {node.op_type} is {attribute.as_float()}")
    return attribute.as_float()


def axis_of(axis: int, rank: int) -> int:
    """Count an axis from the front.

    Raises:
        Refusal: If there is none such.
    """
    if not -rank <= axis < rank:
        raise Refusal(f"axis {axis} is out of range for rank {rank}")
    return axis % rank


def axes_of(axes: Sequence[int], rank: int) -> set[int]:
    """Count axes from the front.

    Raises:
        Refusal: If one is out of range or named twice.
    """
    found = {axis_of(axis, rank) for axis in axes}
    if len(found) != len(axes):
        raise Refusal(f"axes {list(axes)} name one twice")
    return found


def _kind(attribute: ir.Attr) -> str:
    return "a reference" if attribute.is_ref() else attribute.type.name.lower()
