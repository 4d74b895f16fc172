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

import dataclasses
import functools
import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from rewrite_rules.graph.nodes import label, subgraphs
from rewrite_rules.graph.parameters import axis_of, check_payload, constant
from rewrite_rules.remarks import Refusal
from rewrite_rules.shapes import node_facts
from rewrite_rules.shapes.dimensions import Dim, Shape, Unknowns, known
from rewrite_rules.shapes.evaluator import CannotEvaluate, NodeEvaluator
from rewrite_rules.shapes.operator_shapes import output_shapes
from rewrite_rules.trim_padding.length_steps import LengthSteps
from rewrite_rules.trim_padding.token_axes import (
    BATCH,
    MIXED_ROWS,
    UNFIT,
    Axes,
    Axis,
    Runs,
    Sequence,
    Sizes,
    check_rows,
    sequences_of,
)

Array = NDArray[Any]
Mask = NDArray[np.bool_]
# Constants up to this size take part in evaluation; longer ones are weights and tables.
_MAX_CONSTANT = 1 << 16
_MAX_STAND_IN = 1 << 22
_MAX_INTEGERS = 64
# exp(-1000) is 0 in every float type, also after other scores of ordinary size were added.
_LOW = -1000.0


@dataclasses.dataclass(frozen=True)
class Tokens:
    """A value that depends on what is fed, or a constant too large to evaluate.

    Without axes it is the same in both runs. ``exact``: it is the same at every position that
    both runs have, and not only at the real ones.
    """

    axes: Axes | None
    exact: bool = True


@dataclasses.dataclass(frozen=True, eq=False)
class Evaluated:
    """A value whose numbers are known in every run; ``counted``: they count the length."""

    arrays: tuple[Array, ...]
    counted: bool = False


Value = Tokens | Evaluated


@dataclasses.dataclass(frozen=True, eq=False)
class Choice:
    """One position for each row, chosen by an input ``[batch, sequence]``; taken to be real.

    ``steps``: nodes from it to an ArgMax or ArgMin over the sequence, and which input of each
    comes from the one before. The others are constants.
    """

    source: ir.Value
    steps: list[tuple[ir.Node, int]]


# The axes of all outputs, of each, or numbers.
Rule = Callable[["Site"], Axes | list[Axes] | Evaluated]


class Stopped(Refusal):
    """The walk ended at a node, with ``nodes_before`` before it."""

    def __init__(self, text: str, nodes_before: int) -> None:
        super().__init__(text)
        self.nodes_before = nodes_before


