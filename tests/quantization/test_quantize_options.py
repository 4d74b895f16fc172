# SPDX-License-Identifier: MIT
"""What quantize() is asked, what it gives back, and what it leaves alone."""

import json
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from builders.dequantized_models import relative_error, run
from builders.quantized_files import FORMATS, arrays_of, dequantised, kinds, read
from builders.same_numbers import session
from builders.text_models import matmul_chain, matmul_of, model_of, normal

import ortplugins
from ortplugins.errors import ModelFileError
from ortplugins.quantization import quantize

D = 32


def chain(*names: str) -> ir.Model:
    return matmul_chain(names, [D] * (len(names) + 1))


def large() -> ir.Model:
    """One product, whose codes are large enough for a data file."""
    return matmul_of(normal(128, 96))


def shared() -> ir.Model:
    products = "[a] h = MatMul(x, W) [b] y = MatMul(h, W)"
    return model_of(
        f"g (float[T, {D}] x) => (float[T, {D}] y) {{ {products} }}", {"W": normal(D, D)}
    )


def only(*patterns):
    """Rules by which nothing else is quantised."""
    return {"*": "float"} | {pattern: {"keep_float": False} for pattern in patterns}


def chosen(model: ir.Model, **options) -> list[str]:
    report = quantize(model, **options).report
    assert len(report.nodes) == len(list(model.graph))
    assert sum(map(len, (report.quantized, report.refused))) == len(report.nodes)
    return [row.node for row in report.quantized]


def exported(named: str, opset: int) -> ir.Model:
    """As torch's newer exporter names: nodes by number, weights or scopes by module."""
    modules = "l.0.up", "lm_head"
    names = [f"{m}.weight" if named == "weights" else f"W{i}" for i, m in enumerate(modules)]
    text = f"""g (float[T, {D}] x) => (float[T, {D}] y) {{
        [node_linear] h = MatMul(x, "{names[0]}")
        [node_linear_1] y = MatMul(h, "{names[1]}")
    }}"""
    model = model_of(text, {name: normal(D, D) for name in names}, opset=opset)
    for node, module in zip(model.graph, modules, strict=True):
        if named == "scopes":
            node.metadata_props["pkg.torch.onnx.name_scopes"] = f"['', '{module}', 'linear']"
        elif named == "namespace":
            node.metadata_props["namespace"] = f": torch.Program/{module}: Linear/a: aten.b"
    return model


@pytest.mark.parametrize("opset", [17, 21])  # one is converted
@pytest.mark.parametrize("named", ["weights", "scopes", "namespace"])
@pytest.mark.parametrize("pattern", ["*lm_head*", "re:^lm_head", "lm_head*"])
def test_patterns_mean_weights_and_modules_too(pattern, named, opset):
    model = exported(named, opset)
    assert chosen(model, rules={pattern: "float"}) == ["node_linear"]
    rows = quantize(model, rules={pattern: {"bits": 8}}).report.nodes
    assert [row.bits for row in rows] == [4, 8]


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("scale_type", ["float32", "float16"])
@pytest.mark.parametrize(
    "other", [{"bits": np.int8(8), "block_size": np.int64(16)}, {"method": "gptq"}], ids=str
)
def test_one_weight_in_two_forms(layout, scale_type, other):
    options = {"quant_format": layout, "scale_type": scale_type, "rules": {"b": other}}
    x = normal(40, D)
    result = quantize(shared(), calibration_data_reader=[{"x": x}], **options)
    proto = read(result.model)
    matrices = dequantised(proto)
    assert not np.array_equal(matrices["a"], matrices["b"])
    expected = x.astype(float) @ matrices["a"] @ matrices["b"]
    assert relative_error(run(proto, {"x": x})[0], expected) < 1e-5
    rows = {row.node: (row.bits, row.method) for row in result.report.nodes}
    assert rows == {"a": (4, "rtn"), "b": (other.get("bits", 4), other.get("method", "rtn"))}


@pytest.mark.parametrize("level", [0, 1, 4])
def test_accuracy_level_is_an_attribute(level):
    result = quantize(chain("m"), quant_format="MatMulNBits", accuracy_level=level)
    (node,) = read(result.model).graph.node
    assert {a.name: a.i for a in node.attribute}.get("accuracy_level", 0) == level


# What was quantised before.


