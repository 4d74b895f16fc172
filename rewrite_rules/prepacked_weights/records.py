# SPDX-License-Identifier: MIT
"""Where onnxruntime says that packed weights lie, and a data file with all in good places.

onnxruntime writes, for each initializer that a kernel packs, entries

    prepacked_<i> = <operator>+<hash>|<offset>;<length>;<checksum>[|<offset>;<length>;...]

into the initializer's ``external_data`` (core/framework/tensor_external_data_info.cc, 1.31). A
session packs the weight again, and where operator and hash of the result are equal it drops
its own copy and maps the one in the file. onnxruntime puts them anywhere, unaligned, which
costs a quarter of the speed of a long prompt. Here they are laid out, aligned, in the order in
which nodes read them, so that a cold start reads forward.
"""

from __future__ import annotations

import dataclasses
import functools
import mmap
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from rewrite_rules.prepacked_weights.packed_operands import Key, graphs, readings

if TYPE_CHECKING:
    import onnx

_KEY = "prepacked_"
_FORM = re.compile(r"[^|]+(\|\d+;\d+;[^|;]*)+")
# Cache lines, as kernels assume of what they allocate; pages for what is mapped on its own.
_ALIGNMENT, _LARGE_ALIGNMENT, _LARGE = 64, 4096, 1 << 20


@dataclasses.dataclass(frozen=True)
class Record:
    """One packed form of one initializer; a blob is an offset, a length and a checksum."""

    key: str
    kernel: str
    blobs: tuple[tuple[int, int, str], ...]

    @classmethod
    def parse(cls, key: str, text: str) -> Record:
        """Read an entry; raise ValueError if it is not of the form above."""
        if not _FORM.fullmatch(text):
            raise ValueError(f"{key} = {text!r} is no kernel with its buffers")
        kernel, *parts = text.split("|")
        blobs = (part.split(";") for part in parts)
        return cls(key, kernel, tuple((int(at), int(size), crc) for at, size, crc in blobs))

    def __str__(self) -> str:
        return "|".join(
            [self.kernel, *(f"{offset};{length};{crc}" for offset, length, crc in self.blobs)]
        )


def records_of(tensor: onnx.TensorProto) -> list[Record]:
    """Read the records of one initializer, but for those with a buffer of no bytes.

    Some quantised kernels write such; at the end of a file onnxruntime can't map them.
    """
    entries = (entry for entry in tensor.external_data if entry.key.startswith(_KEY))
    records = (Record.parse(entry.key, entry.value) for entry in entries)
    return [record for record in records if all(length for _, length, _ in record.blobs)]


def read_records(model: onnx.ModelProto) -> dict[Key, list[Record]]:
    """Read the records of all initializers that have some, those of subgraphs too."""
    return {
        (*way, tensor.name): found
        for way, graph in graphs(model.graph)
        for tensor in graph.initializer
        if (found := records_of(tensor))
    }


def drop_records(model: onnx.ModelProto, kept: Collection[Key]) -> None:
    """Drop the records of other initializers than some."""
    for key, tensor, *_ in readings(model.graph):
        if key not in kept:
            place = _entries(tensor)
            del tensor.external_data[:]
            for name, text in place.items():
                if not name.startswith(_KEY):
                    tensor.external_data.add(key=name, value=text)


def places(model: onnx.ModelProto) -> dict[Key, tuple[str, str]]:
    """Where the bytes of each initializer begin, file and offset."""
    return {
        (*way, tensor.name): (place["location"], place.get("offset", "0"))
        for way, graph in graphs(model.graph)
        for tensor in graph.initializer
        if (place := _entries(tensor))
    }


def _entries(tensor: onnx.TensorProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in tensor.external_data}


def restore_order(model: onnx.ModelProto, source: onnx.ModelProto) -> None:
    """Put nodes back into the order that onnxruntime was given, where it added none."""
    given = dict(graphs(source.graph))
    for way, graph in graphs(model.graph):
        if way not in given:
            continue
        ranks = {tuple(node.output): rank for rank, node in enumerate(given[way].node)}
        if all(tuple(node.output) in ranks for node in graph.node):
            graph.node.sort(key=lambda node, ranks=ranks: ranks[tuple(node.output)])


def lay_out(
    model: onnx.ModelProto, folder: Path, data_name: str, same: Mapping[Key, object]
) -> int:
    """Write a new data file, make the model point into it, and return the file's bytes.

    ``same`` says where the bytes of each initializer were; those of one place and length are
    written once.
    """
    written: dict[object, int] = {}
    done: set[Key] = set()
    with open(folder / data_name, "wb") as target:
        for key, tensor, *_ in readings(model.graph):
            place = _entries(tensor)
            if not place or key in done:
                continue
            done.add(key)
            if missing := {"location", "length"} - place.keys():
                raise ValueError(f"{tensor.name}: its place has no {', '.join(missing)}")
            with open(folder / place["location"], "rb") as source:
                copy = functools.partial(_copy, source, target)
                identity = same.get(key, object()), place["length"]
                if identity not in written:
                    offset = int(place.get("offset", 0))
                    written[identity] = copy(offset, int(place["length"]))
                place = {
                    "location": data_name,
                    "offset": str(written[identity]),
                    "length": place["length"],
                }
                for record in records_of(tensor):
                    blobs = tuple(
                        (copy(at, size), size, crc) for at, size, crc in record.blobs
                    )
                    place[record.key] = str(dataclasses.replace(record, blobs=blobs))
            del tensor.external_data[:]
            for name, text in place.items():
                tensor.external_data.add(key=name, value=text)
        return target.tell()


def _copy(source: BinaryIO, target: BinaryIO, offset: int, length: int) -> int:
    """Append a piece of a file, aligned; return where it went."""
    size = os.fstat(source.fileno()).st_size
    if offset + length > size:
        raise ValueError(f"{source.name}: {offset} + {length} lies outside")
    alignment = _LARGE_ALIGNMENT if length >= _LARGE else _ALIGNMENT
    target.write(b"\0" * (-target.tell() % alignment))
    start = target.tell()
    if length:
        with (
            mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
            memoryview(mapped) as stored,
        ):
            target.write(stored[offset : offset + length])
    return start
