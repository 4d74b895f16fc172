# SPDX-License-Identifier: MIT
"""Every layout of a quantised weight that exporters write, with the numbers it must give.

``layout_cases()`` returns the matrix. A case is drawn with a :class:`Drawing`, which writes
each node and computes in float64 what it must give, independently of any runtime.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from .dequantized_models import STORAGE, make_model

EXACT = 1e-5  # float32 throughout
HALF = 2e-3  # float16 somewhere
FUNCTIONS = "test.functions"  # domain of the model-local functions
FUSED = {"MatMulNBits": 1, "DequantizeLinear": 0}
GATHERED = {"GatherBlockQuantized": 1, "DequantizeLinear": 0}

STORAGES = tuple(STORAGE)
ZERO_POINTS = ("none", "random", "default")


@dataclasses.dataclass(frozen=True, eq=False)
class LayoutCase:
    """One model, its numbers, and its fate.

    Attributes:
        name: Unique.
        row: Row of the issue's table of layouts.
        build: Makes the model, anew at each call.
        feeds: One set of inputs.
        reference: The outputs: float64, or the exact type where they are no floats.
        expect: Operator types with their counts in the fused model, bodies and functions
            included. Empty for a model that must stay as it is.
        refusal: Text that a refusal must hold; None where nothing is refused.
        tolerance: Greatest error over the greatest output.
        zero_points: Whether the fused nodes have a zero-point input; None where either is
            right.
        block_sizes: The block sizes of the fused nodes that are right; any if empty.
        stored_weights: Different tensors of codes among the MatMulNBits nodes, where counted.
        runs: Whether onnxruntime has kernels for the model as drawn, without optimisation.
    """

    name: str
    row: int
    build: Callable[[], ir.Model]
    feeds: dict[str, npt.NDArray]
    reference: list[npt.NDArray]
    expect: dict[str, int]
    refusal: str | None
    tolerance: float
    zero_points: bool | None = None
    block_sizes: tuple[int, ...] = ()
    stored_weights: int | None = None
    runs: bool = True


@dataclasses.dataclass(frozen=True, eq=False)
class Tensor:
    """A value of the graph and the numbers that it must hold, floats in float64."""

    value: ir.Value
    array: npt.NDArray


@dataclasses.dataclass(frozen=True)
class Quantized:
    """A constant as DequantizeLinear reads it.

    Attributes:
        shape: Of the codes.
        storage: Key of ``STORAGE``.
        axis: The attribute; None leaves it out, which stands for 1.
        block: Block size along ``axis``; 0 for one of the two others.
        scaled: ``"blocks"``, ``"channel"``, ``"tensor"`` (a scalar) or ``"tensor1"`` (shape
            [1]).
        zero_points: ``"none"``, ``"random"``, ``"default"`` (all ``2**(bits-1)``, as unsigned)
            or ``"one_other"`` (all but one of them).
        scale_dtype: float32, float16 or bfloat16.
    """

    shape: tuple[int, ...]
    storage: str = "int4"
    axis: int | None = 0
    block: int = 0
    scaled: str = "blocks"
    zero_points: str = "none"
    scale_dtype: npt.DTypeLike = np.float32

    @property
    def resolved_axis(self) -> int:
        return (1 if self.axis is None else self.axis) % len(self.shape)

    @property
    def scale_shape(self) -> tuple[int, ...]:
        if self.scaled == "tensor":
            return ()
        if self.scaled == "tensor1":
            return (1,)
        along = self.shape[self.resolved_axis]
        if self.scaled == "channel":
            return (along,)
        shape = list(self.shape)
        shape[self.resolved_axis] = -(-along // self.block)
        return tuple(shape)

    def spread(self, array: npt.NDArray) -> npt.NDArray:
        """Scales or zero points, one for each code or ready to broadcast."""
        axis = self.resolved_axis
        if self.scaled in ("tensor", "tensor1"):
            return array.reshape(())
        if self.scaled == "channel":
            return array.reshape([-1 if i == axis else 1 for i in range(len(self.shape))])
        return np.repeat(array, self.block, axis).take(range(self.shape[axis]), axis)

    @property
    def needs_zero_points(self) -> bool:
        """Whether MatMulNBits, whose default is ``2**(bits-1)``, needs them written."""
        signed = STORAGE[self.storage][1]
        return not (self.zero_points == "default" or (self.zero_points == "none" and signed))


class Drawing:
    """A graph, a body or a function in the making, with its numbers."""

    def __init__(self, name: str, parent: Drawing | None = None) -> None:
        self.name = name
        self.parent = parent
        self.rng = parent.rng if parent else np.random.default_rng(zlib.crc32(name.encode()))
        self.used = parent.used if parent else set[str]()
        self.inputs: list[ir.Value] = []
        self.nodes: list[ir.Node] = []
        self.initializers: list[ir.Value] = []
        self.outputs: dict[str, Tensor] = {}
        self.feeds: dict[str, npt.NDArray] = {}
        self.functions: list[ir.Function] = []
        self.constant_nodes = False  # write constants as Constant nodes
        self.opset = 21
        self.opset_imports: dict[str, int] = {}  # besides ONNX's own

    # Inputs, constants, outputs.

    def input(
        self,
        name: str,
        shape: Sequence[int],
        dtype: npt.DTypeLike = np.float32,
        static: Sequence[int] = (-1,),
    ) -> Tensor:
        """A run-time input of random numbers; sizes are declared for the static axes only."""
        array = self.rng.standard_normal(shape).astype(dtype)
        known = {axis % max(len(shape), 1) for axis in static}
        dims = [size if i in known else f"{name}_{i}" for i, size in enumerate(shape)]
        return self.feed(name, array, dims)

    def feed(
        self, name: str, array: npt.NDArray, dims: Sequence[int | str] | None = None
    ) -> Tensor:
        dtype = ir.DataType.from_numpy(array.dtype)
        value = ir.val(name, dtype, array.shape if dims is None else dims)
        self.inputs.append(value)
        self.feeds[name] = array
        return Tensor(value, _numbers(array))

    def constant(
        self, name: str, array: npt.NDArray, dtype: ir.DataType | None = None
    ) -> Tensor:
        tensor = ir.Tensor(array, dtype=dtype, name=name)
        if self.constant_nodes:
            node = ir.node("Constant", [], {"value": tensor}, name=f"constant_{name}")
            node.outputs[0].name = name
            self.nodes.append(node)
            return Tensor(node.outputs[0], _numbers(array))
        value = ir.Value(
            name=name,
            shape=ir.Shape(array.shape),
            type=ir.TensorType(tensor.dtype),
            const_value=tensor,
        )
        self.initializers.append(value)
        return Tensor(value, _numbers(array))

    def floats(
        self, name: str, shape: Sequence[int], dtype: npt.DTypeLike = np.float32
    ) -> Tensor:
        return self.constant(name, np.asarray(self.rng.standard_normal(shape)).astype(dtype))

    def output(
        self, tensor: Tensor, name: str = "y", dtype: npt.DTypeLike = np.float32
    ) -> None:
        tensor.value.name = name
        tensor.value.dtype = ir.DataType.from_numpy(np.dtype(dtype))
        self.outputs[name] = tensor

    # Nodes.

    def node(
        self,
        op_type: str,
        inputs: Sequence[Tensor | None],
        array: npt.NDArray,
        attributes: Mapping[str, object] | None = None,
        name: str | None = None,
        domain: str = "",
    ) -> Tensor:
        base = name = name or op_type.lower()
        for number in itertools.count(2):
            if name not in self.used:
                break
            name = f"{base}{number}"
        self.used.add(name)
        values = [None if tensor is None else tensor.value for tensor in inputs]
        node = ir.node(op_type, values, attributes, name=name, domain=domain)  # type: ignore[arg-type]
        node.outputs[0].name = f"{name}_out"
        self.nodes.append(node)
        return Tensor(node.outputs[0], array)

    def matmul(self, a: Tensor, b: Tensor, name: str = "matmul") -> Tensor:
        return self.node("MatMul", [a, b], np.matmul(a.array, b.array), name=name)

    def fused_matmul(self, a: Tensor, b: Tensor, **attributes: float) -> Tensor:
        """onnxruntime's own: MatMul with transposed operands and a factor."""
        self.root.opset_imports["com.microsoft"] = 1
        left = np.swapaxes(a.array, -1, -2) if attributes.get("transA") else a.array
        right = np.swapaxes(b.array, -1, -2) if attributes.get("transB") else b.array
        array = attributes.get("alpha", 1.0) * np.matmul(left, right)
        return self.node("FusedMatMul", [a, b], array, attributes, "matmul", "com.microsoft")

    def gemm(
        self, a: Tensor, b: Tensor, c: Tensor | None = None, **attributes: float
    ) -> Tensor:
        left = a.array.T if attributes.get("transA") else a.array
        right = b.array.T if attributes.get("transB") else b.array
        array = attributes.get("alpha", 1.0) * (left @ right)
        if c is not None:
            array = array + attributes.get("beta", 1.0) * c.array
        inputs = [a, b] if c is None else [a, b, c]
        return self.node("Gemm", inputs, array, attributes, "gemm")

    def transpose(self, a: Tensor, perm: Sequence[int] | None = (1, 0)) -> Tensor:
        attributes = {} if perm is None else {"perm": list(perm)}
        return self.node("Transpose", [a], np.transpose(a.array, perm), attributes)

    def reshape(self, a: Tensor, shape: Sequence[int], written: Sequence[int] = ()) -> Tensor:
        """Reshape to ``shape``, written with -1 and 0 where ``written`` has them."""
        target = self.constant(self._unique("shape"), np.int64(written or shape))
        return self.node("Reshape", [a, target], a.array.reshape(shape))

    def cast(self, a: Tensor, dtype: npt.DTypeLike) -> Tensor:
        to = int(ir.DataType.from_numpy(np.dtype(dtype)))
        return self.node("Cast", [a], a.array, {"to": to})

    def identity(self, a: Tensor) -> Tensor:
        return self.node("Identity", [a], a.array)

    def add(self, a: Tensor, b: Tensor, name: str = "add") -> Tensor:
        return self.node("Add", [a, b], a.array + b.array, name=name)

    def relu(self, a: Tensor) -> Tensor:
        return self.node("Relu", [a], np.maximum(a.array, 0))

    def gather(self, a: Tensor, indices: Tensor, axis: int = 0) -> Tensor:
        array = np.take(a.array, indices.array, axis)
        attributes = {"axis": axis} if axis else {}
        return self.node("Gather", [a, indices], array, attributes, "gather")

    # Quantised constants.

    def quantized(self, spec: Quantized, name: str = "w") -> list[Tensor]:
        """Codes, scales and zero points; scales such that the weights are about 1."""
        bits, signed, dtype, numpy_dtype = STORAGE[spec.storage]
        low = -(1 << (bits - 1)) if signed else 0
        middle = low + (1 << (bits - 1))
        if bits == 2:
            self.root.opset = 25
        codes = self.rng.integers(low, low + (1 << bits), spec.shape)
        shape = spec.scale_shape
        scales = self.rng.uniform(0.5, 2.0, shape) * self.rng.choice([-1, 1], shape)
        scales = np.asarray(scales / (1 << (bits - 1))).astype(spec.scale_dtype)
        zero_points = np.full(shape, middle)
        if spec.zero_points == "random":
            zero_points = np.asarray(self.rng.integers(low, low + (1 << bits), shape))
        if spec.zero_points in ("random", "one_other") and (zero_points == middle).all():
            zero_points.flat[-1] = low
        offset = 0 if spec.zero_points == "none" else spec.spread(zero_points)
        if not (codes - offset).any():
            codes.flat[0] = low + 1 if codes.flat[0] == low else low
        tensors = [
            self.constant(name, codes.astype(numpy_dtype), dtype),
            self.constant(f"{name}_scale", scales),
        ]
        if spec.zero_points != "none":
            stored = zero_points.astype(numpy_dtype)
            tensors.append(self.constant(f"{name}_zero_point", stored, dtype))
        return tensors

    def dequantize(
        self, spec: Quantized, tensors: Sequence[Tensor] | None = None, name: str = "w"
    ) -> Tensor:
        """DequantizeLinear, named ``dq_<name>``."""
        tensors = self.quantized(spec, name) if tensors is None else tensors
        attributes = {} if spec.axis is None else {"axis": spec.axis}
        if spec.block:
            attributes["block_size"] = spec.block
        codes, scales = (tensor.array for tensor in tensors[:2])
        offset = spec.spread(tensors[2].array) if len(tensors) > 2 else 0
        array = (codes - offset) * spec.spread(scales)
        return self.node("DequantizeLinear", tensors, array, attributes, f"dq_{name}")

    # Bodies, functions, the whole.

    def body(self, inputs: Sequence[ir.Value] = ()) -> Drawing:
        """A body that may read this graph's values."""
        drawing = Drawing(self._unique("body"), parent=self)
        drawing.inputs += inputs
        return drawing

    def graph(self) -> ir.Graph:
        """The body as an attribute."""
        return ir.Graph(
            self.inputs,
            [tensor.value for tensor in self.outputs.values()],
            nodes=self.nodes,
            initializers=self.initializers,
            name=self.name,
        )

    def function(self, name: str) -> None:
        """Register a body as a model-local function, and call it with :meth:`call`."""
        graph = ir.Graph(
            self.inputs,
            [tensor.value for tensor in self.outputs.values()],
            nodes=self.nodes,
            opset_imports={"": self.root.opset, FUNCTIONS: 1},
            name=name,
        )
        self.root.functions.append(ir.Function(FUNCTIONS, name, graph=graph, attributes=[]))
        self.root.opset_imports[FUNCTIONS] = 1

    def call(self, function: str, inputs: Sequence[Tensor], array: npt.NDArray) -> Tensor:
        return self.node(function, inputs, array, name=f"call_{function}", domain=FUNCTIONS)

    @property
    def root(self) -> Drawing:
        return self.parent.root if self.parent else self

    def model(self) -> ir.Model:
        outputs = {name: tensor.value for name, tensor in self.outputs.items()}
        model = make_model(self.inputs, self.nodes, self.initializers, outputs, self.opset)
        model.graph.opset_imports.update(self.opset_imports)
        for function in self.functions:
            model.functions[function.identifier()] = function
        return model

    def _unique(self, base: str) -> str:
        name = next(
            name
            for name in (f"{base}_{number}" for number in itertools.count())
            if name not in self.used
        )
        self.used.add(name)
        return name


