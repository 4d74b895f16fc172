# SPDX-License-Identifier: MIT
"""Random graphs, built node by node, and those over the operators whose shapes are proved.

Each node is run by onnxruntime as it is drawn, on arrays of the first run: one that fails is
drawn again, so rows may be sloppy. The other runs feed other sizes, 0 and 1 among them, and
may fail.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

from .same_numbers import session

Array = npt.NDArray
F, I8, B, U8 = np.dtype("f4"), np.dtype("i8"), np.dtype("?"), np.dtype("u1")
_MAX_TRIES = 40

# Calls of operators, ms_ for onnxruntime's own, with one of {these|words}. Read are floats f,
# integers i, flags b and codes u of a rank; what broadcasts with the first input or is as
# large; floats w of a shape, and numbers n. s is the shape of the first input.
_ROWS = """
{Abs|Acos|Acosh|Asin|Asinh|Atan|Atanh|Ceil|Celu|Clip|Cos|Cosh|Elu|Erf|Exp|Floor|Gelu}(f())
{HardSigmoid|HardSwish|Identity|IsInf|IsNaN|LeakyRelu|Log|Mish|Neg|Reciprocal|Relu|Round}(f())
{Selu|Shrink|Sigmoid|Sign|Sin|Sinh|Softplus|Softsign|Sqrt|Swish|Tan|Tanh|ThresholdedRelu}(f())
{ms_FastGelu|ms_Gelu|ms_QuickGelu}(f())
BitwiseNot(i())
Not(b())
{Add|Div|Mul|Sub|Pow|Max|Min|Equal|Greater|Less|PRelu}(f(), like())
{Add|Div|Mul|Sub|Pow|Max|Min|Equal|GreaterOrEqual|LessOrEqual|Mod}(i(), like())
{Mean|Sum}(f(), like(), like())
{And|Or|Xor}(b(), like())
{BitwiseAnd|BitwiseOr|BitwiseXor}(i(), like())
BitShift(u(), like(), direction="LEFT")
{ReduceL1|ReduceL2|ReduceLogSum|ReduceLogSumExp}(f(), n([{0|1|-1}]), keepdims={0|1|2})
{ReduceMax|ReduceMean|ReduceMin|ReduceProd}(f(), n([{0|1|-1}]), keepdims={0|1|2})
ReduceSum(f(), n([{0|1|-1}]), noop_with_empty_axes={0|1|2})
ReduceSumSquare(f(), noop_with_empty_axes={0|1|2})
ReduceProd(i(1), keepdims={0|1|2})
{ReduceMax|ReduceMean|ReduceSum|Squeeze|Unsqueeze}(f(), axes=[{0|1|-1}])
{ArgMax|ArgMin}(f(), axis={0|1|-1}, keepdims={0|1})
{Hardmax|LogSoftmax|LpNormalization|Softmax}(f(), axis={0|1|-1})
{AveragePool|LpPool|MaxPool}(f(4), kernel_shape=[{1|2}, 2], strides=[1, {1|2}])
MaxPool(f(4), kernel_shape=[3, 3], auto_pad="{SAME_UPPER|SAME_LOWER}", strides=[{1|2}, 1])
AveragePool(f(4), kernel_shape=[{2|3}, 2], ceil_mode=1, strides=[2, 2])
{GlobalAveragePool|GlobalLpPool|GlobalMaxPool|MeanVarianceNormalization}(f(4))
{Conv|ms_FusedConv}(f(4), w(2, s[1], {1|3}, 1), pads=[{0|1}, 0, {0|1}, 0], strides=[1, {1|2}])
ConvInteger(u(4), codes(2, s[1], 1, {1|2}))
QLinearConv(u(4), 1.0, zero, codes(2, s[1], 1, {1|2}), 1.0, zero, 1.0, zero)
GRU(f(3), w(1, 6, s[2]), w(1, 6, 2), hidden_size=2, out=2)
LSTM(f(3), w(2, 8, s[2]), w(2, 8, 2), hidden_size=2, direction="bidirectional", out=3)
RNN(f(3), w(1, 2, s[2]), w(1, 2, 2), hidden_size=2, out=2)
{Gemm|ms_FusedGemm}(f(2), w(s[{0|1}], 3), transA={0|1})
{MatMul|ms_FusedMatMul|ms_TransposeMatMul}(f(), {w(s[-1], 3)|f()|w(s[-1])})
ms_FusedMatMul(f(), f(), transA={0|1}, transB={0|1})
MatMulInteger(u(), codes(s[-1], 2))
QLinearMatMul(u(), 1.0, zero, codes(s[-1], 2), 1.0, zero, 1.0, zero)
ms_MatMulIntegerToFloat(u(), codes(s[-1], 2), 1.0, 1.0)
ms_DynamicQuantizeMatMul(f(), codes(s[-1], 2), 1.0)
ms_MatMulNBits(f(), codes(3, up(s[-1]), 8), w(3, up(s[-1])), K=s[-1], N=3, block_size=16)
{ms_QLinearAdd|ms_QLinearMul}(u(), 1.0, zero, like(), 1.0, zero, 1.0, zero)
{ms_QLinearLeakyRelu|ms_QLinearSigmoid}(u(), 1.0, zero, 1.0, zero)
ms_QLinearSoftmax(u(), 1.0, zero, 1.0, zero, axis=-1, opset=13)
{DequantizeLinear|ms_DequantizeLinear}(u(), 2.0, zero)
{QuantizeLinear|ms_QuantizeLinear}(f(), 2.0, zero)
DynamicQuantizeLinear(f(), out=3)
{LayerNormalization|RMSNormalization|SimplifiedLayerNormalization|ms_BiasGelu}(f(), w(s[-1]))
BatchNormalization(f(), w(s[1]), w(s[1]), w(s[1]), w(s[1]))
InstanceNormalization(f(), w(s[1]), w(s[1]))
ms_SkipLayerNormalization(f(3), same(), w(s[2]), w(s[2]), out=4)
ms_SkipSimplifiedLayerNormalization(f(3), same(), w(s[2]))
LRN(f(4), size=3)
Attention(f(4), same(), same())
Attention(f(3), same(), same(), q_num_heads=1, kv_num_heads=1)
ms_MultiHeadAttention(f(3), same(), same(), num_heads=1)
ms_Attention(f(3), w(s[2], 12), w(12), num_heads=2)
ms_RotaryEmbedding(f(3), n([[0] * s[1]] * s[0]), w(8, s[2] // 2), w(8, s[2] // 2))
RotaryEmbedding(f(4), w(s[0], s[2], s[3] // 2), w(s[0], s[2], s[3] // 2))
TensorScatter(f(4), same())
ms_GatherBlockQuantized(codes(3, 8), i(), w(3, 1), block_size=16, quantize_axis=1, bits=4)
{Bernoulli|RandomNormalLike|RandomUniformLike}(f(), seed=1.0)
CumSum(f(), n({0|1|-1}))
ReverseSequence(f(), n([1] * s[1]))
EyeLike(f(2))
Trilu({f()|i()})
Dropout(f(), out=2)
Cast({f()|i()|b()|u()}, to={1|7|9|6})
CastLike({f()|i()}, {f()|i()})
Concat({f()|i()}, like(), axis={0|1|-1})
Concat(i(1), {i(1)|n([-1])|n([2, 1])}, i(1), axis=0)
ConstantOfShape(i(1))
Expand({f()|i()}, {i(1)|n([1])|n([2, 1, 1])})
Gather({f()|i()}, {n({0|-1})|n([0, 0])|n([[0], [0]])}, axis={0|1})
Gather(i(1), {n({0|1|-1})|n([{0|1}])})
GatherElements(f(), n([[0]]), axis={0|1})
GatherND(f(), n([[0{|, 0}]]))
GatherND(f(3), n([[0]] * s[0]), batch_dims=1)
Pad(f(), n([{0|1}] * len(s) + [{0|1}] * len(s)))
Range({n(0)|n(1)}, i(0), n({1|2}))
Reshape({f()|i()}, {i(1)|n([-1])|n([0, -1])|n([-1, s[-1]])|n([0, 0, -1])|n([2, -1])})
Reshape(f(), {i(1)|n([0, -1])|n([-1, s[-1]])}, allowzero={1|2})
Reshape(f(), Shape(f()))
Reshape(f(), Concat(Shape(f(), start=0, end=1), n([-1]), axis=0))
Flatten(f(), axis={0|1|-1})
Resize(f(4), None, None, sizes(), mode="{nearest|linear}")
Resize(f(2), None, scales([1, {1|2|0.5|1.5}]), mode="{nearest|linear}")
ScatterElements(f(2), n([[0]]), w(1, 1))
ScatterND(f(2), n([[0]]), w(1, s[1]))
Shape({f()|i()|b()})
Shape(f(), start={0|1|-2}, end={1|2|-1|9})
Size({f()|i()})
Slice({f()|i()}, n([{0|1|-2}]), n([{1|2|-1|99}]), n([{0|1|-1}]), n([{1|2|-1}]))
Slice({f()|i()}, n([0]), {i(1)|Shape(f(), start=0, end=1)}, n([{0|1}]))
Split({f()|i()}, axis={0|1}, num_outputs=2, out=2)
Split(f(), n([1, s[0] - 1]), axis=0, out=2)
Split(f(), axis=0, out=2)
Split(w(5, 3), axis=0, num_outputs=2, out=2)
Squeeze({f()|i()}{|, n([{0|1|-1}])})
Squeeze(w(1, {1|3}), n([]))
Unsqueeze({f()|i()}, n([{0|1|-1}]))
Tile({f()|i()}, n([{0|1|2}] * len(s)))
Transpose({f(2)|i(2)}, perm=[1, 0])
Transpose({f()|i()})
Transpose(f(3), perm=[{0, 2, 1|2, 0, 1|1, 0, 2}])
Where(b(), {f()|i()}, like(1))
Where(Equal(n([-1, {1|2}]), n([-1])), i(1), n([{2|-1}, {1|2}]))
"""
ROWS = _ROWS.strip().splitlines()
# What moves shapes is drawn more often.
_OFTEN = [
    row
    for row in ROWS
    if re.match(r"Reshape|Shape|Gather\(|Concat|Slice|Expand|Where|Squeeze|Unsq|Tran", row)
]
_CHOICE = re.compile(r"\{([^{}]*)\}")


def operators() -> set[str]:
    """Return the operators of the rows."""
    found = set[str]()
    for row in ROWS:
        name = row.partition("(")[0].strip("{}")
        found.update(one.replace("ms_", "com.microsoft.") for one in name.split("|"))
    return found


class Discarded(Exception):
    """onnxruntime refuses the node, or there is nothing that it could read."""


@dataclasses.dataclass(frozen=True)
class RandomModel:
    model: onnx.ModelProto
    values: list[str]  # made by nodes
    runs: list[dict[str, Array]]


class Drawer(dict[str, Any]):
    """Draws the nodes of a graph: the names that rows are made of."""

    most_elements = 4096

    def __init__(self, rng: random.Random, opset: int, feeds: Mapping[str, Array]) -> None:
        kinds = {"f": F, "i": I8, "b": B, "u": U8}
        super().__init__({name: self._reader(kind) for name, kind in kinds.items()})
        self.update(w=self._floats, codes=self._codes, n=self._numbers, zero=np.uint8(0))
        self.update(like=self._like, same=self._same, sizes=self._sizes, len=len)
        self.update(up=lambda size: -(-size // 16), scales=self._scales)
        self.rng, self.opset = rng, opset
        self.arrays, self.nodes = dict(feeds), list[onnx.NodeProto]()
        self.constants: dict[str, Array] = {}

    def __missing__(self, name: str) -> Callable[..., str]:
        if name == "s":
            return self.arrays[self.first].shape  # type: ignore[return-value]
        return lambda *inputs, **given: self._node(name, inputs, **given)

    def _reader(self, kind: np.dtype) -> Callable[..., str]:
        def read(rank: int | None = None) -> str:
            found = [n for n, a in self.arrays.items() if a.dtype == kind]
            found = [n for n in found if rank in (None, self.arrays[n].ndim)]
            if not found:
                raise Discarded("no such value")
            self.first = self.rng.choice(found[-6:] if self.rng.random() < 0.7 else found)
            return self.first

        return read

    def _like(self, place: int = 0) -> str:
        """Return a value of the type of the one before that broadcasts with it."""
        first = self.arrays[self.first]
        return self._fitting(lambda a: a.dtype == first.dtype and _broadcast(a, first))

    def _same(self) -> str:
        first = self.arrays[self.first]
        return self._fitting(lambda a: a.dtype == first.dtype and a.shape == first.shape)

    def _fitting(self, fits: Callable[[Array], bool]) -> str:
        return self.rng.choice([name for name, array in self.arrays.items() if fits(array)])

    def _floats(self, *shape: int) -> str:
        return self._constant(np.full(shape, 0.5, F))

    def _codes(self, *shape: int) -> str:
        return self._constant(np.ones(shape, U8))

    def _scales(self, numbers: npt.ArrayLike) -> str:
        return self._constant(np.array(numbers, F))

    def _numbers(self, numbers: npt.ArrayLike) -> str:
        return self._constant(np.array(numbers, I8))

    def _sizes(self) -> str:
        shape = self.arrays[self.first].shape
        return self._numbers([self.rng.choice([size, 1, 2]) for size in shape])

    def _constant(self, array: Array) -> str:
        name = f"k{len(self.constants)}"
        self.constants[name] = array
        return name

    def _node(
        self, op_type: str, inputs: tuple[object, ...], out: int = 1, **given: object
    ) -> str:
        read = list(map(self._name, inputs))
        names = [f"v{len(self.nodes)}_{place}" for place in range(out)]
        domain = "com.microsoft" if op_type.startswith("ms_") else ""
        op_type = op_type.removeprefix("ms_")
        return self.add(
            helper.make_node(op_type, read, names, names[0], domain=domain, **given)
        )

    def add(self, node: onnx.NodeProto) -> str:
        """Add a node that onnxruntime runs; return its first output."""
        read, names = node.input, node.output
        known = {name: self.constants[name] for name in read if name in self.constants}
        fed = {name: self.arrays[name] for name in read if name in self.arrays}
        try:
            model = model_of_arrays([node], fed, known, names, self.opset)
            arrays = session(model).run(None, fed)
        except Exception as error:  # onnxruntime's own classes
            raise Discarded(str(error)) from error
        if any(array.size > self.most_elements or array.ndim > 5 for array in arrays):
            raise Discarded("too large")
        self.nodes.append(node)
        self.arrays.update(zip(names, arrays, strict=True))
        return names[0]

    def _name(self, value: object) -> str:
        if value is None or isinstance(value, str):
            return value or ""
        is_float = isinstance(value, float)
        return self._constant(np.float32(value) if is_float else np.asarray(value))

    def draw(self, rows: Sequence[str]) -> str | None:
        """Add the node of one of some rows, and what it reads; return its first output."""
        for _ in range(_MAX_TRIES):
            before = len(self.nodes), dict(self.arrays)
            text = self.rng.choice(rows)
            while choice := _CHOICE.search(text):
                word = self.rng.choice(choice[1].split("|"))
                text = text[: choice.start()] + word + text[choice.end() :]
            try:
                made: str = eval(text, {}, self)
                return made
            except (Discarded, IndexError, ValueError):
                del self.nodes[before[0] :]
                self.arrays = before[1]
        return None


def random_model(seed: int) -> RandomModel:
    """Return a model, and inputs of several sizes for it."""
    rng = random.Random(seed)
    sizes = [1, *rng.sample([2, 3, 4, 5, 6], 3)]
    feeds = {
        f"x{rank}": np.full([rng.choice(sizes) for _ in range(rank)], 0.5, F)
        for rank in (1, 2, 3, 4)
    }
    feeds["u"] = np.ones([rng.choice(sizes) for _ in range(rng.randint(2, 4))], U8)
    feeds |= {"n": np.array(rng.choice(sizes)), "c": np.array(rng.random() < 0.5)}
    feeds["s"] = np.array(rng.choices(sizes, k=2), I8)
    opset = rng.choice((12, 14, 17, 18, 20, 21, 23, 24))
    g = Drawer(rng, opset, feeds)
    for _ in range(rng.randint(4, 12)):
        g.draw(_OFTEN if rng.random() < 0.5 else ROWS)
    made = [name for node in g.nodes for name in node.output]
    open_axes = {name: [rng.random() < 0.7 for _ in a.shape] for name, a in feeds.items()}
    runs = [feeds]
    for _ in range(4):
        other = {size: rng.choice((0, 1, 1, 2, 3, 5, 7)) for size in range(8)}
        run = dict(feeds)
        for name, array in feeds.items():
            if array.dtype in (F, U8):
                shape = [
                    other[size] if is_open and rng.random() < 0.9 else size
                    for size, is_open in zip(array.shape, open_axes[name], strict=True)
                ]
                run[name] = np.full(shape, array.flat[0], array.dtype)
            elif array.dtype == I8:
                run[name] = np.vectorize(other.get, otypes=[I8])(array)
        runs.append(run | {"c": np.array(rng.random() < 0.5)})
    model = model_of_arrays(g.nodes, feeds, g.constants, made, opset, open_axes)
    return RandomModel(model, made, runs)


def model_of_arrays(
    nodes: Sequence[onnx.NodeProto],
    fed: Mapping[str, Array],
    constants: Mapping[str, Array],
    ends: Iterable[str],
    opset: int,
    open_axes: Mapping[str, list[bool]] | None = None,
) -> onnx.ModelProto:
    """Return a model with inputs as arrays are; axes that are open have no size."""
    inputs = []
    for name, array in fed.items():
        is_open = [True] * array.ndim if open_axes is None else open_axes[name]
        dims = [None if o else size for o, size in zip(is_open, array.shape, strict=True)]
        kind = helper.np_dtype_to_tensor_dtype(array.dtype)
        inputs.append(helper.make_tensor_value_info(name, kind, dims))
    tensors = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    outputs = [onnx.ValueInfoProto(name=name) for name in ends]
    graph = helper.make_graph(nodes, "random", inputs, outputs, tensors)
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(
        graph, opset_imports=imports, ir_version=13 if opset == 25 else 11
    )


def _broadcast(a: Array, b: Array) -> bool:
    try:
        np.broadcast_shapes(a.shape, b.shape)
    except ValueError:
        return False
    return True
