# SPDX-License-Identifier: MIT
"""Proves that what a model computes at real positions does not depend on padding behind them.

One walk over the graph compares every value in two runs: rows with padding behind all of them,
and the same rows without. Each value is one of two things:

- :class:`Evaluated`: computed from shapes, constants and the attention mask alone. Its numbers
  are worked out in every run, and compared where they meet tokens.
- :class:`Tokens`: depends on what is fed. Its axes are known as factors; by the rules of
  :mod:`.operator_rules` its numbers at real positions are the same in both runs.

What no rule covers is refused, with the node that stood in the way.
"""

from __future__ import annotations

__all__ = ["Evaluated", "Site", "Stopped", "TokenFlow", "Tokens", "Value"]

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from rewrite_rules.graph.attributes import axis_of, int_attribute
from rewrite_rules.graph.constants import check_payload, constant
from rewrite_rules.graph.nodes import label, subgraphs
from rewrite_rules.graph.refusal import Refusal
from rewrite_rules.masks.node_evaluator import CannotEvaluate, NodeEvaluator
from rewrite_rules.trim_padding.token_axes import (
    BATCH,
    Axes,
    Axis,
    Runs,
    Sequence,
    Sizes,
    flat_sequences,
    sequences_of,
)

Array = NDArray[Any]
# Constants up to this size take part in evaluation; longer ones are weights and tables.
_MAX_CONSTANT = 1 << 16
_MAX_STAND_IN = 1 << 22
# exp(-1000) is 0 in every float type, also after other scores of ordinary size were added.
_LOW = -1000.0


@dataclasses.dataclass(frozen=True)
class Tokens:
    """A value that depends on what is fed, or a constant too large to evaluate.

    Attributes:
        axes: Its axes; None where they are not known, and the value the same in both runs.
        exact: Whether it is the same at every position that both runs have, and not only at
            the real ones.
    """

    axes: Axes | None
    exact: bool = True

    @property
    def has_sequence(self) -> bool:
        """Whether an axis holds the sequence."""
        return self.axes is not None and bool(flat_sequences(self.axes))


@dataclasses.dataclass(frozen=True, eq=False)
class Evaluated:
    """A value whose numbers are known.

    Attributes:
        arrays: The numbers in every run.
    """

    arrays: tuple[Array, ...]


Value = Tokens | Evaluated
Rule = Callable[["Site"], "list[Value]"]


class Stopped(Refusal):
    """The walk ended at a node.

    Attributes:
        nodes_before: How many nodes come before it.
    """

    def __init__(self, text: str, nodes_before: int) -> None:
        super().__init__(text)
        self.nodes_before = nodes_before


