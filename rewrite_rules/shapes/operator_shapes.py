# SPDX-License-Identifier: MIT
"""The shapes that operators give their outputs, as far as onnxruntime's kernels prove them.

onnx's shape inference is not a proof: it trusts annotations in the file, has one symbol for
sizes of several inputs, which onnxruntime lets differ, and knows no operator of onnxruntime's
own. Here, a shape follows from the inputs' shapes and the operator alone. What
is not listed has a shape of its own, equal to no other.

Where an output is said to have a shape, each run that gets past the node gives it that one, be
there dimensions of size 0 or not:

    Reshape(x[a, b], [a, c])        dimension 1 is another unknown: for c = 0, it is b
    Concat(x[a, 4], y[b, 4], [c, 4])   onnxruntime skips empty inputs, so that all others'
                                    dimensions have to be the same in proof
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import onnx_ir as ir

from rewrite_rules.graph.parameters import axes_of, axis_of, constant
from rewrite_rules.remarks import Refusal
from rewrite_rules.shapes.dimensions import EXACT, Dim, Dims, Shape, known, number
from rewrite_rules.shapes.node_facts import Site, is_open, sliced

_MICROSOFT = "com.microsoft"
# Beyond any size.
_BEYOND = 1 << 48
# Channels in a block of the NCHWc layout: 4, 8 or 16, by the processor.
_MAX_BLOCK = 16

# Operators whose first output has the shape of their first input. PRelu is not among them:
# onnxruntime broadcasts both ways.
_KEEPS = frozenset({
    "Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "BatchNormalization",
    "Bernoulli", "BitwiseNot", "Cast", "CastLike", "Ceil", "Celu", "Clip", "Cos", "Cosh",
    "CumSum", "DequantizeLinear", "Dropout", "DynamicQuantizeLinear", "Elu", "Erf", "Exp",
    "EyeLike", "Floor", "Gelu", "HardSigmoid", "HardSwish", "Hardmax",
    "Identity", "InstanceNormalization", "IsInf", "IsNaN", "LRN", "LayerNormalization",
    "LeakyRelu", "Log", "LogSoftmax", "LpNormalization", "MeanVarianceNormalization", "Mish",
    "Neg", "Not", "QuantizeLinear", "RMSNormalization", "RandomNormalLike",
    "RandomUniformLike", "Reciprocal", "Relu", "ReverseSequence", "RotaryEmbedding", "Round",
    "ScatterElements", "ScatterND", "Selu", "Shrink", "Sigmoid", "Sign",
    "SimplifiedLayerNormalization", "Sin", "Sinh", "Softmax", "Softplus", "Softsign", "Sqrt",
    "Swish", "Tan", "Tanh", "TensorScatter", "ThresholdedRelu", "Trilu",
})  # fmt: skip
_MICROSOFT_KEEPS = frozenset({
    "BiasGelu", "DequantizeLinear", "FastGelu", "Gelu", "QLinearLeakyRelu", "QLinearSigmoid",
    "QLinearSoftmax", "QuantizeLinear", "QuickGelu", "RotaryEmbedding",
})  # fmt: skip
BROADCASTS = frozenset({
    "Add", "And", "BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Div", "Equal",
    "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Mean", "Min", "Mod", "Mul",
    "Or", "PRelu", "Pow", "Sub", "Sum", "Where", "Xor",
})  # fmt: skip
# Operators whose output has the rank of their first input, whatever the others are. For
# reductions, that is with keepdims.
REDUCTIONS = frozenset({
    "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean",
    "ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare",
})  # fmt: skip
_KEEPS_RANK = frozenset({"Pad", "Slice", "Tile", *REDUCTIONS})


_Rule = Callable[[Site], Sequence[Shape | None]]


def output_shapes(site: Site) -> Sequence[Shape | None]:
    """Work out the shapes of a node's outputs, in order; None, or too few, where unknown."""
    op_type, domain = site.node.op_type, site.node.domain
    keeps = _KEEPS if domain == "" else _MICROSOFT_KEEPS if domain == _MICROSOFT else ()
    if op_type in keeps:
        shape = site.shape(0)
        others: dict[str, list[Shape]] = {
            "Dropout": [shape],
            "DynamicQuantizeLinear": [(), ()],
        }
        return [shape, *others.get(op_type, [])]
    if domain == "" and op_type in BROADCASTS:
        if site.opset < 7:  # the attributes broadcast and axis, which onnxruntime refuses
            return []
        inputs = range(len(site.node.inputs))
        return [site.unknowns.broadcast(site.shape(i) for i in inputs)]
    rule = _TABLES.get(domain, {}).get(op_type)
    try:
        return rule(site) if rule else []
    except Refusal:
        if op_type not in _KEEPS_RANK or not site.is_set("keepdims", 1):
            raise
        return [site.unknowns.fresh_dims(len(site.dims(0)))]


