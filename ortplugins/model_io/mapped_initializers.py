# SPDX-License-Identifier: MIT
"""Reads an .onnx file and leaves its large initializers in it, as external data.

Parsing the whole file would hold it twice in memory: its bytes, and the parsed message. A
protobuf merges messages that are concatenated, so all but the large initializers is parsed in
pieces (https://protobuf.dev/programming-guides/encoding/).
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import google.protobuf.message
import onnx

# Smaller tensors, and smaller files, are parsed.
_MIN_BYTES = 1 << 16
_MIN_FILE_BYTES = 1 << 22
# Field numbers of ModelProto and GraphProto.
_GRAPH, _INITIALIZER = 7, 5
_VARINT, _BYTES = 0, 2


def read_without_tensors(path: str | os.PathLike[str]) -> onnx.ModelProto | None:
    """Return a model whose large initializers are external data in ``path`` itself.

    None for a small file, or one that is not a ModelProto; parsing it whole will say what is
    wrong.
    """
    model = onnx.ModelProto()
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size < _MIN_FILE_BYTES:
            return None
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            try:
                for number, kind, first, value, last in _fields(content, 0, len(content)):
                    if (number, kind) == (_GRAPH, _BYTES):
                        _merge_graph(model.graph, content, value, last, Path(path).name)
                    else:
                        model.MergeFromString(content[first:last])
            except (ValueError, google.protobuf.message.DecodeError):
                return None
    return model


def _merge_graph(
    graph: onnx.GraphProto, content: mmap.mmap, start: int, stop: int, location: str
) -> None:
    parsed = start
    for number, kind, first, value, last in _fields(content, start, stop):
        if (number, kind) == (_INITIALIZER, _BYTES) and last - value >= _MIN_BYTES:
            graph.MergeFromString(content[parsed:first])
            tensor, parsed = onnx.TensorProto.FromString(content[value:last]), last
            if len(data := tensor.raw_data) >= _MIN_BYTES:
                # Bytes that are equal would do as well, should they come before.
                place = content.find(data, value, last)
                tensor.ClearField("raw_data")
                tensor.data_location = onnx.TensorProto.EXTERNAL
                fields = {"location": location, "offset": place, "length": len(data)}
                for key, text in fields.items():
                    tensor.external_data.add(key=key, value=str(text))
            graph.initializer.append(tensor)  # a copy, in the memory of the model
    graph.MergeFromString(content[parsed:stop])


def _fields(
    content: mmap.mmap, start: int, stop: int
) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield the fields of a message: number, wire type, start, start of the value, end.

    Raises:
        ValueError: If it is no message.
    """
    while start < stop:
        tag, value = _read_varint(content, start, stop)
        number, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            _, end = _read_varint(content, value, stop)
        elif kind == _BYTES:
            length, value = _read_varint(content, value, stop)
            end = value + length
        else:  # the others are in no field of these two messages
            raise ValueError(f"wire type {kind}")
        if end > stop:
            raise ValueError("a field that ends past its message")
        yield number, kind, start, value, end
        start = end


def _read_varint(content: mmap.mmap, start: int, stop: int) -> tuple[int, int]:
    """Return a number with seven bits per byte, low bits first, and where it ends."""
    for end in range(start, min(start + 10, stop)):
        if content[end] < 0x80:
            read = content[start : end + 1]
            return sum((byte & 0x7F) << 7 * i for i, byte in enumerate(read)), end + 1
    raise ValueError("a number that does not end")
