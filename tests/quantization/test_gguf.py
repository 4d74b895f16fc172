# SPDX-License-Identifier: MIT
"""GGUF files: every block type of random bytes, its numbers by gguf's own dequantize."""

from collections.abc import Mapping
from pathlib import Path

import gguf_files as gf
import numpy as np
import onnx_ir as ir
import pytest
from builders.command_line import printed
from builders.dequantized_models import relative_error, run
from builders.quantized_files import FORMATS, arrays_of, dequantised, kinds, read
from builders.text_models import model_of, normal
from checkpoint_files import near, renamed

from examples.smollm2.llama import LlamaConfig, build_llama
from ortplugins.errors import ModelFileError
from ortplugins.quantization import quantize

gguf = pytest.importorskip("gguf")
quants = pytest.importorskip("gguf.quants")

TYPES = {  # name: bits and block size of what is written
    "Q4_0": (4, 32),
    "Q4_1": (4, 32),
    "Q5_0": (8, 32),
    "Q5_1": (8, 32),
    "Q8_0": (8, 32),
    "Q2_K": (2, 16),
    "Q3_K": (4, 16),
    "Q4_K": (4, 32),
    "Q5_K": (8, 32),
    "Q6_K": (8, 16),
    "IQ4_NL": (8, 32),
    "IQ4_XS": (8, 32),
}
IDS = np.array([3, 0, 47, 11, 3])


def expected(weights: Mapping[str, np.ndarray], norm: np.ndarray, bias: np.ndarray) -> list:
    """What the float model gives with these weights, in float64."""
    w = {name: weight.astype(float) for name, weight in weights.items()}
    h = w[gf.TABLE][IDS] * norm
    return [h @ w[gf.Q].T, h @ w[gf.KEY].T + bias, (h @ w[gf.DOWN].T)[:, :32] @ w[gf.UP].T]


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        *((kind, "MatMulNBits") for kind in TYPES),
        *(
            (kind, layout)
            for kind in ("Q4_0", "Q2_K", "Q5_K", "Q6_K")
            for layout in FORMATS[:2]
        ),
    ],
)
def test_every_block_type_keeps_its_numbers(tmp_path, kind, layout):
    path = tmp_path / "m.gguf"
    kinds_of = {name: kind for name in gf.SHAPES if gf.SHAPES[name][1] == gf.K} | {
        gf.UP: "Q8_0"
    }
    weights = gf.write_gguf(path, kinds_of)
    fused = {"fuse_tables": True} if layout == "QDQ" and kind in ("Q4_0", "Q6_K") else {}
    result = quantize(
        gf.attention(weights), checkpoint=path, quant_format=layout, op_types=gf.ALL, **fused
    )
    forms = {row.weight: (row.bits, row.block_size) for row in result.report.quantized}
    assert len(forms) == 5 and not result.report.refused
    assert forms[f"{gf.DOWN}.weight"] == forms["qw"] == TYPES[kind]
    found = run(result.model, {"ids": IDS})
    wanted = expected(weights, normal(gf.K, seed=1), normal(32, seed=2))
    for one, other in zip(found, wanted, strict=True):
        assert relative_error(one, other) < 2e-6
    # Errors are those to the float weights, so what was compared is what was written.
    for row in result.report.quantized:
        assert 0.01 < row.weight_error < 0.06, row
    stored = sum(row.bytes_after for row in result.report.quantized)
    own = sum(
        tensor.nbytes
        for name, tensor in arrays_of(read(result.model)).items()
        if any(part in name for part in ("block", ".offsets", "_nbits"))
    )
    assert layout != "QDQ_transposed" or own >= stored > 0


def test_weights_of_one_activation_share_what_offsets_need(tmp_path):
    layers = {gf.Q: "Q4_K", gf.KEY: "Q4_1", gf.DOWN: "Q5_K"}
    model = gf.attention(gf.write_gguf(tmp_path / "m.gguf", layers))
    result = quantize(model, checkpoint=tmp_path / "m.gguf")
    assert kinds(read(result.model)).count("ReduceSum") == 1


