# SPDX-License-Identifier: MIT
"""What the inputs of a model are (token ids, a mask, a cache), by name and by use.

Exporters name dimensions as they like: torch writes ``s10`` for the batch of the ids and
``s43`` for that of their mask. The name of the input says which of its axes is which.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Iterator

import onnx_ir as ir

from rewrite_rules.shapes.dimensions import number
from rewrite_rules.shapes.proved_shapes import ProvedShapes


class Kind(enum.Enum):
    """What values an input takes."""

    IDS = enum.auto()  # rows of a table
    MASK = enum.auto()  # 1 where a token counts
    BIAS = enum.auto()  # added to scores, or hides some
    POSITIONS = enum.auto()
    ZEROS = enum.auto()  # token types; the state before the first step
    CACHE = enum.auto()  # keys or values of earlier tokens
    LAST = enum.auto()  # onnxruntime-genai's seqlens_k: the last position of each row
    TOTAL = enum.auto()  # onnxruntime-genai's total_sequence_length
    RATE = enum.auto()  # samples of audio in a second
    HAS_PAST = enum.auto()  # optimum's use_cache_branch
    NUMBERS = enum.auto()  # anything else


@dataclasses.dataclass(frozen=True)
class Role:
    """An input's part in the model: what values it takes, and what each axis counts.

    That is ``batch``, ``sequence`` (the new tokens), ``past``, ``total`` (past and new ones),
    ``source`` (what an encoder reads), ``heads``, ``head_size``; ``""`` if not known.
    """

    kind: Kind
    axes: tuple[str, ...]


# Name of the input, what it is, and its last axes. The first row that fits counts.
_BY_NAME = (
    (r"(encoder|cross).*mask", Kind.MASK, "batch source"),
    (r"mask", Kind.MASK, "batch total"),
    (r"(past|cache).*(encoder|cross)", Kind.CACHE, "batch heads source head_size"),
    (r"use_cache|cache_branch", Kind.HAS_PAST, ""),
    (r"past_seq|past_len", Kind.LAST, "batch"),
    (r"past|cache", Kind.CACHE, "batch heads past head_size"),
    (r"encoder_(hidden|out)", Kind.NUMBERS, "batch source width"),
    (r"position", Kind.POSITIONS, "batch sequence"),
    (r"token_type|segment", Kind.ZEROS, "batch sequence"),
    (r"seqlens_k", Kind.LAST, "batch"),
    (r"total.*len", Kind.TOTAL, ""),
    (r"^sr$|sampl(e|ing)_?rate", Kind.RATE, ""),
    (r"^(state|h|c|hn|cn|h0|c0)$", Kind.ZEROS, "layers batch width"),
    (r"ids$|tokens$", Kind.IDS, "batch sequence"),
    (r"embeds$", Kind.NUMBERS, "batch sequence width"),
)
_BY_SYMBOL = (
    (r"\+", ""),
    (r"batch", "batch"),
    (r"past", "past"),
    (r"total", "total"),
    (r"encoder|source", "source"),
    (r"seq", "sequence"),
)
# What floats may be; ints may be anything but a cache's, by their names.
_FLOATS = (Kind.MASK, Kind.NUMBERS, Kind.ZEROS)
# Nodes that look rows up, and the attribute that says along which axis.
_LOOKS_UP = {"Gather": "axis", "GatherBlockQuantized": "gather_axis"}
# Nodes that hand indices on as they are.
_SAME_INDICES = {"Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze", "Clip", "Flatten"}


def is_open(dim: int | ir.SymbolicDim) -> bool:
    """Whether a dimension has no size, which some exporters write as -1; 0 is one."""
    return not isinstance(dim, int) or dim < 0


def role_of(value: ir.Value) -> Role:
    """Find out what an input is, also by its uses where the graph is at hand."""
    shape = value.shape or ir.Shape([])
    if not isinstance(value.type, ir.TensorType | None):  # a sequence, an optional, a map
        return Role(Kind.NUMBERS, ("",) * len(shape))
    name = (value.name or "").lower()
    for pattern, kind, named in _BY_NAME:
        if re.search(pattern, name) and _fits(kind, value):
            labels = named.split()
            if kind is Kind.MASK and len(shape) == 4:
                kind, labels = Kind.BIAS, ["batch", "heads", "sequence", labels[-1]]
            elif kind is Kind.CACHE and len(shape) == 3:
                labels.remove("heads")
            found = ["", *[""] * len(shape), *labels][-len(shape) :] if len(shape) else []
            return Role(kind, tuple(found))
    floating = value.dtype is None or value.dtype.is_floating_point()
    axes = tuple(_label_of(dim, axis, len(shape), floating) for axis, dim in enumerate(shape))
    kind = Kind.IDS if rows_below(value) is not None else Kind.NUMBERS
    return Role(kind, axes)


def _fits(kind: Kind, value: ir.Value) -> bool:
    floating = value.dtype is not None and value.dtype.is_floating_point()
    if kind is Kind.CACHE:
        return value.shape is None or len(value.shape) >= 3
    return not floating or kind in _FLOATS


def _label_of(dim: int | ir.SymbolicDim, axis: int, rank: int, floating: bool) -> str:
    if not is_open(dim):
        return ""
    symbol = "" if isinstance(dim, int) else (dim.value or "").lower()
    for pattern, label in _BY_SYMBOL:
        if re.search(pattern, symbol):
            # Numbers of two axes are not tokens but audio, whose models take windows.
            return "" if label == "sequence" and floating and rank == 2 else label
    first = symbol in ("", "?") or symbol.startswith("unk__") or (floating and rank == 4)
    return "batch" if axis == 0 and first else ""


def rows_below(value: ir.Value) -> int | None:
    """Return how many rows the smallest table has that a value's elements are looked up in."""
    rows = (_rows(table, axis) for table, axis in tables_below(value))
    return min((count for count in rows if count is not None), default=None)


def tables_below(value: ir.Value, depth: int = 8) -> Iterator[tuple[ir.Value | None, int]]:
    """Yield tables that a value's elements are looked up in, and the axis of their rows."""
    for node, index in value.uses():
        if node.op_type in _LOOKS_UP and index == 1:
            yield node.inputs[0], node.attributes.get_int(_LOOKS_UP[node.op_type], 0)
        elif node.op_type == "EmbedLayerNormalization" and index < 2:
            yield node.inputs[2 if index == 0 else 4], 0
        elif node.op_type in _SAME_INDICES and index == 0 and depth:
            yield from tables_below(node.outputs[0], depth - 1)


def _rows(table: ir.Value | None, axis: int) -> int | None:
    producer = None if table is None else table.producer()
    if producer is not None and producer.op_type in ("DequantizeLinear", "Cast", "Identity"):
        return _rows(producer.inputs[0], axis)
    if table is None or table.shape is None:
        return None
    rank = len(table.shape)
    if rank < 2 or not -rank <= axis < rank:
        return None
    rows = table.shape[axis]
    return rows if isinstance(rows, int) else None


def cache_sizes(value: ir.Value, shapes: ProvedShapes) -> dict[str, int]:
    """Return heads and head size of a cache, as far as GroupQueryAttention says."""
    for node, _ in value.uses():
        if "kv_num_heads" not in node.attributes:
            continue
        heads = node.attributes["kv_num_heads"].as_int()
        read, parts = node.inputs[1], heads
        if read is None:  # queries, keys and values packed into one
            read, parts = node.inputs[0], node.attributes["num_heads"].as_int() + 2 * heads
        dims = shapes.dims(read)
        width = number(dims[-1]) if dims else None
        return {"heads": heads} | ({"head_size": width // parts} if width else {})
    return {}
