# SPDX-License-Identifier: MIT
"""GGUF files with blocks of random bytes, their numbers by gguf's own dequantize."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from builders.text_models import model_of, normal
from checkpoint_files import near, renamed

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
QKV = "/model/layers.0/attn/qkv_proj/MatMul"
ALL = ["MatMul", "Gemm", "Gather"]
# Where the float16 numbers of a block are; the others may be anything.
SCALES_AT = {"TQ2_0": (64,), "Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}
WITH_MINIMUM = {"Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K"}


def blocks(kind: str, n: int, k: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of random blocks, and what they stand for by gguf."""
    import gguf
    from gguf import quants

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


def save_gguf(
    path: Path,
    tensors: Mapping[str, tuple[np.ndarray, Any]],
    *,
    architecture: str = "llama",
    heads: Any = HEADS,
) -> None:
    """Write tensors, each with the type of its blocks; None for floats as they are."""
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(2)
    writer.add_head_count(heads)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_token_list(["<s>", "a", "b"])
    writer.add_token_scores([0.0, 1.0, 2.0])
    for name, (array, kind) in tensors.items():
        known = None if kind is None else gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, array, raw_dtype=known)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_gguf(
    path: Path,
    kinds_of: Mapping[str, str],
    *,
    architecture: str = "llama",
    vectors: Mapping[str, np.ndarray] = {},
) -> dict[str, np.ndarray]:
    """Write a file with these layers; return their weights [N, K] by transformers' name."""
    weights, tensors = {}, {}
    for number, (name, kind) in enumerate(kinds_of.items()):
        stored, weight = blocks(kind, *SHAPES[name], number)
        if architecture == "llama" and name in (Q, KEY):
            weight = back(weight, {Q: HEADS, KEY: KV_HEADS}[name])
        weights[name] = weight
        tensors[f"{OF_LLAMA[name]}.weight"] = stored, kind
    tensors |= {name: (vector, None) for name, vector in vectors.items()}
    save_gguf(path, tensors, architecture=architecture)
    return weights


def attention(weights: Mapping[str, np.ndarray], norm: np.ndarray | None = None) -> ir.Model:
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
    names = {
        "dw": f"{DOWN}.weight",
        "norm": f"{NORM}.weight",
        "bias": BIAS,
        "table": f"{TABLE}.weight",
    }
    return renamed(model, names)


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
