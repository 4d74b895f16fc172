# SPDX-License-Identifier: MIT
"""Runs projections, feed-forward layers and norms on the real tokens of a batch only.

    x [batch, sequence, D] -> MatMul -> Add -> LayerNormalization -> y [batch, sequence, D]

    x -> Reshape [batch sequence, D] -> Gather(rows of real tokens) -> MatMul -> Add
      -> LayerNormalization -> Gather(a row for each position) -> y [batch, sequence, D]

Attention keeps its padding. A padded position gets the row of the real one before it, which
the mask leaves out like what stood there; the first position of a row counts as real, for
models that pool it.
"""

from __future__ import annotations

__all__ = ["pack_regions"]

from collections.abc import Iterable
from typing import Any

import numpy as np
import onnx_ir as ir

from rewrite_rules.graph.attributes import int_attribute
from rewrite_rules.graph.constants import constant_ints
from rewrite_rules.graph.initializers import new_initializer
from rewrite_rules.graph.names import FreshNames
from rewrite_rules.trim_padding.token_axes import (
    BATCH,
    Axes,
    Axis,
    flat_sequences,
    sequences_of,
)
from rewrite_rules.trim_padding.token_flow import Evaluated, TokenFlow

_MICROSOFT = "com.microsoft"
_ELEMENTWISE = frozenset({
    "Add", "BiasGelu", "Cast", "Clip", "Div", "Dropout", "Elu", "Erf", "Exp", "FastGelu",
    "Gelu", "HardSwish", "Identity", "LeakyRelu", "Mish", "Mul", "Neg", "Pow", "QuickGelu",
    "Reciprocal", "Relu", "Selu", "Sigmoid", "SkipLayerNormalization",
    "SkipSimplifiedLayerNormalization", "Softplus", "Sqrt", "Sub", "Swish", "Tanh",
})  # fmt: skip
_NORMS = frozenset({"LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"})
_PRODUCTS = frozenset({"MatMul", "MatMulNBits"})
_ALLOWZERO_SINCE = 14
# A region has to save more than its gathers take.
_MIN_PRODUCTS = 2


def pack_regions(model: ir.Model, flow: TokenFlow, mask: ir.Value, names: FreshNames) -> int:
    """Pack in place.

    Args:
        model: Not trimmed yet.
        flow: What is known of its values.
        mask: The mask; what is made here reads it, to be cut like its other readers.
        names: Names that are free.

    Returns:
        How many nodes run on real tokens; 0 where nothing was changed.
    """
    packed = [node for node in model.graph if _is_packable(node, flow)]
    if sum(node.op_type in _PRODUCTS for node in packed) < _MIN_PRODUCTS:
        return 0
    packing = _Packing(model, flow, mask, names)
    packing.apply(packed)
    return len(packed)


def _is_packable(node: ir.Node, flow: TokenFlow) -> bool:
    """Whether a node computes rows of ``[batch, sequence, D]`` each by itself."""
    if node.domain not in ("", _MICROSOFT) or not node.inputs or node.inputs[0] is None:
        return False
    if any(_rows_width(value, flow) is None for value in node.outputs):
        return False
    if node.op_type in _PRODUCTS:
        others: Iterable[ir.Value | None] = node.inputs[1:]
        return _rows_width(node.inputs[0], flow) is not None and all(
            value is None or _is_constant(value, flow, 2 if node.op_type == "MatMul" else 9)
            for value in others
        )
    if node.op_type in _NORMS and int_attribute(node, "axis", -1) not in (-1, 2):
        return False
    if node.op_type == "ReduceMean":
        axes = constant_ints(node.inputs[1]) if len(node.inputs) > 1 else None
        return axes == [-1] and _rows_width(node.inputs[0], flow) is not None
    if node.op_type not in _ELEMENTWISE | _NORMS:
        return False
    return any(_rows_width(value, flow) is not None for value in node.inputs) and all(
        value is None or _rows_width(value, flow) is not None or _is_constant(value, flow, 1)
        for value in node.inputs
    )


def _rows_width(value: ir.Value | None, flow: TokenFlow) -> int | None:
    """D of a value ``[batch, sequence, D]`` that depends on tokens; None of others."""
    if value is None or isinstance(flow.value(value), Evaluated):
        return None
    axes = flow.tokens(value).axes
    if axes is None or len(axes) != 3 or axes[0] != (BATCH,) or len(axes[1]) != 1:
        return None
    if not sequences_of(axes[1]) or sequences_of(axes[2]):
        return None
    return _number(axes[2])


def _number(axis: Axis) -> int | None:
    result = 1
    for factor in axis:
        if not isinstance(factor, int):
            return None
        result *= factor
    return result


