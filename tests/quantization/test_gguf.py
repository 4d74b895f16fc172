# SPDX-License-Identifier: MIT
"""GGUF files: every block type of random bytes, its numbers by gguf's own dequantize."""

import struct
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from builders.command_line import ortplugins_command, printed
from builders.dequantized_models import relative_error, run
from builders.quantized_files import FORMATS, arrays_of, dequantised, kinds, read
from builders.text_models import model_of, normal

from examples.smollm2.llama import LlamaConfig, build_llama
from ortplugins.errors import MissingFileError, ModelFileError
from ortplugins.quantization import quantize

gguf = pytest.importorskip("gguf")
quants = pytest.importorskip("gguf.quants")

K, HEADS, KV_HEADS, ROWS = 256, 4, 2, 48
Q, KEY, UP, DOWN = (
    f"model.layers.0.{name}"
    for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj", "mlp.down_proj")
)
VALUE = "model.layers.0.self_attn.v_proj"
TABLE, NORM, BIAS = "model.embed_tokens", "model.layers.0.input_layernorm", f"{KEY}.bias"
SHAPES = {
    Q: (64, K),
    KEY: (32, K),
    VALUE: (32, K),
    UP: (K, 32),
    DOWN: (64, K),
    TABLE: (ROWS, K),
}
OF_LLAMA = {
    Q: "blk.0.attn_q",
    KEY: "blk.0.attn_k",
    VALUE: "blk.0.attn_v",
    UP: "blk.0.ffn_up",
    DOWN: "blk.0.ffn_down",
    TABLE: "token_embd",
}
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
# Where the float16 numbers of a block are; the others may be anything.
SCALES_AT = {"TQ2_0": (64,), "Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}
WITH_MINIMUM = {"Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K"}


def blocks(kind: str, n: int, k: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of random blocks, and what they stand for by gguf."""
    rng = np.random.default_rng(seed)
    known = gguf.GGMLQuantizationType[kind]
    if kind in ("F32", "F16", "BF16"):
        stored = quants.quantize(normal(n, k, seed=seed), known)
    else:
        size, nbytes = gguf.GGML_QUANT_SIZES[known]
        stored = rng.integers(0, 256, (n * k // size, nbytes), np.uint8)
        for at in SCALES_AT.get(kind, (0, 2) if kind in WITH_MINIMUM else (0,)):
            numbers = rng.uniform(0.01, 0.02, len(stored)).astype(np.float16)
            stored[:, at : at + 2] = numbers.view(np.uint8).reshape(-1, 2)
        stored = stored.reshape(n, -1)
    return stored, quants.dequantize(stored, known)


def neighbours(array: np.ndarray, heads: int) -> np.ndarray:
    """As LlamaModel.permute of llama.cpp's converter has it."""
    halves = array.reshape(heads, 2, len(array) // heads // 2, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


def back(array: np.ndarray, heads: int) -> np.ndarray:
    """The other way round, row by row."""
    places = neighbours(np.arange(len(array)), heads)
    found = np.empty_like(array)
    found[places] = array
    return found


def write(
    path: Path,
    kinds_of: Mapping[str, str],
    *,
    architecture: str = "llama",
    vectors: Mapping[str, np.ndarray] = {},
    heads: Any = HEADS,
) -> dict[str, np.ndarray]:
    """Write a file with these layers; return their weights [N, K] by transformers' name."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_head_count(heads)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_token_list(["<s>", "a", "b"])
    writer.add_token_scores([0.0, 1.0, 2.0])
    weights = {}
    for number, (name, kind) in enumerate(kinds_of.items()):
        stored, weight = blocks(kind, *SHAPES[name], number)
        if architecture == "llama" and name in (Q, KEY):
            weight = back(weight, {Q: HEADS, KEY: KV_HEADS}[name])
        weights[name] = weight
        known = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(f"{OF_LLAMA[name]}.weight", stored, raw_dtype=known)
    for name, vector in vectors.items():
        writer.add_tensor(name, vector)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def near(weight: np.ndarray, seed: int = 5) -> np.ndarray:
    """A float weight of which these may be the codes."""
    noise = 0.05 * weight.std() * normal(*weight.shape, seed=seed)
    return (weight + noise).astype(np.float32)


def float_model(weights: Mapping[str, np.ndarray], norm: np.ndarray | None = None) -> ir.Model:
    """Queries and keys of normed rows, an MLP; one weight by its name, most by nodes."""
    floats = {name: near(weight) for name, weight in weights.items()}
    missing = {name: normal(*shape) for name, shape in SHAPES.items() if name not in floats}
    floats |= missing
    model = model_of(
        f"""g (int64[T] ids) => (float[T, 64] q, float[T, 32] k, float[T, {K}] z) {{
            x = Gather(table, ids)
            h = Mul(x, norm)
            ["/model/layers.0/self_attn/q_proj/MatMul"] q = MatMul(h, qw)
            ["/model/layers.0/attn/k_proj/MatMul"] p = MatMul(h, kw)
            k = Add(p, bias)
            [down] d = MatMul(h, dw)
            e = Slice(d, zero, half, one)
            ["/model/layers.0/mlp/up_proj/MatMul"] z = Gemm <transB = 1> (e, uw)
        }}""",
        {
            "table": floats[TABLE],
            "norm": normal(K, seed=1) if norm is None else norm,
            "bias": normal(32, seed=2),
            "qw": floats[Q].T,
            "kw": floats[KEY].T,
            "dw": floats[DOWN].T,
            "uw": floats[UP],
            "zero": np.array([0]),
            "half": np.array([32]),
            "one": np.array([1]),
        },
    )
    new = {
        "dw": f"{DOWN}.weight",
        "norm": f"{NORM}.weight",
        "bias": BIAS,
        "table": f"{TABLE}.weight",
    }
    for old, name in new.items():
        value = model.graph.initializers[old]
        value.name = value.const_value.name = name
    return model


def expected(weights: Mapping[str, np.ndarray], norm: np.ndarray, bias: np.ndarray) -> list:
    """What the float model gives with these weights, in float64."""
    w = {name: weight.astype(float) for name, weight in weights.items()}
    h = w[TABLE][IDS] * norm
    return [h @ w[Q].T, h @ w[KEY].T + bias, (h @ w[DOWN].T)[:, :32] @ w[UP].T]


IDS = np.array([3, 0, 47, 11, 3])
ALL = ["MatMul", "Gemm", "Gather"]


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
    kinds_of = {name: kind for name in SHAPES if SHAPES[name][1] == K} | {UP: "Q8_0"}
    weights = write(path, kinds_of)
    fused = {"fuse_tables": True} if layout == "QDQ" and kind in ("Q4_0", "Q6_K") else {}
    result = quantize(
        float_model(weights), checkpoint=path, quant_format=layout, op_types=ALL, **fused
    )
    forms = {row.weight: (row.bits, row.block_size) for row in result.report.quantized}
    assert len(forms) == 5 and not result.report.refused
    assert forms[f"{DOWN}.weight"] == forms["qw"] == TYPES[kind]
    found = run(result.model, {"ids": IDS})
    wanted = expected(weights, normal(K, seed=1), normal(32, seed=2))
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
    weights = write(tmp_path / "m.gguf", {Q: "Q4_K", KEY: "Q4_1", DOWN: "Q5_K"})
    model, path = float_model(weights), tmp_path / "m.gguf"
    result = quantize(model, checkpoint=path)
    assert kinds(read(result.model)).count("ReduceSum") == 1
    assert not any("checkpoint" in note for note in result.report.notes)
    result = quantize(model, checkpoint=path, rules={"*k_proj*": "float"})
    (note,) = [note for note in result.report.notes if "checkpoint" in note]
    assert note.startswith("1 matrices") and note.endswith("'blk.0.attn_k.weight'")


def test_floats_and_vectors_come_along(tmp_path):
    norm, bias = normal(K, seed=1), normal(32, seed=2)
    vectors = {
        "blk.0.attn_norm.weight": norm * np.float32(1.01),
        "blk.0.attn_k.bias": neighbours(bias * np.float32(0.99), KV_HEADS),
    }
    path = tmp_path / "m.gguf"
    layers = {Q: "BF16", KEY: "F16", DOWN: "Q4_0", UP: "F32", TABLE: "F16"}
    weights = write(path, layers, vectors=vectors)
    result = quantize(float_model(weights), checkpoint=path)
    assert [row.weight for row in result.report.quantized] == [f"{DOWN}.weight"]
    wanted = expected(weights, vectors["blk.0.attn_norm.weight"], bias * np.float32(0.99))
    for one, other in zip(run(result.model, {"ids": IDS}), wanted, strict=True):
        assert relative_error(one, other) < 2e-6


@pytest.mark.parametrize(
    ("architecture", "stored"), [("gemma2", 1.0), ("gemma3n", 0.0), ("llama", 0.0)]
)
def test_norms_are_those_of_the_graph(tmp_path, architecture, stored):
    norm = np.abs(normal(K, seed=1)) + 1
    vectors = {"blk.0.attn_norm.weight": norm * np.float32(1.001) + np.float32(stored)}
    weights = write(
        tmp_path / "m.gguf", {DOWN: "Q4_0"}, architecture=architecture, vectors=vectors
    )
    result = quantize(float_model(weights, norm), checkpoint=tmp_path / "m.gguf")
    found = arrays_of(read(result.model))[f"{NORM}.weight"]
    np.testing.assert_allclose(found, norm * 1.001, rtol=1e-6)


@pytest.mark.parametrize("wrapper", ["", "model."])
def test_a_wrapper_around_the_model_does_not_matter(tmp_path, wrapper):
    vectors = {"blk.0.attn_norm.weight": normal(K, seed=1) * np.float32(1.01)}
    weights = write(tmp_path / "m.gguf", {DOWN: "Q4_0"}, vectors=vectors)
    model = float_model(weights)
    for name in (f"{NORM}.weight", f"{DOWN}.weight"):
        value = model.graph.initializers[name]
        value.name = value.const_value.name = f"{wrapper}{name}"
    result = quantize(model, checkpoint=tmp_path / "m.gguf")
    assert len(result.report.quantized) == 1
    found = arrays_of(read(result.model))[f"{wrapper}{NORM}.weight"]
    np.testing.assert_array_equal(found, vectors["blk.0.attn_norm.weight"])


def test_rows_keep_the_order_that_the_graph_has(tmp_path):
    weights = write(tmp_path / "m.gguf", {Q: "Q4_0", KEY: "Q8_0"}, architecture="qwen2")
    result = quantize(float_model(weights), checkpoint=tmp_path / "m.gguf")
    found = dequantised(read(result.model))
    for node, name in (("q_proj", Q), ("k_proj", KEY)):
        (matrix,) = [matrix for label, matrix in found.items() if node in label]
        np.testing.assert_array_equal(matrix, weights[name].T.astype(float))


QKV = "/model/layers.0/attn/qkv_proj/MatMul"


def joined_model(weights: Mapping[str, np.ndarray]) -> ir.Model:
    """One product for queries, keys and values, as onnxruntime-genai's builder has it."""
    parts = [near(weights[name]) for name in (Q, KEY, VALUE)]
    return model_of(
        f"""g (float[T, {K}] x) => (float[T, N] y, float[T, 64] z) {{
            ["{QKV}"] y = MatMul(x, w)
            ["{DOWN}"] z = MatMul(x, v)
        }}""",
        {"w": np.concatenate(parts).T, "v": near(weights[DOWN]).T},
    )


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
    layers = dict(zip((Q, KEY, VALUE), types, strict=True)) | {DOWN: "Q4_0"}
    weights = write(tmp_path / "m.gguf", layers)
    model = joined_model(weights)
    result = quantize(model, checkpoint=tmp_path / "m.gguf", quant_format=layout)
    forms = {row.node: (row.bits, row.block_size) for row in result.report.quantized}
    assert forms.get(QKV) == form and forms[DOWN] == (4, 32)
    x = normal(5, K, seed=3)
    expected = x @ np.concatenate([weights[name] for name in (Q, KEY, VALUE)]).astype(float).T
    assert relative_error(run(result.model, {"x": x})[0], expected) < 2e-6
    assert not any("checkpoint" in note for note in result.report.notes)


@pytest.mark.parametrize(
    ("types", "value", "match"),
    [
        (("Q4_0", "Q4_0", "F16"), None, "attn_v.weight' of the checkpoint is in parts.*float"),
        (("Q4_0", "Q4_0", "IQ2_XS"), None, "'blk.0.attn_v.weight'.* is IQ2_XS"),
        (("Q4_0", "Q4_0", "Q4_0"), normal(32, K, seed=77), "'blk.0.attn_v.weight'.*not the w"),
        (("Q4_0", "Q4_0", "Q4_0"), normal(24, K), r"'blk.0.attn_v.weight' .* is \[256, 32\]"),
    ],
)
def test_parts_that_make_no_weight_are_refused(tmp_path, types, value, match):
    layers = dict(zip((Q, KEY, VALUE), types, strict=True)) | {DOWN: "Q4_0"}
    weights = write(tmp_path / "m.gguf", layers)
    weights |= {} if value is None else {VALUE: value}
    with pytest.raises(ModelFileError, match=match):
        quantize(joined_model(weights), checkpoint=tmp_path / "m.gguf")


MODULES = {
    "attn_q": ("self_attn.q_proj", (64, 64)),
    "attn_k": ("self_attn.k_proj", (32, 64)),
    "attn_v": ("self_attn.v_proj", (32, 64)),
    "attn_output": ("self_attn.o_proj", (64, 64)),
    "ffn_gate": ("mlp.gate_proj", (96, 64)),
    "ffn_up": ("mlp.up_proj", (96, 64)),
    "ffn_down": ("mlp.down_proj", (64, 96)),
}
TINY = LlamaConfig(2, 64, 96, HEADS, KV_HEADS, 16, 48, 1e-5, 1e4)


@pytest.mark.parametrize("layout", FORMATS)
def test_a_decoder_gives_the_logits_of_the_dequantised_weights(tmp_path, layout):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_block_count(2)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    floats, rounded = {}, {}

    def add(name: str, of_llama: str, shape: tuple[int, ...], kind: str) -> None:
        seed = len(floats)
        weight = floats[name] = (normal(*shape, seed=seed) / 8).astype(np.float32)
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(of_llama.split(".")[-1], 0)
        stored = neighbours(weight, heads) if heads else weight
        known = gguf.GGMLQuantizationType[kind]
        data = quants.quantize(stored, known)
        back_again = quants.dequantize(data, known)
        rounded[name] = back(back_again, heads) if heads else back_again
        writer.add_tensor(f"{of_llama}.weight", data, raw_dtype=known)

    add("model.embed_tokens.weight", "token_embd", (48, 64), "Q8_0")
    add("model.norm.weight", "output_norm", (64,), "F32")
    for layer in range(2):
        for number, (of_llama, (module, shape)) in enumerate(MODULES.items()):
            kind = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")[(number + layer) % 5]
            name = f"model.layers.{layer}.{module}.weight"
            add(name, f"blk.{layer}.{of_llama}", shape, kind)
        for of_llama, module in (
            ("attn_norm", "input_layernorm"),
            ("ffn_norm", "post_attention_layernorm"),
        ):
            add(
                f"model.layers.{layer}.{module}.weight",
                f"blk.{layer}.{of_llama}",
                (64,),
                "F32",
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    cache = np.zeros((1, KV_HEADS, 0, 16), np.float32)
    feed = {"input_ids": np.array([[5, 1, 40, 7, 7, 2]]), "position_ids": np.arange(6)[None]}
    for layer in range(2):
        feed |= {f"past_key_values.{layer}.{part}": cache for part in ("key", "value")}
    result = quantize(
        build_llama(TINY, floats),
        checkpoint=tmp_path / "m.gguf",
        quant_format=layout,
        op_types=ALL,
    )
    assert len(result.report.quantized) == 16 and not result.report.refused
    found, wanted = (run(made, feed)[0] for made in (result.model, build_llama(TINY, rounded)))
    assert relative_error(found, wanted) < 3e-6
    assert relative_error(run(build_llama(TINY, floats), feed)[0], wanted) > 0.01


def test_half_precision(tmp_path):
    weights = write(tmp_path / "m.gguf", {DOWN: "Q4_0"})
    model = model_of(
        f"g (float16[T, {K}] x) => (float16[T, 64] y) {{ [down] y = MatMul(x, w) }}",
        {"w": near(weights[DOWN]).T.astype(np.float16)},
    )
    value = model.graph.initializers["w"]
    value.name = value.const_value.name = f"{DOWN}.weight"
    result = quantize(model, checkpoint=tmp_path / "m.gguf")
    (matrix,) = dequantised(read(result.model)).values()
    np.testing.assert_array_equal(matrix, weights[DOWN].T.astype(float))


@pytest.mark.parametrize(
    ("kinds_of", "change", "match"),
    [
        ({DOWN: "IQ2_XS"}, {}, r"'blk.0.ffn_down.weight'.* is IQ2_XS.*llama-quantize.*--rule"),
        ({DOWN: "TQ2_0"}, {}, r"'blk.0.ffn_down.weight'.* is TQ2_0"),
        (
            {DOWN: "Q4_0"},
            {DOWN: normal(64, K, seed=77)},
            r"layer 'blk.0.ffn_down.weight'.*not the weight of node 'down'.*cosine is -?0.0",
        ),
        (
            {Q: "Q4_0"},
            {Q: normal(64, K, seed=77)},
            r"layer 'blk.0.attn_q.weight'.*not the weight of node '/model",
        ),
        (
            {DOWN: "Q4_0"},
            {DOWN: normal(96, K)},
            r"layer 'blk.0.ffn_down.weight' .* is \[256, 64\], node 'down' .*\[256, 96\]",
        ),
    ],
)
def test_another_model_or_type_is_refused_by_name(tmp_path, kinds_of, change, match):
    weights = write(tmp_path / "m.gguf", kinds_of) | change
    with pytest.raises(ModelFileError, match=match):
        quantize(float_model(weights), checkpoint=tmp_path / "m.gguf")
    if not change:  # what the message says
        write(tmp_path / "n.gguf", kinds_of | {Q: "Q4_0"})
        quantize(
            float_model(weights | write(tmp_path / "n.gguf", kinds_of | {Q: "Q4_0"})),
            checkpoint=tmp_path / "n.gguf",
            rules={"down": "float"},
        )


@pytest.mark.parametrize(
    ("nodes", "match"),
    [
        ("[down] y = MatMul(w, x)", "K is not the last axis"),
        ("[down] y = Gemm <transA = 1> (x, w)", "K is not the last axis"),
        ("[down] y = Gemm <alpha = 2.0> (x, w)", "multiplies by alpha"),
    ],
)
def test_products_that_offsets_do_not_suit_are_refused(tmp_path, nodes, match):
    weights = write(tmp_path / "m.gguf", {DOWN: "Q4_K"})
    weight = near(weights[DOWN])
    model = model_of(
        f"g (float[A, B] x) => (float[C, D] y) {{ {nodes} }}",
        {"w": weight if "(w, x)" in nodes else weight.T},
    )
    value = model.graph.initializers["w"]
    value.name = value.const_value.name = f"{DOWN}.weight"
    with pytest.raises(ModelFileError, match=f"'blk.0.ffn_down.weight'.*'down'.*{match}"):
        quantize(model, checkpoint=tmp_path / "m.gguf")


def test_a_vector_of_another_model_is_refused(tmp_path):
    vectors = {"blk.0.attn_norm.weight": normal(K, seed=8)}
    weights = write(tmp_path / "m.gguf", {DOWN: "Q4_0"}, vectors=vectors)
    with pytest.raises(ModelFileError, match=f"'blk.0.attn_norm.weight'.*not '{NORM}.weight'"):
        quantize(float_model(weights), checkpoint=tmp_path / "m.gguf")


def test_parts_of_a_file_and_folders(tmp_path):
    parts = [tmp_path / f"m-0000{i}-of-00002.gguf" for i in (1, 2)]
    weights = write(parts[0], {DOWN: "Q4_0"})
    with pytest.raises(MissingFileError, match="1 of 00002 parts"):
        quantize(float_model(weights), checkpoint=parts[0])
    weights |= write(parts[1], {UP: "Q8_0"})
    for given in (parts[1], tmp_path):
        result = quantize(float_model(weights), checkpoint=given)
        assert len(result.report.quantized) == 2
    write(tmp_path / "other.gguf", {DOWN: "Q4_0"})
    with pytest.raises(ModelFileError, match=r"several \.gguf files"):
        quantize(float_model(weights), checkpoint=tmp_path)


def test_the_command_takes_a_file(tmp_path):
    weights = write(tmp_path / "m.gguf", {DOWN: "Q4_K"})
    ir.save(float_model(weights), tmp_path / "float.onnx")
    arguments = ["quantize", tmp_path / "float.onnx", "-o", tmp_path / "out.onnx"]
    assert "1 quantised" in printed(*arguments, "--checkpoint", tmp_path / "m.gguf")
    done = ortplugins_command(*arguments, "--checkpoint", tmp_path / "none.gguf", "--force")
    assert done.returncode == 2 and "none.gguf" in done.stderr


def test_a_run_folder_notices_another_file(tmp_path):
    first = write(tmp_path / "m.gguf", {DOWN: "Q4_0"})
    ir.save(float_model(first), tmp_path / "float.onnx")
    given = {"checkpoint": tmp_path / "m.gguf", "run_folder": tmp_path / "run"}
    quantize(tmp_path / "float.onnx", **given)
    data = bytearray((tmp_path / "m.gguf").read_bytes())
    data[-16:] = bytes(16)
    (tmp_path / "m.gguf").write_bytes(data)
    result = quantize(tmp_path / "float.onnx", **given)
    (matrix,) = dequantised(read(result.model)).values()
    assert not np.array_equal(matrix, first[DOWN].T)
    assert (matrix == first[DOWN].T).mean() > 0.9


def packed(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def text(key: str) -> bytes:
    return packed(len(key)) + key.encode()


HUGE = packed(1 << 60)
NAME = text("blk.0.ffn_down.weight") + b"\2\0\0\0"
SIZES = packed(K, 64)
PLACE = SIZES + b"\2\0\0\0" + packed(0)  # of type 2, at the start
TOKENS, SCORES = (
    text(f"tokenizer.ggml.{name}") + b"\x09\0\0\0" for name in ("tokens", "scores")
)


@pytest.mark.parametrize(
    ("at", "old", "new", "match"),
    [
        (0, b"GGUF", b"GGML", "is no GGUF file"),
        (4, b"\3\0\0\0", b"\0\0\0\3", "version 50331648"),
        (8, packed(1), HUGE, "damaged"),
        (16, packed(6), HUGE, "damaged"),
        (24, packed(20), HUGE, "damaged"),
        (None, TOKENS + b"\x08\0\0\0" + packed(3), TOKENS + b"\x08\0\0\0" + HUGE, "damaged"),
        (None, SCORES + b"\x06\0\0\0" + packed(3), SCORES + b"\0\0\0\0" + HUGE, "damaged"),
        (None, SCORES + b"\x06", SCORES + b"\x09", "metadata of type 9"),
        (None, NAME, NAME[:-4] + b"\xff\0\0\0", "of rank 255"),
        (None, NAME + SIZES, NAME + packed(263, 64), "rows of 263 in blocks of 32"),
        (None, NAME + SIZES, NAME + packed(K, 1 << 60), "cut short: tensor 'blk.0.ffn_down"),
        (None, PLACE, PLACE[:-8] + packed(1 << 50), "cut short: tensor 'blk.0.ffn_down"),
        (None, PLACE, SIZES + b"\xc7\0\0\0" + packed(0), "is type 199"),
        (None, b"\5\0\0\0\0\0\0\0llama", b"\5\0\0\0\0\0\0\0lloma", "architecture 'lloma'"),
    ],
)
def test_damaged_files_are_refused(tmp_path, at, old, new, match):
    write(tmp_path / "m.gguf", {DOWN: "Q4_0"})
    data = (tmp_path / "m.gguf").read_bytes()
    at = data.index(old) if at is None else at
    assert data[at : at + len(old)] == old
    refused_in_a_sentence(tmp_path, data[:at] + new + data[at + len(old) :], match)


@pytest.mark.parametrize("ninths", range(9))
def test_files_that_end_early_are_refused(tmp_path, ninths):
    write(tmp_path / "m.gguf", {DOWN: "Q4_0"})
    data = (tmp_path / "m.gguf").read_bytes()
    start = len(data) - 64 * K // 32 * 18
    for end in (start * ninths // 9, start + (len(data) - start) * ninths // 9):
        refused_in_a_sentence(tmp_path, data[:end], "damaged|cut short|no GGUF")


def refused_in_a_sentence(folder: Path, data: bytes, match: str) -> None:
    """Whatever sizes the header claims, little memory is taken."""
    (folder / "m.gguf").write_bytes(data)
    model = float_model({DOWN: blocks("Q4_0", *SHAPES[DOWN], 0)[1]})
    tracemalloc.start()
    try:
        with pytest.raises(ModelFileError, match=match) as caught:
            quantize(model, checkpoint=folder / "m.gguf")
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()
    assert len(str(caught.value)) < 400
