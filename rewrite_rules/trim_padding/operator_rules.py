# SPDX-License-Identifier: MIT
"""What operators do to tokens: work on each by itself, or mix them under a mask.

A rule returns what its node's outputs are, or refuses. An operator without a rule is refused
where it reads the sequence.
"""

from __future__ import annotations

__all__ = ["RULES"]

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from rewrite_rules.graph.attributes import axis_of
from rewrite_rules.graph.refusal import Refusal
from rewrite_rules.trim_padding.token_axes import (
    Axes,
    Axis,
    Sequence,
    Sizes,
    marked,
    sequences_of,
    split_axes,
)
from rewrite_rules.trim_padding.token_flow import (
    Evaluated,
    Rule,
    Site,
    Tokens,
    Value,
    has_sequence,
    stand_in,
)

_MICROSOFT = "com.microsoft"


def _exact(site: Site) -> bool:
    return all(site.tokens(i).exact for i in range(len(site.node.inputs)) if site.has(i))


# Every token by itself


def _merge_axis(
    parts: list[Axis], join_zero: Callable[..., bool], join_low: Callable[..., bool]
) -> Axis:
    """The axis that broadcasting makes; an operand without it has no flag of it."""
    longest = [part for part in parts if part]
    if not longest:
        return ()
    shapes = {marked(part, zero=False, low=False) for part in longest}
    if len(shapes) != 1:
        raise Refusal("has sizes that do not follow from the length")
    columns = zip(*longest, strict=True)
    result: list[int | str | Sequence] = []
    for column in columns:
        flags = [factor for factor in column if isinstance(factor, Sequence)]
        if not flags:
            result.append(column[0])
            continue
        result.append(
            Sequence(join_zero(f.zero for f in flags), join_low(f.low for f in flags))
        )
    return tuple(result)


def _broadcast(
    operands: list[Axes],
    join_zero: Callable[..., bool] = lambda flags: False,
    join_low: Callable[..., bool] = lambda flags: False,
) -> Axes:
    rank = max(map(len, operands))
    return tuple(
        _merge_axis(
            [axes[i - rank] for axes in operands if rank - i <= len(axes)], join_zero, join_low
        )
        for i in range(rank)
    )


def _joined(
    join_zero: Callable[..., bool] = lambda flags: False,
    join_low: Callable[..., bool] = lambda flags: False,
) -> Rule:
    """An elementwise operator.

    Args:
        join_zero: Whether the result is zero where some of the operands are; operands that
            lack the axis are not among them.
        join_low: The same for low values.
    """

    def rule(site: Site) -> list[Value]:
        operands = [site.axes(i) for i in range(len(site.node.inputs)) if site.has(i)]
        axes = _broadcast(operands, join_zero, join_low)
        return [Tokens(axes, _exact(site))] * len(site.node.outputs)

    return rule


def _all_present(site: Site, joined: Axes) -> Axes:
    """Clear zero flags along axes that one operand lacks: it is not zero there."""
    rank = len(joined)
    operands = [site.axes(i) for i in range(len(site.node.inputs)) if site.has(i)]
    result = []
    for i, axis in enumerate(joined):
        parts = [axes[i - rank] if rank - i <= len(axes) else () for axes in operands]
        result.append(axis if all(map(has_sequence, parts)) else marked(axis, zero=False))
    return tuple(result)


def _add(site: Site) -> list[Value]:
    axes = _all_present(site, _broadcast([site.axes(0), site.axes(1)], all, any))
    return [Tokens(axes, _exact(site))]


def _subtract(site: Site) -> list[Value]:
    first, second = site.axes(0), site.axes(1)
    plain = tuple(marked(axis, low=False) for axis in second)
    axes = _all_present(site, _broadcast([first, plain], all, any))
    return [Tokens(axes, _exact(site))]


def _multiply(site: Site) -> list[Value]:
    axes = _broadcast([site.axes(0), site.axes(1)], any)
    return [Tokens(axes, _exact(site))]


def _divide(site: Site) -> list[Value]:
    plain = tuple(marked(axis, zero=False, low=False) for axis in site.axes(1))
    return [Tokens(_broadcast([site.axes(0), plain], any), _exact(site))]


def _first_kept(site: Site) -> list[Value]:
    """Elementwise, and 0 stays 0 and low stays low."""
    return [dataclasses.replace(site.tokens(0), exact=_exact(site))] * len(site.node.outputs)


