# SPDX-License-Identifier: MIT
"""Computes values of a graph on numbers, with onnx's reference implementation.

For the small subgraphs that make masks and positions from shapes and an attention mask: what
they compute says more than how an exporter spelled it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx.reference.ops
import onnx_ir as ir
from numpy.typing import NDArray

from rewrite_rules.graph.parameters import constant
from rewrite_rules.remarks import Refusal
from rewrite_rules.shapes.dimensions import Shape, Unknowns, known
from rewrite_rules.shapes.node_facts import Facts, Integers, Site, sliced
from rewrite_rules.shapes.operator_shapes import output_shapes
from rewrite_rules.shapes.proved_shapes import ProvedShapes

Array = NDArray[Any]

_MAX_ELEMENTS = 1 << 22
# Shapes and positions are shorter; larger arrays are data.
_MAX_NUMBERS = 256
# Nodes behind one another.
_MAX_DEPTH = 12


class CannotEvaluate(Exception):
    """A node that has no value to compute here: another operator, too large, malformed."""


def evaluate(node: ir.Node, opset: int, arrays: Sequence[Array | None]) -> tuple[Array, ...]:
    """Compute a node of the default domain; None stands for an absent input.

    Raises:
        CannotEvaluate: If it is not evaluated here.
    """
    if node.domain or node.op_type not in _OPERATORS:
        raise CannotEvaluate(f"{node.op_type} is not evaluated")
    if any(attribute.is_ref() for attribute in node.attributes.values()):
        raise CannotEvaluate(f"an attribute of {node.op_type} is a reference")
    pairs = zip(node.inputs, arrays, strict=True)
    given = {value: a for value, a in pairs if value is not None and a is not None}
    site = Site(node, ArrayFacts(given), opset)
    _check_size(site, arrays)
    try:
        if node.op_type == "Slice":
            outputs = [_sliced(site, given[site.input(0)])]
        else:
            with np.errstate(all="ignore"):
                outputs = _kernel(node, opset).run(*arrays)
    except Exception as error:  # of any kind: shapes and types may be malformed
        raise CannotEvaluate(f"{type(error).__name__}: {error}") from error
    return tuple(map(np.asarray, outputs))


def array_of(value: ir.Value, facts: ProvedShapes) -> Array:
    """Return what a value of a graph holds.

    Raises:
        CannotEvaluate: If it is not known, or depends on what is not evaluated here.
    """
    found: dict[ir.Value, Array] = {}

    def look(value: ir.Value, depth: int) -> Array:
        if value not in found:
            found[value] = compute(value, depth)
        return found[value]

    def compute(value: ir.Value, depth: int) -> Array:
        tensor, node = constant(value), value.producer()
        if tensor is not None:
            return np.array(tensor.numpy())  # its file must not stay mapped
        if node is None or node.graph is None or not depth:
            raise CannotEvaluate(f"{value.name!r} is not known, or depends on too much")
        integers = facts.integers(value)
        if integers is not None and integers.constants is not None:
            return np.array(integers.constants, np.int64).reshape(integers.shape)
        read = [None if v is None else look(v, depth - 1) for v in node.inputs]
        return evaluate(node, facts.opset(node), read)[value.index() or 0]

    return look(value, _MAX_DEPTH)


def _kernel(node: ir.Node, opset: int) -> Any:
    proto = onnx.NodeProto(op_type=node.op_type)
    proto.input.extend("" if value is None else "x" for value in node.inputs)
    proto.output.extend("y" for _ in node.outputs)
    for attribute in node.attributes.values():
        proto.attribute.append(ir.serde.serialize_attribute(attribute))
    kernel = onnx.reference.ops.load_op("", node.op_type, opset)
    return kernel(proto, {"log": lambda *_: None, "opsets": {"": opset}, "new_ops": None})


class ArrayFacts(Facts):
    """What is known of a node's inputs whose arrays are."""

    def __init__(self, arrays: Mapping[ir.Value, Array]) -> None:
        self.unknowns = Unknowns()
        self._arrays = arrays

    def shape(self, value: ir.Value) -> Shape:
        return tuple(map(known, self._arrays[value].shape))

    def integers(self, value: ir.Value) -> Integers | None:
        array = self._arrays[value]
        if array.size > _MAX_NUMBERS or not np.issubdtype(array.dtype, np.number):
            return None
        numbers = np.ceil(array) if array.dtype.kind == "f" else array
        return Integers(tuple(known(int(n)) for n in numbers.reshape(-1)), array.shape)


def _sliced(site: Site, array: Array) -> Array:
    """Slice as onnxruntime does; onnx's reference takes ends as Python does."""
    for start, end, axis, step in zip(*site.slices(), strict=True):
        assert start is not None and end is not None  # every input is known here
        array = array.take(sliced(array.shape[axis], start[0], end[0], step), axis)
    return array


def _check_size(site: Site, arrays: Sequence[Array | None]) -> None:
    """Refuse what would make a large array."""
    node = site.node
    try:
        if node.op_type == "Range":  # of fractions, too
            start, limit, delta = (float(array.item()) for array in map(np.asarray, arrays))
            sizes = [abs((limit - start) / delta)]
        else:
            shapes = output_shapes(site)
            known_shapes = (shape for shape in shapes if isinstance(shape, tuple))
            sizes = [math.prod(dim[0] for dim in shape) for shape in known_shapes]
    except (Refusal, ArithmeticError, IndexError, ValueError) as error:
        raise CannotEvaluate(f"{node.op_type}: {error}") from error
    if max(sizes, default=0) > _MAX_ELEMENTS:
        raise CannotEvaluate(f"{node.op_type} would make {max(sizes):.0f} elements")


# Operators that are evaluated.
_OPERATORS = frozenset({
    "Abs", "Add", "And", "ArgMax", "ArgMin", "Cast", "CastLike", "Ceil", "Clip", "Concat",
    "ConstantOfShape", "Cos", "CumSum", "Div", "Einsum", "Equal", "Exp", "Expand", "Flatten",
    "Floor", "Gather", "GatherElements", "GatherND", "Greater", "GreaterOrEqual", "Identity",
    "IsInf", "IsNaN", "Less", "LessOrEqual", "Log", "MatMul", "Max", "Min", "Mod", "Mul",
    "Neg", "NonZero", "Not", "OneHot", "Or", "Pow", "Range", "Reciprocal", "ReduceMax",
    "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum", "Relu", "Reshape", "Round",
    "ScatterElements", "ScatterND", "Shape", "Sign", "Sin", "Size", "Slice", "Split", "Sqrt",
    "Squeeze", "Sub", "Sum", "Tile", "Transpose", "Trilu", "Unsqueeze", "Where", "Xor",
})  # fmt: skip
