# SPDX-License-Identifier: MIT
"""Attention of long texts: scores in blocks, one text at a time.

    Attention(q, k, v, mask)
        -> Scan(texts: MultiHeadAttention([q, 1], [k, mask / scale][first:end], v[first:end]))

MultiHeadAttention without a mask never holds all scores: it computes blocks of them that fit
the cache. What a mask adds to the scores of a key is one more number of the key, by which each
query has a 1. Keys before the first and after the last that a text sees are left out, so each
text costs what its own length does. A run has asked whether scores and values are finite.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript import TapeBuilder

from rewrite_rules.shapes.dimensions import number
from rewrite_rules.transformer_fusion.attention_forms import Attention
from rewrite_rules.transformer_fusion.head_layout import ints
from rewrite_rules.transformer_fusion.masks import LOWEST

# Scores of a head from which this form is faster, S * T. One thread, MiniLM's size, share of
# onnxruntime's own time (the standard operator's): .97 (.97) for one text of 64 tokens, .95
# (.98) of 128, .92 (.98) of 256, .87 of 512, .78 of 2,048; a short one 1.07 of 16. With many
# threads, a text of 128 may be too little work for all of them.
_LONG = 256 * 256
# Any score and this is this, and so is its sum with what a key that counts adds.
_LOWEST = -1e30
_NAME = "text"


def is_long(found: Attention, op: Any) -> ir.Value | None:
    """Emit whether texts are long enough for :func:`by_text`; None where it takes none."""
    counts = number(found.tokens[1]), number(found.key_count)
    if counts[0] is not None and counts[1] is not None and counts[0] * counts[1] < _LONG:
        return None
    dims = None if found.mask is None else found.facts.dims(found.mask, 4)
    if found.mask is not None and (dims is None or dims[1] != (1, ())):
        return None
    made: ir.Value = op.LessOrEqual(
        ints(op, _LONG), op.Mul(found.sizes(op)[1], found.count_keys(op))
    )
    return made


def by_text(found: Attention, op: Any) -> list[Any]:
    """Emit ``[B, S, H * D]``; of a mask, all rows are alike, and each text sees a key."""
    read = found.rows(op)
    kinds = [ir.DataType.FLOAT] * len(read)
    if found.mask is not None:
        sizes = ints(op, found.sizes(op)[0], 1, 1, found.count_keys(op))
        first = op.Slice(found.mask, ints(op, 0), ints(op, 1), ints(op, 2))
        added = op.Squeeze(op.Expand(first, sizes), ints(op, 1, 2))
        shown = op.Greater(added, op.Constant(value_float=LOWEST))
        shown = op.Cast(shown, to=ir.DataType.INT32)
        end = op.Add(op.ArgMax(shown, axis=1, select_last_index=1), ints(op, 1))
        added = op.Div(added, op.Constant(value_float=found.scale))
        added = op.Max(added, op.Constant(value_float=_LOWEST))
        read += [added, op.ArgMax(shown, axis=1), end]
        kinds += [ir.DataType.FLOAT, ir.DataType.INT64, ir.DataType.INT64]
    inputs = [
        ir.Value(name=f"{_NAME}.{index}", type=ir.TensorType(kind))
        for index, kind in enumerate(kinds)
    ]
    body = TapeBuilder()
    mixed = body.Squeeze(_of_text(body, found, *inputs), ints(body, 0))
    mixed.dtype = ir.DataType.FLOAT
    graph = ir.Graph(inputs, [mixed], nodes=body.nodes, name=_NAME)
    return [op.Scan(*read, num_scan_inputs=len(inputs), body=graph)]


def _of_text(
    op: Any, found: Attention, query: Any, keys: Any, values: Any, *mask: Any
) -> ir.Value:
    """Emit ``[1, S, H * D]`` of ``[S, H * D]``, ``[T, G * D]``, ``[T]``, first and end."""
    heads, groups, width = found.heads, found.groups, found.size

    def split(rows: Any, count: int) -> Any:
        return op.Reshape(rows, ints(op, 1, -1, count, found.size))

    def merged(split: Any, width: int) -> Any:
        return op.Reshape(split, ints(op, 1, -1, heads * width))

    def repeated(split: Any, width: int) -> Any:
        if groups == heads:
            return merged(split, width)
        apart = op.Unsqueeze(split, ints(op, 3))
        return merged(op.Expand(apart, ints(op, 1, 1, 1, heads // groups, 1)), width)

    if mask:
        added, *span = mask
        keys, values, added = (
            op.Slice(each, *span, ints(op, 0)) for each in (keys, values, added)
        )
    query, keys, values = split(query, heads), split(keys, groups), split(values, groups)
    if mask:
        width += 1
        query = op.Pad(query, ints(op, *[0] * 7, 1), op.Constant(value_float=1.0))
        column = op.Expand(op.Reshape(added, ints(op, 1, -1, 1, 1)), ints(op, 1, 1, groups, 1))
        keys = op.Concat(keys, column, axis=3)
    made: ir.Value = op.MultiHeadAttention(
        merged(query, width), repeated(keys, width), repeated(values, found.size),
        num_heads=heads, scale=found.scale, _domain="com.microsoft",
    )  # fmt: skip
    return made
