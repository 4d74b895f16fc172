# SPDX-License-Identifier: MIT
"""What Conv and ConvTranspose compute of constants, and their weights scaled.

Factors and biases are kept in float64 while a model is rewritten, so that a chain of folds
rounds once; weights are multiplied when they are written.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from rewrite_rules.graph.initializers import FreshNames, new_initializer
from rewrite_rules.graph.lazy_tensors import ChunkedTensor
from rewrite_rules.graph.nodes import input_of, label, owner
from rewrite_rules.graph.parameters import int_attribute, ints_attribute, require_constant
from rewrite_rules.remarks import Refusal

Float64 = NDArray[np.float64]
_FLOAT32 = np.finfo(np.float32)
_CHUNK = 1 << 20
# Smaller ones leave subnormal numbers, of few digits, of ordinary weights.
_LEAST_FACTOR = 1e-30
# Greater ones may be added in order to round: x + 12582912 - 12582912 is an integer. A norm
# is no way to write that.
_MAX_OFFSET, MAX_OFFSET_OF_NORM = 256.0, 65536.0
# A sum of thousands is rounded by up to 2**-20 of what is added up: times this, below 1e-5.
_MAX_CANCELLED = 8.0


@dataclasses.dataclass(frozen=True, eq=False)
class Affine:
    """``scale * x + offset``, finite, both of one shape that broadcasts to x.

    ``limit`` is how many times greater than what it is added to the offset may be.
    """

    scale: Float64
    offset: Float64
    limit: float = _MAX_OFFSET

    def __post_init__(self) -> None:
        """Refuse what is not finite, and an offset that rounds."""
        if not (np.isfinite(self.scale).all() and np.isfinite(self.offset).all()):
            raise Refusal("ORP652", "a constant is NaN, infinite, or 0 as a divisor")
        self.check_offset(np.abs(self.scale))

    def check_offset(self, sizes: Float64) -> None:
        """Refuse an offset that rounds numbers of these sizes, those of inputs around 1."""
        greatest = sizes.max(initial=0.0)
        if greatest and np.abs(self.offset).max(initial=0.0) > self.limit * greatest:
            raise Refusal(
                "ORP652",
                f"an offset above {self.limit:.0f} times it rounds what it is added to",
            )


def _check_left(sums: Float64, *parts: Float64) -> None:
    """Refuse sums that are small compared with what was added up."""
    greatest = max(np.abs(part).max() for part in parts)
    if greatest > _MAX_CANCELLED * np.abs(sums).max():
        raise Refusal(
            "ORP652", "less than 1/8 of an offset is left where something cancels it"
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Weight:
    """A weight that stands in the file, and the factors of its channels, in float64.

    It is looked at as ``[groups * rows, columns, taps]``.

    Attributes:
        value: The constant in the file; it may have left the graph.
        graph: Where that was, and where what is derived from it goes.
        groups: Of the convolution.
        rows_are_outputs: Whether rows are output channels and columns are input channels;
            else it is the other way round.
        of_rows: Factors [groups * rows].
        of_columns: Factors [groups, columns].
    """

    value: ir.Value
    graph: ir.Graph
    groups: int
    rows_are_outputs: bool
    of_rows: Float64
    of_columns: Float64

    @property
    def outputs(self) -> int:
        """How many output channels there are."""
        return (self.of_rows if self.rows_are_outputs else self.of_columns).size

    @property
    def inputs(self) -> int:
        """How many input channels there are."""
        return (self.of_columns if self.rows_are_outputs else self.of_rows).size

    def times(self, outputs: Float64 | None = None, inputs: Float64 | None = None) -> Weight:
        """Return the weight with its output and input channels multiplied, [M] and [C]."""
        rows, columns = (outputs, inputs) if self.rows_are_outputs else (inputs, outputs)
        of_rows = self.of_rows if rows is None else self.of_rows * rows
        of_columns = self.of_columns
        if columns is not None:
            of_columns = of_columns * columns.reshape(of_columns.shape)
        return dataclasses.replace(self, of_rows=of_rows, of_columns=of_columns)

    def pieces(self) -> Iterator[tuple[slice, NDArray[np.intp], Float64]]:
        """Yield rows, their groups, and the scaled weight in float64."""
        tensor = self.value.const_value
        assert tensor is not None
        stored = tensor.numpy().reshape(len(self.of_rows), self.of_columns.shape[1], -1)
        step = max(1, _CHUNK // max(1, stored[0].size))
        groups = np.arange(len(stored)) // (len(stored) // self.groups)
        for start in range(0, len(stored), step):
            rows = slice(start, start + step)
            factors = self.of_rows[rows, None] * self.of_columns[groups[rows]]
            yield rows, groups[rows], stored[rows] * factors[:, :, None]

    def sums(self, offsets: Float64, *, magnitudes: bool = False) -> Float64:
        """Return what a constant in each input channel, [C], adds to each output, [M].

        ``magnitudes``: of the weight's magnitudes, which do not cancel.
        """
        result = np.zeros(
            self.of_rows.shape if self.rows_are_outputs else self.of_columns.shape
        )
        for rows, groups, piece in self.pieces():
            with np.errstate(invalid="ignore"):
                taps = (np.abs(piece) if magnitudes else piece).sum(axis=2)
            if self.rows_are_outputs:
                of_columns = offsets.reshape(self.of_columns.shape)[groups]
                result[rows] = (taps * of_columns).sum(axis=1)
            else:
                np.add.at(result, groups, taps * offsets[rows, None])
        return result.reshape(-1)

    def check(self) -> Float64:
        """Return the sum of the magnitudes behind each output channel, [M].

        Refuses factors that leave the range of float32, above or below.
        """
        sums = self.sums(np.ones(self.inputs), magnitudes=True)
        factors = np.abs(np.concatenate([self.of_rows, self.of_columns.reshape(-1)]))
        if not np.all(sums <= _FLOAT32.max):
            raise Refusal(
                "ORP652", f"folded, weight {self.value.name!r} overflows or is not a number"
            )
        # Single channels may be as small: networks have some that do nothing.
        vanishes = 0 < sums.max() < _FLOAT32.tiny
        if vanishes or np.any((factors > 0) & (factors < _LEAST_FACTOR)):
            raise Refusal(
                "ORP652", f"folded, weight {self.value.name!r} is too small for float32"
            )
        return sums


@dataclasses.dataclass(frozen=True, eq=False)
class Linear:
    """A node that computes ``x * weight + bias``.

    Attributes:
        node: The node.
        weight: Its weight.
        bias: Of the output channels, [M], which are its second axis.
        rank: Of the output.
    """

    node: ir.Node
    weight: Weight
    bias: Float64
    rank: int

    def behind(self, affine: Affine) -> Linear:
        """Return what computes ``affine`` of this, [M]."""
        weight = self.weight.times(outputs=affine.scale)
        affine.check_offset(weight.check())
        scaled = self.bias * affine.scale
        bias = scaled + affine.offset
        _check_left(bias, scaled, affine.offset)
        return self._checked(weight, bias)

    def in_front(self, affine: Affine) -> Linear:
        """Return what computes the same of x as this of ``affine`` of x, [C]."""
        bias, weight = self.bias, self.weight.times(inputs=affine.scale)
        if affine.offset.any():
            if may_read_padding(self.node):
                raise Refusal(
                    "ORP654", "padding would be read instead of an offset in front of it"
                )
            sizes = self.weight.sums(np.abs(affine.offset), magnitudes=True)
            bias = bias + self.weight.sums(affine.offset)
            # Where x is 0; and where it cancels the offset, which was exact before.
            for left in (bias, self.bias):
                _check_left(left, self.bias, sizes)
        weight.check()
        return self._checked(weight, bias)

    def _checked(self, weight: Weight, bias: Float64) -> Linear:
        if not np.all(np.abs(bias) <= _FLOAT32.max):
            raise Refusal("ORP652", f"folded, the bias of {label(self.node)!r} leaves float32")
        return dataclasses.replace(self, weight=weight, bias=bias)


class Linears:
    """Reads and writes the linear nodes of one run over one model."""

    def __init__(self, model: ir.Model) -> None:
        self._names = FreshNames(model)
        self._weights: dict[ir.Value, Weight] = {}
        self._biases: dict[ir.Value, Float64] = {}

    def read(self, node: ir.Node) -> Linear:
        """Return what a node computes.

        Refuses a weight or bias that a run can change, is no float32, or does not fit.
        """
        weight = self._weight(node)
        rank = len(shape_of(input_of(node, 1)))
        return Linear(node, weight, self._bias(input_of(node, 2), weight.outputs), rank)

    def write(self, op: Any, linear: Linear, x: ir.Value | None = None) -> ir.Value:
        """Emit the node, on another input if one is given."""
        node, weight = linear.node, linear.weight
        inputs = [node.inputs[0] if x is None else x, self.new_weight(weight)]
        if linear.bias.any():
            inputs.append(self._new_bias(linear))
        made = getattr(op, node.op_type)(*inputs, **node.attributes, _name=node.name)
        return like(node.outputs[0], made)

    def _weight(self, node: ir.Node) -> Weight:
        value, tensor = require_constant(input_of(node, 1), "weight")
        if value in self._weights:
            return self._weights[value]
        shape = tuple(tensor.shape.numpy())
        if tensor.dtype != ir.DataType.FLOAT:
            kind = tensor.dtype.name.lower()
            raise Refusal("ORP653", f"weight {value.name!r} is {kind}: float32 folds")
        groups = int_attribute(node, "group", 1)
        if not math.prod(shape) or len(shape) < 3 or groups < 1 or shape[0] % groups:
            raise Refusal(
                "ORP653", f"weight {value.name!r} of shape {list(shape)} does not fit"
            )
        graph = owner(value)
        assert isinstance(graph, ir.Graph)
        return Weight(
            value,
            graph,
            groups,
            node.op_type != "ConvTranspose",
            np.ones(shape[0]),
            np.ones((groups, shape[1])),
        )

    def _bias(self, value: ir.Value | None, outputs: int) -> Float64:
        if value is None:
            return np.zeros(outputs)
        value, tensor = require_constant(value, "bias")
        if value in self._biases:
            return self._biases[value]
        shape = tuple(tensor.shape.numpy())
        if tensor.dtype != ir.DataType.FLOAT or shape != (outputs,):
            raise Refusal("ORP653", f"bias {value.name!r} of shape {list(shape)} does not fit")
        return tensor.numpy().astype(np.float64)

    def new_weight(self, weight: Weight, shape: tuple[int, ...] | None = None) -> ir.Value:
        """Register the scaled weight; in another shape, if one is given."""
        name = self._names.take(f"{weight.value.name}.folded")

        def rounded() -> Iterator[NDArray[np.float32]]:
            return (piece.astype(np.float32) for *_, piece in weight.pieces())

        shape = shape or shape_of(weight.value)
        made = _register(weight.graph, ChunkedTensor(rounded, ir.DataType.FLOAT, shape, name))
        self._weights[made] = weight
        return made

    def _new_bias(self, linear: Linear) -> ir.Value:
        name = f"{linear.weight.value.name}.bias"
        made = self.new_constant(linear.weight.graph, name, linear.bias)
        self._biases[made] = linear.bias
        return made

    def new_constant(self, graph: ir.Graph, name: str, array: Float64) -> ir.Value:
        """Register a float32 constant."""
        tensor = ir.Tensor(array.astype(np.float32), name=self._names.take(name))
        return _register(graph, tensor)

    def new_unsigned(self, graph: ir.Graph, tensor: ir.TensorProtocol) -> ir.Value:
        """Register an int8 constant, 128 more, as uint8."""
        name = self._names.take(f"{tensor.name}.unsigned")

        def raised() -> Iterator[NDArray[np.uint8]]:
            yield tensor.numpy().view(np.uint8) ^ np.uint8(128)

        shape = tuple(tensor.shape.numpy())
        return _register(graph, ChunkedTensor(raised, ir.DataType.UINT8, shape, name))


def like(value: ir.Value, made: ir.Value) -> ir.Value:
    """Return what was emitted, of the type and shape of a value."""
    made.type, made.shape = value.type, value.shape
    return made


def _register(graph: ir.Graph, tensor: ir.TensorProtocol) -> ir.Value:
    """Make an initializer; none is shared, as what reads it may be folded once more."""
    made = new_initializer(graph, tensor)
    made.type, made.shape = ir.TensorType(tensor.dtype), ir.Shape(tensor.shape.numpy())
    return made


def may_read_padding(node: ir.Node) -> bool:
    """Whether a convolution may read zeros around its input."""
    if node.op_type != "Conv":
        return True
    auto = node.attributes.get_string("auto_pad", "NOTSET")
    if auto == "VALID":
        return False
    if auto == "NOTSET":
        return any(ints_attribute(node, "pads") or ())
    # With a kernel of one element, no stride makes SAME_UPPER and SAME_LOWER pad.
    return math.prod(shape_of(node.inputs[1])[2:]) != 1


def shape_of(value: ir.Value | None) -> tuple[int, ...]:
    """Return the shape of a weight; refuse what a run can change."""
    _, tensor = require_constant(value, "weight")
    return tuple(tensor.shape.numpy())