class TokenFlow:
    """The walk.

    Attributes:
        values: What is known of each value that was met.
        masked_by: Nodes that leave padded positions out, by the mask.
        choices: What has to choose real positions: where it does not, nothing may be cut.
        steps: Lengths at which the model computes otherwise.
        unpackable: Why other numbers at padded positions, or fewer rows, would show; or empty.
    """

    def __init__(
        self,
        model: ir.Model,
        inputs: Mapping[ir.Value, Value],
        runs: Runs,
        rules: Mapping[tuple[str, str], Rule],
    ) -> None:
        """Walk over the model; :class:`Stopped` where real positions may depend on padding."""
        self.runs = runs
        self.opset = model.opset_imports.get("", 0)
        self.values: dict[ir.Value, Value] = dict(inputs)
        self.masked_by: list[ir.Node] = []
        self.choices: list[Choice] = []
        self.steps = LengthSteps(runs)
        self.unpackable = ""
        self._rules = rules
        self._functions = {identifier[:2] for identifier in model.functions}
        self._evaluator = NodeEvaluator()
        self._compared: dict[ir.Value, Tokens] = {}
        for i, node in enumerate(model.graph):
            try:
                outputs = self._outputs(node)
            except Refusal as refusal:
                raise Stopped(f"{node.op_type} {label(node)!r} {refusal}", i) from None
            self.values.update(zip(node.outputs, outputs, strict=False))

    def value(self, value: ir.Value) -> Value:
        """Return what is known of a value; refused if nothing is."""
        found = self.values.get(value)
        if found is None:
            tensor = constant(value)
            if tensor is None:
                raise Refusal(f"reads {value.name!r}, which is not computed before it")
            found = self.values[value] = self._constant(tensor)
        return found

    def tokens(self, value: ir.Value) -> Tokens:
        """Return a value as rules look at it; an evaluated one's numbers are compared."""
        found = self.value(value)
        if isinstance(found, Tokens):
            return found
        if value not in self._compared:
            axes = tuple(map(self.runs.axis, self.sizes(found) or ()))
            exact = _same_where_real(found.arrays, axes, self.runs)
            if exact is None:
                raise Refusal(f"reads {value.name!r}, which changes with the padding")
            self._compared[value] = Tokens(flagged(found.arrays, axes, self.runs), exact)
        return self._compared[value]

    def sizes(self, value: Value | None) -> list[Sizes] | None:
        """Return the size of each axis in every run; None where they are not known."""
        if isinstance(value, Evaluated):
            if len({array.ndim for array in value.arrays}) != 1:
                raise Refusal(UNFIT)
            return list(zip(*(array.shape for array in value.arrays), strict=True))
        return (
            None if value is None or value.axes is None else [*map(self.runs.size, value.axes)]
        )

    def _constant(self, tensor: ir.TensorProtocol) -> Value:
        numeric = tensor.dtype not in (ir.DataType.STRING, ir.DataType.UNDEFINED)
        if tensor.size <= _MAX_CONSTANT and numeric and tensor.dtype.bitwidth >= 8:
            check_payload(tensor, f"constant {tensor.name!r}")
            array = self._evaluator.intern(tensor.numpy())
            return Evaluated((array,) * len(self.runs))
        return Tokens(_static_axes(ir.Shape(tensor.shape.numpy())))

    def _outputs(self, node: ir.Node) -> list[Value]:
        if node.op_type == "Constant" and node.domain == "":
            return []  # looked at where it is needed
        inputs = [None if value is None else self.value(value) for value in node.inputs]
        if any(map(self._reads_sequence, subgraphs(node))):
            raise Refusal("reads the sequence inside of a subgraph")
        if not any(isinstance(value, Tokens) for value in inputs):
            try:
                return self._evaluate(node, inputs)
            except CannotEvaluate:
                pass
        try:
            return self._by_rule(node)
        except Refusal:
            if any(map(self._changes, inputs)):
                raise
            # What goes in is the same in both runs, and so is what comes out.
            return [Tokens(_static_axes(out.shape or None)) for out in node.outputs]

    def _by_rule(self, node: ir.Node) -> list[Value]:
        if (node.domain, node.op_type) in self._functions:
            raise Refusal("is a function of the model: inline it")
        rule = self._rules.get((node.domain, node.op_type))
        if rule is None:
            raise Refusal("is not known to work token by token")
        site = Site(node, self)
        found = rule(site)
        if isinstance(found, Evaluated):
            return [found]
        each = found if isinstance(found, list) else [found] * len(node.outputs)
        for axes in each:
            check_rows(axes)
        return [Tokens(axes, site.exact) for axes in each]

    def _evaluate(self, node: ir.Node, inputs: Collection[Value | None]) -> list[Value]:
        arrays = [
            v.arrays if isinstance(v, Evaluated) else (None,) * len(self.runs) for v in inputs
        ]
        runs = zip(*arrays, strict=True) if arrays else [()] * len(self.runs)
        results = [self._evaluator.run(node, self.opset, each) for each in runs]
        found = [*zip(*results, strict=True)]
        given = [v if isinstance(v, Evaluated) else None for v in inputs]
        numbers = [None if v is None else v.arrays for v in given]
        flags = [v is not None and v.counted for v in given]
        counted = self.steps.counts(node, numbers, flags, found)
        return [Evaluated(each, counted) for each in found]

    def _changes(self, value: Value | None) -> bool:
        """Whether a value may differ between the two runs of a pair."""
        if not isinstance(value, Evaluated):
            return value is not None and bool(sequences_of(*(value.axes or ())))
        pairs = zip(value.arrays[::2], value.arrays[1::2], strict=True)
        return any(one is not other and not np.array_equal(one, other) for one, other in pairs)

    def _reads_sequence(self, graph: ir.Graph) -> bool:
        return any(
            self._changes(self.values.get(value))
            for node in graph.all_nodes()
            for value in node.inputs
            if value is not None
        )


class _RunFacts(node_facts.Facts):
    """What :mod:`rewrite_rules.shapes` asks: what is the same in some of the runs."""

    def __init__(self, flow: TokenFlow, runs: Collection[int]) -> None:
        self.unknowns = Unknowns()
        self._flow = flow
        self._runs = runs

    def shape(self, value: ir.Value) -> Shape:
        sizes = self._flow.sizes(self._flow.value(value))
        if sizes is None:
            return self.unknowns.fresh()
        return tuple(self._same(size) or self.unknowns.fresh_dim() for size in sizes)

    def integers(self, value: ir.Value) -> node_facts.Integers | None:
        found = self._flow.value(value)
        if not isinstance(found, Evaluated):
            return None
        shapes = {array.shape for array in found.arrays}
        first = found.arrays[0]
        if first.dtype.kind not in "iu" or first.size > _MAX_INTEGERS or len(shapes) != 1:
            return None
        numbers = zip(*(array.reshape(-1).tolist() for array in found.arrays), strict=True)
        return node_facts.Integers(tuple(map(self._same, numbers)), shapes.pop())

    def _same(self, sizes: Sizes) -> Dim | None:
        first, *others = {sizes[run] for run in self._runs}
        return None if others else known(first)


