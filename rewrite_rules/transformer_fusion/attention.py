# SPDX-License-Identifier: MIT
"""Attention with a cache, in the form that is fastest for one token and for a prompt.

    Transpose(MatMul(Softmax(scale * MatMul(q, repeat(k)') + mask), repeat(v)))
        -> If(one token:   grouped queries, without a Transpose
              nothing cached: GroupQueryAttention(q, k, v, attention_bias=mask)
              else:        grouped queries)

Grouped queries are one MatMul for all query heads that share a key and value head. For one
token they beat GroupQueryAttention, which clears the whole new cache before it copies the old
one (24 against 41 ms for a token of SmolLM2 at 1,536); for a prompt the kernel is faster by a
third. The model's own mask is added in all three: padding on either side, sliding windows and
biases stay what they are. The cache's Concat, names and order stay.

Refused by name: soft caps, masks chosen by Where or one for each head of a group, other types
than float32; masks that let tokens see later ones get no GroupQueryAttention.
"""

from __future__ import annotations

__all__ = ["FuseAttention"]

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript import TapeBuilder
from onnxscript.rewriter import (
    MatchContext,
    MatchResult,
    RewriteRuleClassBase,
)
from onnxscript.rewriter.pattern import OrValue

from rewrite_rules.graph.attributes import int_attribute
from rewrite_rules.graph.constants import constant
from rewrite_rules.graph.names import FreshNames
from rewrite_rules.graph.nodes import label, producer
from rewrite_rules.graph.refusal import Refusal
from rewrite_rules.remarks import Remarks
from rewrite_rules.shapes.dimensions import number
from rewrite_rules.shapes.proved_shapes import ProvedShapes
from rewrite_rules.transformer_fusion.head_layout import (
    SPLIT_HEADS,
    in_order,
    ints,
    rows,
    unsplit,
)
from rewrite_rules.transformer_fusion.mask_reading import MaskReader, MaskSight
from rewrite_rules.transformer_fusion.repeated_heads import (
    RepeatedHeads,
    read_repeated_heads,
)

_MICROSOFT = "com.microsoft"
_LOWEST = float(np.finfo(np.float32).min)


@dataclasses.dataclass(frozen=True, eq=False)
class _Attention:
    """What is known of a match.

    Attributes:
        query: ``[B, H, S, D]``, before it is scaled.
        keys: ``[B, G, T, D]``, past and new.
        values: The same.
        mask: What is added to the scores; None for nothing.
        scale: What the scores are multiplied by.
        heads: H.
        groups: G.
        size: D.
        sight: What the mask does; None where it can't be computed.
        prompt: Whether GroupQueryAttention computes the same where nothing is cached.
        reshaped: Whether only the order of the result's elements counts.
    """

    query: ir.Value
    keys: ir.Value
    values: ir.Value
    mask: ir.Value | None
    scale: float
    heads: int
    groups: int
    size: int
    sight: MaskSight | None
    prompt: bool
    reshaped: bool


