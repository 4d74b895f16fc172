# SPDX-License-Identifier: MIT
"""Unknown dimensions that are another one under a new name."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common
import onnxruntime as ort

from rewrite_rules.shapes.unified_names import unify_dimension_names


def shapes(text: str) -> dict[str, list[int | str | None]]:
    """Shapes of all values after inference and unification, by name."""
    model = ir.from_onnx_text(f'<ir_version: 10, opset_import: ["": 21]> {text}')
    onnx_ir.passes.common.ShapeInferencePass(check_type=False, strict_mode=False)(model)
    unify_dimension_names(model)
    return {
        value.name: [dim if isinstance(dim, int) else dim.value for dim in value.shape]
        for node in model.graph
        for value in node.outputs
        if value.shape is not None
    }


def test_reshape_keeps_the_number_of_elements():
    found = shapes("""
        g (float[b, s, 576] x) => (float[o] y)
        <int64[4] heads = {0, -1, 9, 64}, int64[1] flat = {-1}> {
            split = Reshape (x, heads)
            y = Reshape (split, flat)
        }""")
    assert found["split"] == ["b", "s", 9, 64]


def test_a_multiple_is_divided_out_again():
    # Grouped heads: three query heads share a key head, and part again.
    found = shapes("""
        g (float[b, 9, s, 64] q) => (float[o, p, r, t] y)
        <int64[4] group = {0, 3, -1, 64}, int64[4] part = {0, 9, -1, 64}> {
            grouped = Reshape (q, group)
            parted = Reshape (grouped, part)
            y = Identity (parted)
        }""")
    assert found["grouped"][2] not in ("s", None)
    assert found["parted"] == ["b", 9, "s", 64]


def test_equal_sizes_broadcast_to_themselves():
    found = shapes("""
        g (float[b, s, 8] x) => (float[o, p, r] y)
        <int64[3] shape = {0, -1, 8}> {
            other = Reshape (x, shape)
            sum = Add (x, other)
            y = Relu (sum)
        }""")
    assert found["sum"] == ["b", "s", 8]


def test_sizes_that_may_differ_keep_apart_but_agree_with_themselves():
    found = shapes("""
        g (float[m] a, float[n] b) => (float[o] y) {
            first = Add (a, b)
            second = Mul (b, a)
            third = Add (first, second)
            y = Relu (third)
        }""")
    assert found["first"] == found["second"] == found["third"]
    assert found["first"] not in (["m"], ["n"])


def test_concat_adds_equal_sizes_up():
    found = shapes("""
        g (float[s, 4] x, float[t, 4] z) => (float[o, p] y)
        <int64[2] back = {-1, 8}> {
            twice = Concat <axis = 0> (x, x)
            mixed = Concat <axis = 0> (x, z)
            again = Concat <axis = 0> (x, z)
            halved = Reshape (twice, back)
            y = Relu (halved)
        }""")
    assert found["halved"] == ["s", 8]
    assert found["mixed"] == found["again"]
    assert found["mixed"][0] != found["twice"][0]


def test_outputs_are_called_as_the_user_calls_them():
    found = shapes("""
        g (float[b, s] x) => (float[rows, columns] y)
        <int64[2] shape = {0, -1}> { y = Reshape (x, shape) }""")
    assert found["y"] == ["rows", "columns"]


def test_the_shapes_are_those_that_onnxruntime_runs_with():
    model = ir.from_onnx_text("""<ir_version: 10, opset_import: ["": 21]>
        g (float[b, 9, s, 64] q, float[b, 3, t, 64] k) => (float[o, p, r, u] y)
        <int64[4] group = {0, 3, -1, 64}, int64[4] part = {0, 9, -1, 64}> {
            grouped = Reshape (q, group)
            turned = Transpose <perm = [0, 1, 3, 2]> (k)
            scores = MatMul (grouped, turned)
            weights = Softmax (scores)
            mixed = MatMul (weights, k)
            parted = Reshape (mixed, part)
            y = Add (parted, q)
        }""")
    onnx_ir.passes.common.ShapeInferencePass(check_type=False, strict_mode=False)(model)
    unify_dimension_names(model)
    values = [node.outputs[0] for node in model.graph][:-1]
    named = {
        value.name: [getattr(dim, "value", dim) for dim in value.shape] for value in values
    }
    model.graph.outputs.extend(values)
    session = ort.InferenceSession(
        ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    rng = np.random.default_rng(0)
    for b, s, t in ((1, 5, 7), (2, 3, 11)):
        feeds = {
            "q": rng.standard_normal((b, 9, s, 64), np.float32),
            "k": rng.standard_normal((b, 3, t, 64), np.float32),
        }
        known = {"b": b, "s": s, "t": t}
        for name, array in zip(named, session.run(list(named), feeds), strict=True):
            for dim, size in zip(named[name], array.shape, strict=True):
                assert (
                    known.setdefault(dim, size) == size
                    if isinstance(dim, str)
                    else dim == size
                )
    assert named["parted"] == ["b", 9, "s", 64]
