# SPDX-License-Identifier: MIT
"""Round-to-nearest on whole models: what the file says is what runs, in every form.

A form is a way to multiply by a constant matrix, as ONNX text, and its formula in float64. The
matrix that the formula gets is read out of the quantised file, by hand.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import pytest
from builders.dequantized_models import relative_error, run
from builders.quantized_files import FORMATS, dequantised, read, rounded_to_nearest
from builders.same_numbers import session
from builders.text_models import Array, matmul_of, model_of, normal
from hypothesis import given, settings
from hypothesis import strategies as st

import ortplugins
from ortplugins.quantization import quantize

ALL = ("MatMul", "Gemm", "Gather")
BLOCKS = (16, 32, 64, 128, -1)
K, N = 37, 13

Formula = Callable[[Array, Mapping[str, Array]], Array]


@dataclasses.dataclass(frozen=True)
class Form:
    """A model that multiplies, and what it computes.

    ``W`` of the text is the weight, ``x`` the activation, ``[m]`` the node.
    """

    text: str
    shape: tuple[int, ...]
    x: tuple[int, ...]
    formula: Formula
    others: Mapping[str, Array] = dataclasses.field(default_factory=dict)
    op_type: str = "MatMul"
    float16: bool = True

    def model(self, dtype: npt.DTypeLike = np.float32, seed: int = 0) -> ir.Model:
        weights = {"W": normal(*self.shape, dtype=dtype, seed=seed)}
        weights |= {
            name: array if array.dtype.kind == "i" else array.astype(dtype)
            for name, array in self.others.items()
        }
        text = self.text if dtype == np.float32 else self.text.replace("float", "float16")
        return model_of(text, weights)

    def feed(self, dtype: npt.DTypeLike = np.float32) -> Array:
        if self.op_type == "Gather":
            return np.random.default_rng(0).integers(-K, K, self.x)
        return normal(*self.x, dtype=dtype, seed=1)


def gemm(attributes: str = "", bias: Array | None = None) -> Form:
    """``y = 0.5 * x @ W + 2 * bias``, where the attributes say so."""
    alpha, beta = 0.5 if "alpha" in attributes else 1.0, 2.0 if "beta" in attributes else 1.0
    trans_a, trans_b = "transA" in attributes, "transB" in attributes
    reads = "x, W" if bias is None else "x, W, bias"

    def formula(x: Array, w: Mapping[str, Array]) -> Array:
        product = alpha * (x.T if trans_a else x) @ w["m"]
        return product if bias is None else product + beta * bias.astype(np.float64)

    return Form(
        f"g (float[P, Q] x) => (float[R, S] y) {{ [m] y = Gemm {attributes} ({reads}) }}",
        (N, K) if trans_b else (K, N),
        (K, 5) if trans_a else (5, K),
        formula,
        {} if bias is None else {"bias": bias},
        "Gemm",
    )


def product(
    line: str,
    formula: Formula,
    shape: tuple[int, int] = (K, N),
    x: tuple[int, ...] = (5, K),
    op_type: str = "MatMul",
) -> Form:
    """One line that ends in ``y``, or several."""
    sizes = ", ".join("ABCD"[: len(x)])
    text = f"g (float[{sizes}] x) => (float[{sizes.lower()}] y) {{ {line} }}"
    return Form(text, shape, x, formula, op_type=op_type)


def right(x: Array, w: Mapping[str, Array]) -> Array:
    return x @ w["m"]


def left(x: Array, w: Mapping[str, Array]) -> Array:
    return w["m"].T @ x


FUSED = "[m] y = com.microsoft.FusedMatMul"
FORMS = {
    "right": product("[m] y = MatMul(x, W)", right),
    "batched": product("[m] y = MatMul(x, W)", right, x=(2, 3, 4, K)),
    "a vector": product("[m] y = MatMul(x, W)", right, x=(K,)),
    "left": product("[m] y = MatMul(W, x)", left, (N, K), (K, 5)),
    "left, batched": product("[m] y = MatMul(W, x)", left, (N, K), (3, K, 5)),
    "fused transB": product(
        f"{FUSED} <transB = 1, alpha = 0.25> (x, W)",
        lambda x, w: 0.25 * x @ w["m"],
        *((N, K), (2, 5, K)),
    ),
    "fused transA": product(
        f"{FUSED} <transA = 1> (x, W)", lambda x, w: x.swapaxes(1, 2) @ w["m"], x=(2, K, 5)
    ),
    "fused, left transA": product(f"{FUSED} <transA = 1> (W, x)", left, x=(2, K, 5)),
    "fused, left transB": product(
        f"{FUSED} <transB = 1, alpha = 3.0> (W, x)", lambda x, w: 3 * w["m"].T @ x.T, (N, K)
    ),
    "gemm": gemm(),
    "gemm transA": gemm("<transA = 1>"),
    "gemm transB": gemm("<transB = 1>", normal(N)),
    "gemm transA transB": gemm("<transA = 1, transB = 1>", normal(5, 1)),
    "gemm alpha": gemm("<alpha = 0.5>", normal(1, N)),
    "gemm beta": gemm("<beta = 2.0>", normal(5, N)),
    "gemm all": gemm("<alpha = 0.5, beta = 2.0, transA = 1, transB = 1>", normal(N)),
    "gemm scalar bias": gemm("<beta = 2.0, transB = 1>", np.array(1.5)),
    "gemm one-number bias": gemm("<alpha = 0.5>", np.array([1.5])),
    "gemm, left": Form(
        """g (float[K, P] x) => (float[N, P] y) {
            [m] y = Gemm <alpha = 0.5, beta = 2.0, transA = 1> (W, x, bias)
        }""",
        (K, N),
        (K, 5),
        lambda x, w: 0.5 * w["m"].T @ x + 2 * normal(N, 1).astype(float),
        {"bias": normal(N, 1)},
        "Gemm",
    ),
    "gemm, left as it is": product("[m] y = Gemm(W, x)", left, (N, K), (K, 5), "Gemm"),
    "gemm, left, both transposed": product(
        "[m] y = Gemm <transA = 1, transB = 1> (W, x)",
        lambda x, w: w["m"].T @ x.T,
        op_type="Gemm",
    ),
    "gather": Form(
        "g (int64[A, B] x) => (float[A, B, C] y) { [m] y = Gather(W, x) }",
        (K, 20),
        (2, 5),
        lambda x, w: w["m"].T[x],
        op_type="Gather",
    ),
    "transposed": product(
        "t = Transpose <perm = [1, 0]> (W) [m] y = MatMul(x, t)", right, (N, K)
    ),
    "transposed by default": product("t = Transpose(W) [m] y = MatMul(x, t)", right, (N, K)),
    "transposed, transB": product(
        "t = Transpose(W) [m] y = Gemm <transB = 1> (x, t)", right, op_type="Gemm"
    ),
    "transposed twice": product(
        """t = Transpose(W) i = Identity(t) u = Transpose <perm = [1, 0]> (i)
           [m] y = MatMul(x, u)""",
        right,
    ),
    "identity": product("i = Identity(W) j = Identity(i) [m] y = MatMul(x, j)", right),
    "both orientations": product(
        "[m] h = MatMul(x, W) t = Transpose(W) [n] y = MatMul(h, t)",
        lambda x, w: x @ w["m"] @ w["n"],
    ),
    "both orientations of a square": product(
        "[m] h = MatMul(x, W) [n] y = com.microsoft.FusedMatMul <transB = 1> (h, W)",
        lambda x, w: x @ w["m"] @ w["n"],
        (K, K),
    ),
    "shared": product(
        "[m] h = MatMul(x, W) r = Relu(h) [n] y = Gemm(r, W)",
        lambda x, w: np.maximum(x @ w["m"], 0) @ w["n"],
        (K, K),
    ),
    "a table and a head": Form(
        """g (int64[A, B] x) => (float[A, B, K] y) {
            [m] h = Gather(W, x)
            t = Transpose(W)
            [n] y = MatMul(h, t)
        }""",
        (K, 20),
        (2, 5),
        lambda x, w: w["m"].T[x] @ w["n"],
        op_type="Gather",
    ),
    "in both branches": product(
        """s = ReduceMax <keepdims = 0> (x)
        c = Less(s, s)
        y = If (c) <
            then_branch = a () => (float[P, N] u) { [l] u = MatMul(x, W) },
            else_branch = b () => (float[P, N] v) { [m] v = MatMul(x, W) }
        >""",
        right,
    ),
    "captured, and outside": product(
        """s = ReduceMax <keepdims = 0> (x)
        c = Equal(s, s)
        h = If (c) <
            then_branch = a () => (float[P, K] u) { [m] u = MatMul(x, W) },
            else_branch = b () => (float[P, K] v) { v = Identity(x) }
        >
        [n] y = MatMul(h, W)""",
        lambda x, w: x @ w["m"] @ w["n"],
        (K, K),
    ),
    "in a Scan": Form(
        """g (float[5, K] x) => (float[K] last, float[5, K] y) {
            z = ReduceSum <keepdims = 0> (x, axes)
            last, y = Scan <num_scan_inputs = 1, body = b (float[K] h, float[K] e)
                => (float[K] next, float[K] out) {
                    [m] p = MatMul(e, W)
                    next = Tanh(p)
                    out = Identity(next)
                }
            > (z, x)
        }""",
        (K, K),
        (5, K),
        lambda x, w: np.tanh(x @ w["m"])[-1],
        {"axes": np.array([0])},
    ),
}


def quantised(form: Form, layout: str, dtype: npt.DTypeLike = np.float32, **options):
    """The quantised model, and what its own matrices say that it computes on the feed."""
    result = quantize(form.model(dtype), quant_format=layout, op_types=ALL, **options)
    proto = read(result.model)
    onnx.checker.check_model(proto, full_check=layout != "MatMulNBits")
    x = form.feed(dtype)
    matrices = dequantised(proto)
    assert set(matrices) == {row.node for row in result.report.quantized}
    if layout == "MatMulNBits":  # its scales may hold alpha
        portable = quantize(form.model(dtype), op_types=ALL, **options).model
        matrices = dequantised(read(portable))
    wide = x if form.op_type == "Gather" else x.astype(np.float64)
    return proto, x, form.formula(wide, matrices)


def run_plain(proto: onnx.ModelProto, x: Array) -> list[Array]:
    """onnxruntime with all its optimisers, activations in float."""
    return session(proto, optimised=True, accuracy_level=0).run(None, {"x": x})


def run_fused(proto: onnx.ModelProto, x: Array) -> list[Array]:
    """After our own fusion, unoptimised otherwise."""
    fused = ortplugins.optimize(
        proto, passes=[ortplugins.DqMatMulNBitsFusion(accuracy_level=0)]
    ).model
    return run(fused, {"x": x})


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("name", FORMS)
def test_every_form_computes_what_its_file_says(name, layout):
    form = FORMS[name]
    options = zip((2, 4, 8), (16, -1, 32), (True, False, True), strict=True)
    for bits, block_size, is_symmetric in options:
        proto, x, expected = quantised(
            form, layout, bits=bits, block_size=block_size, is_symmetric=is_symmetric
        )
        actual = run(proto, {"x": x})[0]
        assert relative_error(actual, expected) < 1e-5, (bits, block_size)
    # Optimisers keep the numbers.
    proto, x, expected = quantised(form, layout, block_size=16)
    assert relative_error(run_plain(proto, x)[0], expected) < 1e-5
    assert relative_error(run_fused(proto, x)[0], expected) < 1e-5


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("name", list(FORMS))
def test_float16_forms(name, layout):
    proto, x, expected = quantised(FORMS[name], layout, np.float16)
    actual = run(proto, {"x": x})[0]
    assert actual.dtype == np.float16
    assert relative_error(actual, expected) < 4e-3


FORMATS_OF_CODES = list(itertools.product((2, 4, 8), BLOCKS, (True, False), FORMATS))


@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("size", [(1, 1), (37, 13), (129, 3)], ids=str)
def test_codes_are_the_nearest_in_every_format(size, dtype):
    weight = normal(*size, dtype=dtype)
    model = matmul_of(weight)
    for bits, block_size, is_symmetric, layout in FORMATS_OF_CODES:
        options = {"bits": bits, "block_size": block_size, "is_symmetric": is_symmetric}
        proto = read(quantize(model, quant_format=layout, grid="amax", **options).model)
        values = rounded_to_nearest(weight, **options)
        found = dequantised(proto)["m"]
        assert np.allclose(found, values, rtol=1e-6, atol=1e-30), (options, layout)


@given(
    k=st.sampled_from([1, 2, 3, 7, 16, 31, 32, 33, 65, 127, 130]),
    n=st.sampled_from([1, 2, 3, 5, 8, 17]),
    bits=st.sampled_from([2, 4, 8]),
    block_size=st.sampled_from([*BLOCKS, 256]),
    is_symmetric=st.booleans(),
    layout=st.sampled_from(FORMATS),
    name=st.sampled_from(["right", "left", "gemm transB", "transposed"]),
)
@settings(max_examples=100, deadline=None)
def test_any_size_runs(k, n, bits, block_size, is_symmetric, layout, name):
    form = FORMS[name]
    sizes = {K: k, N: n, 5: 3}
    others = {"bias": normal(n)} if form.others else {}
    small = dataclasses.replace(
        form,
        shape=tuple(sizes[size] for size in form.shape),
        x=tuple(sizes[size] for size in form.x),
        others=others,
        formula=lambda x, w: form.formula(x, w) if not others else x @ w["m"] + others["bias"],
    )
    proto, x, expected = quantised(
        small, layout, bits=bits, block_size=block_size, is_symmetric=is_symmetric
    )
    assert relative_error(run(proto, {"x": x})[0], expected) < 1e-5
    assert relative_error(run_fused(proto, x)[0], expected) < 1e-5
    if bits != 2 or layout == "MatMulNBits":  # see below
        assert relative_error(run_plain(proto, x)[0], expected) < 1e-5


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("n", [4, 7, 16])
def test_two_bits_that_onnxruntime_gets_wrong_are_reported(n, layout):
    x, model = normal(5, 40, seed=1), matmul_of(normal(40, n))
    for block_size, is_symmetric in itertools.product((16, 32, -1), (True, False)):
        options = {"block_size": block_size, "is_symmetric": is_symmetric}
        result = quantize(model, bits=2, quant_format=layout, **options)
        proto = read(result.model)
        expected = x @ dequantised(proto)["m"]
        assert relative_error(run_fused(proto, x)[0], expected) < 1e-5
        try:
            is_right = relative_error(run_plain(proto, x)[0], expected) < 1e-5
        except Exception:  # from 512 codes on it opens no session
            is_right = False
        reported = any("plain onnxruntime 1.32" in note for note in result.report.notes)
        assert reported or is_right
        assert not (reported and is_right) or (layout, n) == ("QDQ_transposed", 4)