def _numbers(array: npt.NDArray) -> npt.NDArray:
    """Floats as float64, small integers as int64."""
    if array.dtype == bool:
        return array
    whole = array.dtype.kind in "iu" or array.dtype.name in STORAGE
    return array.astype(np.int64 if whole else np.float64)


Draw = Callable[[Drawing], None]


def _case(
    row: int,
    name: str,
    draw: Draw,
    expect: Mapping[str, int] = FUSED,
    refusal: str | None = None,
    tolerance: float = EXACT,
    **more: object,
) -> LayoutCase:
    """Draw once for the numbers, and again for every model."""
    name = f"{row:02d}-{name}"

    def drawn() -> Drawing:
        drawing = Drawing(name)
        draw(drawing)
        return drawing

    first = drawn()
    reference = [tensor.array for tensor in first.outputs.values()]
    return LayoutCase(
        name,
        row,
        lambda: drawn().model(),
        first.feeds,
        reference,
        dict(expect),
        refusal,
        tolerance,
        **more,  # type: ignore[arg-type]
    )


def _refused(row: int, name: str, draw: Draw, refusal: str, **more: object) -> LayoutCase:
    return _case(row, name, draw, {}, refusal, **more)  # type: ignore[arg-type]


# One weight, one consumer.


def _matmul(
    spec: Quantized,
    lead: tuple[int, ...] = (3,),
    transposed: bool = False,
    perm: Sequence[int] | None = (1, 0),
    dtype: npt.DTypeLike = np.float32,
) -> Draw:
    """``x @ W``, through a Transpose where W is stored [N, K]."""

    def draw(g: Drawing) -> None:
        k = spec.shape[1 if transposed else 0]
        x = g.input("x", (*lead, k), dtype)
        w = g.dequantize(spec)
        if transposed:
            w = g.transpose(w, perm)
        g.output(g.matmul(x, w), dtype=dtype)

    return draw


def _shapes(block: int) -> list[tuple[int, int]]:
    """[K, N] that a kernel may get wrong: ragged, odd, short."""
    return [
        (2 * block, 8),
        (block + 7, 5),
        (block - 3, 6),
        (3 * block, 7),
        (1, 4),
        (2 * block + 1, 1),
        (1, 1),
    ]


BLOCKS = (16, 32, 64, 128, 256)


def _blockwise(row: int, transposed: bool, blocks: Sequence[int]) -> Iterator[LayoutCase]:
    choices = itertools.product(blocks, STORAGES, ZERO_POINTS)
    for number, (block, storage, zero_points) in enumerate(choices):
        shapes = _shapes(block)
        # 7 shapes against 3 zero points and 6 types: every pair comes up.
        k, n = shapes[number % len(shapes)]
        spec = Quantized(
            (n, k) if transposed else (k, n),
            storage,
            1 if transposed else 0,
            block,
            zero_points=zero_points,
        )
        name = f"{storage}-block{block}-k{k}-n{n}-zp_{zero_points}"
        yield _case(
            row,
            name,
            _matmul(spec, transposed=transposed),
            zero_points=spec.needs_zero_points,
            stored_weights=1,
        )


def _row_1() -> Iterator[LayoutCase]:
    yield from _blockwise(1, False, BLOCKS)
    leads = ((), (1,), (2, 3), (2, 1, 3))
    for lead, storage in itertools.product(leads, ("int4", "uint4", "uint8")):
        spec = Quantized((70, 9), storage, 0, 32, zero_points="random")
        yield _case(1, f"rank{len(lead) + 1}-{storage}", _matmul(spec, lead))
    for storage in ("int4", "uint8", "int2"):
        spec = Quantized((70, 9), storage, -2, 32, zero_points="random")
        yield _case(1, f"axis_minus_2-{storage}", _matmul(spec))
    for storage in ("int4", "uint8", "uint2"):
        spec = Quantized((32, 32), storage, 1, 16)
        yield _refused(1, f"blocks_across_columns-{storage}", _matmul(spec), "matmul")