class TokenFlow:
    """The walk.

    Attributes:
        runs: What is compared.
        masked_by: Nodes that leave padded positions out, by the mask.
        index_limits: Graph inputs -> the length of the shortest table that they index.
    """

    def __init__(
        self, model: ir.Model, inputs: Mapping[ir.Value, Value], runs: Runs, rules: Rules
    ) -> None:
        """Walk over the model.

        Args:
            model: Sorted.
            inputs: What its inputs are.
            runs: The runs to compare.
            rules: Domain and operator -> rule.

        Raises:
            Stopped: If real positions may depend on padding; it names the node.
        """
        self.runs = runs
        self.masked_by: list[ir.Node] = []
        self.index_limits: dict[ir.Value, int] = {}
        self._rules = rules
        self._opset = model.opset_imports.get("", 0)
        self._functions = {identifier[:2] for identifier in model.functions}
        self._evaluator = NodeEvaluator()
        self._values: dict[ir.Value, Value] = dict(inputs)
        self._as_tokens: dict[ir.Value, Tokens] = {}
        for i, node in enumerate(model.graph):
            try:
                outputs = self._outputs(node)
            except Refusal as refusal:
                raise Stopped(f"{node.op_type} {label(node)!r} {refusal}", i) from None
            self._values.update(zip(node.outputs, outputs, strict=False))

    def value(self, value: ir.Value) -> Value:
        """What is known of a value.

        Raises:
            Refusal: If nothing is.
        """
        found = self._values.get(value)
        if found is None:
            tensor = constant(value)
            if tensor is None:
                raise Refusal(f"reads {value.name!r}, which is not computed before it")
            found = self._values[value] = self._constant(tensor)
        return found

    def tokens(self, value: ir.Value) -> Tokens:
        """A value as one that rules look at; the numbers of an evaluated one are compared.

        Raises:
            Refusal: If its numbers at real positions change with the padding.
        """
        found = self.value(value)
        if isinstance(found, Tokens):
            return found
        result = self._as_tokens.get(value)
        if result is None:
            result = self._as_tokens[value] = self.compared(found, f"{value.name!r}")
        return result

    def alias(self, new: ir.Value, value: ir.Value) -> None:
        """Take down that a new value stands for another."""
        self._values[new] = self.value(value)

    def compared(self, value: Evaluated, name: str) -> Tokens:
        """Compare the numbers of all pairs of runs.

        Raises:
            Refusal: If those at real positions differ.
        """
        axes = self._axes_of(value, name)
        axes = _with_flags(value, axes, self.runs)
        exact = True
        for run in range(0, len(self.runs), 2):
            whole, cut = value.arrays[run : run + 2]
            whole = _expanded(whole, axes, self.runs, run)
            cut = _expanded(cut, axes, self.runs, run + 1)
            whole = whole[tuple(slice(size) for size in cut.shape)]
            same = (whole == cut) | ((whole != whole) & (cut != cut))
            if same.all():
                continue
            exact = False
            real = _real(axes, self.runs, run + 1)
            if (
                real is None
                or not np.broadcast_to(same, same.shape)[
                    np.broadcast_to(real, same.shape)
                ].all()
            ):
                raise Refusal(f"reads {name}, which changes with the padding")
        return Tokens(axes, exact)

    def sizes(self, value: ir.Value) -> list[Sizes] | None:
        """The size of each axis in every run; None where they are not known."""
        found = self._values.get(value)
        if isinstance(found, Tokens):
            return None if found.axes is None else list(map(self.runs.size, found.axes))
        if found is None or len({array.ndim for array in found.arrays}) != 1:
            return None
        return list(zip(*(array.shape for array in found.arrays), strict=True))

    def _axes_of(self, value: Evaluated, name: str) -> Axes:
        if len({array.ndim for array in value.arrays}) != 1:
            raise Refusal(f"reads {name}, whose sizes do not follow from the length")
        result: list[Axis] = []
        for sizes in zip(*(array.shape for array in value.arrays), strict=True):
            axis = self.runs.axis(sizes)
            if axis is None:
                raise Refusal(f"reads {name}, whose sizes do not follow from the length")
            result.append(axis)
        return tuple(result)

    def _constant(self, tensor: ir.TensorProtocol) -> Value:
        numeric = tensor.dtype not in (ir.DataType.STRING, ir.DataType.UNDEFINED)
        if tensor.size <= _MAX_CONSTANT and numeric and tensor.dtype.bitwidth >= 8:
            check_payload(tensor, f"constant {tensor.name!r}")
            array = self._evaluator.intern(tensor.numpy())
            return Evaluated((array,) * len(self.runs))
        return Tokens(tuple((int(n),) if n != 1 else () for n in tensor.shape.numpy()))

    def _outputs(self, node: ir.Node) -> list[Value]:
        if node.op_type == "Constant" and node.domain == "":
            return []  # looked at where it is needed
        known = [None if value is None else self.value(value) for value in node.inputs]
        for subgraph in subgraphs(node):
            if self._reads_sequence(subgraph):
                raise Refusal("reads the sequence inside of a subgraph")
        if all(value is None or isinstance(value, Evaluated) for value in known):
            try:
                return list(self._evaluate(node, known))
            except CannotEvaluate:
                pass
        site = Site(node, self)
        rule = self._rules.get((node.domain, node.op_type))
        changing = [value for value in known if value is not None and self._changes(value)]
        try:
            if (node.domain, node.op_type) in self._functions:
                raise Refusal("is a function of the model: inline it")
            if rule is None:
                raise Refusal("is not known to work token by token")
            return list(rule(site))
        except Refusal:
            if changing:
                raise
            # What goes in is the same in both runs, and so is what comes out.
            return [Tokens(self._annotated(output)) for output in node.outputs]

    def _evaluate(self, node: ir.Node, known: list[Value | None]) -> list[Evaluated]:
        results = []
        for run in range(len(self.runs)):
            arrays = [v.arrays[run] if isinstance(v, Evaluated) else None for v in known]
            results.append(self._evaluator.run(node, self._opset, arrays))
        return [Evaluated(arrays) for arrays in zip(*results, strict=True)]

    def _changes(self, value: Value) -> bool:
        """Whether a value may differ between the two runs of a pair."""
        if isinstance(value, Tokens):
            return value.has_sequence
        pairs = zip(value.arrays[::2], value.arrays[1::2], strict=True)
        return any(
            one is not other and not (one.shape == other.shape and np.array_equal(one, other))
            for one, other in pairs
        )

    def _reads_sequence(self, graph: ir.Graph) -> bool:
        inside = {output for node in graph.all_nodes() for output in node.outputs}
        return any(
            self._changes(found)
            for node in graph.all_nodes()
            for value in node.inputs
            if value is not None and value not in inside
            if (found := self._values.get(value)) is not None
        )

    def _annotated(self, value: ir.Value) -> Axes | None:
        """The axes of a value that has no sequence, if its shape is static."""
        if value.shape is None or not value.shape.is_static():
            return None
        return tuple((int(n),) if n != 1 else () for n in value.shape.numpy())


