# SPDX-License-Identifier: MIT
"""Values whose rounding decides much: those on a way to a step, or to a phase.

    Floor(x * c)   CumSum(x) ... Sin(x * c)   x * c > 1

The last digit of ``x * c`` is a whole cycle of a vocoder's phase later, or the other side of a
threshold. Linear nodes and norms end a way: they round sums of many terms anyway.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import onnx_ir as ir

from rewrite_rules.graph.nodes import label, subgraphs, walk

_STEPS = frozenset({
    "ArgMax", "ArgMin", "Ceil", "Cos", "CumProd", "CumSum", "Equal", "Floor", "Greater",
    "GreaterOrEqual", "Hardmax", "Less", "LessOrEqual", "Mod", "NonMaxSuppression", "NonZero",
    "Round", "Sign", "Sin", "Tan", "TopK", "Unique",
})  # fmt: skip
_ENDS = frozenset({
    "Attention", "BatchNormalization", "Conv", "ConvInteger", "ConvTranspose", "Einsum",
    "GRU", "Gemm", "GroupNormalization", "InstanceNormalization", "LSTM",
    "LayerNormalization", "MatMul", "MatMulInteger", "RMSNormalization", "RNN", "Softmax",
    "DynamicQuantizeLinear", "QuantizeLinear",
    # Of no element's value.
    "ConstantOfShape", "Shape", "Size",
})  # fmt: skip
_FLOATS = frozenset({
    ir.DataType.BFLOAT16, ir.DataType.DOUBLE, ir.DataType.FLOAT, ir.DataType.FLOAT16,
})  # fmt: skip
_MAX_STEPS = 2000


class Sensitivity:
    """Looks for such ways in one model."""

    def __init__(self, model: ir.Model) -> None:
        self._model = model

    def reader(self, value: ir.Value) -> str | None:
        """Return the step that a value leads to, for a remark; None where none is found."""
        pending, seen = [value], {value}
        for _ in range(_MAX_STEPS):
            if not pending:
                return None
            current = pending.pop()
            for node in self._readers(current):
                standard = not node.domain
                if standard and (node.op_type in _STEPS or _cuts(node)):
                    return f"{node.op_type} {label(node)!r}"
                if not (standard and node.op_type in _ENDS):
                    pending += [made for made in node.outputs if made not in seen]
                    seen.update(node.outputs)
        return "a node too far on to look for"

    def _readers(self, value: ir.Value) -> Iterator[ir.Node]:
        """Yield the nodes that read a value, and the one whose subgraph results in it."""
        yield from value.consumers()
        if value.is_graph_output():
            producer = value.producer()
            graph = value.graph if producer is None else producer.graph
            if (holder := self._holders.get(graph)) is not None:
                yield holder

    @functools.cached_property
    def _holders(self) -> dict[object, ir.Node]:
        """The If, Loop or Scan of each subgraph."""
        nodes = walk(self._model.graph)
        return {graph: node for node in nodes for graph in subgraphs(node)}


def _cuts(node: ir.Node) -> bool:
    """Whether a node makes integers or booleans of floats."""
    target = node.attributes.get_int("to", 0) if node.op_type == "Cast" else 0
    return bool(target) and ir.DataType(target) not in _FLOATS
