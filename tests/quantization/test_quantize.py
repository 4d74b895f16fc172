# SPDX-License-Identifier: MIT
"""Round-to-nearest on whole models: what the file says is what runs, in every form.

A form is a way to multiply by a constant matrix, as ONNX text. ONNX's reference evaluator says
what the file computes in float64, and that it is near the float model.
"""

import dataclasses
import itertools
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from builders.dequantized_models import relative_error, run
from builders.quantized_files import FORMATS, dequantised, read, rounded_to_nearest
from builders.same_numbers import session
from builders.text_models import Array, float64_outputs, matmul_of, normal, proto_of
from hypothesis import given, settings
from hypothesis import strategies as st

import ortplugins
from ortplugins.quantization import quantize

ALL = ("MatMul", "Gemm", "Gather")
BLOCKS = (16, 32, 64, 128, -1)
K, N = 37, 13


@dataclasses.dataclass(frozen=True)
class Form:
    """A model that multiplies.

    ``W`` of the text is the weight, ``x`` the activation, ``[m]`` the node.
    """

    text: str
    shape: tuple[int, ...] = (K, N)
    x: tuple[int, ...] = (5, K)
    others: Mapping[str, npt.ArrayLike] = dataclasses.field(default_factory=dict)

    def model(self, dtype: npt.DTypeLike = np.float32) -> onnx.ModelProto:
        text = self.text
        if not text.startswith("g ("):  # lines that end in y
            sizes = ", ".join("ABCD"[: len(self.x)])
            text = f"g (float[{sizes}] x) => (float[{sizes.lower()}] y) {{ {text} }}"
        weights = {"W": normal(*self.shape, dtype=dtype)}
        for name, number in self.others.items():
            array = np.asarray(number)
            weights[name] = array if array.dtype.kind == "i" else array.astype(dtype)
        kind = "float" if dtype == np.float32 else "float16"
        return proto_of(text.replace("float", kind), weights)

    def feed(self, dtype: npt.DTypeLike = np.float32) -> Array:
        if "int64" in self.text:  # rows of a table
            return np.random.default_rng(0).integers(-K, K, self.x)
        return normal(*self.x, dtype=dtype, seed=1)


def gemm(attributes: str = "", bias: npt.ArrayLike | None = None) -> Form:
    reads, others = ("x, W", {}) if bias is None else ("x, W, bias", {"bias": bias})
    return Form(
        f"[m] y = Gemm {attributes} ({reads})",
        (N, K) if "transB" in attributes else (K, N),
        (5, K),
        others,
    )


FUSED = "[m] y = com.microsoft.FusedMatMul"
TABLE = "g (int64[A, B] x) => (float[A, B, C] y)"
FORMS = {
    "right": Form("[m] y = MatMul(x, W)"),
    "batched": Form("[m] y = MatMul(x, W)", x=(2, 3, 4, K)),
    "a vector": Form("[m] y = MatMul(x, W)", x=(K,)),
    "fused transB": Form(f"{FUSED} <transB = 1, alpha = 0.25> (x, W)", (N, K), (2, 5, K)),
    "gemm": gemm(),
    "gemm transB": gemm("<transB = 1>", normal(N)),
    "gemm all": gemm("<alpha = 0.5, beta = 2.0, transB = 1>", normal(N)),
    "gather": Form(f"{TABLE} {{ [m] y = Gather(W, x) }}", (K, 20), (2, 5)),
    "transposed": Form("t = Transpose <perm = [1, 0]> (W) [m] y = MatMul(x, t)", (N, K)),
    "transposed twice": Form(
        """t = Transpose(W) i = Identity(t) u = Transpose <perm = [1, 0]> (i)
           [m] y = MatMul(x, u)"""
    ),
    "both orientations": Form("[m] h = MatMul(x, W) t = Transpose(W) [n] y = MatMul(h, t)"),
    "shared": Form("[m] h = MatMul(x, W) r = Relu(h) [n] y = Gemm(r, W)", (K, K)),
    "a table and a head": Form(
        f"{TABLE} {{ [m] h = Gather(W, x) t = Transpose(W) [n] y = MatMul(h, t) }}",
        (K, 20),
        (2, 5),
    ),
    "in both branches": Form(
        """s = ReduceMax <keepdims = 0> (x)
        c = Less(s, s)
        y = If (c) <
            then_branch = a () => (float[P, N] u) { [l] u = MatMul(x, W) },
            else_branch = b () => (float[P, N] v) { [m] v = MatMul(x, W) }
        >"""
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
        others={"axes": [0]},
    ),
}


def quantised(form: Form, layout: str, dtype: npt.DTypeLike = np.float32, **options):
    """The quantised model, its input, and the output of the portable one by the definition."""
    model, x = form.model(dtype), form.feed(dtype)
    result = quantize(model, quant_format=layout, op_types=ALL, **options)
    proto = read(result.model)
    onnx.checker.check_model(proto, full_check=layout != "MatMulNBits")
    portable = proto
    if layout == "MatMulNBits":
        portable = quantize(model, op_types=ALL, **options).model
    assert set(dequantised(proto)) == {row.node for row in result.report.quantized}
    expected, exact = (float64_outputs(each, {"x": x})[0] for each in (portable, model))
    # Codes of 8 bits show that nothing was turned round or left out.
    assert relative_error(expected, exact) < 0.05 or options.get("bits") != 8
    return proto, x, expected


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
    options = zip((4, 8, 8), (16, -1, 32), (False, False, True), strict=True)
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
@pytest.mark.parametrize("name", FORMS)
def test_float16_forms(name, layout):
    proto, x, expected = quantised(FORMS[name], layout, np.float16)
    actual = run(proto, {"x": x})[0]
    assert actual.dtype == np.float16
    assert relative_error(actual, expected) < 4e-3


FORMATS_OF_CODES = list(itertools.product((4, 8), BLOCKS, (True, False), FORMATS))


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
    bits=st.sampled_from([4, 8]),
    block_size=st.sampled_from([*BLOCKS, 256]),
    is_symmetric=st.booleans(),
    layout=st.sampled_from(FORMATS),
    name=st.sampled_from(["right", "gemm transB", "transposed"]),
)
@settings(max_examples=100)
def test_any_size_runs(k, n, bits, block_size, is_symmetric, layout, name):
    form = FORMS[name]
    sizes = {K: k, N: n, 5: 3}
    small = dataclasses.replace(
        form,
        shape=tuple(sizes[size] for size in form.shape),
        x=tuple(sizes[size] for size in form.x),
        others={"bias": normal(n)} if form.others else {},
    )
    proto, x, expected = quantised(
        small, layout, bits=bits, block_size=block_size, is_symmetric=is_symmetric
    )
    assert relative_error(run(proto, {"x": x})[0], expected) < 1e-5
    assert relative_error(run_fused(proto, x)[0], expected) < 1e-5
    assert relative_error(run_plain(proto, x)[0], expected) < 1e-5