def test_a_note_names_what_is_not_in_the_result(tmp_path):
    def note_of(rules: Mapping[str, str], *vectors: str) -> str:
        path = tmp_path / "m.gguf"
        norms = dict.fromkeys(vectors, normal(gf.K, seed=1))
        layers = {gf.KEY: "Q4_1", gf.DOWN: "Q5_K"}
        model = gf.attention(gf.write_gguf(path, layers, vectors=norms))
        notes = quantize(model, checkpoint=path, rules=rules).report.notes
        return " ".join(note for note in notes if "of the checkpoint" in note)

    assert note_of({}, "blk.0.attn_norm.weight", "rope_freqs.weight") == ""
    left = "1 tensors of the checkpoint are not in the result, as "
    assert note_of({"*k_proj*": "float"}) == f"{left}'blk.0.attn_k.weight'"
    assert note_of({}, "blk.0.attn_q_norm.weight") == f"{left}'blk.0.attn_q_norm.weight'"


@pytest.mark.parametrize("layout", FORMATS)
def test_quantising_again_leaves_offsets_as_they_are(tmp_path, layout):
    layers = {gf.Q: "Q4_K", gf.KEY: "Q4_1", gf.DOWN: "Q5_K", gf.UP: "Q8_0", gf.TABLE: "Q4_1"}
    weights = gf.write_gguf(tmp_path / "m.gguf", layers)
    given = {"quant_format": layout, "op_types": gf.ALL}
    model = quantize(gf.attention(weights), checkpoint=tmp_path / "m.gguf", **given).model
    with pytest.raises(ModelFileError, match="the model is already quantised"):
        quantize(model, **given)


@pytest.mark.parametrize("name", [gf.BIAS, "model.layers.0.attn.k_proj.Add.bias"])
def test_floats_and_vectors_come_along(tmp_path, name):
    norm, bias = normal(gf.K, seed=1), normal(32, seed=2)
    vectors = {
        "blk.0.attn_norm.weight": norm * np.float32(1.01),
        "blk.0.attn_k.bias": gf.neighbours(bias * np.float32(0.99), gf.KV_HEADS),
    }
    path = tmp_path / "m.gguf"
    layers = {gf.Q: "BF16", gf.KEY: "F16", gf.DOWN: "Q4_0", gf.UP: "F32", gf.TABLE: "F16"}
    weights = gf.write_gguf(path, layers, vectors=vectors)
    model = renamed(gf.attention(weights), {gf.BIAS: name})
    result = quantize(model, checkpoint=path)
    assert [row.weight for row in result.report.quantized] == [f"{gf.DOWN}.weight"]
    wanted = expected(weights, vectors["blk.0.attn_norm.weight"], bias * np.float32(0.99))
    for one, other in zip(run(result.model, {"ids": IDS}), wanted, strict=True):
        assert relative_error(one, other) < 2e-6


@pytest.mark.parametrize(
    ("architecture", "stored"), [("gemma2", 1.0), ("gemma3n", 0.0), ("llama", 0.0)]
)
def test_norms_are_those_of_the_graph(tmp_path, architecture, stored):
    norm = np.abs(normal(gf.K, seed=1)) + 1
    vectors = {"blk.0.attn_norm.weight": norm * np.float32(1.001) + np.float32(stored)}
    weights = gf.write_gguf(
        tmp_path / "m.gguf", {gf.DOWN: "Q4_0"}, architecture=architecture, vectors=vectors
    )
    result = quantize(gf.attention(weights, norm), checkpoint=tmp_path / "m.gguf")
    found = arrays_of(read(result.model))[f"{gf.NORM}.weight"]
    np.testing.assert_allclose(found, norm * 1.001, rtol=1e-6)