class Site:
    """A node as the rules see it.

    Attributes:
        node: The node.
        flow: What is known of values.
        runs: The runs that are compared.
    """

    def __init__(self, node: ir.Node, flow: TokenFlow) -> None:
        self.node = node
        self.flow = flow
        self.runs = flow.runs
        self.opset: int = flow._opset

    def has(self, index: int) -> bool:
        """Whether an optional input is there."""
        return index < len(self.node.inputs) and self.node.inputs[index] is not None

    def input(self, index: int = 0) -> ir.Value:
        """An input.

        Raises:
            Refusal: If it is missing.
        """
        value = self.node.inputs[index] if index < len(self.node.inputs) else None
        if value is None:
            raise Refusal(f"lacks input {index}")
        return value

    def tokens(self, index: int = 0) -> Tokens:
        """An input as tokens."""
        return self.flow.tokens(self.input(index))

    def axes(self, index: int = 0) -> Axes:
        """The axes of an input.

        Raises:
            Refusal: If they are not known.
        """
        axes = self.tokens(index).axes
        if axes is None:
            raise Refusal(f"reads {self.input(index).name!r}, whose shape is not known")
        return axes

    def evaluated(self, index: int) -> Evaluated | None:
        """The numbers of an input, if they are known."""
        value = self.flow.value(self.input(index))
        return value if isinstance(value, Evaluated) else None

    def numbers(self, index: int, name: str = "") -> list[tuple[int, ...]]:
        """The ints of an input in every run, or those of an attribute of older opsets.

        Raises:
            Refusal: If they depend on what is fed.
        """
        if not self.has(index) and name:
            attribute = self.node.attributes.get(name)
            if attribute is None or attribute.is_ref():
                raise Refusal(f"lacks {name!r}")
            return [tuple(attribute.as_ints())] * len(self.runs)
        value = self.evaluated(index)
        if value is None:
            raise Refusal(f"has sizes that {self.input(index).name!r} gives, which is fed")
        return [tuple(int(n) for n in array.reshape(-1)) for array in value.arrays]

    def constants(self, index: int, name: str = "") -> tuple[int, ...] | None:
        """The ints of an input or attribute that are the same in all runs; None if absent."""
        if not self.has(index) and name not in self.node.attributes:
            return None
        numbers = self.numbers(index, name)
        if len(set(numbers)) != 1:
            raise Refusal("has sizes that do not follow from the length")
        return numbers[0]

    def integer(self, name: str, default: int) -> int:
        """An int attribute."""
        return int_attribute(self.node, name, default)

    def axis(self, default: int, index: int = 0, name: str = "axis") -> int:
        """The attribute for an axis of an input, counted from the front."""
        return axis_of(self.integer(name, default), len(self.axes(index)))

    def masked(self) -> None:
        """Take down that this node leaves padded positions out."""
        self.flow.masked_by.append(self.node)


def _expanded(array: Array, axes: Axes, runs: Runs, run: int) -> Array:
    """One dimension per factor."""
    return array.reshape([runs.factor(factor)[run] for axis in axes for factor in axis])