def _first_zero_kept(site: Site) -> list[Value]:
    axes = tuple(marked(axis, low=False) for axis in site.axes(0))
    return [Tokens(axes, _exact(site))] * len(site.node.outputs)


def _first_plain(site: Site) -> list[Value]:
    axes = tuple(marked(axis, zero=False, low=False) for axis in site.axes(0))
    return [Tokens(axes, _exact(site))] * len(site.node.outputs)


def _where(site: Site) -> list[Value]:
    """Where(condition, x, y): flags follow from the condition's numbers, if they are known."""
    axes = _broadcast([site.axes(0), site.axes(1), site.axes(2)])
    exact = _exact(site)
    condition = site.evaluated(0)
    if condition is None:
        return [Tokens(_zero_in_both(site, axes), exact)]
    zero = _chosen(site, condition, lambda one: one.zero, 1.0, 0.0)
    low = _chosen(site, condition, lambda one: one.low, 0.0, -np.inf)
    if zero is None or low is None:
        return [Tokens(axes, exact)]
    result = []
    for axis, with_zero, with_low in zip(axes, zero, low, strict=True):
        flags = zip(sequences_of(with_zero), sequences_of(with_low), strict=True)
        found = iter([Sequence(a.zero, b.low) for a, b in flags])
        result.append(tuple(next(found) if isinstance(f, Sequence) else f for f in axis))
    return [Tokens(tuple(result), exact)]


def _zero_in_both(site: Site, axes: Axes) -> Axes:
    """Mark axes along which both branches of a Where are zero at padded positions."""
    result = []
    for i, axis in enumerate(axes):
        zero = True
        for index in (1, 2):
            branch, value = site.axes(index), site.evaluated(index)
            place = i - len(axes) + len(branch)
            own = sequences_of(branch[place]) if place >= 0 else []
            everywhere = value is not None and _is_everywhere(value, 0)
            zero = zero and (everywhere or (bool(own) and all(one.zero for one in own)))
        result.append(marked(axis, zero=zero, low=False))
    return tuple(result)


def _is_everywhere(value: Evaluated, number: float) -> bool:
    return all((array == number).all() for array in value.arrays)


def _chosen(
    site: Site,
    condition: Evaluated,
    is_flagged: Callable[[Sequence], bool],
    ordinary: float,
    padded: float,
) -> Axes | None:
    """The axes of a Where with their flags, from numbers that stand in for tokens."""
    arrays = []
    for run in range(len(site.runs)):
        branches = []
        for index in (1, 2):
            value = site.evaluated(index)
            if value is not None:
                branches.append(value.arrays[run])
                continue
            made = stand_in(site.axes(index), site.runs, run, is_flagged, ordinary, padded)
            if made is None:
                return None
            branches.append(made)
        arrays.append(np.where(condition.arrays[run], *branches))
    return site.flow.compared(Evaluated(tuple(arrays)), "its choice").axes


# Under a mask


def _softmax(site: Site) -> list[Value]:
    axes = site.axes(0)
    first = site.axis(-1 if site.opset >= 13 else 1)
    last = first + 1 if site.opset >= 13 else len(axes)
    found = [s for axis in axes[first:last] for s in sequences_of(axis)]
    if not found:
        return [Tokens(tuple(marked(a, low=False, zero=False) for a in axes), _exact(site))]
    if not all(s.low for s in found):
        raise Refusal("mixes positions, and no mask leaves padding out")
    site.masked()
    is_log = site.node.op_type == "LogSoftmax"
    result = list(axes)
    for i, axis in enumerate(axes):
        inside = first <= i < last
        result[i] = marked(axis, zero=inside and not is_log, low=inside and is_log)
    return [Tokens(tuple(result), exact=False)]


def _contract(site: Site, one: Axis, other: Axis) -> bool:
    """Check the axes that a product sums over; return whether they hold the sequence."""
    plain = [marked(axis, zero=False, low=False) for axis in (one, other)]
    if plain[0] != plain[1] and site.runs.size(one) != site.runs.size(other):
        raise Refusal("has sizes that do not follow from the length")
    pairs = list(zip(sequences_of(one), sequences_of(other), strict=False))
    if not pairs:
        return False
    if plain[0] != plain[1] or not all(a.zero or b.zero for a, b in pairs):
        raise Refusal("mixes positions, and no mask leaves padding out")
    site.masked()
    return True


