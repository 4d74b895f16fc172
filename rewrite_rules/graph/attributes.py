# SPDX-License-Identifier: MIT
"""Attributes of nodes, checked: a model may hold any type and number."""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir

from rewrite_rules.graph.refusal import Refusal


def int_attribute(node: ir.Node, name: str, default: int) -> int:
    """Read an attribute; refuse one that is not an int."""
    attribute = _attribute(node, name, ir.AttributeType.INT)
    return default if attribute is None else attribute.as_int()


def ints_attribute(node: ir.Node, name: str) -> list[int] | None:
    """Read an attribute, None where it is left out; refuse what is not a list of ints."""
    attribute = _attribute(node, name, ir.AttributeType.INTS)
    return None if attribute is None else list(attribute.as_ints())


def float_attribute(node: ir.Node, name: str, default: float) -> float:
    """Read an attribute; refuse one that is not a finite float."""
    attribute = _attribute(node, name, ir.AttributeType.FLOAT)
    number = default if attribute is None else attribute.as_float()
    if not math.isfinite(number):
        raise Refusal(f"attribute {name!r} of {node.op_type} is {number}")
    return number


def axis_of(axis: int, rank: int) -> int:
    """Count an axis from the front; refuse one that is out of range."""
    if not -rank <= axis < rank:
        raise Refusal(f"axis {axis} is out of range for rank {rank}")
    return axis % rank


def axes_of(axes: Sequence[int], rank: int) -> set[int]:
    """Count axes from the front; refuse those out of range or named twice."""
    found = {axis_of(axis, rank) for axis in axes}
    if len(found) != len(axes):
        raise Refusal(f"axes {list(axes)} name one twice")
    return found


def _attribute(node: ir.Node, name: str, expected: ir.AttributeType) -> ir.Attr | None:
    attribute = node.attributes.get(name)
    if attribute is not None and (attribute.is_ref() or attribute.type is not expected):
        kind = "a reference" if attribute.is_ref() else attribute.type.name.lower()
        raise Refusal(
            f"attribute {name!r} of {node.op_type} is {kind}, not {expected.name.lower()}"
        )
    return attribute