def _dims(axes: Axes) -> tuple[int | None, list[int]]:
    """Where the batch is and where the sequences are, with one dimension per factor."""
    factors = [factor for axis in axes for factor in axis]
    batch = [i for i, factor in enumerate(factors) if factor == BATCH]
    sequence = [i for i, factor in enumerate(factors) if isinstance(factor, Sequence)]
    return (batch[0] if batch else None), sequence


def _real_along(dim: int, axes: Axes, runs: Runs, run: int) -> NDArray[np.bool_] | None:
    """Which entries of one sequence dimension are real, to be broadcast."""
    batch, _ = _dims(axes)
    mask = runs.masks[run]
    shape = [1] * sum(map(len, axes))
    shape[dim] = mask.shape[1]
    if batch is not None:
        shape[batch] = mask.shape[0]
    elif set(runs.batch) != {1}:
        return None
    along: NDArray[np.bool_] = mask if batch is None or batch < dim else mask.T
    return along.reshape(shape)


def _real(axes: Axes, runs: Runs, run: int) -> NDArray[np.bool_] | None:
    """Which entries are real along every sequence dimension; None where rows can't be told."""
    result: NDArray[np.bool_] = np.ones([1] * sum(map(len, axes)), np.bool_)
    for dim in _dims(axes)[1]:
        along = _real_along(dim, axes, runs, run)
        if along is None:
            return None
        result = result & along
    return result


def _with_flags(value: Evaluated, axes: Axes, runs: Runs) -> Axes:
    """Mark the sequence factors along which padded positions are zero, or low."""
    factors = [factor for axis in axes for factor in axis]
    _, sequence_dims = _dims(axes)
    flags: dict[int, Sequence] = {}
    for dim in sequence_dims:
        zero = low = True
        for run, array in enumerate(value.arrays):
            along = _real_along(dim, axes, runs, run)
            if along is None:
                zero = low = False
                break
            others: NDArray[np.bool_] = np.ones([1] * len(factors), np.bool_)
            for other in sequence_dims:
                real = _real_along(other, axes, runs, run)
                if other != dim and real is not None:
                    others = others & real
            expanded = _expanded(array, axes, runs, run)
            padded = expanded[np.broadcast_to(others & ~along, expanded.shape)]
            zero = zero and bool((padded == 0).all())
            low = low and bool((padded <= _LOW).all()) and _is_open(expanded, axes, runs, run)
        flags[dim] = Sequence(zero, low)
    places = iter(range(len(factors)))
    return tuple(tuple(flags.get(next(places), factor) for factor in axis) for axis in axes)


def stand_in(
    axes: Axes,
    runs: Runs,
    run: int,
    is_flagged: Callable[[Sequence], bool],
    ordinary: float,
    padded: float,
) -> Array | None:
    """Return numbers in place of tokens: special ones at padded positions of flagged axes.

    None where they would take too much memory.
    """
    factors = [factor for axis in axes for factor in axis]
    shape = [runs.factor(factor)[run] for factor in factors]
    if math.prod(shape) > _MAX_STAND_IN:
        return None
    result = np.full(shape, ordinary)
    for dim in _dims(axes)[1]:
        factor = factors[dim]
        along = _real_along(dim, axes, runs, run)
        if isinstance(factor, Sequence) and is_flagged(factor) and along is not None:
            result[np.broadcast_to(~along, result.shape)] = padded
    return result.reshape([runs.size(axis)[run] for axis in axes])


def _is_open(expanded: Array, axes: Axes, runs: Runs, run: int) -> bool:
    """Whether every real position sees itself."""
    real = _real(axes, runs, run)
    if real is None:
        return False
    sequence_dims = _dims(axes)[1]
    length = runs.length[run]
    same: NDArray[np.bool_] = np.ones([1] * expanded.ndim, np.bool_)
    for dim in sequence_dims[1:]:
        shape = [1] * expanded.ndim
        shape[sequence_dims[0]] = shape[dim] = length
        same = same & np.eye(length, dtype=np.bool_).reshape(shape)
    chosen = np.broadcast_to(real & same, expanded.shape)
    return bool((expanded[chosen] > _LOW).all())


Rules = Mapping[tuple[str, str], Rule]


def has_sequence(axis: Axis) -> bool:
    """Whether an axis holds the sequence."""
    return bool(sequences_of(axis))
