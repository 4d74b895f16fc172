# SPDX-License-Identifier: MIT
"""The nodes that count padding, cut inputs and pad outputs, or run on real tokens only.

    mask [batch, sequence] -> Cast(bool) -> Cast(int32)
         -> ReduceMax over rows               [sequence], 1 where any row is real
         -> Mul by what is asked              all 0 where nothing may be cut
         -> Slice backwards -> Pad by one     [sequence + 1], from the end
         -> ArgMax                            [1], padded positions at the end

A mask without any real position counts as one without padding: ArgMax takes the first of equal
numbers. What is asked of each batch (:class:`Conditions`):

    every row has a real position        ReduceMax along rows -> ReduceMin
    inputs are as large as the mask      Shape -> Max, Min -> Equal
    positions that inputs choose are real    GatherElements -> ReduceMin
    no branch of the model changes       length <= longest
"""

from __future__ import annotations

import collections.abc
import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript import TapeBuilder

from rewrite_rules.facts.operator_table import NORMS, per_token
from rewrite_rules.graph.initializers import FreshNames, new_initializer
from rewrite_rules.graph.nodes import producer
from rewrite_rules.graph.parameters import constant_ints, int_attribute
from rewrite_rules.trim_padding.token_axes import BATCH, Sequence
from rewrite_rules.trim_padding.token_flow import Choice, Evaluated, TokenFlow

_ATTRIBUTE_AXES_UNTIL = 18  # ReduceMax has its axes as an attribute before this opset
_INT64_MIN = np.iinfo(np.int64).min
_MICROSOFT = "com.microsoft"
# What a product's other inputs are at most: a matrix for MatMul, any constants for the other.
_PRODUCTS = {"MatMul": 2, "MatMulNBits": 9}
_ALLOWZERO_SINCE = 14
_MAX_LENGTH = 1 << 24
# A region has to save more than its gathers take.
_MIN_PRODUCTS = 2


@dataclasses.dataclass(frozen=True)
class Conditions:
    """What is asked of each batch; where one does not hold, nothing is cut.

    Attributes:
        choices: What has to choose real positions.
        sizes: Where inputs have the batch, if they do, and where the sequence, each time: as
            large as the mask's.
        longest: Greatest length.
    """

    choices: collections.abc.Sequence[Choice]
    sizes: Mapping[ir.Value, tuple[int | None, ...]]
    longest: int


