# SPDX-License-Identifier: MIT
"""What operators do to tokens: work on each by itself, or mix them under a mask.

A rule returns the axes of its node's outputs, or refuses. Where only sizes change, they are
those of :mod:`rewrite_rules.shapes`. An operator without a rule is refused where it reads the
sequence.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from rewrite_rules.graph.parameters import axes_of, axis_of, constant
from rewrite_rules.remarks import Refusal
from rewrite_rules.shapes.dimensions import known
from rewrite_rules.trim_padding.token_axes import (
    UNFIT,
    Axes,
    Axis,
    Sequence,
    marked,
    plain,
    sequences_of,
    split_axes,
)
from rewrite_rules.trim_padding.token_flow import Choice, Evaluated, Rule, Site, flagged

_MICROSOFT = "com.microsoft"
_UNSURE = "takes positions that may be padding: only the first is sure to be real"

# Every token by itself

# Whether a result is zero (or low) at padded positions, from whether its operands are.
_Join = Callable[[list[bool]], bool]


def _never(_: list[bool]) -> bool:
    return False


def _merged(
    parts: Collection[Axis], beside: Collection[Sequence], zero: _Join, low: _Join
) -> Axis:
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
            result[i] = Sequence(zero([f.zero for f in flags]), low([f.low for f in flags]))
    return tuple(result)


def _broadcast(
    operands: Collection[Axes],
    zero: _Join = _never,
    low: _Join = _never,
    beside: Collection[Sequence] = (),
) -> Axes:
    rank = max(map(len, operands))
    padded = [((),) * (rank - len(axes)) + axes for axes in operands]
    beside = beside or [Sequence()] * len(operands)
    return tuple(_merged(parts, beside, zero, low) for parts in zip(*padded, strict=True))


def _elementwise(zero: _Join = _never, low: _Join = _never) -> Callable[[Site], Axes]:
    """Broadcast; an operand that is 0 everywhere is zero along all axes."""

    def rule(site: Site) -> Axes:
        present = [i for i in range(len(site.node.inputs)) if site.has(i)]
        beside = [Sequence(zero=site.is_zero(i)) for i in present]
        return _broadcast(site.operands(), zero, low, beside)

    return rule


def _keeps_axes(site: Site) -> Axes:
    return plain(site.operands()[0])


def _where(site: Site) -> Axes:
    """Flags follow from the condition's numbers, if they are known."""
    axes = _elementwise(zero=lambda flags: all(flags[1:]))(site)
    condition, one, other = site.evaluated(0), site.stand_in(1), site.stand_in(2)
    if condition is None or one is None or other is None:
        return axes
    chosen = [np.where(*each) for each in zip(condition.arrays, one, other, strict=True)]
    return flagged(chosen, axes, site.runs)


# Along axes, under a mask where those hold the sequence


def _softmax(site: Site) -> Axes:
    axes = site.tokens()
    last_only = site.opset >= 13
    along = range(len(axes))[site.axis(-1 if last_only else 1) :][: 1 if last_only else None]
    mixes = site.mixes([axes[i] for i in along], "low")
    is_log = site.node.op_type == "LogSoftmax"
    inside = [mixes and i in along for i in range(len(axes))]
    return tuple(
        marked(axis, zero=here and not is_log, low=here and is_log)
        for axis, here in zip(axes, inside, strict=True)
    )


def _product(site: Site, one: Axes, other: Axes) -> Axes:
    """Multiply stacks of matrices; a zero row makes zeros."""
    pairs = zip(sequences_of(one[-1]), sequences_of(other[-2]), strict=False)
    both = [Sequence(zero=a.zero or b.zero) for a, b in pairs]
    if plain([one[-1]]) != plain([other[-2]]):
        if site.runs.size(one[-1]) != site.runs.size(other[-2]):
            raise Refusal(UNFIT)
        both = [Sequence()] * len(both)
    site.mixes([tuple(both)], "zero")
    lead = _broadcast([one[:-2], other[:-2]], any)
    return (*lead, marked(one[-2], low=False), marked(other[-1], low=False))


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
    site.mixes([last])
    return (*plain(rows), (site.integer("N", 1),))


def _reduced(site: Site, gone: set[int], flag: str) -> Axes:
    axes = site.tokens()
    site.mixes([axes[i] for i in gone], flag)
    keep = site.integer("keepdims", 1)
    return tuple(
        () if i in gone else axis
        for i, axis in enumerate(plain(axes))
        if keep or i not in gone
    )


def _reduce(flag: str) -> Rule:
    def rule(site: Site) -> Axes:
        rank, given = len(site.tokens()), site.axes(1)
        if not given and site.integer("noop_with_empty_axes", 0):
            return plain(site.tokens())
        return _reduced(site, axes_of(given or range(rank), rank), flag)

    return rule


def _arg_reduce(site: Site) -> Axes | Evaluated:
    """Take a position that an input chooses to be a real one; where it is not, none is cut."""
    choice = _choice(site) if site.axis(0) == 1 and site.exact else None
    if choice is None:
        return _reduced(site, {site.axis(0)}, "")
    site.flow.choices.append(choice)
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
        site.mixes([axis])
    return plain(axes)


def _normalization(site: Site) -> Axes:
    axes = _elementwise()(site)
    site.mixes(axes[site.axis(-1) :])
    return axes


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


def _concat(site: Site) -> Axes:
    parts, axis = site.operands(), site.axis(0)
    (after,) = site.sizes()
    if any(sequences_of(axes[axis]) for axes in parts):
        raise Refusal("changes the axis of the sequence")
    made = site.runs.axis(after[axis])
    joined = _broadcast([(*axes[:axis], (), *axes[axis + 1 :]) for axes in parts], all, all)
    return (*joined[:axis], made, *joined[axis + 1 :])


