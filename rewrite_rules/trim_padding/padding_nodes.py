# SPDX-License-Identifier: MIT
"""The nodes that count padding, cut inputs and pad outputs.

    mask [batch, sequence] -> Cast(bool) -> Cast(int32)
         -> ReduceMax over rows               [sequence], 1 where any row is real
         -> Mul by what is asked              all 0 where nothing may be cut
         -> Slice backwards -> Pad by one     [sequence + 1], from the end
         -> ArgMax                            [1], padded positions at the end

A mask without any real position counts as one without padding: ArgMax takes the first of equal
numbers. What is asked of each batch; where one does not hold, nothing is cut:

    every row has a real position            ReduceMax along rows -> ReduceMin
    inputs are as large as the mask          Shape -> Max, Min -> Equal
    what side values show at padding         Less, Xor -> ReduceMin
    what is added to scores beside the mask  Less, Greater -> ReduceMin
    positions that are picked are real       Gather -> ReduceMin
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import onnx_ir as ir
from onnxscript import TapeBuilder

from rewrite_rules.graph.initializers import FreshNames
from rewrite_rules.graph.parameters import constant
from rewrite_rules.remarks import Refusal
from rewrite_rules.shapes.dimensions import Dim
from rewrite_rules.trim_padding.sample_masks import LOW, ORDINARY
from rewrite_rules.trim_padding.token_axes import BATCH, UNFIT, Axes, Sequence, sequences_of
from rewrite_rules.trim_padding.token_flow import How, Side, TokenFlow

T = TypeVar("T")
_ATTRIBUTE_AXES_UNTIL = 18  # ReduceMax has its axes as an attribute before this opset
_MIN_OF_INTEGERS = 12  # before it, Min is of floats alone
_INT64_MIN = np.iinfo(np.int64).min
_INT64_MAX = np.iinfo(np.int64).max


class NewNodes(TapeBuilder):
    """Nodes that a graph gets, and their constants."""

    def __init__(self, names: FreshNames) -> None:
        super().__init__()
        self._names = names

    def integers(self, numbers: Any) -> ir.Value:
        return self.constant(np.array(numbers, np.int64))

    def constant(self, array: Any) -> ir.Value:
        name = self._names.take("trim_padding_number")
        return self.initializer(ir.Tensor(np.asarray(array), name=name))

    def is_real(self, mask: ir.Value) -> Any:
        """Return a mask as bool: any number but 0 is real."""
        is_bool = mask.dtype is ir.DataType.BOOL
        return mask if is_bool else self.Cast(mask, to=ir.DataType.BOOL)

    def register(self, graph: ir.Graph) -> None:
        """Give a graph the constants."""
        for value in self.initializers:
            graph.register_initializer(value)


class PaddingNodes:
    """Makes the nodes for one model; :meth:`insert` puts them into it.

    Attributes:
        holds: Of a batch: 1 where all holds that is asked, else 0.
    """

    holds: ir.Value

    def __init__(
        self, model: ir.Model, names: FreshNames, mask: ir.Value, flow: TokenFlow
    ) -> None:
        """Prepare to cut by ``mask``, ``[batch, sequence]``."""
        self._graph, self._flow, self._mask = model.graph, flow, mask
        self._opset = model.opset_imports[""]
        self._names = names
        self._before, self._after = NewNodes(names), NewNodes(names)
        self._pads: dict[tuple[int, ...], ir.Value] = {}
        self._wholes: dict[ir.Value, Any] = {}
        self._clones: dict[Any, Any] = {}
        self._cut: ir.Value | None = None

    def count(
        self,
        sizes: Mapping[ir.Value, tuple[int | None, ...]],
        multiple: int,
        repeated: bool,
        keeps_one: bool,
    ) -> None:
        """Count the padding behind the longest row.

        Args:
            sizes: Where inputs have the batch, if they do, and where the sequence, each time.
            multiple: The length that is kept is a multiple of it.
            repeated: What stands at one position of the padding is what stands at all others.
            keeps_one: One position of the padding is kept.
        """
        op, integers, back = self._before, self._before.integers, self._before.integers([-1])
        mask = self._mask
        picked = (value for *_, value, _ in _inputs(self._flow.picked))
        sources = [source for value in picked for source in self._flow.roles.sources(value)]
        for source in dict.fromkeys(sources):
            if source is not mask:  # one of length 1 stands for all positions
                mask = op.Expand(mask, op.Shape(source))
        self._real = op.is_real(mask)
        numbers = op.Cast(self._real, to=ir.DataType.INT32)
        any_row = longest = self._reduced("ReduceMax", numbers, 0, keepdims=0)
        self._sizes = op.Shape(self._mask)
        self._length = op.Gather(self._sizes, integers([1]), axis=0)
        conditions = [
            *self._sizes_agree(sizes),
            *self._asked(any_row, repeated),
            *self._opened(),
            *self._picks(),
        ]
        # Of another rank than the longest row: under one name for both axes of the mask,
        # onnxruntime would let them share a buffer.
        rows = self._reduced("ReduceMax", numbers, 1, keepdims=1)
        if limits := self._flow.roles.limits:
            fits = op.Less(self._length, integers([min(limits) + 1]))
            conditions.append(op.Cast(fits, to=ir.DataType.INT32))
        holds = [op.ReduceMin(rows, keepdims=0), *conditions]
        if self._opset < _MIN_OF_INTEGERS:
            holds = [functools.reduce(op.Mul, holds)]
        self.holds = op.Min(*holds) if len(holds) > 1 else holds[0]
        longest = op.Mul(longest, self.holds)
        backwards = op.Slice(longest, back, integers([_INT64_MIN + 1]), integers([0]), back)
        lowest = op.constant(np.array(np.iinfo(np.int32).min, np.int32))
        behind = op.Pad(backwards, integers([0, 1]), lowest)
        cut = op.ArgMax(behind, axis=0, keepdims=1)
        if keeps_one:
            cut = self._extreme("Max", op.Sub(cut, integers([1])), integers([0]))
        if multiple > 1:
            # Cut less, until what is kept is a multiple, or nothing is cut.
            more = op.Mod(op.Sub(cut, self._length), integers([multiple]))
            cut = self._extreme("Max", op.Sub(cut, more), integers([0]))
        self._cut = cut

    def cut_input(self, value: ir.Value, axes: list[int]) -> None:
        """Have all readers of an input, but for new nodes, read it without padding."""
        readers = [(node, i) for node, i in value.uses() if node.graph is not None]
        pads = self._pads_of(value, axes, -1)
        cut = self._before.Pad(value, pads, _outputs=[self._names.take(f"{value.name}_cut")])
        cut.type = value.type
        for node, index in readers:
            node.replace_input_with(index, cut)

    def cut_sides(self) -> None:
        """Have tokens meet side values that are computed from whole inputs."""
        op, integers = self._before, self._before.integers
        nothing = op.Equal(self._cut, integers([0]))
        left = op.Sub(self._length, self._cut)
        kept = op.Where(nothing, integers([_INT64_MAX]), left)
        ends, made = {1: kept}, dict[ir.Value, Any]()
        for node, index, value, (axes, how) in _inputs(self._flow.read):
            along = [i for i, axis in enumerate(axes) if sequences_of(axis)]
            along = [] if how is How.COUNT else along
            if value not in made:
                made[value] = self._whole(value)
                count = len(along)
                if count and count not in ends:
                    ends[count] = op.Concat(*[kept] * count, axis=0)
                if count:
                    starts = integers([0] * count)
                    made[value] = op.Slice(made[value], starts, ends[count], integers(along))
                    made[value].type = value.type
            self._replace(node, index, made[value])
        for node, index, value, joined in _inputs(self._flow.picked):
            place = self._whole(value)
            if not joined:
                # The position, and the rows before it, which are shorter now.
                place = self._int64(place)
                rows = op.Div(place, self._above_0(self._length))
                place = op.Sub(place, op.Mul(rows, self._cut))
                place.type = ir.TensorType(ir.DataType.INT64)
            self._replace(node, index, place)

    def pad_output(self, value: ir.Value, axes: Mapping[int, Sequence]) -> None:
        """Pad an output to the length that was given.

        What the model has behind the longest row is repeated where that is one value; else
        the padding is 0.
        """
        assert value.shape is not None
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
        self._replace_output(value, padded)

    def whole_output(self, value: ir.Value) -> None:
        """Have an output be a side value, computed from whole inputs."""
        name, value.name = value.name, self._names.take(f"{value.name}_cut")
        whole = self._before.Identity(self._whole(value), _outputs=[name])
        whole.type, whole.shape = value.type, value.shape
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

    def _reduced(self, op_type: str, numbers: Any, axis: int, keepdims: int) -> Any:
        op = self._before
        if self._opset < _ATTRIBUTE_AXES_UNTIL:
            return op.op(op_type, numbers, axes=[axis], keepdims=keepdims)
        return op.op(op_type, numbers, op.integers([axis]), keepdims=keepdims)

    def _extreme(self, how: str, *sizes: Any) -> Any:
        """Return the greatest or least of sizes, ``[1]`` each.

        Max and Min are of floats alone before opset 12.
        """
        joined = self._before.Concat(*sizes, axis=0)
        return self._reduced(f"Reduce{how}", joined, 0, keepdims=1)

    def _above_0(self, sizes: Any) -> Any:
        op, integers = self._before, self._before.integers
        return op.Where(op.Equal(sizes, integers(0)), integers(1), sizes)

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

    # What is asked

    def _sizes_agree(
        self, asked: Mapping[ir.Value, tuple[int | None, ...]]
    ) -> Iterator[ir.Value]:
        op = self._before
        for rows in (True, False):
            compared = [
                self._sizes_at(value, [axis] if row is None else [row, axis])
                for value, (row, *axes) in asked.items()
                for axis in axes
                if (row is not None) == rows
            ]
            if compared:
                own = [self._sizes if rows else self._length] * len(compared)
                same = op.Equal(self._joined(own), self._joined(compared))
                yield self._always(same)

    def _sizes_at(self, value: ir.Value, places: list[int | None]) -> Any:
        sizes, op = self._before.Shape(value), self._before
        assert value.shape is not None
        whole = places == list(range(len(value.shape)))
        return sizes if whole else op.Gather(sizes, op.integers(places), axis=0)

    def _asked(self, any_row: Any, repeated: bool) -> Iterator[ir.Value]:
        """Ask of side values what :meth:`SampleMasks.flagged` found."""
        done = set[tuple[Any, Axes]]()
        for _, _, value, (axes, how) in _inputs(self._flow.read):
            whole = self._seen(value, how)
            if (whole, axes) in done:
                continue
            done.add((whole, axes))
            for place, axis in enumerate(axes):
                for factor in sequences_of(axis):
                    yield from self._asked_along(whole, axes, place, factor)
                    if repeated and factor.same and not factor.zero:
                        yield self._is_same(whole, place, len(axes), any_row)

    def _opened(self) -> Iterator[ir.Value]:
        """Ask whether what is added to scores leaves each position to see itself, and only it.

        What the padding mask hides has to stay hidden.
        """
        op, done = self._before, set[Any]()
        for _, _, value, (axes, how) in _inputs(self._flow.opened):
            seen = self._seen(value, how)
            if seen in done:
                continue
            done.add(seen)
            hidden = self._below(seen, -ORDINARY)
            first, *others = [i for i, axis in enumerate(axes) if sequences_of(axis)] or [0]
            for other in others:
                hidden = op.And(hidden, self._diagonal(len(axes), first, other))
            if seen.dtype is not ir.DataType.BOOL:
                hidden = op.Or(hidden, op.Greater(seen, self._number(seen, ORDINARY)))
            yield self._always(op.Not(hidden))

    def _diagonal(self, rank: int, *places: int) -> Any:
        numbers = self._positions()
        return self._before.Equal(*(self._spread(numbers, rank, [at]) for at in places))

    def _positions(self) -> Any:
        op = self._before
        return op.Range(op.integers(0), op.Squeeze(self._length), op.integers(1))

    def _asked_along(
        self, whole: Any, axes: Axes, place: int, factor: Sequence
    ) -> Iterator[ir.Value]:
        op, is_bool = self._before, whole.dtype is ir.DataType.BOOL
        if factor.low or factor.high:
            elsewhere, itself = self._places(axes, place, beside=True)
            # Hidden where padded, and not where a real position is beside itself.
            if is_bool and factor.low:
                holds = op.Equal(whole, itself)
            else:
                bounds = self._number(whole, -ORDINARY), self._number(whole, LOW)
                hidden = whole if is_bool else op.Less(whole, op.Where(itself, *bounds))
                holds = op.Xor(hidden, itself)
            yield self._always(holds if elsewhere is None else op.Or(holds, elsewhere))
        elif factor.zero:
            elsewhere, _ = self._places(axes, place, beside=False)
            shown = whole if is_bool else op.Cast(whole, to=ir.DataType.BOOL)
            yield self._always(op.Or(op.Not(shown), elsewhere))

    def _below(self, whole: Any, bound: float) -> Any:
        op = self._before
        if whole.dtype is ir.DataType.BOOL:
            return op.Not(whole)
        return op.Less(whole, self._number(whole, bound))

    def _number(self, like: Any, number: float) -> Any:
        return self._before.constant(like.dtype.numpy().type(number))

    def _seen(self, value: ir.Value, how: How) -> Any:
        """Return a value, computed from whole inputs, as a node reads it."""
        op, whole, key = self._before, self._whole(value), (value, how)
        side = self._flow.value(value)
        if isinstance(side, Side):
            whole.dtype = ir.DataType.from_numpy(side.arrays[0].dtype)
        elif whole.dtype is None:
            raise Refusal(f"{value.name!r} has no type: infer the shapes of the model")
        if how is How.NUMBERS:
            return whole
        if key not in self._clones:
            if how is How.ABOVE_0:
                seen = op.Greater(whole, self._number(whole, 0))
            elif how is How.HIDES:
                seen = op.Not(whole)
            else:
                seen = op.Less(self._positions(), self._spread(self._int64(whole), 2, [0]))
            seen.type = ir.TensorType(ir.DataType.BOOL)
            self._clones[key] = seen
        return self._clones[key]

    def _places(self, axes: Axes, place: int, beside: bool) -> tuple[Any, Any]:
        """Return where positions are not padded along an axis, or those along others are.

        ``beside``: and no real one is beside itself, None for nowhere; and the latter.
        """
        op, rank = self._before, len(axes)
        batch = axes.index((BATCH,)) if (BATCH,) in axes else None
        others = [i for i, axis in enumerate(axes) if sequences_of(axis) and i != place]
        key = (rank, batch, place, *others, beside)
        if key not in self._clones:
            itself = elsewhere = self._unsqueezed(self._real, rank, batch, place)
            for other in others:
                real = self._unsqueezed(self._real, rank, batch, other)
                elsewhere, itself = op.Or(elsewhere, op.Not(real)), op.And(itself, real)
                if beside:
                    itself = op.And(itself, self._diagonal(rank, place, other))
            if beside:
                elsewhere = op.Xor(elsewhere, itself) if others else None
            self._clones[key] = elsewhere, itself
        found: tuple[Any, Any] = self._clones[key]
        return found

    def _unsqueezed(self, mask: Any, rank: int, batch: int | None, place: int) -> Any:
        """Return a mask with its axes at some of a rank."""
        op = self._before
        if batch is not None and batch > place:
            mask = op.Transpose(mask, perm=[1, 0])
        at = [place] if batch is None else sorted((batch, place))
        if batch is None:  # one row
            mask = op.Reshape(mask, op.integers([-1]))
        return self._spread(mask, rank, at)

    def _spread(self, value: Any, rank: int, at: list[int]) -> Any:
        op, new = self._before, [axis for axis in range(rank) if axis not in at]
        if not new:
            return value
        if self._opset < 13:
            return op.Unsqueeze(value, axes=new)
        return op.Unsqueeze(value, op.integers(new))

    def _is_same(self, whole: Any, place: int, rank: int, any_row: Any) -> ir.Value:
        """Ask whether what stands behind the longest row is one value along an axis."""
        op, integers = self._before, self._before.integers
        after = op.CumSum(any_row, integers(0), reverse=1)
        before = op.Cast(after, to=ir.DataType.BOOL)
        end = [integers([n]) for n in (-1, _INT64_MAX, place)]
        same = op.Equal(whole, op.Slice(whole, *end))
        return self._always(op.Or(same, self._spread(before, rank, [place])))

    def _always(self, holds: Any) -> ir.Value:
        """Return 1 where booleans are all True; else 0."""
        op = self._before
        least: ir.Value = op.ReduceMin(op.Cast(holds, to=ir.DataType.INT32), keepdims=0)
        return least

    def _picks(self) -> Iterator[ir.Value]:
        """Ask whether positions that are picked are real; none counts from the end."""
        op, asked = self._before, set[tuple[Any, bool]]()
        for _, _, value, joined in _inputs(self._flow.picked):
            place = self._int64(self._whole(value))
            if (place, joined) in asked:
                continue
            asked.add((place, joined))
            # Whatever the sizes are, it is a place in the mask.
            size = self._sizes if joined else op.Size(self._mask)
            inside = op.Mod(place, self._above_0(size))
            numbers = op.Cast(self._real, to=ir.DataType.INT32)
            if joined:
                real = op.GatherND(numbers, inside)
            else:
                real = op.Gather(op.Reshape(numbers, op.integers([-1])), inside, axis=0)
            yield op.ReduceMin(real, keepdims=0)
            yield self._always(op.Not(op.Less(place, op.integers(0))))

    def _int64(self, place: Any) -> Any:
        is_int64 = place.dtype is ir.DataType.INT64
        return place if is_int64 else self._before.Cast(place, to=ir.DataType.INT64)

    # Side values, computed from whole inputs

    def _whole(self, value: ir.Value) -> Any:
        pending = [value]
        while pending:
            current = pending.pop()
            if current in self._wholes:
                continue
            node = current.producer()
            tensor = constant(current)
            if tensor is not None:
                made = current if node is None else self._before.initializer(tensor)
                self._wholes[current] = made
            elif node is None:
                self._wholes[current] = current
                if current is not self._mask and current.shape:
                    # Of no declared size: under that of a mask of length 1, onnxruntime would
                    # let what is computed from both share a buffer.
                    op, rank = self._before, len(current.shape)
                    ends = op.integers([0] * rank), op.integers([_INT64_MAX] * rank)
                    self._wholes[current] = op.Slice(current, *ends)
                    self._wholes[current].type = current.type
            elif self._counts_tokens(node):
                self._wholes[current] = self._counted(node)
            elif node.op_type == "EmbedLayerNormalization":
                self._wholes[current] = self._ones(node.inputs[7])
            else:
                read = [v for v in node.inputs if v is not None and v not in self._wholes]
                if read:
                    pending += [current, *read]
                else:
                    self._clone(node)
        return self._wholes[value]

    def _clone(self, node: ir.Node) -> None:
        inputs = [None if v is None else self._wholes[v] for v in node.inputs]
        attributes = dict[str, Any](node.attributes)
        key = (node.domain, node.op_type, *map(id, inputs), str(attributes))
        if key not in self._clones:
            count = len(node.outputs)
            made = self._before.op(
                node.op_type, *inputs, _domain=node.domain, _outputs=count, **attributes
            )
            self._clones[key] = [made] if count == 1 else made
            for old, new in zip(node.outputs, self._clones[key], strict=True):
                new.type = old.type
        self._wholes.update(zip(node.outputs, self._clones[key], strict=True))

    def _counts_tokens(self, node: ir.Node) -> bool:
        value = node.inputs[0] if node.inputs else None
        return (
            node.op_type in ("Shape", "Size")
            and value is not None
            and not isinstance(self._flow.value(value), Side)
        )

    def _ones(self, mask: ir.Value | None) -> Any:
        """Return how many ones rows of a mask have, int32 ``[batch]``."""
        op = self._before
        assert mask is not None
        whole = self._whole(mask)
        ones = op.Equal(whole, op.constant(np.array(1, np.int32)))
        numbers = op.Cast(ones, to=ir.DataType.INT32)
        if self._opset < 13:
            count = op.ReduceSum(numbers, axes=[1], keepdims=0)
        else:
            count = op.ReduceSum(numbers, op.integers([1]), keepdims=0)
        count.type = ir.TensorType(ir.DataType.INT32)
        return count

    def _counted(self, node: ir.Node) -> Any:
        """Return the sizes of tokens, from those of inputs."""
        op, value = self._before, node.inputs[0]
        dims = self._flow.roles.shapes.dims(value)
        assert value is not None and dims is not None
        start = node.attributes.get_int("start", 0)
        span = dims[start : node.attributes.get_int("end", len(dims))]
        key = (node.op_type, span)
        if key not in self._clones:
            if value.is_graph_input():
                self._clones[key] = op.op(
                    node.op_type, value, **dict[str, Any](node.attributes)
                )
            else:
                sizes = self._joined(map(self._size, span))
                is_size = node.op_type == "Size"
                self._clones[key] = op.ReduceProd(sizes, keepdims=0) if is_size else sizes
        return self._clones[key]

    def _size(self, dim: Dim) -> Any:
        op, (count, unknowns) = self._before, dim
        result = op.integers([count])
        for unknown in unknowns:
            size = self._unknown(unknown)
            result = size if count == 1 and len(unknowns) == 1 else op.Mul(result, size)
        return result

    def _unknown(self, unknown: int) -> Any:
        op, roles, key = self._before, self._flow.roles, ("size", unknown)
        if key not in self._clones:
            how, parts = roles.recipe(unknown)
            sizes = map(self._size, parts)
            if unknown in roles.places:
                value, axis = roles.places[unknown]
                self._clones[key] = op.Gather(op.Shape(value), op.integers([axis]), axis=0)
            elif not how:
                raise Refusal(UNFIT)
            else:
                is_quotient = how == "Div"
                self._clones[key] = (
                    op.Div(*sizes) if is_quotient else self._extreme(how, *sizes)
                )
        return self._clones[key]

    def _joined(self, sizes: Iterable[Any]) -> Any:
        parts = [*sizes]
        if not parts:
            return self._before.integers([])
        return parts[0] if len(parts) == 1 else self._before.Concat(*parts, axis=0)


def _inputs(
    known: Mapping[tuple[ir.Node, int], T],
) -> Iterator[tuple[ir.Node, int, ir.Value, T]]:
    """Yield inputs of nodes, with what is known of each."""
    for (node, index), one in known.items():
        value = node.inputs[index]
        assert value is not None
        yield node, index, value, one
