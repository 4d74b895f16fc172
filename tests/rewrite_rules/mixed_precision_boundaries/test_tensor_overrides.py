# SPDX-License-Identifier: MIT
"""Overrides: read from what users have, checked against a model, kept by the pass."""

import enum
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from builders.sessions import CPU, options
from builders.text_cases import text_cases
from onnxruntime.quantization import QuantType

import ortplugins
from rewrite_rules.mixed_precision_boundaries.tensor_overrides import (
    Activation,
    OverrideError,
    TensorOverride,
    check_overrides,
)
from session_options import MixedPrecisionBoundaries, OptionError
from session_options.override_json import read_overrides

UINT8, INT8, UINT16, INT16 = (
    ir.DataType.UINT8,
    ir.DataType.INT8,
    ir.DataType.UINT16,
    ir.DataType.INT16,
)
KEY = "ortplugins.mixed_precision_boundaries.overrides"


@pytest.mark.parametrize(
    "spelling", ["QUInt16", "uint16", QuantType.QUInt16, ir.DataType.UINT16, np.dtype("u2")]
)
def test_types_go_by_any_usual_name(spelling):
    found = read_overrides({"t": [{"quant_type": spelling}]})
    assert found == {"t": TensorOverride(quant_type=UINT16)}


def test_json_and_onnxruntimes_dict_read_alike():
    text = """{"a": [{"quant_type": "QUInt16", "scale": 0.5, "zero_point": 32768, "convert":
        {"quant_type": "QUInt8", "recv_nodes": ["C", "B"], "rmin": -1, "symmetric": false}}],
        "b": [], "W": [{}], "V": [{"rmin": null}]}"""
    theirs = {
        "quant_type": QuantType.QUInt8,
        "recv_nodes": {"B", "C"},
        "rmin": np.array(-1, np.float16),
        "symmetric": np.False_,
        "rmax": None,
    }
    numbers = {"scale": np.array(0.5, np.float32), "zero_point": np.array([32768], np.uint16)}
    entry = {"quant_type": QuantType.QUInt16, "convert": theirs, **numbers}
    nodes = frozenset({"B", "C"})
    convert = TensorOverride(UINT8, symmetric=False, rmin=-1.0, recv_nodes=nodes)
    expected = TensorOverride(UINT16, 0.5, 32768, convert=convert)
    assert read_overrides(text) == read_overrides({"a": [entry], "b": [], "W": [{}]})
    assert read_overrides(text) == {"a": expected}


class Colour(enum.Enum):
    RED = 1


SOURCES = text_cases(Path(__file__).with_name("sources.txt"))
# Such as no file has.
ODD_SOURCES = {
    "a key that is no text": {3: []},
    "an enum": {"t": [{"quant_type": Colour.RED}]},
    "not a number": {"t": [{"scale": float("nan")}]},
    "a great integer": {"t": [{"scale": 10**400}]},
    "a list of numbers": {"t": [{"scale": np.ones(3)}]},
    "nested": "[" * 100_000,
    "digits": '{"t": [{"zero_point": ' + "1" * 5000 + "}]}",
}


@pytest.mark.parametrize("source", SOURCES)
def test_what_is_no_override_is_refused_by_its_place(source):
    """The name of a case is the source, or that of an odd one."""
    with pytest.raises(OverrideError) as caught:
        read_overrides(ODD_SOURCES.get(source, source))
    SOURCES[source].expect(str(caught.value)[:70].splitlines()[0])


ACTIVATIONS = {
    "conv1_out": Activation(UINT8, frozenset({"conv2", "skip_add"})),
    "conv2_out": Activation(UINT8, frozenset({"skip_add"})),
    "lonely": Activation(None, frozenset()),
}
NODES = {"conv1", "conv2", "skip_add", "relu"}


def check(**overrides: dict[str, Any]) -> None:
    entries = {name: [value] for name, value in overrides.items()}
    check_overrides(read_overrides(entries), ACTIVATIONS, NODES)


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("conv1_out", {"quant_type": "uint16"}),
        ("conv1_out", {"quant_type": "uint16", "convert": {"quant_type": "uint8"}}),
        ("conv1_out", {"convert": {"quant_type": "int16", "recv_nodes": ["conv2"]}}),
        ("conv1_out", {"scale": 0.1, "zero_point": 255}),
        ("conv1_out", {"quant_type": "int16", "scale": 1e-6, "zero_point": -32768}),
        ("conv1_out", {"rmin": -1, "rmax": 1, "symmetric": True}),
        ("conv1_out", {"rmax": 1}),
        ("not_there", {}),
    ],
)
def test_what_activations_take_passes(name, entry):
    check(**{name: entry})