def _split(site: Site) -> list[Axes]:
    axes, axis = site.tokens(), site.axis(0)
    if sequences_of(axes[axis]):
        raise Refusal("changes the axis of the sequence")
    return [
        (*axes[:axis], site.runs.axis(sizes[axis]), *axes[axis + 1 :])
        for sizes in site.sizes()
    ]


def _slice(site: Site) -> Axes:
    axes, (after,) = list(site.tokens()), site.sizes()
    starts, _, along, steps = site.slices()
    for start, axis, step in zip(starts, along, steps, strict=True):
        axis = axis_of(axis, len(axes))
        in_front = start == known(0) and step == 1
        if not sequences_of(axes[axis]):
            axes[axis] = site.runs.axis(after[axis])
            if sequences_of(axes[axis]) and not in_front:
                raise Refusal(UNFIT)
        elif not in_front or after[axis] != site.runs.size(axes[axis]):
            if not in_front or set(after[axis]) != {1} or len(axes[axis]) != 1:
                raise Refusal(_UNSURE)
            axes[axis] = ()
    return tuple(axes)


def _gather(site: Site) -> Axes:
    axes, axis = site.tokens(), site.axis(0)
    if _picks_real(site, axes[axis : axis + 1], joined=False):
        places = tuple(map(site.runs.axis, site.flow.sizes(site.evaluated(1)) or ()))
        return (*axes[:axis], *places, *axes[axis + 1 :])
    if sequences_of(axes[axis]) and (len(axes[axis]) != 1 or not site.is_zero(1)):
        raise Refusal(_UNSURE)
    return (*axes[:axis], *site.tokens(1), *axes[axis + 1 :])


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
    return (*indices, site.runs.axis(after[-1]))


def _gather_elements(site: Site) -> Axes:
    data, indices, axis = plain(site.tokens(0)), plain(site.tokens(1)), site.axis(0)
    if sequences_of(data[axis]):
        raise Refusal(_UNSURE)
    if (*data[:axis], *data[axis + 1 :]) != (*indices[:axis], *indices[axis + 1 :]):
        raise Refusal(UNFIT)
    return indices


def _gather_nd(site: Site) -> Axes:
    data, indices = site.tokens(0), site.tokens(1)
    skipped = site.integer("batch_dims", 0)
    picked = skipped + site.runs.size(indices[-1])[0]
    if any(map(sequences_of, data[:picked])) and (
        skipped or not _picks_real(site, data[:picked], joined=True)
    ):
        raise Refusal(_UNSURE)
    return (*indices[:-1], *data[picked:])


def _shape(site: Site) -> Evaluated:
    axes = site.tokens()
    span = slice(site.integer("start", 0), site.integer("end", len(axes)))
    sizes = [site.runs.size(axis) for axis in axes][span]
    return Evaluated(
        tuple(np.array([n[run] for n in sizes], np.int64) for run in range(len(site.runs)))
    )


def _size(site: Site) -> Evaluated:
    sizes = site.runs.size(tuple(factor for axis in site.tokens() for factor in axis))
    return Evaluated(tuple(np.array(size, np.int64) for size in sizes))


def _rows(rule: Rule, operators: str) -> dict[str, Rule]:
    return dict.fromkeys(operators.split(), rule)


_STANDARD: dict[str, Rule] = {
    # Elementwise: what keeps padded positions 0, and far below the others.
    **_rows(lambda site: site.operands()[0], "Cast CastLike Dropout Identity"),
    **_rows(
        _elementwise(zero=all),
        "Abs Ceil Celu Elu Erf Floor Gelu HardSwish LeakyRelu Mish Relu Round Selu Sign Sin "
        "Softsign Sqrt Swish Tan Tanh",
    ),
    **_rows(
        _keeps_axes,
        "Acos Asin Atan BitwiseNot Clip Cos DequantizeLinear Exp HardSigmoid IsInf IsNaN Log "
        "Neg Not QuantizeLinear Reciprocal Sigmoid Softplus",
    ),
    **_rows(
        _elementwise(),
        "And BitwiseAnd BitwiseOr BitwiseXor Equal Greater GreaterOrEqual Less LessOrEqual "
        "Max Mean Min Mod Or PRelu Pow Sum Xor",
    ),
    "Add": _elementwise(zero=all, low=any),
    "Sub": _elementwise(zero=all, low=operator.itemgetter(0)),
    "Mul": _elementwise(zero=any),
    "Div": _elementwise(zero=operator.itemgetter(0)),
    "Where": _where,
    # Along axes: which flag leaves padding out.
    **_rows(_softmax, "LogSoftmax Softmax"),
    **_rows(_reduce("zero"), "ReduceL1 ReduceL2 ReduceSum ReduceSumSquare"),
    **_rows(_reduce("low"), "ReduceLogSumExp ReduceMax"),
    **_rows(_reduce(""), "ReduceLogSum ReduceMean ReduceMin ReduceProd"),
    **_rows(_arg_reduce, "ArgMax ArgMin"),
    **_rows(
        _normalization, "LayerNormalization RMSNormalization SimplifiedLayerNormalization"
    ),
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
    **_rows(_elementwise(), "BiasGelu FastGelu Gelu QuickGelu"),
    **_rows(_keeps_axes, "DequantizeLinear QuantizeLinear"),
    **_rows(_normalization, "SkipLayerNormalization SkipSimplifiedLayerNormalization"),
    "GatherBlockQuantized": _gather_block_quantized,
    "MatMulNBits": _matmul_nbits,
}
RULES: dict[tuple[str, str], Rule] = {
    **{("", op_type): rule for op_type, rule in _STANDARD.items()},
    **{(_MICROSOFT, op_type): rule for op_type, rule in _CONTRIBUTED.items()},
}