class FuseAttention(RewriteRuleClassBase):
    """``Transpose(softmax(scale q k' + mask) v) -> If(one token, ..., ...)``."""

    def __init__(
        self, facts: ProvedShapes, masks: MaskReader, names: FreshNames, remarks: Remarks
    ) -> None:
        super().__init__(remove_nodes=False)
        self._facts = facts
        self._masks = masks
        self._names = names
        self._numbers = itertools.count()
        self._remarks = remarks
        self._found: _Attention | None = None
        self._shared: dict[object, ir.Value] = {}

    def pattern(self, op, weights, values):  # type: ignore[no-untyped-def]
        mixed = op.MatMul(weights, values, _outputs=["mixed"])
        same = op.Reshape(mixed, _allow_other_inputs=True, _allow_other_attributes=True)
        kept = OrValue([mixed, same], tag_var="kept", tag_values=[0, 1])
        return op.Transpose(kept, perm=[*SPLIT_HEADS], _outputs=["out"])

    def check(  # type: ignore[override]
        self,
        context: MatchContext,
        weights: ir.Value,
        values: ir.Value,
        mixed: ir.Value,
        out: ir.Value,
        **_: object,
    ) -> MatchResult:
        """Read the attention; what stands in the way is a remark."""
        del context  # Unused
        result, node = MatchResult(), producer(mixed)
        with self._remarks.at(label(node)):
            try:
                self._found = self._read(weights, values, out)
            except Refusal as refusal:
                self._remarks.refused(label(node), f"attention: {refusal}")
                return result.fail(str(refusal), node)
        return result if self._found else result.fail("is not attention with a cache", node)

    # Reading

    def _read(self, weights: ir.Value, values: ir.Value, out: ir.Value) -> _Attention | None:
        softmax, guarded = _softmax(weights)
        value_heads = read_repeated_heads(values, self._facts, once=True)
        if softmax is None or value_heads is None:
            return None
        scores, mask = _scores(softmax.inputs[0])
        if scores is None or scores.matmul.inputs[1] is None:
            return None
        key_heads = read_repeated_heads(scores.matmul.inputs[1], self._facts, once=True)
        if key_heads is None or not key_heads.transposed or value_heads.transposed:
            return None
        query, scale = _unscaled(scores.matmul.inputs[0], scores.scale)
        for node, index in key_heads.scalings:
            scale *= _factor(node, index)
        if value_heads.scalings:
            raise Refusal("the values are scaled")
        if not self._keeps_heads(out, query):
            raise Refusal("the result is laid out in another way")
        groups, size = self._sizes(key_heads, value_heads)
        heads = groups * max(key_heads.repeats, value_heads.repeats)
        if key_heads.repeats != value_heads.repeats:
            raise Refusal("keys and values are repeated differently")
        if key_heads.repeats == 1 and groups == 1:
            heads = self._query_heads(query, size)
        if query.dtype != ir.DataType.FLOAT:
            raise Refusal(f"computes in {query.dtype}, not in float32")
        sight = self._seen(mask, heads, groups, guarded)
        return _Attention(
            query, key_heads.source, value_heads.source, mask, scale, heads, groups, size,
            sight, self._is_prompt(query, key_heads, value_heads, size, sight),
            not out.is_graph_output() and all(map(self._reorders, out.consumers())),
        )  # fmt: skip

    def _sizes(self, keys: RepeatedHeads, values: RepeatedHeads) -> tuple[int, int]:
        shapes = [self._facts.shape(heads.source) for heads in (keys, values)]
        sizes = [None if isinstance(shape, int) else number(shape[3]) for shape in shapes]
        if sizes[0] is None or sizes[0] != sizes[1] or keys.groups != values.groups:
            raise Refusal("keys and values are not known to have heads of one size")
        return keys.groups, sizes[0]

    def _query_heads(self, query: ir.Value, size: int) -> int:
        """How many query heads share the one head that MatMul repeats."""
        for value, axis in ((query, 1), (unsplit(query), 2)):
            shape = self._facts.shape(value)
            heads = number(shape[axis]) if isinstance(shape, tuple) else None
            if heads is not None and (axis == 1) == (value is query):
                return heads
        shape = self._facts.shape(in_order(query))
        width = number(shape[2]) if isinstance(shape, tuple) and len(shape) == 3 else None
        if width is None:
            raise Refusal(f"how many heads {query.name!r} has is not known")
        return width // size

    def _keeps_heads(self, out: ir.Value, query: ir.Value) -> bool:
        """Whether ``[B, H, S, D]`` is transposed as it is, for the batch of all inputs."""
        node = producer(producer(out).inputs[0])
        if node.op_type == "MatMul":
            return True
        target, shape = node.inputs[1], self._facts.shape(query)
        asked = None if target is None else self._facts.integers(target)
        if asked is None or isinstance(shape, int):
            return False
        return len(asked.numbers) == len(shape) == 4 and asked.numbers[2:] == shape[2:]

    def _reorders(self, node: ir.Node) -> bool:
        """Whether a node is a Reshape that takes no size from its input but the batch."""
        target = node.inputs[1] if node.op_type == "Reshape" else None
        asked = None if target is None else self._facts.integers(target)
        return asked is not None and (0, ()) not in asked.numbers[1:]

    def _seen(
        self, mask: ir.Value | None, heads: int, groups: int, guarded: bool
    ) -> MaskSight | None:
        if mask is None:
            return None
        shape = self._facts.shape(mask)
        if not isinstance(shape, tuple) or len(shape) != 4:
            raise Refusal(f"mask {mask.name!r} is not known to have four axes")
        if number(shape[1]) != 1 and heads != groups:
            raise Refusal(f"mask {mask.name!r} may differ from head to head")
        try:
            return self._masks.read(mask)
        except Refusal:
            if guarded:
                raise
            return None

    def _is_prompt(
        self,
        query: ir.Value,
        keys: RepeatedHeads,
        values: RepeatedHeads,
        size: int,
        sight: MaskSight | None,
    ) -> bool:
        """Whether GroupQueryAttention may take the new tokens by themselves."""
        if sight is None or not sight.causal or not sight.full or size % 8:
            return False
        made = [heads.source.producer() for heads in (keys, values)]
        if any(n is None or n.op_type != "Concat" or len(n.inputs) != 2 for n in made):
            return False
        # The kernel checks that there are as many new values as keys.
        new, asked = producer(keys.source).inputs[1], self._facts.shape(query)
        own = asked if new is None else self._facts.shape(new)
        return isinstance(asked, tuple) and isinstance(own, tuple) and own[2] == asked[2]

    # Writing

    def rewrite(self, op: Any, mixed: ir.Value, **_: object) -> Any:
        """Emit the forms, and what chooses between them at each run."""
        found, node = self._found, producer(mixed)
        assert found is not None
        if found.sight is not None and found.sight.infinite:
            # Padding that sees nothing gets numbers, as from other masks; nothing reads them.
            infinite, lowest = found.mask, op.Constant(value_float=_LOWEST)
            finite = self._once(("finite", infinite), lambda: op.Max(infinite, lowest))
            found = dataclasses.replace(found, mask=finite)
        is_one = self._once(("one", self._length(found.query)), lambda: _is_one(op, found))
        rest = self._branch(lambda inner: _grouped(inner, found, self._facts))
        if found.prompt:
            rest = self._branch(lambda inner: self._without_cache(inner, found, rest))
        forms = "grouped queries" + (", GroupQueryAttention" if found.prompt else "")
        kind = "no mask" if found.mask is None else "a mask that can't be computed"
        kind = kind if found.sight is None else f"mask: {found.sight.kind}"
        self._remarks.fired(label(node), f"attention: {forms}; {kind}")
        return op.If(
            is_one,
            then_branch=self._branch(lambda inner: _one_token(inner, found)),
            else_branch=rest,
            _name=node.name,
        )

    def _once(self, key: object, make: Callable[[], ir.Value]) -> ir.Value:
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    def _length(self, query: ir.Value) -> object:
        shape = self._facts.shape(query)
        return query if isinstance(shape, int) else shape[2]

    def _without_cache(self, op: Any, found: _Attention, rest: ir.Graph) -> ir.Value:
        past = producer(found.keys).inputs[0]
        is_empty = op.Equal(op.Shape(past, start=2, end=3), ints(op, 0))
        prompt = self._branch(lambda inner: _prompt(inner, found, self._facts))
        chosen: ir.Value = op.If(is_empty, then_branch=prompt, else_branch=rest)
        return chosen

    def _branch(self, build: Callable[[Any], ir.Value]) -> ir.Graph:
        """Return a subgraph of one output; what it reads from outside, it captures."""
        op = TapeBuilder()
        output = build(op)
        output.dtype = ir.DataType.FLOAT
        for node in op.nodes:
            for value in node.outputs:
                value.name = self._names.take(f"attention_{next(self._numbers)}")
        return ir.Graph(
            [],
            [output],
            nodes=op.nodes,
            name=self._names.take(f"attention_{next(self._numbers)}"),
        )