def _is_constant(value: ir.Value, flow: TokenFlow, rank: int) -> bool:
    """Whether a value is the same in every run, and of so few dimensions."""
    axes: Axes | None = flow.tokens(value).axes
    fixed = (
        axes is not None
        and not flat_sequences(axes)
        and all(isinstance(factor, int) for axis in axes for factor in axis)
    )
    return fixed and axes is not None and len(axes) <= rank


class _Packing:
    """The nodes that pack and unpack, and what they were made for."""

    def __init__(
        self, model: ir.Model, flow: TokenFlow, mask: ir.Value, names: FreshNames
    ) -> None:
        self._graph = model.graph
        self._flow = flow
        self._names = names
        self._rows = dict[ir.Value, ir.Value]()
        self._shaped = dict[int, ir.Value]()
        self._new: list[ir.Node] = []
        self._opset = model.opset_imports[""]
        self._index_rows(mask)

    def apply(self, packed: list[ir.Node]) -> None:
        """Put nodes around the packed ones; the caller sorts the graph."""
        inside = set(packed)
        made = [value for node in packed for value in node.outputs]
        for node in packed:
            for i, value in enumerate(node.inputs):
                width = _rows_width(value, self._flow)
                if value is None or width is None or value.producer() in inside:
                    continue
                self._shaped.setdefault(width, value)
                node.replace_input_with(i, self._packed(value, width))
            if node.op_type in _NORMS:
                node.attributes["axis"] = ir.AttrInt64("axis", -1)
        for value in made:
            readers = [(node, i) for node, i in value.uses() if node not in inside]
            outputs = [i for i, one in enumerate(self._graph.outputs) if one is value]
            width = _rows_width(value, self._flow)
            assert width is not None
            shape = value.shape
            value.shape = ir.Shape([None, width])
            shapes = [
                (n, i) for n, i in readers if n.op_type == "Shape" and width in self._shaped
            ]
            for node, i in shapes:
                node.replace_input_with(i, self._shaped[width])
            rest = [pair for pair in readers if pair not in shapes]
            if not rest and not outputs:
                continue
            name = str(value.name)
            if outputs:
                value.name = self._names.take(f"{name}_packed")
            whole = self._node("Gather", [value, self._places], f"{name}_unpacked", axis=0)
            whole.type, whole.shape = value.type, shape
            self._flow.alias(whole, value)
            for node, i in rest:
                node.replace_input_with(i, whole)
            for i in outputs:
                whole.name = name
                self._graph.outputs[i] = whole
        self._graph.extend(self._new)

    def _packed(self, value: ir.Value, width: int) -> ir.Value:
        if value not in self._rows:
            shape = self._integers([-1, width])
            flat = self._node("Reshape", [value, shape], f"{value.name}_rows")
            rows = self._node("Gather", [flat, self._real], f"{value.name}_packed", axis=0)
            rows.type = value.type
            self._rows[value] = rows
        return self._rows[value]

    def _index_rows(self, mask: ir.Value) -> None:
        """Rows of real tokens, and for each position the row that it gets back."""
        shape = self._make("Shape", [mask])
        length = self._make("Gather", [shape, self._integers(1)], axis=0)
        numbers = self._make("Range", [self._integers(0), length, self._integers(1)])
        first = self._make("Equal", [numbers, self._integers(0)])
        real: ir.Value = mask
        if mask.dtype is not ir.DataType.BOOL:
            real = self._make("Cast", [mask], to=ir.DataType.BOOL.value)
        kept = self._make("Or", [real, first])
        flat = self._make("Reshape", [kept, self._integers([-1])])
        found = self._make("NonZero", [flat])
        self._real = self._make("Reshape", [found, self._integers([-1])])
        counted = self._make("Cast", [flat], to=ir.DataType.INT64.value)
        sums = self._make("CumSum", [counted, self._integers(0)])
        rows = self._make("Sub", [sums, self._integers(1)])
        # A batch of 0 is a size, not a size to copy; before opset 14 that can't be said.
        literal = {"allowzero": 1} if self._opset >= _ALLOWZERO_SINCE else {}
        self._places = self._make("Reshape", [rows, shape], **literal)

    def _make(self, op_type: str, inputs: list[ir.Value], **attributes: Any) -> ir.Value:
        return self._node(op_type, inputs, "packing", **attributes)

    def _node(
        self, op_type: str, inputs: list[ir.Value], name: str, **attributes: Any
    ) -> ir.Value:
        node = ir.node(
            op_type, inputs, attributes, name=self._names.take(f"trim_padding_{op_type}")
        )
        node.outputs[0].name = self._names.take(name)
        self._new.append(node)
        return node.outputs[0]

    def _integers(self, numbers: Any) -> ir.Value:
        name = self._names.take("trim_padding_number")
        return new_initializer(self._graph, ir.Tensor(np.array(numbers, np.int64), name=name))
