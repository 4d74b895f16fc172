# SPDX-License-Identifier: MIT
"""How many bytes of a model are codes, scales, floats: by what its constants are for."""

from __future__ import annotations

import os
from collections.abc import Iterator

import onnx_ir as ir

from ortplugins.model_io.loading import stored_bytes
from ortplugins.model_io.saving import identity_of

CODES, SCALES, FLOATS, OTHERS = (
    "quantised codes",
    "scales and zero points",
    "float constants",
    "other constants",
)
PACKED = "packed for kernels"
KINDS = (CODES, SCALES, FLOATS, OTHERS)

# Inputs that are codes, and those that are scales and zero points.
_ROLES: dict[str, tuple[frozenset[int], frozenset[int]]] = {
    "DequantizeLinear": (frozenset({0}), frozenset({1, 2})),
    "QuantizeLinear": (frozenset(), frozenset({1, 2})),
    "MatMulNBits": (frozenset({1}), frozenset({2, 3})),
    "GatherBlockQuantized": (frozenset({0}), frozenset({2, 3})),
    "QLinearMatMul": (frozenset({0, 3}), frozenset({1, 2, 4, 5, 6, 7})),
    "QLinearConv": (frozenset({0, 3, 8}), frozenset({1, 2, 4, 5, 6, 7})),
    "MatMulInteger": (frozenset({0, 1}), frozenset({2, 3})),
    "ConvInteger": (frozenset({0, 1}), frozenset({2, 3})),
}
_SMALL_INTEGERS = frozenset({
    ir.DataType.INT2, ir.DataType.UINT2, ir.DataType.INT4, ir.DataType.UINT4,
    ir.DataType.INT8, ir.DataType.UINT8,
})  # fmt: skip


def weight_bytes(model: ir.Model) -> dict[str, tuple[int, int]]:
    """Return number and bytes of constants for each of :data:`KINDS`; no tensor is read.

    Bytes that two initializers share are counted once, for the first.
    """
    counts = dict.fromkeys(KINDS, (0, 0))
    seen: set[object] = set()
    for value, tensor in _constants(model):
        place = identity_of(tensor)
        size = 0 if place in seen else stored_bytes(tensor)
        seen.add(place)
        kind = _kind(value, tensor)
        counts[kind] = counts[kind][0] + 1, counts[kind][1] + size
    return counts


def packed_bytes(model_path: str | os.PathLike[str]) -> tuple[int, int]:
    """Return how many initializers of a file have packed forms, and the bytes of these."""
    import onnx

    from rewrite_rules.prepacked_weights.records import read_records

    found = read_records(onnx.load(model_path, load_external_data=False))
    blobs = {
        (offset, length)
        for records in found.values()
        for record in records
        for offset, length, _ in record.blobs
    }
    return len(found), sum(length for _, length in blobs)


def _constants(model: ir.Model) -> Iterator[tuple[ir.Value, ir.TensorProtocol]]:
    for graph in model.graphs():
        for value in graph.initializers.values():
            if value.const_value is not None:
                yield value, value.const_value
    nodes = [*model.graph.all_nodes()]
    for function in model.functions.values():
        nodes += function.all_nodes()
    for node in nodes:
        if node.op_type == "Constant" and (held := node.attributes.get("value")) is not None:
            yield node.outputs[0], held.as_tensor()


def _kind(value: ir.Value, tensor: ir.TensorProtocol) -> str:
    for node, index in value.uses():
        codes, scales = _ROLES.get(node.op_type, (frozenset(), frozenset()))
        if index in codes:
            return CODES
        if index in scales:
            return SCALES
    if tensor.dtype.is_floating_point():
        return FLOATS
    return CODES if tensor.dtype in _SMALL_INTEGERS else OTHERS
