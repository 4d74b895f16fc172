"""Make decoder_exports.zip: tiny decoders with a cache and random weights, as exported.

usage: make_decoder_exports.py [OUT.zip]

Needs torch 2.13, transformers 5.23, onnxscript 0.7 and onnx, as make_encoder_exports.py does.
"""

import torch
import transformers as tf
from make_encoder_exports import made, write_archive, written

LAYERS = 2
SIZES = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "max_position_embeddings": 48, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
# name: class, configuration, heads of the cache
MODELS = {
    "llama": ("Llama", {**SIZES, "num_key_value_heads": 2}, 2),
    # Norms of q and k, of 1 + weight; a sliding window of 6; one key and value head.
    "gemma3": (
        "Gemma3",
        {**SIZES, "num_key_value_heads": 1, "head_dim": 8, "query_pre_attn_scalar": 8,
         "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
        1,
    ),
    # A rotation of a part of each head.
    "gptneox": ("GPTNeoX", {**SIZES, "num_attention_heads": 2, "rotary_pct": 0.25}, 2),
    "gpt2": (
        "GPT2",
        {"vocab_size": 40, "n_positions": 48, "n_embd": 32, "n_layer": LAYERS, "n_head": 4},
        4,
    ),
    # One head that MatMul repeats.
    "falcon": (
        "Falcon",
        {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": LAYERS, "bias": False,
         "num_attention_heads": 4, "alibi": False, "new_decoder_architecture": False,
         "multi_query": True, "parallel_attn": True},
        1,
    ),
    # Heads merged with the batch, ALiBi.
    "bloom": (
        "Bloom",
        {"vocab_size": 40, "hidden_size": 32, "n_layer": LAYERS, "n_head": 4},
        4,
    ),
    # Soft caps.
    "gemma2": (
        "Gemma2",
        {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "query_pre_attn_scalar": 8,
         "sliding_window": 6},
        2,
    ),
}  # fmt: skip
LM = {"GPT2": "LMHeadModel"}
tf.Gemma3Config = tf.Gemma3TextConfig


class Wrapped(torch.nn.Module):
    """Plain tensors in, plain tensors out; the cache is the last argument, a list."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask, position_ids, past):
        cache = tf.DynamicCache()
        for layer in range(len(past) // 2):
            cache.update(past[2 * layer], past[2 * layer + 1], layer)
        result = self.model(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids,
            past_key_values=cache, use_cache=True,
        )  # fmt: skip
        states = [
            t for layer in result.past_key_values.layers for t in (layer.keys, layer.values)
        ]
        return result.logits, *states


def exported(
    prefix: str, sizes: dict, heads: int, exporter: str = "dynamo", attention: str = "sdpa"
) -> bytes:
    count = sizes.get("num_hidden_layers", LAYERS)
    model = made(prefix, LM.get(prefix, "ForCausalLM"), sizes, attention)
    config = model.config
    size = (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    ids, positions = torch.randint(3, 39, (2, 5)), torch.arange(7, 12)[None].repeat(2, 1)
    past = [torch.randn(2, heads, 7, size) for _ in range(2 * count)]
    arguments = (ids, torch.ones(2, 12, dtype=torch.int64), positions, past)
    layers = [f"{layer}.{kind}" for layer in range(count) for kind in ("key", "value")]
    tokens = ["input_ids", "attention_mask", "position_ids"]
    names = {
        "input_names": tokens + [f"past_key_values.{layer}" for layer in layers],
        "output_names": ["logits"] + [f"present.{layer}" for layer in layers],
    }
    dynamic = torch.export.Dim.DYNAMIC
    shapes = [{0: dynamic, 1: dynamic}] * 3 + [[{0: dynamic, 2: dynamic}] * len(past)]
    axes = {key: {0: "batch", 1: "sequence"} for key in (*tokens, "logits")}
    axes["attention_mask"] = {0: "batch", 1: "total"}
    axes |= {f"past_key_values.{key}": {0: "batch", 2: "past"} for key in layers}
    axes |= {f"present.{key}": {0: "batch", 2: "total"} for key in layers}
    return written(Wrapped(model), arguments, exporter, tuple(shapes), axes, **names)


if __name__ == "__main__":
    write_archive(
        "decoder_exports.zip", MODELS, lambda name, *kind: exported(*MODELS[name], *kind)
    )
