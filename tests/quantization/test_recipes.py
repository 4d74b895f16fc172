# SPDX-License-Identifier: MIT
"""Recipes: the same in Python and as options; rules by node; what is refused."""

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from builders.command_line import as_json, printed
from builders.dequantized_models import relative_error, run
from builders.quantized_files import dequantised, read
from builders.text_models import model_of, normal

from ortplugins.quantization import Recipe, quantize

D = 64
RULES = {
    "*v": {"method": "rtn", "is_symmetric": False},
    "re:^(q|o)$": {"bits": 8},
    "o": "float",
}
SETTINGS = {"method": "gptq", "block_size": 16, "grid": "positive", "rules": RULES}
RECIPE = Recipe(**SETTINGS)


# What takes out of a preset all that is no rule.
PLAIN = {"share_of_8_bits": 0.0, "scale_type": "float32"}


@pytest.fixture(autouse=True)
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ir.Model:
    """Four products, three of which share an activation."""
    monkeypatch.chdir(tmp_path)
    model = model_of(
        f"""g (float[T, {D}] x) => (float[T, {D}] y) {{
            [q] q = MatMul(x, Q) [k] k = MatMul(x, K) [v] v = MatMul(x, V)
            qk = Mul(q, k) s = Add(qk, v) [o] y = MatMul(s, O) }}""",
        {name: normal(D, D, seed=number) for number, name in enumerate("QKVO")},
    )
    ir.save(model, "model.onnx")
    np.savez("samples.npz", **SAMPLES[0])
    return model


# Channels of different energy, so that methods differ.
SAMPLES = [{"x": normal(300, D, seed=9) * np.geomspace(0.1, 10, D, dtype=np.float32)}]


def matrices(model: ir.Model, recipe: Recipe | str, **settings) -> dict[str, np.ndarray]:
    result = quantize(model, recipe=recipe, calibration_data_reader=SAMPLES, **settings)
    return dequantised(read(result.model))


def test_dataclass_settings_and_options_say_the_same(model: ir.Model):
    expected = matrices(model, RECIPE)
    assert sorted(expected) == ["k", "q", "v"]
    options = ["--method", "gptq", "--block-size", "16"]
    options += ["--set", "grid=positive"]
    for rule in ("*v=method:rtn,is_symmetric:false", "re:^(q|o)$=bits:8", "o=float"):
        options += ["--rule", rule]
    printed("quantize", "model.onnx", "--samples", "samples.npz", *options, "-o", "out.onnx")
    for found in (
        dequantised(onnx.load("out.onnx")),
        matrices(model, Recipe(), **SETTINGS),
        # What is given with a recipe wins.
        matrices(model, "best", **SETTINGS, **PLAIN),
    ):
        for name, matrix in expected.items():
            np.testing.assert_array_equal(found[name], matrix)


def test_nodes_of_one_activation_get_methods_of_their_own(model: ir.Model):
    found = matrices(model, RECIPE)
    alone = RECIPE.with_settings({"rules": {"re:^[kvo]$": "float"}})
    np.testing.assert_array_equal(found["q"], matrices(model, alone)["q"])
    rounded = matrices(model, Recipe(block_size=16, is_symmetric=False))
    np.testing.assert_array_equal(found["v"], rounded["v"])
    assert not np.array_equal(found["k"], matrices(model, Recipe(block_size=16))["k"])

    # Scales are taken out again for their own weights only.
    recipe = Recipe(
        method="awq_lite", bits=8, rules={"k": {"method": "gptq"}, "v": {"method": "rtn"}}
    )
    result = quantize(model, recipe=recipe, calibration_data_reader=SAMPLES)
    rows = {row.node: (row.method, row.folded) for row in result.report.nodes}
    assert rows["q"] == ("awq_lite", "mul") and rows["k"] == ("gptq", "")
    assert rows["v"] == ("rtn", "")
    ours, expected = (run(read(m), SAMPLES[0])[0] for m in (result.model, model))
    assert relative_error(ours, expected) < 0.02


HEADS = {
    "transposed": "t = Transpose(E) [head] y = MatMul(h, t)",
    "Gemm": "[head] y = Gemm <transB = 1> (h, E)",
}


def tied_model(head: str, rows: int, k: int) -> dict[str, np.ndarray]:
    """Write a model whose head reads its table, and samples; return its feed."""
    text = f"""g (int64[T] i) => (float[T, {rows}] y) {{
        [table] x = Gather(E, i) [up] h = MatMul(x, W) {HEADS[head]} }}"""
    # At 4 bits most of the loss is the head's.
    model = model_of(text, {"E": normal(rows, k), "W": normal(k, k, seed=1)})
    ir.save(model, "tied.onnx", external_data="tied.data", size_threshold_bytes=1)
    feed = {"i": np.arange(rows)}
    np.savez("ids.npz", **feed)
    return feed


def stored_bytes(path: str) -> int:
    """What a model's tensors take in its files, those of the same place once."""
    places: dict[object, int] = {}
    for tensor in onnx.load(path, load_external_data=False).graph.initializer:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        place = entries.get("offset", tensor.name)
        places[place] = int(entries.get("length", len(tensor.raw_data)))
    return sum(places.values())


@pytest.mark.parametrize("k", [128, 96])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", ["small", "balanced", "best"])
def test_presets_store_a_table_that_is_the_head_once(name: str, head: str, k: int):
    rows = 200
    feed = tied_model(head, rows, k)
    arguments = ["quantize", "tied.onnx", "--samples", "ids.npz"]
    reported = as_json(*arguments, "--recipe", name, "-o", "out.onnx")
    proto = onnx.load("out.onnx")
    operators = [node.op_type for node in proto.graph.node]
    assert {"GatherBlockQuantized", "MatMulNBits", "DequantizeLinear"} <= set(operators)
    matrices = dequantised(proto)
    np.testing.assert_array_equal(matrices["table"], matrices["head"])
    bits = {row["node"]: row["bits"] for row in reported["nodes"]}
    sizes = {"small": 128, "balanced": 64, "best": 32}
    assert sizes[name] in {row["block_size"] for row in reported["nodes"]}
    assert bits["table"] == bits["head"] == (4 if name == "small" else 8)
    # With 96 columns MatMulNBits' blocks are filled up, so that it has codes of its own.
    assert (reported["bytes_after"] == stored_bytes("out.onnx")) == (k == 128)
    assert reported["bits_per_weight"] == 8 * reported["bytes_after"] / (rows * k + k * k)
    # Of so small a model no weight is within the share; but nobody asked for it.
    assert not reported["notes"]
    found, expected = (run(read(path), feed)[0] for path in ("out.onnx", "tied.onnx"))
    assert relative_error(found, expected) < (0.2 if name == "small" else 0.12)
