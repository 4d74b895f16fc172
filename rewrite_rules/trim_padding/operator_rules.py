# SPDX-License-Identifier: MIT
"""What operators do to tokens: work on each by itself, or mix them under a mask.

A rule returns the axes of its node's outputs, or refuses. Where only sizes change, they are
those of :mod:`rewrite_rules.shapes`. An operator without a rule is refused where it reads the
sequence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from rewrite_rules.facts.operator_table import (
    DOMAINS,
    NORMS,
    PER_TOKEN,
    SKIP_NORMS,
    PerToken,
    per_token,
)
from rewrite_rules.graph.parameters import axes_of, axis_of, constant, type_attribute
from rewrite_rules.remarks import Refusal
from rewrite_rules.shapes.dimensions import known
from rewrite_rules.trim_padding.length_steps import NO_END
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
    split_axes,
)
from rewrite_rules.trim_padding.token_flow import Choice, Evaluated, Rule, Site, flagged

_MICROSOFT = "com.microsoft"
_UNSURE = "takes positions that may be padding: only the first is sure to be real"

# Every token by itself

_EITHER_ZERO = PerToken(zero=any, low=lambda _: False, packs=False)
_ALL_KEPT = PerToken(zero=all, low=all, packs=False)
_NEVER = PerToken(zero=lambda _: False, low=lambda _: False, packs=False)


def _joined(flags: list[Sequence], row: PerToken) -> Sequence:
    # Infinity times 0 is NaN.
    zero = row.zero([f.zero for f in flags]) and not any(f.low for f in flags)
    return Sequence(
        zero,
        row.low([f.low for f in flags]),
        same=all(f.uniform for f in flags),
        set_by_mask=not zero and any(f.set_by_mask for f in flags),
    )


def _merged(parts: Collection[Axis], beside: Collection[Sequence], row: PerToken) -> Axis:
    """Return the axis that broadcasting makes; ``beside`` are flags of operands without it."""
    longest = [part for part in parts if part]
    if not longest:
        return ()
    if len(set(plain(longest))) != 1:
        raise Refusal(UNFIT)
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
    beside = beside or [Sequence(same=True)] * len(operands)
    return tuple(_merged(parts, beside, row) for parts in zip(*padded, strict=True))


def _elementwise(site: Site) -> Axes:
    """Broadcast; an operand that is 0 everywhere is zero along all axes."""
    present = [i for i in range(len(site.node.inputs)) if site.has(i)]
    beside = [Sequence(zero=site.is_zero(i), same=True) for i in present]
    return _broadcast(site.operands(), per_token(site.node) or _NEVER, beside)


def _cast(site: Site) -> list[Axes]:
    """Follow the first operand; no number of another type than float is far below others."""
    axes, node = site.tokens(), site.node
    dtype = type_attribute(node, "to") or node.outputs[0].dtype
    if node.op_type.startswith("Cast") and not (dtype and dtype.is_floating_point()):
        axes = marked(axes, low=False)
    return [axes, *[plain(axes)] * (len(node.outputs) - 1)]


def _quantized(site: Site) -> Axes:
    return changed(site.tokens(), Sequence.reduced)


def _where(site: Site) -> Axes:
    """Flags follow from the condition's numbers, if they are known."""
    axes = _elementwise(site)
    condition, one, other = site.evaluated(0), site.stand_in(1), site.stand_in(2)
    if condition is None or one is None or other is None:
        return axes
    chosen = [np.where(*each) for each in zip(condition.arrays, one, other, strict=True)]
    found = flagged(chosen, axes, site.runs)
    was_set = any(f.set_by_mask for f in sequences_of(*site.tokens(1), *site.tokens(2)))
    return found if not was_set else changed(found, _set_unless_zero)


def _set_unless_zero(factor: Sequence) -> Sequence:
    return dataclasses.replace(factor, set_by_mask=not factor.zero)


# Along axes, under a mask where those hold the sequence


def _softmax(site: Site) -> Axes:
    axes = site.tokens()
    last_only = site.opset >= 13
    along = range(len(axes))[site.axis(-1 if last_only else 1) :][: 1 if last_only else None]
    others = [axis for i, axis in enumerate(axes) if i not in along]
    mixes = site.mixes([axes[i] for i in along], "low", others)
    is_log = site.node.op_type == "LogSoftmax"
    inside = [mixes and i in along for i in range(len(axes))]
    beside = _beside(axes, mixes)
    made = {"zero": False} if is_log else {"zero": True, "low": False, "set_by_mask": False}
    under = marked(axes, **made)
    return tuple(under[i] if here else beside[i] for i, here in enumerate(inside))


