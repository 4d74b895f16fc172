# SPDX-License-Identifier: MIT
"""Checkpoints of llama.cpp: GGUF files.

For architectures whose rotary embedding llama.cpp computes on neighbours, its converter put
the rows of queries and keys into that order: rows 0, d/2, 1, d/2 + 1, ... of each head. Both
are compared with the float weight, and the one that it has is taken. Experts are stacks
``[E, N, K]``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ortplugins.errors import MissingFileError, ModelFileError
from ortplugins.quantization.checkpoints.checkpoint import Checkpoint
from ortplugins.quantization.checkpoints.gguf_file import (
    GgufTensor,
    architectures,
    llama_names,
    read_gguf,
)
from ortplugins.quantization.checkpoints.gguf_types import TYPES
from ortplugins.quantization.checkpoints.layers import (
    FloatMatrix,
    Found,
    Layer,
    LayerCodes,
    UnreadableError,
)
from ortplugins.quantization.methods.nearest import BlockFormat


class GgufCheckpoint(Checkpoint):
    """The tensors of a file, or of all the parts of one."""

    greatest_change = 0.5

    def __init__(self, path: Path) -> None:
        super().__init__(_parts(path))
        fields: dict[str, Any] = {}
        self._tensors: dict[str, GgufTensor] = {}
        for part in self.files:
            known, tensors = read_gguf(part)
            fields = known | fields
            self._tensors |= tensors
        self._architecture = str(fields.get("general.architecture"))
        if self._architecture not in architectures():
            raise ModelFileError(
                f"{path}: architecture {self._architecture!r} is none that gguf knows: is it "
                "a language model? A newer one may: pip install -U gguf"
            )
        # Gemma's norms are stored as what the normalised numbers are multiplied by: 1 more.
        self._norms_plus_1 = self._architecture.startswith("gemma")
        heads = fields.get(f"{self._architecture}.attention.head_count")
        self._heads = {
            "attn_q": heads,
            "attn_k": fields.get(f"{self._architecture}.attention.head_count_kv", heads),
        }

    def matrices(self) -> Sequence[str]:
        """Return the names of tensors of rank 2 and more."""
        return [tensor.name for tensor in self._tensors.values() if len(tensor.shape) > 1]

    @property
    def vectors(self) -> Collection[str]:
        """The names of norms and biases."""
        # Of factors of the rotary embedding, graphs hold what is computed with them.
        found = (each for each in self._tensors.values() if len(each.shape) == 1)
        return [each.name for each in found if not each.name.startswith("rope_")]

    def candidates(self, name: str) -> Sequence[Found]:
        """Return the tensor of a module in each order of rows that it may have."""
        tensor = self._tensor(name, "weight")
        if tensor is None or len(tensor.shape) != 2:
            return []
        (n, k), orders = tensor.shape, self._orders(tensor)
        if tensor.is_float:
            return [
                FloatMatrix(tensor.name, (k, n), functools.partial(_columns, tensor, heads))
                for heads in orders
            ]
        if (known := TYPES.get(tensor.type)) is None:
            raise UnreadableError(
                tensor.name,
                f"{tensor.type}, which has no form of 2, 4 or 8 bits with scales: quantise it "
                f"again, with llama-quantize, to one of {', '.join(TYPES)}",
            )
        return [
            Layer(
                tensor.name,
                tensor.type,
                (k, n),
                BlockFormat(known.bits, known.part),
                functools.partial(_codes, tensor, heads),
                has_offsets=known.has_minimum,
            )
            for heads in orders
        ]

    def vector(self, name: str) -> tuple[str, Sequence[npt.NDArray[Any]]] | None:
        """Return a norm or bias, in each order of rows that it may have."""
        module, _, suffix = name.rpartition(".")
        tensor = self._tensor(module, suffix)
        if tensor is None or not tensor.is_float or len(tensor.shape) != 1:
            return None
        read = [np.asarray(_rows(tensor, each), np.float32) for each in self._orders(tensor)]
        if self._norms_plus_1 and "norm" in tensor.name:
            read.append(read[0] - 1)
        return tensor.name, read

    def _tensor(self, module: str, suffix: str) -> GgufTensor | None:
        if expert := re.search(r"\.experts\.(\d+)(?=\.)", module):
            stack = self._tensor(module.replace(expert[0], ".experts"), suffix)
            return None if stack is None else stack.part(int(expert[1]))
        names = llama_names(module, self._architecture)
        if "output" in names and "output.weight" not in self._tensors:
            names = ["token_embd"]  # the head is the table
        found = (self._tensors.get(f"{name}.{suffix}") for name in names)
        return next(filter(None, found), None)

    def _orders(self, tensor: GgufTensor) -> list[int]:
        """Return of how many heads rows are to be brought back into halves; 0 for none."""
        match = re.fullmatch(r"blk\.(\d+)\.(attn_[qk])\.\w+", tensor.name)
        heads = None if match is None else self._heads[match[2]]
        if match is not None and isinstance(heads, list):  # one count for each layer
            heads = dict(enumerate(heads)).get(int(match[1]))
        if not isinstance(heads, int) or heads < 1 or tensor.shape[0] % (2 * heads):
            return [0]
        return [0, heads]


def _rows(tensor: GgufTensor, heads: int, rows: slice = slice(None)) -> npt.NDArray[Any]:
    """Read rows; of so many heads, neighbours as the first and second half."""
    stored = tensor.map()
    if not heads:
        return stored[rows]
    order = np.arange(len(stored)).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
    return stored[order[rows]]


def _columns(tensor: GgufTensor, heads: int, columns: slice) -> npt.NDArray[Any]:
    """Read some columns of floats, which are rows in the file."""
    return _rows(tensor, heads, columns).T


def _codes(tensor: GgufTensor, heads: int, columns: slice) -> LayerCodes:
    """Read some columns of codes."""
    codes, scales, offsets = TYPES[tensor.type].read(_rows(tensor, heads, columns))
    return LayerCodes(codes.T, scales.T, offsets=None if offsets is None else offsets.T)


def _parts(path: Path) -> list[Path]:
    """Return the files of a checkpoint: -00001-of-00003.gguf and so on."""
    match = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", path.name)
    if match is None:
        return [path]
    found = sorted(path.parent.glob(f"*-of-{match[2]}.gguf"))
    parts = [part for part in found if part.name.startswith(f"{match[1]}-")]
    if len(parts) != int(match[2]):
        raise MissingFileError(f"{path}: {len(parts)} of {match[2]} parts are beside it")
    return parts
