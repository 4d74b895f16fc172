# SPDX-License-Identifier: MIT
"""What is proved of shapes, held against what onnxruntime computes, operator by operator."""

import re
from collections.abc import Mapping

import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.passes.common
import pytest
from builders.proofs import assert_proved
from builders.same_numbers import session
from builders.text_models import text_model

from rewrite_rules.shapes.proved_shapes import ProvedShapes, unify_dimension_names

# Nodes over x[a, b, 4], y[4, 4] and c[a, 3, b + 4]; indented ones belong to those above.
NODES = """
h = Transpose (x)
h = Transpose <perm = [2, 0, 1]> (x)
h = Reshape (x, back)
    i = Reshape (x, heads)
h = Reshape (x, minus)
    s = Shape (x)
    i = Reshape (h, s)
h = Unsqueeze (x, pair)
    i = Squeeze (h, pair)
h = Flatten (x)
    i = Flatten <axis = 3> (x)
    j = Flatten <axis = -1> (x)
h = Concat <axis = 1> (x, x)
    i = Concat <axis = -1> (x, h2)
    h3 = Neg (i)
h = Concat <axis = 0> (y, y)
h, i = Split <axis = 2> (x, halves)
h, i = Split <axis = 2, num_outputs = 2> (x)
    t = Concat <axis = 2> (x, x)
    u, v, w = Split <axis = 2, num_outputs = 3> (t)
h = Slice (x, zero, two)
    i = Slice (x, axis, big, axis)
    j = Slice (x, zero, big)
h = Slice (x, minus, low, two, minus)
    i = Slice (x, minus, low, axis, minus)
h = Slice (x, low, big, two, two)
    i = Slice (x, low, big, two, minus)
h = Gather <axis = 2> (x, pair)
    i = Gather <axis = -1> (x, depth0)
n = Sub (x, x)
    w = Cast <to = 7> (n)
    h = GatherElements <axis = 1> (x, w)
h = GatherND (y, places)
    i = ScatterND (y, places, h)
h = Pad (x, pads)
    i = Pad (x, two2, one, axis)
h = Tile (x, copies)
s = Shape (x)
    h = Expand (one, s)
    i = ConstantOfShape (s)
    j = Expand (x, ones)
h = ReduceSum (x, axis)
    i = ReduceSum <keepdims = 0> (x, pair)
    j = ReduceMean (x)
h = ReduceSum <noop_with_empty_axes = 1> (x)
    i = ReduceMax <keepdims = 0> (x)
h = ArgMax <axis = 1> (x)
    i = ArgMin <axis = -1, keepdims = 0> (x)
h, i = TopK (x, two)
w = Cast <to = 7> (x)
    h = OneHot (w, depth, values)
    i = OneHot <axis = 0> (w, depth, values)
h = NonZero (x)
h = MatMul (x, wide)
    i = MatMul (x, four)
    j = MatMul (four, wide)
t = Transpose <perm = [0, 2, 1]> (x)
    h = MatMul (x, t)
    i = Softmax (h)
h = Gemm (y, wide)
    i = Gemm <transA = 1> (y, y)
    j = Gemm <transB = 1> (y, y)
h = MaxPool <kernel_shape = [2], strides = [2]> (x)
h = AveragePool <kernel_shape = [3], auto_pad = "SAME_UPPER"> (x)
h = MaxPool <kernel_shape = [3], strides = [2], ceil_mode = 1> (x)
    i = GlobalMaxPool (x)
h = AveragePool <kernel_shape = [2], strides = [2], auto_pad = "SAME_LOWER"> (x)
h = Conv <pads = [1, 1], group = 1> (c, k)
    i = ConvTranspose <strides = [2]> (h, k)
h = Conv <dilations = [2], auto_pad = "VALID"> (c, k)
    i = Conv <strides = [2]> (c, k)
u = Unsqueeze (x, zero)
    h = DepthToSpace <blocksize = 1> (u)
    i = SpaceToDepth <blocksize = 1> (h)
s = Shape (x)
    h = Resize <mode = "nearest"> (x, , , s)
    i = Resize (x, , f)
h, i = GRU <hidden_size = 4, direction = "bidirectional"> (x, g3, g3)
s = Shape (x)
    n = ReduceProd <keepdims = 0> (s)
    h = Range (n0, n, n1)
s = Shape (x)
    a, b2, c2 = Split <num_outputs = 3> (s)
    z = Concat <axis = 0> (b2, two)
s = Shape (x)
    a = Gather (s, zero)
    b2 = Gather (s, axis)
    n = Mul (a, b2)
    m = Concat <axis = 0> (n, minus)
    h = Reshape (x, m)
    p = Add (a, b2)
    d = Div (n, axis)
    t = Slice (s, minus, low, zero, minus)
    q = Sub (a, b2)
    v = Squeeze (a)
s = Shape (x)
    m = ConstantOfShape <value = int64[1] {-1}> (three)
    e = Equal (s, m)
    t = Where (e, ones, s)
    h = Expand (one, t)
    n = Mul (m, ones)
    q = Equal (pair, n2)
    w = Where (q, seven, n2)
v = Concat <axis = 0> (zero, two, pair)
    r = Reshape (v, square)
    b2 = Slice (r, minus, low, zero, minus)
    t = Transpose <perm = [1, 0]> (b2)
    p = Reshape (t, minus)
    h = Pad (y, p)
h = Resize <mode = "nearest"> (x, , scales3)
    i = ConvTranspose <strides = [2], pads = [1, 0], output_padding = [1]> (c, k)
h = com.microsoft.FusedMatMul <transB = 1> (x, x)
    i = com.microsoft.FusedMatMul <transA = 1> (y, y)
h, m = com.microsoft.EmbedLayerNormalization (ids, , word, place, , g4, g4)
    i, s2, j, s = com.microsoft.SkipLayerNormalization (x, x, four, four)
h = com.microsoft.Attention <num_heads = 2> (x, qkv, bias)
h = com.microsoft.MultiHeadAttention <num_heads = 2> (x, x, x)
v = Concat <axis = 2> (x, x)
    w = Concat <axis = 2> (v, v)
    h, p, q = com.microsoft.GroupQueryAttention <num_heads = 2, kv_num_heads = 1> (w, v, v, ,
    , lengths, longest)
h = com.microsoft.MatMulNBits <K = 16, N = 6, bits = 4, block_size = 16> (z16, codes,
    scales)
h = com.microsoft.GatherBlockQuantized <block_size = 16, quantize_axis = 1> (table, pair,
    rows)
u = Unsqueeze (z16, zero)
    h = com.microsoft.nchwc.ReorderInput <channels_last = 1> (u)
    i = com.microsoft.nchwc.ReorderOutput <channels = 16> (h)
    j = com.microsoft.nchwc.ReorderOutput <channels = 16, channels_last = 1> (h)
w = QuantizeLinear (x, one, point)
    h = com.microsoft.QLinearAdd (w, one, point, w, one, point, one, point)
    i = com.microsoft.QLinearSigmoid (w, one, point, one, point)
    j = MatMulInteger (w, q8)
"""
F = np.float32
CONSTANTS = {
    "one": F(1), "four": F([1, 2, 3, 4]), "values": F([0, 1]), "wide": np.ones((4, 6), F),
    "bias": np.zeros(12, F), "scales": np.ones((6, 1), F), "rows": F([[1], [2], [3]]),
    "scales3": F([1, 2, 1.5]), "h2": np.ones((2, 3, 1), F), "k": np.ones((3, 3, 3), F),
    "f": F([1, 2, 1.5]), "g3": np.ones((2, 12, 4), F), "word": np.ones((5, 4), F),
    "place": np.ones((5, 4), F), "g4": np.ones(4, F), "qkv": np.ones((4, 12), F),
    "z16": np.ones((2, 3, 16), F),
    "zero": np.array([0]), "two": np.array([2]), "minus": np.array([-1]),
    "axis": np.array([1]), "depth": np.array(5), "big": np.array([(1 << 63) - 1]),
    "low": np.array([1 - (1 << 63)]), "copies": np.array([2, 1, 3]),
    "back": np.array([0, -1, 2]), "heads": np.array([0, 0, 2, 2]),
    "pads": np.array([0, 1, 0, 0, 2, 0]), "places": np.array([[0], [1]]),
    "pair": np.array([1, -1]), "ones": np.array([1, 1, 1]), "three": np.array([3]),
    "n2": np.array([1, 5]), "seven": np.array([7, 7]), "square": np.array([2, 2]),
    "halves": np.array([3, 1]), "depth0": np.array(0), "two2": np.array([1, 1]),
    "n0": np.array(0), "n1": np.array(1),
    "ids": np.ones((2, 3), np.int32), "lengths": np.array([2, 2], np.int32),
    "longest": np.array(3, np.int32),
    "codes": np.ones((6, 1, 8), np.uint8), "table": np.ones((3, 8), np.uint8),
    "point": np.uint8(128), "q8": np.ones((4, 5), np.uint8),
}  # fmt: skip