def _matmul(site: Site) -> list[Value]:
    first, second = site.axes(0), site.axes(1)
    one, other = first, second
    if len(one) == 1:
        one = ((), *one)
    if len(other) == 1:
        other = (*other, ())
    mixes = _contract(site, one[-1], other[-2])
    # A zero row makes zeros.
    lead = _broadcast([one[:-2], other[:-2]], any) if len(one) + len(other) > 4 else ()
    rows = () if len(first) == 1 else (marked(one[-2], low=False),)
    columns = () if len(second) == 1 else (marked(other[-1], low=False),)
    return [Tokens((*lead, *rows, *columns), _exact(site) and not mixes)]


def _gemm(site: Site) -> list[Value]:
    one, other = site.axes(0), site.axes(1)
    one = one[::-1] if site.integer("transA", 0) else one
    other = other[::-1] if site.integer("transB", 0) else other
    if len(one) != 2 or len(other) != 2:
        raise Refusal("has sizes that do not follow from the length")
    mixes = _contract(site, one[1], other[0])
    rows, columns = one[0], other[1]
    result: Axes = (marked(rows, low=False), marked(columns, low=False))
    if site.has(2):
        result = _broadcast([result, site.axes(2)])
    return [Tokens(result, _exact(site) and not mixes)]


def _matmul_nbits(site: Site) -> list[Value]:
    *rows, last = site.axes(0)
    if has_sequence(last):
        raise Refusal("mixes positions, and no mask leaves padding out")
    plain = tuple(marked(axis, low=False, zero=False) for axis in rows)
    return [Tokens((*plain, (site.integer("N", 1),)), site.tokens(0).exact)]


def _reduce(site: Site) -> list[Value]:
    axes = site.axes(0)
    given = site.constants(1, "axes")
    if not given:
        if site.integer("noop_with_empty_axes", 0):
            return _first_plain(site)
        given = tuple(range(len(axes)))
    gone = {axis_of(axis, len(axes)) for axis in given}
    flags = [one for i in gone for one in sequences_of(axes[i])]
    mixes = bool(flags)
    op_type = site.node.op_type
    if mixes:
        by_low = op_type in ("ReduceMax", "ReduceLogSumExp")
        by_zero = op_type in ("ReduceSum", "ReduceL1", "ReduceL2", "ReduceSumSquare")
        if by_low and not all(one.low for one in flags):
            raise Refusal("mixes positions, and no mask leaves padding out")
        if not by_low and not by_zero:
            raise Refusal("mixes positions, and no mask leaves padding out")
        if by_zero and not all(one.zero for one in flags):
            raise Refusal("mixes positions, and no mask leaves padding out")
        site.masked()
    keep = site.integer("keepdims", 1)
    result = [
        () if i in gone else marked(axis, zero=False, low=False)
        for i, axis in enumerate(axes)
        if keep or i not in gone
    ]
    return [Tokens(tuple(result), site.tokens(0).exact and not mixes)]


def _cumulative_sum(site: Site) -> list[Value]:
    given = site.constants(1)
    axes = site.axes(0)
    axis = axis_of(given[0] if given else 0, len(axes))
    in_order = not site.integer("reverse", 0) and len(axes[axis]) == 1
    if has_sequence(axes[axis]) and not (in_order and site.tokens(0).exact):
        raise Refusal("mixes positions, and no mask leaves padding out")
    return _first_plain(site)


def _normalization(site: Site) -> list[Value]:
    axes = site.axes(0)
    if any(map(has_sequence, axes[site.axis(-1) :])):
        raise Refusal("mixes positions, and no mask leaves padding out")
    plain = tuple(marked(axis, zero=False, low=False) for axis in axes)
    return [Tokens(plain, _exact(site))] * len(site.node.outputs)


def _skip_normalization(site: Site) -> list[Value]:
    axes = _broadcast([site.axes(0), site.axes(1)])
    if has_sequence(axes[-1]):
        raise Refusal("mixes positions, and no mask leaves padding out")
    return [Tokens(axes, _exact(site))] * len(site.node.outputs)


def _arg_reduce(site: Site) -> list[Value]:
    axes = site.axes(0)
    axis = site.axis(0)
    if has_sequence(axes[axis]):
        raise Refusal("mixes positions, and no mask leaves padding out")
    rest = list(axes)
    rest[axis : axis + 1] = [()] if site.integer("keepdims", 1) else []
    plain = tuple(marked(axis, zero=False, low=False) for axis in rest)
    return [Tokens(plain, site.tokens(0).exact)]


# Moving tokens


