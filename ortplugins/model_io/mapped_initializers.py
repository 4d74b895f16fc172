# SPDX-License-Identifier: MIT
"""Reads an .onnx file without its large tensors, which stay in the file as external data.

A protobuf stores a tensor's raw_data as contiguous bytes, which can be mapped like an external
data file. Parsing the whole file would take twice its size in memory: once for the bytes and
once for the parsed message. Only the initializers of the main graph are examined
(https://protobuf.dev/programming-guides/encoding/); everything else is copied.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

# Smaller tensors stay in the message.
_MIN_BYTES = 1 << 16
_MIN_FILE_BYTES = 1 << 22

# Field numbers of onnx.proto.
_MODEL_GRAPH, _GRAPH_INITIALIZER = 7, 5
_RAW_DATA, _EXTERNAL_DATA, _DATA_LOCATION = 9, 13, 14
_ENTRY_KEY, _ENTRY_VALUE = 1, 2
_EXTERNAL = 1

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class _MalformedError(Exception):
    """The bytes are not a protobuf message, or not one that this module can read."""


def read_without_tensors(path: str | os.PathLike[str]) -> bytes | None:
    """Return a serialized ModelProto whose large initializers are external data in ``path``.

    None if that gains nothing or the file is not a ModelProto; parsing it whole will then say
    what is wrong.
    """
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size < _MIN_FILE_BYTES:
            return None
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            try:
                path_in_file = _MODEL_GRAPH, _GRAPH_INITIALIZER
                return _reduced(content, 0, len(content), path_in_file, Path(path).name)
            except _MalformedError:
                return None


def _reduced(
    content: mmap.mmap, start: int, stop: int, path: Sequence[int], location: str
) -> bytes | None:
    """Return a message without the data of the tensors at a path; None if there are none."""
    parts, reduced = [], False
    for number, kind, first, value, last in _fields(content, start, stop):
        inner = None
        if number == path[0] and kind == _BYTES:
            if len(path) > 1:
                inner = _reduced(content, value, last, path[1:], location)
            elif last - value >= _MIN_BYTES:
                inner = _reduced_tensor(content, value, last, location)
        parts.append(content[first:last] if inner is None else _field(number, inner))
        reduced |= inner is not None
    return b"".join(parts) if reduced else None


def _reduced_tensor(content: mmap.mmap, start: int, stop: int, location: str) -> bytes | None:
    """Replace a tensor's raw data by a reference; None if its data is stored differently."""
    parts, data = [], None
    for number, kind, first, value, last in _fields(content, start, stop):
        if number in (_EXTERNAL_DATA, _DATA_LOCATION):
            return None
        if number == _RAW_DATA:
            if kind != _BYTES or data is not None:
                return None
            data = (value, last - value)
        else:
            parts.append(content[first:last])
    if data is None or data[1] < _MIN_BYTES:
        return None
    entries = {"location": location, "offset": str(data[0]), "length": str(data[1])}
    for key, text in entries.items():
        entry = _field(_ENTRY_KEY, key.encode()) + _field(_ENTRY_VALUE, os.fsencode(text))
        parts.append(_field(_EXTERNAL_DATA, entry))
    parts.append(_varint(_DATA_LOCATION << 3 | _VARINT) + _varint(_EXTERNAL))
    return b"".join(parts)


def _fields(
    content: mmap.mmap, start: int, stop: int
) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield the fields of a message: number, wire type, start, start of the value, end."""
    while start < stop:
        tag, value = _read_varint(content, start, stop)
        number, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            _, end = _read_varint(content, value, stop)
        elif kind == _BYTES:
            length, value = _read_varint(content, value, stop)
            end = value + length
        elif kind in (_FIXED32, _FIXED64):
            end = value + (4 if kind == _FIXED32 else 8)
        else:
            raise _MalformedError
        if end > stop:
            raise _MalformedError
        yield number, kind, start, value, end
        start = end


def _read_varint(content: mmap.mmap, start: int, stop: int) -> tuple[int, int]:
    """Return a number with seven bits per byte, low bits first, and where it ends."""
    number = shift = 0
    while start < stop and shift < 70:
        byte = content[start]
        number |= (byte & 0x7F) << shift
        start, shift = start + 1, shift + 7
        if byte < 0x80:
            return number, start
    raise _MalformedError


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _field(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | _BYTES) + _varint(len(value)) + value
