# SPDX-License-Identifier: MIT
"""Round-to-nearest on whole models: what the file says is what runs, in every form.

forms.txt has the forms. ONNX's reference evaluator says what the file computes in float64, and
that it is near the float model.
"""

import itertools
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from builders.dequantized_models import relative_error, run
from builders.quantized_files import FORMATS, dequantised, read
from builders.same_numbers import session
from builders.text_cases import TextCase, text_cases
from builders.text_models import Array, T, float64_outputs, matmul_of, normal, text_model
from hypothesis import given, settings
from hypothesis import strategies as st

import ortplugins
from ortplugins.quantization import BlockFormat, quantize, quantize_blocks
from ortplugins.quantization.methods.nearest import dequantize_blocks

ALL = ("MatMul", "Gemm", "Gather")
BLOCKS = (16, 32, 64, 128, -1)
FORMS = text_cases(Path(__file__).with_name("forms.txt"))


def sizes(form: TextCase, name: str, default: str) -> list[int]:
    return list(map(int, form.settings.get(name, default).split()))


def made(
    form: TextCase, dtype: npt.DTypeLike = np.float32, k: int = 37, n: int = 13
) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """The model of a form, of other K and N than it says, and what it is fed."""
    other = {37: k, 13: n}
    shape = [other.get(size, size) for size in sizes(form, "W", "37 13")]
    x = [other.get(size, size) for size in sizes(form, "x", "5 37")]
    weights = {"W": normal(*shape, dtype=dtype)}
    if "bias" in form.nodes:
        weights["bias"] = normal(n, dtype=dtype)
    if "axes" in form.nodes:
        weights["axes"] = np.array([0])
    kind, text = (T.FLOAT, form.nodes) if dtype == np.float32 else (T.FLOAT16, "")
    feed = {"x": normal(*x, dtype=dtype, seed=1)}
    inputs = {"x": (kind, list("ABCD"[: len(x)]))}
    if "i)" in form.nodes:
        feed = {"i": np.random.default_rng(0).integers(-37, 37, (2, 5))}
        inputs = {"i": (T.INT64, ["A", "B"])}
    text = text or form.nodes.replace("float[", "float16[")
    return text_model(text, weights, inputs, output_type=kind), feed


def quantised(given, layout: str, **options):
    """The quantised model, its input, and the output of the portable one by the definition."""
    model, feed = given
    result = quantize(model, quant_format=layout, op_types=ALL, **options)
    proto = read(result.model)
    if layout != "MatMulNBits":
        onnx.shape_inference.infer_shapes(proto, strict_mode=True)
    portable = proto
    if layout == "MatMulNBits":
        portable = quantize(model, op_types=ALL, **options).model
    assert set(dequantised(proto)) == {row.node for row in result.report.quantized}
    expected, exact = (float64_outputs(each, feed)[0] for each in (portable, model))
    # Codes of 8 bits show that nothing was turned round or left out.
    assert relative_error(expected, exact) < 0.05 or options.get("bits") != 8
    return proto, feed, expected


def run_plain(proto: onnx.ModelProto, feed: dict[str, Array]) -> list[Array]:
    """onnxruntime with all its optimisers, activations in float."""
    return session(proto, optimised=True, accuracy_level=0).run(None, feed)


def run_fused(proto: onnx.ModelProto, feed: dict[str, Array]) -> list[Array]:
    """After our own fusion, unoptimised otherwise."""
    fused = ortplugins.optimize(
        proto, passes=[ortplugins.DqMatMulNBitsFusion(accuracy_level=0)]
    ).model
    return run(fused, feed)


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("name", FORMS)
def test_every_form_computes_what_its_file_says(name, layout):
    given = made(FORMS[name])
    options = zip((4, 8, 8), (16, -1, 32), (False, False, True), strict=True)
    for bits, block_size, is_symmetric in options:
        proto, feed, expected = quantised(
            given, layout, bits=bits, block_size=block_size, is_symmetric=is_symmetric
        )
        assert relative_error(run(proto, feed)[0], expected) < 1e-5, (bits, block_size)
    # Optimisers keep the numbers.
    proto, feed, expected = quantised(given, layout, block_size=16)
    assert relative_error(run_plain(proto, feed)[0], expected) < 1e-5
    assert relative_error(run_fused(proto, feed)[0], expected) < 1e-5


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("name", FORMS)
def test_float16_forms(name, layout):
    proto, feed, expected = quantised(made(FORMS[name], np.float16), layout)
    actual = run(proto, feed)[0]
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
        options |= {"grid": "amax"}  # whose scales are not searched
        form = BlockFormat(**options, scale_type=weight.dtype.name)
        proto = read(quantize(model, quant_format=layout, **options).model)
        values = dequantize_blocks(*quantize_blocks(weight, form), form)
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
    proto, feed, expected = quantised(
        made(FORMS[name], k=k, n=n),
        layout,
        bits=bits,
        block_size=block_size,
        is_symmetric=is_symmetric,
    )
    for found in (run(proto, feed), run_fused(proto, feed), run_plain(proto, feed)):
        assert relative_error(found[0], expected) < 1e-5
