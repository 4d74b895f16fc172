# SPDX-License-Identifier: MIT
"""What each run decides: which form computes attention, by what its mask hides.

Kernels are other nodes than those of the model where a token sees nothing: nodes mix all
values then, or make NaN. GroupQueryAttention hides later tokens, whatever the mask says. Both
are asked of the mask, once in each run for all layers that share it.

A score that is NaN or too great for float32 makes weights NaN, unless a kernel skips it as
hidden: where kernels do, each layer asks how great its scores can be. A model may replace
weights that are NaN by 0; where no kernel does, the result tells.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
from onnxscript import TapeBuilder

from rewrite_rules.shapes.dimensions import Dims, number
from rewrite_rules.transformer_fusion.attention_forms import Attention
from rewrite_rules.transformer_fusion.head_layout import in_order, ints, unproved_splits
from rewrite_rules.transformer_fusion.long_texts import is_long
from rewrite_rules.transformer_fusion.masks import HIDDEN, LOWEST, VISIBLE

Build = Callable[[Any], Sequence[ir.Value]]

# Below this, a score stays hidden by a mask of LOWEST or less.
_GREATEST = 1e18


@dataclasses.dataclass(frozen=True)
class Answers:
    """What a run says of a cached attention, each a bool.

    Attributes:
        one: There are rows, of one token each, and each of them sees something.
        kernel: The mask is that of a prompt, and hides all later tokens.
        plain: It hides nothing else.
    """

    one: ir.Value
    kernel: ir.Value
    plain: ir.Value


@dataclasses.dataclass(frozen=True)
class Uncached:
    """What a run says of attention without a cache, each a bool; None for what is proved.

    Attributes:
        standard: The standard operator computes the same, and texts are short.
        texts: Texts are long, and a kernel computes the same of each: None for never.
        mask: What the standard operator reads, with a row for each query.
    """

    standard: ir.Value | None
    texts: ir.Value | None
    mask: ir.Value | None


def either(
    op: Any,
    condition: ir.Value,
    then: Build,
    other: Build,
    name: str | None = None,
    dtype: ir.DataType = ir.DataType.FLOAT,
) -> Sequence[ir.Value]:
    """Emit an If of two forms; what they read from outside, they capture."""
    then_branch, else_branch = (_branch(build, dtype) for build in (then, other))
    branches = {"then_branch": then_branch, "else_branch": else_branch, "_name": name}
    made = op.If(condition, **branches, _outputs=len(then_branch.outputs))
    return made if len(then_branch.outputs) > 1 else [made]


def _branch(build: Build, dtype: ir.DataType) -> ir.Graph:
    op = TapeBuilder()
    outputs = build(op)
    for output in outputs:
        output.dtype = dtype
    return ir.Graph([], outputs, nodes=op.nodes, name="attention")


def guarded(
    op: Any, kernel: Build, nodes: Build, finish: Callable[[Any, Any], Any]
) -> Sequence[ir.Value]:
    """Emit what a kernel computes, or nodes where weights that are NaN count as 0."""
    mixed, *caches = kernel(op)
    # All weights of a token are NaN, or none.
    is_nan = op.IsNaN(op.ReduceSum(mixed, keepdims=0))
    made = either(
        op,
        is_nan,
        lambda op: [finish(op, nodes(op)[0])],
        lambda op: [finish(op, mixed)],
    )
    return [*made, *caches]


def bounded(op: Any, found: Attention, with_values: bool = False) -> Any:
    """Emit whether scores of new tokens are less than 1e18, and values if asked; no NaN is.

    A product of two vectors is at most that of their lengths, so two sums are enough.
    """
    read = [in_order(found.query), in_order(found.new(found.read_keys))]
    sums = [op.ReduceSumSquare(value, keepdims=0) for value in read]
    most = op.Mul(*sums)
    if with_values:
        value = in_order(found.new(found.read_values))
        most = op.Add(most, op.ReduceSumSquare(value, keepdims=0))
    limit = (_GREATEST / max(found.scale, 1.0)) ** 2
    return op.Less(most, op.Constant(value_float=limit))


class Conditions:
    """Emits questions; layers that ask the same share the answers."""

    def __init__(self) -> None:
        self._answers: dict[object, Answers] = {}
        self._uncached: dict[object, Uncached] = {}

    def of_cached(self, op: Any, found: Attention) -> Answers:
        """Emit which form takes the tokens of attention with a cache."""
        unproved = [each for each in found.both if found.same_tokens(each) != (True, True)]
        compared = [(found.tokens[0], each.source) for each in unproved]
        splits = unproved_splits(op, found.splits, found.facts)
        key = found.mask, found.tokens, found.shortest_prompt, *compared, *splits
        if key not in self._answers:
            batch, length = found.sizes(op)
            some = op.Less(ints(op, 0), batch)
            for heads in unproved:
                pairs = zip(found.new_sizes(op, heads), (batch, length), strict=True)
                some = functools.reduce(op.And, itertools.starmap(op.Equal, pairs), some)
            asked = [*_of_more_texts(op, found, batch), *(ask() for ask in splits.values())]
            some = functools.reduce(op.And, asked, some)
            if found.mask is None:
                one = op.And(op.Equal(length, ints(op, 1)), some)
                no = _false(op)
                self._answers[key] = Answers(one, no, no)
            else:
                self._answers[key] = _ask(op, found.mask, length, some, found.shortest_prompt)
        return self._answers[key]

    def of_uncached(self, op: Any, found: Attention) -> Uncached:
        """Emit which form takes the tokens of attention without a cache."""
        batches = [found.same_tokens(each)[0] or each.source for each in found.both]
        count = found.facts.count
        splits = unproved_splits(op, found.splits, found.facts)
        key = found.mask, found.tokens, found.key_count, *batches, count(found.query), *splits
        if key not in self._uncached:
            asked = [*_unproved(op, found), *(ask() for ask in splits.values())]
            self._uncached[key] = _ask_uncached(op, found, asked)
        return self._uncached[key]


def check_shared(op: Any, found: Attention, name: str) -> ir.Value:
    """Emit an int32 0, by a node that fails where the mask shows what the kernel hides.

    It fails as well where heads are split otherwise: a cache in buffers leaves no other form.
    """
    mask = found.mask
    assert mask is not None
    rows, columns = (_size(op, mask, axis) for axis in (2, 3))
    first = op.Add(op.Sub(columns, rows), ints(op, 1))
    later = op.Trilu(_shown(op, mask), op.Squeeze(first), upper=1)
    wrong = op.ReduceMax(op.Cast(later, to=ir.DataType.FLOAT), keepdims=0)
    for ask in unproved_splits(op, found.splits, found.facts).values():
        wrong = op.Max(wrong, op.Cast(op.Not(ask()), to=ir.DataType.FLOAT))
    zero = op.Constant(value=ir.tensor([0], ir.DataType.INT32))
    checked: ir.Value = op.Gather(zero, op.Cast(wrong, to=ir.DataType.INT64), _name=name)
    return checked


def _ask(
    op: Any, mask: ir.Value, length: ir.Value, some: ir.Value, shortest: int | None
) -> Answers:
    rows, columns = (_size(op, mask, axis) for axis in (2, 3))
    # The standard operator wants a column for each key; one alone may stand for all.
    wide = op.And(op.Less(ints(op, 1), columns), some)
    is_one = op.And(op.Equal(op.Mul(length, rows), ints(op, 1)), wide)

    def one(op: Any) -> Sequence[ir.Value]:
        return [_sees(op, mask), _false(op), _false(op)]

    def several(op: Any) -> Sequence[ir.Value]:
        if shortest is None:
            return nothing(op)
        square = op.And(op.Equal(rows, length), op.Equal(columns, length))
        is_prompt = op.And(op.And(square, op.LessOrEqual(ints(op, shortest), length)), some)
        return either(op, is_prompt, prompt, nothing, dtype=ir.DataType.BOOL)

    def prompt(op: Any) -> Sequence[ir.Value]:
        shown = _shown(op, mask, LOWEST)
        hides = _all_hidden(op, op.Trilu(shown, op.Constant(value_int=1), upper=1))
        added = op.ReduceL1(op.Trilu(mask, upper=0), keepdims=0)
        plain = op.Equal(added, op.Constant(value_float=0.0))
        return [_false(op), op.And(hides, _sees(op, mask)), plain]

    def nothing(op: Any) -> Sequence[ir.Value]:
        return [_false(op) for _ in range(3)]

    return Answers(*either(op, is_one, one, several, dtype=ir.DataType.BOOL))


def _ask_uncached(op: Any, found: Attention, asked: list[ir.Value]) -> Uncached:
    """Emit the answers, if possible without an If: that costs as much as ten small nodes."""
    mask: Any = found.mask
    dims, long = found.facts.dims(mask, 4), is_long(found, op)

    def long_ones(op: Any) -> Sequence[ir.Value]:
        # NaN is not like itself. Bools of one byte: a mask may be as large as scores.
        first = op.Slice(mask, ints(op, 0), ints(op, 1), ints(op, 2))
        alike = op.Cast(op.Equal(mask, first), to=ir.DataType.UINT8)
        alike = op.Cast(op.ReduceMin(alike, keepdims=0), to=ir.DataType.BOOL)
        texts = op.And(alike, _sees(op, first))

        def by_text(op: Any) -> Sequence[ir.Value]:
            return [_false(op), op.Identity(texts)]

        return either(op, texts, by_text, any_length, dtype=ir.DataType.BOOL)

    def any_length(op: Any) -> Sequence[ir.Value]:
        return [_sees(op, mask), _false(op)]

    if mask is None or long is None or (dims is not None and number(dims[2]) == 1):
        if mask is not None:
            asked.append(_sees(op, mask))
        if mask is not None and long is not None:  # NaN is not like itself
            total = op.ReduceSum(mask, keepdims=0)
            asked.append(op.Equal(total, total))
        fits = _all(op, *asked)
        short = None if long is None else op.Not(long)
    else:
        fits = _all(op, *asked)
        short, long = either(op, long, long_ones, any_length, dtype=ir.DataType.BOOL)
    rows = _with_rows(op, found, dims, short)
    return Uncached(
        _all(op, fits, short), None if long is None else _all(op, fits, long), rows
    )


def _with_rows(op: Any, found: Attention, dims: Dims | None, short: ir.Value | None) -> Any:
    """Emit the mask with a row for each query, which long texts need not hold."""
    if found.mask is None or dims is None or (1, ()) not in dims[2:]:
        return found.mask
    count = found.sizes(op)[1]
    if short is not None and number(dims[2]) == 1:
        count = op.Mul(count, op.Cast(short, to=ir.DataType.INT64))
    return op.Expand(found.mask, ints(op, 1, 1, count, found.count_keys(op)))


def _all(op: Any, *answers: ir.Value | None) -> ir.Value | None:
    """Emit whether all answers are yes, but for those that need not be asked."""
    known = [answer for answer in answers if answer is not None]
    return functools.reduce(op.And, known) if known else None


def _unproved(op: Any, found: Attention) -> list[ir.Value]:
    """Emit the questions for sizes that the standard operator wants, unless proved."""
    facts, keys, one = found.facts, found.read_keys, (1, ())
    batch, length = found.sizes(op)
    asked = list[ir.Value]()
    read = {facts.count(value): in_order(value) for value in (keys.source, found.query)}
    if not all(map(number, read)):
        asked.append(
            op.Cast(functools.reduce(op.Mul, map(op.Size, read.values())), to=ir.DataType.BOOL)
        )
    for heads in found.both:
        if not found.same_tokens(heads)[0]:
            asked.append(op.Equal(batch, found.new_sizes(op, heads)[0]))
    dims = facts.dims(found.mask, 4)
    if found.mask is not None and dims is not None:
        asked += _of_more_texts(op, found, batch)
        if dims[2] not in (one, found.tokens[1]):
            asked.append(op.Equal(_size(op, found.mask, 2), length))
        if dims[3] not in (one, found.key_count):
            asked.append(op.Equal(_size(op, found.mask, 3), found.count_keys(op)))
    return asked


def _of_more_texts(op: Any, found: Attention, batch: ir.Value) -> list[ir.Value]:
    """Emit the question whether a mask has no more texts than there are queries."""
    dims = found.facts.dims(found.mask, 4)
    if found.mask is None or (dims is not None and dims[0] in ((1, ()), found.tokens[0])):
        return []
    return [op.LessOrEqual(_size(op, found.mask, 0), batch)]


def _size(op: Any, value: ir.Value, axis: int) -> Any:
    return op.Shape(value, start=axis, end=axis + 1)


def _shown(op: Any, mask: ir.Value, hidden: float = HIDDEN) -> Any:
    """Emit which scores a mask does not hide; NaN hides none."""
    return op.Not(op.LessOrEqual(mask, op.Constant(value_float=hidden)))


def _all_hidden(op: Any, shown: ir.Value) -> Any:
    most = op.ReduceMax(op.Cast(shown, to=ir.DataType.FLOAT), keepdims=0)
    return op.Equal(most, op.Constant(value_float=0.0))


def _sees(op: Any, mask: ir.Value) -> Any:
    """Emit whether each row of a mask shows a score; there are rows and columns."""
    shown = op.Greater(mask, op.Constant(value_float=VISIBLE))
    counts = op.ReduceSum(op.Cast(shown, to=ir.DataType.FLOAT), ints(op, -1))
    return op.Greater(op.ReduceMin(counts, keepdims=0), op.Constant(value_float=0.0))


def _false(op: Any) -> Any:
    return op.Constant(value=ir.tensor(False))
