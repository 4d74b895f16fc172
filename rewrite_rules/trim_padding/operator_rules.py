# SPDX-License-Identifier: MIT
"""What operators do to tokens: work on each by itself, or mix them under a mask.

A rule returns the axes of its node's outputs, or refuses. Where only sizes change, they are
those of :mod:`rewrite_rules.shapes`. An operator without a rule is refused where it reads the
sequence.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from string import ascii_uppercase
from typing import Any

import numpy as np

from rewrite_rules.facts.operator_table import (
    ATTENTIONS,
    NORMS,
    PER_TOKEN,
    SKIP_NORMS,
    PerToken,
    per_token,
)
from rewrite_rules.graph.nodes import DOMAINS
from rewrite_rules.graph.parameters import axes_of, axis_of, constant_ints, type_attribute
from rewrite_rules.remarks import Refusal
from rewrite_rules.shapes.dimensions import known
from rewrite_rules.shapes.operator_shapes import REDUCTIONS
from rewrite_rules.trim_padding.questions import LOW, ORDINARY, How
from rewrite_rules.trim_padding.scores import has_infinity, keeps_order, sees_itself
from rewrite_rules.trim_padding.token_axes import (
    BATCH,
    UNFIT,
    Axes,
    Axis,
    Sequence,
    changed,
    check_rows,
    marked,
    plain,
    sequences_of,
    size_of,
)
from rewrite_rules.trim_padding.token_flow import Picks, Rule, Side, Site

_MICROSOFT = "com.microsoft"
_MOVED = "ORP503", "leaves positions out, so that others move: leave them out of the results"
_CHANGED = "ORP503", "changes the axis of the sequence"
_UNSURE = "ORP503", "takes positions that may be padding: only the first is sure to be real"

# Every token by itself

_EITHER_ZERO, _ALL_KEPT, _NEVER = (PER_TOKEN[name] for name in ("Mul", "Identity", "Max"))


def _joined(flags: list[Sequence], row: PerToken) -> Sequence:
    wild = any(f.wild for f in flags)
    zero = row.zero([f.zero for f in flags]) and not wild
    return Sequence(
        zero,
        row.low([f.low for f in flags]),
        set_by_mask=not zero and any(f.set_by_mask for f in flags),
        wild=wild,
    )


def _merged(parts: Collection[Axis], beside: Collection[Sequence], row: PerToken) -> Axis:
    """Return the axis that broadcasting makes; ``beside`` are flags of operands without it."""
    longest = [part for part in parts if part]
    if not longest:
        return ()
    if len(set(plain(longest))) != 1:
        # Heads that were merged, beside a vector of all features.
        numbers = [[f for f in part if isinstance(f, int)] for part in longest]
        if len({math.prod(part) for part in numbers}) > 1 or numbers != [*map(list, longest)]:
            raise Refusal(*UNFIT)
        return max(longest, key=len)
    result = list(longest[0])
    for i, factor in enumerate(result):
        if isinstance(factor, Sequence):
            pairs = zip(parts, beside, strict=True)
            flags: list[Any] = [part[i] if part else own for part, own in pairs]
            result[i] = _joined(flags, row)
    return tuple(result)


def _broadcast(
    operands: Collection[Axes], row: PerToken = _NEVER, beside: Collection[Sequence] = ()
) -> Axes:
    rank = max(map(len, operands))
    padded = [((),) * (rank - len(axes)) + axes for axes in operands]
    beside = beside or [Sequence()] * len(operands)
    return tuple(_merged(parts, beside, row) for parts in zip(*padded, strict=True))


# By operator, the operand whose zeros may give NaN or infinity; of _PARTIAL, other values too.
_BREAKS_AT_0 = {"Div": 1, "Log": 0, "Mod": 1, "Pow": 0, "Reciprocal": 0}
_PARTIAL = _BREAKS_AT_0 | {"Acos": 0, "Asin": 0, "Exp": 0, "Sqrt": 0}


def _elementwise(site: Site) -> Axes:
    """Broadcast; an operand that is 0 everywhere is zero along all axes."""
    present = [i for i in range(len(site.node.inputs)) if site.has(i)]
    beside = [dataclasses.replace(site.beside(i), low=False) for i in present]
    operands, op_type = site.operands(), site.node.op_type
    axes = _broadcast(operands, per_token(site.node) or _NEVER, beside)
    if op_type in _PARTIAL:
        index, at_0 = _PARTIAL[op_type], op_type in _BREAKS_AT_0
        set_there = any(
            f.set_by_mask or (f.zero and at_0) for f in sequences_of(*operands[index])
        )
        # What a caller has at padding may be anything, mostly 0; a layer's numbers are not.
        if set_there or site.flow.is_fed(site.input(index)):
            return marked(axes, zero=False, wild=True)
    return axes


def _cast(site: Site) -> list[Axes | Side]:
    """Follow the first operand; no number of another type than float is far below others."""
    axes, node = site.tokens(), site.node
    if site.has(2) and not (site.flow.is_constant(site.input(2)) and site.beside(2).zero):
        raise Refusal("ORP503", "may train: what it drops of fewer positions is drawn anew")
    dtype = type_attribute(node, "to") or node.outputs[0].dtype
    found = site.flow.value(site.input(0))
    if node.op_type == "CastLike" and isinstance(found, Side) and not found.varies and dtype:
        each = (array.astype(dtype.numpy()) for array in found.arrays)
        return [site.flow.side(node.outputs[0], each, varies=False)]
    if node.op_type.startswith("Cast") and not (dtype and dtype.is_floating_point()):
        axes = marked(axes, low=False)
    return [axes, *[plain(axes)] * (len(node.outputs) - 1)]


def _quantized(site: Site) -> Axes:
    site.fixes(0)
    return changed(site.tokens(), Sequence.reduced)


def _dynamic_quantize(site: Site) -> Axes:
    raise Refusal("ORP509", "takes one scale from all tokens, padding included")


def _where(site: Site) -> Axes:
    """Of an operand that the condition chooses at padded positions, what that has there."""
    axes = _elementwise(site)
    read = [site.tokens(i) for i in range(3)]
    beside = [site.beside(i) for i in range(3)]
    found = sequences_of(*read[0])
    is_side = isinstance(site.flow.value(site.input(0)), Side)
    if is_side and found and not any(one.zero for one in found):  # may hide what is True
        read = [site.tokens(0, How.HIDES), read[2], read[1]]
        beside = [beside[0], beside[2], beside[1]]
    sides = [((),) * (len(axes) - len(operand)) + operand for operand in read]
    result = list(axes)
    for i, axis in enumerate(axes):
        if len(axis) == 1 and sequences_of(axis):
            condition, one, other = (
                (sequences_of(side[i]) or [own])[0]
                for side, own in zip(sides, beside, strict=True)
            )
            (joined,) = sequences_of(axis)
            result[i] = (_chosen(condition, one, other, joined),)
    return tuple(result)


def _chosen(condition: Sequence, one: Sequence, other: Sequence, joined: Sequence) -> Sequence:
    if not condition.zero:
        return joined
    low = other.low and not one.low and condition.low
    return Sequence(other.zero, low, not other.zero, other.wild)


# Along axes, under a mask where those hold the sequence


def _softmax(site: Site) -> Axes:
    axes = site.tokens()
    last_only = site.opset >= 13
    along = range(len(axes))[site.axis(-1 if last_only else 1) :][: 1 if last_only else None]
    others = [axis for i, axis in enumerate(axes) if i not in along]
    if sequences_of(*(axes[i] for i in along)) and not sees_itself(site.flow, site.input(0)):
        raise Refusal("ORP503", "mixes positions, and no mask leaves padding out")
    mixes = site.mixes([axes[i] for i in along], "low", others)
    is_log = site.node.op_type == "LogSoftmax"
    inside = [mixes and i in along for i in range(len(axes))]
    beside = _beside(axes, mixes)
    if mixes:  # NaN where infinity hides all
        infinite = has_infinity(site.flow, site.input(0))
        beside = changed(axes, lambda one: Sequence(wild=infinite and one.low))
    made = {"zero": not is_log, "wild": is_log}
    made |= {} if is_log else {"low": False, "set_by_mask": False}
    under = marked(axes, **made)
    return tuple(under[i] if here else beside[i] for i, here in enumerate(inside))


def _contracted(site: Site, equation: str) -> Axes:
    """Multiply, and add up along letters that the result lacks; a zero factor makes zeros."""
    sides, _, result = equation.partition("->")
    parts: dict[str, list[Axis]] = {letter: [] for letter in sorted({*sides} - {","})}
    for index, letters in enumerate(sides.split(",")):
        axes = site.tokens(index)
        if [len(letters), len({*letters})] != [len(axes)] * 2:
            raise Refusal(*UNFIT)  # an ellipsis, or a diagonal
        for letter, axis in zip(letters, axes, strict=True):
            parts[letter].append(axis)
    merged = {
        letter: _merged(found, [Sequence()] * len(found), _EITHER_ZERO)
        for letter, found in parts.items()
    }
    made = tuple(merged.pop(letter) for letter in result)
    if any(size_of(axis) != size_of(merged[x]) for x in merged for axis in parts[x]):
        raise Refusal(*UNFIT)
    mixes = site.mixes(merged.values(), "zero", made)
    check_rows((*made, *merged.values()))
    new, zero = _beside(made, mixes), iter(sequences_of(*made))
    if mixes:  # a row is 0 only where what it is multiplied with is at real positions
        return new
    return changed(new, lambda factor: dataclasses.replace(factor, zero=next(zero).zero))


def _beside(axes: Axes, mixes: bool) -> Axes:
    """Return axes beside those that a node works along, there mixing positions or not.

    The mask may leave no position out where these are padding: how many there are counts.
    """
    if mixes:
        return changed(axes, lambda one: Sequence(wild=one.wild))
    return changed(axes, Sequence.reduced)


def _matmul(site: Site) -> Axes:
    """Multiply rows by columns, for all axes in front of them; a vector lacks its own."""
    ranks = [len(site.tokens(index)) for index in (0, 1)]
    row, column = (name[: rank - 1] for name, rank in zip("rc", ranks, strict=True))
    one, other = (ascii_uppercase[: max(rank - 2, 0)][::-1] for rank in ranks)
    lead = max(one, other, key=len)
    return _contracted(site, f"{one}{row}k,{other}k{column}->{lead}{row}{column}")


def _gemm(site: Site) -> Axes:
    left = "kr" if site.integer("transA") else "rk"
    right = "ck" if site.integer("transB") else "kc"
    result = _contracted(site, f"{left},{right}->rc")
    return _broadcast([result, site.tokens(2)]) if site.has(2) else result


def _einsum(site: Site) -> Axes:
    equation = site.text("equation", "").replace(" ", "")
    sides, arrow, result = equation.partition("->")
    if not arrow:
        raise Refusal("ORP503", "is not known to work token by token")
    is_whole = sides.count(",") + 1 == len(site.node.inputs)
    if not is_whole or len({*result}) < len(result) or not {*sides} >= {*result}:
        raise Refusal(*UNFIT)
    return _contracted(site, equation)


def _attention(site: Site) -> list[Axes | Side]:
    """Softmax over keys that a mask hides, and a sum over their values, in one node."""
    table = ATTENTIONS[site.node.domain, site.node.op_type]
    others = site.node.outputs[1:]
    is_read = any(output.uses() or output.is_graph_output() for output in others)
    if any(map(site.has, table.absent)) or is_read:
        raise Refusal("ORP503", "has a cache, or returns more than one output")
    query, key, value = (site.tokens(i) for i in table.keys)
    is_causal = site.integer("is_causal", site.integer("unidirectional"))
    rows = {axes[0] for axes in (query, key, value)}
    if len(rows) != 1 or plain([key[-2]]) != plain([value[-2]]):
        raise Refusal(*UNFIT)
    if is_causal and plain([key[-2]]) != plain([query[-2]]):
        raise Refusal("ORP503", "hides what comes later in another sequence")
    if is_causal and not site.node.domain and site.has(table.counted):
        raise Refusal("ORP503", "counts keys from the last one of each row")
    masks = [(i, How.NUMBERS) for i in table.masks if site.has(i)]
    if site.has(table.counted):
        is_count = len(site.flow.roles.dims(site.input(table.counted)) or ()) == 1
        masks.append((table.counted, How.COUNT if is_count else How.ABOVE_0))
    read = [*table.keys, *(i for i, _ in masks)]
    site.mixes([axis for axes in (query, key, value) for axis in (*axes[1:-2], axes[-1])])
    site.fixes(*read)
    seen = [site.tokens(*mask) for mask in masks]
    for (index, _), axes in zip(masks, seen, strict=True):
        # Masks of fewer axes have none of rows, unless they say which keys count.
        of_rows = axes[: index == table.counted or len(axes) == 4]
        if any(BATCH in axis for axis in axes[len(of_rows) :]) or sequences_of(*axes[:-2]):
            raise Refusal("ORP503", "is under a mask that has its axes at other places")
    hides = any(one.low for axes in seen for one in sequences_of(axes[-1]))
    hides = hides and all(keeps_order(site.flow, site.node, *mask) for mask in masks)
    fill, scale = (
        site.node.attributes.get_float(name, default)
        for name, default in (("mask_filter_value", -math.inf), ("scale", 1.0))
    )
    hides = hides and fill < LOW and abs(scale) <= ORDINARY
    # Infinity times 0 is NaN.
    hides = hides and not any(one.wild for one in sequences_of(value[-2]))
    mixes = site.mixes(marked([key[-2]], low=hides), "low", query[:-1])
    return [(*_beside(query[:-1], mixes), site.sizes.axis(site.made()[-1]))]


def _by_matrix(site: Site) -> Axes:
    """Multiply tokens by one matrix; grids of codes serve all tokens."""
    *rows, last = site.tokens()
    after = site.made()
    if len(after) != len(rows) + 1:
        raise Refusal(*UNFIT)
    site.fixes(0)
    site.mixes([last], beside=rows)
    return (*changed(rows, Sequence.reduced), site.sizes.axis(after[-1]))


def _reduced(site: Site, axes: Axes, gone: set[int], flag: str) -> Axes:
    others = [axis for i, axis in enumerate(axes) if i not in gone]
    mixes = site.mixes([axes[i] for i in gone], flag, others)
    keep = site.is_set("keepdims", 1)
    op_type = site.node.op_type
    beside = changed(axes, lambda f: f.reduced(op_type in _OF_ZEROS))
    if op_type == "ReduceLogSum" and any(one.zero for one in sequences_of(*axes)):
        beside = marked(beside, wild=True)
    return tuple(
        () if i in gone else axis
        for i, axis in enumerate(plain(axes) if mixes else beside)
        if keep or i not in gone
    )


# What leaves padding out of a reduction; of an extreme, 0 at one padded position counts like 0
# at several.
_LEFT_OUT = {
    **dict.fromkeys(("ReduceL1", "ReduceL2", "ReduceSum", "ReduceSumSquare"), "zero"),
    **dict.fromkeys(("ReduceLogSumExp", "ReduceMax"), "low"),
}
# Reductions that make 0 of zeros.
_OF_ZEROS = REDUCTIONS - {"ReduceLogSum", "ReduceLogSumExp"}


def _reduce(site: Site) -> Axes:
    axes, given, op_type = site.tokens(), site.axes(1), site.node.op_type
    if not given and site.is_set("noop_with_empty_axes"):
        return changed(axes, Sequence.reduced)
    gone, flag = axes_of(given or range(len(axes)), len(axes)), _LEFT_OUT.get(op_type, "")
    if flag == "zero":
        axes = site.asked_zero()
    mixed = sequences_of(*(axes[i] for i in gone))
    if op_type in ("ReduceMax", "ReduceMin") and any(f.zero and not f.low for f in mixed):
        site.flow.keeps_one = True
        flag = "zero"
    return _reduced(site, axes, gone, flag)


def _arg_reduce(site: Site) -> Axes | Side:
    """Take the position that whole inputs choose."""
    axes, value = site.tokens(), site.input(0)
    of_rows = len(axes) == 2 and axes[0] in ((), (BATCH,)) and plain(axes)[1] == (Sequence(),)
    if not of_rows or site.axis(0) != 1 or not site.flow.is_made_of_inputs(value):
        return _reduced(site, axes, {site.axis(0)}, "")
    places = site.flow.samples.real_positions()
    if site.is_set("keepdims", 1):
        places = (each[:, None] for each in places)
    return site.flow.side(site.node.outputs[0], places)


def _cumulative_sum(site: Site) -> Axes:
    axes, number = site.tokens(), constant_ints(site.input(1))
    if number is None:
        raise Refusal("ORP504", "sums along an axis that is not constant")
    axis = axes[axis_of(number[0], len(axes))]
    if not site.exact or site.integer("reverse") or len(axis) != 1:
        site.mixes([axis], beside=axes)
    elif not site.flow.is_made_of_inputs(site.input(0), most_axes=2):
        site.flow.unpackable = "padded positions count for others"
    beside = changed(axes, Sequence.reduced)
    summed = changed([axis], lambda f: Sequence(set_by_mask=f.set_by_mask))
    return tuple(summed[0] if own is axis else beside[i] for i, own in enumerate(axes))


def _normalization(site: Site) -> Axes:
    axes = _elementwise(site)
    axis = site.axis(-1)
    site.mixes(axes[axis:], beside=axes[:axis])
    return changed(axes, Sequence.reduced)


# Moving tokens


def _transpose(site: Site) -> Axes:
    axes = site.tokens()
    perm = site.ints("perm") or range(len(axes))[::-1]
    if len(axes_of(perm, len(axes))) != len(axes):
        raise Refusal(*UNFIT)
    return tuple(axes[i] for i in perm)


def _repeated(site: Site) -> Axes:
    """Expand or Tile: an axis several times, or as it is."""
    after, axes, sizes = site.made(), site.tokens(), site.sizes
    result = []
    for axis, dim in zip(((),) * (len(after) - len(axes)) + axes, after, strict=True):
        same = sizes.is_of(axis, dim)
        if not same and any(not isinstance(factor, int) for factor in axis):
            raise Refusal(*_CHANGED if sequences_of(axis) else UNFIT)
        result.append(axis if same else sizes.axis(dim))
    return tuple(result)


def _rows_picked(site: Site, axes: Axes, *along: int) -> Axes:
    """Return axes behind a node that picks or joins rows, which are then not as in the mask.

    Which of their positions are padding is not known any more.
    """
    if not any(BATCH in axes[i] for i in along):
        return axes
    site.mixes([axes[i] for i in along], beside=axes)
    return changed(axes, Sequence.reduced)


def _concat(site: Site) -> Axes:
    parts, axis = site.operands(), site.axis(0)
    if any(sequences_of(axes[axis]) for axes in parts):
        raise Refusal("ORP503", "changes the axis of the sequence")
    made = site.sizes.axis(site.made()[axis])
    if len(parts) > 1:
        parts = [_rows_picked(site, axes, axis) for axes in parts]
    joined = _broadcast([(*axes[:axis], (), *axes[axis + 1 :]) for axes in parts], _ALL_KEPT)
    return (*joined[:axis], made, *joined[axis + 1 :])


def _split(site: Site) -> list[Axes | Side]:
    axes, axis = site.tokens(), site.axis(0)
    if sequences_of(axes[axis]):
        raise Refusal("ORP503", "changes the axis of the sequence")
    axes = _rows_picked(site, axes, axis)
    parts = [site.sizes.axis(site.made(i)[axis]) for i in range(len(site.node.outputs))]
    return [(*axes[:axis], part, *axes[axis + 1 :]) for part in parts]


def _slice(site: Site) -> Axes:
    axes = list(site.tokens())
    starts, ends, along, steps = site.slices()
    if (sizes := site.flow.roles.dims(site.node.outputs[0])) is None:
        raise Refusal(*UNFIT)
    for start, end, axis, step in zip(starts, ends, along, steps, strict=True):
        axis = axis_of(axis, len(axes))
        after = sizes[axis]
        in_front = start == known(0) and step == 1
        before = axes[axis]
        if in_front and site.sizes.is_of(before, after):
            continue
        if sequences_of(before):
            if step == 1 and start and end and (start[0] > 0 or (in_front and end[0] < 0)):
                raise Refusal(*_MOVED)
            if not in_front or after != known(1) or len(before) != 1:
                raise Refusal(*_UNSURE)
            axes[axis] = ()
            continue
        axes = list(_rows_picked(site, tuple(axes), axis))
        axes[axis] = site.sizes.axis(after)
        if sequences_of(axes[axis]):
            # As many rows of a table as there are positions, which it has: L <= rows.
            is_table = len(before) == 1 and isinstance(before[0], int) and before[0] > 1
            if not (in_front and is_table and end and site.flow.roles.same(end, after)):
                raise Refusal(*UNFIT)
    site.made()
    return tuple(axes)


def _gather(site: Site) -> Axes:
    axes, axis = site.tokens(), site.axis(0)
    place = axes[axis]
    if sequences_of(place):
        if len(place) == 1 and site.flow.is_constant(site.input(1)) and site.beside(1).zero:
            return (*axes[:axis], *_looked_up(site), *axes[axis + 1 :])
        return _positions(site, axes[:axis], place, axes[axis + 1 :], Picks.FLAT)
    axes = _rows_picked(site, axes, axis)
    return (*axes[:axis], *_looked_up(site), *axes[axis + 1 :])


def _looked_up(site: Site, index: int = 1) -> Axes:
    """Return the axes of rows of a table: row 0 is not 0."""
    axes = plain(site.tokens(index))
    if index in site.read:
        site.read[index] = axes, How.NUMBERS
    return axes


def _positions(site: Site, before: Axes, place: Axis, behind: Axes, how: Picks) -> Axes:
    """Take positions that the mask or an input chooses; they are asked to be real."""
    index = site.flow.value(site.input(1))
    of_rows = plain([place])[0] in ((BATCH, Sequence()), (Sequence(),))
    one_row = BATCH in place or all(len(mask) == 1 for mask in site.flow.samples.masks)
    if not isinstance(index, Side) or not of_rows or not one_row:
        raise Refusal(*_UNSURE)
    indices = site.tokens(1)[: -1 if how is Picks.PAIRS else None]
    if sequences_of(*before, *indices, *behind):
        raise Refusal(*_UNSURE)
    site.read.pop(1, None)
    site.flow.picked[site.node, 1] = how
    site.flow.unpackable = "padding may be pooled"
    return (*before, *indices, *behind)


def _gather_block_quantized(site: Site) -> Axes:
    indices, after = _looked_up(site), site.made()
    site.fixes(1)
    if len(after) != len(indices) + 1 or site.integer("gather_axis"):
        raise Refusal(*UNFIT)
    return (*indices, site.sizes.axis(after[-1]))


def _embedded(site: Site) -> list[Axes | Side]:
    """Look up a row for each token, type and position; count the ones of the mask."""
    indices = [site.tokens(i) for i in (0, 1, 8) if site.has(i)]
    (width,) = site.tokens(2)[1:]
    made = (*plain(_broadcast(indices)), width)
    site.fixes(0, 1, 7, 8)
    counts: Axes | Side = made[:1]
    for index in (1, 7, 8):
        if index in site.read:
            site.read[index] = plain(site.read[index][0]), How.NUMBERS
    if site.has(7):
        mask = site.flow.value(site.input(7))
        if not isinstance(mask, Side):
            raise Refusal("ORP503", "counts the ones of something other than the mask")
        ones = ((array == 1).sum(1).astype(np.int32) for array in mask.arrays)
        counts = site.flow.side(site.node.outputs[1], ones)
    return [made, counts, made]


def _gather_elements(site: Site) -> Axes:
    data, indices, axis = site.tokens(0), site.tokens(1), site.axis(0)
    if sequences_of(data[axis]):
        row = data[:1]
        if axis != 1 or indices[:1] != row or plain(data[2:]) != plain(indices[2:]):
            raise Refusal(*_UNSURE)
        _positions(site, (), (*row[0], *data[1]), (), Picks.IN_ROW)
        return indices
    data = _rows_picked(site, data, axis)
    beside = [(*axes[:axis], *axes[axis + 1 :]) for axes in (data, indices)]
    if plain(beside[0]) != plain(beside[1]):
        raise Refusal(*UNFIT)
    kept = _broadcast(beside)
    return (*kept[:axis], *plain(indices[axis : axis + 1]), *kept[axis:])


def _gather_nd(site: Site) -> Axes:
    data, skipped = site.tokens(), site.integer("batch_dims")
    (depth,) = site.tokens(1)[-1] or (1,)
    if not isinstance(depth, int):
        raise Refusal(*UNFIT)
    picked = data[: skipped + depth]
    if any(map(sequences_of, picked)):
        place = tuple(factor for axis in picked for factor in axis)
        if skipped or len(picked) != 2:
            raise Refusal(*_UNSURE)
        return _positions(site, (), place, data[2:], Picks.PAIRS)
    data = _rows_picked(site, data, *range(skipped, skipped + depth))
    return (*_looked_up(site)[:-1], *data[skipped + depth :])


def _sizes(site: Site) -> Side:
    axes, samples = site.tokens(), site.flow.samples
    span = axes[site.integer("start") : site.integer("end", len(axes))]
    runs = range(len(samples.masks))
    each = (np.array([samples.size(axis, run) for axis in span], np.int64) for run in runs)
    if site.node.op_type == "Size":
        each = (sizes.prod() for sizes in each)
    return site.flow.side(site.node.outputs[0], each)


def _rows(rule: Rule, operators: str) -> dict[str, Rule]:
    return dict.fromkeys(operators.split(), rule)


_STANDARD: dict[str, Rule] = {
    **_rows(_cast, "Cast CastLike Dropout Identity"),
    **_rows(_quantized, "DequantizeLinear QuantizeLinear"),
    "Where": _where,
    # Along axes: which flag leaves padding out.
    **_rows(_softmax, "LogSoftmax Softmax"),
    **dict.fromkeys(REDUCTIONS, _reduce),
    **_rows(_arg_reduce, "ArgMax ArgMin"),
    "CumSum": _cumulative_sum,
    "Einsum": _einsum,
    "Gemm": _gemm,
    "MatMul": _matmul,
    # Moving tokens.
    **_rows(
        lambda site: site.sizes.split(site.tokens(), site.made()),
        "Flatten Reshape Squeeze Unsqueeze",
    ),
    **_rows(_repeated, "Expand Tile"),
    "Concat": _concat,
    "DynamicQuantizeLinear": _dynamic_quantize,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    **_rows(_sizes, "Shape Size"),
    "Slice": _slice,
    "Split": _split,
    "Transpose": _transpose,
}
_CONTRIBUTED: dict[str, Rule] = {
    **_rows(_quantized, "DequantizeLinear QuantizeLinear"),
    "EmbedLayerNormalization": _embedded,
    "GatherBlockQuantized": _gather_block_quantized,
    **_rows(_by_matrix, "MatMulIntegerToFloat MatMulNBits"),
}
RULES: dict[tuple[str, str], Rule] = {
    **{(domain, name): _elementwise for domain in DOMAINS for name in PER_TOKEN},
    **{(domain, name): _normalization for domain in DOMAINS for name in NORMS | SKIP_NORMS},
    **dict.fromkeys(ATTENTIONS, _attention),
    **{("", op_type): rule for op_type, rule in _STANDARD.items()},
    **{(_MICROSOFT, op_type): rule for op_type, rule in _CONTRIBUTED.items()},
}
