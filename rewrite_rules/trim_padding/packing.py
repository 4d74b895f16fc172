# SPDX-License-Identifier: MIT
"""Runs what works token by token on real tokens only."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import onnx_ir as ir

from rewrite_rules.facts.operator_table import per_token
from rewrite_rules.graph.initializers import FreshNames
from rewrite_rules.graph.nodes import DOMAINS
from rewrite_rules.shapes.dimensions import Dims
from rewrite_rules.trim_padding.new_nodes import NewNodes
from rewrite_rules.trim_padding.token_axes import BATCH, Sequence
from rewrite_rules.trim_padding.token_flow import Side, TokenFlow

_PRODUCTS = frozenset({"MatMul", "MatMulIntegerToFloat", "MatMulNBits"})
# A region has to save more than its gathers take.
_MIN_PRODUCTS = 2
_ZERO_OPSET = 14
_INT64_MAX = np.iinfo(np.int64).max


def pack_regions(model: ir.Model, flow: TokenFlow, names: FreshNames, holds: ir.Value) -> int:
    """Pack in place; return how many nodes run on real tokens. The caller sorts the graph.

        x [batch, sequence, D] -> MatMul -> Add -> LayerNormalization -> y [batch, sequence, D]

        x -> Reshape [1, batch sequence, D] -> Gather(rows of real tokens) -> MatMul -> Add
          -> LayerNormalization -> Gather(a row for each position) -> Reshape -> y

    Attention keeps its padding. A padded position gets the row of the real one before it,
    which the mask leaves out like what stood there. Where ``holds`` is 0, it does not, or
    inputs have other sizes: all stays as it is, ``[batch, sequence, D]``.
    """
    packed = [node for node in model.graph if _is_packable(node, flow)]
    if sum(node.op_type in _PRODUCTS for node in packed) < _MIN_PRODUCTS:
        return 0
    _Packing(model, flow, names, holds).apply(packed)
    return len(packed)


def _is_packable(node: ir.Node, flow: TokenFlow) -> bool:
    """Whether a node computes rows of ``[batch, sequence, D]`` each by itself."""
    row = per_token(node)
    first_only = node.domain in DOMAINS and node.op_type in _PRODUCTS | {"ReduceMean"}
    if not first_only and (row is None or not row.packs):
        return False
    if any(_rows_width(value, flow) is None for value in node.outputs):
        return False
    rows = [_rows_width(value, flow) is not None for value in node.inputs]
    return any(rows[: 1 if first_only else None]) and all(
        is_rows or value is None or _serves_all(value, flow)
        for value, is_rows in zip(node.inputs, rows, strict=True)
    )


def _rows_width(value: ir.Value | None, flow: TokenFlow) -> int | None:
    """D of a value ``[batch, sequence, D]`` that depends on tokens; None of others.

    Others are those of which something is known at padded positions: nothing will be.
    """
    if value is None or isinstance(flow.value(value), Side):
        return None
    match flow.tokens(value).axes:
        case ((batch,), (Sequence() as along,), width) if batch == BATCH:
            if dataclasses.replace(along, wild=False) != Sequence():
                return None
            sizes = [factor for factor in width if isinstance(factor, int)]
            return math.prod(sizes) if len(sizes) == len(width) else None
    return None


def _serves_all(value: ir.Value, flow: TokenFlow) -> bool:
    """Whether a value is the same for all tokens."""
    axes = flow.tokens(value).axes
    return axes is not None and all(isinstance(one, int) for axis in axes for one in axis)


class _Packing:
    """The nodes that pack and unpack, and what they were made for."""

    def __init__(
        self, model: ir.Model, flow: TokenFlow, names: FreshNames, holds: ir.Value
    ) -> None:
        self._graph, self._flow, self._names = model.graph, flow, names
        self._op = op = NewNodes(names, flow.opset)
        # Sizes of 0 would be copied by a Reshape: what has no tokens runs whole.
        some = op.Cast(op.Size(flow.mask), to=ir.DataType.BOOL)
        self._holds = op.And(op.Cast(holds, to=ir.DataType.BOOL), some)
        self._whole = op.Cast(op.Not(self._holds), to=ir.DataType.INT64)
        self._sizes = op.Shape(flow.mask)
        # Rows of real tokens, and for each position the row that it gets back: none of whole
        # batches.
        kept = op.row(op.And(op.true(flow.mask), self._holds))
        self._real = op.row(op.NonZero(kept))
        counts = op.CumSum(op.Cast(kept, to=ir.DataType.INT64), op.integers(0))
        end = op.Where(self._holds, op.integers([_INT64_MAX]), op.integers([0]))
        rows = op.Sub(counts, op.integers(1))
        self._places = op.Slice(rows, op.integers([0]), end)
        self._order = {node: place for place, node in enumerate(model.graph)}
        # Of sizes that are the same in every run, the first value that has them.
        self._like: dict[tuple[bool, Dims], ir.Value] = {}

    def apply(self, packed: list[ir.Node]) -> None:
        inside = set(packed)
        for node in packed:
            for i, value in enumerate(node.inputs):
                width = _rows_width(value, self._flow)
                if value is not None and width is not None and value.producer() not in inside:
                    node.replace_input_with(i, self._pack(value, width))
        for value in [value for node in packed for value in node.outputs]:
            self._unpack(value, inside)
        self._op.register(self._graph)
        self._graph.extend(self._op.nodes)

    def _place(self, value: ir.Value) -> int:
        """Return where a value of the graph as it was is computed; -1 for inputs."""
        node = value.producer()
        return -1 if node is None else self._order.get(node, -1)

    def _dims(self, value: ir.Value) -> Dims:
        dims = self._flow.roles.shapes.dims(value)
        assert dims is not None
        return dims

    def _shape(self, value: ir.Value, rank: int, is_packed: bool) -> Any:
        """Return the sizes of a value, by one of which so many are the same in every run."""
        key = is_packed, self._dims(value)[:rank]
        return self._op.Shape(self._like.setdefault(key, value))

    def _rows(self, value: ir.Value, rows: Any, is_packed: bool) -> Any:
        """Return rows, or all of a whole batch."""
        op = self._op
        length = op.Gather(self._shape(value, 2, is_packed), op.integers(1), axis=0)
        all_rows = op.Range(op.integers(0), op.Mul(length, self._whole), op.integers(1))
        return op.Concat(rows, all_rows, axis=0)

    def _pack(self, value: ir.Value, width: int) -> Any:
        op = self._op
        sizes = op.Where(
            self._holds, op.integers([1, -1, width]), self._shape(value, 3, False)
        )
        flat = op.Reshape(value, sizes)
        rows = op.Gather(flat, self._rows(value, self._real, is_packed=False), axis=1)
        rows.type = value.type
        return rows

    def _unpack(self, value: ir.Value, inside: set[ir.Node]) -> None:
        """Give the readers that are not packed a row for each position."""
        op, width = self._op, _rows_width(value, self._flow)
        assert width is not None
        shape, value.shape = value.shape, ir.Shape([None, None, width])
        readers = [(node, i) for node, i in value.uses() if node not in inside]
        outputs = [i for i, one in enumerate(self._graph.outputs) if one is value]
        if not readers and not outputs:
            return
        name = str(value.name)
        if outputs:
            value.name = self._names.take(f"{name}_packed")
        places = self._rows(value, self._places, is_packed=True)
        unpacked = self._like.get((False, self._dims(value)[:2]))
        if unpacked is not None and self._place(unpacked) < self._place(value):
            # It has these sizes in each run, packed or not.
            rows = op.Slice(op.Shape(unpacked), op.integers([0]), op.integers([2]))
            sizes = op.Concat(rows, op.integers([width]), axis=0)
        else:
            given = op.Concat(self._sizes, op.integers([width]), axis=0)
            sizes = op.Where(self._holds, given, self._shape(value, 3, True))
        # A size of 0 is no copy of another, which other passes could not know.
        literal = {"allowzero": 1} if self._flow.opset >= _ZERO_OPSET else {}
        whole = op.Reshape(op.Gather(value, places, axis=1), sizes, **literal)
        whole.type, whole.shape = value.type, shape
        self._flow.values[whole] = self._flow.value(value)
        for node, i in readers:
            node.replace_input_with(i, whole)
        for i in outputs:
            whole.name = name
            self._graph.outputs[i] = whole
