# SPDX-License-Identifier: MIT
"""A cache in buffers of the caller's that are longer than what they hold.

    Shape(past)              -> [B, G, T - S, D], by the mask [B, T] and the tokens [B, S]
    Shape(Concat(past, new)) -> [B, G, T, D]

GroupQueryAttention appends to a buffer in place where the caller binds it as past and as
present. Nothing else may read it: behind T is whatever was there. A cache of the length that
it holds is taken as before.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir
from onnxscript import TapeBuilder

from rewrite_rules.facts.input_roles import Kind
from rewrite_rules.facts.made_up_batches import DecoderInputs
from rewrite_rules.graph.nodes import label, producer
from rewrite_rules.graph.parameters import int_attribute
from rewrite_rules.transformer_fusion.head_layout import ints

_RANK, _LENGTH = 4, 2


class SharedCache:
    """Says how many tokens a cache holds, whatever the length of its buffers.

    ``last`` is T - 1 for each row, of cached and new tokens, int32 ``[B]``; ``total`` T,
    int32 ``[1]``. A ValueError if no input has a column for each of them.
    """

    def __init__(self, model: ir.Model, inputs: DecoderInputs) -> None:
        masks = inputs.all(Kind.MASK, "total")
        tokens = inputs.all(Kind.IDS, "sequence") + inputs.all(Kind.EMBEDDINGS, "sequence")
        if not masks or not tokens:
            raise ValueError("kv_cache=shared needs a mask [B, T] and tokens [B, S] as inputs")
        op = TapeBuilder()
        self._graph, self._inputs, self._tokens = model.graph, inputs, tokens[0]
        self._total = op.Shape(masks[0], start=1, end=2)
        last = op.Cast(op.Sub(self._total, ints(op, 1)), to=ir.DataType.INT32)
        self.last = op.Expand(last, op.Shape(masks[0], start=0, end=1))
        # The kernel divides by the number of rows; of none, the first is an error.
        one = op.Constant(value=ir.tensor([1], ir.DataType.INT32))
        self.total = op.Add(op.Gather(self.last, ints(op, 0)), one)
        model.graph.insert_before(model.graph[0], op.nodes)

    def replace_sizes(self, caches: Iterable[ir.Value]) -> None:
        """Replace Shapes of caches, ``Concat(past, new)``, and of what they held before."""
        op = TapeBuilder()
        cached = op.Sub(self._total, op.Shape(self._tokens, start=1, end=2))
        self._graph.insert_after(producer(self._total), op.nodes)
        for whole in caches:
            past = producer(whole).inputs[0]
            assert past is not None
            for value, length in ((past, cached), (whole, self._total)):
                for node in [node for node in value.consumers() if node.op_type == "Shape"]:
                    _replace(node, past, length)

    def check(self, present: Iterable[ir.Value], reason: str) -> None:
        """Raise a ValueError if anything but GroupQueryAttention reads the cache."""
        for cache in (*self._inputs.all(Kind.CACHE, "past"), *present):
            for node in cache.consumers():
                if node.op_type not in ("GroupQueryAttention", "Shape"):
                    what = f"{label(node)!r} reads {cache.name!r} as well"
                    raise ValueError(f"kv_cache=shared: {what}; {reason}")


def _replace(shape: ir.Node, past: ir.Value, length: ir.Value) -> None:
    """Shape of a buffer -> Shape of what it holds."""
    part = slice(int_attribute(shape, "start", 0), int_attribute(shape, "end", _RANK))
    op, graph = TapeBuilder(), shape.graph
    assert graph is not None
    # Keys may have been read behind the attention that past comes before: same sizes.
    parts = [
        length if axis == _LENGTH else op.Shape(past, start=axis, end=axis + 1)
        for axis in range(_RANK)[part]
    ]
    made = parts[0] if len(parts) == 1 else op.Concat(*parts, axis=0)
    graph.insert_before(shape, op.nodes)
    shape.outputs[0].replace_all_uses_with(made, replace_graph_outputs=True)
    graph.remove(shape, safe=True)
