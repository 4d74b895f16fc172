# SPDX-License-Identifier: MIT
"""The kernels that compute attention; each makes ``[B, S, H * D]``, with a cache that as well.

    one token             Attention(q[B, G, H/G, D], new k, new v, mask, past k, past v)
    a prompt              GroupQueryAttention(q, k, v, mask)
    without a cache       Attention(q, k, v, mask)
    long texts            Scan(texts: MultiHeadAttention([q, 1], [k, mask / scale], v))

For one token, query heads that share keys are rows of one head. MultiHeadAttention without a
mask never holds all scores: it computes blocks of them that fit the cache. What a mask adds to
the scores of a key is one more number of the key, by which each query has a 1. Keys before the
first and after the last that a text sees are left out, so each text costs what its own length
does.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import onnx_ir as ir
from onnxscript import TapeBuilder

from rewrite_rules.graph.nodes import producer
from rewrite_rules.shapes.dimensions import number
from rewrite_rules.shapes.proved_shapes import ProvedShapes
from rewrite_rules.transformer_fusion.heads import FIRST, Heads, ints
from rewrite_rules.transformer_fusion.scores import LOWEST, Mask
from rewrite_rules.transformer_fusion.sizes import Sizes

_MICROSOFT = "com.microsoft"
# GroupQueryAttention takes heads of a multiple of this size.
_KERNEL_SIZES = 8
# Scores of a head from which blocks are used, S * T, with eight heads or more. Two threads,
# share of the time of onnxruntime's own attention by blocks (by the standard operator): one
# text of 256 tokens 1.02 (.94) in MiniLM's size, 1.19 (.99) with two heads of 32; 8 texts 1.01
# (.95); one of 512 .99 (.98) and 1.05 (.97), 8 of them .90 (.90) and .95 (1.09), in a fraction
# of the memory; one of 2,048 .78. With two heads, one text of 1,024 .95, of 2,048 .67.
_LONG, _HEADS = 512 * 512, 8
# Any score and this is this, and so is its sum with what a key that counts adds.
_NO_SCORE = -1e30


@dataclasses.dataclass(frozen=True, eq=False)
class Attention:
    """``softmax(scale q k' + masks) v``, where query heads share key and value heads.

    Attributes:
        query, keys, values: Of keys and values with a cache, those that are appended.
        masks: What is added to the scores.
        heads, groups: H, and G, how many heads there are of keys.
        caches: ``[B, G, T, D]`` of past and new keys, and of values; none without a cache.
        mends_nan: Whether a token may see numbers although some of its scores are NaN.
        sizes: Those named here, and what a run is asked of them.
        mask: The sum of the masks, ``[B, H, S, T]``; None for nothing.
    """

    query: Heads
    keys: Heads
    values: Heads
    masks: tuple[Mask, ...]
    scale: float
    heads: int
    groups: int
    caches: tuple[ir.Value, ...]
    mends_nan: bool
    sizes: Sizes
    mask: ir.Value | None = None

    @property
    def facts(self) -> ProvedShapes:
        """What is proved of shapes."""
        return self.sizes.facts

    @property
    def size(self) -> int:
        """D."""
        return number(self.sizes.dim("D")) or 0

    @property
    def past(self) -> list[ir.Value | None]:
        """The caches before."""
        return [producer(cache).inputs[0] for cache in self.caches]

    @property
    def masks_heads(self) -> bool:
        """Whether the mask may differ from head to head."""
        found = (mask.dims(self.facts, self.heads) for mask in self.masks)
        return any(dims[1] != (1, ()) for dims in found)

    @property
    def fits_group_query(self) -> bool:
        """Whether GroupQueryAttention takes the heads; a run asks what the mask hides."""
        return bool(self.masks) and self.size % _KERNEL_SIZES == 0

    @property
    def takes_prompts(self) -> bool:
        """Whether prompts are at least as fast with GroupQueryAttention as without it.

        With a mask per head, Bloom took 1.1 to 1.25 x at 1,024 tokens, 1.07 x at 2,048.
        """
        return self.fits_group_query and not self.masks_heads

    @property
    def may_be_token(self) -> bool:
        """Whether there may be one new token."""
        return number(self.sizes.dim("S")) in (None, 1)

    @property
    def least_scores(self) -> int:
        """S * T from which texts are long: scores of few heads fit the processor's cache."""
        return max(_LONG, _LONG * _HEADS // self.heads)

    @property
    def may_be_long(self) -> bool:
        """Whether texts may be long enough for blocks, and all heads have one mask."""
        new, total = (number(self.sizes.dim(name)) for name in "ST")
        if new is not None and total is not None and new * total < self.least_scores:
            return False
        return not self.masks_heads

    def rows(self, op: Any) -> list[ir.Value]:
        """Emit ``[B, S, H * D]`` of queries, and of keys and values, of a cache new ones."""
        read = (self.query, self.heads), (self.keys, self.groups), (self.values, self.groups)
        return [each.flat(op, self.facts, count * self.size) for each, count in read]


def of_one_token(op: Any, found: Attention, mask: ir.Value) -> list[Any]:
    """Emit attention of one token; ``mask`` has a row for each query head of a group."""
    repeats = found.heads // found.groups
    if repeats > 1 and found.masks_heads:
        batch, count = (op.Shape(mask, start=axis, end=axis + 1) for axis in (0, 3))
        mask = op.Reshape(mask, ints(op, batch, found.groups, repeats, count))
    query = op.Reshape(found.query.source, ints(op, -1, found.groups, repeats, found.size))
    new = [_one_new(op, found, heads) for heads in (found.keys, found.values)]
    read = (query, *new, mask, *found.past)
    mixed, *caches = op.Attention(*read, scale=found.scale, _outputs=3)
    return [op.Reshape(mixed, ints(op, -1, 1, found.heads * found.size)), *caches]


def mask_of_token(op: Any, found: Attention) -> Any:
    """Emit the mask of one token, a row for each query head of a group."""
    repeats = found.heads // found.groups
    if repeats == 1 or found.masks_heads:
        return found.mask
    return op.Tile(first_row(op, found.mask), ints(op, 1, 1, repeats, 1))


def first_row(op: Any, mask: ir.Value | None) -> Any:
    """Emit ``[B, H, 1, T]``; without tokens a mask has no row."""
    return op.Slice(mask, ints(op, 0), ints(op, 1), ints(op, 2))


def _one_new(op: Any, found: Attention, heads: Heads) -> Any:
    """Emit ``[B, G, 1, D]`` of one new token, whose axis may be anywhere."""
    if heads.axes == FIRST:
        return heads.source
    return op.Reshape(heads.source, ints(op, -1, found.groups, 1, found.size))


def by_group_query(
    op: Any, found: Attention, last: ir.Value, total: ir.Value, past: list[ir.Value | None]
) -> list[Any]:
    """Emit GroupQueryAttention; ``last`` is T - 1 for each row and ``total`` T, int32."""
    made: list[Any] = op.GroupQueryAttention(
        *found.rows(op),
        *past,
        last,
        total,
        None,
        None,
        None,
        found.mask,
        num_heads=found.heads,
        kv_num_heads=found.groups,
        scale=found.scale,
        _domain=_MICROSOFT,
        _outputs=3,
    )
    return made


def of_prompt(op: Any, found: Attention) -> list[Any]:
    """Emit attention of tokens with nothing before them."""
    batch, length = (found.sizes.emit(op, name) for name in "BS")
    total = op.Cast(length, to=ir.DataType.INT32)
    last = op.Cast(op.Sub(length, ints(op, 1)), to=ir.DataType.INT32)
    return by_group_query(op, found, op.Expand(last, batch), total, [None, None])


def without_cache(op: Any, found: Attention, mask: ir.Value | None) -> list[Any]:
    """Emit attention; ``mask`` has a row for each query and a column for each key."""
    both = found.keys, found.values
    if all(heads.axes != FIRST for heads in both):
        made = {"q_num_heads": found.heads, "kv_num_heads": found.groups}
        return [op.Attention(*found.rows(op), mask, scale=found.scale, **made)]
    # What encoders left in a cache keeps its layout.
    held = [heads.apart(op, found.groups, found.size) for heads in both]
    query = found.query.apart(op, found.heads, found.size)
    mixed = op.Attention(query, *held, mask, scale=found.scale)
    merged = op.Transpose(mixed, perm=[0, 2, 1, 3])
    return [op.Reshape(merged, ints(op, 0, 0, found.heads * found.size))]


def by_text(op: Any, found: Attention) -> list[Any]:
    """Emit attention in blocks; of a mask, all rows are alike, and each text sees a key."""
    read = found.rows(op)
    kinds = [ir.DataType.FLOAT] * len(read)
    if found.mask is not None:
        batch, count = (found.sizes.emit(op, name) for name in "BT")
        first = op.Expand(first_row(op, found.mask), ints(op, batch, 1, 1, count))
        added = op.Squeeze(first, ints(op, 1, 2))
        shown = op.Greater(added, op.Constant(value_float=LOWEST))
        shown = op.Cast(shown, to=ir.DataType.INT32)
        end = op.Add(op.ArgMax(shown, axis=1, select_last_index=1), ints(op, 1))
        added = op.Div(added, op.Constant(value_float=found.scale))
        added = op.Max(added, op.Constant(value_float=_NO_SCORE))
        read += [added, op.ArgMax(shown, axis=1), end]
        kinds += [ir.DataType.FLOAT, ir.DataType.INT64, ir.DataType.INT64]
    inputs = [
        ir.Value(name=f"text.{index}", type=ir.TensorType(kind))
        for index, kind in enumerate(kinds)
    ]
    body = TapeBuilder()
    mixed = body.Squeeze(_of_text(body, found, *inputs), ints(body, 0))
    mixed.dtype = ir.DataType.FLOAT
    graph = ir.Graph(inputs, [mixed], nodes=body.nodes, name="text")
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