class PaddingNodes:
    """Makes the nodes for one model; :meth:`insert` puts them into it."""

    def __init__(
        self, model: ir.Model, names: FreshNames, mask: ir.Value, multiple: int
    ) -> None:
        """Prepare to keep a multiple of a length, by ``mask``, ``[batch, sequence]``."""
        self._graph = model.graph
        self._opset = model.opset_imports[""]
        self._names = names
        self._mask, self._multiple = mask, multiple
        self._before = _NewNodes(model.graph, names)
        self._after = _NewNodes(model.graph, names)
        self._pads: dict[tuple[int, ...], ir.Value] = {}
        self._cut: ir.Value | None = None

    def count(self, conditions: Conditions, keep_one: bool) -> None:
        """Count the padding behind the longest row; ``keep_one``: but for one position."""
        op, integers = self._before, self._before.integers
        mask, back = self._mask, integers([-1])
        if conditions.choices:  # a mask of length 1 stands for all positions, here as well
            mask = op.Expand(mask, op.Shape(conditions.choices[0].source))
        numbers = op.Cast(op.is_real(mask), to=ir.DataType.INT32)
        longest = self._greatest(numbers, 0, keepdims=0)
        for holds in self._conditions(conditions, numbers):
            longest = op.Mul(longest, holds)
        backwards = op.Slice(longest, back, integers([_INT64_MIN + 1]), integers([0]), back)
        lowest = op.constant(np.array(np.iinfo(np.int32).min, np.int32))
        behind = op.Pad(backwards, integers([0, 1]), lowest)
        cut = op.ArgMax(behind, axis=0, keepdims=1)
        if keep_one:
            cut = op.Max(op.Sub(cut, integers([1])), integers([0]))
        if self._multiple > 1:
            # Cut less, until what is kept is a multiple, or nothing is cut.
            length = op.Gather(op.Shape(mask), integers([1]), axis=0)
            more = op.Mod(op.Sub(cut, length), integers([self._multiple]))
            cut = op.Max(op.Sub(cut, more), integers([0]))
        self._cut = cut

    def cut_input(self, value: ir.Value, axes: list[int]) -> None:
        """Have all readers of an input, but for new nodes, read it without padding."""
        readers = [(node, i) for node, i in value.uses() if node.graph is not None]
        pads = self._pads_of(value, axes, -1)
        cut = self._before.Pad(value, pads, _outputs=[self._names.take(f"{value.name}_cut")])
        cut.type = value.type
        for node, index in readers:
            node.replace_input_with(index, cut)

    def pad_output(self, value: ir.Value, axes: Mapping[int, Sequence]) -> None:
        """Pad an output to the length that was given.

        What the model has behind the longest row is repeated where that is one value; else
        the padding is 0.
        """
        assert value.shape is not None and value.name is not None
        name, value.name = value.name, self._names.take(f"{value.name}_cut")
        kept = [None if i in axes else dim for i, dim in enumerate(value.shape)]
        repeated = [i for i, behind in axes.items() if behind.same and not behind.zero]
        zero = [i for i in axes if i not in repeated]
        padded = value
        for mode, along in (("edge", repeated), ("constant", zero)):
            if along:
                padded = self._after.Pad(padded, self._pads_of(value, along, 1), mode=mode)
                padded.type, padded.shape = value.type, ir.Shape(kept)
        padded.name = name
        self._graph.outputs[list(self._graph.outputs).index(value)] = padded

    def insert(self) -> None:
        self._graph.insert_before(self._graph[0], self._before.nodes)
        self._graph.extend(self._after.nodes)

    def _greatest(self, numbers: ir.Value, axis: int, keepdims: int) -> Any:
        op = self._before
        if self._opset < _ATTRIBUTE_AXES_UNTIL:
            return op.ReduceMax(numbers, axes=[axis], keepdims=keepdims)
        return op.ReduceMax(numbers, op.integers([axis]), keepdims=keepdims)

    def _conditions(self, asked: Conditions, numbers: ir.Value) -> Iterator[Any]:
        """Yield what is 1 where a condition holds; 0 where it does not."""
        op = self._before
        # Of another rank than the longest row: under one name for both axes of the mask,
        # onnxruntime would let them share a buffer.
        yield op.ReduceMin(self._greatest(numbers, 1, keepdims=1), keepdims=0)
        sizes = op.Shape(self._mask)
        for rows in (True, False):
            compared = [
                self._sizes_at(value, [axis] if row is None else [row, axis])
                for value, (row, *axes) in asked.sizes.items()
                for axis in axes
                if (row is not None) == rows
            ]
            if compared:
                own = sizes if rows else op.Gather(sizes, op.integers([1]), axis=0)
                ends = (own, *compared)
                if len(ends) > 2:
                    ends = op.Max(*ends), op.Min(*ends)
                same = op.Cast(op.Equal(*ends), to=ir.DataType.INT32)
                yield op.ReduceMin(same, keepdims=1) if rows else same
        if asked.longest < _MAX_LENGTH:
            length = op.Gather(sizes, op.integers([1]), axis=0)
            fits = op.Less(length, op.integers([asked.longest + 1]))
            yield op.Cast(fits, to=ir.DataType.INT32)
        for choice in asked.choices:
            yield self._is_real(choice, numbers)

    def _sizes_at(self, value: ir.Value, places: list[int | None]) -> Any:
        sizes, op = self._before.Shape(value), self._before
        assert value.shape is not None
        whole = places == list(range(len(value.shape)))
        return sizes if whole else op.Gather(sizes, op.integers(places), axis=0)

    def _is_real(self, choice: Choice, numbers: ir.Value) -> ir.Value:
        """1 where every row's chosen position is real, by a mask of 1 and 0; 0 otherwise."""
        op, place = self._before, choice.source
        for node, index in choice.steps:
            inputs = (*node.inputs[:index], place, *node.inputs[index + 1 :])
            attributes = dict[str, Any](node.attributes)
            place = getattr(op, node.op_type)(*inputs, **attributes)  # reads what is not cut
        producer(place).attributes["keepdims"] = ir.AttrInt64("keepdims", 1)
        real: ir.Value = op.ReduceMin(op.GatherElements(numbers, place, axis=1), keepdims=0)
        return real

    def _pads_of(self, value: ir.Value, axes: list[int], sign: int) -> ir.Value:
        """The pads that change the ends of some axes by what is cut."""
        assert value.shape is not None
        rank, op = len(value.shape), self._before if sign < 0 else self._after
        key = (rank, sign, *axes)
        assert self._cut is not None
        if key not in self._pads:
            ends = np.zeros(2 * rank, np.int64)
            ends[[rank + axis for axis in axes]] = sign
            self._pads[key] = op.Mul(self._cut, op.integers(ends))
        return self._pads[key]