@pytest.mark.parametrize("layout", FORMATS)
def test_a_second_round_leaves_what_is_done(layout):
    model, options = chain("a", "b", "c"), {"quant_format": layout, "block_size": 16}
    first = read(quantize(model, rules=only("b"), **options).model)
    second = quantize(first, **options)
    done = dequantised(first)
    assert list(done) == ["b"]
    both = dequantised(read(second.model))
    assert np.array_equal(both["b"], done["b"])
    kept = arrays_of(read(second.model))
    for name, array in arrays_of(first).items():
        if name not in ("W0", "W2"):
            assert array.tobytes() == kept[name].tobytes()
    assert {row.node for row in second.report.quantized} == {"a", "c"}
    at_once = dequantised(read(quantize(model, **options).model))
    assert all(np.array_equal(both[name], at_once[name]) for name in "abc")
    for again in FORMATS:
        with pytest.raises(ModelFileError, match=r"already quantised|is the model quantised"):
            quantize(second.model, quant_format=again)


@pytest.mark.parametrize("method", ["awq_lite", "gptq"])
def test_what_has_no_statistics_is_rounded_to_nearest_and_says_why(method):
    model = model_of(
        f"g () => (float[{D}, {D}] y) {{ [m] y = MatMul(V, W) }}",
        {"V": normal(D, D), "W": normal(D, D)},
    )
    data = [{}]
    (row,) = quantize(model, method=method, calibration_data_reader=data).report.quantized
    assert row.method == "rtn"
    assert "both of its operands are constants" in row.reason


# Models, files, and their kinds.


@pytest.mark.parametrize("stored_outside", [True, False])
@pytest.mark.parametrize("given", [ir.Model, onnx.ModelProto, Path])
def test_a_model_comes_back_as_it_came_with_a_data_file_where_it_had_one(
    tmp_path, given, stored_outside
):
    source, output = tmp_path / "model.onnx", tmp_path / "out.onnx"
    ir.save(large(), source, external_data="model.data" if stored_outside else None)
    made = {ir.Model: ir.load, onnx.ModelProto: onnx.load, Path: Path}[given](source)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    frozen = b"" if given is Path else read(made).SerializeToString(deterministic=True)
    x, inside, result = normal(3, 128), quantize(made), quantize(made, output)
    assert (inside.path, result.path) == (None, output)
    assert isinstance(result.model, ir.Model if given is Path else given)
    assert given is Path or read(made).SerializeToString(deterministic=True) == frozen
    assert before == {name: (tmp_path / name).read_bytes() for name in before}
    outside = stored_outside and given is Path
    written = {"out.onnx", "out.onnx.data"} if outside else {"out.onnx"}
    assert {path.name for path in tmp_path.iterdir()} == before.keys() | written
    # The result is usable beside its file, and needs none of the model's.
    for name in before:
        (tmp_path / name).unlink()
    proto = read(result.model)
    stored = [t for t in proto.graph.initializer if t.external_data]
    data = tmp_path / "out.onnx.data"
    assert all((tmp_path / t.external_data[0].value).samefile(data) for t in stored)
    onnx.external_data_helper.load_external_data_for_model(proto, str(tmp_path))
    for tensor in proto.graph.initializer:
        tensor.data_location = onnx.TensorProto.DEFAULT
    found = run(str(output), {"x": x})[0]
    assert np.array_equal(run(proto, {"x": x})[0], found)
    assert stored_outside or np.array_equal(run(read(inside.model), {"x": x})[0], found)
    assert relative_error(found, x @ dequantised(read(output))["m"]) < 1e-5


def test_neither_what_exists_nor_the_model_itself_is_written_over(tmp_path):
    source, data = tmp_path / "source.onnx", tmp_path / "new.onnx.data"
    ir.save(large(), source, external_data="source.data")
    data.write_text("mine")
    before = source.read_bytes()
    with pytest.raises(FileExistsError, match=r"new\.onnx\.data"):
        quantize(source, tmp_path / "new.onnx")
    with pytest.raises(ModelFileError, match="the model itself"):
        quantize(source, source, overwrite=True)
    assert (source.read_bytes(), data.read_text()) == (before, "mine")
    assert len(list(tmp_path.iterdir())) == 3


