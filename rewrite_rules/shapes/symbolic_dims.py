# SPDX-License-Identifier: MIT
"""Finds out which unknown dimensions are the same as another one.

onnx's shape inference gives a dimension that it cannot work out a symbol of its own
(``unk__7``). A few forms are behind nearly all of them, and each is a product of numbers and
symbols that are known:

    Reshape(x[batch, 9, sequence, 64], [0, 3, -1, 64]) -> [batch, 3, unk__4, 64]
        the number of elements stays: unk__4 = 3 sequence
    Concat(m[batch, sequence], m, m)                   -> [batch, unk__5]
        sizes add up: unk__5 = 3 sequence
    Add(a[batch, unk__4, 64], b[batch, unk__5, 64])    -> [batch, unk__6, 64]
        equal sizes broadcast to themselves: unk__6 = unk__4
        and the same two sizes that may differ always broadcast to the same

With its dimensions named alike, onnxruntime's memory planner finds a buffer of the same size
at once; with unknown ones it searches all free buffers for every node, which takes most of the
start of a large graph.
"""

from __future__ import annotations

__all__ = ["unify_symbolic_dims"]

import collections
from collections.abc import Iterable

import onnx_ir as ir

# A number times symbols, sorted; a symbol that was worked out never stands in one.
_Product = tuple[int, tuple[str, ...]]

# Elementwise operators with numpy's broadcasting over all inputs.
_BROADCASTING = frozenset({
    "Add", "And", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Div", "Equal", "Greater",
    "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Mean", "Min", "Mod", "Mul", "Or", "PRelu",
    "Pow", "Sub", "Sum", "Where", "Xor",
})  # fmt: skip


def unify_symbolic_dims(model: ir.Model) -> None:
    """Name equal dimensions alike in the shapes of the main graph's values.

    Run after shape inference, on a sorted graph. Dimensions that no name is known for keep
    theirs.
    """
    solver = _Solver()
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        solver.see(value)
    for node in model.graph:
        if node.domain == "":
            solver.solve(node)
        for value in node.outputs:
            solver.see(value)
    for node in model.graph:
        for value in node.outputs:
            # The dimensions of an output are called as the user calls them.
            if value.shape is not None and not value.is_graph_output():
                value.shape = ir.Shape(solver.name(dim) for dim in value.shape)


class _Solver:
    """What is known of the symbols met so far."""

    def __init__(self) -> None:
        self._met: set[str] = set()
        self._products: dict[str, _Product] = {}
        self._names: dict[_Product, str] = {}
        self._outcomes: dict[tuple[str, tuple[_Product, ...]], str] = {}

    def see(self, value: ir.Value) -> None:
        """Take the symbols of a value for known from here on."""
        for dim in value.shape or ():
            if isinstance(dim, ir.SymbolicDim) and dim.value is not None:
                self._met.add(dim.value)

    def name(self, dim: int | ir.SymbolicDim) -> int | str | None:
        """Return the number or the one symbol that a dimension is to be called by."""
        if isinstance(dim, int) or dim.value is None or dim.value not in self._products:
            return dim if isinstance(dim, int) else dim.value
        number, symbols = product = self._products[dim.value]
        if not symbols:
            return number
        return symbols[0] if product == (1, symbols[:1]) else self._names[product]

    def solve(self, node: ir.Node) -> None:
        """Work out the symbols that a node's output is the first to have."""
        output = node.outputs[0].shape
        if output is None or all(value is None for value in node.inputs):
            return
        fresh = [index for index, dim in enumerate(output) if self._is_fresh(dim)]
        if not fresh:
            return
        if node.op_type == "Reshape" and len(fresh) == 1:
            self._solve_reshape(node.inputs[0], output, fresh[0])
        elif node.op_type == "Concat" and len(fresh) == 1:
            parts = [self._dim(value, fresh[0] - len(output)) for value in node.inputs]
            self._solve_sum(parts, output[fresh[0]])
        elif node.op_type in _BROADCASTING:
            for index in fresh:
                parts = [self._dim(value, index - len(output)) for value in node.inputs]
                self._solve_broadcast(parts, output[index])

    def _is_fresh(self, dim: int | ir.SymbolicDim) -> bool:
        return (
            isinstance(dim, ir.SymbolicDim)
            and dim.value is not None
            and dim.value not in self._met
        )

    def _product(self, dim: int | ir.SymbolicDim) -> _Product | None:
        if isinstance(dim, int):
            return dim, ()
        if dim.value is None:
            return None
        return self._products.get(dim.value, (1, (dim.value,)))

    def _dim(self, value: ir.Value | None, index_from_end: int) -> _Product | None:
        """A dimension of an input; 1 where numpy's broadcasting would put it."""
        if value is None or value.shape is None:
            return None
        if -index_from_end > len(value.shape):
            return 1, ()
        return self._product(value.shape[index_from_end])

    def _set(self, dim: int | ir.SymbolicDim, product: _Product) -> None:
        assert isinstance(dim, ir.SymbolicDim) and dim.value is not None
        self._names.setdefault(product, dim.value)
        self._products[dim.value] = product

    def _solve_reshape(self, source: ir.Value | None, output: ir.Shape, index: int) -> None:
        if source is None or source.shape is None:
            return
        before = _multiply(self._product(dim) for dim in source.shape)
        others = _multiply(self._product(dim) for i, dim in enumerate(output) if i != index)
        if before is None or others is None or others[0] == 0 or before[0] % others[0]:
            return
        left = collections.Counter(before[1])
        left.subtract(others[1])
        if min(left.values(), default=0) >= 0:
            symbols = tuple(sorted(left.elements()))
            self._set(output[index], (before[0] // others[0], symbols))

    def _solve_sum(self, parts: list[_Product | None], dim: int | ir.SymbolicDim) -> None:
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return
        if len({symbols for _, symbols in known}) == 1:
            self._set(dim, (sum(number for number, _ in known), known[0][1]))
        else:
            self._remember("Concat", known, dim)

    def _solve_broadcast(
        self, parts: list[_Product | None], dim: int | ir.SymbolicDim
    ) -> None:
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return
        # Of equal sizes and ones, the result is that size.
        larger = sorted({part for part in known if part != (1, ())})
        if len(larger) == 1:
            self._set(dim, larger[0])
        else:
            self._remember("broadcast", larger, dim)

    def _remember(self, how: str, parts: list[_Product], dim: int | ir.SymbolicDim) -> None:
        """The same sizes combined in the same way give the same size."""
        assert isinstance(dim, ir.SymbolicDim) and dim.value is not None
        first = self._outcomes.setdefault((how, tuple(sorted(parts))), dim.value)
        if first != dim.value:
            self._set(dim, (1, (first,)))


_MOST_SYMBOLS = 16
_LARGEST = 1 << 62


def _multiply(factors: Iterable[_Product | None]) -> _Product | None:
    number = 1
    symbols: list[str] = []
    for factor in factors:
        if factor is None:
            return None
        number *= factor[0]
        symbols += factor[1]
        # Products of products grow without end.
        if len(symbols) > _MOST_SYMBOLS or number > _LARGEST:
            return None
    return number, tuple(sorted(symbols))