def _row_2() -> Iterator[LayoutCase]:
    yield from _blockwise(2, True, (16, 32, 128))
    for axis, perm in ((1, None), (-1, (1, 0)), (-1, None)):
        for storage in ("int4", "uint4", "int8"):
            spec = Quantized((9, 70), storage, axis, 32, zero_points="random")
            written = "default" if perm is None else "given"
            yield _case(
                2,
                f"axis_{axis}-perm_{written}-{storage}".replace("-1", "minus_1"),
                _matmul(spec, transposed=True, perm=perm),
            )
    leads = ((), (1,), (2, 3), (2, 1, 3))
    for lead, storage in itertools.product(leads, ("uint4", "int8")):
        spec = Quantized((9, 64), storage, 1, 32, zero_points="random")
        yield _case(2, f"rank{len(lead) + 1}-{storage}", _matmul(spec, lead, True))
    for storage in ("int4", "uint8"):
        spec = Quantized((32, 32), storage, 0, 16)
        draw = _matmul(spec, transposed=True)
        yield _refused(2, f"blocks_across_columns-{storage}", draw, "matmul")
        spec = Quantized((32, 32), storage, 0, 16, zero_points="random")
        draw = _matmul(spec, transposed=True, perm=(0, 1))
        yield _case(2, f"perm_that_keeps-{storage}", draw)
    for storage, zero_points in itertools.product(STORAGES, ("none", "random")):
        spec = Quantized((6, 70), storage, 1, 32, zero_points=zero_points)
        draw = _fused_matmul(spec, transB=1)
        yield _case(2, f"fusedmatmul-transb-{storage}-zp_{zero_points}", draw)
    for attributes in (
        {"transB": 1, "alpha": 0.5},
        {"transB": 1, "alpha": 0.3},
        {"transB": 0, "alpha": -1.7},
        {"transB": 1, "transA": 1},
        {"transB": 0, "transA": 1},
        {"transB": 1, "transA": 1, "alpha": 2.0},
    ):
        spec = Quantized((6, 64) if attributes["transB"] else (64, 6), "uint4", 0, 32)
        spec = dataclasses.replace(spec, axis=attributes["transB"], zero_points="random")
        name = "-".join(f"{key}_{value}" for key, value in attributes.items())
        yield _case(2, f"fusedmatmul-{name}", _fused_matmul(spec, **attributes))
    spec = Quantized((64, 6), "int4", 0, 32)
    yield _case(2, "fusedmatmul-nothing_transposed", _fused_matmul(spec))
    spec = Quantized((6, 64), "int4", 1, 32)
    yield _case(2, "fusedmatmul-transb-rank3", _fused_matmul(spec, (2, 3), transB=1))


def _fused_matmul(spec: Quantized, lead: tuple[int, ...] = (3,), **attributes: float) -> Draw:
    def draw(g: Drawing) -> None:
        k = spec.shape[1 if attributes.get("transB") else 0]
        if attributes.get("transA"):
            x = g.input("x", (k, 3), static=(0,))
        else:
            x = g.input("x", (*lead, k))
        g.output(g.fused_matmul(x, g.dequantize(spec), **attributes))

    return draw


def _row_3() -> Iterator[LayoutCase]:
    """Blocks as an axis of their own."""
    for storage, zero_points in itertools.product(STORAGES, ZERO_POINTS):
        spec = Quantized((6, 3, 32), storage, 2, 32, zero_points=zero_points)
        for consumer in ("matmul", "gemm"):
            yield _case(
                3,
                f"{consumer}-{storage}-zp_{zero_points}",
                _three_dimensional(spec, consumer),
                zero_points=spec.needs_zero_points,
            )
    written = ((6, -1), (-1, 96), (0, 96), (0, -1))
    for shape, storage in itertools.product(written, ("uint4", "int8")):
        spec = Quantized((6, 3, 32), storage, -1, 32, zero_points="random")
        text = "_".join("rest" if size == -1 else str(size) for size in shape)
        draw = _three_dimensional(spec, written=shape)
        yield _case(3, f"reshape_{text}-{storage}", draw)
    for block, blocks, n in ((16, 1, 5), (16, 5, 7), (64, 2, 1), (128, 1, 3), (256, 1, 2)):
        spec = Quantized((n, blocks, block), "uint4", 2, block, zero_points="random")
        yield _case(3, f"block{block}-blocks{blocks}-n{n}", _three_dimensional(spec))
    half = Quantized((6, 3, 32), "uint4", 2, 32, zero_points="random", scale_dtype=np.float16)
    for cast in ("before", "after"):
        for consumer in ("matmul", "gemm"):
            draw = _three_dimensional(half, consumer, cast=cast)
            yield _case(3, f"cast_{cast}-{consumer}", draw, tolerance=HALF)
    spec = Quantized((6, 3, 32), "int4", 2, 32, zero_points="random")
    yield _case(3, "gemm-transb", _three_dimensional(spec, "gemm_transb"))
    spec = Quantized((6, 4, 16), "uint4", 2, 16, zero_points="random")
    yield _case(3, "rank3", _three_dimensional(spec, lead=(2, 3)))
    yield _case(3, "reshape_that_splits_rows", _split_rows)
    yield _case(3, "blocks_first", _blocks_first)


def _three_dimensional(
    spec: Quantized,
    consumer: str = "matmul",
    written: Sequence[int] = (),
    cast: str = "",
    lead: tuple[int, ...] = (3,),
) -> Draw:
    n, blocks, block = spec.shape

    def draw(g: Drawing) -> None:
        x = g.input("x", (*lead, blocks * block))
        w = g.dequantize(spec)
        if cast == "before":
            w = g.cast(w, np.float32)
        w = g.reshape(w, (n, blocks * block), written)
        if consumer == "gemm_transb":
            return g.output(g.gemm(x, w, transB=1))
        w = g.transpose(w)
        if cast == "after":
            w = g.cast(w, np.float32)
        return g.output(g.matmul(x, w) if consumer == "matmul" else g.gemm(x, w))

    return draw


def _split_rows(g: Drawing) -> None:
    x = g.input("x", (3, 64))
    w = g.dequantize(Quantized((4, 4, 32), "uint4", 2, 32, zero_points="random"))
    g.output(g.matmul(x, g.transpose(g.reshape(w, (8, 64)))))


def _blocks_first(g: Drawing) -> None:
    """Codes [blocks, block, N], scales [blocks, 1, N]: axis 1."""
    x = g.input("x", (3, 64))
    w = g.dequantize(Quantized((2, 32, 6), "uint4", 1, 32, zero_points="random"))
    g.output(g.matmul(x, g.reshape(w, (64, 6))))


# Gemm and bias.

FUSED_GEMM = {**FUSED, "Gemm": 0}
ROWS, K, N = 3, 70, 6


def _bias(g: Drawing, kind: str, n: int = N) -> Tensor | None:
    """A bias as its name says; codes of a dequantised one in int32 or int8."""
    shapes = {
        "n": (n,),
        "1_n": (1, n),
        "1": (1,),
        "scalar": (),
        "m_n": (ROWS, n),
        "m_1": (ROWS, 1),
    }
    if kind == "absent":
        return None
    if kind == "runtime":
        return g.input("bias", (n,))
    if kind in shapes:
        return g.floats("bias", shapes[kind])
    storage, scaled, *zero_point = kind.split("_")
    dtype = np.dtype(storage)
    codes = g.rng.integers(-100, 100, n).astype(dtype)
    scales = g.rng.uniform(0.005, 0.02, (n,) if scaled == "channel" else ())
    tensors = [
        g.constant("bias", codes),
        g.constant("bias_scale", np.asarray(scales, np.float32)),
    ]
    offset = np.zeros(scales.shape if scaled == "channel" else (), dtype)
    if zero_point:
        # onnxruntime takes no other zero point than 0 for int32.
        offset = offset if storage == "int32" else offset + dtype.type(17)
        tensors.append(g.constant("bias_zero_point", np.asarray(offset, dtype)))
    array = (tensors[0].array - offset.astype(np.int64)) * tensors[1].array
    attributes = {"axis": 0} if scaled == "channel" else {}
    return g.node("DequantizeLinear", tensors, array, attributes, "dq_bias")


def _gemm(
    bias: str = "absent",
    storage: str = "uint4",
    zero_points: str = "random",
    scaled: str = "blocks",
    **attributes: float,
) -> Draw:
    def draw(g: Drawing) -> None:
        trans_a, trans_b = attributes.get("transA"), attributes.get("transB")
        x = g.input("x", (K, ROWS), static=(0,)) if trans_a else g.input("x", (ROWS, K))
        shape = (N, K) if trans_b else (K, N)
        axis = 1 if trans_b else 0
        if scaled == "channel":
            spec = Quantized(shape, storage, 1 - axis, 0, scaled, zero_points)
        else:
            block = 32 if scaled == "blocks" else 0
            spec = Quantized(shape, storage, axis, block, scaled, zero_points)
        w = g.dequantize(spec)
        g.output(g.gemm(x, w, _bias(g, bias), **attributes))

    return draw


