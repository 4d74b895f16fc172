# SPDX-License-Identifier: MIT
"""Which weights of a model stay in float, by the operators that read them, and why."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import onnx_ir as ir

from ortplugins.model_io.loading import initializer_tensors
from ortplugins.quantization.weights.report import FloatWeights
from ortplugins.quantization.weights.uses import readers_of

_FLOATS = frozenset({
    ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE,
})  # fmt: skip
# What they read in float are scales.
_READ_CODES = frozenset({
    "DequantizeLinear", "GatherBlockQuantized", "MatMulIntegerToFloat", "MatMulNBits",
    "QLinearConv", "QLinearMatMul", "QuantizeLinear",
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
        readers = [node for node, _ in readers_of(value) if node not in planned.get(value, ())]
        kinds = {"graph output" if node is None else node.op_type for node in readers}
        nodes = filter(None, readers)
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
