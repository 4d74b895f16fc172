# SPDX-License-Identifier: MIT
"""The nodes that count padding, cut inputs and pad outputs.

    mask [batch, sequence] -> Cast(bool) -> Cast(int32)
         -> ReduceMax over rows               [sequence], 1 where any row is real
         -> Slice backwards -> Pad by one 0   [sequence + 1], from the end
         -> ArgMax                            [1], padded positions at the end

A mask without any real position counts as one without padding: ArgMax takes the first of equal
numbers. The 0 behind is for a sequence of length 0.
"""

from __future__ import annotations

__all__ = ["PaddingNodes"]

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from rewrite_rules.graph.initializers import new_initializer
from rewrite_rules.graph.names import FreshNames

_ATTRIBUTE_AXES_UNTIL = 18  # ReduceMax has its axes as an attribute before this opset
_INT64_MIN = np.iinfo(np.int64).min


class PaddingNodes:
    """Makes the nodes for one model; :meth:`insert` puts them into it."""

    def __init__(
        self, model: ir.Model, names: FreshNames, mask: ir.Value, multiple: int
    ) -> None:
        """Count the padding behind the longest row of ``mask``.

        Args:
            model: Gets the nodes' constants.
            names: Names that are free.
            mask: The mask, ``[batch, sequence]``.
            multiple: The length that is kept is a multiple of this.
        """
        self._model = model
        self._names = names
        self._before: list[ir.Node] = []
        self._after: list[ir.Node] = []
        self._pads: dict[tuple[int, ...], ir.Value] = {}
        self._opset = model.opset_imports[""]
        self._cut = self._count(mask, multiple)

    def cut_input(self, value: ir.Value, axes: Sequence[int]) -> None:
        """Have all readers of an input read it without padding."""
        assert value.shape is not None
        readers = [(node, i) for node, i in value.uses() if node not in self._before]
        pads = self._pads_of(len(value.shape), axes, -1, self._before)
        cut = self._node(self._before, "Pad", [value, pads], f"{value.name}_cut")
        cut.type = value.type
        for node, index in readers:
            node.replace_input_with(index, cut)

    def pad_output(self, value: ir.Value, axes: Sequence[int]) -> None:
        """Pad an output to the length that was given; the padding is 0."""
        assert value.shape is not None and value.name is not None
        graph = self._model.graph
        name = value.name
        value.name = self._names.take(f"{name}_cut")
        pads = self._pads_of(len(value.shape), axes, 1, self._after)
        padded = self._node(self._after, "Pad", [value, pads], name)
        padded.name, padded.type = name, value.type
        given = list(value.shape)
        padded.shape = ir.Shape([None if i in axes else dim for i, dim in enumerate(given)])
        graph.outputs[list(graph.outputs).index(value)] = padded

    def insert(self) -> None:
        """Put the nodes in front of the graph's and behind them."""
        graph = self._model.graph
        first = next(iter(graph), None)
        if first is None:
            graph.extend(self._before)
        else:
            graph.insert_before(first, self._before)
        graph.extend(self._after)

    def _count(self, mask: ir.Value, multiple: int) -> ir.Value:
        first = self._integers("first", [0])
        real: ir.Value = mask
        if mask.dtype is not ir.DataType.BOOL:  # any number but 0 is real
            real = self._make("Cast", [mask], to=ir.DataType.BOOL.value)
        numbers = self._make("Cast", [real], to=ir.DataType.INT32.value)
        if self._opset < _ATTRIBUTE_AXES_UNTIL:
            longest = self._make("ReduceMax", [numbers], axes=[0], keepdims=0)
        else:
            longest = self._make("ReduceMax", [numbers, first], keepdims=0)
        back = self._integers("back", [-1])
        end = self._integers("end", [_INT64_MIN + 1])
        backwards = self._make("Slice", [longest, back, end, first, back])
        behind = self._make("Pad", [backwards, self._integers("behind", [0, 1])])
        cut = self._make("ArgMax", [behind], axis=0, keepdims=1)
        return cut if multiple == 1 else self._round_down(cut, mask, multiple)

    def _round_down(self, cut: ir.Value, mask: ir.Value, multiple: int) -> ir.Value:
        """Cut less, until what is kept is a multiple, or nothing is cut."""
        shape = self._make("Shape", [mask])
        length = self._make("Gather", [shape, self._integers("second", [1])], axis=0)
        rest = self._make("Sub", [cut, length])
        more = self._make("Mod", [rest, self._integers("multiple", [multiple])])
        less = self._make("Sub", [cut, more])
        zero = self._integers("first", [0])
        return self._make("Max", [less, zero])

    def _pads_of(
        self, rank: int, axes: Sequence[int], sign: int, nodes: list[ir.Node]
    ) -> ir.Value:
        """The pads that change the ends of some axes by what is cut."""
        key = (rank, sign, *axes)
        if key not in self._pads:
            ends = np.zeros(2 * rank, np.int64)
            ends[[rank + axis for axis in axes]] = sign
            factor = self._integers("ends", ends)
            self._pads[key] = self._node(nodes, "Mul", [self._cut, factor], "padding_pads")
        return self._pads[key]

    def _make(self, op_type: str, inputs: list[ir.Value], **attributes: Any) -> ir.Value:
        return self._node(self._before, op_type, inputs, "padding_count", **attributes)

    def _node(
        self,
        nodes: list[ir.Node],
        op_type: str,
        inputs: list[ir.Value],
        name: str,
        **attributes: Any,
    ) -> ir.Value:
        node = ir.node(
            op_type, inputs, attributes, name=self._names.take(f"trim_padding_{op_type}")
        )
        node.outputs[0].name = self._names.take(name)
        nodes.append(node)
        return node.outputs[0]

    def _integers(self, name: str, numbers: Any) -> ir.Value:
        taken = self._names.take(f"trim_padding_{name}")
        tensor = ir.Tensor(np.array(numbers, np.int64), name=taken)
        return new_initializer(self._model.graph, tensor)