@pytest.mark.parametrize("wrapper", ["", "model.", "m.", "module.llm."])
def test_a_wrapper_around_the_model_does_not_matter(tmp_path, wrapper):
    vectors = {"blk.0.attn_norm.weight": normal(gf.K, seed=1) * np.float32(1.01)}
    weights = gf.write_gguf(tmp_path / "m.gguf", {gf.DOWN: "Q4_0"}, vectors=vectors)
    model = gf.attention(weights)
    for name in (f"{gf.NORM}.weight", f"{gf.DOWN}.weight"):
        value = model.graph.initializers[name]
        value.name = value.const_value.name = f"{wrapper}{name}"
    result = quantize(model, checkpoint=tmp_path / "m.gguf")
    assert len(result.report.quantized) == 1
    found = arrays_of(read(result.model))[f"{wrapper}{gf.NORM}.weight"]
    np.testing.assert_array_equal(found, vectors["blk.0.attn_norm.weight"])


def test_rows_keep_the_order_that_the_graph_has(tmp_path):
    weights = gf.write_gguf(
        tmp_path / "m.gguf", {gf.Q: "Q4_0", gf.KEY: "Q8_0"}, architecture="qwen2"
    )
    result = quantize(gf.attention(weights), checkpoint=tmp_path / "m.gguf")
    found = dequantised(read(result.model))
    for node, name in (("q_proj", gf.Q), ("k_proj", gf.KEY)):
        (matrix,) = [matrix for label, matrix in found.items() if node in label]
        np.testing.assert_array_equal(matrix, weights[name].T.astype(float))


@pytest.mark.parametrize("layout", ["QDQ", "MatMulNBits"])
@pytest.mark.parametrize(
    ("types", "form"),
    [
        (("Q4_K", "Q6_K", "Q4_0"), (8, 16)),
        (("Q8_0", "Q8_0", "Q4_1"), (8, 32)),
        (("Q4_0", "Q4_0", "Q4_0"), (4, 32)),
        (("F16", "F32", "BF16"), None),
    ],
)
def test_parts_become_one_weight(tmp_path, types, form, layout):
    layers = dict(zip((gf.Q, gf.KEY, gf.VALUE), types, strict=True)) | {gf.DOWN: "Q4_0"}
    weights = gf.write_gguf(tmp_path / "m.gguf", layers)
    model = gf.joined_model(weights)
    result = quantize(model, checkpoint=tmp_path / "m.gguf", quant_format=layout)
    forms = {row.node: (row.bits, row.block_size) for row in result.report.quantized}
    assert forms.get(gf.QKV) == form and forms[gf.DOWN] == (4, 32)
    x = normal(5, gf.K, seed=3)
    expected = (
        x
        @ np.concatenate([weights[name] for name in (gf.Q, gf.KEY, gf.VALUE)]).astype(float).T
    )
    assert relative_error(run(result.model, {"x": x})[0], expected) < 2e-6
    assert not any("checkpoint" in note for note in result.report.notes)


MODULES = {
    "attn_q": ("self_attn.q_proj", (64, 64)),
    "attn_k": ("self_attn.k_proj", (32, 64)),
    "attn_v": ("self_attn.v_proj", (32, 64)),
    "attn_output": ("self_attn.o_proj", (64, 64)),
    "ffn_gate": ("mlp.gate_proj", (96, 64)),
    "ffn_up": ("mlp.up_proj", (96, 64)),
    "ffn_down": ("mlp.down_proj", (64, 96)),
}
TINY = LlamaConfig(2, 64, 96, gf.HEADS, gf.KV_HEADS, 16, 48, 1e-5, 1e4)


