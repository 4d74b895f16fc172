# SPDX-License-Identifier: MIT
"""Nodes that a graph gets: equal ones are made once, as the opset writes them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript import TapeBuilder

from rewrite_rules.graph.initializers import FreshNames

# Opsets before which axes are an attribute; most reductions take them as an input since 18.
_AXES_ARE_INPUTS = {"ReduceSum": 13, "Unsqueeze": 13}
_ASK = frozenset({"And", "Equal", "Greater", "Less", "Not", "Or", "Xor"})


class NewNodes(TapeBuilder):
    """Nodes, and their constants."""

    def __init__(self, names: FreshNames, opset: int) -> None:
        super().__init__()
        self._names, self._opset = names, opset
        self._made: dict[Hashable, Any] = {}

    def op(self, op_type: str, /, *args: ir.Value | None, **kwargs: Any) -> Any:
        key = (op_type, *map(id, args), str(kwargs))
        if key not in self._made:
            made: Any = super().op(op_type, *args, **kwargs)
            self._made[key] = made
            if op_type in _ASK:
                made.type = ir.TensorType(ir.DataType.BOOL)
        return self._made[key]

    def along(self, op_type: str, value: Any, axes: list[int], **attributes: int) -> Any:
        """Return what an operator makes of a value along axes."""
        if self._opset < _AXES_ARE_INPUTS.get(op_type, 18):
            return self.op(op_type, value, axes=axes, **attributes)
        return self.op(op_type, value, self.integers(axes), **attributes)

    def integers(self, numbers: Any) -> ir.Value:
        return self.constant(np.array(numbers, np.int64))

    def constant(self, array: Any) -> ir.Value:
        array = np.asarray(array)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._made:
            name = self._names.take("trim_padding_number")
            self._made[key] = self.initializer(ir.Tensor(array, name=name))
        found: ir.Value = self._made[key]
        return found

    def joined(self, sizes: Sequence[Any]) -> Any:
        """Return sizes, each ``[n]``, one behind the other."""
        return sizes[0] if len(sizes) == 1 else self.Concat(*sizes, axis=0)

    def extreme(self, how: str, *sizes: Any) -> Any:
        """Return the greatest or least of sizes, ``[1]`` each.

        Max and Min are of floats alone before opset 12.
        """
        return self.along(f"Reduce{how}", self.joined(sizes), [0], keepdims=1)

    def always(self, holds: Any) -> Any:
        """Return 1 where booleans are all True, else 0."""
        return self.ReduceMin(self.Cast(holds, to=ir.DataType.INT32), keepdims=0)

    def int64(self, value: Any) -> Any:
        is_int64 = value.dtype is ir.DataType.INT64
        return value if is_int64 else self.Cast(value, to=ir.DataType.INT64)

    def register(self, graph: ir.Graph) -> None:
        """Give a graph the constants."""
        for value in self.initializers:
            graph.register_initializer(value)

    # As questions ask (:class:`.questions.Arrays`)

    def is_bool(self, value: Any) -> bool:
        return value.dtype is ir.DataType.BOOL

    def true(self, value: Any) -> Any:
        return value if self.is_bool(value) else self.Cast(value, to=ir.DataType.BOOL)

    def number(self, like: Any, number: float) -> ir.Value:
        return self.constant(like.dtype.numpy().type(number))

    def spread(self, value: Any, axes: list[int]) -> Any:
        return self.along("Unsqueeze", value, axes) if axes else value

    def turned(self, value: Any) -> Any:
        return self.Transpose(value, perm=[1, 0])

    def row(self, value: Any) -> Any:
        return self.Reshape(value, self.integers([-1]))
