# SPDX-License-Identifier: MIT
"""Attention, in the form that is fastest for one token and for a prompt, or for an encoder.

    Transpose(MatMul(Softmax(scale * MatMul(q, repeat(k)') + mask), repeat(v)))
        -> If(one token:   Attention, or grouped queries, without a Transpose
              nothing cached: GroupQueryAttention(q, k, v), with attention_bias=mask
                              where that hides any earlier token
              else:        grouped queries)               where k and v are a cache
        -> If(few scores: Attention(q, k, v, mask)
              else:       blocks of scores, text by text)  elsewhere, see :mod:`.long_texts`

Grouped queries are one MatMul for all query heads that share a key and value head. For one
token they beat GroupQueryAttention, which clears the whole new cache before it copies the old
one, and the standard operator of opset 23 beats both where those query heads are rows of one
head; for a prompt GroupQueryAttention is faster by a third. The cache's Concat, names and
order stay. Without a cache, and across from a decoder to what an encoder made, the standard
operator takes 0.6 to 0.8 of the time of the nodes.

Shapes are proved, and a run asks its mask what kernels take for granted (:mod:`.conditions`);
where it shows something else, nodes add it as the model does.

Refused by name: other types than float32, weights that something else reads. What multiplies
the weights of a Softmax and is not fused says why.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, cast

import onnx_ir as ir
from onnxscript.rewriter import MatchContext, MatchResult, RewriteRuleClassBase
from onnxscript.rewriter.pattern import OrValue

from rewrite_rules.graph.nodes import label, producer
from rewrite_rules.graph.parameters import constant, int_attribute
from rewrite_rules.remarks import Refusal, Remarks
from rewrite_rules.shapes.dimensions import known, number
from rewrite_rules.shapes.proved_shapes import ProvedShapes
from rewrite_rules.transformer_fusion.attention_forms import Attention
from rewrite_rules.transformer_fusion.conditions import (
    Build,
    Conditions,
    bounded,
    check_shared,
    either,
    guarded,
)
from rewrite_rules.transformer_fusion.head_layout import (
    SPLIT_HEADS,
    ints,
    unproved_splits,
)
from rewrite_rules.transformer_fusion.long_texts import by_text
from rewrite_rules.transformer_fusion.masks import Mask
from rewrite_rules.transformer_fusion.read_attention import (
    Match,
    keeps_order,
    read_attention,
)
from rewrite_rules.transformer_fusion.shared_cache import SharedCache

_KERNELS = ("Attention", "GroupQueryAttention", "MultiHeadAttention")
# From heads [B, H, S, D] to [S, B, H, D], as torch's own MultiheadAttention goes on.
TOKENS_FIRST = (2, 0, 1, 3)
_MAX_BETWEEN = 4


@dataclasses.dataclass
class Written:
    """What :class:`FuseAttention` has put into the graph.

    Attributes:
        caches: Each new cache, and what replaces it.
    """

    caches: list[tuple[ir.Value, ir.Value]] = dataclasses.field(default_factory=list)

    def name_caches(self) -> None:
        """Let new caches be the outputs, under their names."""
        for whole, made in self.caches:
            if not whole.is_graph_output():
                continue  # another attention that reads it has replaced it
            made.type, made.shape, name = whole.type, whole.shape, whole.name
            whole.replace_all_uses_with(made, replace_graph_outputs=True)
            whole.name, made.name = None, name


class FuseAttention(RewriteRuleClassBase):
    """``Transpose(softmax(scale q k' + mask) v) -> If(one token, ..., ...)``.

    ``tokens_first``: to ``[S, B, H, D]``, where a Transpose of the first two axes stays.
    """

    def __init__(
        self,
        facts: ProvedShapes,
        remarks: Remarks,
        standard: bool,
        written: Written,
        shared: SharedCache | None = None,
        tokens_first: bool = False,
    ) -> None:
        super().__init__(remove_nodes=False)
        self._facts = facts
        self._remarks = remarks
        self._standard = standard
        self._written = written
        self._cache = shared
        self._order = TOKENS_FIRST if tokens_first else SPLIT_HEADS
        # What layers share.
        self._conditions = Conditions()
        self._masks: dict[object, ir.Value] = {}
        self._shared: dict[object, ir.Value] = {}
        self._places: dict[ir.Node, int] = {}

    def pattern(self, op, logits, zero, values):  # type: ignore[no-untyped-def]
        softmax = op.Softmax(logits, _allow_other_attributes=True, _outputs=["softmax"])
        numbers = op.Where(op.IsNaN(softmax), zero, softmax)
        weights = OrValue([softmax, numbers], tag_var="guarded", tag_values=[0, 1])
        mixed = op.MatMul(weights, values, _outputs=["mixed"])
        same = op.Reshape(mixed, _allow_other_inputs=True, _allow_other_attributes=True)
        kept = OrValue([mixed, same], tag_var="kept", tag_values=[0, 1])
        return op.Transpose(kept, perm=[*self._order], _outputs=["out"])

    def check(  # type: ignore[override]
        self,
        context: MatchContext,
        softmax: ir.Value,
        zero: ir.Value | None,
        mixed: ir.Value,
        guarded: int,
        **bound: Any,
    ) -> MatchResult:
        """Read the attention; what stands in the way is a remark."""
        result, node = MatchResult(), producer(mixed)
        if guarded == 1 and not _is_zero(zero):
            return result.fail("what NaN becomes is not 0", node)
        with self._remarks.at(label(node)):
            try:
                self._read(softmax, mixed, guarded, **bound)
            except Refusal as refusal:
                self._remarks.refused(label(node), refusal.behind("attention: "))
                return result.fail(str(refusal), node)
        return result

    def _read(
        self,
        softmax: ir.Value,
        mixed: ir.Value,
        guarded: int,
        out: ir.Value,
        **_: object,
    ) -> Attention:
        dims = self._facts.dims(softmax)
        axis = int_attribute(producer(softmax), "axis", -1)
        if axis != -1 and (dims is None or axis != len(dims) - 1):
            raise Refusal(
                "ORP603", f"its weights are over axis {axis}, not known to be the last"
            )
        match = Match(softmax, mixed, out, guarded == 1)
        found = read_attention(match, self._facts)
        for applies, code, reason in _REFUSALS:
            if applies(self, found):
                raise Refusal(code, reason)
        return found

    def rewrite(self, op: Any, mixed: ir.Value, out: ir.Value, **bound: Any) -> Any:
        """Emit the forms, and what chooses between them at each run."""
        found = self._with_mask(op, self._read(mixed=mixed, out=out, **bound))
        name = producer(mixed).name
        if not found.cached:
            form, (rows, *cache) = self._uncached(op, found, name)
        elif self._cache is not None:
            form, (rows, *cache) = "GroupQueryAttention", self._in_buffers(op, found)
        else:
            form, (rows, *cache) = self._cached(op, found, name)
        self._remarks.fired(label(producer(mixed)), f"attention: {form}")
        heads: Any = found.heads
        if not found.proves_heads:
            heads = op.Div(op.Shape(rows, start=2), ints(op, found.size))
        split = op.Reshape(rows, ints(op, 0, 0, heads, found.size))
        if self._order == TOKENS_FIRST:
            split = op.Transpose(split, perm=[1, 0, 2, 3])
        self._facts.replace(out, split)
        for node in out.consumers() if self._order == SPLIT_HEADS else ():
            if self._merges(node, found):
                self._facts.replace(node.outputs[0], rows)
                node.outputs[0].replace_all_uses_with(rows)
        self._written.caches += zip((found.keys, found.values), cache, strict=False)
        if (tokens := found.result_tokens) is not None:  # of an If it is not known otherwise
            self._facts.note(rows, (*tokens, known(found.heads * found.size)))
        return split

    def _merges(self, node: ir.Node, found: Attention) -> bool:
        """Whether a Reshape makes ``[B, S, H * D]`` of ``[B, S, H, D]``."""
        shape = self._facts.dims(found.query, 4)
        assert shape is not None
        width = (known(found.heads * found.size),) if found.proves_heads else ()
        wanted = zip(found.tokens, (shape[0], shape[2]), strict=True)
        kept = keeps_order(self._facts, node, *wanted, width)
        return kept and not node.outputs[0].is_graph_output()

    def _uncached(
        self, op: Any, found: Attention, name: str | None
    ) -> tuple[str, Sequence[ir.Value]]:
        """Emit the forms of attention without a cache; return what to call them."""
        answers, form = self._conditions.of_uncached(op, found), "Attention"
        others, long = cast(Build, found.any_tokens), answers.texts
        if long is not None:
            form = f"{form}, MultiHeadAttention for long texts"

            def others(op: Any) -> Sequence[ir.Value]:
                fits = op.And(long, bounded(op, found, with_values=True))
                return either(op, fits, functools.partial(by_text, found), found.any_tokens)

        def whole(op: Any) -> Sequence[ir.Value]:
            kernel = functools.partial(found.whole, mask=answers.mask)
            if not found.mends_nan:
                return kernel(op)
            return guarded(op, kernel, found.any_tokens, lambda op, made: op.Identity(made))

        if answers.standard is None:
            return form, whole(op)
        return form, either(op, answers.standard, whole, others, name)

    def _in_buffers(self, op: Any, found: Attention) -> Sequence[ir.Value]:
        assert self._cache is not None
        last, total = self._cache.counts(found)
        key = "checked", found.mask, *unproved_splits(op, found.splits, self._facts)
        if key not in self._shared:
            name = f"mask_hides_later_tokens_{len(self._shared)}"
            zero = check_shared(op, found, name)
            self._shared[key] = op.Add(last, zero)
        joined = dataclasses.replace(found, joins=True)
        return joined.by_kernel(op, self._shared[key], total, cached=True)

    def _cached(
        self, op: Any, found: Attention, name: str | None
    ) -> tuple[str, Sequence[ir.Value]]:
        """Emit the forms of attention with a cache; return what to call them."""
        found = dataclasses.replace(found, joins=not self._depends(found))
        answers = self._conditions.of_cached(op, found)
        forms, build = "grouped queries", cast(Build, found.any_tokens)
        if found.shortest_prompt is not None:
            forms, past = f"{forms}, GroupQueryAttention", producer(found.keys).inputs[0]

            def build(op: Any) -> Sequence[ir.Value]:
                empty = op.Less(op.Shape(past, start=2, end=3), ints(op, 1))
                is_prompt = op.And(op.And(answers.kernel, empty), bounded(op, found))
                return either(op, is_prompt, kernel, found.any_tokens)

            def kernel(op: Any) -> Sequence[ir.Value]:
                plain = dataclasses.replace(found, mask=None)
                return either(op, answers.plain, plain.by_prompt, found.by_prompt)

        if number(found.tokens[1]) not in (None, 1):
            return forms, build(op)
        rows = self._group_rows(op, found)

        def one_token(op: Any) -> Sequence[ir.Value]:
            nodes = functools.partial(found.one_token, rows=None)
            kernel = functools.partial(found.one_token, rows=rows)
            if found.mends_nan and rows is not None:
                return guarded(op, kernel, nodes, found.merge_token)
            mixed, *caches = kernel(op)
            return [found.merge_token(op, mixed), *caches]

        return forms, either(op, answers.one, one_token, build, name)

    def _group_rows(self, op: Any, found: Attention) -> ir.Value | None:
        """Emit the mask of one token, a row for each query head of a group.

        None where the standard operator does not take it.
        """
        if not self._standard or found.mask is None:
            return None
        repeats = found.heads // found.groups
        if repeats == 1 or found.masks_heads:
            return found.mask
        key = "rows", found.mask, repeats
        if key not in self._shared:
            # Without tokens the mask has no row to repeat.
            first = op.Slice(found.mask, ints(op, 0), ints(op, 1), ints(op, 2))
            self._shared[key] = op.Tile(first, ints(op, 1, 1, repeats, 1))
        return self._shared[key]

    def _depends(self, found: Attention) -> bool:
        """Whether what a form reads is computed from the new cache."""
        joins = [producer(cache) for cache in (found.keys, found.values)]
        if joins[0] not in self._places:
            graph = joins[0].graph
            assert isinstance(graph, ir.Graph)
            self._places = {node: place for place, node in enumerate(graph)}
        first = min(self._places[node] for node in joins)
        others = [value for node in joins for value in node.inputs]
        read = (found.query, found.mask, *others)
        pending = [value.producer() for value in read if value is not None]
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

    def _with_mask(self, op: Any, found: Attention) -> Attention:
        """Emit the sum of the masks, and of those that replace scores."""
        if not found.masks:
            return found
        mask = self._sum_of(op, found.masks)
        replacing = tuple(mask for mask in found.masks if mask.replaces)
        chosen = self._sum_of(op, replacing) if replacing else None
        return dataclasses.replace(found, mask=mask, chosen=chosen)

    def _sum_of(self, op: Any, masks: tuple[Mask, ...]) -> ir.Value:
        """Emit a sum, once for all layers."""
        if masks not in self._masks:
            total: Any = None
            for mask in masks:
                rank = len(self._facts.dims(mask.value) or ())
                total = mask.added(op, len(SPLIT_HEADS) - rank, total)
            self._masks[masks] = total
        return self._masks[masks]


_REFUSALS: tuple[tuple[Callable[[FuseAttention, Attention], bool], str, str], ...] = (
    (
        lambda rule, found: not found.cached and not rule._standard,
        "ORP608",
        "without a cache it needs the kernel of onnxruntime 1.24",
    ),
    (
        lambda rule, found: found.never_fits,
        "ORP601",
        "its sizes are known not to fit each other",
    ),
    (
        lambda rule, found: not found.cached and found.read_keys.merge is not None,
        "ORP602",
        "the batch of its heads is not known to be their own",
    ),
    (
        lambda rule, found: bool(
            found.cached and rule._cache and not (found.fits_kernel and found.appends_tokens)
        ),
        "ORP609",
        "GroupQueryAttention, which kv_cache=shared needs, can't compute it",
    ),
    (
        lambda rule, found: bool(
            found.cached and rule._cache and not rule._cache.takes(found)
        ),
        "ORP609",
        "it is not known which inputs are a mask [B, T] and tokens [B, S] of this cache",
    ),
)


def note_kernels(nodes: Mapping[str, Sequence[ir.Node]], remarks: Remarks) -> None:
    """Note attention that is one node already, of the nodes of each operator."""
    for kernel in _KERNELS:
        for node in nodes[kernel]:
            remarks.note(label(node), f"attention: {kernel} already")


def multiplied_weights(softmaxes: Iterable[ir.Node]) -> dict[ir.Node, tuple[str, ...]]:
    """Return each MatMul of what a Softmax made, and the nodes on the way to it."""
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
            between.append(f"{node.op_type} {label(node)!r}")
            value = node.outputs[0]
    return found


def refuse_the_rest(
    graphs: Container[ir.Graph], products: Mapping[ir.Node, Sequence[str]], remarks: Remarks
) -> None:
    """Say what differs in attention, of all found before, that no rule made a remark on."""
    seen = {remark.node for remark in remarks}
    for product, between in products.items():
        readers = product.outputs[0].consumers()
        if product.graph is None or not readers or label(product) in seen:
            continue
        kind = product.inputs[0] and product.inputs[0].dtype
        if product.graph not in graphs:
            refusal = Refusal("ORP603", "it stands in a subgraph")
        elif kind not in (None, ir.DataType.FLOAT):
            refusal = Refusal("ORP605", f"computes in {kind}, not in float32")
        elif between:
            refusal = Refusal("ORP603", f"its weights go through {', '.join(between)}")
        else:
            reader = ", ".join(node.op_type for node in readers)
            text = f"its result goes to {reader}, not to a Transpose of heads"
            refusal = Refusal("ORP603", text)
        remarks.refused(label(product), refusal.behind("attention: "))


def _is_zero(value: ir.Value | None) -> bool:
    tensor = constant(value)
    return tensor is not None and tensor.size == 1 and not tensor.numpy().any()
