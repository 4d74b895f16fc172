# SPDX-License-Identifier: MIT
"""Overrides: read from what users have, kept by the pass."""

import enum
from pathlib import Path

import onnx_ir as ir
import onnxruntime
import pytest
from builders.sessions import CPU, options
from builders.text_cases import text_cases
from onnxruntime.quantization import QuantType

import ortplugins
from rewrite_rules.mixed_precision_boundaries.tensor_overrides import (
    OverrideError,
    TensorOverride,
    read_overrides,
)
from session_options import MixedPrecisionBoundaries, OptionError

KEY = "ortplugins.mixed_precision_boundaries.overrides"


def test_json_and_onnxruntimes_dict_read_alike():
    text = """{"a": [{"quant_type": "QUInt16", "convert":
        {"quant_type": "QUInt8", "recv_nodes": ["C", "B"]}}], "b": [], "W": [{}]}"""
    convert = {"quant_type": QuantType.QUInt8, "recv_nodes": {"B", "C"}}
    theirs = {"a": [{"quant_type": QuantType.QUInt16, "convert": convert}], "b": [], "W": [{}]}
    expected = TensorOverride(ir.DataType.UINT16, ir.DataType.UINT8, frozenset({"B", "C"}))
    assert read_overrides(text) == read_overrides(theirs) == {"a": expected}


class Colour(enum.Enum):
    RED = 1


SOURCES = text_cases(Path(__file__).with_name("sources.txt"))
# Such as no file has.
ODD_SOURCES = {"an enum": {"t": [{"quant_type": Colour.RED}]}, "nested": "[" * 100_000}


@pytest.mark.parametrize("source", SOURCES)
def test_what_is_no_override_is_refused_by_its_place(source):
    """The name of a case is the source, or that of an odd one."""
    with pytest.raises(OverrideError) as caught:
        read_overrides(ODD_SOURCES.get(source, source))
    SOURCES[source].expect(str(caught.value))


LONG = {
    f"tensor_{i:04}_QuantizeLinear_Output": [{"quant_type": "QUInt16"}] for i in range(200)
}


def test_the_pass_keeps_canonical_json():
    convert = {"recv_nodes": ["n"], "quant_type": QuantType.QInt16}
    made = MixedPrecisionBoundaries(overrides={"b": [{"convert": convert}], "a": []})
    text = '{"b": [{"convert": {"quant_type": "QInt16", "recv_nodes": ["n"]}}]}'
    assert made.overrides == text
    assert MixedPrecisionBoundaries(overrides=f' {text[:-1]}, "a":[]}}') == made
    assert MixedPrecisionBoundaries(overrides={}) == MixedPrecisionBoundaries()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"overrides": '{"t": [{"scale": 1}]}'}, rf"{KEY}: overrides\['t'\]\[0\]\['scale'\]"),
        ({"overrides": 5}, f"{KEY}: overrides are int 5"),
        ({"overrides": None}, f"{KEY} is None; expected a str"),
        ({"mode": "int8"}, "mode is 'int8'; expected one of int16, float"),
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
    so = options(MixedPrecisionBoundaries(overrides={"aa": [{"quant_type": "QUInt16"}]}))
    words = r"(?s)override of tensor 'aa'.*did you mean 'a'\?"
    with pytest.warns(ortplugins.OrtpluginsWarning, match=words):
        session = ortplugins.InferenceSession(model_path, so, providers=CPU)
    assert session.ortplugins_report.source == "untouched"
