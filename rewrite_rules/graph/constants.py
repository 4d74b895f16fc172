# SPDX-License-Identifier: MIT
"""Tensors that no run of the session can change, and whether their data is what they say."""

from __future__ import annotations

import numpy as np
import onnx.helper
import onnx_ir as ir

from rewrite_rules.graph.refusal import Refusal

_MICROSOFT = "com.microsoft"
# Longer lists are not shapes or axes.
_MAX_INTS = 64


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
    if node is not None and (
        node.op_type != "Constant"
        or node.domain
        or len(node.attributes) != 1
        or len(node.outputs) != 1
    ):
        return None
    # Kept: onnx_ir makes a tensor, or checks one by a slow protocol, at each call.
    if value.const_value is None and node is not None:
        value.const_value = ir.convenience.get_const_tensor(value)
    return value.const_value


def constant_ints(value: ir.Value | None) -> list[int] | None:
    """The numbers of a short constant int32 or int64 tensor, flat; None if it is none."""
    tensor = constant(value)
    if tensor is None or tensor.dtype not in (ir.DataType.INT32, ir.DataType.INT64):
        return None
    if tensor.size > _MAX_INTS:
        return None
    check_payload(tensor, f"constant {tensor.name!r}")
    return [int(number) for number in tensor.numpy().reshape(-1)]


def require_constant(value: ir.Value, role: str) -> tuple[ir.Value, ir.TensorProtocol]:
    """Return a constant input of a node and its tensor; refuse what a run can change."""
    value = source_of(value)
    if value.is_graph_input():
        raise Refusal(
            f"{role} {value.name!r} is a graph input: a caller may feed another; make it an "
            "initializer only"
        )
    tensor = constant(value)
    if tensor is None:
        raise Refusal(f"{role} {value.name!r} is computed at run time: initializers fuse")
    check_payload(tensor, f"{role} {value.name!r}")
    return value, tensor


def check_payload(tensor: ir.TensorProtocol, what: str) -> None:
    """Refuse a tensor whose stored data is not as long as its shape and type say.

    Also if numbers lie outside the type's range. Files are checked where they are read.
    """
    if tensor.dtype in (ir.DataType.STRING, ir.DataType.UNDEFINED):
        raise Refusal(f"{what} is of type {tensor.dtype.name.lower()}")
    shape = tuple(tensor.shape.numpy())
    if any(size < 0 for size in shape):
        raise Refusal(f"{what} has shape {list(shape)}, with a negative size")
    if not isinstance(tensor, ir.TensorProtoTensor):
        return
    proto = tensor.raw
    bits = tensor.dtype.bitwidth
    name = tensor.dtype.name.lower()
    if proto.HasField("raw_data"):
        if len(proto.raw_data) != tensor.nbytes:
            raise Refusal(
                f"{what} holds {len(proto.raw_data)} bytes, but shape {list(shape)} of {name} "
                f"takes {tensor.nbytes}"
            )
        return
    stored = getattr(proto, onnx.helper.tensor_dtype_to_field(tensor.dtype.value))
    # Codes of less than a byte are packed, several to each number; complex ones take two.
    expected = tensor.size if bits >= 8 else tensor.nbytes
    if tensor.dtype in (ir.DataType.COMPLEX64, ir.DataType.COMPLEX128):
        expected *= 2
    if len(stored) != expected:
        raise Refusal(
            f"{what} holds {len(stored)} numbers, but shape {list(shape)} of {name} takes "
            f"{expected}"
        )
    if bits > 16:
        return
    if tensor.dtype in (ir.DataType.INT8, ir.DataType.INT16):
        low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    else:
        low, high = 0, (1 << max(bits, 8)) - 1
    numbers = np.array(stored, np.int64)
    wrong = numbers[(numbers < low) | (numbers > high)]
    if wrong.size:
        raise Refusal(f"{what} holds {wrong[0]}, outside the range of {name}")