def _row_4() -> Iterator[LayoutCase]:
    for storage, zero_points, trans_b in itertools.product(
        STORAGES, ("none", "random"), (0, 1)
    ):
        draw = _gemm("n", storage, zero_points, transB=trans_b)
        name = f"transb{trans_b}-{storage}-zp_{zero_points}"
        yield _case(4, name, draw, FUSED_GEMM)
    for alpha, trans_b in itertools.product((0.5, 2.0, 0.3, -1.7), (0, 1)):
        for bias in ("absent", "n"):
            draw = _gemm(bias, alpha=alpha, transB=trans_b)
            name = f"alpha_{alpha}-transb{trans_b}-bias_{bias}"
            if alpha in (0.5, 2.0):
                yield _case(4, name, draw, FUSED_GEMM)
            else:
                yield _case(4, name, draw, FUSED_GEMM)
    for number, (beta, bias) in enumerate(
        itertools.product((1.0, 0.0, 0.5, 0.3), ("n", "1_n", "1", "scalar"))
    ):
        draw = _gemm(bias, beta=beta, transB=number % 2)
        yield _case(4, f"beta_{beta}-bias_{bias}", draw, FUSED_GEMM)
    for beta, bias in itertools.product((1.0, 0.5, 0.0), ("m_n", "m_1", "runtime")):
        draw = _gemm(bias, beta=beta, transB=1)
        yield _case(4, f"beta_{beta}-bias_{bias}", draw, FUSED_GEMM)
    for trans_b, bias in itertools.product((0, 1), ("absent", "n", "1")):
        draw = _gemm(bias, transA=1, transB=trans_b)
        yield _case(4, f"transa-transb{trans_b}-bias_{bias}", draw, FUSED_GEMM)
    draw = _gemm("n", alpha=0.5, beta=0.3, transB=1, storage="int8")
    yield _case(4, "alpha_0.5-beta_0.3", draw, FUSED_GEMM)
    draw = _gemm("1", alpha=2.0, beta=0.5, storage="int2")
    yield _case(4, "alpha_2-beta_0.5", draw, FUSED_GEMM)
    kinds = (
        "int32_tensor",
        "int32_tensor_zp",
        "int32_channel",
        "int8_tensor",
        "int8_tensor_zp",
    )
    for bias, trans_b in itertools.product(kinds, (0, 1)):
        draw = _gemm(bias, transB=trans_b, storage="int8", scaled="channel")
        yield _case(4, f"bias_{bias}-transb{trans_b}", draw, FUSED_GEMM)
    draw = _gemm("int32_tensor", beta=0.5, transB=1)
    yield _case(4, "bias_int32_tensor-beta_0.5", draw, FUSED_GEMM)
    for scaled, trans_b in itertools.product(("tensor", "tensor1", "channel"), (0, 1)):
        draw = _gemm("n", "uint8", "random", scaled, transB=trans_b)
        yield _case(4, f"{scaled}-transb{trans_b}", draw, FUSED_GEMM)
    yield _case(4, "shared_bias", _gemms_with_one_bias, {**FUSED_GEMM, "MatMulNBits": 2})


def _gemms_with_one_bias(g: Drawing) -> None:
    x, bias = g.input("x", (ROWS, K)), g.floats("bias", (N,))
    for name in ("first", "second"):
        w = g.dequantize(Quantized((K, N), "int4", 0, 32), name=name)
        beta = 1.0 if name == "first" else 0.5
        g.output(g.gemm(x, w, bias, beta=beta), f"y_{name}")


WITHOUT_ADD = {**FUSED, "Add": 0}
WITH_ADD = {**FUSED, "Add": 1}


def _row_5() -> Iterator[LayoutCase]:
    kept = {"1", "scalar", "runtime"}  # shapes that MatMulNBits' bias [N] does not take as is
    for bias, first in itertools.product(
        ("n", "1_n", "1", "scalar", "runtime", "int32_tensor", "int8_tensor_zp"),
        ("product_first", "bias_first"),
    ):
        for transposed in (False, True):
            draw = _matmul_add(bias, first == "bias_first", transposed=transposed)
            layout = "transposed" if transposed else "axis0"
            expect = FUSED if bias in kept else WITHOUT_ADD
            yield _case(5, f"bias_{bias}-{first}-{layout}", draw, expect)
    for storage in STORAGES:
        yield _case(5, f"bias_n-{storage}", _matmul_add("n", storage=storage), WITHOUT_ADD)
    for shape in ((N,), (1, N), (1, 1, N)):
        draw = _matmul_add(shape, lead=(2, 3))
        name = "_".join(map(str, shape))
        yield _case(5, f"rank3-bias_{name}", draw, WITHOUT_ADD)
    # Where the bias would change the shape or differs by row, the Add is no bias.
    for shape, lead in (
        ((1, 1, N), (ROWS,)),
        ((1, N), ()),
        ((ROWS, N), (ROWS,)),
        ((ROWS, 1), (ROWS,)),
        ((2, 1, N), (2, 3)),
        ((2, ROWS, N), (ROWS,)),
    ):
        name = "_".join(map(str, shape))
        draw = _matmul_add(shape, lead=lead)
        yield _case(5, f"add_stays-rank{len(lead) + 1}-bias_{name}", draw, WITH_ADD)
    draw = _matmul_add((5,), n=1)
    yield _case(5, "add_stays-one_column-bias_5", draw, WITH_ADD)
    yield _case(5, "add_stays-second_consumer", _matmul_add("n", second="relu"), WITH_ADD)
    yield _case(5, "add_stays-graph_output", _matmul_add("n", second="output"), WITH_ADD)
    yield _case(5, "sum_of_two_products", _sum_of_products, {**WITH_ADD, "MatMulNBits": 2})
    yield _case(5, "two_adds", _two_adds, {**FUSED, "Add": 1})


def _matmul_add(
    bias: str | tuple[int, ...],
    bias_first: bool = False,
    storage: str = "uint4",
    transposed: bool = False,
    lead: tuple[int, ...] = (ROWS,),
    second: str = "",
    n: int = N,
) -> Draw:
    def draw(g: Drawing) -> None:
        x = g.input("x", (*lead, K))
        shape = (n, K) if transposed else (K, n)
        axis = 1 if transposed else 0
        w = g.dequantize(Quantized(shape, storage, axis, 32, zero_points="random"))
        y = g.matmul(x, g.transpose(w) if transposed else w)
        b = _bias(g, bias, n) if isinstance(bias, str) else g.floats("bias", bias)
        assert b is not None
        if second == "relu":
            g.output(g.relu(y), "other")
        elif second == "output":
            g.output(y, "other")
        g.output(g.add(b, y) if bias_first else g.add(y, b))

    return draw


def _sum_of_products(g: Drawing) -> None:
    x = g.input("x", (ROWS, K))
    a, b = (
        g.matmul(x, g.dequantize(Quantized((K, N), "int4", 0, 32), name=name))
        for name in ("first", "second")
    )
    g.output(g.add(a, b))


def _two_adds(g: Drawing) -> None:
    x = g.input("x", (ROWS, K))
    y = g.matmul(x, g.dequantize(Quantized((K, N), "int4", 0, 32)))
    g.output(g.add(g.add(y, g.floats("bias", (N,))), g.floats("offset", (N,))))


def _row_6() -> Iterator[LayoutCase]:
    """Types that differ between scales and activations."""
    half, single = np.float16, np.float32
    for storage, zero_points in itertools.product(STORAGES, ("none", "random")):
        name = f"{storage}-zp_{zero_points}"
        for transposed in (False, True):
            shape, axis = ((N, K), 1) if transposed else ((K, N), 0)
            spec = Quantized(shape, storage, axis, 32, "blocks", zero_points, half)
            layout = "transposed" if transposed else "axis0"
            draw = _matmul(spec, transposed=transposed, dtype=half)
            yield _case(6, f"float16-{layout}-{name}", draw, tolerance=HALF)
        draw = _cast_matmul(
            Quantized((K, N), storage, 0, 32, "blocks", zero_points, half), single
        )
        yield _case(6, f"float16_cast_float32-{name}", draw, tolerance=HALF)
        draw = _cast_matmul(Quantized((K, N), storage, 0, 32, "blocks", zero_points), half)
        yield _case(6, f"float32_cast_float16-{name}", draw, tolerance=HALF)
    for order in ("cast_transpose", "transpose_cast"):
        for scale_dtype, dtype in ((half, single), (single, half)):
            spec = Quantized((N, K), "uint4", 1, 32, "blocks", "random", scale_dtype)
            name = f"{order}-to_{np.dtype(dtype).name}"
            yield _case(6, name, _cast_matmul(spec, dtype, order), tolerance=HALF)
    spec = Quantized((K, N), "int4", 0, 32, zero_points="random")
    yield _case(6, "cast_that_keeps_the_type", _cast_matmul(spec, single))
    for scale_dtype, dtype in ((single, half), (half, single), (single, single)):
        spec = Quantized((K, N), "uint4", 0, 32, "blocks", "random", scale_dtype)
        name = f"output_dtype-{np.dtype(scale_dtype).name}-{np.dtype(dtype).name}"
        tolerance = EXACT if scale_dtype is dtype else HALF
        yield _case(6, name, _output_dtype(spec, dtype), tolerance=tolerance)
    spec = Quantized((K, N), "uint4", 0, 32, "blocks", "random", half)
    yield _case(6, "float16-bias", _float16_bias(spec), WITHOUT_ADD, tolerance=HALF)
    yield _case(6, "float16-gemm", _float16_gemm(spec), FUSED_GEMM, tolerance=HALF)
    spec = Quantized((K, N), "int8", None, 0, "channel", "none", half)
    yield _case(6, "float16-channel", _matmul(spec, dtype=half), tolerance=HALF)


def _cast_matmul(spec: Quantized, dtype: npt.DTypeLike, order: str = "cast") -> Draw:
    def draw(g: Drawing) -> None:
        x = g.input("x", (ROWS, K), dtype)
        w = g.dequantize(spec)
        for step in order.split("_"):
            w = g.cast(w, dtype) if step == "cast" else g.transpose(w)
        g.output(g.matmul(x, w), dtype=dtype)

    return draw