@dataclasses.dataclass(frozen=True, eq=False)
class _Scores:
    matmul: ir.Node
    scale: float


def _softmax(weights: ir.Value) -> tuple[ir.Node | None, bool]:
    """The Softmax over keys, and whether NaN in it becomes 0."""
    node, guarded = weights.producer(), False
    if node is not None and node.op_type == "Where" and node.inputs[2] is not None:
        zero = constant(node.inputs[1])
        test = None if node.inputs[0] is None else node.inputs[0].producer()
        if test is None or test.op_type != "IsNaN" or test.inputs[0] is not node.inputs[2]:
            return None, False
        if zero is None or zero.size != 1 or zero.numpy().any():
            return None, False
        node, guarded = node.inputs[2].producer(), True
    if (
        node is None
        or node.op_type != "Softmax"
        or int_attribute(node, "axis", -1) not in (-1, 3)
    ):
        return None, False
    return node, guarded


def _scores(logits: ir.Value | None) -> tuple[_Scores | None, ir.Value | None]:
    """The scaled MatMul before a Softmax, and the mask that is added to it."""
    node = None if logits is None else logits.producer()
    if node is not None and node.op_type == "Add":
        for index in (0, 1):
            found = _product(node.inputs[index])
            if found is not None:
                return found, node.inputs[1 - index]
        return None, None
    if node is not None and node.op_type == "Where":
        if any(_product(value) is not None for value in node.inputs[1:]):
            raise Refusal("the mask is chosen by Where, not added")
        return None, None
    return _product(logits), None


def _product(value: ir.Value | None) -> _Scores | None:
    if value is None:
        return None
    inner, scale = _unscaled(value, 1.0)
    node = inner.producer()
    if node is not None and node.op_type == "Tanh" and _product(node.inputs[0]) is not None:
        raise Refusal("the scores are soft-capped")
    if node is None or node.op_type != "MatMul" or node.domain:
        return None
    return _Scores(node, scale)