def _product(site: Site, one: Axes, other: Axes) -> Axes:
    """Multiply stacks of matrices; a zero row makes zeros."""
    pairs = zip(sequences_of(one[-1]), sequences_of(other[-2]), strict=False)
    both: Axis = tuple(
        Sequence(zero=(a.zero or b.zero) and not (a.low or b.low)) for a, b in pairs
    )
    if plain([one[-1]]) != plain([other[-2]]):
        if site.runs.size(one[-1]) != site.runs.size(other[-2]):
            raise Refusal(UNFIT)
        both = (Sequence(),) * len(both)
    rows = tuple(factor for factor in one[-1] if factor == BATCH)
    mixes = site.mixes([(*rows, *both)], "zero", (*one[:-1], *other[:-2], other[-1]))
    lead = _broadcast([one[:-2], other[:-2]], _EITHER_ZERO)
    made = (*lead, one[-2], other[-1])
    check_rows((*made, both))
    new = _beside(made, mixes)
    # A row of zeros makes zeros.
    zero = iter(sequences_of(*made))
    return changed(new, lambda factor: dataclasses.replace(factor, zero=next(zero).zero))


def _beside(axes: Axes, mixes: bool) -> Axes:
    """Return axes beside those that a node works along, there mixing positions or not.

    The mask may leave no position out where these are padding: how many there are counts.
    """
    return plain(axes) if mixes else changed(axes, Sequence.reworked)


def _matmul(site: Site) -> Axes:
    one, other = site.tokens(0), site.tokens(1)
    rows, columns = len(one) > 1, len(other) > 1
    *lead, row, column = _product(
        site, one if rows else ((), *one), other if columns else (*other, ())
    )
    return (*lead, *[row] * rows, *[column] * columns)


def _gemm(site: Site) -> Axes:
    one, other = site.tokens(0), site.tokens(1)
    if len(one) != 2 or len(other) != 2:
        raise Refusal(UNFIT)
    one = one[::-1] if site.integer("transA", 0) else one
    other = other[::-1] if site.integer("transB", 0) else other
    result = _product(site, one, other)
    return _broadcast([result, site.tokens(2)]) if site.has(2) else result


def _matmul_nbits(site: Site) -> Axes:
    *rows, last = site.tokens()
    site.mixes([last], beside=rows)
    return (*changed(rows, Sequence.reworked), (site.integer("N", 1),))


def _reduced(site: Site, gone: set[int], flag: str) -> Axes:
    axes = site.tokens()
    others = [axis for i, axis in enumerate(axes) if i not in gone]
    mixes = site.mixes([axes[i] for i in gone], flag, others)
    keep = site.integer("keepdims", 1)
    return tuple(
        () if i in gone else axis
        for i, axis in enumerate(plain(axes) if mixes else changed(axes, Sequence.reduced))
        if keep or i not in gone
    )


def _reduce(flag: str) -> Rule:
    def rule(site: Site) -> Axes:
        rank, given = len(site.tokens()), site.axes(1)
        if not given and site.integer("noop_with_empty_axes", 0):
            return changed(site.tokens(), Sequence.reduced)
        return _reduced(site, axes_of(given or range(rank), rank), flag)

    return rule


def _arg_reduce(site: Site) -> Axes | Evaluated:
    """Take a position that an input chooses to be a real one; where it is not, none is cut."""
    choice = _choice(site) if site.axis(0) == 1 and site.exact else None
    if choice is None:
        return _reduced(site, {site.axis(0)}, "")
    site.flow.choices.append(choice)
    site.flow.unpackable = "padding may be pooled"
    keep = site.integer("keepdims", 1)
    places = site.runs.real_positions()
    return Evaluated(tuple(one[:, None] if keep else one for one in places))


def _choice(site: Site) -> Choice | None:
    """Follow the node back to an input ``[batch, sequence]``; None where that fails."""
    axes, steps = site.tokens(), list[tuple[ir.Node, int]]()
    if axes[1:] != ((Sequence(),),) or site.runs.size(axes[0]) != site.runs.batch:
        return None
    node: ir.Node | None = site.node
    while node is not None and node.domain == "" and len(node.outputs) == 1:
        reads = [(i, v) for i, v in enumerate(node.inputs) if v and constant(v) is None]
        index, source = reads[0]
        reshapes = node.op_type == "Reshape"  # from these axes to these: changes nothing
        if len(reads) > 1 + reshapes or site.flow.tokens(source).axes != axes:
            return None
        if not reshapes:
            steps.append((node, index))
        if source.is_graph_input():
            return Choice(source, steps[::-1])
        node = source.producer()
    return None