# What it says.


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("method", ["rtn", "awq_lite", "gptq"])
def test_scales_of_float16_are_cast_where_they_are_read(method, layout, tmp_path):
    x = normal(50, D, seed=9) * np.geomspace(0.1, 10, D, dtype=np.float32)
    options = {"calibration_data_reader": [{"x": x}], "method": method}
    options |= {"scale_type": "float16", "quant_format": layout, "block_size": 16}
    result = quantize(chain("m"), tmp_path / "out.onnx", **options)
    proto = read(tmp_path / "out.onnx")
    onnx.checker.check_model(proto, full_check=layout != "MatMulNBits")
    small = layout != "MatMulNBits"  # whose scales are of the activations' type
    types = {array.dtype for name, array in arrays_of(proto).items() if "scales" in name}
    assert (np.dtype(np.float16) in types) == small
    assert result.report.bits_per_weight == (5 if small else 6)
    (row,), (found,) = result.report.nodes, run(proto, {"x": x})
    expected = x @ normal(D, D, seed=0)
    ratio = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert ratio == pytest.approx(row.output_error, rel=1e-2)
    if layout != "QDQ_transposed":  # onnxruntime's own fusion, and ours
        session(str(tmp_path / "out.onnx"), optimised=True, final=tmp_path / "optimized.onnx")
        assert "MatMulNBits" in kinds(onnx.load(tmp_path / "optimized.onnx"))
    exact = [ortplugins.DqMatMulNBitsFusion(accuracy_level=0)]
    ortplugins.optimize(tmp_path / "out.onnx", tmp_path / "fused.onnx", passes=exact)
    fused = read(tmp_path / "fused.onnx")
    assert "DequantizeLinear" not in kinds(fused)
    assert relative_error(run(fused, {"x": x})[0], found) < (2e-2 if layout == "QDQ" else 1e-5)


@pytest.mark.parametrize("method", ["rtn", "gptq"])
@pytest.mark.parametrize(
    ("size", "reason"), [(1e-8, "below float16's least"), (1e7, "beyond 65504")]
)
def test_weights_that_scales_of_float16_do_not_suit_are_named(method, size, reason):
    model, data = matmul_of(normal(D, D) * np.float32(size)), [{"x": normal(40, D)}]
    options = {"method": method, "calibration_data_reader": data}
    with pytest.raises(ValueError, match=f"weight 'W' cannot be quantised: .* {reason}"):
        quantize(model, scale_type="float16", **options)
    assert quantize(model, **options).report.nodes[0].weight_error < 0.2


def test_the_report_is_json_and_text():
    report = quantize(chain("a", "b"), rules={"b": "float"}).report
    reported = json.loads(json.dumps(report.to_dict()), parse_constant=pytest.fail)
    assert reported["quantized"] == reported["refused"] == 1
    a, b = reported["nodes"]
    assert (a["node"], a["bits"], a["block_size"], a["bytes_before"]) == ("a", 4, 32, 4096)
    assert a["bytes_after"] == D * D // 2 + 4 * D
    assert 0 < a["weight_error"] < 0.2
    assert (b["node"], b["bits"], b["weight_error"]) == ("b", 0, None)
    assert reported["bits_per_weight"] == report.bits_per_weight == (5 + 32) / 2
    assert "1 quantised, 1 refused" in str(report)


# Opsets and what else a model carries.


FUNCTIONS = """
<ir_version: 10, opset_import: ["": 21, "own": 1]>
g (float[T, 32] x) => (float[T, 32] y) {
    h = own.twice(x)
    i = own.linear(h, V)
    [m] y = MatMul(i, W)
}
<domain: "own", opset_import: ["": 21]>
twice (a) => (b) { b = Add(a, a) }
<domain: "own", opset_import: ["": 21]>
linear (a, w) => (b) { [linear] b = MatMul(a, w) }
"""


@pytest.mark.parametrize("opset", [17, 21])
@pytest.mark.parametrize("method", ["rtn", "gptq"])
@pytest.mark.parametrize("layout", FORMATS)
def test_weights_of_functions_are_quantised_in_the_opset_that_the_form_needs(
    opset, method, layout
):
    given = FUNCTIONS.replace('"": 21', f'"": {opset}')
    proto = onnx.parser.parse_model(given.replace(": 10", ": 8" if opset == 17 else ": 10"))
    for seed, name in enumerate("VW"):
        weight = onnx.numpy_helper.from_array(normal(D, D, seed=seed), name)
        proto.graph.initializer.append(weight)
    data = {"calibration_data_reader": [{"x": normal(40, D)}]}
    result = quantize(proto, method=method, quant_format=layout, **data)
    assert [(row.weight, row.method) for row in result.report.nodes] == [
        ("V", method),
        ("W", method),
    ]
    found, x = read(result.model), normal(3, D)
    version = next(item.version for item in found.opset_import if item.domain == "")
    assert version == (17 if opset == 17 and layout == "MatMulNBits" else 21)
    assert found.ir_version == 10
    noted = any("opset 17 was converted" in note for note in result.report.notes)
    assert noted == (version > opset)
    first, second = dequantised(found).values()
    expected = 2 * x @ first @ second
    assert relative_error(run(found, {"x": x})[0], expected) < 1e-5
