# SPDX-License-Identifier: MIT
"""Checkpoints of llama.cpp: GGUF files.

Names come from the gguf package, which knows what each architecture's modules are called. For
architectures whose rotary embedding llama.cpp computes on neighbours, its converter put the
rows of queries and keys into that order: rows 0, d/2, 1, d/2 + 1, ... of each head. Both are
compared with the float weight, and the one that it has is taken.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ortplugins.errors import MissingFileError, ModelFileError
from ortplugins.quantization.checkpoints.gguf_file import GgufTensor, read_gguf
from ortplugins.quantization.checkpoints.gguf_types import TYPES
from ortplugins.quantization.checkpoints.layers import (
    Checkpoint,
    FloatMatrix,
    Found,
    Layer,
    LayerCodes,
    Unreadable,
    as_tensor,
    spellings,
)
from ortplugins.quantization.methods.nearest import BlockFormat

_SUFFIXES = (".weight", ".bias")
# Greatest difference of a vector from the float model's, of its norm.
_GREATEST_CHANGE = 0.5


@dataclasses.dataclass(frozen=True)
class GgufLayer(Layer):
    """Blocks of one weight."""

    tensor: GgufTensor
    heads: int = 0  # whose rows are brought back into the order of halves; 0 for none

    @property
    def method(self) -> str:
        """The type of the blocks."""
        return self.tensor.type

    @property
    def has_offsets(self) -> bool:
        """Whether the type has minimums."""
        return TYPES[self.tensor.type].has_minimum

    def shape(self) -> tuple[int, int]:
        """Return K and N."""
        n, k = self.tensor.shape
        return k, n

    def form(self, scale_type: str) -> BlockFormat:
        """Return the form of the codes."""
        known = TYPES[self.tensor.type]
        return BlockFormat(known.bits, known.part, True, scale_type=scale_type)

    def load(self, columns: slice, is_symmetric: bool) -> LayerCodes:
        """Read some columns, which are rows in the file."""
        stored = self.tensor.map()
        rows = in_halves(stored, self.heads, columns) if self.heads else stored[columns]
        codes, scales, offsets = TYPES[self.tensor.type].read(rows)
        return LayerCodes(codes.T, scales.T, offsets=None if offsets is None else offsets.T)


def in_halves(
    stored: npt.NDArray[Any], heads: int, rows: slice = slice(None)
) -> npt.NDArray[Any]:
    """Return rows that are neighbours in a head as its first and second half."""
    order = np.arange(len(stored)).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
    return stored[order[rows]]


class GgufCheckpoint(Checkpoint):
    """The tensors of a file, or of all the parts of one."""

    def __init__(self, path: Path) -> None:
        super().__init__(_parts(path))
        fields: dict[str, Any] = {}
        self._tensors: dict[str, GgufTensor] = {}
        for part in self.files:
            file = read_gguf(part)
            fields = file.fields | fields
            self._tensors |= file.tensors
        architecture = fields.get("general.architecture")
        self._names = _names_of(path, architecture, len(self._tensors))
        # Gemma's norms are stored as what the normalised numbers are multiplied by: 1 more.
        self._norms_plus_1 = str(architecture).startswith("gemma")
        heads = fields.get(f"{architecture}.attention.head_count")
        self._heads = {
            "attn_q": heads,
            "attn_k": fields.get(f"{architecture}.attention.head_count_kv", heads),
        }

    def matrices(self) -> Sequence[str]:
        """Return the names of tensors of rank 2 and more."""
        return [tensor.name for tensor in self._tensors.values() if len(tensor.shape) > 1]

    def candidates(self, name: str) -> Sequence[Found]:
        """Return the tensor of a module in each order of rows that it may have."""
        known = self._names.get(name)
        if known == "output" and "output.weight" not in self._tensors:
            known = "token_embd"  # the head is the table
        tensor = self._tensors.get(f"{known}.weight")
        if tensor is None or len(tensor.shape) != 2:
            return []
        heads = self._heads_of(tensor)
        if tensor.is_float:
            read = [tensor.map]
            if heads:
                read.append(lambda: in_halves(tensor.map(), heads))
            return [FloatMatrix(tensor.name, each) for each in read]
        if tensor.type not in TYPES:
            return [
                Unreadable(
                    tensor.name,
                    f"{tensor.type}, which has no form of 2, 4 or 8 bits with scales: "
                    f"quantise it again, with llama-quantize, to one of {', '.join(TYPES)}",
                )
            ]
        orders = (0, heads) if heads else (0,)
        return [GgufLayer(tensor.name, tensor, each) for each in orders]

    def put_vectors(self, model: ir.Model) -> None:
        """Give a model its norms and biases, by name."""
        for name, value in model.graph.initializers.items():
            module, _, suffix = name.rpartition(".")
            known = filter(None, map(self._names.get, spellings(module)))
            tensor = self._tensors.get(f"{next(known, None)}.{suffix}")
            old = value.const_value
            if (
                tensor is None
                or old is None
                or not tensor.is_float
                or tuple(old.shape.numpy()) != tensor.shape
                or len(tensor.shape) != 1
            ):
                continue
            stored, floats = np.asarray(tensor.map(), np.float32), old.numpy()
            read = [stored]
            if heads := self._heads_of(tensor):
                read.append(in_halves(stored, heads))
            if self._norms_plus_1 and "norm" in tensor.name:
                read.append(stored - 1)
            size = float(np.linalg.norm(floats)) or 1.0
            changes = [float(np.linalg.norm(each - floats)) / size for each in read]
            least = int(np.argmin(changes))
            if not changes[least] <= _GREATEST_CHANGE:
                raise ModelFileError(
                    f"tensor {tensor.name!r} of the checkpoint is not {name!r} of the model: "
                    f"they differ by {changes[least]:.0%}; give a checkpoint of this model"
                )
            value.const_value = as_tensor(tensor.name, read[least], old)

    def _heads_of(self, tensor: GgufTensor) -> int:
        """Return how many heads a tensor's rows belong to; 0 where they belong to none."""
        match = re.fullmatch(r"blk\.(\d+)\.(attn_[qk])\.\w+", tensor.name)
        if match is None:
            return 0
        heads = self._heads[match[2]]
        if isinstance(heads, list):  # one count for each layer
            heads = dict(enumerate(heads)).get(int(match[1]))
        if not isinstance(heads, int) or heads < 1 or tensor.shape[0] % (2 * heads):
            return 0
        return heads


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


@functools.cache
def _names_of(path: Path, architecture: str | None, tensors: int) -> Mapping[str, str]:
    """Return llama.cpp's names of modules by the names that training frameworks give them."""
    import gguf

    known = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    if architecture not in known:
        raise ModelFileError(
            f"{path}: architecture {architecture!r} is none that gguf knows: is it a language "
            "model? A newer one may: pip install -U gguf"
        )
    # No model has more layers than tensors.
    names = gguf.get_tensor_name_map(known[architecture], tensors)
    return {name: of_llama for name, (_, of_llama) in names.mapping.items()}
