# SPDX-License-Identifier: MIT
"""Computes values of a graph on numbers, with onnx's reference implementation.

For the small subgraphs that make masks and positions from shapes and an attention mask: what
they compute says more than how an exporter spelled it. Equal nodes on equal arrays are
computed once: exporters repeat these subgraphs in every layer.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx.reference.ops
import onnx_ir as ir
from numpy.typing import NDArray

from rewrite_rules.graph.parameters import constant, contents
from rewrite_rules.remarks import Refusal
from rewrite_rules.shapes.dimensions import Shape, Unknowns, known
from rewrite_rules.shapes.node_facts import Facts, Integers, Site, sliced
from rewrite_rules.shapes.operator_shapes import output_shapes
from rewrite_rules.shapes.proved_shapes import ProvedShapes

Array = NDArray[Any]

_MAX_ELEMENTS = 1 << 22
# Arrays up to this size are compared by their contents, others by identity.
_MAX_INTERNED = 256
# Nodes behind one another.
_MAX_DEPTH = 12


class CannotEvaluate(Exception):
    """A node that has no value to compute here: another operator, too large, malformed."""


class NodeEvaluator:
    """Evaluates nodes; keeps what it has computed."""

    def __init__(self) -> None:
        self._kernels: dict[Hashable, Any] = {}
        self._results: dict[Hashable, tuple[Array, ...]] = {}
        self._interned: dict[Hashable, Array] = {}
        self._kept: list[Array] = []  # arrays known by identity have to stay alive

    def intern(self, array: Array) -> Array:
        """Return the one array that stands for all small arrays like this one."""
        if array.size > _MAX_INTERNED or array.dtype.hasobject:
            return array
        key = (array.dtype.str, array.shape, array.tobytes())
        return self._interned.setdefault(key, array)

    def numbers(self, tensor: ir.TensorProtocol) -> Array:
        """Return the numbers of a constant, copied: its file must not stay mapped."""
        return self.intern(np.array(tensor.numpy()))

    def run(
        self, node: ir.Node, opset: int, arrays: Sequence[Array | None]
    ) -> tuple[Array, ...]:
        """Compute a node of the default domain; None stands for an absent input."""
        if node.domain or node.op_type not in _OPERATORS:
            raise CannotEvaluate(f"{node.op_type} is not evaluated")
        signature = _signature(node, opset, arrays)
        key = (signature, tuple(id(array) for array in arrays))
        found = self._results.get(key)
        if found is None:
            pairs = zip(node.inputs, arrays, strict=True)
            given = {value: a for value, a in pairs if value is not None and a is not None}
            site = Site(node, _ArrayFacts(given), opset)
            _check_size(site, arrays)
            try:
                if node.op_type == "Slice":
                    outputs = [_sliced(site, given[site.input(0)])]
                else:
                    kernel = self._kernels.get(signature)
                    if kernel is None:
                        kernel = self._kernels[signature] = _kernel(node, opset)
                    with np.errstate(all="ignore"):
                        outputs = kernel.run(*arrays)
            except Exception as error:  # of any kind: shapes and types may be malformed
                raise CannotEvaluate(f"{type(error).__name__}: {error}") from error
            found = tuple(self.intern(np.asarray(output)) for output in outputs)
            self._results[key] = found
            self._kept += [array for array in arrays if array is not None]
        return found

    def array(self, value: ir.Value, facts: ProvedShapes, depth: int = _MAX_DEPTH) -> Array:
        """Return what a value of a graph holds, or raise CannotEvaluate."""
        tensor, node = constant(value), value.producer()
        if tensor is not None:
            return self.numbers(tensor)
        if node is None or node.graph is None or not depth:
            raise CannotEvaluate(f"{value.name!r} is not known, or depends on too much")
        integers = facts.integers(value)
        if integers is not None and integers.constants is not None:
            return self.intern(np.array(integers.constants, np.int64).reshape(integers.shape))
        read = [None if v is None else self.array(v, facts, depth - 1) for v in node.inputs]
        return self.run(node, facts.opset(node), read)[value.index() or 0]


def _signature(node: ir.Node, opset: int, arrays: Sequence[Array | None]) -> Hashable:
    attributes = []
    for name, attribute in node.attributes.items():
        if attribute.is_ref():
            raise CannotEvaluate(f"attribute {name!r} is a reference")
        value = attribute.value
        if attribute.type is ir.AttributeType.TENSOR:
            value = contents(value)
        elif attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS):
            raise CannotEvaluate(f"{node.op_type} has a subgraph")
        attributes.append((name, tuple(value) if isinstance(value, list) else value))
    present = tuple(array is not None for array in arrays)
    return node.op_type, opset, tuple(sorted(attributes)), present, len(node.outputs)


def _kernel(node: ir.Node, opset: int) -> Any:
    proto = onnx.NodeProto(op_type=node.op_type)
    proto.input.extend("" if value is None else "x" for value in node.inputs)
    proto.output.extend("y" for _ in node.outputs)
    for attribute in node.attributes.values():
        proto.attribute.append(ir.serde.serialize_attribute(attribute))
    kernel = onnx.reference.ops.load_op("", node.op_type, opset)
    return kernel(proto, {"log": lambda *_: None, "opsets": {"": opset}, "new_ops": None})


class _ArrayFacts(Facts):
    """What is known of a node's inputs whose arrays are."""

    def __init__(self, arrays: Mapping[ir.Value, Array]) -> None:
        self.unknowns = Unknowns()
        self._arrays = arrays

    def shape(self, value: ir.Value) -> Shape:
        return tuple(map(known, self._arrays[value].shape))

    def integers(self, value: ir.Value) -> Integers | None:
        array = self._arrays[value]
        if array.size > _MAX_INTERNED or not np.issubdtype(array.dtype, np.number):
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