def check(model: ir.Model, feeds: Mapping[str, np.ndarray]) -> int:
    """Run with all values as outputs; return of how many the rank is known."""
    facts = ProvedShapes(model)
    values = [value for node in model.graph for value in node.outputs if value.name]
    proto = ir.to_proto(model)
    del proto.graph.output[:]
    proto.graph.output.extend(onnx.ValueInfoProto(name=value.name) for value in values)
    found = session(proto).run(None, dict(feeds))
    arrays = dict(zip([v.name for v in values], found, strict=True)) | dict(feeds)
    assert_proved(facts, (*model.graph.inputs, *values), arrays)
    return sum(isinstance(facts.shape(value), tuple) for value in values)


@pytest.mark.parametrize("nodes", re.split(r"\n(?=\S)", NODES.strip()))
def test_proofs_hold(nodes):
    used = set(re.findall(r"\w+", nodes)) & set(CONSTANTS)
    inputs = {"x": (1, ["a", "b", 4]), "y": (1, ["e", 4]), "c": (1, ["c0", "c1", "c2"])}
    constants = {name: CONSTANTS[name] for name in used}
    model = ir.from_proto(text_model(nodes, constants, inputs, ["h"]))
    rng = np.random.default_rng(0)
    # Some constants are made for one size.
    for rows, columns in ((2, 3), *([] if used & {"h2", "lengths"} else [(3, 5)])):
        feeds = {
            "x": rng.uniform(0, 2, (rows, columns, 4)).astype(np.float32),
            "y": np.ones((4, 4), np.float32),
            "c": np.ones((rows, 3, columns + 4), np.float32),
        }
        assert check(model, feeds) > 0


