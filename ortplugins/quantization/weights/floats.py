# SPDX-License-Identifier: MIT
"""Which weights of a model stay in float, by the operators that read them, and why."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

import onnx_ir as ir

from ortplugins.model_io.loading import initializer_tensors
from ortplugins.quantization.weights.report import FloatWeights

_FLOATS = frozenset({
    ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE,
})  # fmt: skip
# What they read in float are scales.
_READ_CODES = frozenset({
    "DequantizeLinear", "GatherBlockQuantized", "MatMulIntegerToFloat", "MatMulNBits",
    "QLinearConv", "QLinearMatMul", "QuantizeLinear",
})  # fmt: skip
_LOOKED_THROUGH = frozenset({
    "Cast", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze",
})  # fmt: skip


def float_weights(
    model: ir.Model,
    planned: Mapping[ir.Value, Collection[ir.Node]],
    why: Callable[[ir.Node], str],
) -> tuple[FloatWeights, ...]:
    """Return what is read in float, the largest first.

    ``planned`` are the nodes that are to read codes of a weight; ``why`` says why another
    does not.
    """
    found: dict[tuple[str, str], list[int]] = {}
    for value, tensor in initializer_tensors(model):
        nodes = [node for node in _readers(value) if node not in planned.get(value, ())]
        kinds = {"graph output"} if value.is_graph_output() else set()
        kinds |= {node.op_type for node in nodes}
        if tensor.dtype not in _FLOATS or not kinds or kinds & _READ_CODES:
            continue
        reason = next(filter(None, map(why, nodes)), "")
        is_vector = sum(size != 1 for size in tensor.shape.numpy()) < 2
        key = ("vectors", "") if is_vector else (", ".join(sorted(kinds)), reason)
        found.setdefault(key, []).append(tensor.size)
    rows = [
        FloatWeights(operators, len(sizes), sum(sizes), reason)
        for (operators, reason), sizes in found.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.elements))


def _readers(value: ir.Value) -> Iterator[ir.Node]:
    """Yield what reads a constant."""
    for node, index in value.uses():
        if node.op_type in _LOOKED_THROUGH and index == 0:
            yield from _readers(node.outputs[0])
        else:
            yield node
