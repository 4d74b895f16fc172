# SPDX-License-Identifier: MIT
"""Checkpoints as other tools write them, by the definitions of their formats; their models.

Weights are [K, N], float64, by the names that transformers gives modules.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from builders.text_models import model_of, normal

K, N = 96, 48
UP, DOWN, HEAD = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj", "lm_head"
NORM = "model.layers.0.input_layernorm.weight"
INDEX = "model.safetensors.index.json"
DOWN_NODE, HEAD_NODE = "/model/layers.0/mlp/down_proj/MatMul", "/lm_head/MatMul"
COMPRESSED = {"quant_method": "compressed-tensors"}
KINDS = {
    "gptq": {"quant_method": "gptq", "checkpoint_format": "gptq"},
    "gptq_v2": {"quant_method": "gptq", "checkpoint_format": "gptq_v2"},
    "auto_gptq": {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"},
    "awq": {"quant_method": "awq", "version": "gemm"},
    "auto_awq": {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq"},
    "pack-quantized": COMPRESSED,
    "int-quantized": COMPRESSED,
}


def words(codes: np.ndarray, bits: int, order: Sequence[int] = ()) -> np.ndarray:
    """Unsigned codes [rows, n] in words of 32 bits along the last axis, zeros behind them."""
    count = 32 // bits
    padded = np.pad(codes, [(0, 0), (0, -codes.shape[1] % count)]).astype(np.uint64)
    parts = padded.reshape(len(codes), -1, count)[..., list(order or range(count))]
    shifted = parts << (np.arange(count, dtype=np.uint64) * np.uint64(bits))
    return np.ascontiguousarray(shifted.sum(axis=2), np.uint32).view(np.int32)


def layer(
    kind: str,
    bits: int = 4,
    blocks_of: int | str = 16,
    *,
    middle: bool = False,
    act_order: bool = False,
    k: int = K,
    n: int = N,
    scale_type: Any = np.float16,
    seed: int = 0,
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Tensors of a layer by their parts, and its weight."""
    rng = np.random.default_rng(seed)
    size = blocks_of if isinstance(blocks_of, int) else k
    half, shape = 2 ** (bits - 1), (-(-k // size), n)
    codes = rng.integers(0, 2 * half, (k, n))
    # A number for all where there are no blocks at all.
    drawn = (1, 1) if blocks_of == "tensor" else shape
    scales = rng.uniform(0.01, 0.02, drawn).astype(scale_type)
    zeros = np.full(drawn, half) if middle else rng.integers(0, 2 * half, drawn)
    block_of = np.arange(k) // size
    block_of = rng.permutation(block_of) if act_order else block_of
    spread = (np.broadcast_to(grid, shape)[block_of] for grid in (zeros, scales.astype(float)))
    zero, scale = spread
    tensors, index = _packed(kind, codes, zeros, scales, bits, middle)
    if act_order or kind in ("gptq", "gptq_v2", "auto_gptq"):
        tensors[index] = block_of.astype(np.int32)
    return tensors, (codes - zero) * scale


def _packed(
    kind: str,
    codes: np.ndarray,
    zeros: np.ndarray,
    scales: np.ndarray,
    bits: int,
    middle: bool,
) -> tuple[dict[str, np.ndarray], str]:
    contiguous, half = np.ascontiguousarray, 2 ** (bits - 1)
    if "awq" in kind:
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        packed = {"qweight": words(codes, bits, order), "qzeros": words(zeros, bits, order)}
        return packed | {"scales": scales}, ""
    if "gptq" in kind:
        stored = zeros if kind == "gptq_v2" else (zeros - 1) % 2**bits
        packed = {"qweight": contiguous(words(codes.T, bits).T), "qzeros": words(stored, bits)}
        return packed | {"scales": scales}, "g_idx"
    by_rows = scales.reshape(-1) if scales.shape == (1, 1) else contiguous(scales.T)
    found = {"weight_scale": by_rows}
    if kind == "pack-quantized":
        shape = np.array(codes.shape[::-1])
        found |= {"weight_packed": words(codes.T, bits), "weight_shape": shape}
    else:
        found["weight"] = contiguous((codes.T - half).astype(np.int8))
    if not middle and kind == "pack-quantized":
        found["weight_zero_point"] = contiguous(words(zeros, bits).T)
    elif not middle:
        signed = contiguous((zeros - half).T.astype(np.int8))
        found["weight_zero_point"] = signed.reshape(by_rows.shape)
    return found, "weight_g_idx"


def write_folder(
    folder: Path,
    kind: str,
    *,
    config: Any = (),
    parts: Mapping[str, np.ndarray] = {},
    tensors: Mapping[str, np.ndarray] = {},
    index: Any = None,
    **of_layer: Any,
) -> dict[str, np.ndarray]:
    """Write two layers and a norm, in two files; return the weights of the layers.

    ``of_layer`` and ``parts`` are for the first layer, ``config`` and ``tensors`` change all.
    """
    up, first = layer(kind, **of_layer)
    shape = {"k": first.shape[1], "n": first.shape[0]}
    bits = 8 if kind == "int-quantized" else 4
    size = "channel" if shape["k"] % 16 else 16
    down, second = layer(kind, bits, size, middle=True, seed=1, **shape)
    files = [
        {f"{UP}.{part}": array for part, array in (up | dict(parts)).items()},
        {f"{DOWN}.{part}": array for part, array in down.items()}
        | {NORM: normal(first.shape[0], seed=9), **tensors},
    ]
    save_folder(folder, kind, files, {"bits": of_layer.get("bits", 4)} | dict(config))
    if index is not None:
        (folder / INDEX).write_text(json.dumps(index))
    return {UP: first, DOWN: second}


def save_folder(
    folder: Path, kind: str, files: Sequence[Mapping[str, np.ndarray]], config: Any = ()
) -> None:
    """Write files of tensors, and what their configuration says."""
    from safetensors.numpy import save_file

    folder.mkdir()
    for number, content in enumerate(files, 1):
        save_file(dict(content), folder / f"model-{number}.safetensors")
    settings = {"quantization_config": KINDS[kind] | dict(config)}
    (folder / "config.json").write_text(json.dumps(settings))


def near(weight: np.ndarray, seed: int = 5) -> np.ndarray:
    """A float weight of which these may be the codes."""
    noise = 0.05 * weight.std() * normal(*weight.shape, seed=seed)
    return (weight + noise).astype(np.float32)


def mlp(weights: Mapping[str, np.ndarray], norm: str = NORM) -> ir.Model:
    """The layers in float: one by the name of its weight, one by that of its node; a head."""
    k = len(weights[UP])
    model = model_of(
        f"""g (float[T, {k}] x) => (float[T, {k}] z) {{
            h = Mul(x, norm)
            [up] i = MatMul(h, up)
            ["{DOWN_NODE}"] j = Gemm <transB = 1> (i, down)
            ["{HEAD_NODE}"] z = MatMul(j, head)
        }}""",
        {
            "norm": normal(k),
            "up": near(weights[UP]),
            "down": near(weights[DOWN]).T,
            "head": normal(k, k),
        },
    )
    return renamed(model, {"norm": norm, "up": f"{UP}.weight"})


def renamed(model: ir.Model, names: Mapping[str, str]) -> ir.Model:
    """The model, initializers called otherwise."""
    for old, new in names.items():
        value = model.graph.initializers[old]
        value.name = value.const_value.name = new
    return model