FAULTS = text_cases(Path(__file__).with_name("faults.txt"))


@pytest.mark.parametrize("case", FAULTS)
def test_faults_are_named(case):
    """The name of a case is a tensor with its override."""
    name, _, entry = case.partition(": ")
    # Behind an entry that is right, where onnxruntime looks no more.
    with pytest.raises(OverrideError) as caught:
        check(conv2_out={"quant_type": "uint16"}, **{name: json.loads(entry)})
    FAULTS[case].expect(str(caught.value))


def test_all_faults_are_told_at_once():
    with pytest.raises(OverrideError) as caught:
        check(conv1_out={"scale": 0, "rmin": 1}, conv3_out={"rmax": 1})
    assert len(str(caught.value).splitlines()) == 4
    with pytest.raises(OverrideError) as caught:
        check(**{f"stale{i}": {"rmax": 1} for i in range(30)})
    lines = str(caught.value).splitlines()
    assert len(lines) == 11
    assert lines[-1] == "and more"


CHAIN = """<ir_version: 8, opset_import: ["": 17]>
chain (float[n, 4] x) => (float[n, 4] y) <float[4, 4] W = {
    0.5, -1, 2, 0.25, 1, 1, -0.5, 3, 0, 1, 2, -3, 0.1, 0.2, 0.3, 0.4}>
{ [first] a = MatMul(x, W)  [second] b = Sigmoid(a)  [third] c = Relu(a)  y = Add(b, c) }"""


LONG = {
    f"tensor_{i:04}_QuantizeLinear_Output": [{"quant_type": "QUInt16"}] for i in range(200)
}


def test_the_pass_keeps_canonical_json():
    entry = {"b": [{"rmax": 1, "quant_type": QuantType.QUInt16}], "a": []}
    made = MixedPrecisionBoundaries(overrides=entry)
    assert made.overrides == '{"b": [{"quant_type": "QUInt16", "rmax": 1.0}]}'
    spelt = ' {"b":[{"quant_type":"uint16","rmax":1}], "a":[]}'
    assert MixedPrecisionBoundaries(overrides=spelt) == made
    assert MixedPrecisionBoundaries(overrides={}) == MixedPrecisionBoundaries()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"overrides": '{"t": [{"scal": 1}]}'}, rf"{KEY}: overrides\['t'\]\[0\]\['scal'\]"),
        ({"overrides": 5}, f"{KEY}: overrides are int 5"),
        ({"overrides": None}, f"{KEY} is None; expected a str"),
        ({"mode": "int8"}, "mode is 'int8'; expected one of int16, float"),
        ({"target": "npu"}, "target is 'npu'; expected one of cpu, qnn"),
    ],
)
def test_the_pass_checks_its_options(options, words):
    with pytest.raises(OptionError, match=words):
        MixedPrecisionBoundaries(**options)


def test_what_is_too_long_for_an_entry_is_for_files():
    so = onnxruntime.SessionOptions()
    chosen = MixedPrecisionBoundaries(overrides=LONG)
    with pytest.raises(OptionError, match=rf"{KEY} has 1\d,\d+ bytes.*8,192.*optimize\(\)"):
        ortplugins.configure(so, chosen)
    with pytest.raises(RuntimeError):  # nothing was stored
        so.get_session_config_entry("ortplugins.enable_mixed_precision_boundaries")


QDQ = """<ir_version: 10, opset_import: ["": 21]>
g (float[n] x) => (float[n] y)
<float s = {0.02}, uint8 z = {128}, float s2 = {0.01}, uint8 z2 = {0}> {
    q = QuantizeLinear(x, s, z)  d = DequantizeLinear(q, s, z)
    [sigmoid] a = Sigmoid(d)
    aq = QuantizeLinear(a, s2, z2)  y = DequantizeLinear(aq, s2, z2)
}"""


@pytest.fixture
def model_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    ir.save(ir.from_onnx_text(QDQ), tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


def test_a_model_that_cannot_follow_is_left_and_says_why(model_path):
    so = options(MixedPrecisionBoundaries(overrides={"aa": [{"quant_type": "uint16"}]}))
    words = r"(?s)override of tensor 'aa'.*did you mean 'a'\?"
    with pytest.warns(ortplugins.OrtpluginsWarning, match=words):
        session = ortplugins.InferenceSession(model_path, so, providers=CPU)
    assert session.ortplugins_report.source == "untouched"