def tiny_decoder(path: Path) -> tuple[ir.Model, ir.Model, dict[str, np.ndarray]]:
    """Write the file of a decoder of two layers; return it in float, rounded, and inputs."""
    layers = [
        (f"model.layers.{layer}.{module}", f"blk.{layer}.{of_llama}", shape, number + layer)
        for layer in range(2)
        for number, (of_llama, (module, shape)) in enumerate(MODULES.items())
    ]
    norms = [("model.norm", "output_norm", (64,), -1)] + [
        (f"model.layers.{layer}.{module}_layernorm", f"blk.{layer}.{of_llama}", (64,), -1)
        for layer in range(2)
        for module, of_llama in (("input", "attn_norm"), ("post_attention", "ffn_norm"))
    ]
    kinds_of = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
    table = ("model.embed_tokens", "token_embd", (48, 64), 4)
    floats, rounded, tensors = {}, {}, {}
    for seed, (name, of_llama, shape, number) in enumerate([table, *layers, *norms]):
        kind = "F32" if number < 0 else kinds_of[number % 5]
        weight = floats[f"{name}.weight"] = normal(*shape, seed=seed) / np.float32(8)
        heads = {"attn_q": gf.HEADS, "attn_k": gf.KV_HEADS}.get(of_llama.split(".")[-1], 0)
        known = gguf.GGMLQuantizationType[kind]
        data = quants.quantize(gf.neighbours(weight, heads) if heads else weight, known)
        again = quants.dequantize(data, known)
        rounded[f"{name}.weight"] = gf.back(again, heads) if heads else again
        tensors[f"{of_llama}.weight"] = data, kind
    gf.save_gguf(path, tensors)
    cache = np.zeros((1, gf.KV_HEADS, 0, 16), np.float32)
    feed = {"input_ids": np.array([[5, 1, 40, 7, 7, 2]]), "position_ids": np.arange(6)[None]}
    for layer in range(2):
        feed |= {f"past_key_values.{layer}.{part}": cache for part in ("key", "value")}
    return build_llama(TINY, floats), build_llama(TINY, rounded), feed


@pytest.mark.parametrize("layout", FORMATS)
def test_a_decoder_gives_the_logits_of_the_dequantised_weights(tmp_path, layout):
    model, rounded, feed = tiny_decoder(tmp_path / "m.gguf")
    given = {"checkpoint": tmp_path / "m.gguf", "quant_format": layout, "op_types": gf.ALL}
    result = quantize(model, **given)
    assert len(result.report.quantized) == 16 and not result.report.refused
    found, wanted, floats = (run(made, feed)[0] for made in (result.model, rounded, model))
    assert relative_error(found, wanted) < 3e-6
    assert relative_error(floats, wanted) > 0.01


def test_half_precision(tmp_path):
    weights = gf.write_gguf(tmp_path / "m.gguf", {gf.DOWN: "Q4_0"})
    model = model_of(
        f"g (float16[T, {gf.K}] x) => (float16[T, 64] y) {{ [down] y = MatMul(x, w) }}",
        {"w": near(weights[gf.DOWN]).T.astype(np.float16)},
    )
    model = renamed(model, {"w": f"{gf.DOWN}.weight"})
    result = quantize(model, checkpoint=tmp_path / "m.gguf")
    (matrix,) = dequantised(read(result.model)).values()
    np.testing.assert_array_equal(matrix, weights[gf.DOWN].T.astype(float))


def test_parts_of_a_file_and_folders(tmp_path):
    parts = [tmp_path / f"m-0000{i}-of-00002.gguf" for i in (1, 2)]
    weights = gf.write_gguf(parts[0], {gf.DOWN: "Q4_0"}) | gf.write_gguf(
        parts[1], {gf.UP: "Q8_0"}
    )
    (tmp_path / "config.json").write_text("{}")  # of the float model, as it often lies beside
    for given in (parts[1], tmp_path):
        result = quantize(gf.attention(weights), checkpoint=given)
        assert len(result.report.quantized) == 2


def test_the_command_takes_a_file_and_a_run_folder_notices_another(tmp_path):
    first = gf.write_gguf(tmp_path / "m.gguf", {gf.DOWN: "Q4_0"})
    ir.save(gf.attention(first), tmp_path / "float.onnx")
    arguments = ["quantize", tmp_path / "float.onnx", "-o", tmp_path / "out.onnx", "--force"]
    arguments += ["--checkpoint", tmp_path / "m.gguf", "--run-folder", tmp_path / "run"]
    assert "1 quantised" in printed(*arguments)
    data = bytearray((tmp_path / "m.gguf").read_bytes())
    data[-16:] = bytes(16)
    (tmp_path / "m.gguf").write_bytes(data)
    printed(*arguments)
    (matrix,) = dequantised(read(tmp_path / "out.onnx")).values()
    assert 0.9 < (matrix == first[gf.DOWN].T).mean() < 1
