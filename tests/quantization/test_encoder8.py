# SPDX-License-Identifier: MIT
"""Products in 8 bits: near float, never saturated, and each text by itself."""

import re
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from builders.exports import exported
from builders.quantized_files import arrays_of, kinds, read
from builders.text_cases import text_cases
from builders.text_models import T, normal, text_model
from hypothesis import given, settings
from hypothesis import strategies as st
from onnxruntime.transformers.float16 import convert_float_to_float16

from ortplugins.errors import CalibrationError, ModelFileError, QuantizationError
from ortplugins.quantization import quantize, quantize_encoder8
from ortplugins.quantization.encoder8 import QuantizedProducts

K, N = 64, 48
PRODUCT = "y = MatMul(x, W)"
W, X = normal(K, N), normal(8, K)
CONSTANTS = {
    "W": W, "b": normal(N), "V": normal(K, N, seed=1), "C": normal(N, N, seed=1),
    "U": normal(N, 8), "T": normal(N, K), "one": normal(1, 1), "c": normal(1),
    "rows": normal(256, N), "g": np.geomspace(0.1, 50, K).astype(np.float32), "h": normal(K),
    "Z": np.zeros((K, N), np.float32),
}  # fmt: skip


FORMS = text_cases(Path(__file__).with_name("encoder8.txt"))


def with_outliers(rows: int, k: int = K, *, seed: int = 0) -> np.ndarray:
    """Tokens whose channels 5 and 40 are 30 times as large as the others."""
    x = normal(rows, k, seed=seed)
    x[:, [5, 40]] *= 30
    return x


def quantized(nodes: str, constants: dict | None = None, x: np.ndarray | None = None, **more):
    """Return the float model, and what quantize() makes of it."""
    if constants is None:
        named = re.findall(r"\w+", nodes)
        constants = {name: array for name, array in CONSTANTS.items() if name in named}
    options = {
        name: more.pop(name) for name in ("inputs", "output_type", "opset") if name in more
    }
    model = text_model(nodes, constants, **options)
    x = with_outliers(256) if x is None else x
    return model, quantize_encoder8(model, calibration_data_reader=[{"x": x}], **more)


