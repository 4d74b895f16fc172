# SPDX-License-Identifier: MIT
"""The nodes that count padding, cut inputs and pad outputs.

    mask [batch, sequence] -> Cast(bool) -> Cast(int32)
         -> ReduceMax over rows               [sequence], 1 where any row is real
         -> Slice backwards -> Pad by one 0   [sequence + 1], from the end
         -> ArgMax                            [1], padded positions at the end

A mask without any real position counts as one without padding: ArgMax takes the first of equal
numbers. The 0 behind is for a sequence of length 0.

Where a position that an input chooses is not a real one, nothing is cut: longest is times

    real positions -> GatherElements(the place that is chosen) -> ReduceMin    1 or 0
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir

from rewrite_rules.graph.initializers import new_initializer
from rewrite_rules.graph.names import FreshNames
from rewrite_rules.trim_padding.token_flow import Choice

_ATTRIBUTE_AXES_UNTIL = 18  # ReduceMax has its axes as an attribute before this opset
_INT64_MIN = np.iinfo(np.int64).min


class PaddingNodes:
    """Makes the nodes for one model; :meth:`insert` puts them into it."""

    def __init__(
        self,
        model: ir.Model,
        names: FreshNames,
        mask: ir.Value,
        multiple: int,
        choices: Sequence[Choice],
    ) -> None:
        """Count the padding behind the longest row of ``mask``, ``[batch, sequence]``."""
        self._graph = model.graph
        self._names = names
        self._before = NewNodes(model.graph, names)
        self._after = NewNodes(model.graph, names)
        self._pads: dict[tuple[int, ...], ir.Value] = {}
        self._choices = choices
        self._cut = self._count(mask, multiple, model.opset_imports[""])

    def cut_input(self, value: ir.Value, axes: Sequence[int]) -> None:
        """Have all readers of an input read it without padding."""
        readers = [(node, i) for node, i in value.uses() if node not in self._before]
        pads = self._pads_of(value, axes, -1, self._before)
        cut = self._before.make("Pad", value, pads, name=f"{value.name}_cut")
        cut.type = value.type
        for node, index in readers:
            node.replace_input_with(index, cut)

    def pad_output(self, value: ir.Value, axes: Sequence[int]) -> None:
        """Pad an output to the length that was given; the padding is 0."""
        assert value.shape is not None and value.name is not None
        name, value.name = value.name, self._names.take(f"{value.name}_cut")
        pads = self._pads_of(value, axes, 1, self._after)
        padded = self._after.make("Pad", value, pads, name=name)
        padded.name, padded.type = name, value.type
        kept = [None if i in axes else dim for i, dim in enumerate(value.shape)]
        padded.shape = ir.Shape(kept)
        self._graph.outputs[list(self._graph.outputs).index(value)] = padded

    def insert(self) -> None:
        """Put the nodes in front of the graph's and behind them."""
        first = next(iter(self._graph), None)
        if first is None:
            self._graph.extend(self._before)
        else:
            self._graph.insert_before(first, self._before)
        self._graph.extend(self._after)

    def _count(self, mask: ir.Value, multiple: int, opset: int) -> ir.Value:
        nodes, integers = self._before, self._before.integers
        make = partial(nodes.make, name="padding_count")
        first, back = integers([0]), integers([-1])
        if self._choices:  # a mask of length 1 stands for all positions, here as well
            mask = make("Expand", mask, make("Shape", self._choices[0].source))
        real = nodes.is_real(mask, "padding_count")
        numbers = make("Cast", real, to=ir.DataType.INT32.value)
        if opset < _ATTRIBUTE_AXES_UNTIL:
            longest = make("ReduceMax", numbers, axes=[0], keepdims=0)
        else:
            longest = make("ReduceMax", numbers, first, keepdims=0)
        for choice in self._choices:
            longest = make("Mul", longest, self._is_real(choice, numbers))
        end = integers([_INT64_MIN + 1])
        backwards = make("Slice", longest, back, end, first, back)
        behind = make("Pad", backwards, integers([0, 1]))
        cut = make("ArgMax", behind, axis=0, keepdims=1)
        if multiple == 1:
            return cut
        # Cut less, until what is kept is a multiple, or nothing is cut.
        length = make("Gather", make("Shape", mask), integers([1]), axis=0)
        rest = make("Sub", cut, length)
        more = make("Mod", rest, integers([multiple]))
        return make("Max", make("Sub", cut, more), first)

    def _is_real(self, choice: Choice, numbers: ir.Value) -> ir.Value:
        """1 where every row's chosen position is real, by a mask of 1 and 0; 0 otherwise."""
        make = partial(self._before.make, name="padding_choice")
        place = choice.source
        for node, index in choice.steps:
            inputs = (*node.inputs[:index], place, *node.inputs[index + 1 :])
            place = make(
                node.op_type, *inputs, **dict[str, Any](node.attributes)
            )  # reads what is not cut
        last = place.producer()
        assert last is not None
        last.attributes["keepdims"] = ir.AttrInt64("keepdims", 1)
        return make("ReduceMin", make("GatherElements", numbers, place, axis=1), keepdims=0)

    def _pads_of(
        self, value: ir.Value, axes: Sequence[int], sign: int, nodes: NewNodes
    ) -> ir.Value:
        """The pads that change the ends of some axes by what is cut."""
        assert value.shape is not None
        rank = len(value.shape)
        key = (rank, sign, *axes)
        if key not in self._pads:
            ends = np.zeros(2 * rank, np.int64)
            ends[[rank + axis for axis in axes]] = sign
            factor = nodes.integers(ends)
            self._pads[key] = nodes.make("Mul", self._cut, factor, name="padding_pads")
        return self._pads[key]


class NewNodes(list[ir.Node]):
    """Nodes of free names that a graph gets, and their constants, which it gets at once."""

    def __init__(self, graph: ir.Graph, names: FreshNames) -> None:
        super().__init__()
        self._graph = graph
        self._names = names

    def make(
        self, op_type: str, *inputs: ir.Value | None, name: str, **attributes: Any
    ) -> ir.Value:
        """Append a node and return its output; ``name`` is what that is called, if free."""
        node = ir.node(
            op_type, inputs, attributes, name=self._names.take(f"trim_padding_{op_type}")
        )
        node.outputs[0].name = self._names.take(name)
        self.append(node)
        return node.outputs[0]

    def integers(self, numbers: Any) -> ir.Value:
        """Return an int64 constant."""
        name = self._names.take("trim_padding_number")
        return new_initializer(self._graph, ir.Tensor(np.array(numbers, np.int64), name=name))

    def is_real(self, mask: ir.Value, name: str) -> ir.Value:
        """Return a mask as bool: any number but 0 is real."""
        if mask.dtype is ir.DataType.BOOL:
            return mask
        return self.make("Cast", mask, name=name, to=ir.DataType.BOOL.value)
