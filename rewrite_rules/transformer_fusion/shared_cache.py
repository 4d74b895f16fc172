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

from rewrite_rules.facts.axis_roles import AxisRoles
from rewrite_rules.facts.input_roles import Kind, role_of
from rewrite_rules.graph.nodes import label, producer
from rewrite_rules.graph.parameters import int_attribute
from rewrite_rules.transformer_fusion.attention_kernels import Attention
from rewrite_rules.transformer_fusion.heads import ints

_RANK, _LENGTH = 4, 2


class SharedCache:
    """Says how many tokens a cache holds, whatever the length of its buffers.

    ``last`` is T - 1 for each row, of cached and new tokens, int32 ``[B]``; ``total`` T,
    int32 ``[1]``.
    """

    def __init__(self, model: ir.Model) -> None:
        self._graph, self._caches = model.graph, cache_inputs(model)
        self._roles = AxisRoles(model)
        self._read: tuple[ir.Value, ir.Value] | None = None

    def takes(self, found: Attention) -> bool:
        """Whether inputs have a column for each token, and are those of other layers."""
        read = self._columns(found)
        return read is not None and self._read in (None, read)

    def _columns(self, found: Attention) -> tuple[ir.Value, ir.Value] | None:
        """Return the mask ``[B, T]``, on which scores depend, and tokens ``[B, S, ...]``."""
        facts, roles = found.facts, self._roles
        length = facts.unknowns.broadcast_parts(found.sizes.dim("S"))
        axes = {value: (facts.dims(value) or ())[1:2] for value in self._graph.inputs}
        tokens = [value for value, second in axes.items() if {*second} & {*length}]
        if not tokens:
            return None
        new = (roles.shapes.dims(tokens[0]) or ())[1]
        read = {source for mask in found.masks for source in roles.sources(mask.value)}
        sizes = {source: roles.shapes.dims(source) or () for source in read}
        masks = [
            v for v, dims in sizes.items() if len(dims) == 2 and not roles.same(dims[1], new)
        ]
        return (masks[0], tokens[0]) if len(masks) == 1 else None

    def counts(self, found: Attention) -> tuple[ir.Value, ir.Value]:
        """Return ``last`` and ``total``, emitted in front of the graph for all layers."""
        if self._read is None:
            self._read = self._columns(found)
            assert self._read is not None
            op, mask = TapeBuilder(), self._read[0]
            self._total = op.Shape(mask, start=1, end=2)
            last = op.Cast(op.Sub(self._total, ints(op, 1)), to=ir.DataType.INT32)
            self._last = op.Expand(last, op.Shape(mask, start=0, end=1))
            # The kernel divides by the number of rows; of none, the first is an error.
            one = op.Constant(value=ir.tensor([1], ir.DataType.INT32))
            self._count = op.Add(op.Gather(self._last, ints(op, 0)), one)
            self._graph.insert_before(self._graph[0], op.nodes)
        return self._last, self._count

    def replace_sizes(self, caches: Iterable[ir.Value]) -> None:
        """Replace Shapes of caches, ``Concat(past, new)``, and of what they held before."""
        if self._read is None:
            return
        op = TapeBuilder()
        cached = op.Sub(self._total, op.Shape(self._read[1], start=1, end=2))
        self._graph.insert_after(producer(self._total), op.nodes)
        for whole in caches:
            past = producer(whole).inputs[0]
            assert past is not None
            for value, length in ((past, cached), (whole, self._total)):
                for node in [node for node in value.consumers() if node.op_type == "Shape"]:
                    _replace(node, past, length)

    def check(self, present: Iterable[ir.Value], reason: str) -> None:
        """Raise a ValueError if anything but GroupQueryAttention reads the cache."""
        for cache in (*self._caches, *present):
            for node in cache.consumers():
                if node.op_type not in ("GroupQueryAttention", "Shape"):
                    what = f"{label(node)!r} reads {cache.name!r} as well"
                    raise ValueError(f"kv_cache=shared: {what}; {reason}")


def cache_inputs(model: ir.Model) -> list[ir.Value]:
    """Return the inputs ``[B, G, past, D]`` that hold keys or values of earlier tokens."""
    return [value for value in model.graph.inputs if _is_cache(value)]


def _is_cache(value: ir.Value) -> bool:
    if value.is_initializer() or value.shape is None or len(value.shape) != _RANK:
        return False
    role, sizes = role_of(value), [isinstance(dim, int) for dim in value.shape[1:]]
    named = role.kind is Kind.CACHE and "past" in role.axes
    is_float = value.dtype is not None and value.dtype.is_floating_point()
    is_other = role.kind is not Kind.NUMBERS or "encoder" in str(value.name)
    return named or (is_float and sizes == [True, False, True] and not is_other)


def _replace(shape: ir.Node, past: ir.Value, length: ir.Value) -> None:
    """Shape of a buffer -> Shape of what it holds."""
    part = slice(int_attribute(shape, "start"), int_attribute(shape, "end", _RANK))
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