class _NewNodes(TapeBuilder):
    """Nodes that a graph gets, and their constants, which it gets at once."""

    def __init__(self, graph: ir.Graph, names: FreshNames) -> None:
        super().__init__()
        self._constants_of, self._names = graph, names

    def integers(self, numbers: Any) -> ir.Value:
        return self.constant(np.array(numbers, np.int64))

    def constant(self, array: Any) -> ir.Value:
        name = self._names.take("trim_padding_number")
        return new_initializer(self._constants_of, ir.Tensor(array, name=name))

    def is_real(self, mask: ir.Value) -> Any:
        """Return a mask as bool: any number but 0 is real."""
        is_bool = mask.dtype is ir.DataType.BOOL
        return mask if is_bool else self.Cast(mask, to=ir.DataType.BOOL)


# Real tokens only


def pack_regions(model: ir.Model, flow: TokenFlow, mask: ir.Value, names: FreshNames) -> int:
    """Pack in place; return how many nodes run on real tokens. The caller sorts the graph.

        x [batch, sequence, D] -> MatMul -> Add -> LayerNormalization -> y [batch, sequence, D]

        x -> Reshape [batch sequence, D] -> Gather(rows of real tokens) -> MatMul -> Add
          -> LayerNormalization -> Gather(a row for each position) -> y [batch, sequence, D]

    Attention keeps its padding. A padded position gets the row of the real one before it,
    which the mask leaves out like what stood there; the first position of a row counts as
    real, for models that pool it.
    """
    packed = [node for node in model.graph if _is_packable(node, flow)]
    if sum(node.op_type in _PRODUCTS for node in packed) < _MIN_PRODUCTS:
        return 0
    _Packing(model, flow, mask, names).apply(packed)
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
    if value is None or isinstance(flow.value(value), Evaluated):
        return None
    match flow.tokens(value).axes:
        case ((batch,), along, width) if batch == BATCH and along == (Sequence(),):
            sizes = [factor for factor in width if isinstance(factor, int)]
            return math.prod(sizes) if len(sizes) == len(width) else None
    return None


def _is_constant(value: ir.Value, flow: TokenFlow, rank: int) -> bool:
    """Whether a value is the same in every run, and of so few dimensions."""
    axes = flow.tokens(value).axes
    return (
        axes is not None
        and all(isinstance(factor, int) for axis in axes for factor in axis)
        and len(axes) <= rank
    )


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
        self._op = _NewNodes(model.graph, names)
        self._index_rows(mask, model.opset_imports[""])

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

    def _index_rows(self, mask: ir.Value, opset: int) -> None:
        """Rows of real tokens, and for each position the row that it gets back."""
        op, integers = self._op, self._op.integers
        zero, one, flat = integers(0), integers(1), integers([-1])
        shape = op.Shape(mask)
        length = op.Gather(shape, one, axis=0)
        first = op.Equal(op.Range(zero, length, one), zero)
        kept = op.Reshape(op.Or(op.is_real(mask), first), flat)
        self._real = op.Reshape(op.NonZero(kept), flat)
        counted = op.Cast(kept, to=ir.DataType.INT64)
        rows = op.Sub(op.CumSum(counted, zero), one)
        # A batch of 0 is a size, not a size to copy; before opset 14 that can't be said.
        literal = {"allowzero": 1} if opset >= _ALLOWZERO_SINCE else {}
        self._places = op.Reshape(rows, shape, **literal)