def _transpose(site: Site) -> list[Value]:
    axes = site.axes(0)
    attribute = site.node.attributes.get("perm")
    perm = list(range(len(axes)))[::-1] if attribute is None else list(attribute.as_ints())
    if sorted(perm) != list(range(len(axes))):
        raise Refusal("has sizes that do not follow from the length")
    return [Tokens(tuple(axes[i] for i in perm), site.tokens(0).exact)]


def _reshape(site: Site) -> list[Value]:
    axes = site.axes(0)
    wanted = site.numbers(1, "shape")
    if len({len(numbers) for numbers in wanted}) != 1:
        raise Refusal("has sizes that do not follow from the length")
    literal = bool(site.integer("allowzero", 0))
    shapes = []
    for run, numbers in enumerate(wanted):
        before = [site.runs.size(axis)[run] for axis in axes]
        shape = [
            before[i] if n == 0 and not literal and i < len(before) else n
            for i, n in enumerate(numbers)
        ]
        if shape.count(-1) == 1:
            rest = math.prod(n for n in shape if n != -1)
            if not rest or math.prod(before) % rest:
                raise Refusal("has sizes that do not follow from the length")
            shape[shape.index(-1)] = math.prod(before) // rest
        if math.prod(shape) != math.prod(before):
            raise Refusal("has sizes that do not follow from the length")
        shapes.append(shape)
    targets: list[Sizes] = list(zip(*shapes, strict=True))
    return [Tokens(split_axes(axes, targets, site.runs), site.tokens(0).exact)]


def _flatten(site: Site) -> list[Value]:
    axes = site.axes(0)
    axis = site.integer("axis", 1)
    axis = axis if axis == len(axes) else axis_of(axis, len(axes))
    parts = (axes[:axis], axes[axis:])
    joined = tuple(tuple(f for a in part for f in a) for part in parts)
    return [Tokens(joined, site.tokens(0).exact)]


def _squeeze(site: Site) -> list[Value]:
    axes, given = site.axes(0), site.constants(1, "axes")
    if given is None:
        if any(has_sequence(axis) for axis in axes):
            raise Refusal("changes the axis of the sequence")
        gone = {i for i, axis in enumerate(axes) if set(site.runs.size(axis)) == {1}}
    else:
        gone = {axis_of(axis, len(axes)) for axis in given}
    if any(axes[i] for i in gone):
        raise Refusal("has sizes that do not follow from the length")
    kept = tuple(axis for i, axis in enumerate(axes) if i not in gone)
    return [Tokens(kept, site.tokens(0).exact)]


def _unsqueeze(site: Site) -> list[Value]:
    axes, given = site.axes(0), site.constants(1, "axes") or ()
    rank = len(axes) + len(given)
    new, old = {axis_of(axis, rank) for axis in given}, iter(axes)
    made = tuple(() if i in new else next(old) for i in range(rank))
    return [Tokens(made, site.tokens(0).exact)]


def _expand(site: Site) -> list[Value]:
    axes, wanted = site.axes(0), site.numbers(1)
    if len({len(numbers) for numbers in wanted}) != 1:
        raise Refusal("has sizes that do not follow from the length")
    targets = list(zip(*wanted, strict=True))
    rank = max(len(axes), len(targets))
    result = []
    for i in range(rank):
        axis = axes[i - rank] if rank - i <= len(axes) else ()
        target = targets[i - rank] if rank - i <= len(targets) else (1,) * len(site.runs)
        if axis:
            fits = zip(target, site.runs.size(axis), strict=True)
            if not all(size in (1, own) for size, own in fits):
                raise Refusal("has sizes that do not follow from the length")
            result.append(axis)
            continue
        made = site.runs.axis(target)
        if made is None:
            raise Refusal("has sizes that do not follow from the length")
        result.append(made)
    return [Tokens(tuple(result), site.tokens(0).exact)]


def _tile(site: Site) -> list[Value]:
    result = []
    times = list(zip(*site.numbers(1), strict=True))
    for axis, repeats in zip(site.axes(0), times, strict=True):
        if set(repeats) == {1}:
            result.append(axis)
            continue
        made = site.runs.axis(repeats)
        if made is None or has_sequence(axis):
            raise Refusal("changes the axis of the sequence")
        result.append((*made, *axis))
    return [Tokens(tuple(result), site.tokens(0).exact)]