def run(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    return outputs(model, {model.graph.input[0].name: x})[0]


def error(model: onnx.ModelProto, result: onnx.ModelProto, x: np.ndarray) -> float:
    expected, found = run(model, x), run(result, x)
    assert found.shape == expected.shape and found.dtype == expected.dtype
    difference = found.astype(float) - expected
    return float(np.linalg.norm(difference) / np.linalg.norm(expected.astype(float)))


def test_the_numbers_are_those_of_the_codes():
    """Against the definition, in float64, with the codes and ranges that are in the file."""
    _, result = quantized(FORMS["a bias"].nodes)
    x = with_outliers(32, seed=1)
    held = arrays_of(read(result.model))
    scale, zero = held["x.scale"].astype(np.float64), int(held["x.zero_point"])
    outliers, codes = held["x.outlier_channels"], held["W.int8"].astype(np.float64)
    assert {5, 40} <= set(outliers) and not codes[outliers].any()
    rounded = np.clip(np.rint(x / np.float32(scale)) + zero, 0, 255) - zero
    expected = scale * (rounded @ codes) * held["W.scales"] + held["W.bias"]
    expected += x[:, outliers].astype(np.float64) @ held["W.outlier_rows"]
    np.testing.assert_allclose(run(read(result.model), x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_near_float(form: str):
    case = FORMS[form]
    x = normal(256, K) if "x" in case.settings else None
    model, result = quantized(case.nodes, x=x)
    assert not result.report.refused
    assert (
        error(model, read(result.model), with_outliers(256, seed=3)) < 0.03
        or "x" in case.settings
    )
    case.expect(" ".join(kinds(read(result.model))))


@given(
    st.integers(1, 40), st.integers(0, 2**32 - 1), st.sampled_from(["normal", "alike", "one"])
)
@settings(max_examples=60)
def test_two_products_fit_into_16_bits(k: int, seed: int, kind: str):
    """Of each four rows that a kernel without VNNI takes together, any two."""
    rng = np.random.default_rng(seed)
    weight = rng.normal(size=(k, 5)).astype(np.float32)
    if kind == "alike":
        weight = np.sign(weight)
    elif kind == "one":
        weight[1:] *= 1e-6
    none = np.zeros(0, np.int64)
    codes, scales = QuantizedProducts(np.float32(1), np.uint8(0), none).codes(weight)
    for start in range(0, k, 4):
        four = codes[start : start + 4].astype(int)
        for signed in (four, -four):
            pair = np.sort(np.maximum(signed, 0), axis=0)[-2:].sum(axis=0)
            assert (255 * pair <= 32767).all()
    assert (abs(codes * scales - weight) <= scales * 0.501).all()


def uneven() -> np.ndarray:
    """Tokens of which most are 1,000 times smaller than the largest, in every channel."""
    x = normal(512, K)
    x[1:] *= 1e-3
    return x


def test_a_layer_that_8_bits_do_not_suit_stays_in_float():
    x = uneven()
    nodes = "p = MatMul(x, W) n = LayerNormalization(p, g) y = MatMul(n, V)"
    constants = {"W": normal(K, N), "g": np.ones(N, np.float32), "V": normal(N, 8)}
    model, result = quantized(nodes, constants, x, least_cosine=0.9999)
    (kept,) = result.report.refused
    assert kept.weight == "W" and "least_cosine" in kept.reason
    assert result.report.share < 0.2  # W is the greater part
    assert error(model, read(result.model), x) < 0.03


def weight_with(number: float) -> np.ndarray:
    weight = normal(K, N)
    weight[3, 4] = number
    return weight


@pytest.mark.parametrize(
    ("nodes", "weight", "x", "options", "error", "match"),
    [
        ("y = MatMul(W, x)", normal(N, 8), X, {}, ModelFileError, "on its right"),
        ("y = Gemm<alpha = 2.0>(x, W)", W, X, {}, ModelFileError, "multiplies with a factor"),
        (PRODUCT, weight_with(np.nan), X, {}, QuantizationError, "'W' .* NaN or infinite"),
        (PRODUCT, weight_with(np.inf), X, {}, QuantizationError, "'W' .* NaN or infinite"),
        # What is not known to be near, since the products overflow.
        (PRODUCT, 100 * W, X * 3e37, {}, ModelFileError, "nothing to.*least_cosine"),
        (PRODUCT, W, uneven(), {"least_cosine": 0.99999}, ModelFileError, "least_cosine"),
        (PRODUCT, W, X, {"least_cosine": 1.5}, QuantizationError, "least_cosine is 1.5"),
        (PRODUCT, W, X * np.nan, {}, CalibrationError, "NaN"),
        (PRODUCT, W, X * 0, {}, ModelFileError, "samples have only zeros for it"),
        (PRODUCT, W, X, {"opset": 9}, ModelFileError, "opset 9: export it with 10"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_is_an_error(nodes, weight, x, options, error, match):
    inputs = {"x": (T.FLOAT, (len(x), K))}
    with pytest.raises(error, match=match):
        quantized(nodes, {"W": weight}, x.astype(np.float32), inputs=inputs, **options)


def test_a_weight_that_multiplies_a_constant_too_is_quantised_where_it_can_be():
    """As DeBERTa's queries and keys, which its table of distances goes through as well."""
    nodes = "[fixed] c = MatMul(distances, W) [free] p = MatMul(x, W) y = Add(p, c)"
    constants = {"W": normal(K, N), "distances": normal(1, K, seed=3)}
    model, result = quantized(nodes, constants)
    (kept,) = result.report.refused
    assert kept.node == "fixed" and "both of its operands are constants" in kept.reason
    (row,) = result.report.quantized
    assert (row.node, row.method, row.reason) == ("free", "encoder8", "")
    assert error(model, read(result.model), with_outliers(256, seed=3)) < 0.03


FAMILIES = [
    "bert-reranker-dynamo-sdpa", "bert-answers-torchscript-eager", "cliptext-dynamo-sdpa",
    "deberta2-torchscript-eager", "modernbert-dynamo-sdpa", "mpnet-torchscript-eager",
    "t5-dynamo-eager",
]  # fmt: skip


@pytest.mark.parametrize("half", [False, True], ids=["float32", "float16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_families_of_encoders_are_near_float(name: str, half: bool):
    model = exported(name)
    if half:
        model = convert_float_to_float16(model, keep_io_types=True)
    rng = np.random.default_rng(0)
    samples = [ragged(model, rng) for _ in range(9)]
    result = quantize_encoder8(model, calibration_data_reader=samples[1:])
    products = [row for row in result.report.refused if row.op_type in ("MatMul", "Gemm")]
    assert not products and "MatMul" in kinds(read(result.model))  # that of two activations
    real = samples[0].get("attention_mask")
    for found, wanted in zip(
        outputs(read(result.model), samples[0]), outputs(model, samples[0]), strict=True
    ):
        if found.ndim == 3:
            found, wanted = (array[real.astype(bool)] for array in (found, wanted))
        assert found.dtype == wanted.dtype
        lengths = np.linalg.norm(found, axis=-1) * np.linalg.norm(wanted, axis=-1)
        assert ((found * wanted).sum(axis=-1) / lengths).mean() > 0.998


def ragged(model: onnx.ModelProto, rng: np.random.Generator) -> dict:
    """Four texts of up to twelve tokens."""
    mask = (np.arange(12) < rng.integers(5, 13, (4, 1))).astype(np.int64)
    mask[0] = 1
    given = {"input_ids": rng.integers(3, 19, mask.shape), "attention_mask": mask}
    given["token_type_ids"] = np.zeros_like(mask)
    return {value.name: given[value.name] for value in model.graph.input}


def outputs(model: onnx.ModelProto, feed: dict) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    return ort.InferenceSession(model.SerializeToString(), options).run(None, feed)


@pytest.mark.parametrize("again", [quantize_encoder8, quantize])
def test_what_was_quantised_stays(again):
    """What is multiplied in float beside the codes belongs to them."""
    _, result = quantized(PRODUCT)
    assert "W.outlier_rows" in arrays_of(read(result.model))
    samples = [{"x": with_outliers(64)}]
    with pytest.raises(ModelFileError, match="already quantised"):
        again(read(result.model), calibration_data_reader=samples)


def test_what_no_token_reaches_stays_in_float():
    _, result = quantized("""
        negative = Less(x, x)  flat = Constant <value_ints = [-1]> ()
        which = Reshape(negative, flat)  numbers = Reshape(x, flat)
        none = Compress(numbers, which)  size = Constant <value_ints = [0, 64]> ()
        tokens = Reshape(none, size)  s = MatMul(tokens, V)  z = ReduceSum(s)
        p = MatMul(x, W)  y = Add(p, z)""")
    rows = {row.weight: row for row in result.report.nodes}
    assert rows["W"].quantized and rows["V"].reason == "no token of the samples reaches it"


def test_a_text_does_not_depend_on_its_batch():
    _, result = quantized(PRODUCT)
    x, model = with_outliers(16, seed=2), read(result.model)
    beside = np.concatenate([x, 1e4 * normal(16, K, seed=4)])
    np.testing.assert_array_equal(run(model, x), run(model, beside)[:16])
