# SPDX-License-Identifier: MIT
"""Reads the header of a GGUF file: what it says of the model, and where tensors lie.

The gguf package's own reader takes seconds and hundreds of megabytes for the words of a
tokenizer, and follows counts that lie. This one skips words, and believes no size before it is
compared with the file's. llama.cpp's names of modules are read from the package's tables: what
it makes of these is as large as a file says, and differs once a model of another architecture
was asked for.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import mmap
import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt

from ortplugins.errors import MissingFileError, ModelFileError
from ortplugins.quantization.checkpoints.packages import package
from ortplugins.quantization.tensor_reference import TensorReference

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
# By the number of a metadata value's type: struct's letter.
_SCALARS = dict(enumerate("BbHhIif?")) | dict(enumerate("Qqd", 10))
_STRING, _ARRAY = 8, 9
_LONGEST_KEPT = 1 << 16  # bytes of a text or an array: of words only their lengths are read
_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """A tensor in its file."""

    name: str
    type: str  # llama.cpp's name, or "type 99"
    shape: tuple[int, ...]  # K last
    path: str
    offset: int
    nbytes: int

    @property
    def is_float(self) -> bool:
        """Whether it has no codes."""
        return self.type in _FLOATS

    def part(self, number: int) -> GgufTensor | None:
        """Return one of a stack; None where there are not so many."""
        count, *shape = self.shape
        nbytes = self.nbytes // max(1, count)
        offset = self.offset + number * nbytes
        stacked = dataclasses.replace(self, shape=(*shape,), offset=offset, nbytes=nbytes)
        return stacked if number < count else None

    def map(self) -> npt.NDArray[Any]:
        """Return its floats, or rows of bytes ``[..., bytes]``, mapped."""
        shape, dtype = self.shape, _FLOATS.get(self.type, "uint8")
        if not self.is_float:
            shape = (*shape[:-1], self.nbytes // max(1, math.prod(shape[:-1])))
        return TensorReference(self.path, self.offset, shape, dtype).map()


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    """Return the numbers, texts and arrays of numbers in a header, by key; the tensors.

    Raises:
        MissingFileError, ModelFileError: If there is no such file, or it is damaged.
    """
    try:
        with (
            open(path, "rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            return _Header(path, data).read()
    except FileNotFoundError as error:
        raise MissingFileError(f"{path}: no such file") from error
    except ModelFileError:
        raise
    except (struct.error, ValueError) as error:  # of text and of empty files, too
        raise ModelFileError(f"{path} is damaged: its header ends early ({error})") from error


class _Header:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._at = path, data, 0

    def read(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        if self._bytes(4) != MAGIC:
            raise ModelFileError(f"{self._path} is no GGUF file")
        if (version := self._number("I")) not in _VERSIONS:
            raise ModelFileError(
                f"{self._path} is of GGUF version {version}: little-endian files of "
                f"{_VERSIONS} are read"
            )
        tensors, fields = self._number("Q"), self._number("Q")
        # Counts that lie end where the file does.
        known = {self._text(): self._value(self._number("I")) for _ in range(fields)}
        described = [self._tensor() for _ in range(tensors)]
        alignment = known.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise self._damaged(f"an alignment of {alignment}")
        start = -(-self._at // alignment) * alignment
        placed = [self._placed(*tensor, start) for tensor in described]
        in_order = sorted(placed, key=lambda tensor: tensor.offset)
        for before, after in itertools.pairwise(in_order):
            if before.offset + before.nbytes > after.offset:
                raise self._damaged(f"tensors {before.name!r} and {after.name!r} overlap")
        found = {tensor.name: tensor for tensor in placed}
        if len(found) < len(placed):
            raise self._damaged("a tensor comes twice")
        return known, found

    def _damaged(self, what: str) -> ModelFileError:
        return ModelFileError(f"{self._path} is damaged: {what}")

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._text()
        rank = self._number("I")
        if not 1 <= rank <= 4:
            raise self._damaged(f"tensor {name!r} of rank {rank}")
        shape = tuple(self._number("Q") for _ in range(rank))[::-1]
        return name, shape, self._number("I"), self._number("Q")

    def _placed(
        self, name: str, shape: tuple[int, ...], kind: int, offset: int, start: int
    ) -> GgufTensor:
        gguf, offset = package("gguf"), start + offset
        try:
            known = gguf.GGMLQuantizationType(kind)
        except ValueError:  # of a newer llama.cpp; an error where it is asked for
            return GgufTensor(name, f"type {kind}", shape, str(self._path), offset, 0)
        size, nbytes = gguf.GGML_QUANT_SIZES[known]
        if shape[-1] % size:
            raise self._damaged(f"tensor {name!r} has rows of {shape[-1]} in blocks of {size}")
        nbytes = math.prod(shape) // size * nbytes
        if offset + nbytes > len(self._data):
            raise ModelFileError(
                f"{self._path} is cut short: tensor {name!r} ends at byte {offset + nbytes} "
                f"of {len(self._data)}"
            )
        return GgufTensor(name, known.name, shape, str(self._path), offset, nbytes)

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY:
            return self._number(self._scalar(kind))
        kind, count = self._number("I"), self._number("Q")
        if kind == _STRING:
            for _ in range(count):
                self._skip(self._number("Q"))
            return None
        letter = self._scalar(kind)
        data = self._bytes(count * struct.calcsize(f"<{letter}"))
        return list(struct.unpack(f"<{len(data) // struct.calcsize(letter)}{letter}", data))

    def _scalar(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise self._damaged(f"metadata of type {kind}")
        return _SCALARS[kind]

    def _number(self, letter: str) -> Any:
        (number,) = struct.unpack_from(f"<{letter}", self._data, self._at)
        self._at += struct.calcsize(f"<{letter}")
        return number

    def _text(self) -> str:
        return self._bytes(self._number("Q")).decode()

    def _bytes(self, count: int) -> bytes:
        """Return the next bytes; none where they are too many to be of use."""
        start = self._at
        self._skip(count)
        return self._data[start : self._at] if count <= _LONGEST_KEPT else b""

    def _skip(self, count: int) -> None:
        if count > len(self._data) - self._at:
            raise struct.error(f"{count} bytes at {self._at} of {len(self._data)}")
        self._at += count


@functools.cache
def architectures() -> Mapping[str, Any]:
    """Return the architectures that are known, by name."""
    gguf = package("gguf")

    return {name: architecture for architecture, name in gguf.MODEL_ARCH_NAMES.items()}


def llama_names(module: str, architecture: str = "") -> Sequence[str]:
    """Return what a module is called in an architecture; by default, in any."""
    number = re.search(r"\.(\d+)\.", f".{module}")
    if number is None:
        return _patterns(architecture).get(module, ())
    pattern = f".{module}".replace(number[0], ".{bid}.", 1)[1:]
    return [
        name.replace("{bid}", number[1]) for name in _patterns(architecture).get(pattern, ())
    ]


@functools.cache
def _patterns(architecture: str) -> Mapping[str, Sequence[str]]:
    """Return names by names, ``{bid}`` in the place of a layer's number."""
    gguf = package("gguf")

    known, own = gguf.TensorNameMap, architectures().get(architecture)
    blocks = known.block_mappings_cfg | known.arch_block_mappings_cfg.get(own, {})
    found: dict[str, list[str]] = {}
    for tensor, modules in (*known.mappings_cfg.items(), *blocks.items()):
        if own is None or tensor in gguf.MODEL_TENSORS[own]:
            name = gguf.TENSOR_NAMES[tensor]
            for module in (*modules, name):  # of several names the last one counts
                found.setdefault(module, []).insert(0, name)
    return found
