# SPDX-License-Identifier: MIT
"""Which share of a model's weights are codes, and which operators hold the others in float."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping

import onnx_ir as ir

from ortplugins.model_io.loading import initializer_tensors
from rewrite_rules.graph.parameters import int_attribute

_FLOATS = frozenset({
    ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE,
})  # fmt: skip
# Operators that read codes, by the inputs that these are. All else that they read belongs to
# the codes: scales, zero points.
_CODES = {
    "ConvInteger": (1,),
    "DequantizeLinear": (0,),
    "DynamicQuantizeLSTM": (1, 2),
    "DynamicQuantizeMatMul": (1,),
    "GatherBlockQuantized": (0,),
    "MatMulBnb4": (1,),
    "MatMulInteger": (0, 1),
    "MatMulIntegerToFloat": (0, 1),
    "MatMulNBits": (1,),
    "QAttention": (1,),
    "QGemm": (0, 3),
    "QLinearConv": (3,),
    "QLinearMatMul": (0, 3),
    "QMoE": (2, 5, 8),
    "QuantizeLinear": (0,),  # of a constant, which is rounded when a session starts
}
_LOOKED_THROUGH = frozenset({
    "Cast", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze",
})  # fmt: skip
VECTORS = "vectors"  # norms, biases
_OUTPUT = "graph output"
_SHOWN = 3  # operators in the text


@dataclasses.dataclass(frozen=True)
class FloatWeights:
    """Float weights that one operator reads, for one reason.

    Attributes:
        op_type: The operator; ``"vectors"`` for norms, biases and the like of any, ``"graph
            output"`` for what the model returns.
        weights: How many tensors.
        elements: Numbers in them.
        bytes: Bytes of them.
        reason: Why they are float; empty where it is not known.
    """

    op_type: str
    weights: int
    elements: int
    bytes: int
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Coverage:
    """How much of a model is quantised; each constant tensor counts once.

    Attributes:
        elements: Numbers in all weights, float and quantised.
        quantized_elements: Of these, the codes of 8 bits and fewer.
        bytes: Bytes of all weights, scales and zero points included.
        quantized_bytes: Of these, codes, scales and zero points.
        rest: What is float, the largest first.
    """

    elements: int = 0
    quantized_elements: int = 0
    bytes: int = 0
    quantized_bytes: int = 0
    rest: tuple[FloatWeights, ...] = ()

    @property
    def share(self) -> float:
        """Share of the elements that are quantised, 0 to 1; NaN without weights."""
        return self.quantized_elements / self.elements if self.elements else math.nan

    def __str__(self) -> str:
        if not self.elements:
            return "no weights"
        # 99.96 % is not all of them.
        text = f"{math.floor(1000 * self.share) / 10:.1f} % of all weights quantised"
        shown = [
            f"{item.op_type} {100 * item.elements / self.elements:.1f} %"
            for item in self.rest[:_SHOWN]
            if item.elements >= self.elements / 1000
        ]
        return f"{text}; float: {', '.join(shown)}" if shown else text


def coverage(
    model: ir.Model,
    planned: Mapping[ir.Value, Collection[ir.Node]] | None = None,
    why: Callable[[ir.Node], str] = lambda node: "",
) -> Coverage:
    """Count the weights of a model, planned ones as quantised; their codes have no bytes yet.

    ``why`` says why a node reads floats.
    """
    planned = planned or {}
    elements = size = 0
    for value, tensor in initializer_tensors(model):
        if value in planned:
            elements += tensor.size
        elif tensor.dtype is not ir.DataType.INT32:  # biases of models of integers
            count, belongs = _codes_in(value, tensor)
            elements += count
            size += tensor.nbytes if belongs else 0
    rest: dict[tuple[str, str], list[ir.TensorProtocol]] = {}
    for value, tensor in initializer_tensors(model):
        uses = [use for use in _readers(value) if use[0] not in planned.get(value, ())]
        kinds = {_OUTPUT} if value.is_graph_output() else set()
        kinds |= {node.op_type for node, _ in uses}
        if tensor.dtype not in _FLOATS or not kinds or any(_is_of_codes(*use) for use in uses):
            continue
        operators = ", ".join(sorted(kinds))
        reason = next(filter(None, (why(node) for node, _ in uses)), "")
        is_vector = sum(size != 1 for size in tensor.shape.numpy()) < 2
        key = (VECTORS, "") if is_vector else (operators, reason)
        rest.setdefault(key, []).append(tensor)
    rows = [
        FloatWeights(
            operators,
            len(tensors),
            sum(tensor.size for tensor in tensors),
            sum(tensor.nbytes for tensor in tensors),
            reason,
        )
        for (operators, reason), tensors in rest.items()
    ]
    return Coverage(
        elements + sum(row.elements for row in rows),
        elements,
        size + sum(row.bytes for row in rows),
        size,
        tuple(sorted(rows, key=lambda row: -row.elements)),
    )


def _readers(value: ir.Value) -> Iterator[tuple[ir.Node, int]]:
    """Yield what reads a constant, and as which input."""
    for node, index in value.uses():
        if node.op_type in _LOOKED_THROUGH and index == 0:
            yield from _readers(node.outputs[0])
        else:
            yield node, index


def _codes_in(value: ir.Value, tensor: ir.TensorProtocol) -> tuple[int, bool]:
    """Return how many codes a tensor holds, and whether it belongs to some at all."""
    for node, index in _readers(value):
        if _is_of_codes(node, index):
            rounded = node.op_type == "QuantizeLinear" or tensor.dtype not in _FLOATS
            is_codes = rounded and index in _CODES[node.op_type]
            return (_unpacked_size(node, tensor) if is_codes else 0), True
    return 0, False


def _is_of_codes(node: ir.Node, index: int) -> bool:
    """Whether an input is codes, scales or zero points."""
    is_bias = (node.op_type, index) == ("MatMulNBits", 5)
    return node.op_type in _CODES and not is_bias


def _unpacked_size(node: ir.Node, tensor: ir.TensorProtocol) -> int:
    if node.op_type in ("MatMulNBits", "MatMulBnb4"):
        return int_attribute(node, "K", 0) * int_attribute(node, "N", 0)
    bits = 8
    if node.op_type == "GatherBlockQuantized" and tensor.dtype is ir.DataType.UINT8:
        bits = int_attribute(node, "bits", 4)
    elif node.op_type == "QMoE":
        bits = int_attribute(node, "expert_weight_bits", 4)
    return tensor.size * 8 // bits
