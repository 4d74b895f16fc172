# SPDX-License-Identifier: MIT
"""Where onnxruntime says that packed weights lie, and a data file with all in good places.

onnxruntime writes, for each initializer that a kernel packs, entries

    prepacked_<i> = <operator>+<hash>|<offset>;<length>;<checksum>[|<offset>;<length>;...]

into the initializer's ``external_data`` (core/framework/tensor_external_data_info.cc, 1.31). A
session packs the weight again, and where operator and hash of the result are equal it drops
its own copy and maps the one in the file.

onnxruntime puts the packed weights anywhere, in the order of a hash table: unaligned, they
cost a quarter of the speed of a long prompt. Here they are laid out in the order in which
nodes read them, aligned, so that a cold start reads forward.
"""

from __future__ import annotations

__all__ = ["Record", "lay_out", "places", "read_records", "strip_records"]

import dataclasses
import itertools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    import onnx

_KEY = "prepacked_"
# Cache lines, as kernels assume of what they allocate; pages for what is mapped on its own.
_ALIGNMENT, _LARGE_ALIGNMENT, _LARGE = 64, 4096, 1 << 20
_CHUNK_BYTES = 8 << 20

# A graph's number and its initializers by name.
_Scope = tuple[int, "dict[str, onnx.TensorProto]"]


@dataclasses.dataclass(frozen=True)
class Record:
    """One packed form of one initializer.

    Attributes:
        key: Name of the entry, ``prepacked_0`` for instance.
        kernel: Operator and hash, as onnxruntime looks it up.
        blobs: Offset, length and checksum of each buffer.
    """

    key: str
    kernel: str
    blobs: tuple[tuple[int, int, str], ...]

    @classmethod
    def parse(cls, key: str, text: str) -> Record:
        """Read an entry.

        Raises:
            ValueError: If it is not of the form above.
        """
        kernel, *parts = text.split("|")
        blobs = []
        for part in parts:
            offset, length, checksum = part.split(";")
            blobs.append((int(offset), int(length), checksum))
            if blobs[-1][0] < 0 or blobs[-1][1] < 0:
                raise ValueError(f"{key} = {text!r} has a negative place")
        if not kernel or not blobs:
            raise ValueError(f"{key} = {text!r} names no kernel or no buffer")
        return cls(key, kernel, tuple(blobs))

    def __str__(self) -> str:
        """Return the entry's text."""
        return "|".join(
            [self.kernel, *(f"{offset};{length};{crc}" for offset, length, crc in self.blobs)]
        )


def records_of(tensor: onnx.TensorProto) -> list[Record]:
    """Read the records of one initializer.

    Raises:
        ValueError: If one is malformed.
    """
    return [
        Record.parse(entry.key, entry.value)
        for entry in tensor.external_data
        if entry.key.startswith(_KEY)
    ]


def read_records(model: onnx.ModelProto) -> dict[str, list[Record]]:
    """Read the records of all initializers that have some, those of bodies too."""
    return {
        tensor.name: found
        for graph in _graphs(model.graph)
        for tensor in graph.initializer
        if (found := records_of(tensor))
    }


def places(model: onnx.ModelProto) -> dict[str, tuple[str, ...]]:
    """Where the bytes of each initializer lie; equal places are equal bytes."""
    found: dict[str, tuple[str, ...]] = {}
    for graph in _graphs(model.graph):
        for tensor in graph.initializer:
            entries = {entry.key: entry.value for entry in tensor.external_data}
            if entries:
                found[tensor.name] = tuple(
                    entries.get(key, "0") for key in ("location", "offset", "length")
                )
    return found


def strip_records(model: onnx.ModelProto) -> None:
    """Remove all records."""
    for graph in _graphs(model.graph):
        for tensor in graph.initializer:
            kept = [entry for entry in tensor.external_data if not entry.key.startswith(_KEY)]
            del tensor.external_data[:]
            tensor.external_data.extend(kept)


def lay_out(
    model: onnx.ModelProto, folder: Path, data_name: str, same: Mapping[str, object]
) -> int:
    """Write a new data file and make the model point into it.

    Args:
        model: As onnxruntime saved it, without its data; changed.
        folder: Holds the files that the model points to, and gets the new one.
        data_name: Name of the new file.
        same: By initializer: what its bytes were before onnxruntime copied them. Equal ones
            are written once.

    Returns:
        Bytes of the new file.

    Raises:
        OSError: If a file can't be read or written.
        ValueError: If a record is malformed, or a place lies outside its file.
    """
    written: dict[object, int] = {}
    with open(folder / data_name, "wb") as target:
        for tensor in _in_order(model.graph):
            entries = {entry.key: entry.value for entry in tensor.external_data}
            if not entries:
                continue
            with open(folder / entries["location"], "rb") as source:
                offset, length = int(entries.get("offset", 0)), int(entries["length"])
                identity = same.get(tensor.name, object())
                if identity not in written:
                    written[identity] = _copy(source, offset, length, target)
                records = [
                    dataclasses.replace(
                        record,
                        blobs=tuple(
                            (_copy(source, start, size, target), size, crc)
                            for start, size, crc in record.blobs
                        ),
                    )
                    for record in records_of(tensor)
                ]
            del tensor.external_data[:]
            for key, text in (
                ("location", data_name),
                ("offset", str(written[identity])),
                ("length", str(length)),
                *((record.key, str(record)) for record in records),
            ):
                entry = tensor.external_data.add()
                entry.key, entry.value = key, text
        return target.tell()


def _copy(source: BinaryIO, offset: int, length: int, target: BinaryIO) -> int:
    """Append a piece of a file, aligned; return where it went."""
    if offset + length > os.fstat(source.fileno()).st_size:
        raise ValueError(f"{source.name}: {offset} + {length} lies outside")
    alignment = _LARGE_ALIGNMENT if length >= _LARGE else _ALIGNMENT
    target.write(b"\0" * (-target.tell() % alignment))
    start = target.tell()
    source.seek(offset)
    while length:
        chunk = source.read(min(length, _CHUNK_BYTES))
        target.write(chunk)
        length -= len(chunk)
    return start


def _in_order(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Initializers as nodes read them, once each, bodies at their node, unused ones last."""
    done: set[tuple[int, str]] = set()
    numbers = itertools.count()

    def scope(body: onnx.GraphProto) -> _Scope:
        return next(numbers), {tensor.name: tensor for tensor in body.initializer}

    def walk(body: onnx.GraphProto, scopes: tuple[_Scope, ...]) -> Iterator[onnx.TensorProto]:
        for node in body.node:
            for name in node.input:
                # The innermost graph that has the name is meant.
                number, tensors = next((s for s in scopes if name in s[1]), (-1, {}))
                if tensors and (number, name) not in done:
                    done.add((number, name))
                    yield tensors[name]
            for attribute in node.attribute:
                for part in [attribute.g] if attribute.HasField("g") else attribute.graphs:
                    yield from walk(part, (scope(part), *scopes))
        number, tensors = scopes[0]
        yield from (tensors[name] for name in tensors if (number, name) not in done)

    yield from walk(graph, (scope(graph),))


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _graphs(attribute.g)
            for body in attribute.graphs:
                yield from _graphs(body)
