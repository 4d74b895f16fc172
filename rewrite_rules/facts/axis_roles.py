# SPDX-License-Identifier: MIT
"""Which axes of a model count the same thing, and which axis a mask hides: from dataflow.

    Add(x[a, b, 8], y[c, d, 8])      a = c, b = d
    MatMul(p[.., a], q[b, ..])       a = b
    Reshape(x[a, b, 8], [c, d, 2, 4])     a b = c d: with a = c, b = d
    Softmax(scores[a, 12, b, d] + bias)   d = n, where bias is computed from mask[m, n] alone

Neither names nor sizes decide. Each equation holds where the model runs at all, or one of the
sizes is 1 or 0; and a mask hides what its numbers say. Whoever rests a rewrite on them asks
for the sizes of the inputs at run time, which leaves out the sizes of 1 and 0.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import math
from collections.abc import Collection, Iterable

import onnx_ir as ir

from rewrite_rules.facts.operator_table import ATTENTIONS
from rewrite_rules.graph.nodes import captures
from rewrite_rules.graph.parameters import int_attribute
from rewrite_rules.remarks import Refusal
from rewrite_rules.shapes.dimensions import Dim, Dims, known
from rewrite_rules.shapes.proved_shapes import ProvedShapes

# What only sizes of an input decide; its numbers do not matter.
_SIZES_ONLY = frozenset({"Shape", "Size"})
_RESHAPES = frozenset({"Flatten", "Reshape", "Squeeze", "Unsqueeze"})
# Nodes through which a mask is followed back from the Softmax that it is made for.
_MASKS = frozenset({"Add", "Cast", "Div", "Identity", "Max", "Mul", "Sub", "Where"})
_MAX_FOLLOWED = 16
# float32 has all whole numbers up to here.
_COUNTED_BY_FLOATS = 1 << 24
_Pair = tuple[Dim, Dim]


class AxisRoles:
    """The axes of the values of a model whose nodes are sorted, by what they count."""

    def __init__(self, model: ir.Model, masks: Collection[ir.Value] = ()) -> None:
        """Follow the graph; ``masks``, ``[batch, keys]``, may hide keys from a Softmax.

        A number that a mask declares says nothing of an input that declares it, too.
        """
        declared = (dim for mask in masks for dim in mask.shape or ())
        opened = frozenset(dim for dim in declared if isinstance(dim, int) and dim != 1)
        self.shapes = ProvedShapes(model, nonempty=True, opened=opened)
        self._masks = masks
        self._solved: dict[int, Dim] = {}
        self.places = self.shapes.places
        self._followed = dict.fromkeys(self.places, True)
        self._sources: dict[ir.Value, frozenset[ir.Value]] = {}
        # Equations, and whether one of the sizes may be 1 where they differ.
        self._pairs: dict[_Pair, bool] = {}
        self.read = _read(model.graph)
        for node in model.graph:
            self._note_sources(node)
            if node in self.read:
                self._note(node)
        self._solve()

    def dims(self, value: ir.Value) -> Dims | None:
        """Return the sizes of a value in the unknowns that stand for all equal ones."""
        dims = self.shapes.dims(value)
        return None if dims is None else tuple(map(self._rooted, dims))

    def follow(self, value: ir.Value) -> bool:
        """Return whether the sizes of a value follow from those of inputs, whatever these are.

        They do in any run that has no size of 0.
        """
        dims = self.shapes.dims(value)
        return dims is not None and all(map(self._is_sound, dims))

    def _is_sound(self, dim: Dim) -> bool:
        for unknown in dim[1]:
            how, parts = self.recipe(unknown)
            if unknown in self.places:
                continue
            if not parts or not all(map(self._is_sound, parts)):
                return False
            if how == "Min" and not any(self.same((1, (unknown,)), part) for part in parts):
                return False
        return True

    def recipe(self, unknown: int) -> tuple[str, tuple[Dim, ...]]:
        """Return the operator and the sizes that one is worked out from; none if it is not."""
        match self.shapes.unknowns.key(unknown):
            case ("fit", *parts):
                return "Max", tuple(parts)
            case ("quotient", total, part):
                return "Div", (total, part)
            case ("floats", count):
                return "Min", (count, known(_COUNTED_BY_FLOATS))
            case ("Slice", (1, (whole,)), (0, ()), count, 1) if self.shapes.unknowns.key(
                whole
            ) == ("floats", count):
                return self.recipe(whole)
            # Some of the first places: 1 only where one is asked for.
            # An end that is no size is an element of an input, (value, index).
            case ("Slice", whole, (0, ()), (int(), _) as end, 1) if bool(whole[1]) != bool(
                end[1]
            ):
                count = whole[0] if end[1] else end[0]
                return ("Min", (whole, end)) if count > 1 and end[0] > 0 else ("", ())
        return "", ()

    def same(self, one: Dim, other: Dim) -> bool:
        """Return whether two sizes count the same."""
        return self._rooted(one) == self._rooted(other)

    def sources(self, value: ir.Value) -> frozenset[ir.Value]:
        """Return the inputs whose numbers a value depends on."""
        if value.is_graph_input():
            return frozenset([value])
        return self._sources.get(value, frozenset())

    def _note_sources(self, node: ir.Node) -> None:
        found = frozenset[ir.Value]()
        if node.domain or node.op_type not in _SIZES_ONLY:
            read = (value for value in (*node.inputs, *captures(node)) if value is not None)
            found = found.union(*map(self.sources, read))
        for value in node.outputs:
            self._sources[value] = found

    # Equations

    def _note(self, node: ir.Node) -> None:
        """Note which sizes are the same where a node runs; malformed nodes none."""
        for sizes, made in self.shapes.met.get(node, ()):
            self._equate(sizes, made)
        inputs = [None if value is None else self.shapes.dims(value) for value in node.inputs]
        result = self.shapes.dims(node.outputs[0]) if node.outputs else None
        kind, first = node.op_type if not node.domain else "", [*inputs, None][0]
        with contextlib.suppress(Refusal, IndexError):
            if (node.domain, node.op_type) in ATTENTIONS:
                self._note_attention(node, inputs)
            elif kind == "Softmax":
                self._note_masks(node)
            elif not first or not result:
                return
            elif kind in _RESHAPES:
                product = self.shapes.unknowns.product
                self._equate((product(first), product(result)), may_be_1=False)

    def _equate(
        self, sizes: Iterable[Dim], made: Dim | None = None, may_be_1: bool = True
    ) -> None:
        """Take sizes for equal, and for what is made of them; of those but 1 that follow."""
        followed = sorted(size for size in {*sizes} - {known(1)} if self._is_followed(size))
        if made is not None and followed:
            followed.append(made)
        for pair in itertools.pairwise(followed):
            self._pairs[pair] = self._pairs.get(pair, True) and may_be_1

    def _note_attention(self, node: ir.Node, inputs: list[Dims | None]) -> None:
        """Note what a kernel of attention demands; masks may be broadcast."""
        table = ATTENTIONS[node.domain, node.op_type]
        query, key, value = (inputs[i] for i in table.keys)
        if not query or not key or not value:
            return
        self._equate((query[0], key[0], value[0]))
        self._equate((key[-2], value[-2]))
        for i, mask in enumerate(inputs):
            is_count = i == table.counted
            if is_count and mask and len(mask) == 1:
                mask = self._counted_mask(node.inputs[i])
            if not (is_count or i in table.masks) or not mask or len(mask) < 2:
                continue
            if is_count or len(mask) == 4:
                self._equate((mask[0], query[0]))
            if not is_count or len(mask) > 2:
                self._equate((mask[-2], query[-2]))
            self._equate((mask[-1], key[-2]))
            if not is_count and (read := node.inputs[i]) is not None:
                self._note_mask_below(read, (query[0], key[-2]), -1)

    def _counted_mask(self, counts: ir.Value | None) -> Dims | None:
        """Return the sizes of the one mask that the number of keys in each row depends on."""
        sources = self.sources(counts) if counts is not None else frozenset()
        masks = [source for source in sources if source in self._masks]
        return self.shapes.dims(masks[0]) if len(sources) == 1 and masks else None

    def _solve(self) -> None:
        while sum(self._unify(*pair, may_be_1) for pair, may_be_1 in self._pairs.items()):
            pass  # each may solve others

    def _note_masks(self, node: ir.Node) -> None:
        """Note the axis that a Softmax is along, and that of each mask that it is made under.

        Such a mask is all that some operand of the scores depends on. Rows are the first axis.
        """
        scores = node.inputs[0]
        dims = None if scores is None else self.shapes.dims(scores)
        if scores is None or not dims or len(self.sources(scores)) < 2:
            return
        axis = int_attribute(node, "axis", -1) % len(dims) - len(dims)
        self._note_mask_below(scores, (dims[0], dims[axis]), axis)

    def _note_mask_below(self, scores: ir.Value, hidden: tuple[Dim, Dim], axis: int) -> None:
        """Note that masks have the rows and keys that they hide, ``axis`` of scores."""
        pending, seen = [scores], set[ir.Value]()
        for value in pending:
            source, *others = self.sources(value) or (None,)
            own = self.shapes.dims(value)
            if source is not None and not others:
                mask = self.shapes.dims(source)
                if source in self._masks and mask and own and -axis <= len(own):
                    if own[axis] != known(1):
                        self._equate((hidden[1], mask[1]))
                        self._equate((hidden[0], mask[0]))
                    continue
            maker = value.producer()
            if maker is None or maker.domain or maker.op_type not in _MASKS:
                continue
            read = [v for v in maker.inputs if v is not None and v not in seen]
            seen.update(read)
            pending += read[: _MAX_FOLLOWED - len(pending)]

    def _is_followed(self, dim: Dim) -> bool:
        """Return whether a size follows from those of inputs; others may be 1 in every run."""
        return all(map(self._follows, dim[1]))

    def _follows(self, unknown: int) -> bool:
        if unknown not in self._followed:
            kind, *parts = self.shapes.unknowns.key(unknown) or ("",)
            how, _ = self.recipe(unknown)
            if kind == "sum":
                found = all(map(self._is_followed, parts))
            elif how == "Max":
                found = any(map(self._is_followed, parts))
            else:
                found = bool(how) and all(map(self._is_followed, self.recipe(unknown)[1]))
            self._followed[unknown] = found
        return self._followed[unknown]

    # Solutions

    def _unify(self, one: Dim, other: Dim, may_be_1: bool) -> bool:
        """Take two sizes for equal; return whether that says what an unknown is."""
        pair = [self._rooted(dim) for dim in (one, other)]
        counts = [collections.Counter(dim[1]) for dim in pair]
        common = counts[0] & counts[1]
        left = [
            (size, tuple((count - common).elements()))
            for (size, _), count in zip(pair, counts, strict=True)
        ]
        (total, others), (count, unknowns) = sorted(left, key=lambda d: (len(d[1]) == 1, d[1]))
        if len(unknowns) != 1 or not count or total % count or len(others) > 1:
            return False
        if may_be_1 and not others:
            return False
        self._solved[unknowns[0]] = total // count, others
        return True

    def _rooted(self, dim: Dim) -> Dim:
        count, unknowns = dim
        while any(unknown in self._solved for unknown in unknowns):
            solved = [self._solved.get(unknown, (1, (unknown,))) for unknown in unknowns]
            count *= math.prod(size for size, _ in solved)
            unknowns = tuple(each for _, many in solved for each in many)
        return count, tuple(sorted(unknowns))


def _read(graph: ir.Graph) -> set[ir.Node]:
    """Return the nodes that outputs depend on: others may be dropped before they run."""
    values, found = set(graph.outputs), set[ir.Node]()
    for node in reversed(graph):
        if not values.isdisjoint(node.outputs):
            found.add(node)
            values.update(v for v in (*node.inputs, *captures(node)) if v is not None)
    return found
