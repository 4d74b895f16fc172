# SPDX-License-Identifier: MIT
"""A Llama decoder with a KV cache, written part by part as standard ONNX operators."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnxscript import GraphBuilder

NOT_SEEN = -1e9  # added to the score of a key that comes later; softmax turns it into 0

Weights = Mapping[str, npt.NDArray[np.float32]]


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a Llama decoder; `heads` is a multiple of `kv_heads`, `head_dim` is even."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    rms_eps: float
    rope_theta: float


def build_llama(
    config: LlamaConfig, weights: Weights, *, layers: int | None = None
) -> ir.Model:
    """Builds the decoder as an ONNX model of standard operators, opset 21.

    Inputs are `input_ids` and `position_ids`, int64 [batch, sequence], and for each layer i
    `past_key_values.{i}.key` and `.value`, float32 [batch, kv_heads, past, head_dim], where
    past may be 0. Outputs are `logits`, float32 [batch, sequence, vocab], and
    `present.{i}.key` and `.value`, float32 [batch, kv_heads, total, head_dim], where total is
    past + sequence. There is no padding: slot p of the cache holds position p.

    A weight is read when the model is saved, one at a time, and never kept.

    Args:
        config: The sizes of the checkpoint.
        weights: Arrays by Hugging Face names; linear weights are [out, in]. Without
            `lm_head.weight` the embedding is the output projection too.
        layers: Keep the first so many layers (a small, fast, wrong model for tests).

    Returns:
        The model. Its linear weights are initializers [in, out] under the same names.

    Raises:
        ValueError: If `layers` is out of range or a weight is missing; on saving, if a weight
            does not have the shape that the config asks for.
    """
    count = config.layers if layers is None else layers
    if not 1 <= count <= config.layers:
        raise ValueError(f"layers={layers} is out of range; give 1 to {config.layers}")
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="llama")
    builder = GraphBuilder(graph)

    def cache(slots: str) -> ir.Shape:
        return ir.Shape(["batch", config.kv_heads, slots, config.head_dim])

    ids = builder.input("input_ids", ir.DataType.INT64, ["batch", "sequence"])
    positions = builder.input("position_ids", ir.DataType.INT64, ["batch", "sequence"])
    parts = [f"{i}.{part}" for i in range(count) for part in ("key", "value")]
    past = [
        builder.input(f"past_key_values.{part}", ir.DataType.FLOAT, cache("past"))
        for part in parts
    ]
    logits, present = _Decoder(config, weights, builder).decode(ids, positions, past)
    _name_by_module(graph)
    logits.shape = ir.Shape(["batch", "sequence", config.vocab])
    builder.add_output(logits, "logits")
    for part, value in zip(parts, present, strict=True):
        value.shape = cache("total")
        builder.add_output(value, f"present.{part}")
    return ir.Model(graph, ir_version=10, producer_name="ortplugins-example-smollm2")


class _Decoder:
    """Adds the decoder to a graph: `op.Name(inputs, attributes)` adds one node."""

    def __init__(self, config: LlamaConfig, weights: Weights, builder: GraphBuilder) -> None:
        self.config, self.weights, self.builder, self.op = config, weights, builder, builder.op
        self.path: list[str] = []

    def decode(self, ids: Any, positions: Any, past: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Adds the whole decoder; returns the logits and the longer caches."""
        op, present = self.op, list[Any]()
        with self.module("model"):
            with self.module("embed_tokens"):
                x = op.Gather(self.weight(self.config.vocab, self.config.hidden), ids)
            rotation = self.rotation(positions)
            mask = self.causal_mask(positions, past[0])
            for i, cache in enumerate(zip(past[::2], past[1::2], strict=True)):
                with self.module(f"layers.{i}"):
                    normed = self.norm("input_layernorm", x)
                    attended, *longer = self.attention(normed, rotation, mask, *cache)
                    x = op.Add(x, attended)
                    x = op.Add(x, self.mlp(self.norm("post_attention_layernorm", x)))
                    present += longer
            x = self.norm("norm", x)
        return self.linear("lm_head", x, self.config.hidden, self.config.vocab), present

    def attention(
        self, x: Any, rotation: tuple[Any, Any], mask: Any, past_key: Any, past_value: Any
    ) -> tuple[Any, Any, Any]:
        """Adds grouped-query attention; returns its result and the longer key and value."""
        op, c = self.op, self.config
        with self.module("self_attn"):
            q = self.linear("q_proj", x, c.hidden, c.heads * c.head_dim)
            k = self.linear("k_proj", x, c.hidden, c.kv_heads * c.head_dim)
            v = self.linear("v_proj", x, c.hidden, c.kv_heads * c.head_dim)
            # All heads are laid out, and queries and keys turned, in one go: few nodes make
            # quick steps. From here on it is [batch, heads, sequence, head_dim].
            qkv = op.Reshape(op.Concat(q, k, v, axis=-1), [0, 0, -1, c.head_dim])
            sizes = [c.heads + c.kv_heads, c.kv_heads]
            qk, v = op.Split(op.Transpose(qkv, perm=[0, 2, 1, 3]), sizes, axis=1, _outputs=2)
            sizes = [c.heads, c.kv_heads]
            q, k = op.Split(self.rotate(qk, *rotation), sizes, axis=1, _outputs=2)
            key, value = op.Concat(past_key, k, axis=2), op.Concat(past_value, v, axis=2)
            # The queries that share a key head become more rows of one matrix, so keys and
            # values are not repeated: [batch, kv_heads, group * sequence, head_dim].
            q = op.Reshape(q, [0, c.kv_heads, -1, c.head_dim])
            scores = op.MatMul(q, op.Transpose(key, perm=[0, 1, 3, 2]))
            scores = op.Add(op.Mul(scores, c.head_dim**-0.5), mask)
            y = op.MatMul(op.Softmax(scores, axis=-1), value)
            y = op.Reshape(y, [0, c.heads, -1, c.head_dim])
            y = op.Reshape(op.Transpose(y, perm=[0, 2, 1, 3]), [0, 0, -1])
            return self.linear("o_proj", y, c.heads * c.head_dim, c.hidden), key, value

    def mlp(self, x: Any) -> Any:
        """Adds down(silu(gate(x)) * up(x))."""
        wide, narrow = self.config.intermediate, self.config.hidden
        with self.module("mlp"):
            gate = self.linear("gate_proj", x, narrow, wide)
            silu = self.op.Mul(gate, self.op.Sigmoid(gate))
            gated = self.op.Mul(silu, self.linear("up_proj", x, narrow, wide))
            return self.linear("down_proj", gated, wide, narrow)

    def norm(self, name: str, x: Any) -> Any:
        """Adds an RMSNorm: each row scaled to a root mean square of 1, then by a weight."""
        op = self.op
        with self.module(name):
            # ONNX Runtime fuses just this chain, Pow included, into one kernel.
            mean_square = op.ReduceMean(op.Pow(x, 2.0), [-1], keepdims=1)
            root = op.Sqrt(op.Add(mean_square, self.config.rms_eps))
            return op.Mul(op.Div(x, root), self.weight(self.config.hidden))

    def linear(self, name: str, x: Any, inputs: int, outputs: int) -> Any:
        """Adds [..., inputs] times a weight [inputs, outputs]."""
        with self.module(name):
            return self.op.MatMul(x, self.weight(inputs, outputs, transposed=True))

    def rotation(self, positions: Any) -> tuple[Any, Any]:
        """Adds the rotary cos and sin, [batch, 1, sequence, head_dim], for all layers."""
        op, c = self.op, self.config
        with self.module("rotary_emb"):
            frequencies = c.rope_theta ** (-np.arange(0, c.head_dim, 2) / c.head_dim)
            inv_freq = op.initializer(ir.tensor(frequencies.astype(np.float32)), "inv_freq")
            position = op.Cast(op.Unsqueeze(positions, [1, 3]), to=ir.DataType.FLOAT)
            angle = op.Mul(position, inv_freq)
            cos, sin = op.Cos(angle), op.Sin(angle)
            # With the sign of the first half in sin, `rotate` needs no Neg.
            return op.Concat(cos, cos, axis=-1), op.Concat(op.Neg(sin), sin, axis=-1)

    def rotate(self, x: Any, cos: Any, sin: Any) -> Any:
        """Adds the rotation of heads [batch, heads, sequence, head_dim] by their position."""
        low, high = self.op.Split(x, axis=-1, num_outputs=2, _outputs=2)
        swapped = self.op.Concat(high, low, axis=-1)
        return self.op.Add(self.op.Mul(x, cos), self.op.Mul(swapped, sin))

    def causal_mask(self, positions: Any, past_key: Any) -> Any:
        """Adds what all layers add to scores, [batch, 1, group * sequence, total]."""
        op, group = self.op, self.config.heads // self.config.kv_heads
        with self.module("causal_mask"):
            past, new = op.Shape(past_key, start=2, end=3), op.Shape(positions, start=1)
            keys = op.Range(0, op.Squeeze(op.Add(past, new)), 1)
            queries = op.Unsqueeze(op.Concat(*[positions] * group, axis=1), [1, 3])
            return op.Where(op.Greater(keys, queries), NOT_SEEN, 0.0)

    @contextlib.contextmanager
    def module(self, name: str) -> Iterator[None]:
        """Puts what is added meanwhile under a Hugging Face module's name."""
        self.path.append(name)
        self.builder.push_module(name)
        yield
        self.builder.pop_module()
        self.path.pop()

    def weight(self, *shape: int, transposed: bool = False) -> ir.Value:
        """Adds this module's weight as an initializer that is read when it is saved."""
        name = source = ".".join([*self.path, "weight"])
        if name == "lm_head.weight" and name not in self.weights:
            source = "model.embed_tokens.weight"
        if source not in self.weights:
            raise ValueError(f"no weight {source!r} in weights; use Hugging Face's names")

        def read() -> ir.TensorProtocol:
            array = self.weights[source].T if transposed else self.weights[source]
            if array.shape != shape:  # in the file it would shift all weights after it
                found = f"{name!r} comes to {array.shape}, the config to {shape}"
                raise ValueError(f"{found}; give the checkpoint's own config")
            return ir.tensor(np.ascontiguousarray(array, np.float32), name=name)

        lazy = ir.LazyTensor(read, ir.DataType.FLOAT, ir.Shape(shape), name=name)
        return self.builder.initializer(lazy, name, qualify=False)


def _name_by_module(graph: ir.Graph) -> None:
    """Names nodes `model.layers.0.mlp/Mul_1`, alike in all layers, and values after them."""
    count: Counter[str] = Counter()
    for node in graph:
        module = str(node.name).rpartition("/")[0].replace("/", ".")
        name = f"{module}/{node.op_type}"
        node.name = f"{name}_{count[name]}" if count[name] else name
        count[name] += 1
        for i, value in enumerate(node.outputs):
            value.name = f"{node.name}_output_{i}"
        node.metadata_props.clear()  # the builder's notes on modules, now in the name
