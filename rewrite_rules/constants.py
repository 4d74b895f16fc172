# SPDX-License-Identifier: MIT
"""Tensors that no run of the session can change, and whether their data is what they say."""

from __future__ import annotations

__all__ = ["Refusal", "check_stored", "constant", "constant_ints", "described", "source_of"]

import numpy as np
import onnx_ir as ir


class Refusal(Exception):
    """A candidate cannot be rewritten; the text is the reason a user reads."""


def source_of(value: ir.Value) -> ir.Value:
    """Follow Identity nodes back to the value that they repeat."""
    while (node := value.producer()) is not None and node.op_type == "Identity":
        source = node.inputs[0]
        if source is None or node.domain not in ("", "ai.onnx"):
            break
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
    if node is not None and (node.op_type != "Constant" or len(node.attributes) != 1):
        return None
    return ir.convenience.get_const_tensor(value)


def constant_ints(value: ir.Value | None) -> list[int] | None:
    """The numbers of a constant int32 or int64 tensor, flat; None if it is none."""
    tensor = constant(value)
    if tensor is None or tensor.dtype not in (ir.DataType.INT32, ir.DataType.INT64):
        return None
    return [int(number) for number in tensor.numpy().reshape(-1)]


def described(value: ir.Value, role: str) -> tuple[ir.Value, ir.TensorProtocol]:
    """Return a constant input of a node and its tensor.

    Args:
        value: The input; Identity nodes are looked through.
        role: What messages call it.

    Raises:
        Refusal: If a run of the session can change it, or its data is damaged.
    """
    value = source_of(value)
    if value.is_graph_input():
        raise Refusal(
            f"{role} {value.name!r} is a graph input: a caller may feed another; make it an "
            "initializer only"
        )
    tensor = constant(value)
    if tensor is None:
        raise Refusal(f"{role} {value.name!r} is computed at run time: initializers fuse")
    check_stored(tensor, f"{role} {value.name!r}")
    return value, tensor


def check_stored(tensor: ir.TensorProtocol, what: str) -> None:
    """Refuse a tensor whose stored data is not as long as its shape and type say.

    Data in files is checked where files are read.

    Raises:
        Refusal: Also if numbers lie outside the type's range.
    """
    if not isinstance(tensor, ir.TensorProtoTensor):
        return
    shape = tuple(tensor.shape.numpy())
    if any(size < 0 for size in shape):
        raise Refusal(f"{what} has shape {list(shape)}, with a negative size")
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
    stored = proto.float_data if tensor.dtype is ir.DataType.FLOAT else proto.int32_data
    # Codes of less than a byte are packed: several to each number.
    expected = tensor.size if bits >= 8 else tensor.nbytes
    if len(stored) != expected:
        raise Refusal(
            f"{what} holds {len(stored)} numbers, but shape {list(shape)} of {name} takes "
            f"{expected}"
        )
    if tensor.dtype is ir.DataType.FLOAT or bits > 16:
        return
    low, high = (
        (-128, 127) if tensor.dtype is ir.DataType.INT8 else (0, (1 << max(bits, 8)) - 1)
    )
    numbers = np.array(stored, np.int64)
    wrong = numbers[(numbers < low) | (numbers > high)]
    if wrong.size:
        raise Refusal(f"{what} holds {wrong[0]}, outside the range of {name}")