def _unscaled(value: ir.Value | None, scale: float) -> tuple[ir.Value, float]:
    """A value before it is multiplied and divided by constant numbers."""
    assert value is not None
    while (node := value.producer()) is not None and node.op_type in ("Mul", "Div"):
        scalars = [constant(operand) for operand in node.inputs]
        index = next((i for i in (0, 1) if _is_number(scalars[1 - i])), None)
        if index is None or (node.op_type == "Div" and index) or node.inputs[index] is None:
            break
        scale *= _factor(node, index)
        value = node.inputs[index]
        assert value is not None
    return value, scale


def _is_number(tensor: ir.TensorProtocol | None) -> bool:
    return tensor is not None and tensor.size == 1 and len(tensor.shape.numpy()) <= 1


def _factor(node: ir.Node, index: int) -> float:
    tensor = constant(node.inputs[1 - index])
    assert tensor is not None
    factor = float(tensor.numpy().reshape(-1)[0])
    return factor if node.op_type == "Mul" else 1 / factor if factor else math.inf


def _is_one(op: Any, found: _Attention) -> ir.Value:
    split = unsplit(found.query)
    axis = 2 if split is found.query else 1
    equal: ir.Value = op.Equal(op.Shape(split, start=axis, end=axis + 1), ints(op, 1))
    return equal


def _weights(op: Any, query: ir.Value, found: _Attention) -> ir.Value:
    scores: ir.Value = op.FusedMatMul(
        query, found.keys, transB=1, alpha=found.scale, _domain=_MICROSOFT
    )
    return scores


def _masked(op: Any, scores: ir.Value, found: _Attention) -> ir.Value:
    total = scores if found.mask is None else op.Add(scores, found.mask)
    weights: ir.Value = op.Softmax(total, axis=-1)
    return weights


def _one_token(op: Any, found: _Attention) -> ir.Value:
    """``[B, 1, H, D]``, where query heads of a group are the rows of one MatMul.

    Or ``[B, G, H / G, D]``, of the same elements in the same order.
    """
    repeats = found.heads // found.groups
    grouped = op.Reshape(
        in_order(found.query), ints(op, -1, found.groups, repeats, found.size)
    )
    mixed: ir.Value = op.MatMul(_masked(op, _weights(op, grouped, found), found), found.values)
    if found.reshaped:
        return mixed
    result: ir.Value = op.Reshape(mixed, ints(op, -1, 1, found.heads, found.size))
    return result


def _grouped(op: Any, found: _Attention, facts: ProvedShapes) -> ir.Value:
    """``[B, S, H, D]`` for any number of tokens."""
    heads, groups, size = found.heads, found.groups, found.size
    flat = rows(op, found.query, facts, heads * size)
    query = op.Transpose(op.Reshape(flat, ints(op, 0, 0, heads, size)), perm=SPLIT_HEADS)
    if heads == groups:
        weights = _masked(op, _weights(op, query, found), found)
        return op.Transpose(op.MatMul(weights, found.values), perm=SPLIT_HEADS)  # type: ignore[no-any-return]
    keys = op.Shape(found.keys, start=2, end=3)
    query = op.Reshape(query, ints(op, 0, groups, -1, size))
    each = op.Concat(ints(op, 0, heads, -1), keys, axis=0)
    weights = _masked(op, op.Reshape(_weights(op, query, found), each), found)
    grouped = op.Reshape(weights, op.Concat(ints(op, 0, groups, -1), keys, axis=0))
    mixed = op.Reshape(op.MatMul(grouped, found.values), ints(op, 0, heads, -1, size))
    return op.Transpose(mixed, perm=SPLIT_HEADS)  # type: ignore[no-any-return]


def _prompt(op: Any, found: _Attention, facts: ProvedShapes) -> ir.Value:
    """``[B, S, H, D]`` of new tokens among themselves, by the kernel."""
    heads, size = found.heads, found.size
    query = rows(op, found.query, facts, heads * size)
    key, value = (
        rows(op, producer(whole).inputs[1], facts, found.groups * size)  # type: ignore[arg-type]
        for whole in (found.keys, found.values)
    )
    length = op.Shape(query, start=1, end=2)
    last = op.Cast(op.Sub(length, ints(op, 1)), to=ir.DataType.INT32)
    attended = op.GroupQueryAttention(
        query,
        key,
        value,
        None,
        None,
        op.Expand(last, op.Shape(query, start=0, end=1)),
        op.Cast(length, to=ir.DataType.INT32),
        None,
        None,
        None,
        found.mask,
        num_heads=heads,
        kv_num_heads=found.groups,
        scale=found.scale,
        _domain=_MICROSOFT,
    )
    result: ir.Value = op.Reshape(attended, ints(op, 0, 0, heads, size))
    return result
