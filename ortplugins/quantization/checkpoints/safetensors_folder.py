# SPDX-License-Identifier: MIT
"""A folder of safetensors files: tensors by name, read where they lie."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ortplugins.errors import MissingFileError, ModelFileError
from ortplugins.quantization.checkpoints.checkpoint import Checkpoint
from ortplugins.quantization.checkpoints.layers import (
    FloatMatrix,
    Found,
    Layer,
    LayerCodes,
    UnreadableError,
)
from ortplugins.quantization.checkpoints.packages import package
from ortplugins.quantization.methods.nearest import BlockFormat
from rewrite_rules.weights.bit_packing import Bytes, unpack_rows

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
    """A tensor in a file, or its transpose."""

    name: str
    path: str
    shape: tuple[int, ...]
    dtype: str  # safetensors' name
    is_transposed: bool = False

    @property
    def T(self) -> StoredTensor:
        """The transpose."""
        turned = not self.is_transposed
        return dataclasses.replace(self, shape=self.shape[::-1], is_transposed=turned)

    def read(self, columns: slice | None = None) -> npt.NDArray[Any]:
        """Read it, or some columns."""
        rows = () if self.is_transposed else (slice(None),)
        index = (...,) if columns is None else (*rows, columns)
        of = f", tensor {self.name!r} {list(self.shape)},"
        with _opened(Path(self.path), of) as file:
            found: npt.NDArray[Any] = file.get_slice(self.name)[index]
        return found.T if self.is_transposed else found


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


@contextlib.contextmanager
def _opened(path: Path, of: str = "") -> Iterator[Any]:
    safetensors = package("safetensors")
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            yield file
    except safetensors.SafetensorError as error:  # of what is not there, too
        raise ModelFileError(f"{path}{of} is damaged: {error}") from error


@dataclasses.dataclass(frozen=True)
class Numbers:
    """Unsigned numbers ``[rows, columns]``.

    Attributes:
        tensor: Words of 32 bits, low bits first, or signed integers, 2**(bits - 1) less each.
        bits: Of a number.
        columns: How many count; words may hold a few more.
        axis: Along which the numbers of a word lie; None where there are no words.
        order: Of the numbers in a word.
        offset: Added to each in words, without a carry.
    """

    tensor: StoredTensor
    bits: int
    columns: int
    axis: int | None
    order: tuple[int, ...] = ()
    offset: int = 0

    def read(self, columns: slice = slice(0, None)) -> Bytes:
        """Return some columns, uint8 ``[rows, n]``."""
        start, stop, _ = columns.indices(self.columns)
        each = WORD // self.bits if self.axis == 1 else 1
        stored = self.tensor.read(slice(start // each, -(-stop // each)))
        if self.axis is not None:
            found = self._unpacked(stored) if self.axis else self._unpacked(stored.T).T
            found = found[:, start % each :][:, : stop - start] + np.uint8(self.offset)
            return found & np.uint8((1 << self.bits) - 1)
        numbers = stored.astype(np.int64) + (1 << (self.bits - 1))
        if ((numbers < 0) | (numbers >= 1 << self.bits)).any():
            raise ModelFileError(
                f"tensor {self.tensor.name!r} of the checkpoint has numbers beyond "
                f"{self.bits} bits"
            )
        return numbers.astype(np.uint8)

    def _unpacked(self, words: npt.NDArray[Any]) -> Bytes:
        """Return the numbers of words along the last axis."""
        stored = np.ascontiguousarray(words).astype("<i4").view(np.uint8)
        numbers = unpack_rows(stored, self.bits)
        if not self.order:
            return numbers
        in_words = numbers.reshape(*words.shape, len(self.order))
        return in_words[..., np.argsort(self.order)].reshape(len(words), -1)


def stored_layer(
    name: str,
    method: str,
    codes: Numbers,
    k: int,
    scales: StoredTensor,
    zeros: Numbers | None,
    block_of_rows: StoredTensor | None,
) -> Layer:
    """Return a layer, its tensors checked.

    Args:
        name: Of the layer.
        method: What made the codes.
        codes: ``[K, N]``; words may hold a few more rows.
        k: The rows that count.
        scales: ``[blocks, N]``, or of one number.
        zeros: ``[blocks, N]`` or one; None for those in the middle.
        block_of_rows: ``[K]``, for act-order; None, or -1 everywhere, without.
    """
    n, shape = codes.columns, scales.shape
    grid = (1, n) if shape in ((1,), (1, 1)) else shape
    points = None if zeros is None else zeros.read()
    given = "" if points is None else f" and zero points {list(points.shape)}"
    fitting = points is None or points.size == 1 or points.shape == grid
    if len(grid) != 2 or grid[1] != n or not fitting:
        raise ModelFileError(
            f"tensor {scales.name!r} of the checkpoint: scales {list(shape)}{given} for a "
            f"weight [{k}, {n}]: one for each block of each column is expected"
        )
    size, order = _blocks(name, k, grid[0], block_of_rows)
    symmetric = points is None or bool((points == 1 << (codes.bits - 1)).all())
    form = BlockFormat(codes.bits, -1 if grid[0] == 1 else size, symmetric)
    read = functools.partial(
        _read, codes, k, scales, None if symmetric else zeros, grid, order
    )
    return Layer(name, method, (k, n), form, read, order=order)


def _read(
    codes: Numbers,
    k: int,
    scales: StoredTensor,
    zeros: Numbers | None,
    grid: tuple[int, ...],
    order: npt.NDArray[np.int64] | None,
    columns: slice,
) -> LayerCodes:
    found = codes.read(columns)[:k]
    found = found if order is None else found[order]
    stored = np.broadcast_to(scales.read(), grid)[:, columns]
    numbers = np.ascontiguousarray(stored, np.float32)
    if zeros is None:
        # Unsigned bytes wrap around to what the signed ones are.
        middle = np.uint8(1 << (codes.bits - 1))
        return LayerCodes((found - middle).view(np.int8), numbers)
    return LayerCodes(found, numbers, np.broadcast_to(zeros.read(), grid)[:, columns])


def _blocks(
    name: str, k: int, blocks: int, block_of_rows: StoredTensor | None
) -> tuple[int, npt.NDArray[np.int64] | None]:
    """Return the size of blocks, and the order that brings their rows together, if any."""
    index = None if block_of_rows is None else block_of_rows.read()
    if index is None or (index == -1).all():
        index, size = None, k // max(1, blocks)
    else:
        size = int(np.count_nonzero(index == 0))
    if not size or -(-k // size) != blocks or (index is None and k % size):
        raise ModelFileError(
            f"layer {name!r} of the checkpoint has {blocks} blocks for K = {k}"
        )
    in_blocks = np.arange(k) // size
    if index is None or np.array_equal(index, in_blocks):
        return size, None
    order = np.argsort(index, kind="stable")
    if len(index) != k or not np.array_equal(index[order], in_blocks):
        raise ModelFileError(
            f"layer {name!r} of the checkpoint has blocks of different numbers of rows "
            "(g_idx), which ONNX does not have"
        )
    return size, order


class SafetensorsCheckpoint(Checkpoint):
    """A checkpoint of such files."""

    marks: tuple[str, ...]  # the parts that a layer with codes has one of

    def __init__(self, folder: Path) -> None:
        self.tensors = stored_tensors(folder)
        super().__init__(sorted({Path(tensor.path) for tensor in self.tensors.values()}))
        self._known: dict[str, Sequence[Found]] = {}
        if not self.matrices():
            raise ModelFileError(
                f"{folder}: no tensor is called *.{self.marks[0]}: is it quantised?"
            )

    @abc.abstractmethod
    def read_layer(self, name: str) -> Layer:
        """Return the layer of a module with codes."""

    def part(self, name: str, dtypes: Sequence[str], *ranks: int) -> StoredTensor:
        """Return a tensor that there has to be, of some type and rank."""
        found = self.tensors.get(name)
        if found is None or len(found.shape) not in ranks or found.dtype not in dtypes:
            what = "missing" if found is None else f"{found.dtype} {list(found.shape)}"
            wanted = f"{' or '.join(dtypes)} of rank {' or '.join(map(str, ranks))}"
            raise ModelFileError(
                f"tensor {name!r} of the checkpoint is {what}: {wanted} is expected"
            )
        return found

    def matrices(self) -> Sequence[str]:
        """Return the names of layers."""
        parts = (name.rpartition(".") for name in self.tensors)
        return list(dict.fromkeys(module for module, _, part in parts if part in self.marks))

    def candidates(self, name: str) -> Sequence[Found]:
        """Return the layer or float matrix of a module."""
        if name not in self._known:
            marked = any(f"{name}.{mark}" in self.tensors for mark in self.marks)
            self._known[name] = [self.read_layer(name)] if marked else self._floats(name)
        return self._known[name]

    def _floats(self, name: str) -> Sequence[Found]:
        tensor = self.tensors.get(f"{name}.weight")
        if tensor is None or len(tensor.shape) != 2:
            return []
        if tensor.dtype not in FLOATS:
            reason = f"stored as {tensor.dtype} without scales: give a whole checkpoint"
            raise UnreadableError(tensor.name, reason)
        # transformers' Conv1D has [K, N].
        return [FloatMatrix(name, each.shape, each.read) for each in (tensor.T, tensor)]

    @functools.cached_property
    def vectors(self) -> dict[str, StoredTensor]:
        """Norms and biases."""
        return {
            name: tensor
            for name, tensor in self.tensors.items()
            if name.endswith((".weight", ".bias"))
            and len(tensor.shape) == 1
            and tensor.dtype in FLOATS
        }

    def vector(self, name: str) -> tuple[str, Sequence[npt.NDArray[Any]]] | None:
        """Return a norm or bias."""
        tensor = self.vectors.get(name)
        return None if tensor is None else (name, [tensor.read()])
