# SPDX-License-Identifier: MIT
"""What a run is asked before a kernel computes attention.

Kernels are other nodes than those of the model where a token sees nothing: nodes mix all
values then, or make NaN. GroupQueryAttention hides later tokens, whatever the mask says. Both
are asked of the mask, once in each run for all layers that share it.

A score that is NaN or too great for float32 makes weights NaN, unless a kernel skips it as
hidden: where kernels do, each layer asks how great its scores can be.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import onnx_ir as ir

from rewrite_rules.shapes.dimensions import number
from rewrite_rules.transformer_fusion.attention_kernels import Attention, first_row
from rewrite_rules.transformer_fusion.heads import ints
from rewrite_rules.transformer_fusion.scores import HIDDEN, LOWEST, VISIBLE

# Returns what was emitted for a key before, or emits it.
Once = Callable[[object, Callable[[], Any]], Any]
# Below this, a score stays hidden by a mask of LOWEST or less.
_GREATEST = 1e18
_ONE = (1, ())


def is_bounded(op: Any, found: Attention, with_values: bool = False) -> Any:
    """Emit whether scores of new tokens are less than 1e18, and values if asked; no NaN is.

    A product of two vectors is at most that of their lengths, so two sums are enough.
    """
    read = [each.source for each in (found.query, found.keys, found.values)]
    sums = [op.ReduceSumSquare(value, keepdims=0) for value in read[: 2 + with_values]]
    most = functools.reduce(op.Add, sums[2:], op.Mul(*sums[:2]))
    limit = (_GREATEST / max(found.scale, 1.0)) ** 2
    return op.Less(most, op.Constant(value_float=limit))


def of_cached(
    op: Any, found: Attention, once: Once
) -> tuple[ir.Value | None, ir.Value | None, ir.Value | None]:
    """Emit three answers for attention with a cache; None for two that are not needed.

    - There are rows, of one token each, and each of them sees something.
    - The mask is that of a prompt, and hides all later tokens.
    - It hides nothing else.
    """
    sizes, mask = found.sizes, found.mask
    assert mask is not None

    def emit() -> tuple[ir.Value | None, ir.Value | None, ir.Value | None]:
        batch, length = (sizes.emit(op, name) for name in "BS")
        rows, columns = (_size(op, mask, axis) for axis in (2, 3))
        # Of one token there is one row; a mask of each head is as large as scores.
        read = mask if found.takes_prompts else first_row(op, mask)
        asked = [op.Less(ints(op, 0), batch), *_of_texts(op, found), _sees(op, read)]
        # The standard operator wants a column for each key; one alone may stand for all.
        is_one = op.Equal(op.Mul(length, rows), ints(op, 1))
        one = _all(op, is_one, op.Less(ints(op, 1), columns), *asked)
        if not found.takes_prompts:
            return one, None, None
        square = op.And(op.Equal(rows, length), op.Equal(columns, length))
        later = op.Trilu(_shown(op, mask, LOWEST), op.Constant(value_int=1), upper=1)
        most = op.ReduceMax(op.Cast(later, to=ir.DataType.FLOAT), keepdims=0)
        hides = op.Equal(most, op.Constant(value_float=0.0))
        prompt = _all(op, square, hides, *asked)
        added = op.ReduceL1(op.Trilu(mask, upper=0), keepdims=0)
        return one, prompt, op.Equal(added, op.Constant(value_float=0.0))

    key = "cached", mask, sizes.dim("B"), sizes.dim("S"), found.takes_prompts
    one, prompt, plain = once(key, emit)
    if not sizes.key:
        return one, prompt, plain
    # Layers that share a mask may not share all sizes.
    agree = once(("sizes", sizes.key), lambda: _all(op, *sizes.questions(op)))
    return *once((key, sizes.key), lambda: [_all(op, q, agree) for q in (one, prompt)]), plain


def of_uncached(
    op: Any, found: Attention, once: Once
) -> tuple[ir.Value | None, ir.Value | None, ir.Value | None]:
    """Emit two answers for attention without a cache, and what the first reads as mask.

    - The standard operator computes the same, and texts are short; None where that is proved.
    - Texts are long, and a kernel computes the same of each; None for never.
    """
    sizes, mask, count = found.sizes, found.mask, found.facts.count
    values = {count(each.source): each.source for each in (found.keys, found.query)}

    def emit() -> tuple[ir.Value | None, ir.Value | None, ir.Value | None]:
        asked: list[ir.Value | None] = [*sizes.questions(op), *_of_mask(op, found)]
        if not all(map(number, values)):
            elements = functools.reduce(op.Mul, map(op.Size, values.values()))
            asked.append(op.Cast(elements, to=ir.DataType.BOOL))
        if mask is not None:
            asked.append(_sees(op, mask))
        fits = _all(op, *asked)
        if not found.may_be_long:
            return fits, None, _with_rows(op, found, None)
        counts = op.Mul(*(sizes.emit(op, name) for name in "ST"))
        enough = op.LessOrEqual(ints(op, found.least_scores), counts)
        long = _all(op, enough, *_are_rows_alike(op, found))
        assert long is not None
        short = op.Not(long)
        return _all(op, fits, short), _all(op, fits, long), _with_rows(op, found, short)

    key = "uncached", mask, *map(sizes.dim, "BST"), *values, sizes.key, found.least_scores
    answers: tuple[ir.Value | None, ir.Value | None, ir.Value | None] = once(key, emit)
    return answers


def check_shared(op: Any, found: Attention, once: Once, name: str) -> ir.Value:
    """Emit an int32 0, by a node that fails where the mask shows what the kernel hides.

    It fails as well where heads are split otherwise: a cache in buffers leaves no other form.
    """
    mask = found.mask
    assert mask is not None

    def emit() -> Any:
        rows, columns = (_size(op, mask, axis) for axis in (2, 3))
        first = op.Add(op.Sub(columns, rows), ints(op, 1))
        later = op.Trilu(_shown(op, mask), op.Squeeze(first), upper=1)
        return op.ReduceMax(op.Cast(later, to=ir.DataType.FLOAT), keepdims=0)

    wrong = once(("shown", mask), emit)
    for answer in found.sizes.questions(op):
        wrong = op.Max(wrong, op.Cast(op.Not(answer), to=ir.DataType.FLOAT))
    zero = op.Constant(value=ir.tensor([0], ir.DataType.INT32))
    checked: ir.Value = op.Gather(zero, op.Cast(wrong, to=ir.DataType.INT64), _name=name)
    return checked


def _are_rows_alike(op: Any, found: Attention) -> list[ir.Value]:
    """Emit whether a mask adds the same for all queries; NaN is not like itself."""
    mask, dims = found.mask, found.facts.dims(found.mask, 4)
    if mask is None or dims is None:
        return []
    if dims[2] == _ONE:
        total = op.ReduceSum(mask, keepdims=0)
        return [op.Equal(total, total)]
    # Bools of one byte: a mask may be as large as scores.
    alike = op.Cast(op.Equal(mask, first_row(op, mask)), to=ir.DataType.UINT8)
    return [op.Cast(op.ReduceMin(alike, keepdims=0), to=ir.DataType.BOOL)]


def _with_rows(op: Any, found: Attention, short: ir.Value | None) -> ir.Value | None:
    """Emit the mask with a row for each query, which long texts need not hold."""
    dims = found.facts.dims(found.mask, 4)
    if dims is None or _ONE not in dims[2:]:
        return found.mask
    rows, columns = (found.sizes.emit(op, name) for name in "ST")
    if short is not None and dims[2] == _ONE:
        rows = op.Mul(rows, op.Cast(short, to=ir.DataType.INT64))
    made: ir.Value = op.Expand(found.mask, ints(op, 1, 1, rows, columns))
    return made


def _of_mask(op: Any, found: Attention) -> list[ir.Value]:
    """Emit whether a mask has a text, row and column for each that it is not one for all."""
    dims, sizes, asked = found.facts.dims(found.mask, 4), found.sizes, _of_texts(op, found)
    for axis, name in ((2, "S"), (3, "T")):
        if dims is not None and dims[axis] not in (_ONE, sizes.dim(name)):
            asked.append(op.Equal(_size(op, found.mask, axis), sizes.emit(op, name)))
    return asked


def _of_texts(op: Any, found: Attention) -> list[ir.Value]:
    """Emit whether a mask has no more texts than there are queries."""
    dims, batch = found.facts.dims(found.mask, 4), found.sizes.dim("B")
    if found.mask is None or (dims is not None and dims[0] in (_ONE, batch)):
        return []
    return [op.LessOrEqual(_size(op, found.mask, 0), found.sizes.emit(op, "B"))]


def _all(op: Any, *answers: ir.Value | None) -> ir.Value | None:
    """Emit whether all answers are yes, but for those that need not be asked."""
    known = [answer for answer in answers if answer is not None]
    return functools.reduce(op.And, known) if known else None


def _size(op: Any, value: ir.Value | None, axis: int) -> Any:
    return op.Shape(value, start=axis, end=axis + 1)


def _shown(op: Any, mask: ir.Value, hidden: float = HIDDEN) -> Any:
    """Emit which scores a mask does not hide; NaN hides none."""
    return op.Not(op.LessOrEqual(mask, op.Constant(value_float=hidden)))


def _sees(op: Any, mask: ir.Value) -> Any:
    """Emit whether each row of a mask shows a score."""
    best = op.ReduceMin(op.ReduceMax(mask, ints(op, -1), keepdims=0), keepdims=0)
    return op.Greater(best, op.Constant(value_float=VISIBLE))