def _output_dtype(spec: Quantized, dtype: npt.DTypeLike) -> Draw:
    def draw(g: Drawing) -> None:
        g.opset = 23
        x = g.input("x", (ROWS, K), dtype)
        w = g.dequantize(spec)
        node = w.value.producer()
        assert node is not None
        to = int(ir.DataType.from_numpy(np.dtype(dtype)))
        node.attributes["output_dtype"] = ir.AttrInt64("output_dtype", to)
        g.output(g.matmul(x, w), dtype=dtype)

    return draw


def _float16_bias(spec: Quantized) -> Draw:
    def draw(g: Drawing) -> None:
        y = g.matmul(g.input("x", (ROWS, K), np.float16), g.dequantize(spec))
        g.output(g.add(y, g.floats("bias", (N,), np.float16)), dtype=np.float16)

    return draw


def _float16_gemm(spec: Quantized) -> Draw:
    def draw(g: Drawing) -> None:
        x, bias = g.input("x", (ROWS, K), np.float16), g.floats("bias", (N,), np.float16)
        g.output(g.gemm(x, g.dequantize(spec), bias, alpha=0.5), dtype=np.float16)

    return draw


def _row_7() -> Iterator[LayoutCase]:
    """One scale, or one for each column."""
    sizes = ((256, 6), (128, 5), (70, 6), (33, 3), (1, 4), (300, 1))
    scaled = ("tensor", "tensor1", "channel")
    choices = itertools.product(STORAGES, scaled, ("none", "random"), (False, True))
    for number, (storage, kind, zero_points, transposed) in enumerate(choices):
        k, n = sizes[number % len(sizes)]
        axis = None
        if kind == "channel":
            axis = 0 if transposed else (1, None, -1)[number % 3]
        shape = (n, k) if transposed else (k, n)
        spec = Quantized(shape, storage, axis, 0, kind, zero_points)
        layout = "transposed" if transposed else "axis0"
        yield _case(
            7,
            f"{kind}-{layout}-{storage}-k{k}-n{n}-zp_{zero_points}",
            _matmul(spec, transposed=transposed),
            zero_points=spec.needs_zero_points,
            block_sizes=(128, 256) if k % 128 == 0 else (),
        )
    for storage in ("int4", "uint8", "int2"):
        spec = Quantized((64, 6), storage, 0, 0, "channel")
        yield _refused(7, f"channels_along_k-{storage}", _matmul(spec), "matmul")
        spec = Quantized((6, 64), storage, 1, 0, "channel", "random")
        draw = _matmul(spec, transposed=True)
        yield _refused(7, f"channels_along_k-transposed-{storage}", draw, "matmul")
    spec = Quantized((64, 64), "uint8", 0, 0, "channel", "random")
    yield _refused(7, "channels_along_k-square", _matmul(spec), "matmul")
    spec = Quantized((256, 6), "int8", -2, 0, "channel")
    yield _refused(7, "channels_along_k-axis_minus_2", _matmul(spec), "matmul")


# Sharing, embeddings.


def _row_8() -> Iterator[LayoutCase]:
    two = {**FUSED, "MatMulNBits": 2}
    for storage, transposed in itertools.product(("int4", "uint4", "uint8", "int2"), (0, 1)):
        shape, axis = ((6, 70), 1) if transposed else ((70, 6), 0)
        spec = Quantized(shape, storage, axis, 32, zero_points="random")
        layout = f"{storage}-{'transposed' if transposed else 'axis0'}"
        for name, draw, stored in (
            ("one_dequantize_two_matmuls", _two_consumers(spec), 1),
            ("two_dequantizes_one_weight", _two_dequantizes(spec), 1),
            ("one_scale_two_weights", _one_scale(spec), 2),
        ):
            yield _case(8, f"{name}-{layout}", draw, two, stored_weights=stored)
    spec = Quantized((6, 70), "uint4", 1, 32, zero_points="random")
    yield _case(8, "two_transposes", _two_transposes(spec), two, stored_weights=1)
    spec = Quantized((70, 6), "uint4", 0, 32, zero_points="random")
    gemm = {**two, "Gemm": 0}
    yield _case(8, "matmul_and_gemm", _matmul_and_gemm(spec), gemm, stored_weights=1)
    yield _case(
        8,
        "dequantize_is_an_output_too",
        _dequantize_is_output(spec),
        {"MatMulNBits": 1, "DequantizeLinear": 1},
        "dq_w",
    )
    yield _case(8, "one_square_weight_both_ways", _both_ways, two)
    for storage, tied in itertools.product(STORAGES, ("matmul", "gemm")):
        for scaled in ("blocks", "channel"):
            if scaled == "channel":
                spec = Quantized((9, 64), storage, 0, 0, "channel", "random")
            else:
                spec = Quantized((9, 64), storage, 1, 32, zero_points="random")
            expect = {**GATHERED, "MatMulNBits": 1}
            name = f"tied_embedding-{tied}-{scaled}-{storage}"
            yield _case(8, name, _tied(spec, tied), expect)


def _two_consumers(spec: Quantized) -> Draw:
    def draw(g: Drawing) -> None:
        x = g.input("x", (ROWS, 70))
        w = g.dequantize(spec)
        if spec.axis == 1:
            w = g.transpose(w)
        g.output(g.matmul(x, w, "first"), "y_first")
        g.output(g.matmul(g.relu(x), w, "second"), "y_second")

    return draw


def _two_dequantizes(spec: Quantized) -> Draw:
    def draw(g: Drawing) -> None:
        x, tensors = g.input("x", (ROWS, 70)), g.quantized(spec)
        for name in ("first", "second"):
            w = g.dequantize(spec, tensors, name)
            w = g.transpose(w) if spec.axis == 1 else w
            g.output(g.matmul(x, w, name), f"y_{name}")

    return draw


def _one_scale(spec: Quantized) -> Draw:
    def draw(g: Drawing) -> None:
        x, tensors = g.input("x", (ROWS, 70)), g.quantized(spec)
        other = g.quantized(spec, "v")
        g.initializers = [v for v in g.initializers if v is not other[1].value]
        for name, codes in (("first", tensors[0]), ("second", other[0])):
            zero_points = tensors[2] if name == "first" else other[2]
            w = g.dequantize(spec, [codes, tensors[1], zero_points], name)
            w = g.transpose(w) if spec.axis == 1 else w
            g.output(g.matmul(x, w, name), f"y_{name}")

    return draw


def _two_transposes(spec: Quantized) -> Draw:
    def draw(g: Drawing) -> None:
        x, w = g.input("x", (ROWS, 70)), g.dequantize(spec)
        for name in ("first", "second"):
            g.output(g.matmul(x, g.transpose(w), name), f"y_{name}")

    return draw


def _matmul_and_gemm(spec: Quantized) -> Draw:
    def draw(g: Drawing) -> None:
        x, w = g.input("x", (ROWS, 70)), g.dequantize(spec)
        g.output(g.matmul(x, w), "y_matmul")
        g.output(g.gemm(x, w, g.floats("bias", (6,))), "y_gemm")

    return draw


def _dequantize_is_output(spec: Quantized) -> Draw:
    def draw(g: Drawing) -> None:
        x, w = g.input("x", (ROWS, 70)), g.dequantize(spec)
        g.output(w, "w_float")
        g.output(g.matmul(x, w))

    return draw


def _both_ways(g: Drawing) -> None:
    """The same bytes as [K, N] and as [N, K]: two different weights."""
    x = g.input("x", (ROWS, 32))
    columns = Quantized((32, 32), "int4", 0, 32)
    rows = Quantized((32, 32), "int4", 1, 32)
    codes, scale = g.quantized(columns)
    row_scale = g.constant("row_scale", np.ascontiguousarray(scale.array.T, np.float32))
    first = g.dequantize(columns, [codes, scale], "first")
    second = g.dequantize(rows, [codes, row_scale], "second")
    g.output(g.matmul(x, first, "first"), "y_first")
    g.output(g.matmul(x, g.transpose(second), "second"), "y_second")


def _tied(spec: Quantized, head: str) -> Draw:
    def draw(g: Drawing) -> None:
        ids = g.feed("ids", np.int64([[0, 8, 3]]), ["batch", "tokens"])
        x = g.input("x", (ROWS, 64))
        w = g.dequantize(spec)
        g.output(g.gather(w, ids), "embedded")
        if head == "matmul":
            g.output(g.matmul(x, g.transpose(w)), "logits")
        else:
            g.output(g.gemm(x, w, transB=1), "logits")

    return draw