def _concat(site: Site) -> list[Value]:
    parts = [site.axes(i) for i in range(len(site.node.inputs))]
    rank = len(parts[0])
    axis = axis_of(site.integer("axis", 0), rank)
    if any(len(axes) != rank for axes in parts):
        raise Refusal("has sizes that do not follow from the length")
    if any(has_sequence(axes[axis]) for axes in parts):
        raise Refusal("changes the axis of the sequence")
    total = [
        sum(sizes) for sizes in zip(*(site.runs.size(a[axis]) for a in parts), strict=True)
    ]
    made = site.runs.axis(tuple(total))
    if made is None:
        raise Refusal("has sizes that do not follow from the length")
    result = [_merge_axis([axes[i] for axes in parts], all, all) for i in range(rank)]
    result[axis] = made
    return [Tokens(tuple(result), _exact(site))]


def _split(site: Site) -> list[Value]:
    axes, axis, count = site.axes(0), site.axis(0), len(site.node.outputs)
    if has_sequence(axes[axis]):
        raise Refusal("changes the axis of the sequence")
    size = site.runs.size(axes[axis])[0]
    sizes = site.constants(1, "split") or [
        min(-(-size // count), size - i * -(-size // count)) for i in range(count)
    ]
    return [
        Tokens((*axes[:axis], (n,) if n != 1 else (), *axes[axis + 1 :]), site.tokens(0).exact)
        for n in sizes
    ]


def _slice(site: Site) -> list[Value]:
    axes = list(site.axes(0))
    starts, ends = site.numbers(1, "starts"), site.numbers(2, "ends")
    along = site.constants(3, "axes") or tuple(range(len(starts[0])))
    steps = site.constants(4) if site.has(4) else None
    for i, axis in enumerate(along):
        axis = axis_of(axis, len(axes))
        step = 1 if steps is None else steps[i]
        before = site.runs.size(axes[axis])
        ranges = [
            slice(start[i], end[i], step).indices(size)
            for start, end, size in zip(starts, ends, before, strict=True)
        ]
        sizes = tuple(len(range(*each)) for each in ranges)
        if has_sequence(axes[axis]):
            if all(each == (0, n, 1) for each, n in zip(ranges, before, strict=True)):
                continue
            if any(each[:2] != (0, 1) for each in ranges) or len(axes[axis]) != 1:
                raise Refusal(
                    "takes positions that may be padding: only the first is sure to be real"
                )
            axes[axis] = ()
            continue
        made = site.runs.axis(sizes)
        if made is None or (has_sequence(made) and any(e[0] or e[2] != 1 for e in ranges)):
            raise Refusal("has sizes that do not follow from the length")
        axes[axis] = made
    return [Tokens(tuple(axes), site.tokens(0).exact)]


def _gather(site: Site) -> list[Value]:
    axes = site.axes(0)
    axis = site.axis(0)
    return [_gathered(site, axes, axis)]


def _gathered(site: Site, axes: Axes, axis: int) -> Tokens:
    if has_sequence(axes[axis]):
        numbers = site.evaluated(1)
        if numbers is None or len(axes[axis]) != 1 or not _is_everywhere(numbers, 0):
            raise Refusal(
                "takes positions that may be padding: only the first is sure to be real"
            )
        shape = [numbers.arrays[0].shape]
        indices: Axes = tuple((n,) if n != 1 else () for n in shape[0])
    else:
        indices = site.axes(1)
        _limit_index(site, axes[axis])
    return Tokens((*axes[:axis], *indices, *axes[axis + 1 :]), _exact(site))


def _limit_index(site: Site, axis: Axis) -> None:
    """Take down how many rows a table has that an input of the model indexes."""
    value = site.input(1)
    while (node := value.producer()) is not None and node.op_type in ("Cast", "Identity"):
        source = node.inputs[0]
        if source is None:
            return
        value = source
    if value.is_graph_input():
        limit = site.runs.size(axis)[0]
        known = site.flow.index_limits.get(value, limit)
        site.flow.index_limits[value] = min(limit, known)


def _gather_block_quantized(site: Site) -> list[Value]:
    shape = site.node.outputs[0].shape
    if shape is None or not isinstance(shape[-1], int):
        raise Refusal("has sizes that do not follow from the length")
    return [Tokens((*site.axes(1), (shape[-1],)), _exact(site))]


def _gather_elements(site: Site) -> list[Value]:
    data, indices = site.axes(0), site.axes(1)
    axis = site.axis(0)
    if has_sequence(data[axis]):
        raise Refusal("takes positions that may be padding: only the first is sure to be real")
    rest = zip(data, indices, strict=True)
    for i, (own, other) in enumerate(rest):
        if i != axis and marked(own, zero=False, low=False) != marked(
            other, zero=False, low=False
        ):
            raise Refusal("has sizes that do not follow from the length")
    plain = tuple(marked(a, zero=False, low=False) for a in indices)
    return [Tokens(plain, _exact(site))]


def _gather_nd(site: Site) -> list[Value]:
    data, indices = site.axes(0), site.axes(1)
    depth = site.runs.size(indices[-1])[0]
    batch_dims = site.integer("batch_dims", 0)
    if any(map(has_sequence, data[: batch_dims + depth])):
        raise Refusal("takes positions that may be padding: only the first is sure to be real")
    return [Tokens((*indices[:-1], *data[batch_dims + depth :]), _exact(site))]


def _shape(site: Site) -> list[Value]:
    sizes = list(zip(*map(site.runs.size, site.axes(0)), strict=True)) or [()] * len(site.runs)
    start, end = site.integer("start", 0), site.integer("end", len(site.axes(0)))
    return [Evaluated(tuple(np.array(each[start:end], np.int64) for each in sizes))]


def _size(site: Site) -> list[Value]:
    sizes = zip(*map(site.runs.size, site.axes(0)), strict=True)
    return [Evaluated(tuple(np.array(math.prod(each), np.int64) for each in sizes))]


_ZERO_KEPT = (
    *("Abs", "Ceil", "Celu", "Elu", "Erf", "Floor", "Gelu", "HardSwish", "LeakyRelu", "Mish"),
    *("Relu", "Round", "Selu", "Sign", "Sin", "Softsign", "Sqrt", "Swish", "Tan", "Tanh"),
)
_PLAIN = (
    *("Acos", "Asin", "Atan", "Cos", "Exp", "HardSigmoid", "IsInf", "IsNaN", "Log", "Neg"),
    *("Not", "Reciprocal", "Sigmoid", "Softplus", "Clip", "BitwiseNot", "QuantizeLinear"),
    *("DequantizeLinear",),
)
_NORMALIZATIONS = ("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization")
_REDUCTIONS = (
    *("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean"),
    *("ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare"),
)
_BROADCASTS = (
    *("And", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Equal", "Greater", "GreaterOrEqual"),
    *("Less", "LessOrEqual", "Max", "Mean", "Min", "Mod", "Or", "PRelu", "Pow", "Sum", "Xor"),
)
_STANDARD: dict[str, Rule] = {
    **dict.fromkeys(("Cast", "CastLike", "Identity", "Dropout"), _first_kept),
    **dict.fromkeys(_ZERO_KEPT, _first_zero_kept),
    **dict.fromkeys(_PLAIN, _first_plain),
    **dict.fromkeys(_BROADCASTS, _joined()),
    **dict.fromkeys(_NORMALIZATIONS, _normalization),
    **dict.fromkeys(_REDUCTIONS, _reduce),
    **dict.fromkeys(("ArgMax", "ArgMin"), _arg_reduce),
    **dict.fromkeys(("LogSoftmax", "Softmax"), _softmax),
    "Add": _add,
    "Concat": _concat,
    "CumSum": _cumulative_sum,
    "Div": _divide,
    "Expand": _expand,
    "Flatten": _flatten,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "Gemm": _gemm,
    "MatMul": _matmul,
    "Mul": _multiply,
    "Reshape": _reshape,
    "Shape": _shape,
    "Size": _size,
    "Slice": _slice,
    "Split": _split,
    "Squeeze": _squeeze,
    "Sub": _subtract,
    "Tile": _tile,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
    "Where": _where,
}
_CONTRIBUTED: dict[str, Rule] = {
    **dict.fromkeys(("BiasGelu", "FastGelu", "Gelu", "QuickGelu"), _joined()),
    **dict.fromkeys(
        ("SkipLayerNormalization", "SkipSimplifiedLayerNormalization"), _skip_normalization
    ),
    "DequantizeLinear": _first_plain,
    "GatherBlockQuantized": _gather_block_quantized,
    "MatMulNBits": _matmul_nbits,
    "QuantizeLinear": _first_plain,
}
RULES: dict[tuple[str, str], Rule] = {
    **{("", op_type): rule for op_type, rule in _STANDARD.items()},
    **{(_MICROSOFT, op_type): rule for op_type, rule in _CONTRIBUTED.items()},
}
