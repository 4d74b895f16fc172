# SPDX-License-Identifier: MIT
"""Computes nodes of standard operators on numbers, with onnx's reference implementation.

For the small subgraphs that make masks and positions from shapes and an attention mask. Equal
nodes on equal arrays are computed once: exporters repeat these subgraphs in every layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import onnx
import onnx.reference.ops
import onnx_ir as ir
from numpy.typing import NDArray

from rewrite_rules.graph.attributes import int_attribute

Array = NDArray[Any]

_MAX_ELEMENTS = 1 << 22
# Arrays up to this size are compared by their contents, others by identity.
_MAX_INTERNED = 256


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
        if array.size > _MAX_INTERNED:
            return array
        key = (array.dtype.str, array.shape, array.tobytes())
        return self._interned.setdefault(key, array)

    def run(
        self, node: ir.Node, opset: int, arrays: Sequence[Array | None]
    ) -> tuple[Array, ...]:
        """Compute the outputs of a node.

        Args:
            node: A node of the default domain, without subgraphs.
            opset: Version of the default domain.
            arrays: One for each input; None for an absent optional input.

        Raises:
            CannotEvaluate: If the node cannot be computed or would take too much memory.
        """
        if node.domain or node.op_type not in _OPERATORS:
            raise CannotEvaluate(f"{node.op_type} is not evaluated")
        signature = _signature(node, opset, arrays)
        key = (signature, tuple(id(array) for array in arrays))
        found = self._results.get(key)
        if found is None:
            _check_size(node, arrays)
            try:
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


def _signature(node: ir.Node, opset: int, arrays: Sequence[Array | None]) -> Hashable:
    attributes = []
    for name, attribute in node.attributes.items():
        if attribute.is_ref():
            raise CannotEvaluate(f"attribute {name!r} is a reference")
        value = attribute.value
        if attribute.type is ir.AttributeType.TENSOR:
            value = (str(value.dtype), tuple(value.shape.numpy()), value.tobytes())
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
    return kernel(proto, {"log": _no_log, "opsets": {"": opset}, "new_ops": None})


def _no_log(*_: object) -> None:
    """Report nothing."""


def _check_size(node: ir.Node, arrays: Sequence[Array | None]) -> None:
    """Refuse what would make a large array, by an estimate from above."""
    there = [array for array in arrays if array is not None]
    estimate = _OUTPUT_SIZES.get(node.op_type, _broadcast_size)
    try:
        size = estimate(node, there)
    except (IndexError, ValueError, OverflowError, ZeroDivisionError) as error:
        raise CannotEvaluate(f"{node.op_type}: {error}") from error
    if size > _MAX_ELEMENTS:
        raise CannotEvaluate(f"{node.op_type} would make {size:.0f} elements")


def _broadcast_size(_: ir.Node, arrays: Sequence[Array]) -> float:
    return _size_of([array.shape for array in arrays])


def _size_of(shapes: Sequence[Sequence[int]]) -> float:
    rank = max(map(len, shapes), default=0)
    return math.prod(
        float(max(shape[axis - rank] for shape in shapes if rank - axis <= len(shape)))
        for axis in range(rank)
    )


def _gather_size(node: ir.Node, arrays: Sequence[Array]) -> float:
    data, indices = arrays
    axis = int_attribute(node, "axis", 0)
    return float(data.size / data.shape[axis] * indices.size)


def _gather_nd_size(_: ir.Node, arrays: Sequence[Array]) -> float:
    data, indices = arrays
    depth = indices.shape[-1]
    return float(indices.size / depth * math.prod(data.shape[depth:]))


def _range_size(start: float, limit: float, delta: float) -> float:
    return abs((limit - start) / delta)


# Operators that are evaluated, and how many elements one makes, from above.
_Size = Callable[[ir.Node, Sequence[Array]], float]
_OUTPUT_SIZES: dict[str, _Size] = {
    **dict.fromkeys(
        (
            *("ArgMax", "ArgMin", "Concat", "CumSum", "Flatten", "GatherElements", "NonZero"),
            *("ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum", "Reshape"),
            *("ScatterElements", "ScatterND", "Shape", "Size", "Slice", "Split", "Squeeze"),
            *("Transpose", "Trilu", "Unsqueeze"),
        ),
        lambda _, arrays: sum(array.size for array in arrays),
    ),
    "ConstantOfShape": lambda _, arrays: math.prod(map(float, arrays[0])),
    "Expand": lambda _, arrays: _size_of([arrays[0].shape, [int(n) for n in arrays[1]]]),
    "Gather": _gather_size,
    "GatherND": _gather_nd_size,
    "MatMul": lambda _, arrays: math.prod(float(array.size) for array in arrays),
    "OneHot": lambda _, arrays: arrays[0].size * float(arrays[1].item()),
    "Range": lambda _, arrays: _range_size(*(float(array.item()) for array in arrays)),
    "Tile": lambda _, arrays: arrays[0].size * math.prod(map(float, arrays[1])),
}
_OPERATORS = frozenset(_OUTPUT_SIZES) | {
    "Abs", "Add", "And", "Cast", "CastLike", "Ceil", "Clip", "Cos", "Div", "Equal", "Exp",
    "Floor", "Greater", "GreaterOrEqual", "Identity", "IsInf", "IsNaN", "Less", "LessOrEqual",
    "Log", "Max", "Min", "Mod", "Mul", "Neg", "Not", "Or", "Pow", "Reciprocal", "Relu",
    "Round", "Sign", "Sin", "Sqrt", "Sub", "Sum", "Where", "Xor",
}  # fmt: skip
