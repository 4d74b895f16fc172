# SPDX-License-Identifier: MIT
"""Whatever goes wrong: a clear error, the output as it was, and no folder left behind."""

import ast
import re
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from builders.processes import disk
from builders.quantized_files import dequantised, read
from builders.text_models import matmul_of, model_of, normal

from ortplugins.errors import CalibrationError, ModelFileError
from ortplugins.quantization import quantize

D = 32
METHODS = ("rtn", "awq_lite", "gptq")


def pair(size: int = D, **weights: np.ndarray) -> ir.Model:
    text = f"""g (float[T, {size}] x) => (float[T, {size}] y) {{
        [m] h = MatMul(x, V)
        [n] y = MatMul(h, W)
    }}"""
    return model_of(
        text, {"V": normal(size, size, seed=1), "W": normal(size, size, seed=2)} | weights
    )


def data(count: int = 2, size: int = D) -> list[dict[str, np.ndarray]]:
    return [{"x": normal(8, size, seed=seed)} for seed in range(count)]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Holds an earlier output, which has to be the same in the end, alone."""
    (tmp_path / "out.onnx").write_text("an earlier model")
    (tmp_path / "out.onnx.data").write_text("and its data")
    yield tmp_path
    assert {path.name for path in tmp_path.iterdir()} == {"out.onnx", "out.onnx.data"}
    assert (tmp_path / "out.onnx").read_bytes() == b"an earlier model"
    assert (tmp_path / "out.onnx.data").read_bytes() == b"and its data"


def into(folder: Path, model: ir.Model, **options):
    with tempfile.TemporaryDirectory() as source:
        ir.save(model, f"{source}/m.onnx", external_data="m.data", size_threshold_bytes=0)
        return quantize(f"{source}/m.onnx", folder / "out.onnx", overwrite=True, **options)


X = normal(8, D)


@pytest.mark.parametrize("method", ["rtn", "awq_lite"])
@pytest.mark.parametrize(
    ("samples", "options", "error", "message"),
    [
        # What else may be wrong with them is reported in test_calibration.py.
        ([{"x": X}, {"X": X}], {}, CalibrationError, "sample 1.*'X'.*not an input.*'x'"),
        ([{"x": X[:0]}], {}, CalibrationError, "only empty arrays"),
        (data(), {"calibration_providers": ["No"]}, (CalibrationError, ValueError), "No"),
        (data(), {"op_types": ["Gather"]}, ModelFileError, "nothing to quantise: no Gather"),
    ],
)
def test_bad_samples_and_options_are_reported(
    folder, samples, options, error, message, method
):
    options = {"method": method, "calibration_data_reader": samples} | options
    with pytest.raises(error, match=f"(?s){message}"):
        into(folder, pair(), **options)


@pytest.mark.parametrize("method", ["rtn", "awq_lite", "gptq"])
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=["float32", "float16"])
def test_a_weight_that_is_not_a_number_is_reported_by_name(folder, number, method, dtype):
    weight = normal(D, D, dtype=dtype)
    weight[3, 5] = number
    model = matmul_of(weight)
    samples = [{"x": X.astype(dtype)}]
    with pytest.raises(ValueError, match=r"'W'.*(NaN|infinite)|\[m\]|'y'"):
        into(folder, model, method=method, calibration_data_reader=samples)
    with pytest.raises(ValueError, match=r"'W'.*(NaN|infinite)"):
        into(folder, model)


@pytest.mark.filterwarnings("error")
def test_a_weight_whose_codes_mean_more_than_its_type_holds_is_named():
    model = matmul_of(np.sign(normal(D, D)).astype(np.float16) * np.float16(6e4))
    with pytest.raises(ValueError, match=r"'W' cannot be quantised: .* beyond float16"):
        quantize(model)


ROUTED = model_of(
    f"""g (float[T, {D}] x, bool[T] some, bool[T] none) => (float[a, 8] p, float[b, 8] q) {{
        [proj] h = MatMul(x, V)
        s = Compress <axis = 0> (h, some)
        n = Compress <axis = 0> (h, none)
        [expert0] p = MatMul(s, W0)
        [expert1] q = MatMul(n, W1)
    }}""",
    {"V": normal(D, D), "W0": normal(D, 8), "W1": normal(D, 8, seed=1)},
)


def routed(count: int, to_none: bool = False) -> list[dict[str, np.ndarray]]:
    masks = {"some": np.arange(count) % 2 == 0, "none": np.full(count, to_none)}
    return [{"x": normal(count, D, seed=seed), **masks} for seed in range(3)]


@pytest.mark.parametrize(
    "options",
    [{"method": method} for method in METHODS]
    + [
        {"method": "gptq", "share_of_8_bits": 0.1},
    ],
    ids=str,
)
def test_an_expert_without_tokens_is_rounded_to_nearest_and_named(options):
    nearest = dequantised(read(quantize(ROUTED).model))["expert1"]
    result = quantize(ROUTED, calibration_data_reader=routed(16), **options)
    rows = {row.node: row for row in result.report.nodes}
    expected = options["method"] == "rtn" or "no token of the samples reaches it"
    assert rows["expert1"].method == "rtn"
    assert expected is True or rows["expert1"].reason == expected
    assert rows["expert0"].method == options["method"] or rows["expert0"].bits == 8
    assert rows["expert0"].output_error < 0.2
    if expected is not True:
        (note,) = (x for x in result.report.notes if not x.startswith("share_of_8_bits"))
        assert re.fullmatch("1 weights are rounded to nearest, .*: W1", note)
    np.testing.assert_array_equal(dequantised(read(result.model))["expert1"], nearest)


def test_gptq_with_a_token_or_two_rounds_to_nearest_and_says_so():
    weight = normal(D, 8)
    nearest = dequantised(read(quantize(matmul_of(weight)).model))["m"]
    for count, method in ((1, "rtn"), (3, "rtn"), (4, "gptq")):
        samples = [{"x": normal(count, D)}]
        result = quantize(matmul_of(weight), method="gptq", calibration_data_reader=samples)
        (row,), notes = result.report.nodes, result.report.notes
        assert row.method == method
        if method == "rtn":
            assert row.reason == f"gptq needs 4 tokens, not {count}"
            assert notes == [f"1 weights are rounded to nearest, as {row.reason}: W"]
            np.testing.assert_array_equal(dequantised(read(result.model))["m"], nearest)


@pytest.mark.parametrize(
    "error", [ValueError("stop"), KeyboardInterrupt()], ids=["error", "stop"]
)
@pytest.mark.parametrize("call", [0, 1, 2, 5])
def test_progress_that_raises_stops_everything(folder, error, call):
    calls = []

    def progress(*reported):
        calls.append(reported)
        if len(calls) > call:
            raise error

    with pytest.raises(type(error)):
        options = {"method": "awq_lite", "progress": progress}
        into(folder, pair(128), calibration_data_reader=data(2, 128), **options)
    assert call < len(calls) < call + 4  # tensors are written by several threads


@pytest.mark.parametrize("method", ["rtn", "gptq"])
@pytest.mark.parametrize("kilobytes", [100, 400, 600])
def test_a_full_disk_is_reported(tmp_path, kilobytes, method):
    with disk(tmp_path / "disk", kilobytes << 10) as root:
        samples = data(2, 256)
        options = {"method": method, "calibration_data_reader": samples}
        with pytest.raises(OSError, match=r"[Nn]o space left"):
            quantize(pair(256), root / "out.onnx", **options)
        assert not list(root.iterdir())


def test_threads_parse_no_python(tmp_path, monkeypatch):
    """Python 3.11 fails at it now and then (python/cpython#106905), as in headers of .npy."""
    parse = ast.parse

    def only_in_main(*arguments, **options):
        assert threading.current_thread() is threading.main_thread()
        return parse(*arguments, **options)

    monkeypatch.setattr(ast, "parse", only_in_main)
    options = {"method": "gptq", "calibration_data_reader": data(2, 128)}
    into(tmp_path, pair(128), **options)


def test_text_between_weights_is_kept(tmp_path):
    model = model_of(
        f"""g (string[T] s, float[T, {D}] x) => (float[T, {D}] y) {{
            one = Constant<value_ints=[1]>() t = Identity(s)
            a = Cast<to=1>(t) b = Unsqueeze(a, one) c = Add(x, b) d = MatMul(c, V)
            e = Cast<to=1>(t) f = Unsqueeze(e, one) h = Add(d, f) y = MatMul(h, W)
        }}""",
        {"V": normal(D, D), "W": normal(D, D)},
    )
    feed = {"s": np.array(["1", "-2.5"] * 4, object), "x": X}
    into(tmp_path, model, method="gptq", calibration_data_reader=[feed])