class Site(node_facts.Site):
    """A node as the rules see it; ``exact``: whether all tokens that it looked at are."""

    def __init__(self, node: ir.Node, flow: TokenFlow) -> None:
        super().__init__(node, _RunFacts(flow, range(len(flow.runs))), flow.opset)
        self.flow = flow
        self.runs = flow.runs
        self.exact = True

    def tokens(self, index: int = 0) -> Axes:
        """Return the axes of an input; refused if they are not known."""
        found = self.flow.tokens(self.input(index))
        if found.axes is None:
            raise Refusal(f"reads {self.input(index).name!r}, whose shape is not known")
        self.exact = self.exact and found.exact
        return found.axes

    def operands(self) -> list[Axes]:
        return [self.tokens(i) for i in range(len(self.node.inputs)) if self.has(i)]

    def evaluated(self, index: int) -> Evaluated | None:
        """Return the numbers of an input, if they are known."""
        value = self.flow.value(self.input(index))
        return value if isinstance(value, Evaluated) else None

    def is_zero(self, index: int) -> bool:
        value = self.evaluated(index)
        return value is not None and not any(array.any() for array in value.arrays)

    def stand_in(self, index: int) -> Collection[Array] | None:
        """Return an input's numbers, or others with the same flags; None if too many."""
        value = self.evaluated(index)
        return value.arrays if value else _stand_in(self.tokens(index), self.runs)

    def sizes(self) -> list[list[Sizes]]:
        """Return the sizes that each output's axes have in every run."""
        try:
            found = [
                output_shapes(
                    node_facts.Site(self.node, _RunFacts(self.flow, [run]), self.opset)
                )
                for run in range(len(self.runs))
            ]
            outputs = list(zip(*found, strict=True))
            return [[self._numbers(dims) for dims in zip(*o, strict=True)] for o in outputs]
        except (IndexError, TypeError, ValueError):
            raise Refusal(UNFIT) from None

    def _numbers(self, dims: Iterable[Dim]) -> Sizes:
        sizes = tuple(size for size, unknowns in dims if not unknowns and size >= 0)
        if len(sizes) != len(self.runs):
            raise Refusal(UNFIT)
        return sizes

    def axis(self, default: int) -> int:
        """Return the attribute for an axis of the first input, counted from the front."""
        return axis_of(self.integer("axis", default), len(self.tokens()))

    def counting(self, arrays: Iterable[Array]) -> Evaluated:
        """Return numbers that are sizes of an input."""
        found = tuple(arrays)
        return Evaluated(found, self.flow.steps.varies([found]))

    def mixes(self, axes: Iterable[Axis], flag: str = "", beside: Iterable[Axis] = ()) -> bool:
        """Take down what a node works along; refused unless ``flag`` leaves padding out.

        Along the batch, padded positions of other rows count for those ``beside``.
        """
        axes = tuple(axes)
        found = sequences_of(*axes)
        if not all(flag and getattr(one, flag) for one in found):
            raise Refusal("mixes positions, and no mask leaves padding out")
        left_out = all(flag and getattr(one, flag) for one in sequences_of(*beside))
        if any(BATCH in axis for axis in axes) and not left_out:
            if not self.exact:
                raise Refusal(MIXED_ROWS)
            self.flow.unpackable = "padded positions count for others"
        if found:
            self.flow.masked_by.append(self.node)
            self.exact = False
        return bool(found)


def _static_axes(shape: ir.Shape | None) -> Axes | None:
    if shape is None or not shape.is_static():
        return None
    return tuple((int(n),) if n != 1 else () for n in shape.numpy())


# Which entries are real


def _real_along(axes: Axes, runs: Runs, run: int) -> dict[int, Mask] | None:
    """Return masks of real entries for each sequence factor; None where rows are unknown."""
    factors = [factor for axis in axes for factor in axis]
    sequences = [i for i, factor in enumerate(factors) if isinstance(factor, Sequence)]
    batch = factors.index(BATCH) if BATCH in factors else None
    if sequences and batch is None and set(runs.batch) != {1}:
        return None
    result = {}
    for dim in sequences:
        shape = [1] * len(factors)
        shape[dim] = runs.length[run]
        if batch is not None:
            shape[batch] = runs.batch[run]
        mask = runs.masks[run]
        result[dim] = (mask if batch is None or batch < dim else mask.T).reshape(shape)
    return result


