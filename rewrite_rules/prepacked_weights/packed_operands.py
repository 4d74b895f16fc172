# SPDX-License-Identifier: MIT
"""Which operand of which operator leaves the heap: a row for each that a CPU kernel packs.

    operator(..., W, ...), W an initializer
        ->  operator(..., W, ...), W in the file as it is and as the kernel reads it

To have another one packed, add a row. What onnxruntime packs without a row stays on the heap,
with a note.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import onnx

_MICROSOFT = "com.microsoft"
# Operator and domain -> inputs that are packed.
PACKED_OPERANDS: Mapping[tuple[str, str], tuple[int, ...]] = {
    ("MatMul", ""): (1,),
    ("Gemm", ""): (1,),
    ("Conv", ""): (1,),  # of float16
    ("ConvTranspose", ""): (1,),
    ("LSTM", ""): (1, 2),
    ("GRU", ""): (1, 2),
    ("MatMulInteger", ""): (1,),
    ("QLinearMatMul", ""): (3,),
    ("QLinearConv", ""): (3,),
    ("FusedMatMul", _MICROSOFT): (1,),
    ("FusedGemm", _MICROSOFT): (1,),
    ("FusedConv", _MICROSOFT): (1,),
    ("MatMulNBits", _MICROSOFT): (1, 2, 3),
    ("DynamicQuantizeMatMul", _MICROSOFT): (1,),
    ("MatMulIntegerToFloat", _MICROSOFT): (1,),
    ("QGemm", _MICROSOFT): (3,),
    ("DynamicQuantizeLSTM", _MICROSOFT): (1, 2),
    ("Attention", _MICROSOFT): (1,),
    ("QAttention", _MICROSOFT): (1,),
}

# An initializer: the way to the graph that holds it, and its name, which a subgraph of another
# node may have as well.
Key = tuple[str, ...]


class Reading(NamedTuple):
    """An initializer that a node reads, or, without a node, that nothing reads."""

    key: Key
    tensor: onnx.TensorProto
    node: onnx.NodeProto | None = None
    operand: int = 0

    @property
    def has_row(self) -> bool:
        """Whether a row of the table says that it is packed."""
        if self.node is None:
            return False
        return self.operand in PACKED_OPERANDS.get((self.node.op_type, self.node.domain), ())


def readings(graph: onnx.GraphProto) -> Iterator[Reading]:
    """Yield what nodes read, in their order, subgraphs at their node; what is unused last."""

    def walk(
        way: Key, body: onnx.GraphProto, outer: ChainMap[str, Reading]
    ) -> Iterator[Reading]:
        own = {t.name: Reading((*way, t.name), t) for t in body.initializer}
        visible = outer.new_child(own)  # the innermost graph that has a name is meant
        for node in body.node:
            for index, name in enumerate(node.input):
                if name in visible:
                    yield visible[name]._replace(node=node, operand=index)
            for step, part in bodies(node):
                yield from walk((*way, *step), part, visible)
        yield from own.values()

    yield from walk((), graph, ChainMap())


def graphs(graph: onnx.GraphProto, way: Key = ()) -> Iterator[tuple[Key, onnx.GraphProto]]:
    """Yield a graph and its subgraphs, each with the way to it."""
    yield way, graph
    for node in graph.node:
        for step, body in bodies(node):
            yield from graphs(body, (*way, *step))


def bodies(node: onnx.NodeProto) -> Iterator[tuple[Key, onnx.GraphProto]]:
    """Graphs of a node with the way to them; outputs tell nodes of a graph apart."""
    for attribute in node.attribute:
        found = [attribute.g] if attribute.HasField("g") else attribute.graphs
        for index, body in enumerate(found):
            yield (*node.output, attribute.name, str(index)), body