@pytest.mark.parametrize("held", [0, 15, 17])
def test_a_damaged_constant_proves_nothing(held):
    data = onnx.TensorProto(
        name="back", data_type=onnx.TensorProto.INT64, dims=[2], raw_data=bytes(held)
    )
    model = ir.from_proto(text_model("y = Reshape (x, back)", [data], {"x": (1, ["a", 4])}))
    facts = ProvedShapes(model)
    assert facts.integers(model.graph.initializers["back"]) is None
    assert all(dim[1] for dim in facts.shape(model.graph.outputs[0]))  # of unknown sizes


# Unknown dimensions that are another one under a new name.


def unified(text: str) -> tuple[ir.Model, dict[str, list[int | str | None]]]:
    """Shapes of all values after inference and unification, by name."""
    model = ir.from_onnx_text(f'<ir_version: 10, opset_import: ["": 21]> g {text}')
    onnx_ir.passes.common.ShapeInferencePass(check_type=False, strict_mode=False)(model)
    unify_dimension_names(model)
    return model, {
        value.name: [dim if isinstance(dim, int) else dim.value for dim in value.shape]
        for node in model.graph
        for value in node.outputs
        if value.shape is not None
    }


UNIFIED = {
    "reshape keeps the number of elements": (
        """(float[b, s, 576] x) => (float[o] y)
        <int64[4] heads = {0, -1, 9, 64}, int64[1] flat = {-1}> {
            split = Reshape (x, heads)  y = Reshape (split, flat) }""",
        {"split": ["b", "s", 9, 64]},
    ),
    "equal sizes broadcast to themselves": (
        """(float[b, s, 8] x) => (float[o, p, r] y) <int64[3] shape = {0, -1, 8}> {
            other = Reshape (x, shape)  sum = Add (x, other)  y = Relu (sum) }""",
        {"sum": ["b", "s", 8]},
    ),
    "outputs are called as the user calls them": (
        """(float[b, s] x) => (float[rows, columns] y) <int64[2] shape = {0, -1}> {
            y = Reshape (x, shape) }""",
        {"y": ["rows", "columns"]},
    ),
    "concat adds equal sizes up": (
        """(float[s, 4] x) => (float[o, p] y) <int64[2] back = {-1, 8}> {
            twice = Concat <axis = 0> (x, x)  halved = Reshape (twice, back)
            y = Relu (halved) }""",
        {"halved": ["s", 8]},
    ),
}