def _row_9() -> Iterator[LayoutCase]:
    """Embeddings, [rows, columns].

    GatherBlockQuantized takes 4-bit types on any axis. It takes 8 and 2 bits only as uint8:
    rows gathered, blocks along the last axis, whole bytes in each row.
    """
    shape = (40, 72)
    for storage, zero_points in itertools.product(STORAGES, ZERO_POINTS):
        spec = Quantized(shape, storage, 1, 32, zero_points=zero_points)
        yield _case(9, f"axis0-last-{storage}-zp_{zero_points}", _gather(spec), GATHERED)
    four = ("int4", "uint4")
    for storage, blocked, axis in itertools.product(STORAGES, (0, 1), (0, 1, -1)):
        if (blocked, axis) == (1, 0):
            continue
        spec = Quantized(shape, storage, blocked, 16, zero_points="random")
        name = f"axis{axis}-blocked{blocked}-{storage}".replace("-1", "_minus_1")
        draw = _gather(spec, axis)
        if storage in four:
            yield _case(9, name, draw, GATHERED)
        else:
            yield _refused(9, name, draw, "gather")
    for storage, scaled in itertools.product(
        STORAGES, ("tensor", "tensor1", "rows", "columns")
    ):
        kind = "channel" if scaled in ("rows", "columns") else scaled
        axis = 0 if scaled == "rows" else None
        spec = Quantized((40, 64), storage, axis, 0, kind, "random")
        name = f"{scaled}-{storage}"
        if scaled == "columns" and storage not in four:
            yield _refused(9, name, _gather(spec), "gather")
        else:
            yield _case(9, name, _gather(spec), GATHERED)
    for block, storage in itertools.product((64, 128, 256), ("uint4", "int8", "uint2")):
        spec = Quantized((9, 300), storage, -1, block, zero_points="random")
        yield _case(9, f"block{block}-{storage}", _gather(spec), GATHERED)
    for storage in ("int4", "uint8"):
        spec = Quantized((9, 32), storage, 1, 8, zero_points="random")
        yield _refused(9, f"block8-{storage}", _gather(spec), "gather")
        for block in (512, 1024):
            spec = Quantized((9, 600), storage, 1, block, zero_points="random")
            yield _case(9, f"block{block}-{storage}", _gather(spec), GATHERED)
    half = np.float16
    for storage in ("int4", "uint4", "uint8", "int2"):
        spec = Quantized(shape, storage, 1, 32, "blocks", "random", half)
        draw = _gather(spec, dtype=half)
        yield _case(9, f"float16-{storage}", draw, GATHERED, tolerance=HALF)
        draw = _gather(spec, cast=True)
        yield _case(9, f"float16_cast-{storage}", draw, GATHERED, tolerance=HALF)
    indices = {
        "scalar": np.int64(7),
        "rank1_int32": np.int32([3, 0, 39]),
        "negative": np.int64([[-1, 2], [-40, -7]]),
        "negative_int32": np.int32([-1]),
        "repeated": np.int64([5, 5, 5]),
    }
    for name, array in indices.items():
        for storage in ("uint4", "int8"):
            spec = Quantized(shape, storage, 1, 32, zero_points="random")
            draw = _gather(spec, indices=np.asarray(array))
            yield _case(9, f"indices_{name}-{storage}", draw, GATHERED)
    for storage in STORAGES:
        spec = Quantized((5, 33), storage, 1, 32, zero_points="random")
        draw = _gather(spec, indices=np.int64([0, 4, 2]))
        if STORAGE[storage][0] == 2:
            yield _refused(9, f"odd_columns-{storage}", draw, "gather")
        else:
            yield _case(9, f"odd_columns-{storage}", draw, GATHERED)
    for storage, axis in itertools.product(("uint4", "uint8"), (0, 1)):
        spec = Quantized((4, 6, 64), storage, 2, 32, zero_points="random")
        draw = _gather(spec, axis, np.int64([3, 0]))
        name = f"three_dimensional-axis{axis}-{storage}"
        if storage == "uint8" and axis:
            yield _refused(9, name, draw, "gather")
        else:
            yield _case(9, name, draw, GATHERED)
    spec = Quantized(shape, "uint4", 1, 32, zero_points="random")
    yield _case(9, "two_gathers", _two_gathers(spec), {**GATHERED, "GatherBlockQuantized": 2})


