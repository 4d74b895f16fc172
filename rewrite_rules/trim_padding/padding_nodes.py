# SPDX-License-Identifier: MIT
"""The nodes that count padding, cut inputs and pad outputs.

    mask [batch, sequence] -> Cast(bool) -> Cast(int32)
         -> ReduceMax over rows               [sequence], 1 where any row is real
         -> Mul by what is asked              all 0 where nothing may be cut
         -> Slice backwards -> Pad by one     [sequence + 1], from the end
         -> ArgMax                            [1], padded positions at the end

A mask without any real position counts as one without padding: ArgMax takes the first of equal
numbers. What is asked of each batch; where one does not hold, nothing is cut:

    the first position of every row is real  Slice -> ReduceMin
    inputs are as large as the mask          Shape -> Concat -> Equal
    what side values show at padding         Less, Xor -> ReduceMin
    what is added to scores beside the mask  Less, Greater -> ReduceMin
    what is added up of inputs is 0          Cast, Or -> ReduceMin
    floats that are fed are of ordinary size ReduceL1 -> Less
    positions that are picked are real       Gather -> ReduceMin
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import onnx_ir as ir

from rewrite_rules.graph.initializers import FreshNames
from rewrite_rules.graph.parameters import constant
from rewrite_rules.remarks import Refusal
from rewrite_rules.shapes.dimensions import Dim
from rewrite_rules.trim_padding.new_nodes import NewNodes
from rewrite_rules.trim_padding.questions import How, Questions, places_of
from rewrite_rules.trim_padding.token_axes import UNFIT, sequences_of
from rewrite_rules.trim_padding.token_flow import Picks, Side, TokenFlow

T = TypeVar("T")
_MIN_OF_INTEGERS = 12  # before this opset, Min is of floats alone
# What floats that are fed may sum up to: what is infinite, or becomes so, is NaN times 0.
_ORDINARY_SUM = 1e15
_INT64_MIN = np.iinfo(np.int64).min
_INT64_MAX = np.iinfo(np.int64).max


class PaddingNodes:
    """Makes the nodes for one model; :meth:`insert` puts them into it.

    Attributes:
        holds: Of a batch: 1 where all holds that is asked, else 0.
    """

    holds: ir.Value

    def __init__(self, model: ir.Model, names: FreshNames, flow: TokenFlow) -> None:
        """Prepare to cut by the mask of a proof."""
        self._graph, self._flow, self._mask = model.graph, flow, flow.mask
        self._opset = flow.opset
        self._names = names
        self._before, self._after = NewNodes(names, self._opset), NewNodes(names, self._opset)
        self._wholes: dict[ir.Value, Any] = {}
        self._cut: ir.Value | None = None

    def count(self, sizes: Mapping[ir.Value, tuple[int | None, ...]]) -> None:
        """Count the padding after the longest row.

        ``sizes``: where inputs have the batch, if they do, and where the sequence, each time.
        """
        op, integers, back = self._before, self._before.integers, self._before.integers([-1])
        mask = self._mask
        picked = (value for *_, value, _ in _inputs(self._flow.picked))
        sources = [source for value in picked for source in self._flow.roles.sources(value)]
        for source in dict.fromkeys(sources):
            if source is not mask:  # one of length 1 stands for all positions
                mask = op.Expand(mask, op.Shape(source))
        real = op.true(mask)
        self._numbers = op.Cast(real, to=ir.DataType.INT32)
        any_row = op.along("ReduceMax", self._numbers, [0], keepdims=0)
        self._sizes = op.Shape(self._mask)
        self._length = op.Gather(self._sizes, integers([1]), axis=0)
        positions = op.Range(integers(0), op.Squeeze(self._length), integers(1))
        self._questions = Questions(op, real, positions)
        # Models pool it, and what a mask leaves of a padded position is not asked.
        first = op.Slice(self._numbers, integers([0]), integers([1]), integers([1]))
        asked = (
            op.always(holds)
            for holds in (
                *self._sizes_agree(sizes),
                *self._are_ordinary(sizes),
                *self._asked(),
            )
        )
        holds = [op.ReduceMin(first, keepdims=0), *dict.fromkeys(asked), *self._picks()]
        if len(holds) > 1 and self._opset < _MIN_OF_INTEGERS:
            holds = [functools.reduce(op.Mul, holds)]
        self.holds = op.Min(*holds) if len(holds) > 1 else holds[0]
        longest = op.Mul(any_row, self.holds)
        backwards = op.Slice(longest, back, integers([_INT64_MIN + 1]), integers([0]), back)
        lowest = op.constant(np.array(np.iinfo(np.int32).min, np.int32))
        behind = op.Pad(backwards, integers([0, 1]), lowest)
        cut = op.ArgMax(behind, axis=0, keepdims=1)
        if self._flow.keeps_one:
            cut = op.extreme("Max", op.Sub(cut, integers([1])), integers([0]))
        self._cut = cut
        left = op.Sub(self._length, cut)
        self._kept = op.Where(op.Equal(cut, integers([0])), integers([_INT64_MAX]), left)

    def cut_input(self, value: ir.Value, axes: list[int]) -> None:
        """Have all readers of an input, but for new nodes, read it without padding."""
        readers = [(node, i) for node, i in value.uses() if node.graph is not None]
        cut = self._shortened(value, axes, f"{value.name}_cut")
        for node, index in readers:
            node.replace_input_with(index, cut)

    def cut_sides(self) -> None:
        """Have tokens meet side values that are computed from whole inputs."""
        op = self._before
        for node, index, value, (axes, how) in _inputs(self._flow.read):
            made = self._whole(value)
            along = [] if how is How.COUNT else places_of(axes)
            self._replace(node, index, self._shortened(made, along) if along else made)
        for node, index, value, picks in _inputs(self._flow.picked):
            place = self._whole(value)
            if picks is Picks.FLAT:
                # The position, and the rows before it, which are shorter now.
                place = op.int64(place)
                rows = op.Div(place, self._above_0(op.Squeeze(self._length)))
                place = op.Sub(place, op.Mul(rows, op.Squeeze(self._cut)))
                place.type = ir.TensorType(ir.DataType.INT64)
            self._replace(node, index, place)

    def _shortened(self, value: ir.Value, along: list[int], name: str | None = None) -> Any:
        """Return a value without padding: all by Slice, so that passes see equal sizes."""
        op, integers = self._before, self._before.integers
        named = {} if name is None else {"_outputs": [self._names.take(name)]}
        ends = op.joined([self._kept] * len(along))
        made = op.Slice(value, integers([0] * len(along)), ends, integers(along), **named)
        made.type = value.type
        return made

    def pad_output(self, value: ir.Value, axes: Iterable[int]) -> None:
        """Pad an output to the length that was given; the padding is 0."""
        name, value.name = value.name, self._names.take(f"{value.name}_cut")
        op, rank = self._after, len(self._flow.tokens(value).axes or ())
        ends = np.zeros(2 * rank, np.int64)
        ends[[rank + axis for axis in axes]] = 1
        padded = op.Pad(value, op.Mul(self._cut, op.integers(ends)), mode="constant")
        padded.type, padded.name = value.type, name
        self._replace_output(value, padded)

    def whole_output(self, value: ir.Value) -> None:
        """Have an output be a side value, computed from whole inputs."""
        name, value.name = value.name, self._names.take(f"{value.name}_cut")
        whole = self._before.Identity(self._whole(value), _outputs=[name])
        whole.type = value.type
        self._replace_output(value, whole)

    def insert(self) -> None:
        for op in (self._before, self._after):
            op.register(self._graph)
        self._graph.insert_before(self._graph[0], self._before.nodes)
        self._graph.extend(self._after.nodes)

    def _replace(self, node: ir.Node, index: int, value: ir.Value) -> None:
        old = node.inputs[index]
        assert old is not None
        self._flow.values[value] = self._flow.value(old)
        node.replace_input_with(index, value)

    def _replace_output(self, value: ir.Value, other: ir.Value) -> None:
        self._graph.outputs[list(self._graph.outputs).index(value)] = other

    def _above_0(self, sizes: Any) -> Any:
        op, integers = self._before, self._before.integers
        return op.Where(op.Equal(sizes, integers(0)), integers(1), sizes)

    # What is asked

    def _sizes_agree(
        self, asked: Mapping[ir.Value, tuple[int | None, ...]]
    ) -> Iterator[ir.Value]:
        op, own, found = self._before, list[Any](), list[Any]()
        for value, (row, *axes) in asked.items():
            assert value.shape is not None
            for axis in axes:
                places = [axis] if row is None else [row, axis]
                sizes = op.Shape(value)
                if places != list(range(len(value.shape))):
                    sizes = op.Gather(sizes, op.integers(places), axis=0)
                found.append(sizes)
                own.append(self._length if row is None else self._sizes)
        if found:
            yield op.Equal(op.joined(own), op.joined(found))

    def _are_ordinary(self, inputs: Iterable[ir.Value]) -> Iterator[ir.Value]:
        """Ask floats that are fed: what leaves padding out multiplies it by 0."""
        op, bound = self._before, self._before.constant(np.float32(_ORDINARY_SUM))
        for value in inputs:
            if value.dtype is not None and value.dtype.is_floating_point():
                is_float = value.dtype is ir.DataType.FLOAT
                numbers = value if is_float else op.Cast(value, to=ir.DataType.FLOAT)
                yield op.Less(op.ReduceL1(numbers, keepdims=0), bound)

    def _asked(self) -> Iterator[ir.Value]:
        """Ask what side values show, and what is added to scores beside the mask."""
        op, asked, asks_finite = self._before, self._questions, self._flow.asks_finite
        for _, _, value, (axes, how) in _inputs(self._flow.read | self._flow.zeroed):
            whole = self._seen(value, how)
            for place in places_of(axes):
                (factor,) = sequences_of(axes[place])
                if factor.low:
                    yield asked.low(whole, axes, place)
                elif factor.zero:
                    yield asked.zero(whole, axes, place)
                elif asks_finite and not factor.wild and whole.dtype.is_floating_point():
                    yield op.Less(op.Abs(whole), op.number(whole, math.inf))
        for _, _, value, (axes, how) in _inputs(self._flow.opened):
            yield asked.opens(self._seen(value, how), axes)

    def _seen(self, value: ir.Value, how: How) -> Any:
        """Return a value, computed from whole inputs, as a node reads it."""
        whole, side = self._whole(value), self._flow.value(value)
        if isinstance(side, Side):
            whole.dtype = ir.DataType.from_numpy(side.arrays[0].dtype)
        elif whole.dtype is None:
            raise Refusal(
                "ORP504", f"{value.name!r} has no type: infer the shapes of the model"
            )
        return self._questions.seen(whole, how)

    def _picks(self) -> Iterator[ir.Value]:
        """Ask whether positions that are picked are real; none counts from the end."""
        op = self._before
        for _, _, value, how in _inputs(self._flow.picked):
            place = op.int64(self._whole(value))
            # Whatever the sizes are, it is a place in the mask.
            if how is Picks.PAIRS:
                real = op.GatherND(self._numbers, op.Mod(place, self._above_0(self._sizes)))
            elif how is Picks.IN_ROW:
                inside = op.Mod(op.Flatten(place, axis=1), self._above_0(self._length))
                real = op.GatherElements(self._numbers, inside, axis=1)
            else:
                inside = op.Mod(place, self._above_0(op.Size(self._mask)))
                real = op.Gather(op.row(self._numbers), inside, axis=0)
            yield op.ReduceMin(real, keepdims=0)
            yield op.always(op.Not(op.Less(place, op.integers(0))))

    # Side values, computed from whole inputs

    def _whole(self, value: ir.Value) -> Any:
        pending = [value]
        while pending:
            current = pending.pop()
            if current in self._wholes:
                continue
            node = current.producer()
            tensor, known = constant(current), self._flow.values.get(current)
            if tensor is not None:
                made = current if node is None else self._before.constant(tensor.numpy())
                self._wholes[current] = made
            elif isinstance(known, Side) and not known.varies:
                self._wholes[current] = self._before.constant(known.arrays[0])
            elif node is None:
                self._wholes[current] = self._whole_input(current)
            elif self._counts_tokens(node):
                self._wholes[current] = self._counted(node)
            else:
                of_mask = node.op_type == "EmbedLayerNormalization"
                inputs = node.inputs[7:8] if of_mask else node.inputs
                read = [v for v in inputs if v is not None and v not in self._wholes]
                if read:
                    pending += [current, *read]
                elif of_mask:
                    (mask,) = inputs
                    assert mask is not None
                    self._wholes[current] = self._ones(self._wholes[mask])
                else:
                    self._clone(node)
        return self._wholes[value]

    def _whole_input(self, value: ir.Value) -> Any:
        if value is self._mask or not value.shape:
            return value
        # Of no declared size: under that of a mask of length 1, onnxruntime would let what is
        # computed from both share a buffer.
        op, rank = self._before, len(value.shape)
        whole = op.Slice(value, op.integers([0] * rank), op.integers([_INT64_MAX] * rank))
        whole.type = value.type
        return whole

    def _clone(self, node: ir.Node) -> None:
        inputs = [None if v is None else self._wholes[v] for v in node.inputs]
        attributes = dict[str, Any](node.attributes)
        made = self._before.op(
            node.op_type,
            *inputs,
            _domain=node.domain,
            _outputs=len(node.outputs),
            **attributes,
        )
        for old, new in zip(
            node.outputs, made if len(node.outputs) > 1 else [made], strict=True
        ):
            new.type = old.type
            self._wholes[old] = new

    def _counts_tokens(self, node: ir.Node) -> bool:
        value = node.inputs[0] if node.inputs else None
        return (
            node.op_type in ("Shape", "Size")
            and value is not None
            and not isinstance(self._flow.value(value), Side)
        )

    def _ones(self, mask: Any) -> Any:
        """Return how many ones rows of a mask have, int32 ``[batch]``."""
        op = self._before
        ones = op.Cast(
            op.Equal(mask, op.constant(np.array(1, np.int32))), to=ir.DataType.INT32
        )
        return op.along("ReduceSum", ones, [1], keepdims=0)

    def _counted(self, node: ir.Node) -> Any:
        """Return the sizes of tokens, from those of inputs."""
        op, value = self._before, node.inputs[0]
        dims = self._flow.roles.shapes.dims(value)
        assert value is not None and dims is not None
        if value.is_graph_input():
            return op.op(node.op_type, value, **dict[str, Any](node.attributes))
        start = node.attributes.get_int("start", 0)
        span = dims[start : node.attributes.get_int("end", len(dims))]
        sizes = op.joined([self._size(dim) for dim in span]) if span else op.integers([])
        return op.ReduceProd(sizes, keepdims=0) if node.op_type == "Size" else sizes

    def _size(self, dim: Dim) -> Any:
        op, (count, unknowns) = self._before, dim
        factors = [self._unknown(unknown) for unknown in unknowns]
        factors += [op.integers([count])] if count != 1 or not factors else []
        return functools.reduce(op.Mul, factors)

    def _unknown(self, unknown: int) -> Any:
        op, roles = self._before, self._flow.roles
        if unknown in roles.places:
            value, axis = roles.places[unknown]
            return op.Gather(op.Shape(value), op.integers([axis]), axis=0)
        how, parts = roles.recipe(unknown)
        if not how:
            raise Refusal(*UNFIT)
        sizes = [self._size(part) for part in parts]
        return op.Div(*sizes) if how == "Div" else op.extreme(how, *sizes)


def _inputs(
    known: Mapping[tuple[ir.Node, int], T],
) -> Iterator[tuple[ir.Node, int, ir.Value, T]]:
    """Yield inputs of nodes, with what is known of each."""
    for (node, index), one in known.items():
        value = node.inputs[index]
        assert value is not None
        yield node, index, value, one
