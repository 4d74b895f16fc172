# SPDX-License-Identifier: MIT
"""Runs what works token by token on real tokens only."""

from __future__ import annotations

import math

import onnx_ir as ir

from rewrite_rules.facts.operator_table import NORMS, per_token
from rewrite_rules.graph.initializers import FreshNames
from rewrite_rules.graph.parameters import constant_ints, int_attribute
from rewrite_rules.trim_padding.new_nodes import NewNodes
from rewrite_rules.trim_padding.token_axes import BATCH, Sequence
from rewrite_rules.trim_padding.token_flow import Side, TokenFlow

_MICROSOFT = "com.microsoft"
# Axes of a product's other inputs, at most: a matrix, or any constants.
_PRODUCTS = {"MatMul": 2, "MatMulIntegerToFloat": 2, "MatMulNBits": 9}
_QUANTIZES = ("DequantizeLinear", "QuantizeLinear")
_ALLOWZERO_SINCE = 14
# A region has to save more than its gathers take.
_MIN_PRODUCTS = 2


def pack_regions(model: ir.Model, flow: TokenFlow, names: FreshNames, holds: ir.Value) -> int:
    """Pack in place; return how many nodes run on real tokens. The caller sorts the graph.

        x [batch, sequence, D] -> MatMul -> Add -> LayerNormalization -> y [batch, sequence, D]

        x -> Reshape [batch sequence, D] -> Gather(rows of real tokens) -> MatMul -> Add
          -> LayerNormalization -> Gather(a row for each position) -> y [batch, sequence, D]

    Attention keeps its padding. A padded position gets the row of the real one before it,
    which the mask leaves out like what stood there. Where ``holds`` is 0, it does not, or a
    row has none before it: all are real.
    """
    packed = [node for node in model.graph if _is_packable(node, flow)]
    if sum(node.op_type in _PRODUCTS for node in packed) < _MIN_PRODUCTS:
        return 0
    _Packing(model, flow, names, holds).apply(packed)
    return len(packed)


def _is_packable(node: ir.Node, flow: TokenFlow) -> bool:
    """Whether a node computes rows of ``[batch, sequence, D]`` each by itself."""
    if node.domain not in ("", _MICROSOFT) or not node.inputs:
        return False
    if any(_rows_width(value, flow) is None for value in node.outputs):
        return False
    first, *others = node.inputs
    if node.op_type == "ReduceMean":
        last_only = bool(others) and constant_ints(others[0]) == [-1]
        return last_only and _rows_width(first, flow) is not None
    if node.op_type in _PRODUCTS:
        rank = _PRODUCTS[node.op_type]
        fixed = all(v is None or _is_constant(v, flow, rank) for v in others)
        return fixed and _rows_width(first, flow) is not None
    if node.op_type in _QUANTIZES:  # by one number: an axis would be another one
        one = all(v is None or _is_constant(v, flow, 0) for v in others)
        return one and _rows_width(first, flow) is not None
    row = per_token(node)
    if row is None or not row.packs or first is None:
        return False
    if node.op_type in NORMS and int_attribute(node, "axis", -1) not in (-1, 2):
        return False
    rows = [_rows_width(value, flow) is not None for value in node.inputs]
    return any(rows) and all(
        is_rows or value is None or _is_constant(value, flow, 1)
        for value, is_rows in zip(node.inputs, rows, strict=True)
    )


def _rows_width(value: ir.Value | None, flow: TokenFlow) -> int | None:
    """D of a value ``[batch, sequence, D]`` that depends on tokens; None of others.

    Others are those of which something is known at padded positions: nothing will be.
    """
    if value is None or isinstance(flow.value(value), Side):
        return None
    match flow.tokens(value).axes:
        case ((batch,), along, width) if batch == BATCH and along == (Sequence(),):
            sizes = [factor for factor in width if isinstance(factor, int)]
            return math.prod(sizes) if len(sizes) == len(width) else None
    return None


def _is_constant(value: ir.Value, flow: TokenFlow, rank: int) -> bool:
    """Whether a value is the same for all tokens, and of so few dimensions, or one number."""
    axes = flow.tokens(value).axes
    if axes is None or not all(isinstance(one, int) for axis in axes for one in axis):
        return False
    return len(axes) <= rank or (rank == 0 and not any(axes))


class _Packing:
    """The nodes that pack and unpack, and what they were made for."""

    def __init__(
        self, model: ir.Model, flow: TokenFlow, names: FreshNames, holds: ir.Value
    ) -> None:
        self._graph = model.graph
        self._flow = flow
        self._names = names
        self._rows = dict[ir.Value, ir.Value]()
        self._shaped = dict[int, ir.Value]()
        self._op = NewNodes(names, flow.opset)
        self._index_rows(flow.mask, holds, flow.opset)

    def apply(self, packed: list[ir.Node]) -> None:
        inside = set(packed)
        for node in packed:
            for i, value in enumerate(node.inputs):
                width = _rows_width(value, self._flow)
                if value is None or width is None or value.producer() in inside:
                    continue
                self._shaped.setdefault(width, value)
                node.replace_input_with(i, self._pack(value, width))
            if node.op_type in NORMS:
                node.attributes["axis"] = ir.AttrInt64("axis", -1)
        for value in [value for node in packed for value in node.outputs]:
            self._unpack(value, inside)
        self._op.register(self._graph)
        self._graph.extend(self._op.nodes)

    def _pack(self, value: ir.Value, width: int) -> ir.Value:
        if value not in self._rows:
            flat = self._op.Reshape(value, self._op.integers([-1, width]))
            rows = self._op.Gather(flat, self._real, axis=0)
            rows.type = value.type
            self._rows[value] = rows
        return self._rows[value]

    def _unpack(self, value: ir.Value, inside: set[ir.Node]) -> None:
        """Give the readers that are not packed a row for each position."""
        width = _rows_width(value, self._flow)
        assert width is not None
        shape, value.shape = value.shape, ir.Shape([None, width])
        readers = [(node, i) for node, i in value.uses() if node not in inside]
        whole_readers = []
        for node, i in readers:
            if node.op_type == "Shape" and width in self._shaped:
                node.replace_input_with(i, self._shaped[width])
            else:
                whole_readers.append((node, i))
        outputs = [i for i, one in enumerate(self._graph.outputs) if one is value]
        if not whole_readers and not outputs:
            return
        name = str(value.name)
        if outputs:
            value.name = self._names.take(f"{name}_packed")
        whole = self._op.Gather(value, self._places, axis=0)
        whole.type, whole.shape = value.type, shape
        self._flow.values[whole] = self._flow.value(value)
        for node, i in whole_readers:
            node.replace_input_with(i, whole)
        for i in outputs:
            whole.name = name
            self._graph.outputs[i] = whole

    def _index_rows(self, mask: ir.Value, holds: ir.Value, opset: int) -> None:
        """Rows of real tokens, and for each position the row that it gets back."""
        op, integers = self._op, self._op.integers
        flat, shape = integers([-1]), op.Shape(mask)
        kept = op.Or(op.true(mask), op.Not(op.Cast(holds, to=ir.DataType.BOOL)))
        kept = op.Reshape(kept, flat)
        self._real = op.Reshape(op.NonZero(kept), flat)
        counted = op.Cast(kept, to=ir.DataType.INT64)
        rows = op.Sub(op.CumSum(counted, integers(0)), integers(1))
        # A batch of 0 is a size, not a size to copy; before opset 14 that can't be said.
        literal = {"allowzero": 1} if opset >= _ALLOWZERO_SINCE else {}
        self._places = op.Reshape(rows, shape, **literal)
