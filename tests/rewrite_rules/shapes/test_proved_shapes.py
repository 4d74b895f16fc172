# SPDX-License-Identifier: MIT
"""Shapes that are equal have one name; what a damaged constant says (see test_shape_fuzz)."""

import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.passes.common
import pytest
from builders.same_numbers import session
from builders.text_models import text_model

from rewrite_rules.shapes.proved_shapes import ProvedShapes, unify_dimension_names


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
