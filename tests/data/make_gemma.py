"""Make a decoder like Gemma 3 with random weights: 18 layers, as torch exports them.

usage: make_gemma.py OUT.onnx

Norms of q and k, a sliding window of 512 in five of six layers, one key and value head of 256,
a head of 32,768 columns that is not tied to the embedding; 142 million weights in float32.
Needs what make_decoder_exports.py needs.
"""

import sys
import warnings
from pathlib import Path

from make_decoder_exports import exported

SIZES = {
    "vocab_size": 32768, "hidden_size": 640, "intermediate_size": 2048,
    "num_hidden_layers": 18, "num_attention_heads": 4, "num_key_value_heads": 1,
    "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 512,
    "max_position_embeddings": 4096,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3,
    "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    Path(sys.argv[1]).write_bytes(exported("Gemma3", SIZES, heads=1))
