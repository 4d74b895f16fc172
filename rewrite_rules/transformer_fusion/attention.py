# SPDX-License-Identifier: MIT
"""Attention by kernels, with the model's own nodes behind what they ask.

    Transpose(MatMul(Softmax(scale * MatMul(q, repeat(k)') + mask), repeat(v)))
        -> guarded(nodes, (one token, Attention), (a prompt, GroupQueryAttention))
                                                            where k and v are a cache
        -> guarded(nodes, (few scores, Attention), (many, blocks text by text))    elsewhere

Here is what is read of the nodes and what is refused; :mod:`.attention_questions` has what a
run is asked, :mod:`.attention_kernels` what computes it. For one token the standard operator
of opset 23 beats GroupQueryAttention, which clears the whole new cache before it copies the
old one; for a prompt that is faster by a third. The cache's Concat, names and order stay.
Without a cache, and across from a decoder to what an encoder made, the standard operator takes
0.6 to 0.8 of the time of the nodes.

Heads may be merged with the batch, ``[B * H, S, D]``: each Reshape on the way has to make the
sizes that are named here.

Refused by name: other types than float32, weights that something else reads. What multiplies
the weights of a Softmax and is not fused says why.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import onnx_ir as ir
from onnxscript.rewriter import MatchContext, MatchResult
from onnxscript.rewriter.pattern import OrValue

from rewrite_rules.graph.nodes import label, made_by, producer
from rewrite_rules.graph.parameters import int_attribute, ints_attribute, scalar
from rewrite_rules.graph.rule_set import matching
from rewrite_rules.remarks import Refusal, Remarks
from rewrite_rules.shapes.dimensions import known, number
from rewrite_rules.shapes.proved_shapes import ProvedShapes
from rewrite_rules.transformer_fusion import attention_kernels as kernels
from rewrite_rules.transformer_fusion import attention_questions as questions
from rewrite_rules.transformer_fusion.attention_kernels import Attention
from rewrite_rules.transformer_fusion.guarded import (
    Build,
    Question,
    clone,
    guarded,
    mended,
    own_nodes,
)
from rewrite_rules.transformer_fusion.heads import FIRST, SPLIT_HEADS, Heads, ints, read_heads
from rewrite_rules.transformer_fusion.layer_rule import LayerRule
from rewrite_rules.transformer_fusion.scores import HIDDEN, LOWEST, read_scores
from rewrite_rules.transformer_fusion.shared_cache import SharedCache
from rewrite_rules.transformer_fusion.sizes import Sizes, keeps_size, rows_are

_KERNELS = ("Attention", "GroupQueryAttention", "MultiHeadAttention")
# From heads [B, H, S, D] to [S, B, H, D], as torch's own MultiheadAttention goes on.
TOKENS_FIRST = (2, 0, 1, 3)
_MAX_BETWEEN = 4


class FuseAttention(LayerRule):
    """``Transpose(softmax(scale q k' + mask) v) -> guarded(nodes, (question, kernel), ...)``.

    To ``[S, B, H, D]`` as well, where a Transpose of the first two axes stays.
    ``nonempty``: shapes in runs without empty values; kernels ask for these. ``caches``: gets
    each new cache, and what replaces it.
    """

    def __init__(
        self,
        facts: ProvedShapes,
        nonempty: ProvedShapes,
        remarks: Remarks,
        caches: list[tuple[ir.Value, ir.Value]],
        shared: SharedCache | None = None,
    ) -> None:
        super().__init__(facts, remarks)
        self._nonempty = nonempty
        self._caches = caches
        self._cache = shared

    def pattern(self, op, logits, zero, values):  # type: ignore[no-untyped-def]
        softmax = op.Softmax(logits, _allow_other_attributes=True, _outputs=["softmax"])
        numbers = op.Where(op.IsNaN(softmax), zero, softmax)
        split = op.Reshape(softmax, _allow_other_inputs=True, _allow_other_attributes=True)
        forms = [softmax, numbers, split]
        weights = OrValue(forms, tag_var="guarded", tag_values=[0, 1, 2])
        mixed = op.MatMul(weights, values, _outputs=["mixed"])
        heads = op.Reshape(mixed, _allow_other_inputs=True, _allow_other_attributes=True)
        kept = OrValue([mixed, heads], tag_var="kept", tag_values=[0, 1])
        return op.Transpose(kept, _allow_other_attributes=True, _outputs=["out"])

    def check(  # type: ignore[override]
        self,
        context: MatchContext,
        softmax: ir.Value,
        mixed: ir.Value,
        zero: ir.Value | None,
        guarded: int,
        out: ir.Value,
        **_: object,
    ) -> MatchResult:
        """Read the attention; what stands in the way is a remark."""
        with matching(self._remarks, producer(mixed), "attention: ") as result:
            if guarded == 1 and scalar(zero, math.inf) != 0:
                return result.fail("what NaN becomes is not 0", zero)
            self._order = tuple(ints_attribute(producer(out), "perm") or ())
            if self._order not in (SPLIT_HEADS, TOKENS_FIRST):
                return result.fail("it is not a Transpose of heads", out)
            found = read_attention(softmax, mixed, out, guarded == 1, self._nonempty)
            self._check_kernels(found)
            end = _merged(out, found.sizes) if self._order == SPLIT_HEADS else None
            self._found, self._end = found, end
            self._nodes = self._own_nodes(found, end or out)
        return result

    def _check_kernels(self, found: Attention) -> None:
        """Refuse what no kernel takes, or not the one that a cache in buffers needs."""
        if found.caches and self._cache is not None:
            if not found.fits_group_query:
                text = "GroupQueryAttention, which kv_cache=shared needs, can't compute it"
                raise Refusal("ORP609", text)
            if not self._cache.takes(found):
                text = (
                    "no proof shows which inputs are a mask [B, T] and tokens [B, S] of this"
                )
                raise Refusal("ORP609", f"{text} cache")
        elif found.caches and not (
            found.masks and (found.may_be_token or found.takes_prompts)
        ):
            raise Refusal("ORP603", "no kernel computes it with a cache")

    def rewrite(self, op: Any, mixed: ir.Value, out: ir.Value, **_: object) -> Any:
        """Emit the kernels, with the model's own nodes behind what they ask."""
        found, end, name = self._found, self._end, producer(mixed).name
        mask = self._once(("mask", found.masks, found.heads), lambda: _sum(op, found))
        found = dataclasses.replace(found, mask=mask)
        if found.caches and self._cache is not None:
            form, made = "GroupQueryAttention", self._in_buffers(op, found, end)
        else:

            def laid_out(kernel: Build) -> Build:
                return lambda op: self._laid_out(op, kernel(op), found, end)

            form, cases = (self._cached if found.caches else self._uncached)(
                op, found, self._nodes, laid_out
            )
            made = guarded(op, self._nodes, *cases, name=name)
        self._remarks.fired(label(producer(mixed)), f"attention: {form}")
        self._caches += zip(found.caches, made[1:], strict=False)
        self._note(end or out, made[0], found)
        if end is None:
            return made[0]
        end.replace_all_uses_with(made[0])
        return op.Reshape(made[0], ints(op, 0, 0, found.heads, found.size))

    def _uncached(
        self, op: Any, found: Attention, nodes: Build, laid_out: Callable[[Build], Build]
    ) -> tuple[str, list[tuple[Question, Build]]]:
        """Return what the kernels are called, and what they ask."""
        short, long, mask = questions.of_uncached(op, found, self._once)
        form, whole = "Attention", laid_out(lambda op: kernels.without_cache(op, found, mask))
        cases: list[tuple[Question, Build]] = [
            (lambda op: short, _mended(found, nodes, whole))
        ]
        if long is not None:
            form = f"{form}, MultiHeadAttention for long texts"
            blocks = laid_out(lambda op: kernels.by_text(op, found))
            bounded = functools.partial(questions.is_bounded, found=found, with_values=True)
            cases.append((lambda op: op.And(long, bounded(op)), blocks))
        return form, cases

    def _cached(
        self, op: Any, found: Attention, nodes: Build, laid_out: Callable[[Build], Build]
    ) -> tuple[str, list[tuple[Question, Build]]]:
        """Return what the kernels are called, and what they ask."""
        one, prompt, plain = questions.of_cached(op, found, self._once)
        forms, cases = list[str](), list[tuple[Question, Build]]()
        if found.may_be_token:
            mask = self._once(
                ("token", found.mask, found.heads // found.groups),
                lambda: kernels.mask_of_token(op, found),
            )
            token = laid_out(lambda op: kernels.of_one_token(op, found, mask))
            forms.append("Attention")
            cases.append((lambda op: one, _mended(found, nodes, token)))
        if found.takes_prompts:
            masked = laid_out(lambda op: kernels.of_prompt(op, found))
            causal = laid_out(
                lambda op: kernels.of_prompt(op, dataclasses.replace(found, mask=None))
            )

            def is_prompt(op: Any) -> ir.Value:
                cached = op.Shape(found.past[0], start=2, end=3)
                fits = op.And(prompt, op.Less(cached, ints(op, 1)))
                made: ir.Value = op.And(fits, questions.is_bounded(op, found))
                return made

            forms.append("GroupQueryAttention")
            cases.append(
                (is_prompt, lambda op: guarded(op, masked, (lambda op: plain, causal)))
            )
        return ", ".join(forms), cases

    def _in_buffers(
        self, op: Any, found: Attention, end: ir.Value | None
    ) -> Sequence[ir.Value]:
        """Emit GroupQueryAttention on a cache in the caller's buffers."""
        assert self._cache is not None
        last, total = self._cache.counts(found)
        name = f"mask_hides_later_tokens_{len(self._shared)}"
        checked = self._once(
            ("checked", found.mask, found.sizes.key),
            lambda: op.Add(last, questions.check_shared(op, found, self._once, name)),
        )
        made = kernels.by_group_query(op, found, checked, total, found.past)
        return self._laid_out(op, made, found, end)

    def _laid_out(
        self, op: Any, made: Sequence[ir.Value], found: Attention, end: ir.Value | None
    ) -> Sequence[ir.Value]:
        """Emit what the model makes of ``[B, S, H * D]``."""
        rows, *caches = made
        if end is None:
            rows = op.Reshape(rows, ints(op, 0, 0, found.heads, found.size))
            if self._order == TOKENS_FIRST:
                rows = op.Transpose(rows, perm=[1, 0, 2, 3])
        return [rows, *caches]

    def _note(self, end: ir.Value, made: ir.Value, found: Attention) -> None:
        """Note the shape of a result, with B and S of the queries where masks add no more."""
        places = [found.sizes.place(name) for name in "BS"]
        for facts in (self._facts, self._nonempty):
            facts.replace(end, made)
            batch, length = ((facts.dims(value) or ())[axis] for value, axis in places)
            dims, mask = facts.dims(end), facts.dims(found.mask, 4)
            stays = found.mask is None or (
                mask is not None
                and rows_are(mask[0], batch, facts)
                and keeps_size(mask[2], length, facts)
            )
            # Of what is asked, the nodes behind may make other sizes.
            proved = stays and found.sizes.agree()
            if proved and dims is not None and self._order == SPLIT_HEADS:
                facts.note(made, (batch, length, *dims[2:]))

    def _own_nodes(self, found: Attention, end: ir.Value) -> Build:
        """Return what clones the nodes; a Refusal if a kernel can't take their place."""
        masks = [mask.value for mask in found.masks]
        graph, read = producer(end).graph, list[ir.Value]()
        for heads in (found.query, found.keys, found.values):
            # Kernels read what is split into heads: a clone repeats the Transpose.
            outside = (
                v for v, _ in heads.path if (n := v.producer()) and n.graph is not graph
            )
            read += heads.source, *outside
        held = found.caches
        nodes = own_nodes([end, *held], read, [*found.past, *masks])
        inside = {value for node in nodes for value in node.outputs}
        inputs = {value for node in nodes for value in node.inputs} - inside
        if not {*held}.isdisjoint(read) or own_nodes([*inputs, *masks], held):
            raise Refusal("ORP603", "what it reads is computed from its own new cache")
        return lambda op: clone(op, nodes, [end, *held], self._facts)


def _mended(found: Attention, nodes: Build, kernel: Build) -> Build:
    """Return a kernel, with the nodes behind results that are NaN where these may not be."""
    if not found.mends_nan:
        return kernel
    return functools.partial(mended, nodes=nodes, kernel=kernel)


def _sum(op: Any, found: Attention) -> Any:
    """Emit the sum of the masks."""
    total: Any = None
    for mask in found.masks:
        total = mask.added(op, found.facts, found.heads, total)
    return total


def _merged(out: ir.Value, sizes: Sizes) -> ir.Value | None:
    """Return ``[B, S, H * D]`` if that is all that is made of ``[B, S, H, D]``."""
    readers = out.consumers()
    node = made_by(readers[0].outputs[0], "Reshape") if len(readers) == 1 else None
    if node is None or node.outputs[0].is_graph_output() or out.is_graph_output():
        return None
    return node.outputs[0] if sizes.fits(node.outputs[0], "B S H*D") else None


def name_caches(caches: Iterable[tuple[ir.Value, ir.Value]]) -> None:
    """Let new caches be the outputs, under their names."""
    for whole, made in caches:
        if not whole.is_graph_output():
            continue  # another attention that reads it has replaced it
        made.type, made.shape, name = whole.type, whole.shape, whole.name
        whole.replace_all_uses_with(made, replace_graph_outputs=True)
        whole.name, made.name = None, name


def read_attention(
    softmax: ir.Value, mixed: ir.Value, out: ir.Value, are_numbers: bool, facts: ProvedShapes
) -> Attention:
    """Read attention of which ``out`` is the transposed result; a Refusal for anything else.

    ``are_numbers``: weights that are NaN count as 0.
    """
    dims, axis = facts.dims(softmax), int_attribute(producer(softmax), "axis", -1)
    if axis != -1 and (dims is None or axis != len(dims) - 1):
        raise Refusal("ORP603", f"its weights are over axis {axis}, not known to be the last")
    scores = read_scores(producer(softmax).inputs[0], facts)
    if scores is None:
        text = (
            f"Softmax {label(producer(softmax))!r} reads something else than scores and masks"
        )
        raise Refusal("ORP603", text)
    product, scale, masks, steps = scores
    weights, values_operand = producer(mixed).inputs
    keys = read_heads(product.inputs[1], facts, "BNDL")
    values = read_heads(values_operand, facts)
    query = read_heads(product.inputs[0], facts, is_query=True)
    if [*values.scalings()]:
        raise Refusal("ORP603", "the values are scaled")
    if keys.repeats != values.repeats:
        raise Refusal("ORP603", "keys and values are repeated differently")
    kind = query.path[0][0].dtype
    if kind != ir.DataType.FLOAT:
        raise Refusal("ORP605", f"computes in {kind}, not in float32")
    scale *= query.scale * keys.scale
    # GroupQueryAttention takes 0 for no scale at all, and Attention takes positive ones only.
    if not 0 < scale < math.inf:
        raise Refusal("ORP603", "its scale is not a positive number")
    _check_readers(softmax, mixed, 1 + are_numbers, steps)
    heads = _count_heads(query, keys, product, facts)
    caches = _caches(keys, values, producer(mixed))
    new = keys, values
    if caches:
        appended = (producer(cache).inputs[1] for cache in caches)
        one, other = (read_heads(value, facts, as_they_are=True) for value in appended)
        new = one, other
    found = Attention(
        query, *new, masks, scale, heads, keys.count or 1, caches,
        are_numbers or any(mask.lowest is not None for mask in masks), Sizes(facts),
    )  # fmt: skip
    _name_sizes(found)
    steps = *steps, *([weights] if weights else [])
    read = [(query, "B H S D H"), (keys, "B G T D K"), (values, "B G T D K")]
    read += [(each, "B G S D G") for each in new if caches]
    _check_layout(found, steps, out, read, (product, producer(mixed)))
    _check_masks(found)
    return found


def _count_heads(query: Heads, keys: Heads, product: ir.Node, facts: ProvedShapes) -> int:
    """Return H: as many as keys have, where they have more than one."""
    heads, shared = query.count or 0, (keys.count or 0) * keys.repeats
    # Keys may have an axis to be repeated on.
    spread = facts.dims(product.inputs[1], 5) is not None and shared and heads % shared == 0
    if not heads or not shared or (heads != shared and shared != 1 and not spread):
        raise Refusal("ORP602", f"how many heads {query.source.name!r} has is not known")
    return heads


def _name_sizes(found: Attention) -> None:
    """Bind B, H, G, S, T and D; which of them differ in a run is asked there."""
    sizes, length = found.sizes, "S" if found.caches else "T"
    sizes.know("H", known(found.heads))
    sizes.know("G", known(found.groups))
    for heads in (found.values, found.keys):
        sizes.match_heads(heads, f"B G {length} D")
    sizes.match_heads(found.query, "B H S D")
    if number(sizes.dim("D")) is None:
        raise Refusal("ORP602", "the size of its heads is not known")
    for cache in found.caches:
        # Not its batch: a Concat skips an empty cache, whatever texts that is of.
        if (dims := found.facts.dims(cache, 4)) is not None:
            sizes.know("T", dims[2])


def _check_layout(
    found: Attention,
    steps: Iterable[ir.Value],
    out: ir.Value,
    read: Sequence[tuple[Heads, str]],
    products: Iterable[ir.Node],
) -> None:
    """Refuse Reshapes that may do more than merge heads with the batch, or split them."""
    kept, sizes = producer(out).inputs[0], found.sizes
    assert kept is not None
    for mask in found.masks:
        sizes.mask("B H S T", mask.dims(found.facts, found.heads))
    for heads, _ in read:
        _check_batch(heads, found)
    sizes.know("R", known(found.heads // found.groups))
    sizes.know("K", known(found.groups * read[1][0].repeats))
    forms = ("B H S T", "B*H S T", "B G R S T")
    wrong = [
        step for step in steps if made_by(step, "Reshape") and not sizes.fits(step, *forms)
    ]
    wrong += [value for heads, form in read if (value := sizes.misfit(heads, form))]
    if made_by(kept, "Reshape") and not sizes.fits(kept, "B H S D"):
        wrong.append(kept)
    if wrong:
        text = f"Reshape {label(producer(wrong[0]))!r} has another layout"
        raise Refusal("ORP603", text)
    for product in products:
        if len({len(found.facts.dims(value) or ()) for value in product.inputs}) > 1:
            raise Refusal("ORP603", f"{label(product)!r} multiplies by more than heads")
    if found.facts.dims(kept, 4) is None:
        raise Refusal("ORP603", "the result has another layout")


def _check_batch(heads: Heads, found: Attention) -> None:
    """Refuse heads that may be repeated for more texts than there are; ask a run if it can."""
    merged = found.facts.dims(heads.merge.outputs[0] if heads.merge else None)
    once = heads.path[heads.once][0]
    whole = found.facts.dims(once, 4)
    if not merged or (whole and merged[0] == whole[0]) or found.sizes.is_size("B", merged[0]):
        return
    place = found.facts.place_in_inputs(merged[0])
    if place is None:
        raise Refusal("ORP602", f"the batch of {once.name!r} may be stretched")
    found.sizes.ask("B", merged[0], *place)


def _check_masks(found: Attention) -> None:
    """Refuse masks of unknown axes, and where heads share keys of unknown heads."""
    highest = HIDDEN if len(found.masks) == 1 else LOWEST
    for mask in found.masks:
        name, dims = mask.value.name, mask.dims(found.facts, found.heads)
        shared = found.caches and found.heads != found.groups
        if mask.lowest is not None and not mask.lowest <= highest:
            text = f"Where by {name!r} puts {mask.lowest:g} for scores, which may be as low"
            raise Refusal("ORP604", text)
        # One query head would be repeated for the heads of a mask.
        if (shared or found.heads == 1) and number(dims[1]) not in (1, found.heads):
            raise Refusal("ORP603", f"mask {name!r} may differ from head to head")


def _check_readers(
    softmax: ir.Value, mixed: ir.Value, of_softmax: int, steps: Iterable[ir.Value]
) -> None:
    """Refuse scores or weights that are read elsewhere: they would be computed twice."""
    weights = producer(mixed).inputs[0]
    assert weights is not None
    for value in (mixed, weights, softmax, *steps):
        # Sizes are read to lay out what comes next.
        readers = [use.node for use in value.uses() if not _gives_sizes(use.node)]
        most = of_softmax if value is softmax else 1
        if value.is_graph_output() or len(readers) > most:
            raise Refusal("ORP601", "its scores or weights are read elsewhere")


def _gives_sizes(node: ir.Node) -> bool:
    readers = node.outputs[0].consumers() if node.op_type == "Reshape" else (node,)
    return all(reader.op_type == "Shape" for reader in readers)


def _caches(keys: Heads, values: Heads, product: ir.Node) -> tuple[ir.Value, ...]:
    """Return keys and values that are inputs of this graph and come back, longer."""
    joins = [made_by(each.source, "Concat") for each in (keys, values) if each.axes == FIRST]
    here = [node for node in joins if node is not None and node.graph is product.graph]
    found = [node.outputs[0] for node in here if _appends(node)]
    return tuple(found) if len(found) == 2 else ()


def _appends(node: ir.Node | None) -> bool:
    """Whether a node appends to an input, ``[B, G, T, D]``, that comes back as an output."""
    if node is None or len(node.inputs) != 2 or int_attribute(node, "axis") not in (2, -2):
        return False
    past = node.inputs[0]
    return past is not None and past.is_graph_input() and node.outputs[0].is_graph_output()


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
