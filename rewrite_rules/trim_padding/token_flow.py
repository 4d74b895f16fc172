# SPDX-License-Identifier: MIT
"""Proves that what a model computes at real positions does not depend on padding behind them.

One walk over the graph compares every value in two runs: rows with padding behind all of them,
and the same rows without. Each value is one of two things:

- :class:`Side`: computed from shapes, constants and the attention mask alone. The rewritten
  graph computes it from the whole inputs, and cuts it where it meets tokens. What it shows at
  padded positions is asked there of each batch.
- :class:`Tokens`: depends on what is fed. Its axes are proved; by the rules of
  :mod:`.operator_rules` its numbers at real positions are the same in both runs.

What no rule covers is refused, with the node that stood in the way.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from rewrite_rules.facts.axis_roles import AxisRoles
from rewrite_rules.facts.operator_table import NORMS, SKIP_NORMS, per_token
from rewrite_rules.graph.nodes import label, subgraphs, walk
from rewrite_rules.graph.parameters import axis_of, check_payload, constant
from rewrite_rules.remarks import Refusal
from rewrite_rules.shapes import node_facts
from rewrite_rules.shapes.dimensions import Dims
from rewrite_rules.shapes.evaluator import CannotEvaluate, evaluate
from rewrite_rules.shapes.operator_shapes import REDUCTIONS
from rewrite_rules.trim_padding.questions import LOW, How
from rewrite_rules.trim_padding.sample_masks import SampleMasks, are_finite
from rewrite_rules.trim_padding.token_axes import (
    BATCH,
    MIXED_ROWS,
    UNFIT,
    Axes,
    Axis,
    Sequence,
    Sizes,
    changed,
    check_rows,
    sequences_of,
)

# Constants up to this size take part in evaluation; longer ones are weights and tables.
_MAX_CONSTANT = 1 << 16

_NORMS = NORMS | SKIP_NORMS
_COUNTS = REDUCTIONS | {"CumSum"}
RESHAPES = frozenset({"Expand", "Flatten", "Reshape", "Squeeze", "Unsqueeze"})


@dataclasses.dataclass(frozen=True)
class Tokens:
    """A value that depends on what is fed, or a constant too large to evaluate.

    Without axes it is the same in both runs. ``exact``: it is the same at every position that
    both runs have, and not only at the real ones.
    """

    axes: Axes | None
    exact: bool = True


@dataclasses.dataclass(frozen=True, eq=False)
class Side:
    """A value computed beside the tokens, and its numbers under each of the sample masks.

    ``varies``: it depends on the mask or on sizes; else it is a constant.
    """

    arrays: tuple[NDArray[Any], ...]
    varies: bool = True


Value = Tokens | Side
# The axes of all outputs, or of each, or their numbers.
Rule = Callable[["Site"], Axes | Side | list[Axes | Side]]


class Picks(enum.Enum):
    """What an index of positions holds."""

    FLAT = enum.auto()  # places in the mask, in row-major order
    PAIRS = enum.auto()  # a row and a place in it, along the last axis
    IN_ROW = enum.auto()  # a place in the row that it stands in, ``[batch, ...]``


class Stopped(Refusal):
    """The walk ended at a node, with ``nodes_before`` before it."""

    def __init__(self, code: str, text: str, nodes_before: int) -> None:
        super().__init__(code, text)
        self.nodes_before = nodes_before


class TokenFlow:
    """The walk.

    Attributes:
        mask: The input ``[batch, sequence]`` that says which positions are padding.
        values: What is known of each value that was met.
        masked_by: Nodes that leave padded positions out, by the mask.
        hides: Whether one of them does because the model puts what is far below there.
        counts: Whether the model compares the mask, or counts the positions that are real.
        read: Side values that meet tokens, by node and input, with what they have to show, and
            how they are read.
        picked: Side values that pick positions, which have to be real, by node and input.
        opened: What is added to scores or hides some, by node and input, as in ``read``. It
            has to leave each position to see itself, and may not show what is hidden.
        zeroed: What is made of inputs and added up, in the same way: 0 at padding.
        keeps_one: Whether one position of the padding stays, to be among what is reduced.
        asks_finite: Whether what is finite under the sample masks is taken to be, and asked to
            be; else nothing rests on that.
        unpackable: Why other numbers at padded positions, or fewer rows, would show; or empty.
    """

    def __init__(
        self,
        model: ir.Model,
        mask: ir.Value,
        rules: Mapping[tuple[str, str], Rule],
        asks_finite: bool = False,
    ) -> None:
        """Walk over the model; :class:`Stopped` where real positions may depend on padding."""
        self.mask, self.roles = mask, AxisRoles(model, [mask])
        self.asks_finite = asks_finite
        rows, length = self.roles.dims(mask) or ()
        self.sizes = Sizes(rows, length)
        if not self.sizes.fits:
            raise Stopped(
                "ORP504",
                f"{mask.name!r} has no length of its own: export with a dynamic one",
                0,
            )
        self.samples = SampleMasks.usual(one_row=not rows[1])
        self.opset = model.opset_imports.get("", 0)
        self.values = {value: self._input(value) for value in model.graph.inputs}
        self.masked_by: list[ir.Node] = []
        self.hides = False
        self.counts = False
        self.read: dict[tuple[ir.Node, int], tuple[Axes, How]] = {}
        self.opened: dict[tuple[ir.Node, int], tuple[Axes, How]] = {}
        self.zeroed: dict[tuple[ir.Node, int], tuple[Axes, How]] = {}
        self.keeps_one = False
        self.picked: dict[tuple[ir.Node, int], Picks] = {}
        self.unpackable = ""
        self._rules = rules
        self._functions = {identifier[:2] for identifier in model.functions}
        self._flagged: dict[tuple[ir.Value, How], Tokens] = {}
        for i, node in enumerate(model.graph):
            if node not in self.roles.read:
                continue
            try:
                outputs = self._outputs(node)
            except Refusal as refusal:
                raise Stopped(
                    refusal.code, f"{node.op_type} {label(node)!r} {refusal}", i
                ) from None
            self.values.update(zip(node.outputs, outputs, strict=False))
        if not self.masked_by:
            raise Stopped("ORP501", f"{mask.name!r} masks nothing", 0)

    def _input(self, value: ir.Value) -> Value:
        if value is self.mask:
            assert value.dtype is not None
            dtype = value.dtype.numpy()
            return Side(tuple(array.astype(dtype) for array in self.samples.masks))
        dims = self.roles.dims(value)
        if dims is None or not isinstance(value.type, ir.TensorType):
            return Tokens(None)
        try:
            return Tokens(tuple(map(self.sizes.axis, dims)))
        except Refusal as refusal:
            raise Stopped(refusal.code, f"input {value.name!r} {refusal}", 0) from None

    def value(self, value: ir.Value) -> Value:
        """Return what is known of a value; refused if nothing is."""
        found = self.values.get(value)
        if found is None:
            tensor = constant(value)
            if tensor is None:
                raise Refusal(
                    "ORP505", f"reads {value.name!r}, which is not computed before it"
                )
            found = self.values[value] = self._constant(tensor)
        return found

    def tokens(self, value: ir.Value, how: How = How.NUMBERS) -> Tokens:
        """Return a value as rules look at it."""
        found = self.value(value)
        if isinstance(found, Tokens):
            return found
        key = value, how
        if key not in self._flagged:
            dims = self.roles.dims(value)
            if dims is None:
                raise Refusal("ORP504", f"reads {value.name!r}, whose shape is not known")
            axes = tuple(map(self.sizes.axis, dims))
            if how is How.COUNT:
                if axes != ((BATCH,),):
                    raise Refusal(
                        "ORP504", f"reads {value.name!r}, which has more than a length per row"
                    )
                axes = (*axes, (Sequence(),))
            seen = self.samples.seen(found.arrays, how)
            axes = self.samples.flagged(seen, axes)
            if found.varies and not self.asks_finite and seen[0].dtype.kind == "f":
                # That it is 0 is asked; what else it is, samples can't know.
                axes = changed(axes, lambda one: dataclasses.replace(one, wild=not one.zero))
            self._flagged[key] = Tokens(axes)
        return self._flagged[key]

    def opens(self, node: ir.Node, index: int, how: How = How.NUMBERS) -> bool:
        """Return whether what is added to scores, or hides some, leaves the order of things.

        Each position sees itself, and what the padding mask hides stays hidden. The graph
        asks, but of the padding mask, of which it asks more.
        """
        value = node.inputs[index]
        assert value is not None
        found, axes = self.value(value), self.tokens(value, how).axes
        if axes is None or any(one.low for one in sequences_of(*axes)):
            return axes is not None
        if not isinstance(found, Side):
            self.opened[node, index] = axes, how
            return True
        if found.varies:
            self.opened[node, index] = axes, how
        return self.samples.is_open(self.samples.seen(found.arrays, how), axes)

    def is_mask(self) -> bool:
        """Return whether zeros of the mask are proved to mean padding.

        It hides scores, or weights rows of tokens: as flags, or with their count. The left
        operand of a product of two inputs does neither.
        """
        assert self.mask.dtype is not None
        others = {value for value, _ in self.roles.places.values()} - {self.mask}
        axes = [self.tokens(value).axes or () for value in others]
        (rows, _) = self.roles.dims(self.mask) or ()
        of_rows = any((BATCH,) in one and sequences_of(*one) for one in axes)
        are_flags = of_rows and not self.mask.dtype.is_floating_point()
        return self.hides or are_flags or (self.counts and (of_rows or not rows[1]))

    def is_constant(self, value: ir.Value) -> bool:
        found = self.value(value)
        return isinstance(found, Side) and not found.varies

    def is_made_of_inputs(self, value: ir.Value, most_axes: int | None = None) -> bool:
        """Whether a value is computed from inputs without any weights, with so few axes."""
        pending = [value]
        for each in pending:
            node, dims = each.producer(), self.roles.dims(each)
            if most_axes is not None and (dims is None or len(dims) > most_axes):
                return False
            if each.is_graph_input() or isinstance(self.value(each), Side):
                continue
            by_element = node is not None and per_token(node) and node.op_type not in _NORMS
            if node is None or not (by_element or node.op_type in RESHAPES):
                return False
            pending += [v for v in node.inputs if v is not None and v not in pending]
        return True

    def is_fed(self, value: ir.Value) -> bool:
        """Whether a value is made of what is fed, element by element, without any weights."""
        return isinstance(self.value(value), Tokens) and self.is_made_of_inputs(value)

    def _constant(self, tensor: ir.TensorProtocol) -> Value:
        numeric = tensor.dtype not in (ir.DataType.STRING, ir.DataType.UNDEFINED)
        if tensor.size <= _MAX_CONSTANT and numeric and tensor.dtype.bitwidth >= 8:
            check_payload(tensor, f"constant {tensor.name!r}")
            array = np.array(tensor.numpy())  # its file must not stay mapped
            return Side((array,) * len(self.samples.masks), varies=False)
        return Tokens(tuple((int(n),) if n != 1 else () for n in tensor.shape.numpy()))

    def _outputs(self, node: ir.Node) -> list[Value]:
        if node.op_type == "Constant" and node.domain == "":
            return []  # looked at where it is needed
        inputs = [None if value is None else self.value(value) for value in node.inputs]
        inside = list(subgraphs(node))
        if inside and (any(map(_changes, inputs)) or any(map(self._reads_sequence, inside))):
            raise Refusal("ORP505", "reads the sequence inside of a subgraph")
        if not any(isinstance(value, Tokens) for value in inputs):
            try:
                return self._evaluate(node, inputs)
            except CannotEvaluate:
                pass
        try:
            return self._by_rule(node)
        except Refusal:
            if any(map(_changes, inputs)):
                raise
            # What goes in is the same in both runs, and so is what comes out.
            return [Tokens(self._fixed_axes(out)) for out in node.outputs]

    def _fixed_axes(self, value: ir.Value) -> Axes | None:
        dims = self.roles.dims(value) if self.roles.follow(value) else None
        axes = None if dims is None else tuple(map(self.sizes.axis, dims))
        return None if axes is None or sequences_of(*axes) else axes

    def _by_rule(self, node: ir.Node) -> list[Value]:
        if (node.domain, node.op_type) in self._functions:
            raise Refusal("ORP505", "is a function of the model: inline it")
        rule = self._rules.get((node.domain, node.op_type))
        if rule is None:
            raise Refusal("ORP503", "is not known to work token by token")
        site = Site(node, self)
        found = rule(site)
        each = found if isinstance(found, list) else [found] * len(node.outputs)
        for axes in each:
            if not isinstance(axes, Side):
                check_rows(axes)
        self.read.update({(node, index): read for index, read in site.read.items()})
        return [one if isinstance(one, Side) else Tokens(one, site.exact) for one in each]

    def _evaluate(self, node: ir.Node, inputs: Collection[Value | None]) -> list[Value]:
        given = [value if isinstance(value, Side) else None for value in inputs]
        absent = (None,) * len(self.samples.masks)
        runs = zip(*(side.arrays if side else absent for side in given), strict=True)
        each = runs if given else [()] * len(absent)
        results = [evaluate(node, self.opset, arrays) for arrays in each]
        varies = any(side is not None and side.varies for side in given)
        if any(value and self.mask in self.roles.sources(value) for value in node.inputs):
            is_flag = any(array.dtype == np.bool_ for array in results[0])
            self.counts |= is_flag or node.op_type in _COUNTS
        found = zip(node.outputs, zip(*results, strict=True), strict=True)
        return [self.side(value, arrays, varies) for value, arrays in found]

    def side(self, value: ir.Value, arrays: Iterable[Any], varies: bool = True) -> Side:
        """Return a value whose numbers are proved not to vary, or do."""
        integers = self.roles.shapes.integers(value)
        return Side(tuple(arrays), varies and (integers is None or integers.constants is None))

    def _reads_sequence(self, graph: ir.Graph) -> bool:
        return any(
            _changes(self.values.get(value))
            for node in walk(graph)
            for value in node.inputs
            if value is not None
        )


def _changes(value: Value | None) -> bool:
    """Whether a value may differ between the two runs."""
    if isinstance(value, Side):
        return value.varies
    return value is not None and bool(sequences_of(*(value.axes or ())))


class Site(node_facts.Site):
    """A node as the rules see it; ``exact``: whether all tokens that it looked at are."""

    def __init__(self, node: ir.Node, flow: TokenFlow) -> None:
        super().__init__(node, flow.roles.shapes, flow.opset)
        self.flow, self.sizes = flow, flow.sizes
        self.exact = True
        self.read: dict[int, tuple[Axes, How]] = {}

    def tokens(self, index: int = 0, how: How = How.NUMBERS) -> Axes:
        """Return the axes of an input; refused if they are not known."""
        value = self.input(index)
        found = self.flow.tokens(value, how)
        if found.axes is None:
            raise Refusal("ORP504", f"reads {value.name!r}, whose shape is not known")
        if isinstance(self.flow.value(value), Side) and not self.flow.is_constant(value):
            self.read[index] = found.axes, how
        self.exact = self.exact and found.exact
        return found.axes

    def operands(self, *read: int) -> list[Axes]:
        """Return the axes of inputs, but of those that are read already."""
        count = len(self.node.inputs)
        return [self.tokens(i) for i in range(count) if i not in read and self.has(i)]

    def fixes(self, *read: int) -> None:
        """Read the other inputs, which serve all tokens alike."""
        self.mixes(axis for axes in self.operands(*read) for axis in axes)

    def beside(self, index: int) -> Sequence:
        """Return what an operand has along axes of the sequence that it lacks."""
        found, value = self.flow.value(self.input(index)), Sequence()
        if not isinstance(found, Side) or found.varies:
            return value
        array = found.arrays[0]
        is_low = array.dtype.kind == "f" and bool((array < LOW).all())
        wild = is_low or not are_finite([array])
        return dataclasses.replace(value, zero=not array.any(), low=is_low, wild=wild)

    def asked_zero(self) -> Axes:
        """Return the axes of the first input; ids and flags are asked to be 0 at padding.

        A model that counts ids counts those of tokens: ``ReduceSum(Equal(input_ids, 32))``.
        """
        axes, value = self.tokens(), self.input(0)
        is_fed = self.flow.is_fed(value) and self.flow.is_made_of_inputs(value, most_axes=2)
        if not is_fed or all(one.zero for one in sequences_of(*axes)):
            return axes
        zeros = changed(axes, lambda _: Sequence(zero=True))
        self.flow.zeroed[self.node, 0] = zeros, How.NUMBERS
        return zeros

    def made(self, output: int = 0) -> Dims:
        """Return the sizes of an output; refused where they do not follow from inputs'."""
        dims = self.flow.roles.dims(self.node.outputs[output])
        if dims is None or not self.flow.roles.follow(self.node.outputs[output]):
            raise Refusal(*UNFIT)
        return dims

    def axis(self, default: int) -> int:
        """Return the attribute for an axis of the first input, counted from the front."""
        return axis_of(self.integer("axis", default), len(self.tokens()))

    def mixes(self, axes: Iterable[Axis], flag: str = "", beside: Iterable[Axis] = ()) -> bool:
        """Take down what a node works along; refused unless ``flag`` leaves padding out.

        Along the batch, padded positions of other rows count for those ``beside``.
        """
        axes = tuple(axes)
        found = sequences_of(*axes)
        # Of two at once, nothing is known where both are at padded positions.
        if len(found) > 1 or not all(flag and getattr(one, flag) for one in found):
            why = self._what_changes_low() or "no mask leaves padding out"
            raise Refusal("ORP503", f"mixes positions, and {why}")
        left_out = all(flag and getattr(one, flag) for one in sequences_of(*beside))
        if any(BATCH in axis for axis in axes) and not left_out:
            if not self.exact:
                raise Refusal(*MIXED_ROWS)
            self.flow.unpackable = "padded positions count for others"
        if found:
            self.flow.masked_by.append(self.node)
            self.flow.hides |= flag == "low"
            self.exact = False
        return bool(found)

    def _what_changes_low(self) -> str:
        """Say which node before this one makes other numbers of what hides padding."""
        pending = [self.input(0)]
        for value in pending:
            node = value.producer()
            if node is None or per_token(node) is None or self._is_low(value):
                continue
            read = [one for one in node.inputs if one is not None and one not in pending]
            if any(map(self._is_low, read)):
                return f"{node.op_type} {label(node)!r} changes the numbers that hide padding"
            pending += read
        return ""

    def _is_low(self, value: ir.Value) -> bool:
        return any(one.low for one in sequences_of(*(self.flow.tokens(value).axes or ())))
