# SPDX-License-Identifier: MIT
"""Float models to mixed precision: onnxruntime's graphs, with grids that agree."""

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from builders.command_line import ortplugins_command, printed, refused
from builders.dequantized_models import run
from builders.qdq_models import chains
from builders.samples import Reader
from builders.text_cases import text_cases
from builders.text_models import proto_of
from onnxruntime.quantization import CalibrationMethod, QuantType, quantize_static

from ortplugins import quantize_static_mixed
from ortplugins.errors import CalibrationError, QuantizationError
from session_options import OptionError

# onnx_ir's type of an element type, as onnx's text has it.
FLOATS = {"float": np.float32, "float16": np.float16}
QUANTILES = {"calibrate_method": CalibrationMethod.Percentile}


def conv_net(kind: str = "float", opset: int = 21) -> onnx.ModelProto:
    random = np.random.default_rng(0)
    shapes = {"W": (4, 3, 3, 3), "B": (4,), "V": (4, 512)}  # of more than a KiB
    return proto_of(
        f"""net ({kind}[n, 3, h, h] x) => ({kind}[n, 512] y) {{
            ["conv"] a = Conv<pads = [1, 1, 1, 1]>(x, W, B)
            ["relu"] b = Relu(a)
            ["sigmoid"] c = Sigmoid(b)
            ["mul"] d = Mul(b, c)
            ["pool"] e = GlobalAveragePool(d)
            ["flat"] f = Flatten(e)
            ["head"] y = MatMul(f, V)
        }}""",
        {name: random.normal(size=s).astype(FLOATS[kind]) for name, s in shapes.items()},
        opset=opset,
    )


def samples(count: int = 3, dtype: Any = np.float32, size: int = 8) -> list[dict[str, Any]]:
    random = np.random.default_rng(1)
    return [{"x": random.normal(size=(1, 3, size, size)).astype(dtype)} for _ in range(count)]


def arrays(model: onnx.ModelProto) -> dict[str, tuple[str, bytes]]:
    tensors = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    return {name: (str(array.dtype), array.tobytes()) for name, array in tensors.items()}


def nodes(model: onnx.ModelProto) -> list[str]:
    # By way of onnx_ir: an empty domain may be written or not.
    return sorted(map(str, ir.to_proto(ir.from_proto(model)).graph.node))


@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("method", [CalibrationMethod.MinMax, CalibrationMethod.Entropy])
def test_without_promotions_it_is_onnxruntimes_graph_byte_for_byte(kind, method, tmp_path):
    names = ("model.onnx", "theirs.onnx", "ours.onnx")
    given, *made = (tmp_path / name for name in names)
    onnx.save(conv_net(kind), given)
    feeds = samples(dtype=FLOATS[kind])
    same = {"calibrate_method": method, "extra_options": {"ActivationSymmetric": True}}
    usual = {"per_channel": True, "activation_type": QuantType.QUInt8}
    quantize_static(given, made[0], Reader(feeds), **usual, **same)
    result = quantize_static_mixed(given, made[1], feeds, **same)
    theirs, ours = map(onnx.load, made)
    assert arrays(ours) == arrays(theirs)
    assert nodes(ours) == nodes(theirs)
    assert result.path == made[1]
    assert result.report.notes == (f"ranges from 3 samples, {method.name}",)
    assert {path.name for path in tmp_path.iterdir()} == {*names}


def test_models_and_data_may_be_objects_and_files(tmp_path):
    proto, path = conv_net(), tmp_path / "m.onnx"
    onnx.save(proto, path, save_as_external_data=True, size_threshold=0, location="w")
    proto = conv_net()
    results = [
        quantize_static_mixed(given, None, samples()).model
        for given in (proto, path, ir.from_proto(proto))
    ]
    assert isinstance(results[0], onnx.ModelProto) and isinstance(results[2], ir.Model)
    protos = [results[0], *map(ir.to_proto, results[1:])]
    assert all(run(each, samples()[0])[0].shape == (1, 512) for each in protos)
    assert arrays(protos[0]) == arrays(protos[1]) == arrays(protos[2])
    assert proto == conv_net()
    read = quantize_static_mixed(proto, None, Reader(samples())).model
    assert arrays(read) == arrays(protos[0])


