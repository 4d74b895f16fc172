# SPDX-License-Identifier: MIT
"""Random graphs over every operator whose shapes are proved, built node by node.

Each node is run by onnxruntime as it is drawn, on arrays of the first run: one that fails is
drawn again, so a recipe may be sloppy, and each value's array is known to the next node. The
other runs feed other sizes, 0 and 1 among them, and may fail.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import onnx
from builders.same_numbers import session
from onnx import helper, numpy_helper

from rewrite_rules.shapes import operator_shapes

Array = npt.NDArray
F, I8, B, U8 = np.dtype("f4"), np.dtype("i8"), np.dtype("?"), np.dtype("u1")
MICROSOFT, NCHWC = "com.microsoft", "com.microsoft.nchwc"
_MAX_ELEMENTS = 4096
_MAX_TRIES = 40


class Discarded(Exception):
    """onnxruntime refuses the node, or there is nothing that it could read."""


@dataclasses.dataclass(frozen=True, eq=False)
class Value:
    name: str
    array: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def rank(self) -> int:
        return self.array.ndim


@dataclasses.dataclass(frozen=True)
class RandomModel:
    model: onnx.ModelProto
    values: list[str]  # of the main graph, made by nodes
    runs: list[dict[str, Array]]


class Drawer:
    """Draws the nodes of a graph; those of its subgraphs see its values."""

    def __init__(self, rng: random.Random, opset: int) -> None:
        self.rng = rng
        self.opset = opset
        self.sizes = [1, *rng.sample([2, 3, 4, 5, 6], 3)]
        self.inputs: list[onnx.ValueInfoProto] = []
        self.tensors: dict[str, onnx.TensorProto] = {}
        self.constants: dict[str, Array] = {}
        self.values: list[Value] = []
        self.nodes: list[onnx.NodeProto] = []
        self.made: list[str] = []
        self.count = 0
        self.depth = 0

    # What nodes read

    def pick(self, *choices: object):  # type: ignore[no-untyped-def]
        return self.rng.choice(choices)

    def name(self, stem: str) -> str:
        self.count += 1
        return f"{stem}{self.count}"

    def shape(self, rank: int) -> tuple[int, ...]:
        return tuple(self.rng.choice(self.sizes) for _ in range(rank))

    def any(self, *dtypes: np.dtype, rank: int | None = None, least: int = 0) -> Value:
        """A value of one of these types; one of another rank is reshaped."""
        found = [v for v in self.values if v.array.dtype in dtypes and v.rank < 6]
        if not found:
            raise Discarded("no such value")
        fitting = [v for v in found if rank in (None, v.rank) and v.rank >= least]
        if fitting and self.rng.random() < 0.9:
            recent = fitting[-6:]
            return self.rng.choice(recent if self.rng.random() < 0.7 else fitting)
        return self.of_rank(self.rng.choice(found), least if rank is None else rank)

    def f(self, rank: int | None = None, least: int = 0) -> Value:
        return self.any(F, rank=rank, least=least)

    def i(self, rank: int | None = None, least: int = 0) -> Value:
        return self.any(I8, rank=rank, least=least)

    def of_rank(self, value: Value, rank: int) -> Value:
        if value.rank == rank:
            return value
        if value.rank < rank:
            axes = sorted(self.rng.sample(range(rank), rank - value.rank))
            return self.with_axes("Unsqueeze", value, axes, 13)
        shape = [*value.shape[: rank - 1], -1] if rank else [1]
        reshaped = self.node("Reshape", [value, self.ints(shape)])
        return reshaped if rank else self.node("Squeeze", [reshaped])

    def constant(self, array: npt.ArrayLike, dtype: npt.DTypeLike = None) -> Value:
        name, array = self.name("k"), np.asarray(array, dtype)
        self.constants[name], tensor = array, numpy_helper.from_array(array, name)
        if self.rng.random() < 0.3:
            self.nodes.append(helper.make_node("Constant", [], [name], value=tensor))
        else:
            self.tensors[name] = tensor
        return Value(name, array)

    def ints(self, numbers: npt.ArrayLike, dtype: npt.DTypeLike = np.int64) -> Value:
        """Numbers, computed ones where there are such."""
        array = np.asarray(numbers, dtype)
        same = [v for v in self.values if v.array.dtype == array.dtype]
        same = [v for v in same if np.array_equal(v.array, array) and v.shape == array.shape]
        if same and self.rng.random() < 0.7:
            return self.rng.choice(same)
        return self.constant(array)

    def floats(self, *shape: int, low: float = 0.5) -> Value:
        numbers = np.random.default_rng(self.rng.randrange(99)).uniform(low, 2, shape)
        return self.constant(numbers, np.float32)

    def axis(self, value: Value, more: int = 0) -> int:
        rank = value.rank + more
        return self.rng.randrange(-rank, rank) if rank else 0

    def axes(self, value: Value, more: int = 0) -> list[int]:
        rank = value.rank + more
        chosen = self.rng.sample(range(rank), self.rng.randint(0, rank))
        return [axis - self.pick(0, rank) for axis in chosen]

    def like(self, value: Value) -> Value:
        """Something that broadcasts with a value, or has its shape."""
        fits = [v for v in self.values if v.array.dtype == value.array.dtype]
        fits = [v for v in fits if _broadcast(v, value)]
        if self.rng.random() < 0.8:
            return self.rng.choice(fits)
        shape = [self.pick(1, size) for size in value.shape[self.rng.randint(0, value.rank) :]]
        numbers = np.ones(shape) * self.pick(1, 2, 3)
        return self.constant(numbers.astype(value.array.dtype))

    # Nodes

    def node(
        self,
        op_type: str,
        inputs: Sequence[Value | None],
        outputs: int = 1,
        **attributes: object,
    ) -> Value:
        """Add a node that onnxruntime runs; return its first output."""
        domain, _, op_type = op_type.rpartition(".")
        names = [self.name("v") for _ in range(outputs)]
        read = ["" if value is None else value.name for value in inputs]
        given = {name: value for name, value in attributes.items() if value is not None}
        made = helper.make_node(op_type, read, names, domain=domain, **given)
        arrays = self.run(made, [value for value in inputs if value is not None])
        if any(array.size > _MAX_ELEMENTS for array in arrays):
            raise Discarded("too large")
        self.nodes.append(made)
        results = [Value(*pair) for pair in zip(names, arrays, strict=True)]
        self.values += [value for value in results if isinstance(value.array, np.ndarray)]
        self.made += names
        return results[0]

    def run(self, node: onnx.NodeProto, values: Sequence[Value]) -> list[Array]:
        """Run one node, on what it and its subgraphs read."""
        arrays = self.constants | {v.name: v.array for v in (*self.values, *values)}
        known = {value.name for value in values} & self.constants.keys()
        read = [name for name in _read([node]) if name in arrays and name not in known]
        inputs = [_info(name, arrays[name].dtype, [None] * arrays[name].ndim) for name in read]
        tensors = [numpy_helper.from_array(arrays[name], name) for name in known]
        ends = [onnx.ValueInfoProto(name=name) for name in node.output]
        graph = helper.make_graph([node], "one", inputs, ends, tensors)
        try:
            return session(_model(graph, self.opset)).run(None, {x: arrays[x] for x in read})
        except Exception as error:
            raise Discarded(str(error)) from error

    def with_axes(
        self,
        op_type: str,
        value: Value,
        axes: Sequence[int] | None,
        since: int,
        **more: object,
    ) -> Value:
        """A node whose axes are an input from an opset on, an attribute before."""
        if axes is None:
            return self.node(op_type, [value], **more)
        if self.opset < since:
            return self.node(op_type, [value], axes=list(axes), **more)
        return self.node(op_type, [value, self.ints(list(axes))], **more)

    def draw(self, count: int) -> None:
        """Add so many nodes, and what recipes need beside."""
        for _ in range(count):
            for _ in range(_MAX_TRIES):
                before = len(self.nodes), len(self.values), len(self.made), dict(self.tensors)
                newer = self.opset == _NEWER and self.rng.random() < 0.3
                drawn = [*RECURRENT.values()] if newer else _WEIGHTED
                recipe = self.rng.choice(drawn)
                try:
                    recipe(self)
                    break
                except (Discarded, IndexError, ValueError, ZeroDivisionError):
                    nodes, values, made, self.tensors = before
                    del self.nodes[nodes:], self.values[values:], self.made[made:]

    def readers(self, count: int) -> None:
        """Add nodes that read shapes, which the rewrite is about."""
        for _ in range(count):
            value = self.rng.choice(self.values)
            span = {"start": self.pick(None, -2, 0, 1), "end": self.pick(None, -1, 1, 2, 9)}
            kind = self.pick("Shape", "Shape", "Size")
            if kind == "Size" or self.opset < 15:
                span = {}
            try:
                read = self.node(kind, [value], **span)
                if kind == "Shape" and read.array.size and self.rng.random() < 0.4:
                    where = self.rng.randrange(-read.array.size, read.array.size)
                    self.node("Gather", [read, self.constant(where, np.int64)])
            except Discarded:
                continue

    # Subgraphs

    def subgraph(
        self, draw: Callable[[], list[Value]], inputs: Sequence[object] = ()
    ) -> object:
        """Draw the nodes of a subgraph; what it makes is not seen outside."""
        if self.depth > 1:
            raise Discarded("deep enough")
        outer = self.nodes, self.values, self.made
        self.nodes, self.values, self.made = [], [*self.values], []
        self.depth += 1
        try:
            ends = draw()
            infos = [_info(value.name, value.array.dtype, None) for value in ends]
            return helper.make_graph(self.nodes, self.name("g"), list(inputs), infos), ends
        finally:
            self.depth -= 1
            self.nodes, self.values, self.made = outer

    def body(self, start: int) -> list[Value]:
        """Some nodes; one or two of what they make."""
        first = len(self.values)
        self.draw(self.rng.randint(1, 3))
        self.readers(self.rng.randint(0, 2))
        made = self.values[first:]
        if not made:
            raise Discarded("an empty subgraph")
        return self.rng.sample(made, min(len(made), self.rng.randint(1, 2 + start)))


def _draw_if(g: Drawer) -> None:
    condition = g.rng.choice([v for v in g.values if v.array.dtype == B and v.array.size == 1])
    then_graph, then = g.subgraph(lambda: g.body(0))
    kinds = [value.array.dtype for value in then]

    def otherwise() -> list[Value]:
        g.body(0)
        ends = [g.any(kind) for kind in kinds]
        # An output of a branch is made by a node of it.
        return [g.node("Identity", [end]) for end in ends]

    else_graph, _ = g.subgraph(otherwise)
    g.node("If", [condition], len(then), then_branch=then_graph, else_branch=else_graph)


def _draw_loop(g: Drawer) -> None:
    carried = g.f() if g.rng.random() < 0.7 else g.i()
    step, on = Value(g.name("i"), np.array(0)), Value(g.name("c"), np.array(True))
    inner = Value(g.name("s"), carried.array)
    lie = g.pick(None, None, list(carried.shape))
    inputs = [_info(step.name, I8, []), _info(on.name, B, [])]
    inputs.append(_info(inner.name, carried.array.dtype, lie))

    def ends() -> list[Value]:
        g.values += [step, on, inner, inner]
        found = g.body(1)
        same = g.any(carried.array.dtype)
        return [g.node("Identity", [v]) for v in (on, same, *found)]

    body, found = g.subgraph(ends, inputs)
    trips = g.constant(g.pick(0, 1, 2, 3), np.int64) if g.pick(True, False) else g.i(0)
    if not 0 <= trips.array <= 4:
        raise Discarded("too many trips")
    g.node("Loop", [trips, None, carried], len(found) - 1, body=body)


# Recipes, by operator. What one draws need not be right: onnxruntime decides.


Recipe = Callable[[Drawer], object]


def _unary(kind: np.dtype = F) -> Callable[[str], Recipe]:
    return lambda op_type: lambda g: g.node(op_type, [g.any(kind)])


def _binary(*kinds: np.dtype) -> Callable[[str], Recipe]:
    def draw(op_type: str, g: Drawer) -> None:
        value = g.any(*kinds)
        inputs = [value, g.like(value)]
        g.rng.shuffle(inputs)
        direction = {"direction": "LEFT"} if op_type == "BitShift" else {}
        g.node(op_type, inputs, **direction)

    return lambda op_type: partial(draw, op_type)


def _reduction(op_type: str) -> Recipe:
    since = 13 if op_type == "ReduceSum" else 18

    def draw(g: Drawer) -> None:
        value = g.any(F, F, I8)
        more = {"keepdims": g.pick(None, 0, 1)}
        if g.opset >= since:
            more["noop_with_empty_axes"] = g.pick(None, None, 1)
        g.with_axes(op_type, value, g.pick(None, g.axes(value), g.axes(value)), since, **more)

    return draw


def _window_attributes(g: Drawer, rank: int) -> dict[str, object]:
    given: dict[str, object] = {
        "strides": g.pick(None, [g.pick(1, 2) for _ in range(rank)]),
        "dilations": g.pick(None, None, [g.pick(1, 2) for _ in range(rank)]),
    }
    how = g.pick(None, None, "SAME_UPPER", "SAME_LOWER", "VALID")
    given["auto_pad"] = how
    if how is None:
        given["pads"] = g.pick(None, [g.pick(0, 1) for _ in range(2 * rank)])
    return given


def _conv(kind: np.dtype = F) -> Callable[[str], Recipe]:
    def draw(op_type: str, g: Drawer) -> None:
        rank = g.pick(1, 2)
        value = g.f(rank + 2) if kind == F else g.any(U8, rank=rank + 2)
        kernel = [g.pick(1, 2, 3) for _ in range(rank)]
        group = g.pick(1, 1, max(value.shape[1], 1))
        sizes = [g.pick(1, 2) * group, value.shape[1] // group, *kernel]
        if op_type == "ConvTranspose":
            sizes[:2] = [value.shape[1], g.pick(1, 2)]
        weight = g.floats(*sizes) if kind == F else g.constant(np.ones(sizes, np.uint8))
        given = _window_attributes(g, rank) | {"group": group if group > 1 else None}
        if op_type == "ConvTranspose" and g.pick(True, False):
            given["output_padding"] = [g.pick(0, 1) for _ in range(rank)]
        if op_type == "QLinearConv":
            one, zero = g.constant(1, np.float32), g.constant(0, np.uint8)
            g.node(op_type, [value, one, zero, weight, one, zero, one, zero], **given)
        else:
            g.node(op_type, [value, weight], **given)

    return lambda op_type: partial(draw, op_type)


def _pool(op_type: str) -> Recipe:
    def draw(g: Drawer) -> None:
        rank = g.pick(1, 2)
        given = _window_attributes(g, rank)
        if op_type == "LpPool" or (op_type == "AveragePool" and g.opset < 19):
            given["dilations"] = None
        if op_type != "LpPool" or g.opset >= 18:
            given["ceil_mode"] = g.pick(None, 1)
        outputs = g.pick(1, 2) if op_type == "MaxPool" else 1
        kernel = [g.pick(1, 2, 3) for _ in range(rank)]
        g.node(op_type, [g.f(rank + 2)], outputs, kernel_shape=kernel, **given)

    return draw


def _recurrent(op_type: str) -> Recipe:
    def draw(g: Drawer) -> None:
        value, hidden = g.f(3), g.pick(1, 2, 3)
        gates = {"RNN": 1, "GRU": 3, "LSTM": 4}[op_type]
        direction = g.pick("forward", "reverse", "bidirectional")
        ways = 1 + (direction == "bidirectional")
        weights = [g.floats(ways, gates * hidden, n) for n in (value.shape[2], hidden)]
        layout = g.pick(None, None, 1) if g.opset >= 14 else None
        g.node(op_type, [value, *weights], g.pick(1, 2), hidden_size=hidden,
               direction=direction, layout=layout)  # fmt: skip

    return draw


def _matmul(op_type: str = "MatMul") -> Recipe:
    def draw(g: Drawer) -> None:
        a = g.f(least=1)
        k = a.shape[-1]
        fits = [v for v in g.values if v.array.dtype == F and v.rank and
                v.shape[-2:][0] == k]  # fmt: skip
        shape = g.pick([k], [k, 2], [1, k, 3], [2, k, 1])
        b = g.rng.choice(fits) if fits and g.pick(True, False) else g.floats(*shape)
        more = {}
        if op_type == "com.microsoft.FusedMatMul":
            more = {name: g.pick(None, 1) for name in ("transA", "transB")}
        g.node(op_type, [a, b], **more)

    return draw


def _gemm(op_type: str) -> Recipe:
    def draw(g: Drawer) -> None:
        a, ta, tb = g.f(2), g.pick(0, 1), g.pick(0, 1)
        k, n = a.shape[0 if ta else 1], g.pick(*g.sizes)
        b = g.floats(*((n, k) if tb else (k, n)))
        bias = [g.floats(*g.pick((), (n,), (1, n)))] if g.pick(True, False) else []
        g.node(op_type, [a, b, *bias], transA=ta, transB=tb)

    return draw


def _reshape(g: Drawer) -> None:
    value = g.any(F, F, I8)
    shape: list[int] = []
    left = value.array.size
    for i in range(g.rng.randint(0, 4)):
        choices = [d for d in (1, 2, 3, 4, 6) if left and left % d == 0] or [0]
        below = value.shape[i] if i < value.rank else None
        if below and left % below == 0:
            choices += [below] * 3
        size = g.rng.choice(choices)
        left = left // size if size else left
        shape.append(0 if size == below and g.pick(True, False) else size)
    if g.pick(True, True, False) or left != 1:
        shape.insert(g.rng.randint(0, len(shape)), -1)
    literal = g.pick(None, None, 1) if g.opset >= 14 else None
    g.node("Reshape", [value, g.ints(shape)], allowzero=literal)


def _reshape_like(g: Drawer) -> None:
    value = g.any(F, F, I8)
    same = [v for v in g.values if v.array.size == value.array.size and v is not value]
    shape = g.node("Shape", [g.rng.choice(same)])
    literal = g.pick(None, 1) if g.opset >= 14 else None
    g.node("Reshape", [value, shape], allowzero=literal)


def _slice(g: Drawer) -> None:
    value = g.any(F, I8, I8, least=1)
    axes = g.axes(value) or [0]
    bounds = (0, 1, 2, -1, -2, 5, -5, (1 << 31) - 1, (1 << 63) - 1, 1 - (1 << 63))
    spans = [[g.pick(*bounds) for _ in axes] for _ in range(2)]
    steps = [g.pick(1, 1, 1, 2, -1, -2) for _ in axes]
    inputs = [g.ints(span) for span in spans]
    if g.pick(True, True, False):
        inputs += [g.ints(axes), *([g.ints(steps)] if g.pick(True, False) else [])]
    g.node("Slice", [value, *inputs])


def _slice_by_sizes(g: Drawer) -> None:
    """By numbers that are computed from shapes."""
    value = g.f(least=1)
    sizes = [v for v in g.values if v.array.dtype == I8 and v.shape == (1,)]
    g.node("Slice", [value, g.rng.choice([*sizes, g.ints([0])]), g.rng.choice(sizes)])


def _pad(g: Drawer) -> None:
    value = g.f()
    axes = g.axes(value) if g.opset >= 18 and g.pick(True, False) else None
    count = 2 * (value.rank if axes is None else len(axes))
    pads = [g.pick(0, 0, 1, 2, -1) for _ in range(count)]
    more = [] if axes is None else [None, g.ints(axes)]
    mode = g.pick(None, "edge", "reflect")
    g.node("Pad", [value, g.ints(pads), *more], mode=mode)


def _split(g: Drawer) -> None:
    value, count = g.any(F, I8, least=1), g.pick(1, 2, 3)
    axis = g.axis(value)
    size = value.shape[axis]
    cuts = sorted(g.rng.randint(0, size) for _ in range(count - 1))
    parts = [b - a for a, b in zip([0, *cuts], [*cuts, size], strict=True)]
    if g.pick(True, False):
        equal = {"num_outputs": count} if g.opset >= 18 else {}
        g.node("Split", [value], count, axis=axis, **equal)
    elif g.opset < 13:
        g.node("Split", [value], count, axis=axis, split=parts)
    else:
        g.node("Split", [value, g.ints(parts)], count, axis=axis)


def _gather(op_type: str) -> Recipe:
    def draw(g: Drawer) -> None:
        value = g.any(F, I8, I8, least=1)
        axis = g.axis(value)
        size = value.shape[axis]
        if op_type == "GatherElements":
            shape = tuple(g.pick(n, 1) if i != axis % value.rank else g.pick(1, 2, 3)
                          for i, n in enumerate(value.shape))  # fmt: skip
        else:
            shape = g.pick((), (), (1,), (2,), (2, 1), (0,))
        where = np.array([g.rng.randrange(-size, size) for _ in range(int(np.prod(shape)))])
        g.node(op_type, [value, g.ints(where.reshape(shape).astype(np.int64))], axis=axis)

    return draw


def _gather_nd(g: Drawer) -> None:
    value = g.f(least=1)
    batch = g.pick(0, 0, 1) if g.opset >= 12 else 0
    depth = g.rng.randint(1, value.rank - batch)
    shape = (*value.shape[:batch], *g.pick((), (2,), (1, 3)), depth)
    g.node(
        "GatherND", [value, g.constant(np.zeros(shape, np.int64))], batch_dims=batch or None
    )


def _scatter(g: Drawer) -> None:
    value = g.f(least=1)
    shape = tuple(g.pick(1, n) for n in value.shape)
    where, updates = g.constant(np.zeros(shape, np.int64)), g.floats(*shape)
    g.node("ScatterElements", [value, where, updates], axis=g.axis(value))


def _scatter_nd(g: Drawer) -> None:
    value = g.f(least=1)
    depth = g.rng.randint(1, value.rank)
    where = g.constant(np.zeros((2, depth), np.int64))
    g.node("ScatterND", [value, where, g.floats(2, *value.shape[depth:])])


def _concat(g: Drawer) -> None:
    first = g.any(F, I8, I8, least=1)
    axis = g.axis(first)
    others = [
        v for v in g.values if v.array.dtype == first.array.dtype and v.rank == first.rank
    ]
    others = [v for v in others if v.array.size == 0 or all(
        a == b for i, (a, b) in enumerate(zip(v.shape, first.shape, strict=True))
        if i != axis % first.rank)]  # fmt: skip
    more = [g.rng.choice(others) for _ in range(g.rng.randint(0, 2))]
    if first.array.dtype == I8 and first.rank == 1:
        more += [g.constant([g.pick(-1, 1, 2)], np.int64)] * g.pick(0, 1)
    inputs = [first, *more]
    g.rng.shuffle(inputs)
    g.node("Concat", inputs, axis=axis)


def _expand(g: Drawer) -> None:
    value = g.f()
    shapes = [v for v in g.values if v.array.dtype == I8 and v.rank == 1 and v.array.size < 5]
    if shapes and g.pick(True, False):
        g.node("Expand", [value, g.rng.choice(shapes)])
        return
    lead = list(g.shape(g.pick(0, 1)))
    wanted = lead + [g.pick(n, 1) if n != 1 else g.pick(*g.sizes) for n in value.shape]
    g.node("Expand", [value, g.ints(wanted)])


def _where(g: Drawer) -> None:
    if g.pick(True, False):  # as torch writes the shape of an Expand
        shape = g.i(1)
        kept = [g.pick(-1, -1, 1, 2, 3) for _ in range(shape.array.size)]
        wanted = g.constant(kept, np.int64)
        minus = g.constant([-1] * g.pick(1, len(kept)), np.int64)
        g.node("Where", [g.node("Equal", [wanted, minus]), shape, wanted])
        return
    value = g.any(F, I8)
    condition = [v for v in g.values if v.array.dtype == B and _broadcast(v, value)]
    g.node("Where", [g.rng.choice(condition), value, g.like(value)])


def _range(g: Drawer) -> None:
    ends = [v for v in g.values if v.array.dtype == I8 and v.rank == 0]
    start = g.constant(g.pick(0, 0, 1, -1, 3), np.int64)
    step = g.constant(g.pick(1, 1, 2, -1), np.int64)
    g.node("Range", [start, g.rng.choice(ends), step])


def _resize(g: Drawer) -> None:
    value, mode = g.f(least=1), g.pick("nearest", "linear")
    scales = [g.pick(1, 1, 2, 0.5, 1.5) for _ in value.shape]
    if g.pick(True, False):
        g.node("Resize", [value, g.floats(0), g.constant(scales, np.float32)], mode=mode)
    else:
        empty = [None, None] if g.opset >= 13 else [g.floats(0), g.floats(0)]
        sizes = [g.pick(n, 1, 2) for n in value.shape]
        g.node("Resize", [value, *empty, g.ints(sizes)], mode=mode)


def _top_k(g: Drawer) -> None:
    value = g.f(least=1)
    axis = g.axis(value)
    counts = [v for v in g.values if v.array.dtype == I8 and v.shape == (1,)]
    count = g.ints([g.rng.randint(0, value.shape[axis])])
    g.node("TopK", [value, g.rng.choice([*counts, count])], 2, axis=axis)


def _one_hot(g: Drawer) -> None:
    depth = g.ints(g.pick(g.pick(*g.sizes), [g.pick(*g.sizes)]))
    value = g.i()
    g.node("OneHot", [value, depth, g.floats(2)], axis=g.axis(value, 1))


def _with(*makers: Callable[[Drawer, Value], Value | None], outputs: int = 1,
          rank: int | None = None, least: int = 0, kind: np.dtype = F,
          **attributes: object) -> Callable[[str], Recipe]:  # fmt: skip
    """A value, and what is made to fit it; attributes may be drawn, too."""

    def draw(op_type: str, g: Drawer) -> None:
        value = g.any(kind, rank=rank, least=least)
        inputs = [value, *(make(g, value) for make in makers)]
        given = {n: a(g, value) if callable(a) else a for n, a in attributes.items()}
        g.node(op_type, inputs, outputs, **given)

    return lambda op_type: partial(draw, op_type)


def _last(g: Drawer, value: Value) -> Value:
    return g.floats(value.shape[-1])


def _channels(g: Drawer, value: Value) -> Value:
    return g.floats(value.shape[1])


def _of(kind: np.dtype, *shape: int) -> Callable[[Drawer, Value], Value]:
    return lambda g, value: g.constant(np.ones(shape, kind))


def _flag(g: Drawer, value: Value) -> int:
    return g.pick(0, 1)


def _squeeze(g: Drawer) -> None:
    value = g.any(F, I8)
    ones = [i for i, n in enumerate(value.shape) if n == 1 and g.pick(0, 1)]
    g.with_axes("Squeeze", value, g.pick(None, ones), 13)


def _unsqueeze(g: Drawer) -> None:
    value = g.any(F, I8)
    g.with_axes("Unsqueeze", value, [g.axis(value, 1)], 13)


def _transpose(g: Drawer) -> None:
    value = g.any(F, I8)
    order = g.rng.sample(range(value.rank), value.rank)
    g.node("Transpose", [value], perm=g.pick(None, order))


def _scalar(
    number: float, dtype: npt.DTypeLike = np.float32
) -> Callable[[Drawer, Value], Value]:
    return lambda g, value: g.constant(number, dtype)


def _axis(g: Drawer, value: Value) -> int:
    return g.axis(value)


def _half(g: Drawer, value: Value) -> Value:
    if value.shape[3] % 2 or not value.shape[3]:
        raise Discarded("onnxruntime reads beyond the end")
    return g.floats(value.shape[0], value.shape[2], value.shape[3] // 2)


def _same(g: Drawer, value: Value) -> Value:
    same = [
        v for v in g.values if v.shape == value.shape and v.array.dtype == value.array.dtype
    ]
    return g.rng.choice(same)


def _grouped(g: Drawer) -> None:
    value = g.f(3)
    batch, length, _ = value.shape
    query, key = (g.floats(batch, length, n) for n in (32, 16))
    inputs = [query, key, key, None, None]
    lengths = g.constant([max(length - 1, 0)] * batch, np.int32)
    inputs += [lengths, g.constant(length, np.int32)]
    g.node("com.microsoft.GroupQueryAttention", inputs, 3, num_heads=2, kv_num_heads=1)


def _causal(op_type: str) -> Recipe:
    def draw(g: Drawer) -> None:
        value, reach = g.f(3), g.pick(1, 2, 3)
        batch, channels, _ = value.shape
        if not channels:
            raise Discarded("onnxruntime divides by it")
        kernel = g.constant(np.ones((channels, 1, reach), np.float32))
        same = [v for v in g.values if v.shape == (batch, channels, reach - 1)]
        before = g.pick(None, g.floats(g.pick(0, 1, batch), channels, reach - 1), *same)
        g.node(op_type, [value, kernel, None, before], 2)

    return draw


def _quantized(form: str) -> Callable[[str], Recipe]:
    """x: 8-bit codes, w: 8-bit weights [K, 2], s: a scale, z: a zero point, f: floats."""

    def draw(op_type: str, g: Drawer) -> None:
        codes = g.any(U8, least="w" in form)
        k = codes.shape[-1] if codes.rank else 1
        made = {
            "x": codes, "s": g.constant(1, np.float32), "z": g.constant(0, np.uint8),
            "w": g.constant(np.ones((k, 2), np.uint8)), "y": codes,
        }  # fmt: skip
        if "y" in form:
            made["y"] = g.like(codes)
        g.node(op_type, [made[sign] for sign in form])

    return lambda op_type: partial(draw, op_type)


def _scale_and_zero(g: Drawer) -> list[Value]:
    return [g.constant(1, np.float32), g.constant(0, np.uint8)]


def _reorder(g: Drawer) -> None:
    value = g.f(4)
    last = g.pick(0, 1)
    if g.pick(True, False):  # a whole number of blocks
        value, last = g.node("Concat", [value] * 16, axis=1), 0
    blocked = g.node("com.microsoft.nchwc.ReorderInput", [value], channels_last=last)
    channels = value.shape[-1 if last else 1]
    between = g.pick(
        "", "", "MaxPool", "AveragePool", "GlobalMaxPool", "GlobalAveragePool", "Conv"
    )
    if between == "Conv":
        weight = g.floats(channels, channels, 1, 1)
        blocked = g.node("com.microsoft.nchwc.Conv", [blocked, weight])
    elif between:
        window = {} if between.startswith("Global") else {"kernel_shape": [g.pick(1, 2)] * 2}
        blocked = g.node(f"com.microsoft.nchwc.{between}", [blocked], **window)
    g.node("com.microsoft.nchwc.ReorderOutput", [blocked], channels=channels,
           channels_last=g.pick(0, 1))  # fmt: skip


def _each(make: Callable[[str], Recipe], names: str, domain: str = "") -> dict[str, Recipe]:
    return {domain + name: make(domain + name) for name in names.split()}


_TOKENS = lambda g, v: g.constant(np.zeros((v.shape[0], v.shape[1])), np.int64)  # noqa: E731
_HALVES = lambda g, v: g.floats(8, (v.shape[2] + 1) // 2)  # noqa: E731
_NBITS = lambda g, v: g.constant(  # noqa: E731
    np.ones((3, -(-v.shape[-1] // 16), 8), np.uint8))  # fmt: skip
_MS = f"{MICROSOFT}."
RECIPES: dict[str, Recipe] = {
    **_each(_unary(), """Abs Acos Acosh Asin Asinh Atan Atanh Ceil Celu Clip Cos Cosh Elu Erf
        Exp Floor Gelu HardSigmoid HardSwish Identity IsInf IsNaN LeakyRelu Log Mish Neg
        Reciprocal Relu Round Selu Shrink Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Swish
        Tan Tanh ThresholdedRelu"""),
    **_each(_unary(), "FastGelu Gelu QuickGelu", _MS),
    **_each(_unary(I8), "BitwiseNot"),
    **_each(_unary(B), "Not"),
    **_each(_binary(F, F, I8), "Add Div Mul Sub Pow Max Min"),
    **_each(_binary(F, I8), "Equal Greater GreaterOrEqual Less LessOrEqual PRelu"),
    **_each(_binary(F), "Mean Sum"),
    **_each(_binary(B), "And Or Xor"),
    **_each(_binary(I8), "BitwiseAnd BitwiseOr BitwiseXor Mod"),
    **_each(_binary(U8), "BitShift"),
    **_each(_reduction, " ".join(sorted(operator_shapes.REDUCTIONS))),
    **_each(_pool, "AveragePool LpPool MaxPool"),
    **_each(_recurrent, "GRU LSTM RNN"),
    **_each(_gemm, f"Gemm {_MS}FusedGemm"),
    **_each(_conv(), f"Conv ConvTranspose {_MS}FusedConv"),
    **_each(_conv(U8), "ConvInteger QLinearConv"),
    **_each(_matmul, f"MatMul {_MS}FusedMatMul {_MS}TransposeMatMul"),
    **_each(_gather, "Gather GatherElements"),
    # One value, and what fits it.
    **_each(_with(least=1, axis=_axis), "Hardmax LogSoftmax LpNormalization Softmax"),
    **_each(_with(rank=4), "GlobalAveragePool GlobalLpPool GlobalMaxPool"),
    **_each(_with(rank=4), "MeanVarianceNormalization"),
    **_each(_with(rank=4, blocksize=lambda g, v: g.pick(1, 2)), "DepthToSpace SpaceToDepth"),
    **_each(_with(least=1, axis=_axis, keepdims=_flag), "ArgMax ArgMin"),
    **_each(_with(seed=1.0), "Bernoulli RandomNormalLike RandomUniformLike"),
    **_each(_with(_last, least=1), f"""LayerNormalization RMSNormalization
        SimplifiedLayerNormalization {_MS}BiasGelu"""),
    **_each(_with(*[_channels] * 4, least=2), "BatchNormalization"),
    **_each(_with(_channels, _channels, least=3), "InstanceNormalization"),
    **_each(_with(_channels, _channels, least=3, num_groups=1), "GroupNormalization"),
    **_each(_with(lambda g, v: g.constant(g.axis(v), np.int64), least=1), "CumSum"),
    **_each(_with(lambda g, v: g.constant([1] * v.shape[1], np.int64), least=2),
            "ReverseSequence"),
    **_each(_with(lambda g, v: g.ints([g.pick(1, 1, 2, 0) for _ in v.shape])), "Tile"),
    **_each(_with(axis=lambda g, v: g.rng.randint(-v.rank, v.rank)), "Flatten"),
    **_each(_with(rank=2), "EyeLike"),
    **_each(_with(least=2), "Trilu"),
    **_each(_with(rank=4, size=3), "LRN"),
    **_each(_with(_same, rank=4), "TensorScatter"),
    **_each(_with(*[_half] * 2, rank=4), "RotaryEmbedding"),
    **_each(_with(_TOKENS, *[_HALVES] * 2, rank=3), "RotaryEmbedding", _MS),
    **_each(_with(outputs=2), "Dropout"),
    "Attention": lambda g: g.pick(
        _with(_same, _same, rank=4),
        _with(_same, _same, rank=3, q_num_heads=1, kv_num_heads=1))("Attention")(g),
    **_each(_with(_same, _same, rank=3, num_heads=1), "MultiHeadAttention", _MS),
    **_each(_with(lambda g, v: g.floats(v.shape[2], 12), _of(F, 12), rank=3, num_heads=2),
            "Attention", _MS),
    **_each(_with(_same, _last, _last, rank=3, outputs=4), "SkipLayerNormalization", _MS),
    **_each(_with(_same, _last, rank=3), "SkipSimplifiedLayerNormalization", _MS),
    # Codes.
    **_each(_with(_scalar(2), kind=U8), "DequantizeLinear"),
    **_each(_with(_scalar(1), _scalar(3, np.uint8), kind=U8), "DequantizeLinear", _MS),
    **_each(_with(_scalar(1), _scalar(3, np.uint8)), f"QuantizeLinear {_MS}QuantizeLinear"),
    **_each(_with(outputs=3), "DynamicQuantizeLinear"),
    **_each(_quantized("xw"), "MatMulInteger"),
    **_each(_quantized("xszwszsz"), "QLinearMatMul"),
    **_each(_quantized("xwss"), "MatMulIntegerToFloat", _MS),
    **_each(_quantized("xszyszsz"), "QLinearAdd QLinearMul", _MS),
    **_each(_quantized("xszsz"), "QLinearLeakyRelu QLinearSigmoid", _MS),
    **_each(_with(lambda g, v: g.constant(np.ones((v.shape[-1], 2), np.uint8)), _scalar(1),
                  least=1), "DynamicQuantizeMatMul", _MS),
    **_each(_with(_NBITS, lambda g, v: g.floats(3, -(-v.shape[-1] // 16)), least=1,
                  K=lambda g, v: v.shape[-1], N=3, bits=4, block_size=16), "MatMulNBits", _MS),
    "Cast": lambda g: g.node("Cast", [g.any(F, I8, B, U8)], to=g.pick(1, 7, 7, 9, 6)),
    "CastLike": lambda g: g.node("CastLike", [g.any(F, I8), g.any(F, I8)]),
    "Concat": _concat,
    "ConstantOfShape": lambda g: g.node(
        "ConstantOfShape", [g.i(1)],
        value=g.pick(None, numpy_helper.from_array(np.array([g.pick(-1, 1, 2)])))),
    "Expand": _expand,
    "GatherND": _gather_nd,
    "If": _draw_if,
    "Loop": _draw_loop,
    "NonZero": lambda g: g.node("NonZero", [g.any(F, I8, B)]),
    "OneHot": _one_hot,
    "Pad": _pad,
    "Range": _range,
    "Reshape": _reshape,
    "ReshapeLike": _reshape_like,
    "Resize": _resize,
    "ScatterElements": _scatter,
    "ScatterND": _scatter_nd,
    "Shape": lambda g: g.node("Shape", [g.any(F, F, I8, B)]),
    "Size": lambda g: g.node("Size", [g.any(F, F, I8)]),
    "Slice": _slice,
    "SliceBySizes": _slice_by_sizes,
    "Split": _split,
    "Squeeze": _squeeze,
    "TopK": _top_k,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
    "Where": _where,
    f"{_MS}EmbedLayerNormalization": lambda g: g.node(
        f"{_MS}EmbedLayerNormalization",
        [g.constant(np.zeros(g.shape(2), np.int32)), None, g.floats(5, 4), g.floats(5, 4),
         None, g.floats(4), g.floats(4)], 2),
    f"{_MS}GatherBlockQuantized": lambda g: g.node(
        f"{_MS}GatherBlockQuantized",
        [g.constant(np.ones((3, 8), np.uint8)),
         g.constant(np.zeros(g.shape(g.pick(0, 1, 2)), np.int64)), g.floats(3, 1)],
        block_size=16, quantize_axis=1, bits=4),
    f"{_MS}GroupQueryAttention": _grouped,
    f"{_MS}QLinearSoftmax": lambda g: (lambda v: g.node(
        f"{_MS}QLinearSoftmax", [v, *_scale_and_zero(g), *_scale_and_zero(g)],
        axis=g.axis(v), opset=13))(g.any(U8)),
    f"{NCHWC}.ReorderInput": _reorder,
}  # fmt: skip
# What moves shapes is drawn more often.
_OFTEN = (
    "Reshape", "ReshapeLike", "Shape", "Gather", "Concat", "Slice", "Expand", "Where", "If",
    "Loop", "Squeeze", "Unsqueeze", "Transpose", "Add", "Mul", "Split", "Size", "ReduceProd",
    "SliceBySizes", "Range", "Cast",
)  # fmt: skip
# Of a newer opset, in which a tenth of the graphs is.
RECURRENT = {
    **_each(_causal, f"CausalConvWithState {_MS}CausalConvWithState"),
    **_each(_with(_same, _same, outputs=2, rank=3, q_num_heads=1, kv_num_heads=1,
                  update_rule="linear"), "LinearAttention"),
}  # fmt: skip
_NEWER = 27
_WEIGHTED = [*RECIPES.values(), *[RECIPES[name] for name in _OFTEN for _ in range(4)]]


def random_model(seed: int) -> RandomModel:
    """Return a model, and inputs of several sizes for it."""
    rng = random.Random(seed)
    opset = rng.choice((11, 12, 13, 14, 16, 17, 18, 19, 20, 21, 22, 23))
    g = Drawer(rng, _NEWER if seed % 10 == 9 else opset)
    feeds: dict[str, Array] = {}
    declared: dict[str, list[int | None] | None] = {}
    shapes = [g.shape(rng.randint(0, 4)), g.shape(rng.randint(1, 4)), g.shape(2)]
    for name, shape in zip("xyz", shapes, strict=True):
        feeds[name] = np.asarray(np.random.default_rng(seed).uniform(0.1, 0.9, shape), F)
        open_axes = [rng.random() < 0.6 for _ in shape]
        dims = [None if o else n for o, n in zip(open_axes, shape, strict=True)]
        declared[name] = None if rng.random() < 0.15 else dims
    feeds["n"] = np.array(rng.choice(g.sizes))
    feeds["s"] = np.array(g.shape(2), I8)
    feeds["c"] = np.array(rng.random() < 0.5)
    feeds["u"] = np.ones(g.shape(rng.randint(2, 4)), U8)
    declared |= {"n": [], "s": [2], "c": [], "u": [None] * feeds["u"].ndim}
    for name, array in feeds.items():
        g.inputs.append(_info(name, array.dtype, declared[name]))
        g.values.append(Value(name, array))
    g.draw(rng.randint(3, 10))
    g.readers(rng.randint(2, 5))
    ends = [onnx.ValueInfoProto(name=name) for name in g.made]
    graph = helper.make_graph(g.nodes, "random", g.inputs, ends, list(g.tensors.values()))
    runs = [feeds, *(_resized(rng, feeds, declared) for _ in range(3))]
    runs.append({**runs[-1], "c": ~runs[-1]["c"]})
    return RandomModel(_model(graph, g.opset), g.made, runs)


def _resized(
    rng: random.Random, feeds: Mapping[str, Array], declared: Mapping[str, object]
) -> dict[str, Array]:
    """Inputs of other sizes, where they may have others: mostly the same for equal ones."""
    other = {size: rng.choice((0, 1, 1, 2, 3, 5, 7)) for size in range(8)}
    keeps = rng.random() < 0.4
    result = {}
    for name, array in feeds.items():
        if array.dtype == I8 and not keeps:
            result[name] = np.array([other[int(n)] for n in array.reshape(-1)], I8).reshape(
                array.shape
            )
        if array.dtype not in (F, U8):
            result.setdefault(name, array if name != "c" else np.array(rng.random() < 0.5))
            continue
        dims = declared[name] or [None] * array.ndim
        shape = [
            n if dim is not None else other[n] if rng.random() < 0.9 else rng.choice((0, 1, 2))
            for n, dim in zip(array.shape, dims, strict=True)  # type: ignore[call-overload]
        ]
        result[name] = np.full(shape, 0.5 if array.dtype == F else 1, array.dtype)
    return result


def _broadcast(a: Value, b: Value) -> bool:
    try:
        np.broadcast_shapes(a.shape, b.shape)
    except ValueError:
        return False
    return True


def _read(nodes: Sequence[onnx.NodeProto]) -> dict[str, None]:
    """What nodes and their subgraphs read."""
    found: dict[str, None] = {}
    for node in nodes:
        found.update(dict.fromkeys(name for name in node.input if name))
        for attribute in node.attribute:
            if attribute.HasField("g"):
                found.update(_read(attribute.g.node))
                found.update(dict.fromkeys(value.name for value in attribute.g.output))
    return found


def _info(
    name: str, dtype: np.dtype, shape: Sequence[int | None] | None
) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(dtype), shape)


def _model(graph: onnx.GraphProto, opset: int) -> onnx.ModelProto:
    domains = (("", opset), (MICROSOFT, 1), (NCHWC, 1))
    imports = [helper.make_opsetid(*domain) for domain in domains]
    return helper.make_model(
        graph, opset_imports=imports, ir_version=10 if opset < 23 else 11 if opset < 27 else 13
    )