def _transpose(site: Site) -> Sequence[Shape]:
    dims = site.dims(0)
    perm = site.ints("perm")
    if perm is None:
        return [dims[::-1]]
    axes_of(perm, len(dims))
    return [tuple(dims[axis] for axis in perm)] if len(perm) == len(dims) else []


def _reshape(site: Site) -> Sequence[Shape]:
    wanted = site.numbers(1)
    source, unknowns = site.shape(0), site.unknowns
    before = source if isinstance(source, tuple) else None
    literal = site.is_set("allowzero")
    result: list[Dim | None] = []
    hole = None
    for i, size in enumerate(wanted):
        below = before[i] if before is not None and i < len(before) else None
        if size == (-1, ()):
            hole = i
            result.append(None)
        elif size == (0, ()) and not literal:
            result.append(below)
        elif size is None or literal or site.facts.nonempty or not size[1]:
            result.append(size)
        else:  # if this is 0, the size of the input stands here: it has to be 0, too
            zero = below is not None and (below[0] == 0 or set(size[1]) <= set(below[1]))
            result.append(size if zero else None)
    others = [size for i, size in enumerate(result) if i != hole and size is not None]
    if hole is not None and before is not None and len(others) == len(result) - 1:
        result[hole] = unknowns.quotient(unknowns.product(before), unknowns.product(others))
    return [tuple(unknowns.fresh_dim() if size is None else size for size in result)]


def _squeeze(site: Site) -> Sequence[Shape]:
    dims, axes = site.dims(0), site.axes(1)
    if not axes:  # an empty list, too, stands for all axes of size 1
        if any(dim[1] for dim in dims):
            return []
        return [tuple(dim for dim in dims if dim[0] != 1)]
    gone = axes_of(axes, len(dims))
    return [tuple(dim for i, dim in enumerate(dims) if i not in gone)]


def _unsqueeze(site: Site) -> Sequence[Shape]:
    dims, axes = site.dims(0), site.axes(1)
    if axes is None:
        return []
    rank = len(dims) + len(axes)
    new, old = axes_of(axes, rank), iter(dims)
    return [tuple(known(1) if i in new else next(old) for i in range(rank))]


def _flatten(site: Site) -> Sequence[Shape]:
    dims = site.dims(0)
    axis = site.integer("axis", 1)
    axis = axis if axis == len(dims) else axis_of(axis, len(dims))
    return [(site.unknowns.product(dims[:axis]), site.unknowns.product(dims[axis:]))]


def _concat(site: Site) -> Sequence[Shape]:
    inputs = [site.dims(i) for i in range(len(site.node.inputs))]
    rank = len(inputs[0])
    axis = axis_of(site.integer("axis", 1), rank)
    if any(len(dims) != rank for dims in inputs):
        return []
    result = []
    for i, sizes in enumerate(zip(*inputs, strict=True)):
        if i == axis:
            result.append(site.unknowns.sum(sizes))
        elif len(set(sizes)) == 1:
            result.append(sizes[0])
        else:  # the size of the first that is not empty
            site.unknowns.meet(*sizes)
            full = [size for size, d in zip(sizes, inputs, strict=True) if known(0) not in d]
            first = full[0] if full and site.facts.nonempty else None
            result.append(first or site.unknowns.remembered("Concat", i, *inputs))
    return [tuple(result)]