def _cumulative_sum(site: Site) -> Axes:
    axes, (number, *_) = site.tokens(), site.constants(1)
    axis = axes[axis_of(number, len(axes))]
    if not site.exact or site.integer("reverse", 0) or len(axis) != 1:
        site.mixes([axis], beside=axes)
    else:
        site.flow.unpackable = "padded positions count for others"
    beside = changed(axes, Sequence.reduced)
    # Where zeros are added, the sum stays.
    stays = all(factor.zero for factor in sequences_of(axis))
    summed = changed([axis], lambda f: Sequence(same=stays, set_by_mask=f.set_by_mask))
    return tuple(summed[0] if own is axis else beside[i] for i, own in enumerate(axes))


def _normalization(site: Site) -> Axes:
    axes = _elementwise(site)
    axis = site.axis(-1)
    site.mixes(axes[axis:], beside=axes[:axis])
    return changed(axes, Sequence.reworked)


# Moving tokens


def _transpose(site: Site) -> Axes:
    axes = site.tokens()
    perm = site.ints("perm") or range(len(axes))[::-1]
    if len(axes_of(perm, len(axes))) != len(axes):
        raise Refusal(UNFIT)
    return tuple(axes[i] for i in perm)


def _repeated(site: Site) -> Axes:
    """Expand or Tile: an axis several times, or as it is."""
    (after,) = site.sizes()
    axes = site.tokens()
    result = []
    for axis, size in zip(((),) * (len(after) - len(axes)) + axes, after, strict=True):
        pairs = zip(size, site.runs.size(axis), strict=True)
        times = site.runs.axis(tuple(n // own if own else 1 for n, own in pairs))
        if times and sequences_of(axis):
            raise Refusal("changes the axis of the sequence")
        result.append((*times, *axis))
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
    (after,) = site.sizes()
    if any(sequences_of(axes[axis]) for axes in parts):
        raise Refusal("changes the axis of the sequence")
    made = site.runs.axis(after[axis])
    if len(parts) > 1:
        parts = [_rows_picked(site, axes, axis) for axes in parts]
    joined = _broadcast([(*axes[:axis], (), *axes[axis + 1 :]) for axes in parts], _ALL_KEPT)
    return (*joined[:axis], made, *joined[axis + 1 :])


def _split(site: Site) -> list[Axes]:
    axes, axis = site.tokens(), site.axis(0)
    if sequences_of(axes[axis]):
        raise Refusal("changes the axis of the sequence")
    axes = _rows_picked(site, axes, axis)
    return [
        (*axes[:axis], site.runs.axis(sizes[axis]), *axes[axis + 1 :])
        for sizes in site.sizes()
    ]


def _slice(site: Site) -> Axes:
    axes, (after,) = list(site.tokens()), site.sizes()
    starts, _, along, steps = site.slices()
    _note_bounds(site, tuple(axes), along)
    for start, axis, step in zip(starts, along, steps, strict=True):
        axis = axis_of(axis, len(axes))
        in_front = start == known(0) and step == 1
        whole = in_front and after[axis] == site.runs.size(axes[axis])
        if not sequences_of(axes[axis]):
            axes = axes if whole else list(_rows_picked(site, tuple(axes), axis))
            axes[axis] = site.runs.axis(after[axis])
            if sequences_of(axes[axis]) and not in_front:
                raise Refusal(UNFIT)
        elif not whole:
            if not in_front or set(after[axis]) != {1} or len(axes[axis]) != 1:
                raise Refusal(_UNSURE)
            axes[axis] = ()
    return tuple(axes)


def _note_bounds(site: Site, axes: Axes, along: Collection[int]) -> None:
    bounds = [site.evaluated(1), site.evaluated(2)]
    for i, axis in enumerate(along):
        first, last = (
            [int(array.reshape(-1)[i]) for array in each.arrays] if each else [0]
            for each in bounds
        )
        site.flow.steps.slice(site.runs.size(axes[axis]), first, last)
        if sequences_of(axes[axis]) and max(last) < NO_END:
            site.flow.unpackable = "the model ends at some length"


def _gather(site: Site) -> Axes:
    axes, axis = site.tokens(), site.axis(0)
    if _picks_real(site, axes[axis : axis + 1], joined=False):
        places = tuple(map(site.runs.axis, site.flow.sizes(site.evaluated(1)) or ()))
        return (*axes[:axis], *places, *axes[axis + 1 :])
    if sequences_of(axes[axis]) and (len(axes[axis]) != 1 or not site.is_zero(1)):
        raise Refusal(_UNSURE)
    axes = _rows_picked(site, axes, axis)
    return (*axes[:axis], *_looked_up(site.tokens(1)), *axes[axis + 1 :])


def _looked_up(indices: Axes) -> Axes:
    """Return the axes of rows of a table: row 0 is not 0."""
    return changed(indices, lambda factor: Sequence(same=factor.uniform))


def _picks_real(site: Site, axes: Axes, joined: bool) -> bool:
    """Whether an index into rows and positions picks the same real ones in each pair of runs.

    If joined, its last axis holds a number for each.
    """
    index, runs = site.evaluated(1), site.runs
    *rows, last = [factor for axis in plain(axes) for factor in axis] or [1]
    if index is None or last != Sequence() or runs.size(tuple(rows)) != runs.batch:
        return False
    picked = list[NDArray[Any]]()
    for run, (mask, array) in enumerate(zip(runs.masks, index.arrays, strict=True)):
        numbers = np.add.outer(np.arange(len(mask)) << 32, np.arange(mask.shape[1]))
        places = np.where(mask, numbers, -1).reshape([runs.size(axis)[run] for axis in axes])
        try:
            picked.append(places[tuple(np.moveaxis(array, -1, 0)) if joined else array])
        except IndexError:
            return False
    pairs = zip(picked[::2], picked[1::2], strict=True)
    return all(one.min(initial=0) >= 0 and np.array_equal(one, other) for one, other in pairs)


def _gather_block_quantized(site: Site) -> Axes:
    _, indices, *_ = site.operands()
    (after,) = site.sizes()
    if len(after) != len(indices) + 1 or site.integer("gather_axis", 0):
        raise Refusal(UNFIT)
    return (*_looked_up(indices), site.runs.axis(after[-1]))


def _gather_elements(site: Site) -> Axes:
    data, indices, axis = site.tokens(0), site.tokens(1), site.axis(0)
    if sequences_of(data[axis]):
        raise Refusal(_UNSURE)
    data = _rows_picked(site, data, axis)
    beside = [(*axes[:axis], *axes[axis + 1 :]) for axes in (data, indices)]
    if plain(beside[0]) != plain(beside[1]):
        raise Refusal(UNFIT)
    kept = _broadcast(beside)
    return (*kept[:axis], *_looked_up(indices[axis : axis + 1]), *kept[axis:])


def _gather_nd(site: Site) -> Axes:
    data, indices = site.tokens(0), site.tokens(1)
    skipped = site.integer("batch_dims", 0)
    picked = skipped + site.runs.size(indices[-1])[0]
    if not any(map(sequences_of, data[:picked])):
        data = _rows_picked(site, data, *range(skipped, picked))
    elif skipped or not _picks_real(site, data[:picked], joined=True):
        raise Refusal(_UNSURE)
    return (*_looked_up(indices[:-1]), *data[picked:])


def _shape(site: Site) -> Evaluated:
    axes = site.tokens()
    span = slice(site.integer("start", 0), site.integer("end", len(axes)))
    sizes = [site.runs.size(axis) for axis in axes][span]
    return site.counting([np.array(each, np.int64) for each in zip(*sizes, strict=True)])


def _size(site: Site) -> Evaluated:
    sizes = site.runs.size(tuple(factor for axis in site.tokens() for factor in axis))
    return site.counting([np.array(size, np.int64) for size in sizes])


def _rows(rule: Rule, operators: str) -> dict[str, Rule]:
    return dict.fromkeys(operators.split(), rule)


_STANDARD: dict[str, Rule] = {
    **_rows(_cast, "Cast CastLike Dropout Identity"),
    **_rows(_quantized, "DequantizeLinear QuantizeLinear"),
    "Where": _where,
    # Along axes: which flag leaves padding out.
    **_rows(_softmax, "LogSoftmax Softmax"),
    **_rows(_reduce("zero"), "ReduceL1 ReduceL2 ReduceSum ReduceSumSquare"),
    **_rows(_reduce("low"), "ReduceLogSumExp ReduceMax"),
    **_rows(_reduce(""), "ReduceLogSum ReduceMean ReduceMin ReduceProd"),
    **_rows(_arg_reduce, "ArgMax ArgMin"),
    "CumSum": _cumulative_sum,
    "Gemm": _gemm,
    "MatMul": _matmul,
    # Moving tokens.
    **_rows(
        lambda site: split_axes(site.tokens(), site.sizes()[0], site.runs),
        "Flatten Reshape Squeeze Unsqueeze",
    ),
    **_rows(_repeated, "Expand Tile"),
    "Concat": _concat,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "Shape": _shape,
    "Size": _size,
    "Slice": _slice,
    "Split": _split,
    "Transpose": _transpose,
}
_CONTRIBUTED: dict[str, Rule] = {
    **_rows(_quantized, "DequantizeLinear QuantizeLinear"),
    "GatherBlockQuantized": _gather_block_quantized,
    "MatMulNBits": _matmul_nbits,
}
RULES: dict[tuple[str, str], Rule] = {
    **{(domain, name): _elementwise for domain in DOMAINS for name in PER_TOKEN},
    **{(domain, name): _normalization for domain in DOMAINS for name in NORMS | SKIP_NORMS},
    **{("", op_type): rule for op_type, rule in _STANDARD.items()},
    **{(_MICROSOFT, op_type): rule for op_type, rule in _CONTRIBUTED.items()},
}