@pytest.mark.parametrize("name", UNIFIED)
def test_dimensions_that_are_equal_have_one_name(name):
    text, expected = UNIFIED[name]
    _, found = unified(text)
    assert {value: found[value] for value in expected} == expected


def test_sizes_that_may_differ_keep_apart_but_agree_with_themselves():
    _, found = unified("""(float[m, 4] a, float[n, 4] b, float[m] c, float[n] d)
        => (float[o] y, float[p, q] z) {
            twice = Concat <axis = 0> (a, a)
            mixed = Concat <axis = 0> (a, b)  z = Concat <axis = 0> (a, b)
            again = Concat <axis = 0> (a, b)
            first = Add (c, d)  second = Mul (d, c)  third = Add (first, second)
            y = Relu (third) }""")
    assert found["mixed"] == found["again"]
    assert found["mixed"][0] != found["twice"][0]
    assert found["first"] == found["second"] == found["third"]
    assert found["first"] not in (["m"], ["n"])


def test_the_shapes_are_those_that_onnxruntime_runs_with():
    """Grouped heads: three query heads share a key head, and part again."""
    model, named = (
        unified("""(float[b, 9, s, 64] q, float[b, 3, t, 64] k) => (float[o, p, r, u] y)
        <int64[4] group = {0, 3, -1, 64}, int64[4] part = {0, 9, -1, 64}> {
            grouped = Reshape (q, group)
            turned = Transpose <perm = [0, 1, 3, 2]> (k)
            scores = MatMul (grouped, turned)
            weights = Softmax (scores)
            mixed = MatMul (weights, k)
            parted = Reshape (mixed, part)
            y = Add (parted, q)
        }""")
    )
    values = [node.outputs[0] for node in model.graph][:-1]
    named.pop("y")
    model.graph.outputs.extend(values)
    opened = session(model)
    rng = np.random.default_rng(0)
    for b, s, t in ((1, 5, 7), (2, 3, 11)):
        feeds = {
            "q": rng.standard_normal((b, 9, s, 64), np.float32),
            "k": rng.standard_normal((b, 3, t, 64), np.float32),
        }
        known = {"b": b, "s": s, "t": t}
        for name, array in zip(named, opened.run(list(named), feeds), strict=True):
            for dim, size in zip(named[name], array.shape, strict=True):
                assert (
                    known.setdefault(dim, size) == size
                    if isinstance(dim, str)
                    else dim == size
                )
    assert named["parted"] == ["b", 9, "s", 64]
