# SPDX-License-Identifier: MIT
"""Attention, in the form that is fastest for one token and for a prompt, or for an encoder.

    Transpose(MatMul(Softmax(scale * MatMul(q, repeat(k)') + mask), repeat(v)))
        -> If(one token:   Attention, or grouped queries, without a Transpose
              nothing cached: GroupQueryAttention(q, k, v), with attention_bias=mask
                              where that hides any earlier token
              else:        grouped queries)               where k and v are a cache
        -> Attention(q, k, v, mask)                       elsewhere

Grouped queries are one MatMul for all query heads that share a key and value head. For one
token they beat GroupQueryAttention, which clears the whole new cache before it copies the old
one, and the standard operator of opset 23 beats both where those query heads are rows of one
head; for a prompt GroupQueryAttention is faster by a third. The model's own mask is added in
all, but for prompts of which it hides nothing that the kernel would see. The cache's Concat,
names and order stay. Without a cache, and across from a decoder to what an encoder made, the
standard operator takes 0.6 to 0.8 of the time of the nodes.

Refused by name: soft caps, masks of their own for the heads of a group, other types than
float32, weights that something else reads; masks that let tokens see later ones get no
GroupQueryAttention. What multiplies the weights of a Softmax and is not fused says why.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript import TapeBuilder
from onnxscript.rewriter import MatchContext, MatchResult, RewriteRuleClassBase
from onnxscript.rewriter.pattern import OrValue

from rewrite_rules.graph.nodes import label, made_by, producer
from rewrite_rules.graph.parameters import constant, int_attribute
from rewrite_rules.remarks import Refusal, Remarks
from rewrite_rules.shapes.dimensions import Dim, Dims, number
from rewrite_rules.shapes.evaluator import CannotEvaluate
from rewrite_rules.shapes.proved_shapes import ProvedShapes
from rewrite_rules.transformer_fusion.attention_forms import Attention
from rewrite_rules.transformer_fusion.head_layout import SPLIT_HEADS, in_order, ints
from rewrite_rules.transformer_fusion.masks import (
    GroupedLayout,
    Mask,
    MaskSight,
    read_grouped_layout,
)
from rewrite_rules.transformer_fusion.repeated_heads import (
    RepeatedHeads,
    before_unsqueeze,
    read_repeated_heads,
    scaled_input,
)
from rewrite_rules.transformer_fusion.shared_cache import SharedCache

_KERNELS = ("Attention", "GroupQueryAttention", "MultiHeadAttention")
_LOWEST = float(np.finfo(np.float32).min)
_MAX_BETWEEN = 4
# Older opsets are converted by ONNX itself, to another graph: rules after these lose sight of
# theirs, and 10,000 nodes take a second more.
_CONVERTED_IN_PLACE = 18
# What a Reshape may ask for instead of a size.
_INFERRED, _COPIED = (-1, ()), (0, ())
# Half of what lies between float32 numbers of such size is far above any score.
_NO_SCORE_CHANGES = -1e37


class FuseAttention(RewriteRuleClassBase):
    """``Transpose(softmax(scale q k' + mask) v) -> If(one token, ..., ...)``."""

    def __init__(
        self,
        facts: ProvedShapes,
        read_mask: Callable[[Mask, GroupedLayout], MaskSight],
        remarks: Remarks,
        standard: bool,
        joined: list[tuple[ir.Value, ir.Value]],
        shared: SharedCache | None = None,
    ) -> None:
        """``joined`` gets each new cache, and what replaces it."""
        super().__init__(remove_nodes=False)
        self._facts = facts
        self._read_mask = read_mask
        self._remarks = remarks
        self._standard = standard
        self._joined = joined
        self._cache = shared
        self._found: tuple[Attention, _Added] | None = None
        # What layers share.
        self._shared: dict[object, ir.Value] = {}
        self._sizes: dict[object, tuple[ir.Value, ...]] = {}
        self._places: dict[ir.Node, int] = {}

    def pattern(self, op, logits, zero, values):  # type: ignore[no-untyped-def]
        softmax = op.Softmax(logits, _allow_other_attributes=True, _outputs=["softmax"])
        numbers = op.Where(op.IsNaN(softmax), zero, softmax)
        weights = OrValue([softmax, numbers], tag_var="guarded", tag_values=[0, 1])
        mixed = op.MatMul(weights, values, _outputs=["mixed"])
        same = op.Reshape(mixed, _allow_other_inputs=True, _allow_other_attributes=True)
        kept = OrValue([mixed, same], tag_var="kept", tag_values=[0, 1])
        return op.Transpose(kept, perm=[*SPLIT_HEADS], _outputs=["out"])

    def check(  # type: ignore[override]
        self,
        context: MatchContext,
        softmax: ir.Value,
        zero: ir.Value | None,
        mixed: ir.Value,
        out: ir.Value,
        guarded: int,
        **_: object,
    ) -> MatchResult:
        """Read the attention; what stands in the way is a remark."""
        result, node = MatchResult(), producer(mixed)
        if int_attribute(producer(softmax), "axis", -1) not in (-1, 3):
            return result.fail("weights are not over keys", node)
        if guarded and not _is_zero(zero):
            return result.fail("what NaN becomes is not 0", node)
        with self._remarks.at(label(node)):
            try:
                self._found = self._read(softmax, mixed, out, guarded)
            except Refusal as refusal:
                self._remarks.refused(label(node), f"attention: {refusal}")
                return result.fail(str(refusal), node)
        return result

    def _read(
        self, softmax: ir.Value, mixed: ir.Value, out: ir.Value, guarded: int
    ) -> tuple[Attention, _Added]:
        logits, (weights, values) = producer(softmax).inputs[0], producer(mixed).inputs
        assert logits is not None and weights is not None and values is not None
        scores = _scores(logits)
        if scores is None:
            raise Refusal(f"{logits.name!r} is not scaled scores and masks")
        product, scale, masks = scores
        (k, keys_apart), (v, values_apart) = (
            self._heads(operand, what)
            for operand, what in ((product.inputs[1], "keys"), (values, "values"))
        )
        if not k.transposed or v.transposed:
            raise Refusal("keys or values are laid out in another way")
        query, scale = _unscaled(product.inputs[0], scale)
        layout = GroupedLayout()
        if k.repeats == 1:
            query, layout = read_grouped_layout(query, k.groups, self._facts)
            query, scale = _unscaled(query, scale)
        for node, index in k.scalings:
            scale *= _factor(node, index)
        size, other = (self._number(heads.source, 3) for heads in (k, v))
        # A single head is repeated by MatMul.
        heads = k.groups * k.repeats * layout.repeats
        heads = heads if heads > 1 else self._number(query, 1)  # type: ignore[assignment]
        # What else is read would be computed twice.
        reshaped = producer(out).inputs[0] is not mixed  # to the sizes of its own Shape
        reads = [(weights, 1), (softmax, 1 + guarded), (mixed, 1 + reshaped)]
        reads += [(value, 1) for value in _between(product, logits)]
        refusals = {
            "the values are scaled": bool(v.scalings),
            "keys and values are repeated differently": k.repeats != v.repeats,
            "keys, values and queries are grouped differently": not (
                keys_apart == values_apart == layout.own_axis
            ),
            f"computes in {query.dtype}, not in float32": query.dtype != ir.DataType.FLOAT,
            "its scores or weights are read elsewhere": any(
                value.is_graph_output() or len(value.uses()) > count for value, count in reads
            ),
            "keys and values are not known to have heads of one size": size is None
            or (size, k.groups) != (other, v.groups),
            f"how many heads {query.name!r} has is not known": heads is None
            or self._facts.dims(query, len(SPLIT_HEADS)) is None,
            "the result is laid out in another way": not self._keeps_heads(
                out, query, heads, layout
            ),
        }
        for reason, applies in refusals.items():
            if applies:
                raise Refusal(reason)
        assert heads is not None and size is not None
        found = Attention(self._facts, query, k, v, None, scale, heads, k.groups, size)
        return found, self._added(found, masks, layout, bool(guarded))

    def _number(self, value: ir.Value, axis: int) -> int | None:
        shape = self._facts.dims(value, 4)
        return None if shape is None else number(shape[axis])

    def _heads(self, operand: ir.Value | None, what: str) -> tuple[RepeatedHeads, bool]:
        """The heads of a MatMul's operand, and whether they have an axis to be repeated on."""
        assert operand is not None
        source = before_unsqueeze(operand, self._facts)
        heads = read_repeated_heads(source or operand, self._facts, once=True)
        if heads is None:
            raise Refusal(f"{what} {operand.name!r} are not known to be [B, H, T, D]")
        return heads, source is not None

    def _keeps_heads(
        self, out: ir.Value, query: ir.Value, heads: int | None, layout: GroupedLayout
    ) -> bool:
        """Whether ``[B, H, S, D]`` is transposed as it is, for the batch of all inputs."""
        node, shape = producer(producer(out).inputs[0]), self._facts.shape(query)
        if node.op_type == "MatMul":
            return layout.repeats == 1
        wanted = () if isinstance(shape, int) else ((heads, ()), *shape[2:])
        return self._asks(node, *((size, _INFERRED) for size in wanted))

    def _asks(self, reshape: ir.Node, *wanted: Sequence[object]) -> bool:
        """Whether a Reshape asks for the batch of all inputs, then for sizes among others."""
        is_reshape = reshape.op_type == "Reshape"
        asked = self._facts.numbers(reshape.inputs[1]) if is_reshape else None
        if asked is None or len(asked) != 1 + len(wanted):
            return False
        batch, *rest = asked
        # The batch of another input counts as this one's; a number does not.
        known = bool(batch and (batch[1] or batch == _COPIED))
        return all(map(operator.contains, wanted, rest)) and (known or _INFERRED not in rest)

    def _added(
        self,
        found: Attention,
        masks: tuple[Mask, ...],
        layout: GroupedLayout,
        guarded: bool,
    ) -> _Added:
        sights: list[MaskSight | None] = []
        shapes: list[tuple[Dim | None, ...]] = []
        for mask in masks:
            shape, name = self._facts.dims(mask.value), mask.value.name
            if shape is None:
                raise Refusal(f"the axes of mask {name!r} are not known")
            shapes.append(layout.dims(shape, name))
            try:
                sights.append(self._read_mask(mask, layout))
            except CannotEvaluate as error:
                if guarded or layout.repeats > 1:
                    raise Refusal(f"mask {name!r} can't be computed: {error}") from error
                sights.append(None)
        cached = all(map(_is_cache, (found.keys, found.values))) and len(masks) < 2
        if cached and masks and found.heads != found.groups and number(shapes[0][1]) != 1:
            raise Refusal(f"mask {masks[0].value.name!r} may differ from head to head")
        if any(sight and sight.blind and (sight.infinite or not cached) for sight in sights):
            raise Refusal("its mask lets a token see nothing")
        if not cached and not self._standard:
            raise Refusal("without a cache it needs the kernel of onnxruntime 1.24")
        if not cached and found.read_keys.merge is not None:
            raise Refusal("the batch of its heads is not known to be their own")
        if cached and layout.repeats > 1 and not layout.own_axis and self._cache is None:
            # 0.99 to 1.04 x the time of SmolLM2's tokens, and 1.03 x its memory in float.
            raise Refusal("its query heads share keys without copies: no form is faster")
        added = _Added(masks, tuple(shapes), tuple(sights), layout, cached)
        if cached and self._cache is not None and not self._is_prompt(found, added):
            raise Refusal("GroupQueryAttention, which kv_cache=shared needs, can't compute it")
        return added

    def _is_prompt(self, found: Attention, added: _Added) -> bool:
        """Whether GroupQueryAttention may take the new tokens by themselves."""
        sight = added.sights[0] if added.sights else None
        if sight is None or not sight.causal or not sight.full or sight.blind:
            return False
        if found.size % 8:
            return False
        # The kernel checks that there are as many new values as keys.
        new = self._facts.dims(producer(found.keys).inputs[1])
        asked = self._facts.dims(found.query)
        return asked is not None and new is not None and new[2] == asked[2]

    def rewrite(self, op: Any, mixed: ir.Value, out: ir.Value, **_: object) -> Any:
        """Emit the forms, and what chooses between them at each run."""
        rows, *cache = self._emit(op, mixed)
        assert self._found is not None
        found = self._found[0]
        split = op.Reshape(rows, ints(op, 0, 0, found.heads, found.size))
        self._facts.replace(out, split)
        length, width = self._facts.shape(found.query)[2], found.heads * found.size  # type: ignore[index]
        wanted = (length, _INFERRED, _COPIED), ((width, ()), _INFERRED)
        for node in out.consumers():
            if self._asks(node, *wanted) and not node.outputs[0].is_graph_output():
                self._facts.replace(node.outputs[0], rows)
                node.outputs[0].replace_all_uses_with(rows)
        self._joined += zip((found.keys, found.values), cache, strict=False)
        return split

    def _emit(self, op: Any, mixed: ir.Value) -> Sequence[ir.Value]:
        assert self._found is not None
        (found, added), node = self._found, producer(mixed)
        mask = self._mask(op, found, added)
        joins = added.cached and not self._depends((found.query, mask), found)
        found = dataclasses.replace(found, mask=mask, joins=joins)
        kind = ", ".join(
            "a mask that can't be computed" if sight is None else f"mask: {sight.kind}"
            for sight in added.sights or ()
        )
        kind = kind or "no mask"
        if not added.cached:
            self._remarks.fired(label(node), f"attention: Attention; {kind}")
            if all(map(number, map(self._facts.count, (found.query, found.keys)))):
                return found.whole(op)
            is_something = self._is_something(op, found)
            return self._either(op, is_something, found.whole, found.nothing, name=node.name)
        if self._cache is not None:
            self._remarks.fired(label(node), f"attention: GroupQueryAttention; {kind}")
            joined = dataclasses.replace(found, joins=True)
            return joined.by_kernel(op, self._cache.last, self._cache.total, cached=True)
        forms = "grouped queries"
        build: Callable[[Any], Sequence[ir.Value]] = found.any_tokens
        if self._is_prompt(found, added):
            past, forms = producer(found.keys).inputs[0], f"{forms}, GroupQueryAttention"
            _, least, *sizes = self._token_sizes(op, found)
            kernel = self._kernel(op, found, added, *sizes)

            def build(op: Any) -> Sequence[ir.Value]:
                empty = op.Less(op.Shape(past, start=2, end=3), least)
                return self._either(op, empty, kernel, found.any_tokens)

        self._remarks.fired(label(node), f"attention: {forms}; {kind}")
        if self._number(found.query, 2) not in (None, 1):
            return build(op)
        is_one = self._is_one_token(op, found)
        one_token = functools.partial(found.one_token, mask=self._group_rows(op, found, added))
        return self._either(op, is_one, one_token, build, name=node.name)

    def _group_rows(self, op: Any, found: Attention, added: _Added) -> ir.Value | None:
        """Emit the mask of one token, a row for each query head of a group.

        None where the standard operator does not take it.
        """
        sight = added.sights[0] if added.sights else None
        if not self._standard or sight is None or not sight.full or sight.blind:
            return None
        if self._facts.opset(producer(found.keys)) < _CONVERTED_IN_PLACE:
            return None
        repeats = found.heads // found.groups
        if repeats == 1:
            return found.mask
        key = "rows", found.mask, repeats
        if key not in self._shared:
            # Without tokens the mask has no row to repeat.
            first = op.Slice(found.mask, ints(op, 0), ints(op, 1), ints(op, 2))
            self._shared[key] = op.Tile(first, ints(op, 1, 1, repeats, 1))
        return self._shared[key]

    def _token_sizes(self, op: Any, found: Attention) -> tuple[ir.Value, ...]:
        """Emit S; min(B * S, 1); S - 1 for each row, and S, both as int32."""
        batch, _, tokens, _ = self._facts.shape(found.query)  # type: ignore[misc]
        key = batch, tokens
        if key not in self._sizes:
            rows, length = found.sizes(op)
            # Kernels divide by the number of rows and want tokens.
            least = op.Min(op.Mul(length, rows), ints(op, 1))
            total = op.Cast(length, to=ir.DataType.INT32)
            last = op.Cast(op.Sub(length, ints(op, 1)), to=ir.DataType.INT32)
            self._sizes[key] = length, least, op.Expand(last, rows), total
        return self._sizes[key]

    def _kernel(
        self, op: Any, found: Attention, added: _Added, last: ir.Value, total: ir.Value
    ) -> Callable[[Any], Sequence[ir.Value]]:
        """Return what emits GroupQueryAttention, without the mask where it hides no past.

        The kernel itself hides what comes later; adding zeros takes a tenth of its time.
        A window may be longer than any mask that was computed here: a run decides.
        """
        masked, unmasked = (
            functools.partial(one.by_kernel, last=last, total=total)
            for one in (found, dataclasses.replace(found, mask=None))
        )
        assert added.sights[0] is not None
        if added.sights[0].kind != "causal":
            return masked
        key = "hides no past", found.mask
        if key not in self._shared:
            seen = op.ReduceL1(op.Trilu(found.mask, upper=0), keepdims=0)
            self._shared[key] = op.Equal(seen, op.Constant(value_float=0.0))
        return lambda op: self._either(op, self._shared[key], unmasked, masked)

    def _is_one_token(self, op: Any, found: Attention) -> ir.Value:
        """Emit whether there are rows, of one token each, and of the mask."""
        length, least, *_ = self._token_sizes(op, found)
        tokens = self._facts.shape(found.query)[2]  # type: ignore[index]
        rows = tokens if found.mask is None else self._facts.shape(found.mask)[2]  # type: ignore[index]
        key = least, rows
        if key not in self._shared:
            count = op.Mul(length, least)
            if rows not in (tokens, (1, ())):
                count = op.Mul(count, op.Shape(found.mask, start=2, end=3))
            self._shared[key] = op.Equal(count, ints(op, 1))
        return self._shared[key]

    def _is_something(self, op: Any, found: Attention) -> ir.Value:
        """Emit whether there are queries and keys, which the kernel wants."""
        read = [in_order(value) for value in (found.query, found.keys)]
        key = tuple(map(self._facts.count, read))
        if key not in self._shared:
            count = op.Mul(*(op.Size(value) for value in read))
            self._shared[key] = op.Cast(count, to=ir.DataType.BOOL)
        return self._shared[key]

    def _either(
        self,
        op: Any,
        condition: ir.Value,
        *forms: Callable[[Any], Sequence[ir.Value]],
        name: str | None = None,
    ) -> Sequence[ir.Value]:
        """Emit an If of two forms."""
        then, other = map(self._branch, forms)
        branches = {"then_branch": then, "else_branch": other, "_name": name}
        made = op.If(condition, **branches, _outputs=len(then.outputs))
        return made if len(then.outputs) > 1 else [made]

    def _depends(self, read: Iterable[ir.Value | None], found: Attention) -> bool:
        """Whether what a form reads is computed from the new cache."""
        joins = [producer(cache) for cache in (found.keys, found.values)]
        if joins[0] not in self._places:
            graph = joins[0].graph
            assert isinstance(graph, ir.Graph)
            self._places = {node: place for place, node in enumerate(graph)}
        first = min(self._places[node] for node in joins)
        others = [value for node in joins for value in node.inputs]
        pending = [value.producer() for value in (*read, *others) if value is not None]
        seen = set[ir.Node | None]()
        while pending:
            node = pending.pop()
            if node is None or node in seen or self._places.get(node, first) < first:
                continue
            if node in joins:
                return True
            seen.add(node)
            pending += [value.producer() for value in node.inputs if value is not None]
        return False

    def _mask(self, op: Any, found: Attention, added: _Added) -> ir.Value | None:
        """Emit the sum of the masks."""
        if not added.masks:
            return None
        asked, keys = self._facts.dims(found.query), self._facts.dims(found.keys)
        assert asked is not None and keys is not None
        sizes = (asked[2], keys[1 if found.read_keys.split else 2])
        key = (added.masks, added.layout, None if added.cached else sizes)
        if key not in self._shared:
            self._shared[key] = self._emit_mask(op, found, added, sizes)
        return self._shared[key]

    def _emit_mask(self, op: Any, found: Attention, added: _Added, sizes: Dims) -> Any:
        ranks = (len(self._facts.shape(mask.value)) for mask in added.masks)  # type: ignore[arg-type]
        total, *others = [
            mask.added(op, added.layout.rank - rank)
            for mask, rank in zip(added.masks, ranks, strict=True)
        ]
        for other in others:
            total = op.Add(total, other)
        if any(sight is not None and sight.infinite for sight in added.sights):
            # Padding that sees nothing gets numbers, as from other masks; nothing reads them.
            total = op.Max(total, op.Constant(value_float=_LOWEST))
        total = added.layout.emit(op, total)
        full = any(sight is not None and sight.full for sight in added.sights)
        if added.cached or full or any(shape[2:] == sizes for shape in added.shapes):
            return total
        # The kernel wants a row for each query.
        axis = 1 if found.read_keys.split else 2
        keys = op.Shape(found.keys, start=axis, end=axis + 1)
        return op.Expand(total, ints(op, 1, 1, found.sizes(op)[1], keys))

    def _branch(self, build: Callable[[Any], Sequence[ir.Value]]) -> ir.Graph:
        """Return a subgraph; what it reads from outside, it captures."""
        op = TapeBuilder()
        outputs = build(op)
        for output in outputs:
            output.dtype = ir.DataType.FLOAT
        return ir.Graph([], outputs, nodes=op.nodes, name="attention")


@dataclasses.dataclass(frozen=True)
class _Added:
    """What is added to scores, of which ``shapes`` are for ``[B, H, S, T]``.

    A sight is None where the mask can't be computed. ``cached``: keys and values are a cache.
    """

    masks: tuple[Mask, ...]
    shapes: tuple[tuple[Dim | None, ...], ...]
    sights: tuple[MaskSight | None, ...]
    layout: GroupedLayout
    cached: bool


def note_kernels(nodes: Mapping[str, Sequence[ir.Node]], remarks: Remarks) -> None:
    """Note attention that is one node already, of the nodes of each operator."""
    for kernel in _KERNELS:
        for node in nodes[kernel]:
            remarks.note(label(node), f"attention: {kernel} already")


def multiplied_weights(softmaxes: Iterable[ir.Node]) -> dict[ir.Node, tuple[str, ...]]:
    """Return each MatMul of what a Softmax made, and the operators on the way to it."""
    found: dict[ir.Node, tuple[str, ...]] = {}
    for softmax in softmaxes:
        value, between = softmax.outputs[0], list[str]()
        while len(between) < _MAX_BETWEEN:
            readers = [node for node in value.consumers() if node.op_type != "Shape"]
            if not readers:
                break
            node = next((one for one in readers if one.op_type == "MatMul"), readers[0])
            if node.op_type == "MatMul" and node.inputs[0] is value:
                found[node] = tuple(between)
                break
            between.append(node.op_type)
            value = node.outputs[0]
    return found


def refuse_the_rest(
    main: ir.Graph, products: Mapping[ir.Node, Sequence[str]], remarks: Remarks
) -> None:
    """Say what differs in attention, of all found before, that no rule made a remark on."""
    seen = {remark.node for remark in remarks}
    for product, between in products.items():
        readers = product.outputs[0].consumers()
        if product.graph is None or not readers or label(product) in seen:
            continue
        if product.graph is not main:
            reason = "it stands in a subgraph"
        elif between:
            reason = f"its weights go through {', '.join(between)}"
        else:
            reader = ", ".join(node.op_type for node in readers)
            reason = f"its result goes to {reader}, not to a Transpose of heads"
        remarks.refused(label(product), f"attention: {reason}")


def _is_cache(value: ir.Value) -> bool:
    """Whether a value is ``Concat(past, new)`` of heads."""
    node = made_by(value, "Concat")
    if node is None or len(node.inputs) != 2:
        return False
    return int_attribute(node, "axis", 0) in (2, -2)


def _is_zero(value: ir.Value | None) -> bool:
    tensor = constant(value)
    return tensor is not None and tensor.size == 1 and not tensor.numpy().any()


def _scores(
    logits: ir.Value | None, depth: int = 3
) -> tuple[ir.Node, float, tuple[Mask, ...]] | None:
    """The MatMul before a Softmax, what scales it, and the masks."""
    product, scale = _product(logits)
    if product is not None:
        return product, scale, ()
    node = None if logits is None else logits.producer()
    if node is None or node.op_type not in ("Add", "Where") or not depth:
        return None
    a, b = node.inputs[-2:]
    for scores, other in ((a, b), (b, a)):
        found = _scores(scores, depth - 1)
        if found is not None and other is not None:
            chosen = node.op_type == "Where"
            mask = _chosen(node, other, other is a) if chosen else Mask(other)
            return *found[:2], (*found[2], mask)
    return None


def _between(product: ir.Node, logits: ir.Value) -> Iterator[ir.Value]:
    """The values from the product of queries and keys to what Softmax reads."""
    value = product.outputs[0]
    while value is not logits and value.uses():
        yield value
        value = value.consumers()[0].outputs[0]
    yield logits


def _chosen(node: ir.Node, other: ir.Value, hides: bool) -> Mask:
    """The mask of a Where between scores and a number."""
    tensor, condition = constant(other), node.inputs[0]
    lowest = float(tensor.numpy().max()) if tensor is not None and tensor.size else 0.0
    if tensor is None or tensor.size != 1 or condition is None or lowest > _NO_SCORE_CHANGES:
        raise Refusal(f"Where {label(node)!r} chooses something else than the lowest number")
    return Mask(condition, lowest, hides)


def _product(scores: ir.Value | None) -> tuple[ir.Node | None, float]:
    """The MatMul behind scores, and what scales it; None for other values."""
    inner, scale = _unscaled(scores, 1.0)
    node = None if inner is None else inner.producer()
    if node is not None and node.op_type == "Tanh" and _product(node.inputs[0])[0] is not None:
        raise Refusal("the scores are soft-capped")
    is_product = node is not None and node.op_type == "MatMul" and not node.domain
    return (node if is_product else None), scale


def _unscaled(value: Any, scale: float) -> tuple[Any, float]:
    """A value before it is multiplied and divided by constant numbers."""
    while value is not None and (node := value.producer()) is not None:
        index = scaled_input(node)
        if index is None:
            break
        scale *= _factor(node, index)
        value = node.inputs[index]
    return value, scale


def _factor(node: ir.Node, index: int) -> float:
    tensor = constant(node.inputs[1 - index])
    assert tensor is not None
    factor = float(tensor.numpy().reshape(-1)[0])
    return factor if node.op_type == "Mul" else 1 / factor if factor else math.inf