def paths(model: onnx.ModelProto) -> set[str]:
    return chains(ir.from_proto(model))


def op_types(model: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.node)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"promote": ["a"]},  # what reads its output stays in 8 bits
        {"promote": ["a", "b"]},
        {"calibrate_method": CalibrationMethod.Distribution},  # its range has negative values
    ],
    ids=str,
)
def test_relu_goes_as_in_onnxruntime_or_stays_with_its_name(options):
    result = quantize_static_mixed(conv_net(), None, samples(), **options)
    assert op_types(result.model)["Relu"] == bool(options)
    promoted = "promote" in options
    assert bool(result.report.fired) == promoted and not result.report.refused
    assert any("u16" in path for path in paths(result.model)) == promoted


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"data": None}, CalibrationError, "no calibration data"),
        ({"data": []}, CalibrationError, "empty"),
        ({"data": [{"z": 1}]}, CalibrationError, "'z'"),
        ({"calibrate_method": "Mean"}, QuantizationError, "quantiser failed: .* Mean"),
        ({"activation_type": QuantType.QUInt16}, QuantizationError, "uint16: name tensors"),
        ({"data": [{"x": samples()[0]["x"][:0]}]}, CalibrationError, "only empty arrays"),
        ({"op_types_to_quantize": ["Abs"]}, QuantizationError, "nothing to quantise"),
        (QUANTILES | {"op_types_to_quantize": ["Abs"]}, QuantizationError, "nothing to quant"),
        ({"no_such_setting": 1}, QuantizationError, "unexpected keyword .*no_such_setting"),
        ({"mode": "int8"}, OptionError, "'int8'"),
        ({"promote": ["conf"]}, QuantizationError, "is 'conf'; did you mean 'conv'"),
        ({"promote": "conv"}, QuantizationError, "promote is 'conv'; expected a list"),
        ({"mode": "float"}, QuantizationError, "mode has no effect"),
        ({"max_16bit": 2}, QuantizationError, "max_16bit is 2; expected 0 to 1"),
        ({"nodes_to_exclude": ["hed"]}, QuantizationError, "'head'"),
    ],
)
def test_errors_say_what_is_wrong(options, error, text, tmp_path):
    onnx.save(conv_net(), tmp_path / "model.onnx")
    options = {"data": samples(), **options}
    with pytest.raises(error, match=text):
        quantize_static_mixed(tmp_path / "model.onnx", tmp_path / "out.onnx", **options)
    assert {path.name for path in tmp_path.iterdir()} == {"model.onnx"}


def test_infinite_ranges_are_named_and_can_be_left_out():
    text = """g (float[n] x) => (float[n] y)
        { l = Log(x)  [add] z = Add(l, x)  e = Exp(z)  y = Sigmoid(e) }"""
    data = [{"x": np.array([0, 1, 2], np.float32)}]
    with pytest.raises(CalibrationError, match=r"'l' has no finite .*nodes_to_exclude"):
        quantize_static_mixed(proto_of(text), None, data)
    model = quantize_static_mixed(proto_of(text), None, data, nodes_to_exclude=["add"]).model
    assert op_types(model)["QuantizeLinear"] == 2


@pytest.mark.parametrize(
    ("kind", "opset", "per_channel", "least"),
    [
        ("float", 12, True, 13),
        ("float", 12, False, 12),
        ("float", 9, True, 13),
        ("float", 9, False, 10),
        ("float16", 13, True, 19),
        ("float16", 17, True, 19),
    ],
)
def test_older_models_are_converted_to_the_opset_that_scales_need(
    kind, opset, per_channel, least
):
    given, feeds = conv_net(kind, opset), samples(dtype=FLOATS[kind])
    result = quantize_static_mixed(given, None, feeds, per_channel=per_channel)
    assert op_types(result.model)["QuantizeLinear"] > 4
    assert result.model.opset_import[0].version == least
    assert given == conv_net(kind, opset)
    (new,), (old,) = (run(model, feeds[0]) for model in (result.model, given))
    np.testing.assert_allclose(new, old, atol=0.05 * np.abs(old).max())