def _gather(
    spec: Quantized,
    axis: int = 0,
    indices: npt.NDArray | None = None,
    dtype: npt.DTypeLike = np.float32,
    cast: bool = False,
) -> Draw:
    def draw(g: Drawing) -> None:
        size = spec.shape[axis]
        array = np.int64([[0, size - 1, 2], [1, 1, size // 2]]) if indices is None else indices
        ids = g.feed("ids", array, [f"ids_{i}" for i in range(array.ndim)])
        y = g.gather(g.dequantize(spec), ids, axis)
        g.output(g.cast(y, np.float32) if cast else y, dtype=dtype)

    return draw


def _two_gathers(spec: Quantized) -> Draw:
    def draw(g: Drawing) -> None:
        w = g.dequantize(spec)
        for name in ("first", "second"):
            ids = g.feed(f"ids_{name}", g.rng.integers(0, 40, 3), ["tokens"])
            g.output(g.gather(w, ids), f"y_{name}")

    return draw


# Where the weight is.


def _row_10() -> Iterator[LayoutCase]:
    for storage, transposed in itertools.product(STORAGES, (False, True)):
        shape, axis = ((6, 70), 1) if transposed else ((70, 6), 0)
        spec = Quantized(shape, storage, axis, 32, zero_points="random")
        layout = f"{storage}-{'transposed' if transposed else 'axis0'}"
        yield _case(10, f"constant_nodes-{layout}", _constant_nodes(spec))
    for storage, where in itertools.product(
        ("int4", "uint4", "uint8", "int2"), ("codes", "scale", "zero_point", "output")
    ):
        spec = Quantized((70, 6), storage, 0, 32, zero_points="random")
        # onnxruntime has no Identity kernel for less than 8 bits.
        runs = storage == "uint8" or where in ("scale", "output")
        yield _case(10, f"identity_of_{where}-{storage}", _identity(spec, where), runs=runs)
    spec = Quantized((40, 70), "uint4", 1, 32, zero_points="random")
    yield _case(10, "identity_and_gather", _identity_and_gather(spec), GATHERED)
    drawers = {"if": _if, "loop": _loop, "scan": _scan}
    for name, draw_in in drawers.items():
        count = 2 if name == "if" else 1
        expect = {"MatMulNBits": count, "DequantizeLinear": 0}
        for storage, where in itertools.product(
            ("int4", "uint4", "uint8"), ("body", "body_constants", "outer", "outer_dequantize")
        ):
            spec = Quantized((32, 32), storage, 0, 16, zero_points="random")
            yield _case(10, f"{name}-{where}-{storage}", draw_in(spec, where), expect)
    for where in ("body", "outer"):
        spec = Quantized((32, 32), "uint4", 1, 16, zero_points="random")
        yield _case(10, f"loop-{where}-transposed", _loop(spec, where))
    yield _case(10, "if_inside_loop", _if_inside_loop)
    spec = Quantized((32, 6), "uint4", 0, 16, zero_points="random")
    draw = _if_shares_with_graph(spec)
    yield _case(10, "if_shares_with_graph", draw, {**FUSED, "MatMulNBits": 3})
    for storage, transposed in itertools.product(("int4", "uint4", "int8", "uint2"), (0, 1)):
        shape, axis = ((6, 70), 1) if transposed else ((70, 6), 0)
        spec = Quantized(shape, storage, axis, 32, zero_points="random")
        layout = f"{storage}-{'transposed' if transposed else 'axis0'}"
        draw = _function_of_weights(spec, 1)
        yield _case(10, f"function_of_weights-{layout}", draw)
        yield _case(10, f"function_with_constants-{layout}", _function_with_constants(spec))
    spec = Quantized((70, 6), "uint4", 0, 32, zero_points="random")
    draw = _function_of_weights(spec, 2)
    yield _case(10, "function_called_twice", draw, {**FUSED, "MatMulNBits": 2})
    yield _case(10, "function_of_a_dequantized_weight", _function_of_dequantized(spec))
    # A function in a function takes no 4-bit argument in onnxruntime.
    spec = Quantized((70, 6), "uint8", 0, 32, zero_points="random")
    yield _case(10, "function_in_function", _function_in_function(spec))


def _constant_nodes(spec: Quantized) -> Draw:
    def draw(g: Drawing) -> None:
        x = g.input("x", (ROWS, 70))
        g.constant_nodes = True
        w = g.dequantize(spec)
        g.output(g.matmul(x, g.transpose(w) if spec.axis == 1 else w))

    return draw


def _identity(spec: Quantized, where: str) -> Draw:
    def draw(g: Drawing) -> None:
        x, tensors = g.input("x", (ROWS, 70)), g.quantized(spec)
        if where != "output":
            index = ("codes", "scale", "zero_point").index(where)
            tensors[index] = g.identity(tensors[index])
        w = g.dequantize(spec, tensors)
        g.output(g.matmul(x, g.identity(w) if where == "output" else w))

    return draw


def _identity_and_gather(spec: Quantized) -> Draw:
    def draw(g: Drawing) -> None:
        ids = g.feed("ids", np.int64([0, 39, 7]), ["tokens"])
        g.output(g.gather(g.identity(g.dequantize(spec)), ids))

    return draw


def _place(g: Drawing, spec: Quantized, where: str) -> Callable[[Drawing, str], Tensor]:
    """Write the weight's outer part; return what writes its part in a body."""
    tensors = g.quantized(spec) if where.startswith("outer") else None
    outer = g.dequantize(spec, tensors) if where == "outer_dequantize" else None

    def weight(body: Drawing, name: str) -> Tensor:
        if outer is not None:
            return outer
        body.constant_nodes = where == "body_constants"
        w = body.dequantize(spec, tensors, name)
        return body.transpose(w) if spec.axis == 1 else w

    return weight


def _if(spec: Quantized, where: str) -> Draw:
    def draw(g: Drawing) -> None:
        x = g.input("x", (ROWS, 32))
        condition = g.feed("condition", np.array(bool(zlib.crc32(g.name.encode()) % 2)), [])
        weight = _place(g, spec, where)
        branches, chosen = {}, None
        for branch in ("then", "else"):
            body = g.body()
            y = body.matmul(x, weight(body, branch), f"matmul_{branch}")
            if branch == "else":
                y = body.relu(y)
            body.output(y, f"y_{branch}")
            branches[f"{branch}_branch"] = body.graph()
            if chosen is None or not condition.array:
                chosen = y
        assert chosen is not None
        g.output(g.node("If", [condition], chosen.array, branches))

    return draw


def _loop(spec: Quantized, where: str) -> Draw:
    """``x @ W`` twice; scales are about 1/8 of a code, so that the numbers stay near 1."""

    def draw(g: Drawing) -> None:
        x = g.input("x", (ROWS, 32))
        trips = g.constant("trips", np.int64(2))
        weight = _place(g, spec, where)
        body, state, condition = _loop_body(g)
        w = weight(body, "w")
        product = body.matmul(state, w)
        body.output(body.identity(condition), "go_on", np.bool_)
        body.output(product, "state_out")
        array = x.array @ w.array @ w.array
        g.output(g.node("Loop", [trips, None, x], array, {"body": body.graph()}))

    return draw


def _loop_body(g: Drawing) -> tuple[Drawing, Tensor, Tensor]:
    iteration = ir.val("iteration", ir.DataType.INT64, [])
    go_on = ir.val("go_on_in", ir.DataType.BOOL, [])
    state = ir.val("state", ir.DataType.FLOAT, ["rows", 32])
    body = g.body([iteration, go_on, state])
    # What the state holds differs by iteration: the caller computes the result itself.
    return body, Tensor(state, np.zeros((ROWS, 32))), Tensor(go_on, np.array(True))


def _scan(spec: Quantized, where: str) -> Draw:
    """``x[t] @ W`` for each t, and their running sum."""

    def draw(g: Drawing) -> None:
        x = g.input("x", (2, ROWS, 32))
        zeros = g.constant("zeros", np.zeros((ROWS, 32), np.float32))
        weight = _place(g, spec, where)
        total = ir.val("total", ir.DataType.FLOAT, [ROWS, 32])
        element = ir.val("element", ir.DataType.FLOAT, [ROWS, 32])
        body = g.body([total, element])
        blank = np.zeros((ROWS, 32))
        w = weight(body, "w")
        product = body.matmul(Tensor(element, blank), w)
        body.output(body.add(Tensor(total, blank), product), "total_out")
        body.output(body.identity(product), "product_out")
        products = x.array @ w.array
        attributes = {"body": body.graph(), "num_scan_inputs": 1}
        node = ir.node("Scan", [zeros.value, x.value], attributes, num_outputs=2, name="scan")
        g.nodes.append(node)
        g.output(Tensor(node.outputs[0], products.sum(0)), "total_sum")
        g.output(Tensor(node.outputs[1], products))

    return draw


def _if_inside_loop(g: Drawing) -> None:
    x = g.input("x", (ROWS, 32))
    condition = g.feed("condition", np.array(True), [])
    trips = g.constant("trips", np.int64(2))
    spec = Quantized((32, 32), "uint4", 0, 16, zero_points="random")
    tensors = g.quantized(spec)
    body, state, go_on = _loop_body(g)
    then, other = body.body(), body.body()
    w = then.dequantize(spec, tensors)
    then.output(then.matmul(state, w), "y_then")
    other.output(other.identity(state), "y_else")
    branches = {"then_branch": then.graph(), "else_branch": other.graph()}
    chosen = body.node("If", [condition], state.array, branches)
    body.output(body.identity(go_on), "go_on", np.bool_)
    body.output(chosen, "state_out")
    array = x.array @ w.array @ w.array
    g.output(g.node("Loop", [trips, None, x], array, {"body": body.graph()}))


def _if_shares_with_graph(spec: Quantized) -> Draw:
    """One weight used by the graph and, dequantised once more, by both branches."""

    def draw(g: Drawing) -> None:
        x = g.input("x", (ROWS, 32))
        condition = g.feed("condition", np.array(False), [])
        tensors = g.quantized(spec)
        g.output(g.matmul(x, g.dequantize(spec, tensors)), "y_outer")
        branches, y = {}, None
        for branch in ("then", "else"):
            body = g.body()
            w = body.dequantize(spec, tensors, branch)
            y = body.matmul(body.relu(x), w, f"matmul_{branch}")
            body.output(y, f"y_{branch}")
            branches[f"{branch}_branch"] = body.graph()
        assert y is not None
        g.output(g.node("If", [condition], y.array, branches))

    return draw


def _function_of_weights(spec: Quantized, calls: int) -> Draw:
    """``Linear(x, codes, scale, zero_point)``, the weights passed in."""

    def draw(g: Drawing) -> None:
        x = g.input("x", (ROWS, 70))
        for number in range(calls):
            tensors = g.quantized(spec, "wv"[number])
            # The first call's function is everybody's; each is drawn for its numbers.
            inputs = [ir.val(name) for name in ("fx", "fw", "fs", "fz")]
            inner = g.body(inputs)
            parts = [x, *tensors]
            fx, *weights = (Tensor(v, p.array) for v, p in zip(inputs, parts, strict=True))
            w = inner.dequantize(spec, weights)
            y = inner.matmul(fx, inner.transpose(w) if spec.axis == 1 else w)
            inner.output(y, "fy")
            if number == 0:
                inner.function("Linear")
            g.output(g.call("Linear", parts, y.array), f"y_{number}")

    return draw


def _function_with_constants(spec: Quantized) -> Draw:
    def draw(g: Drawing) -> None:
        x = g.input("x", (ROWS, 70))
        inner = g.body([ir.val("fx")])
        inner.constant_nodes = True
        w = inner.dequantize(spec)
        fx = Tensor(inner.inputs[0], x.array)
        y = inner.matmul(fx, inner.transpose(w) if spec.axis == 1 else w)
        inner.output(y, "fy")
        inner.function("Linear")
        g.output(g.call("Linear", [x], y.array))

    return draw


def _function_in_function(spec: Quantized) -> Draw:
    """``Block`` calls ``Linear`` with the weights and applies Relu."""

    def draw(g: Drawing) -> None:
        x, tensors = g.input("x", (ROWS, 70)), g.quantized(spec)
        parts = [x, *tensors]
        inner = g.body([ir.val(name) for name in ("fx", "fw", "fs", "fz")])
        fx, *weights = (Tensor(v, p.array) for v, p in zip(inner.inputs, parts, strict=True))
        y = inner.matmul(fx, inner.dequantize(spec, weights))
        inner.output(y, "fy")
        inner.function("Linear")
        outer = g.body([ir.val(name) for name in ("bx", "bw", "bs", "bz")])
        passed = [Tensor(v, p.array) for v, p in zip(outer.inputs, parts, strict=True)]
        z = outer.relu(outer.call("Linear", passed, y.array))
        outer.output(z, "by")
        outer.function("Block")
        g.output(g.call("Block", parts, z.array))

    return draw


def _function_of_dequantized(spec: Quantized) -> Draw:
    """DequantizeLinear outside, MatMul inside."""

    def draw(g: Drawing) -> None:
        x, w = g.input("x", (ROWS, 70)), g.dequantize(spec)
        inner = g.body([ir.val("fx"), ir.val("fw")])
        fx, fw = (Tensor(v, p.array) for v, p in zip(inner.inputs, (x, w), strict=True))
        y = inner.matmul(fx, fw)
        inner.output(y, "fy")
        inner.function("Linear")
        g.output(g.call("Linear", [x, w], y.array))

    return draw


# The weight's place in the product.


def _row_11() -> Iterator[LayoutCase]:
    """``W[M, K] @ x``."""
    for storage, zero_points in itertools.product(STORAGES, ("none", "random")):
        spec = Quantized((6, 70), storage, 1, 32, zero_points=zero_points)
        yield _case(11, f"left-{storage}-zp_{zero_points}", _left(spec, (70, 3)))
    for storage in ("int4", "uint8"):
        spec = Quantized((6, 64), storage, 1, 32, zero_points="random")
        yield _case(11, f"left-rank3-{storage}", _left(spec, (2, 64, 3)))
        yield _case(11, f"left-rank4-{storage}", _left(spec, (2, 1, 64, 3)))
        yield _case(11, f"left-rank1-{storage}", _left(spec, (64,)))
        spec = Quantized((64, 6), storage, 0, 32, zero_points="random")
        yield _case(11, f"left-through_transpose-{storage}", _left(spec, (64, 3), True))
        spec = Quantized((32, 32), storage, 0, 16)
        draw = _left(spec, (32, 3))
        yield _refused(11, f"left-blocks_across_rows-{storage}", draw, "matmul")
        spec = Quantized((6, 64), storage, 0, 0, "channel", "random")
        yield _case(11, f"left-channel-{storage}", _left(spec, (64, 3)))
        spec = Quantized((6, 64), storage, None, 0, "tensor", "random")
        yield _case(11, f"left-tensor-{storage}", _left(spec, (64, 3)))
    for trans_a, trans_b in itertools.product((0, 1), (0, 1)):
        draw = _left_gemm(trans_a, trans_b, with_bias=bool(trans_b))
        name = f"left-gemm-transa{trans_a}-transb{trans_b}"
        yield _case(11, name, draw, FUSED_GEMM)
    yield _case(11, "vector_and_matrix", _matmul(Quantized((64, 6), "uint4", 0, 32), ()))


def _left(spec: Quantized, shape: tuple[int, ...], transposed: bool = False) -> Draw:
    def draw(g: Drawing) -> None:
        x = g.input("x", shape, static=(-2 if len(shape) > 1 else 0,))
        w = g.dequantize(spec)
        g.output(g.matmul(g.transpose(w) if transposed else w, x))

    return draw


def _left_gemm(trans_a: int, trans_b: int, with_bias: bool) -> Draw:
    def draw(g: Drawing) -> None:
        shape = (64, 6) if trans_a else (6, 64)
        spec = Quantized(shape, "uint4", 0 if trans_a else 1, 32, zero_points="random")
        x = g.input("x", (3, 64) if trans_b else (64, 3), static=(0, 1))
        bias = g.floats("bias", (3,)) if with_bias else None
        g.output(g.gemm(g.dequantize(spec), x, bias, transA=trans_a, transB=trans_b))

    return draw


def _row_12() -> Iterator[LayoutCase]:
    """``W[G, K, N]``."""
    groups = 3
    expect = {**FUSED, "MatMulNBits": groups}
    for storage, zero_points in itertools.product(STORAGES, ("none", "random")):
        spec = Quantized((groups, 48, 6), storage, 1, 16, zero_points=zero_points)
        name = f"{storage}-zp_{zero_points}"
        yield _case(12, f"batched-{name}", _batched(spec, (groups, 2, 48)), expect)
        spec = Quantized((groups, 6, 48), storage, 2, 16, zero_points=zero_points)
        draw = _batched(spec, (groups, 2, 48), transposed=True)
        yield _case(12, f"batched-transposed-{name}", draw, expect)
    spec = Quantized((groups, 48, 6), "uint4", 1, 16, zero_points="random")
    yield _refused(12, "broadcast_rank2", _batched(spec, (2, 48)), "matmul")
    yield _refused(12, "broadcast_rank3", _batched(spec, (1, 2, 48)), "matmul")
    yield _refused(12, "broadcast_rank4", _batched(spec, (2, groups, 2, 48)), "matmul")
    spec = Quantized((1, 48, 6), "uint4", 1, 16, zero_points="random")
    yield _case(12, "one_group", _batched(spec, (1, 2, 48)))
    yield _case(12, "one_group-rank2", _batched(spec, (2, 48)))
    yield _case(12, "one_group-many_activations", _batched(spec, (4, 2, 48)))
    spec = Quantized((groups, 48, 6), "int8", None, 0, "tensor", "random")
    yield _case(12, "batched-tensor", _batched(spec, (groups, 2, 48)), expect)
    spec = Quantized((groups, 48, 6), "int8", 2, 0, "channel", "random")
    yield _case(12, "batched-channel", _batched(spec, (groups, 2, 48)), expect)
    spec = Quantized((groups, 48, 6), "int8", 0, 0, "channel", "random")
    yield _case(12, "batched-one_scale_each", _batched(spec, (groups, 2, 48)), expect)
    spec = Quantized((groups, 32, 32), "uint4", 2, 16)
    draw = _batched(spec, (groups, 2, 32))
    yield _refused(12, "batched-blocks_across_columns", draw, "matmul")
    spec = Quantized((groups, 32, 6), "uint4", 0, 16)
    yield _refused(12, "batched-blocks_of_groups", _batched(spec, (groups, 2, 32)), "matmul")


def _batched(spec: Quantized, shape: tuple[int, ...], transposed: bool = False) -> Draw:
    def draw(g: Drawing) -> None:
        x = g.input("x", shape, static=range(len(shape)))
        w = g.dequantize(spec)
        g.output(g.matmul(x, g.transpose(w, (0, 2, 1)) if transposed else w))

    return draw


# Corners.


def _row_13() -> Iterator[LayoutCase]:
    for storage, n in itertools.product(("int2", "uint2"), range(1, 10)):
        spec = Quantized((64, n), storage, 0, 32, zero_points="random")
        yield _case(13, f"{storage}-n{n}", _matmul(spec), zero_points=True)
    for storage, blocks in itertools.product(STORAGES, (1, 3, 5)):
        spec = Quantized((16 * blocks, 3), storage, 0, 16, zero_points="random")
        yield _case(13, f"odd_blocks-{storage}-{blocks}", _matmul(spec), zero_points=True)
    for storage, transposed in itertools.product(STORAGES, (False, True)):
        layout = f"{storage}-{'transposed' if transposed else 'axis0'}"
        for name, k, n in (("one_row", 1, 5), ("one_column", 70, 1), ("short", 9, 7)):
            shape = (n, k) if transposed else (k, n)
            axis = 1 if transposed else 0
            spec = Quantized(shape, storage, axis, 32, zero_points="random")
            yield _case(13, f"{name}-{layout}", _matmul(spec, transposed=transposed))


def _row_14() -> Iterator[LayoutCase]:
    """Zero points that are what MatMulNBits takes for granted."""
    for storage, scaled in itertools.product(
        STORAGES, ("blocks", "tensor", "tensor1", "channel")
    ):
        axis, block = (0, 32) if scaled == "blocks" else (None, 0)
        spec = Quantized((70, 6), storage, axis, block, scaled, "default")
        yield _case(14, f"{scaled}-{storage}", _matmul(spec), zero_points=False)
    for storage in STORAGES:
        spec = Quantized((70, 6), storage, 0, 32, zero_points="one_other")
        yield _case(14, f"all_but_one-{storage}", _matmul(spec), zero_points=True)
    for storage in ("uint4", "uint2", "uint8"):
        spec = Quantized((70, 6), storage, 0, 32)
        yield _case(14, f"unsigned_without-{storage}", _matmul(spec), zero_points=True)
        spec = Quantized((6, 3, 32), storage, 2, 32, zero_points="default")
        draw = _three_dimensional(spec)
        yield _case(14, f"three_dimensional-{storage}", draw, zero_points=False)


def _row_15() -> Iterator[LayoutCase]:
    legal = (16, 32, 64, 128, 256)
    for block, storage in itertools.product((512, 1024), STORAGES):
        for number, k in enumerate((100, block, block + 300)):
            transposed = bool((block // 512 + number) % 2)
            shape, axis = ((3, k), 1) if transposed else ((k, 3), 0)
            spec = Quantized(shape, storage, axis, block, zero_points="random")
            draw = _matmul(spec, transposed=transposed)
            yield _case(15, f"block{block}-k{k}-{storage}", draw, block_sizes=legal)
    for block, k in ((8, 32), (24, 48), (48, 96)):
        for storage in ("int4", "uint8", "uint2"):
            spec = Quantized((k, 6), storage, 0, block, zero_points="random")
            yield _refused(15, f"block{block}-{storage}", _matmul(spec), f"block_size {block}")
        spec = Quantized((6, k), "int4", 1, block, zero_points="random")
        draw = _matmul(spec, transposed=True)
        yield _refused(15, f"block{block}-transposed", draw, f"block_size {block}")
    for storage in ("int4", "uint8", "int2"):
        spec = Quantized((64, 6), storage, 0, 32, scale_dtype=ml_dtypes.bfloat16)
        draw = _matmul(spec, dtype=ml_dtypes.bfloat16)
        yield _refused(15, f"bfloat16-{storage}", draw, "bfloat16", runs=False)
    four = {**FUSED, "MatMulNBits": 4}
    for storage, activation in itertools.product(
        ("int4", "uint4", "int8", "int2"), ("Relu", "Clip", "Tanh")
    ):
        name = f"chain_of_{activation.lower()}-{storage}"
        yield _case(15, name, _chain(storage, activation), four, stored_weights=4)
    yield _case(15, "chain_of_gemm_relu", _chain("uint4", "Relu", "Gemm"), four)
    yield _case(15, "chain_of_matmul_add_relu", _chain("uint4", "Relu", "Add"), four)


def _chain(storage: str, activation: str, layer: str = "MatMul") -> Draw:
    """Four layers; native fusion skips those whose only consumer is Relu or Clip."""

    def draw(g: Drawing) -> None:
        value = g.input("x", (ROWS, 32))
        limits = [g.constant(f"limit_{i}", np.float32(v)) for i, v in enumerate((-3, 3))]
        for name in ("a", "b", "c", "d"):
            spec = Quantized((32, 32), storage, 0, 16, zero_points="random")
            w = g.dequantize(spec, name=name)
            bias = g.floats(f"bias_{name}", (32,)) if layer != "MatMul" else None
            value = g.gemm(value, w, bias) if layer == "Gemm" else g.matmul(value, w)
            if layer == "Add":
                assert bias is not None
                value = g.add(value, bias)
            array = value.array
            if activation == "Relu":
                value = g.relu(value)
            elif activation == "Clip":
                value = g.node("Clip", [value, *limits], np.clip(array, -3, 3))
            else:
                value = g.node("Tanh", [value], np.tanh(array))
        g.output(value)

    return draw


@functools.cache
def layout_cases() -> tuple[LayoutCase, ...]:
    """The whole matrix, by row."""
    rows = (
        _row_1,
        _row_2,
        _row_3,
        _row_4,
        _row_5,
        _row_6,
        _row_7,
        _row_8,
        _row_9,
        _row_10,
        _row_11,
        _row_12,
        _row_13,
        _row_14,
        _row_15,
    )
    return tuple(case for row in rows for case in row())
