# SPDX-License-Identifier: MIT
"""Inputs that look like a mask and are any matrix, and numbers that a mask can't hide."""

import numpy as np
import pytest
from builders.same_numbers import session
from builders.text_models import proto_of

import ortplugins

CONSTANTS = {
    "middle": np.array([1]),
    "last": np.array([2]),
    "none": np.float32(0),
    "tiny": np.float32(1e-9),
    "weight": np.eye(4, dtype=np.float32),
}
TOKENS = "float[b, k, 4] x"
WIDE = "m = Unsqueeze(mask, last)"
KEPT = f"{WIDE} kept = Mul(x, m)"
SUMMED = "y = ReduceSum<keepdims = 0>(kept, middle)"
MEAN = f"""{KEPT} total = ReduceSum<keepdims = 0>(kept, middle)
    count = ReduceSum<keepdims = 0>(m, middle) some = Max(count, tiny) y = Div(total, some)"""
LOG = f"{WIDE} l = Log(x) z = MatMul(l, weight)"
MATRIX = "'mask' is only multiplied and added up, as any matrix"


def pooled(inputs: str, nodes: str):
    return proto_of(f"g ({inputs}) => (float[b, n] y) {{ {nodes} }}", CONSTANTS, opset=17)


def trimmed(model, **options: object):
    return ortplugins.optimize(model, passes=[ortplugins.TrimPadding(**options)])


@pytest.mark.parametrize(
    ("inputs", "nodes", "reason"),
    [
        ("float[b, k] mask, float[k, n] w", "y = MatMul(mask, w)", MATRIX),
        ("float[3, 7] mask, float[7, 5] w", "y = MatMul(mask, w)", MATRIX),
        ("float[1, k] mask, float[k, n] w", "y = MatMul(mask, w)", MATRIX),
        ("float[b, k] mask, float[n, k] w", "y = Gemm<transB = 1>(mask, w)", MATRIX),
        ("float[b, k] mask, float[k] w", "p = Mul(mask, w) y = ReduceSum(p, middle)", MATRIX),
        ("int32[b, k] mask, int32[k, n] w", "p = MatMul(mask, w) y = Cast<to = 1>(p)", MATRIX),
        (f"float[b, k] mask, {TOKENS}", f"{KEPT} {SUMMED}", MATRIX),
        (f"float[b, k] mask, {TOKENS}", MEAN, ""),
        (f"int64[b, k] ints, {TOKENS}", f"mask = Cast<to = 1>(ints) {KEPT} {SUMMED}", ""),
        (
            f"float[b, k] mask, {TOKENS}",
            f"{WIDE} real = Greater(m, none) kept = Where(real, x, none) {SUMMED}",
            "",
        ),
        # What is multiplied by 0 may be infinite.
        (
            f"int64[b, k] ints, {TOKENS}",
            f"mask = Cast<to = 1>(ints) {LOG} kept = Mul(z, m) {SUMMED}",
            "mixes positions, and no mask leaves padding out",
        ),
    ],
)
def test_a_mask_is_proved_to_mask(inputs, nodes, reason):
    (remark,) = trimmed(pooled(inputs, nodes)).report.passes[0].remarks
    assert remark.outcome.value == ("refused" if reason else "fired")
    assert reason in remark.reason


def test_a_matrix_that_is_named_is_a_mask():
    model = pooled("float[b, k] mask, float[k, n] w", "y = MatMul(mask, w)")
    assert trimmed(model, mask="mask").report.fired


@pytest.mark.parametrize("number", [np.inf, np.nan, 6e4])
@pytest.mark.parametrize(
    ("kind", "dtype"), [("float", "f"), ("float16", "e"), ("double", "d")]
)
def test_what_zeros_do_not_hide_is_not_cut(kind, dtype, number):
    """0 times infinity is NaN, and it is so with the padding only."""
    nodes = f"l = Cast<to = 1>(fed) x = MatMul(l, weight) mask = Cast<to = 1>(ints) {MEAN}"
    model = pooled(f"int64[b, k] ints, {kind}[b, k, 4] fed", nodes)
    result = trimmed(model)
    assert result.report.fired
    fed = np.ones((2, 5, 4), {"float": "f"}.get(kind, kind))
    fed[0, 4, 1] = number
    feed = {"ints": np.array([[1, 1, 0, 0, 0], [1, 0, 0, 0, 0]]), "fed": fed}
    (found,), (expected,) = (session(m).run(None, feed) for m in (result.model, model))
    np.testing.assert_array_equal(found, expected)