def test_a_quantised_model_is_refused_and_an_output_that_exists(tmp_path):
    model = quantize_static_mixed(conv_net(), None, samples()).model
    with pytest.raises(QuantizationError, match="already quantised: nothing to promote"):
        quantize_static_mixed(model, None, samples())
    with pytest.raises(QuantizationError, match="already quantised: 'per_channel' has no"):
        quantize_static_mixed(model, None, samples(), promote=["d"], per_channel=False)
    again = quantize_static_mixed(model, None, samples(), promote=["d"]).model
    assert {"conv>u8>mul", "mul>u8>pool"} <= paths(model) - paths(again)
    assert "mul>u16>pool" in paths(again)
    (tmp_path / "there.onnx").write_text("mine")
    with pytest.raises(FileExistsError):
        quantize_static_mixed(conv_net(), tmp_path / "there.onnx", samples())
    assert (tmp_path / "there.onnx").read_text() == "mine"


READERS = text_cases(Path(__file__).with_name("readers.txt"))


@pytest.mark.parametrize("name", READERS)
def test_an_error_is_of_the_size_of_a_rounding(name):
    case = READERS[name]
    text = case.nodes
    random = np.random.default_rng(0)
    # In each product all terms but one are 0: uint8 times int8 saturates on some processors.
    weights = {
        "E": np.diag([0.5, 1.0, 2.0]),
        "S": [np.diag([0.5, 1.0, 2.0]), np.diag([-0.25, 0.1, 1.0])],
        "B": [0.3, -0.7, 1.1],
        "C": [[0.3, -0.7, 1.1]],
        "one": [0.3],
        "V": np.eye(4, 3),
        "T": random.normal(size=(2, 2, 1, 1)),
        "D": [0.3, -0.7, 1.1, 0.1],
        "K": [[[[0.0]], [[0.1]]], [[[3.0]], [[0.0]]]],
        "scale": 0.5,
    }
    used = {name: np.asarray(w, np.float32) for name, w in weights.items() if name in text}
    if "codes" in text:
        used["codes"] = np.ones((3, 2), np.int8)
    model = proto_of(text, used)
    given = {"i": np.array([2, 0])}
    for value in model.graph.input:
        kind = value.type.tensor_type
        if kind.elem_type != onnx.TensorProto.BOOL:
            dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
            shape = [size.dim_value for size in kind.shape.dim]
            given.setdefault(value.name, random.normal(size=shape).astype(dtype))
    feeds = [
        {v.name: given.get(v.name, np.array(truth)) for v in model.graph.input}
        for truth in (False, True)
    ]
    result = quantize_static_mixed(model, None, feeds)
    quantised = result.model
    case.expect("\n".join(result.report.notes[1:]) or "nothing stays in float")
    onnx.checker.check_model(quantised)
    for feed, optimised in itertools.product(feeds, (False, True)):
        for found, wanted in zip(
            run(quantised, feed, optimised=optimised), run(model, feed), strict=True
        ):
            np.testing.assert_allclose(found, wanted, atol=0.02 * np.abs(wanted).max())


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        ("--promote d --no-per-channel", {"promote": ["d"], "per_channel": False}, "d: uint8"),
        ("--max-16bit 0.25", {"max_16bit": 0.25}, "2 of 8 activations at 16 bits"),
    ],
)
def test_the_command_does_the_same(arguments, options, said, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    model = conv_net(opset=13)
    model.graph.input.append(onnx.helper.make_tensor_value_info("V", 1, [4, 512]))
    onnx.save(model, "model.onnx")
    np.savez("samples.npz", **samples(1)[0])
    files = ["model.onnx", "-o", "out.onnx", "--samples", "samples.npz"]
    command = ["quantize-static", *files, *arguments.split()]
    shown = printed(*command, "-v")
    assert "initializer" not in capfd.readouterr().err  # weights may be inputs
    assert said in shown and "-> uint16" in shown and "wrote out.onnx" in shown
    wanted = quantize_static_mixed("model.onnx", None, samples(1), **options)
    assert arrays(onnx.load("out.onnx")) == arrays(ir.to_proto(wanted.model))
    assert "--force" in refused(*command)
    done = ortplugins_command(*command, "--force", "--format", "json")
    assert json.loads(done.stdout)["fired"] == len(wanted.report.fired)
