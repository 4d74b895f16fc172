# SPDX-License-Identifier: MIT
"""A folder of safetensors files: tensors by name, read where they lie."""

from __future__ import annotations

import abc
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ortplugins.errors import MissingFileError, ModelFileError
from ortplugins.quantization.checkpoints.layers import (
    Checkpoint,
    FloatMatrix,
    Found,
    Layer,
    as_tensor,
    spellings,
)
from rewrite_rules.weights.bit_packing import unpack_rows

_INDEX = "model.safetensors.index.json"
FLOATS = ("F64", "F32", "F16", "BF16")
# Of a word that codes are packed in, and of those that formats have.
WORD, BITS = 32, (2, 4, 8)


def read_json(path: Path) -> Mapping[str, Any]:
    """Read a file that holds an object."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ModelFileError(f"{path} is not a JSON object")
    return found


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file."""

    name: str
    path: str
    shape: tuple[int, ...]
    dtype: str  # safetensors' name

    def read(self, *index: slice) -> npt.NDArray[Any]:
        """Read a part of it."""
        with _opened(Path(self.path)) as file:
            found: npt.NDArray[Any] = file.get_slice(self.name)[index or (...,)]
        return found


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a folder, of those files that its index names if it has one."""
    files = sorted(folder.glob("*.safetensors"))
    if (folder / _INDEX).is_file():
        files = _indexed(folder)
    if not files:
        raise MissingFileError(f"{folder}: no .safetensors file")
    found: dict[str, StoredTensor] = {}
    for path in files:
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118
                if name in found:
                    raise ModelFileError(f"{folder}: tensor {name!r} is in two files")
                part = file.get_slice(name)
                shape, dtype = tuple(part.get_shape()), part.get_dtype()
                found[name] = StoredTensor(name, str(path), shape, dtype)
    return found


def _indexed(folder: Path) -> list[Path]:
    places = read_json(folder / _INDEX).get("weight_map")
    if not isinstance(places, dict):
        raise ModelFileError(f"{folder / _INDEX} has no weight_map")
    names = sorted(set(map(str, places.values())))
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelFileError(f"{folder / _INDEX} names {name!r}: not a file of its folder")
        if not (folder / name).is_file():
            raise MissingFileError(f"{folder / name}: no such file, though the index names it")
    return [folder / name for name in names]


def _opened(path: Path) -> Any:
    try:
        import safetensors
    except ModuleNotFoundError as error:
        raise ImportError(
            "checkpoints need safetensors: pip install 'ortplugins[checkpoint]'"
        ) from error
    try:
        return safetensors.safe_open(path, framework="numpy")
    except safetensors.SafetensorError as error:
        raise ModelFileError(f"{path} is damaged: {error}") from error


@dataclasses.dataclass(frozen=True)
class StoredLayer(Layer):
    """A layer made of tensors: the name of the layer, a point and that of the part."""

    parts: Mapping[str, StoredTensor]

    def part(self, name: str, rank: int, dtypes: Sequence[str]) -> StoredTensor:
        """Return a part that there has to be, of a rank and type."""
        found = self.parts.get(name)
        if found is None or len(found.shape) != rank or found.dtype not in dtypes:
            what = "missing" if found is None else f"{found.dtype} {list(found.shape)}"
            raise ModelFileError(
                f"tensor '{self.name}.{name}' of the checkpoint is {what}: "
                f"{' or '.join(dtypes)} of rank {rank} is expected"
            )
        return found

    def block_size(self, blocks: int) -> int:
        """Return the rows of a block: those that g_idx has in the first, or an even share."""
        (k, _), index = self.shape(), self._block_of_rows()
        size = k // max(1, blocks) if index is None else np.count_nonzero(index == 0)
        fits = size * blocks == k if index is None else size and -(-k // size) == blocks
        if not fits:
            raise ModelFileError(
                f"layer {self.name!r} of the checkpoint has {blocks} blocks for K = {k}"
            )
        return int(size)

    def sorted_order(self, blocks: int) -> npt.NDArray[np.int64] | None:
        """Return the order that brings the rows of a block together, if g_idx has one."""
        (k, _), index = self.shape(), self._block_of_rows()
        if index is None:
            return None
        in_blocks = np.arange(k) // self.block_size(blocks)
        if np.array_equal(index, in_blocks):
            return None
        order = np.argsort(index, kind="stable")
        if len(index) != k or not np.array_equal(index[order], in_blocks):
            raise ModelFileError(
                f"layer {self.name!r} of the checkpoint has blocks of different numbers of "
                "rows (g_idx), which ONNX does not have"
            )
        return order

    def _block_of_rows(self) -> npt.NDArray[Any] | None:
        name = next((name for name in ("g_idx", "weight_g_idx") if name in self.parts), None)
        index = None if name is None else self.part(name, 1, ("I32", "I64")).read()
        # compressed-tensors writes -1 where there is no act-order.
        return None if index is None or (index == -1).all() else index


class SafetensorsCheckpoint(Checkpoint):
    """A checkpoint of such files."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.tensors = folder, stored_tensors(folder)
        super().__init__(sorted({Path(t.path) for t in self.tensors.values()}))
        self.layers: dict[str, Found] = {}
        grouped: dict[str, dict[str, StoredTensor]] = {}
        for name, tensor in self.tensors.items():
            module, _, part = name.rpartition(".")
            grouped.setdefault(module, {})[part] = tensor
        for name, parts in grouped.items():
            if (layer := self.read_layer(name, parts)) is not None:
                self.layers[name] = layer

    @abc.abstractmethod
    def read_layer(self, name: str, parts: Mapping[str, StoredTensor]) -> Found | None:
        """Return the layer of a module; None where it is not quantised."""

    def matrices(self) -> Sequence[str]:
        """Return the names of layers."""
        return list(self.layers)

    def candidates(self, name: str) -> Sequence[Found]:
        """Return the layer or float matrix of a module."""
        if (layer := self.layers.get(name)) is not None:
            return [layer]
        tensor = self.tensors.get(f"{name}.weight")
        if tensor is None or len(tensor.shape) != 2 or tensor.dtype not in FLOATS:
            return []
        # transformers' Conv1D has [K, N].
        return [FloatMatrix(name, tensor.read, k_last) for k_last in (True, False)]

    def put_vectors(self, model: ir.Model) -> None:
        """Give a model its norms and biases, by name."""
        vectors = {
            name: tensor
            for name, tensor in self.tensors.items()
            if name.endswith((".weight", ".bias"))
            and len(tensor.shape) == 1
            and tensor.dtype in FLOATS
        }
        missing = dict.fromkeys(vectors)
        for name, value in model.graph.initializers.items():
            old = value.const_value
            for spelled in spellings(name):
                tensor = vectors.get(spelled)
                if tensor and old is not None and tuple(old.shape.numpy()) == tensor.shape:
                    value.const_value = as_tensor(spelled, tensor.read(), old)
                    missing.pop(spelled, None)
                    break
        for name in missing:
            self.check_missing(name)

    def check_missing(self, name: str) -> None:
        """Refuse to go on without a vector, if the format needs it."""


def unpacked(
    words: npt.NDArray[Any], bits: int, order: tuple[int, ...] | None = None
) -> npt.NDArray[np.uint8]:
    """Return the numbers in words ``[rows, n]`` of 32 bits, along the last axis, uint8."""
    numbers = unpack_rows(np.ascontiguousarray(words).astype("<i4").view(np.uint8), bits)
    if order is not None:
        in_words = numbers.reshape(*words.shape, len(order))
        numbers = in_words[..., np.argsort(order)].reshape(len(words), -1)
    return numbers