def _all_of(masks: Iterable[Mask]) -> Mask:
    return functools.reduce(operator.and_, masks, np.asarray(True))


def _by_factor(arrays: Collection[Array], axes: Axes, runs: Runs) -> list[Array]:
    """Return the arrays with one dimension per factor."""
    factors = [runs.factor(factor) for axis in axes for factor in axis]
    return [array.reshape([size[run] for size in factors]) for run, array in enumerate(arrays)]


def _same_where_real(arrays: Collection[Array], axes: Axes, runs: Runs) -> bool | None:
    """Compare the two runs of each pair; None if not even what is real is the same."""
    arrays = _by_factor(arrays, axes, runs)
    exact = True
    for run in range(1, len(runs), 2):
        whole, cut = arrays[run - 1][tuple(map(slice, arrays[run].shape))], arrays[run]
        same = (whole == cut) | ((whole != whole) & (cut != cut))
        if not same.all():
            exact = False
            real = _real_along(axes, runs, run)
            if real is None or not (same | ~_all_of(real.values())).all():
                return None
    return exact


def flagged(arrays: Collection[Array], axes: Axes, runs: Runs) -> Axes:
    """Mark the sequence factors along which padded positions are zero, or low."""
    arrays = _by_factor(arrays, axes, runs)
    masks = [_real_along(axes, runs, run) for run in range(len(runs))]
    flags = iter([_flags_of(dim, arrays, masks, runs) for dim in masks[0] or ()])
    return tuple(
        tuple(next(flags, f) if isinstance(f, Sequence) else f for f in axis) for axis in axes
    )


def _flags_of(
    dim: int, arrays: list[Array], masks: list[dict[int, Mask] | None], runs: Runs
) -> Sequence:
    zero = low = True
    for array, real in zip(arrays, masks, strict=True):
        assert real is not None
        others = _all_of(mask for other, mask in real.items() if other != dim)
        padded = array[np.broadcast_to(others & ~real[dim], array.shape)]
        zero = zero and bool((padded == 0).all())
        low = low and bool((padded <= _LOW).all()) and _is_open(array, real)
    same = _is_same_behind(dim, arrays, runs)
    changes = any((array != array.take([-1], dim)).any() for array in arrays[::2])
    return Sequence(zero, low, same, set_by_mask=low or (same and changes and not zero))


def _is_same_behind(dim: int, arrays: list[Array], runs: Runs) -> bool:
    """Whether one value stands at all positions behind the longest row, in both of a pair."""
    for run in range(0, len(runs), 2):
        first = runs.behind(run)
        whole, cut = (
            array.take(range(first, array.shape[dim]), dim) for array in arrays[run : run + 2]
        )
        if not np.array_equal(whole, np.broadcast_to(whole.take([0], dim), whole.shape)):
            return False
        if cut.shape[dim]:
            part = tuple(slice(size) for size in cut.shape)
            if not np.array_equal(whole[part], cut):
                return False
    return True


def _is_open(array: Array, real: dict[int, Mask]) -> bool:
    """Whether every real position sees itself."""
    first, *others = real
    length = array.shape[first]
    itself = _all_of(real.values())
    for dim in others:
        shape = [1] * array.ndim
        shape[first] = shape[dim] = length
        itself = itself & np.eye(length, dtype=np.bool_).reshape(shape)
    return bool((array[np.broadcast_to(itself, array.shape)] > _LOW).all())


def _stand_in(axes: Axes, runs: Runs) -> list[Array] | None:
    """Return numbers with the same flags along each factor; None if that were too much.

    They are 1 at real positions, and unlike each other where nothing is known of padding.
    """
    factors = [factor for axis in axes for factor in axis]
    result = []
    for run in range(len(runs)):
        array = np.ones([runs.factor(factor)[run] for factor in factors])
        if array.size > _MAX_STAND_IN:
            return None
        masks = _real_along(axes, runs, run) or {}
        for dim, factor in enumerate(factors):
            if not isinstance(factor, Sequence):
                continue
            shape = [-1 if i == dim else 1 for i in range(array.ndim)]
            unlike = 1.0 + np.arange(array.shape[dim]).reshape(shape)
            if not factor.uniform:
                array *= 1 + unlike / 1024
            if dim in masks and (factor.zero or factor.low):
                padded = np.broadcast_to(~masks[dim], array.shape)
                low = -np.inf if factor.same else 2 * _LOW * unlike
                array = np.where(padded, 0.0 if factor.zero else low, array)
        result.append(array.reshape([runs.size(axis)[run] for axis in axes]))
    return result