def _split(site: Site) -> Sequence[Shape]:
    dims, count = site.dims(0), len(site.node.outputs)
    axis = axis_of(site.integer("axis"), len(dims))
    sizes: Sequence[Dim | None]
    if (stated := site.ints("split")) is not None:  # of old opsets
        sizes = [known(size) for size in stated]
    elif site.has(1):
        sizes = site.numbers(1)
    elif dims[axis][0] % count == 0:
        sizes = [site.unknowns.quotient(dims[axis], known(count))] * count
    elif (size := number(dims[axis])) is not None:
        part = -(-size // count)
        sizes = [known(max(min(part, size - i * part), 0)) for i in range(count)]
    else:  # the last part may be smaller
        sizes = [site.unknowns.remembered("Split", dims[axis], count, i) for i in range(count)]
    if len(sizes) != count:
        return []
    return [
        (*dims[:axis], site.unknowns.fresh_dim() if s is None else s, *dims[axis + 1 :])
        for s in sizes
    ]


def _slice(site: Site) -> Sequence[Shape]:
    dims = site.dims(0)
    starts, ends, axes, steps = site.slices()
    axes_of(axes, len(dims))
    result = list(dims)
    for place, (start, end, axis, step) in enumerate(
        zip(starts, ends, axes, steps, strict=True)
    ):
        dim = dims[axis]
        first, last, size = number(start), number(end), number(dim)
        if size is not None and first is not None and last is not None:
            result[axis] = known(len(sliced(size, first, last, step)))
        elif step == 1 and first == 0 and (end == dim or _takes_all(last)):
            continue
        elif site.facts.nonempty and (first, last, step) == (0, 1, 1):
            result[axis] = known(1)
        else:
            bounds = site.element(1, place, start), site.element(2, place, end)
            result[axis] = site.unknowns.remembered("Slice", dim, *bounds, step)
    return [tuple(result)]


def _takes_all(end: int | None) -> bool:
    return end is not None and (end >= _BEYOND or is_open(end))


def _gather(site: Site) -> Sequence[Shape]:
    dims = site.dims(0)
    axis = axis_of(site.integer("axis"), len(dims))
    return [(*dims[:axis], *site.dims(1), *dims[axis + 1 :])]


def _gather_block_quantized(site: Site) -> Sequence[Shape]:
    dims = site.dims(0)
    axis = axis_of(site.integer("gather_axis"), len(dims))
    quantized = axis_of(site.integer("quantize_axis", 1), len(dims))
    rest = list(dims)
    tensor = constant(site.input(0))
    if tensor is None:
        return []
    if tensor.dtype is ir.DataType.UINT8:  # codes of less than a byte are packed
        packed = site.unknowns.product((dims[-1], known(8 // site.integer("bits", 4))))
        rest[-1] = packed if quantized == len(dims) - 1 else site.unknowns.fresh_dim()
    return [(*rest[:axis], *site.dims(1), *rest[axis + 1 :])] if axis != quantized else []


def _gather_nd(site: Site) -> Sequence[Shape]:
    dims, indices = site.dims(0), site.dims(1)
    depth = number(indices[-1])
    if depth is None:
        return []
    return [(*indices[:-1], *dims[site.integer("batch_dims") + depth :])]


def _pad(site: Site) -> Sequence[Shape]:
    dims = site.dims(0)
    pads = site.constants(1)
    named = site.constants(3) if site.has(3) else range(len(dims))
    axes = [axis_of(axis, len(dims)) for axis in named]
    if len(pads) != 2 * len(axes):
        return []
    result = list(dims)
    for axis, before, after in zip(axes, pads, pads[len(axes) :], strict=False):
        whole = _shifted(site, dims[axis]) if before + after == 1 else None
        if whole is not None:
            result[axis] = whole
        elif before + after:
            result[axis] = site.unknowns.sum((dims[axis], known(before + after)))
    return [tuple(result)]


def _shifted(site: Site, dim: Dim) -> Dim | None:
    """Return the size that one place was taken off by a Slice, at either end."""
    key = site.unknowns.key(dim[1][0]) if dim[0] == len(dim[1]) == 1 else ()
    match key:
        case ("Slice", whole, (first, ()), (last, ()), 1) if site.facts.nonempty:
            is_one = (first == 1 and _takes_all(last)) or (first, last) == (0, -1)
            return whole if is_one else None
    return None


def _tile(site: Site) -> Sequence[Shape]:
    dims, repeats = site.dims(0), site.numbers(1)
    if len(repeats) != len(dims):
        return []
    sizes = [
        site.unknowns.fresh_dim() if times is None else site.unknowns.product((dim, times))
        for dim, times in zip(dims, repeats, strict=True)
    ]
    return [tuple(sizes)]


def _sizes(site: Site, index: int) -> Dims:
    """The numbers of an input, as sizes."""
    return tuple(
        site.unknowns.remembered(site.element(index, place)) if size is None else size
        for place, size in enumerate(site.numbers(index))
    )


def _range(site: Site) -> Sequence[Shape]:
    integers = [site.facts.integers(site.input(i)) for i in range(3)]
    numbers = [i.numbers[0] if i is not None and i.numbers else None for i in integers]
    start, end, step = numbers
    if start is None or end is None or step is None:
        count = _float_count(site)
        return [site.unknowns.fresh_dims(1) if count is None else (count,)]
    if step == (1, ()) and (count := site.unknowns.difference(end, start)) is not None:
        return [(count,)]
    # The kernel counts in float64.
    exact = all(abs(size) <= EXACT and not unknowns for size, unknowns in (start, end, step))
    if exact and step[0]:
        return [(known(len(range(start[0], end[0], step[0]))),)]
    return [(site.unknowns.remembered("Range", start, end, step),)]


def _float_count(site: Site) -> Dim | None:
    """Return how many numbers ``Range(0.0, Cast(size), 1.0)`` has: it is off beyond 2**24."""
    start, step = (constant(site.input(i)) for i in (0, 2))
    cast, size = site.input(1).producer(), None
    if cast is not None and cast.op_type == "Cast" and cast.inputs[0] is not None:
        size = site.facts.integers(cast.inputs[0])
    if start is None or step is None or size is None or not size.known or len(size.known) != 1:
        return None
    if start.numpy().tolist() != 0 or step.numpy().tolist() != 1:
        return None
    return site.unknowns.remembered("floats", size.known[0])


def _reduce(site: Site) -> Sequence[Shape]:
    dims = site.dims(0)
    keep = site.is_set("keepdims", 1)
    if site.node.op_type.startswith("Arg"):
        return [_without(dims, {axis_of(site.integer("axis"), len(dims))}, keep)]
    axes = site.axes(1)
    if not axes and site.is_set("noop_with_empty_axes"):
        return [dims]
    return [_without(dims, axes_of(axes or range(len(dims)), len(dims)), keep)]


def _without(dims: Dims, gone: set[int], keep: bool) -> Dims:
    if keep:
        return tuple(known(1) if i in gone else dim for i, dim in enumerate(dims))
    return tuple(dim for i, dim in enumerate(dims) if i not in gone)


def _shape(site: Site) -> Sequence[Shape]:
    shape = site.shape(0)
    start, end = site.node.attributes.get("start"), site.node.attributes.get("end")
    if isinstance(shape, int):
        return [(site.unknowns.remembered("rank", shape, str(start), str(end)),)]
    span = slice(site.integer("start"), site.integer("end", len(shape)))
    return [(known(len(shape[span])),)]


def _product(site: Site, a: Dims, b: Dims) -> Sequence[Shape]:
    if not a or not b:
        return [()]
    site.unknowns.meet(a[-1], b[-2:][0])
    batch = site.unknowns.broadcast((a[:-2], b[:-2]))
    assert isinstance(batch, tuple)
    return [(*batch, *a[:-1][-1:], *(b[-1:] if len(b) > 1 else ()))]


def _einsum(site: Site) -> Sequence[Shape]:
    sides, arrow, result = site.text("equation", "").replace(" ", "").partition("->")
    terms, sizes = sides.split(","), dict[str, list[Dims]]()
    if not arrow or "." in sides or len(terms) != len(site.node.inputs):
        return []
    for index, term in enumerate(terms):
        for axis, dim in zip(term, site.dims(index), strict=True):
            sizes.setdefault(axis, []).append((dim,))
    if not sizes.keys() >= {*result}:
        return []
    for axis in sizes.keys() - {*result}:
        site.unknowns.meet(*(dim for (dim,) in sizes[axis]))
    made = [site.unknowns.broadcast(sizes[axis]) for axis in result]
    return [tuple(dim for shape in made if isinstance(shape, tuple) for dim in shape)]


def _matmul(other: int = 1) -> _Rule:
    return lambda site: _product(site, site.dims(0), site.dims(other))


def _fused_matmul(site: Site) -> Sequence[Shape]:
    a, b = site.dims(0), site.dims(1)
    if site.integer("transBatchA") or site.integer("transBatchB"):
        return []
    if len(a) < 2 or len(b) < 2:
        return []
    a = (*a[:-2], a[-1], a[-2]) if site.integer("transA") else a
    b = (*b[:-2], b[-1], b[-2]) if site.integer("transB") else b
    return _product(site, a, b)


def _attention(site: Site) -> Sequence[Shape]:
    batch, sequence, _ = site.dims(0)
    sizes = site.ints("qkv_hidden_sizes")
    third = site.unknowns.quotient(site.dims(1)[1], known(3))
    return [(batch, sequence, known(sizes[2]) if sizes else third)]


def _multi_head_attention(site: Site) -> Sequence[Shape]:
    batch, sequence, _ = site.dims(0)
    _, _, hidden = site.dims(2)
    return [(batch, sequence, hidden)]


def _standard_attention(site: Site) -> Sequence[Shape]:
    query, value = site.dims(0), site.dims(2)
    if len(query) == 4:
        return [(*query[:-1], value[-1])]
    heads, shared = site.integer("q_num_heads"), site.integer("kv_num_heads")
    width = site.unknowns.product((value[-1], known(heads)))
    return [(*query[:-1], site.unknowns.quotient(width, known(shared)))] if shared else []


def _embedded(site: Site) -> Sequence[Shape]:
    site.unknowns.broadcast(site.shape(i) for i in (0, 1, 7, 8) if site.has(i))
    made = (*site.dims(0), site.dims(2)[-1])
    return [made, site.dims(0)[:1], made]


def _skip_norm(site: Site) -> Sequence[Shape | None]:
    shape = site.shape(0)
    site.unknowns.broadcast((shape, site.shape(1)))
    return [shape, None, None, shape]


def _group_query_attention(site: Site) -> Sequence[Shape]:
    packed = not (site.has(1) and site.has(2))
    batch, sequence, _ = site.dims(0)
    return [(batch, sequence, site.unknowns.fresh_dim())] if packed else [site.shape(0)]


def _window(site: Site, dims: Dims, kernel: Sequence[int]) -> Dims:
    """Spatial sizes after a window has slid over them."""
    node, rank = site.node, len(kernel)
    strides = site.ints("strides") or (1,) * rank
    dilations = site.ints("dilations") or (1,) * rank
    pads = site.ints("pads") or (0,) * (2 * rank)
    auto_pad = site.text("auto_pad", "NOTSET")
    if len(dims) != rank + 2:
        return site.unknowns.fresh_dims(rank)
    attributes = sorted((name, str(a.value)) for name, a in node.attributes.items())
    key = (node.domain, node.op_type, tuple(attributes), tuple(kernel))
    result = []
    for i, dim in enumerate(dims[2:]):
        reach = dilations[i] * (kernel[i] - 1)
        size: Dim | None = None
        if auto_pad in ("SAME_UPPER", "SAME_LOWER") and dilations[i] == 1:
            if strides[i] == 1:
                size = dim
            elif not dim[1]:
                size = known(-(-dim[0] // strides[i]))
        elif auto_pad == "NOTSET" and not site.integer("ceil_mode"):
            change = pads[i] + pads[i + rank] - reach
            if strides[i] == 1 and change == 0:
                size = dim
            elif not dim[1] and dim[0] + change > 0:
                size = known((dim[0] + change - 1) // strides[i] + 1)
        result.append(site.unknowns.remembered(key, i, dim) if size is None else size)
    return tuple(result)


def _conv(site: Site, weight: int = 1) -> Sequence[Shape]:
    dims, kernel = site.dims(0), site.dims(weight)
    sizes = [dim[0] for dim in kernel[2:] if not dim[1]]
    if len(sizes) != len(kernel) - 2 or len(kernel) < 3:
        return [(dims[0], kernel[0], *site.unknowns.fresh_dims(len(dims) - 2))]
    return [(dims[0], kernel[0], *_window(site, dims, sizes))]


def _pool(site: Site) -> Sequence[Shape]:
    dims, kernel = site.dims(0), site.ints("kernel_shape")
    if kernel is None or len(dims) < 3:
        return []
    return [(*dims[:2], *_window(site, dims, kernel))] * 2


def _global_pool(site: Site) -> Sequence[Shape]:
    return [tuple(known(1) if i > 1 else dim for i, dim in enumerate(site.dims(0)))]


def _resize(site: Site) -> Sequence[Shape]:
    dims = site.dims(0)
    if site.node.attributes.keys() & {"axes", "keep_aspect_ratio_policy"}:
        return [site.unknowns.fresh_dims(len(dims))]
    if site.has(3):
        sizes = _sizes(site, 3)
        return [sizes] if len(sizes) == len(dims) else []
    tensor = constant(site.input(2))
    scales = () if tensor is None else tensor.numpy().astype(np.float32).tolist()
    if len(scales) != len(dims):
        return [site.unknowns.fresh_dims(len(dims))]
    return [tuple(_scaled(site, dim, scale) for dim, scale in zip(dims, scales, strict=True))]


def _scaled(site: Site, dim: Dim, scale: float) -> Dim:
    if scale == 1:
        return dim
    if dim[1] or not 0 < scale < _BEYOND:
        return site.unknowns.remembered("Resize", dim, scale)
    return known(int(np.float32(dim[0]) * np.float32(scale)))


def _recurrent(site: Site) -> Sequence[Shape]:
    sequence, batch, _ = site.dims(0)
    if site.integer("layout"):
        return []
    directions = known(2 if site.text("direction", "forward") == "bidirectional" else 1)
    hidden = known(site.integer("hidden_size"))
    last = (directions, batch, hidden)
    return [(sequence, directions, batch, hidden), last, last] if hidden[0] else []


def _reorder_input(site: Site) -> Sequence[Shape]:
    n, *rest = site.dims(0)
    channels = rest.pop(-1 if site.integer("channels_last") else 0)
    if channels[1] or channels[0] % _MAX_BLOCK:
        channels = site.unknowns.remembered("nchwc", channels)  # filled up to a block
    return [(n, channels, *rest)]


def _reorder_output(site: Site) -> Sequence[Shape]:
    n, _, *sizes = site.dims(0)
    channels = known(site.integer("channels"))
    last = site.integer("channels_last")
    return [(n, *sizes, channels) if last else (n, channels, *sizes)]


_STANDARD: dict[str, _Rule] = {
    **dict.fromkeys(("ArgMax", "ArgMin"), _reduce),
    "Attention": _standard_attention,
    **dict.fromkeys(("AveragePool", "MaxPool", "LpPool"), _pool),
    **dict.fromkeys(("GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool"), _global_pool),
    **dict.fromkeys(("GRU", "LSTM", "RNN"), _recurrent),
    **dict.fromkeys(("MatMul", "MatMulInteger"), _matmul()),
    **dict.fromkeys(REDUCTIONS, _reduce),
    "Concat": _concat,
    "ConstantOfShape": lambda site: [_sizes(site, 0)],
    "Conv": _conv,
    "ConvInteger": _conv,
    "Einsum": _einsum,
    "Expand": lambda site: [site.unknowns.broadcast((site.shape(0), _sizes(site, 1)))],
    "Flatten": _flatten,
    "Gather": _gather,
    "GatherElements": lambda site: [site.shape(1)],
    "GatherND": _gather_nd,
    "Gemm": _fused_matmul,
    "Pad": _pad,
    "QLinearConv": partial(_conv, weight=3),
    "QLinearMatMul": _matmul(3),
    "Range": _range,
    "Reshape": _reshape,
    "Resize": _resize,
    "Shape": _shape,
    "Size": lambda site: [()],
    "Slice": _slice,
    "Split": _split,
    "Squeeze": _squeeze,
    "Tile": _tile,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}
_CONTRIBUTED: dict[str, _Rule] = {
    **dict.fromkeys(("FusedGemm", "FusedMatMul", "TransposeMatMul"), _fused_matmul),
    **dict.fromkeys(
        ("QLinearAdd", "QLinearMul"),
        lambda site: [site.unknowns.broadcast((site.shape(0), site.shape(3)))],
    ),
    **dict.fromkeys(
        ("SkipLayerNormalization", "SkipSimplifiedLayerNormalization"), _skip_norm
    ),
    "Attention": _attention,
    "DynamicQuantizeMatMul": _matmul(),
    "EmbedLayerNormalization": _embedded,
    "FusedConv": _conv,
    "GatherBlockQuantized": _gather_block_quantized,
    "GroupQueryAttention": _group_query_attention,
    "MatMulIntegerToFloat": _matmul(),
    "MatMulNBits": lambda site: [(*site.dims(0)[:-1], known(site.integer("N")))],
    "MultiHeadAttention": _multi_head_attention,
}
# What onnxruntime makes of convolutions on the CPU: channels in blocks.
_BLOCKED: dict[str, _Rule] = {
    **dict.fromkeys(("AveragePool", "MaxPool"), _pool),
    **dict.fromkeys(("GlobalAveragePool", "GlobalMaxPool"), _global_pool),
    "Conv": _conv,
    "ReorderInput": _reorder_input,
    "ReorderOutput": _reorder_output,
}
_TABLES = {"": _STANDARD, _MICROSOFT: _CONTRIBUTED, "com.microsoft.nchwc": _BLOCKED}
