# SPDX-License-Identifier: MIT
"""Writes attention in the form that is fastest for one token, a prompt or an encoder."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import onnx_ir as ir

from rewrite_rules.graph.nodes import made_by, producer
from rewrite_rules.shapes.dimensions import Dim, Dims, Shape, number
from rewrite_rules.shapes.proved_shapes import ProvedShapes
from rewrite_rules.transformer_fusion.head_layout import (
    SPLIT_HEADS,
    batch_and_length,
    in_order,
    ints,
    is_transposed_heads,
    keeps_size,
    read_split,
    rows,
    rows_are,
    same_sizes,
    same_tokens,
    token_dims,
    unproved_splits,
    unsplit,
)
from rewrite_rules.transformer_fusion.masks import HIDDEN, Mask, mask_dims
from rewrite_rules.transformer_fusion.repeated_heads import RepeatedHeads

_MICROSOFT = "com.microsoft"
# GroupQueryAttention takes heads of a multiple of this size.
_KERNEL_SIZES = 8


@dataclasses.dataclass(frozen=True, eq=False)
class Attention:
    """``softmax(scale q k' + masks) v``, where query heads share key and value heads.

    Attributes:
        query: ``[B, H, S, D]``, before it is scaled.
        read_keys, read_values: ``[B, G, T, D]``, past and new, or ``[B, T, G, D]``.
        masks: What is added to the scores.
        heads, groups, size: H, G, D.
        guarded: Whether weights that are NaN, of a token that sees nothing, count as 0.
        cached: Whether keys and values are caches, to which all forms add the new ones.
        mask: The sum of the masks for ``[B, H, S, T]``; None for nothing.
        chosen: The sum of the masks that replace scores; None for none.
        joins: Whether a form returns the new cache as well, made of the old one.
    """

    facts: ProvedShapes
    query: ir.Value
    read_keys: RepeatedHeads
    read_values: RepeatedHeads
    masks: tuple[Mask, ...]
    scale: float
    heads: int
    groups: int
    size: int
    guarded: bool
    cached: bool
    mask: ir.Value | None = None
    chosen: ir.Value | None = None
    joins: bool = False

    @property
    def keys(self) -> ir.Value:
        """The keys, as they are read."""
        return self.read_keys.source

    @property
    def values(self) -> ir.Value:
        """The values, as they are read."""
        return self.read_values.source

    @property
    def tokens(self) -> tuple[Dim, Dim]:
        """B and S."""
        dims = token_dims(self.query, self.facts)
        assert dims is not None
        return dims

    @property
    def key_count(self) -> Dim:
        """T."""
        return self._length(self.read_keys)

    def _length(self, heads: RepeatedHeads) -> Dim:
        dims = self.facts.dims(heads.source)
        assert dims is not None
        return dims[heads.length_axis]

    @property
    def never_fits(self) -> bool:
        """Whether sizes that kernels want to be the same are known to differ."""
        read, wanted = (self.query, *map(self.new, self.both)), (*self.tokens, self.key_count)
        same = list[bool | None]()
        for pair in itertools.combinations(read, 2):
            same += same_tokens(*pair, self.facts)[: 1 + self.cached]
        for mask in () if self.cached else self.masks:
            dims = mask_dims(self.facts.dims(mask.value) or (), mask.value.name)
            pairs = zip((dims[0], *dims[2:]), wanted, strict=True)
            same += (same_sizes([(a, b)]) for a, b in pairs if a != (1, ()))
        return False in same

    @property
    def keeps_tokens(self) -> bool:
        """Whether the result has B and S of the queries; a mask that has more is an error."""
        dims = self.facts.dims(self.mask, 4)
        (batch, length), stay = self.tokens, self.mask is None
        if dims is not None:  # of a mask as long as past and new tokens, sizes do not say it
            stay = rows_are(dims[0], batch, self.facts)
            stay = stay and keeps_size(dims[2], length, self.facts)
        one_batch = all(self.same_tokens(heads)[0] for heads in self.both)
        return one_batch and stay

    @property
    def result_tokens(self) -> Dims | None:
        """B and S of the result; None where a mask's are not known."""
        if self.keeps_tokens:
            return token_dims(self.of_tokens, self.facts)
        others = [self.facts.dims(heads.source, 4) for heads in self.both]
        shapes: list[Shape] = [self.tokens, *((dims[0], (1, ())) for dims in others if dims)]
        if self.mask is not None:
            dims = self.facts.dims(self.mask, 4)
            shapes.append(0 if dims is None else (dims[0], dims[2]))
        found = self.facts.unknowns.broadcast(shapes)
        return found if isinstance(found, tuple) else None

    @property
    def appends_tokens(self) -> bool:
        """Whether a cache is proved to get a key and a value for each query."""
        return all(self.same_tokens(heads) == (True, True) for heads in self.both)

    @property
    def splits(self) -> list[ir.Value]:
        """Queries, keys and values as ``[B, S, H, D]``, where they have been that."""
        heads = [self.query, *map(self.new, self.both)]
        split = [each.source for each in self.both if each.split]
        return [*split, *(unsplit(each) for each in heads if is_transposed_heads(each))]

    @property
    def proves_heads(self) -> bool:
        """Whether heads are as many in each run, whatever its questions say."""
        shapes = [self.facts.dims(split) or () for split in self.splits]
        return all(
            number(shape[2]) or not unproved_splits(None, [split], self.facts)
            for shape, split in zip(shapes, self.splits, strict=True)
        )

    @property
    def fits_kernel(self) -> bool:
        """Whether GroupQueryAttention takes the heads; a run asks what the mask hides."""
        return bool(self.masks) and self.size % _KERNEL_SIZES == 0

    @property
    def shortest_prompt(self) -> int | None:
        """The fewest tokens that GroupQueryAttention takes less time for than nodes, or None.

        As a share of the model's own nodes' time, one thread, the kernel (grouped queries): a
        mask of each head 1.2 (1.1) for 128, 1.07 (1.19) for 512, .83 (1.06) for 1,024.
        """
        if not self.fits_kernel:
            return None
        return 1024 if self.masks_heads else 1

    @property
    def mends_nan(self) -> bool:
        """Whether a token may see numbers although some of its scores are NaN."""
        return self.guarded or self.chosen is not None

    @property
    def masks_heads(self) -> bool:
        """Whether the mask may differ from head to head."""
        dims = self.facts.dims(self.mask, len(SPLIT_HEADS))
        return dims is not None and dims[1] != (1, ())

    @property
    def both(self) -> tuple[RepeatedHeads, RepeatedHeads]:
        """How keys and values are read."""
        return self.read_keys, self.read_values

    def new(self, heads: RepeatedHeads) -> ir.Value:
        """Return the heads of keys or values, of a cache those that are appended."""
        source = producer(heads.source).inputs[1] if self.cached else heads.source
        assert source is not None
        return source

    def same_tokens(self, heads: RepeatedHeads) -> tuple[bool | None, bool | None]:
        """Whether keys or values have B and S of the queries; None for what a run says."""
        return same_tokens(self.query, self.new(heads), self.facts)

    @property
    def of_tokens(self) -> ir.Value:
        """Heads of the new tokens: values, which are seldom more than split, where proved."""
        values = self.read_values
        return self.new(values) if self.same_tokens(values) == (True, True) else self.query

    def new_sizes(self, op: Any, heads: RepeatedHeads) -> list[Any]:
        """Emit B and the length of keys or values, of a cache those that are appended."""
        return batch_and_length(op, self.new(heads), self.facts)

    def sizes(self, op: Any) -> list[Any]:
        """Emit B and S."""
        return batch_and_length(op, self.query, self.facts)

    def count_keys(self, op: Any) -> Any:
        """Emit T."""
        axis = self.read_keys.length_axis
        return op.Shape(self.keys, start=axis, end=axis + 1)

    def one_token(self, op: Any, rows: ir.Value | None) -> list[Any]:
        """Emit ``[B, G, H/G, D]`` of a token: query heads of a group are rows of one head.

        ``rows``: the mask of these for the standard operator, which reads the cache in fewer
        steps; None for nodes.
        """
        repeats, mask = self.heads // self.groups, self.mask if rows is None else rows
        sizes = ints(op, -1, self.groups, repeats, self.size)
        query, both = op.Reshape(in_order(self.query), sizes), (self.keys, self.values)
        mask = self._of_groups(op, mask)
        if rows is None:
            keys, values = (self._cache(op, heads, one=True) for heads in self.both)
            chosen = self._of_groups(op, self.chosen)
            weights = self._weights(op, self._scores(op, query, keys), mask, chosen)
            mixed = op.MatMul(weights, values)
        elif self.joins:
            past = [producer(whole).inputs[0] for whole in both]
            new = [self._one_new(op, whole) for whole in both]
            read = (query, *new, mask, *past)
            mixed, keys, values = op.Attention(*read, scale=self.scale, _outputs=3)
        else:
            keys, values = both
            mixed = op.Attention(query, keys, values, mask, scale=self.scale)
        return self._results(mixed, keys, values)

    def _of_groups(self, op: Any, mask: ir.Value | None) -> Any:
        """Emit a mask of one token with the heads of a group as rows, where it has heads."""
        dims, repeats = self.facts.dims(mask, 4), self.heads // self.groups
        if repeats == 1 or dims is None or dims[1] == (1, ()):
            return mask
        batch, count = (op.Shape(mask, start=axis, end=axis + 1) for axis in (0, 3))
        return op.Reshape(mask, ints(op, batch, self.groups, repeats, count))

    def merge_token(self, op: Any, mixed: Any) -> Any:
        """Emit ``[B, 1, H * D]`` of one token."""
        return op.Reshape(mixed, ints(op, -1, 1, self.heads * self.size))

    def any_tokens(self, op: Any) -> list[Any]:
        """Emit ``[B, S, H * D]`` by nodes that broadcast as those of the model do."""
        heads, groups = self.heads, self.groups
        query = self._split(op, self.query)
        held, values = (self._cache(op, each) for each in self.both)
        if heads == groups:
            scores = self._scores(op, query, held)
            weights = self._weights(op, scores, self.mask, self.chosen)
            mixed = op.MatMul(weights, values)
            return self._results(self._merged(op, mixed, query), held, values)
        repeats = ints(op, heads // groups)

        def reshape(value: Any, *sizes: int | ir.Value) -> Any:
            # Reshape cannot infer a size of an empty tensor, and where one size alone is not a
            # number, onnxruntime lets it be inferred: B or S may be 0.
            return op.Reshape(value, ints(op, op.Shape(value, start=0, end=1), *sizes))

        tokens, keys = op.Shape(query, start=2, end=3), op.Shape(held, start=2, end=3)
        rows = reshape(query, groups, op.Mul(tokens, repeats), self.size)
        scores = reshape(self._scores(op, rows, held), heads, tokens, keys)
        weights = self._weights(op, scores, self.mask, self.chosen)
        # A mask may have more rows or columns, where there is one token or key.
        tokens, keys = (op.Shape(weights, start=axis, end=axis + 1) for axis in (2, 3))
        grouped = reshape(weights, groups, op.Mul(tokens, repeats), keys)
        mixed = op.MatMul(grouped, values)
        mixed = reshape(mixed, heads, tokens, self.size)
        return self._results(self._merged(op, mixed, query), held, values)

    def by_kernel(
        self, op: Any, last: ir.Value, total: ir.Value, cached: bool = False
    ) -> list[Any]:
        """Emit ``[B, S, H * D]`` by GroupQueryAttention.

        ``last`` is T - 1 for each row and ``total`` T, int32. If ``cached``, the kernel reads
        the cache; else new tokens are by themselves.
        """
        past = (producer(each.source).inputs[0] if cached else None for each in self.both)
        attended, keys, values = op.GroupQueryAttention(
            *self.rows(op),
            *past,
            last,
            total,
            None,
            None,
            None,
            self.mask,
            num_heads=self.heads,
            kv_num_heads=self.groups,
            scale=self.scale,
            _domain=_MICROSOFT,
            _outputs=3,
        )
        return self._results(attended, keys, values)

    def by_prompt(self, op: Any) -> list[Any]:
        """Emit ``[B, S, H * D]`` of a prompt by GroupQueryAttention."""
        batch, length = self.sizes(op)
        total = op.Cast(length, to=ir.DataType.INT32)
        last = op.Cast(op.Sub(length, ints(op, 1)), to=ir.DataType.INT32)
        return self.by_kernel(op, op.Expand(last, batch), total)

    def whole(self, op: Any, mask: ir.Value | None) -> list[Any]:
        """Emit ``[B, S, H * D]`` by the standard operator, whose kernel needs no Transpose.

        ``mask`` has a row for each query and a column for each key.
        """
        if any(not (heads.split or is_transposed_heads(heads.source)) for heads in self.both):
            # A cache keeps its layout.
            stored = [self._stored(op, heads) for heads in self.both]
            mixed = op.Attention(self.query, *stored, mask, scale=self.scale)
            return [self._merged(op, mixed, self.query)]
        made = {"q_num_heads": self.heads, "kv_num_heads": self.groups, "scale": self.scale}
        return [op.Attention(*self.rows(op), mask, **made)]

    def rows(self, op: Any) -> list[ir.Value]:
        """Emit ``[B, S, H * D]`` of queries, and of keys and values, of a cache new ones."""
        read = [(self.query, self.heads, False)]
        read += [(self.new(each), self.groups, each.split) for each in self.both]
        return [
            rows(op, heads, self.facts, count * self.size, are_split, asked=True)
            for heads, count, are_split in read
        ]

    def _merged(self, op: Any, mixed: ir.Value, query: ir.Value) -> Any:
        """Emit ``[B, S, H * D]`` of ``[B, H, S, D]``, for queries of the same axes."""
        split = op.Transpose(mixed, perm=SPLIT_HEADS)
        # Nodes would repeat one text or token for a mask of more.
        sizes: list[Any] = [0, 0]
        if self.keeps_tokens:
            sizes = [op.Shape(query, start=axis, end=axis + 1) for axis in (0, 2)]
        width: Any = self.heads * self.size
        if not self.proves_heads:  # nor can -1 be inferred of nothing
            width = op.Mul(op.Shape(split, start=2, end=3), ints(op, self.size))
        return op.Reshape(split, ints(op, *sizes, width))

    def _results(self, mixed: Any, keys: Any, values: Any) -> list[Any]:
        return [mixed, keys, values] if self.joins else [mixed]

    def _stored(self, op: Any, heads: RepeatedHeads) -> Any:
        """Emit ``[B, G, T, D]`` of keys or values, or take them as they are."""
        source = heads.source
        return op.Transpose(source, perm=SPLIT_HEADS) if heads.split else source

    def _cache(self, op: Any, heads: RepeatedHeads, one: bool = False) -> Any:
        """Emit ``[B, G, T, D]`` of past and new tokens, or take it as it is."""
        if not self.cached:
            return self._split(op, self._stored(op, heads))
        if not self.joins:
            return heads.source
        past, new = producer(heads.source).inputs
        assert new is not None
        new = self._one_new(op, heads.source) if one else self._split(op, new)
        return op.Concat(past, new, axis=2)

    def _one_new(self, op: Any, whole: ir.Value) -> Any:
        """Emit ``[B, G, 1, D]`` of one new token."""
        new = producer(whole).inputs[1]
        assert new is not None
        flat = in_order(new)
        return (
            new if flat is new else op.Reshape(flat, ints(op, -1, self.groups, 1, self.size))
        )

    def _split(self, op: Any, heads: ir.Value) -> Any:
        """Emit ``[B, H, S, D]``, from what its Transpose and the Reshape before that read."""
        if not is_transposed_heads(heads):
            return heads
        split = unsplit(heads)
        found, node = read_split(split, self.facts), made_by(split, "Reshape")
        if node is not None and found is not None:
            if found.unproved:
                split = op.Reshape(*node.inputs, **node.attributes)
            else:
                # Sizes that are proved need not be computed.
                sizes = ints(op, 0, 0, found.heads, found.size)
                split = op.Reshape(found.source, sizes)
        return op.Transpose(split, perm=SPLIT_HEADS)

    def _scores(self, op: Any, query: Any, keys: Any) -> Any:
        options = {"transB": 1, "_domain": _MICROSOFT}
        return op.FusedMatMul(query, keys, alpha=self.scale, **options)

    def _weights(
        self,
        op: Any,
        scores: ir.Value,
        mask: ir.Value | None,
        chosen: ir.Value | None,
    ) -> Any:
        total = scores if mask is None else op.Add(scores, mask)
        if chosen is not None:  # what is only added leaves scores that are NaN
            hidden = op.LessOrEqual(chosen, op.Constant(value_float=HIDDEN))
            total = op.Where(hidden, mask, total)
        weights = op.Softmax(total, axis=-1)
        if not self.guarded:
            return weights
        return op.Where(op.IsNaN(weights), op.Constant(value_float=0.0), weights)
