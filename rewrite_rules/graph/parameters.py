# SPDX-License-Identifier: MIT
"""Attributes and constant inputs of nodes, checked: a model may hold any type and number."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

import numpy as np
import onnx.helper
import onnx_ir as ir

from rewrite_rules.graph.nodes import is_constant, label
from rewrite_rules.remarks import Refusal

# Longer lists are not shapes or axes.
_MAX_INTS = 64


def int_attribute(node: ir.Node, name: str, default: int = 0) -> int:
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
        raise Refusal("ORP204", f"attribute {name!r} of {node.op_type} is {number}")
    return number


def type_attribute(node: ir.Node, name: str) -> ir.DataType | None:
    """Read an attribute that names a type; None where it is left out or 0."""
    number = int_attribute(node, name)
    try:
        return ir.DataType(number) if number else None
    except ValueError:
        raise Refusal(
            "ORP204", f"{name} of {label(node)!r} is {number}, which is not a type"
        ) from None


def axis_of(axis: int, rank: int) -> int:
    """Count an axis from the front; refuse one that is out of range."""
    if not -rank <= axis < rank:
        raise Refusal("ORP202", f"axis {axis} is out of range for rank {rank}")
    return axis % rank


def axes_of(axes: Sequence[int], rank: int) -> set[int]:
    """Count axes from the front; refuse those out of range or named twice."""
    found = {axis_of(axis, rank) for axis in axes}
    if len(found) != len(axes):
        raise Refusal("ORP202", f"axes {list(axes)} name one twice")
    return found


def _attribute(node: ir.Node, name: str, expected: ir.AttributeType) -> ir.Attr | None:
    attribute = node.attributes.get(name)
    if attribute is not None and (attribute.is_ref() or attribute.type is not expected):
        kind = "a reference" if attribute.is_ref() else attribute.type.name.lower()
        raise Refusal(
            "ORP204",
            f"attribute {name!r} of {node.op_type} is {kind}, not {expected.name.lower()}",
        )
    return attribute


def source_of(value: ir.Value) -> ir.Value:
    """Follow Identity nodes back to the value that they repeat."""
    seen = set()
    while (node := value.producer()) is not None and node.op_type == "Identity":
        source = node.inputs[0] if len(node.inputs) == 1 else None
        if source is None or node.domain or node in seen:
            break
        seen.add(node)
        value = source
    return value


def constant(value: ir.Value | None) -> ir.TensorProtocol | None:
    """The tensor of an initializer or Constant node, Identity nodes looked through.

    None for anything else: an initializer that is also a graph input is only a default, and
    whoever runs the session may feed another tensor.
    """
    if value is None:
        return None
    value = source_of(value)
    if value.is_graph_input():
        return None
    node = value.producer()
    if node is not None and not is_constant(node):
        return None
    # Kept: onnx_ir makes a tensor, or checks one by a slow protocol, at each call.
    if value.const_value is None:
        with contextlib.suppress(ValueError):  # damaged, or strings that are not ASCII
            value.const_value = ir.convenience.get_const_tensor(value)
    return value.const_value


def scalar(value: ir.Value | None, most_axes: float = 1) -> float | None:
    """Return the only number of a constant of so many axes at most; None for others."""
    tensor = constant(value)
    if tensor is None or tensor.size != 1 or len(tensor.shape.numpy()) > most_axes:
        return None
    return float(tensor.numpy().reshape(-1)[0])


def contents(tensor: ir.TensorProtocol) -> tuple[object, ...]:
    """Return what two equal tensors have in common: type, shape, bytes or texts."""
    texts = tensor.dtype == ir.DataType.STRING
    held = tuple(np.ravel(tensor.numpy()).tolist()) if texts else tensor.tobytes()
    return tensor.dtype, tuple(tensor.shape.numpy()), held


def constant_ints(value: ir.Value | None) -> list[int] | None:
    """The numbers of a short constant int32 or int64 tensor, flat; None if it is none."""
    tensor = constant(value)
    if tensor is None or tensor.dtype not in (ir.DataType.INT32, ir.DataType.INT64):
        return None
    if tensor.size > _MAX_INTS:
        return None
    check_payload(tensor, f"constant {tensor.name!r}")
    return [int(number) for number in tensor.numpy().reshape(-1)]


def require_constant(value: ir.Value | None, role: str) -> tuple[ir.Value, ir.TensorProtocol]:
    """Return a constant input of a node and its tensor; refuse what a run can change."""
    if value is None:
        raise Refusal("ORP202", f"{role} is missing")
    value = source_of(value)
    if value.is_graph_input():
        raise Refusal(
            "ORP101",
            f"{role} {value.name!r} is a graph input: a caller may feed another; make it an "
            "initializer only",
        )
    tensor = constant(value)
    if tensor is None:
        raise Refusal(
            "ORP102", f"{role} {value.name!r} is computed at run time: initializers fuse"
        )
    check_payload(tensor, f"{role} {value.name!r}")
    return value, tensor


def check_payload(tensor: ir.TensorProtocol, what: str) -> None:
    """Refuse a tensor whose stored data, outside of files, contradicts its shape."""
    if tensor.dtype in (ir.DataType.STRING, ir.DataType.UNDEFINED):
        raise Refusal("ORP204", f"{what} is of type {tensor.dtype.name.lower()}")
    shape = tuple(tensor.shape.numpy())
    if any(size < 0 for size in shape):
        raise Refusal("ORP204", f"{what} has shape {list(shape)}, with a negative size")
    if not isinstance(tensor, ir.TensorProtoTensor):
        return
    proto, dtype = tensor.raw, tensor.dtype
    stored, unit, expected = proto.raw_data, "bytes", tensor.nbytes
    if not proto.HasField("raw_data"):
        stored = getattr(proto, onnx.helper.tensor_dtype_to_field(dtype.value))
        # Codes of less than a byte are packed, several to each number; complex ones take two.
        unit, expected = "numbers", tensor.size if dtype.bitwidth >= 8 else tensor.nbytes
        if dtype in (ir.DataType.COMPLEX64, ir.DataType.COMPLEX128):
            expected *= 2
    name = dtype.name.lower()
    if len(stored) != expected:
        raise Refusal(
            "ORP204",
            f"{what} holds {len(stored)} {unit}, but shape {list(shape)} of {name} takes "
            f"{expected}",
        )
