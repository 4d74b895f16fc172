# SPDX-License-Identifier: MIT
"""Every layout of a quantised weight that exporters write, with the numbers it must give.

``layout_cases()`` returns the matrix, a function for each row. In the text of a case, ``$w``
stands for DequantizeLinear of the weight ``w``, ``$v/w_scale`` for that of v with w's scales.
"""

import dataclasses
import functools
import itertools
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
from onnx import helper, numpy_helper

from .dequantized_models import STORAGE, Quantized, attribute_text
from .text_models import FUNCTIONS, float64_outputs, text_model

EXACT = 1e-5  # float32 throughout
HALF = 2e-3  # float16 somewhere
STORAGES = tuple(STORAGE)
ZERO_POINTS = ("none", "random", "default", "one_other")

FUSED = {"MatMulNBits": 1, "DequantizeLinear": 0}
FUSED_GEMM = {**FUSED, "Gemm": 0}
TWO = {**FUSED, "MatMulNBits": 2}
MACRO = r"\$(\w+)(?:/(\w+))?"
GATHERED = {"GatherBlockQuantized": 1, "DequantizeLinear": 0}
WITHOUT_ADD = {**FUSED, "Add": 0}
WITH_ADD = {**FUSED, "Add": 1}


@dataclasses.dataclass(frozen=True, eq=False)
class LayoutCase:
    """One model, its numbers, and what must become of it."""

    name: str  # the first two digits are the row of the table of layouts
    text: str
    weights: Quantized | Mapping[str, Quantized]  # by name in the text; one alone is w
    x: tuple[int, ...] | None = (3, 70)
    # Counts in the fused model, subgraphs and functions included; none: it stays as it is.
    expect: Mapping[str, int] = dataclasses.field(default_factory=lambda: FUSED)
    refusal: str | None = None  # text that a refusal must hold
    tolerance: float = EXACT
    _: dataclasses.KW_ONLY
    static: Sequence[int] = (-1,)  # axes of x whose sizes are declared
    # Arrays, of inputs with undeclared sizes, or shapes of random ones.
    inputs: Mapping[str, npt.NDArray | tuple[int, ...]] = dataclasses.field(
        default_factory=dict
    )
    constants: Mapping[str, npt.NDArray | tuple[int, ...]] = dataclasses.field(
        default_factory=dict
    )
    outputs: Sequence[str] = ("y",)
    functions: str = ""
    place: str = "graph"
    dtype: npt.DTypeLike = np.float32
    opset: int = 21
    zero_points: bool | None = None  # an input of the fused nodes; None where either is right
    block_sizes: tuple[int, ...] = ()  # those that are right; any if empty
    stored_weights: int | None = None  # different tensors of codes, where counted
    runs: bool = True  # whether onnxruntime has kernels for it without optimisation

    @property
    def row(self) -> int:
        return int(self.name[:2])

    @functools.cached_property
    def proto(self) -> onnx.ModelProto:
        return self._drawn[0]

    @functools.cached_property
    def feeds(self) -> dict[str, npt.NDArray]:
        return self._drawn[1]

    @functools.cached_property
    def reference(self) -> list[npt.NDArray]:
        """The outputs: float64, or the exact type where they are not floats."""
        return float64_outputs(self.proto, self.feeds)

    def build(self) -> ir.Model:
        return ir.from_proto(onnx.ModelProto.FromString(self.proto.SerializeToString()))

    @functools.cached_property
    def _drawn(self) -> tuple[onnx.ModelProto, dict[str, npt.NDArray]]:
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))

        def array(given: npt.NDArray | tuple[int, ...]) -> npt.NDArray:
            random = isinstance(given, tuple)
            return (
                np.asarray(rng.standard_normal(given)).astype(self.dtype) if random else given
            )

        shapes = {"x": self.x} if self.x is not None else {}
        feeds = {name: array(given) for name, given in {**shapes, **self.inputs}.items()}
        inputs = {}
        for name, given in feeds.items():
            rank = max(given.ndim, 1)
            known = {axis % rank for axis in (self.static if name == "x" else ())}
            if isinstance(self.inputs.get(name), tuple):
                known = set(range(rank))
            dims = [
                size if i in known else f"{name}_{i}" for i, size in enumerate(given.shape)
            ]
            inputs[name] = (helper.np_dtype_to_tensor_dtype(given.dtype), dims)
        weights = self.weights
        weights = {"w": weights} if isinstance(weights, Quantized) else weights
        tensors = [t for name, spec in weights.items() for t in spec.tensors(name, rng)]
        tensors += [
            numpy_helper.from_array(array(given), name)
            for name, given in self.constants.items()
        ]
        write = lambda found: weights[found[1]].node(*found.groups())  # noqa: E731
        nodes, functions = (re.sub(MACRO, write, text) for text in (self.text, self.functions))
        proto = text_model(
            nodes,
            [tensor for tensor in tensors if tensor.name in nodes + functions],
            inputs,
            self.outputs,
            functions=functions.replace("OPSET", str(self.opset)),
            opset=self.opset,
            place=self.place,
            output_type=helper.np_dtype_to_tensor_dtype(np.dtype(self.dtype)),
        )
        return proto, feeds


def left_alone(refusal: str) -> dict[str, object]:
    """What a case that stays as it is has besides."""
    return {"expect": {}, "refusal": refusal}


Q, Case, product = Quantized, LayoutCase, itertools.product
N, K = 6, 70
MATMUL = "W = $w  y = MatMul (x, W)"
FORMS = ("axis0", "transposed")


def _stored(
    form: str,
    k: int,
    n: int,
    storage: str = "uint4",
    block: int = 32,
    zero_points: str = "random",
    **more: object,
) -> Quantized:
    """A weight [K, N] or, transposed, [N, K]."""
    shape, axis = ((n, k), 1) if form == "transposed" else ((k, n), 0)
    return Q(shape, storage, axis, block, zero_points, **more)


def _transposed(text: str) -> str:
    """The same through a Transpose of each weight, which is stored [N, K]."""
    through = r"\1_stored = \2  \1 = Transpose <perm = [1, 0]> (\1_stored)"
    return re.sub(r"(\w+) = (\$[\w/]+)", through, text)


def _written(form: str, text: str) -> str:
    return _transposed(text) if form == "transposed" else text


# One weight, one consumer.


LEADS = ((), (1,), (2, 3), (2, 1, 3))


def _row_1() -> Iterator[LayoutCase]:
    choices = product(FORMS, (16, 32, 64, 128, 256), STORAGES, ZERO_POINTS)
    for number, (form, block, storage, zero_points) in enumerate(choices):
        shapes = (  # [K, N] that a kernel may get wrong: ragged, odd, short
            (2 * block, 8),
            (block + 7, 5),
            (block - 3, 6),
            (3 * block, 7),
            (1, 4),
            (2 * block + 1, 1),
            (1, 1),
        )
        # 7 shapes against 4 zero points and 6 types: every pair comes up.
        k, n = shapes[number % len(shapes)]
        w = _stored(form, k, n, storage, block, zero_points)
        name = f"{form}-{storage}-block{block}-k{k}-n{n}-zp_{zero_points}"
        checks = {"zero_points": w.needs_zero_points, "stored_weights": 1}
        yield Case(name, _written(form, MATMUL), w, (3, k), **checks)
    for (axis, form), storage in product(enumerate(FORMS), ("int4", "uint4", "uint8")):
        text, w = _written(form, MATMUL), _stored(form, K, 9, storage)
        for lead in LEADS:
            yield Case(f"{form}-rank{len(lead) + 1}-{storage}", text, w, (*lead, K))
        negative = dataclasses.replace(w, axis=axis - 2)
        yield Case(f"{form}-axis_minus_{2 - axis}-{storage}", text, negative)
        w, more = Q((32, 32), storage, 1 - axis, 16, "none"), left_alone("matmul")
        yield Case(f"{form}-blocks_across_columns-{storage}", text, w, (3, 32), **more)


def _row_2() -> Iterator[LayoutCase]:
    """Other ways to say that the weight is transposed, or is not."""
    given = _transposed(MATMUL)
    for storage in ("int4", "uint4", "uint8"):
        text = given.replace("<perm = [1, 0]>", "")
        yield Case(f"perm_default-{storage}", text, Q((9, K), storage, 1))
        keeps = given.replace("[1, 0]", "[0, 1]")
        yield Case(f"perm_that_keeps-{storage}", keeps, Q((32, 32), storage, 0, 16), (3, 32))
    for storage, zero_points in product(STORAGES, ("none", "random")):
        w = Q((6, 70), storage, 1, zero_points=zero_points)
        name = f"fusedmatmul-transb-{storage}-zp_{zero_points}"
        yield Case(name, _fused_matmul(transB=1), w)
    for attributes in (
        {"transB": 1, "alpha": 0.5},
        {"transB": 1, "alpha": 0.3},
        {"transB": 0, "alpha": -1.7},
        {"transB": 0, "transA": 1},
    ):
        name = "-".join(f"{key}_{value}" for key, value in attributes.items())
        w = _stored(FORMS[int(attributes["transB"])], 64, 6)
        more = left_alone("transposes its other operand") if "transA" in attributes else {}
        x = (64, 3) if more else (3, 64)
        yield Case(f"fusedmatmul-{name}", _fused_matmul(**attributes), w, x, **more)
    w = Q((6, 64), "int4", 1, zero_points="none")
    yield Case("fusedmatmul-transb-rank3", _fused_matmul(transB=1), w, (2, 3, 64))


def _fused_matmul(**attributes: float) -> str:
    return f"W = $w  y = com.microsoft.FusedMatMul {attribute_text(**attributes)} (x, W)"


THREE_AXES = Q((6, 3, 32), axis=2)
THROUGH = "V = $w  R = Reshape (V, shape)  W = Transpose <perm = [1, 0]> (R)"
BLOCK_AXIS = {
    "matmul": f"{THROUGH}  y = MatMul (x, W)",
    "gemm": f"{THROUGH}  y = Gemm (x, W)",
    "gemm_transb": "V = $w  R = Reshape (V, shape)  y = Gemm <transB = 1> (x, R)",
}


def _row_3() -> Iterator[LayoutCase]:
    """Blocks as an axis of their own."""

    def case(
        name: str, consumer: str = "matmul", w: Quantized = THREE_AXES, **more
    ) -> LayoutCase:
        n, blocks, block = w.shape
        shape = more.pop("shape", (n, blocks * block))
        more.setdefault("x", (3, blocks * block))
        more.setdefault("text", BLOCK_AXIS[consumer])
        return Case(name, weights=w, constants={"shape": np.int64(shape)}, **more)

    for storage, zero_points, consumer in product(STORAGES, ZERO_POINTS, ("matmul", "gemm")):
        w = Q((6, 3, 32), storage, 2, zero_points=zero_points)
        name = f"{consumer}-{storage}-zp_{zero_points}"
        yield case(name, consumer, w, zero_points=w.needs_zero_points)
    for shape, storage in product(((6, -1), (-1, 96), (0, 96), (0, -1)), ("uint4", "int8")):
        text = "_".join("rest" if size == -1 else str(size) for size in shape)
        yield case(f"reshape_{text}-{storage}", w=Q((6, 3, 32), storage, -1), shape=shape)
    for block, blocks, n in ((16, 1, 5), (16, 5, 7), (64, 2, 1), (128, 1, 3), (256, 1, 2)):
        w = Q((n, blocks, block), axis=2, block=block)
        yield case(f"block{block}-blocks{blocks}-n{n}", w=w)
    half = Q((6, 3, 32), axis=2, scale_dtype=np.float16)
    for where, consumer in product(("before", "after"), ("matmul", "gemm")):
        text = BLOCK_AXIS[consumer]
        if where == "before":
            text = text.replace("V = $w", "H = $w  V = Cast <to = 1> (H)")
        else:
            text = text.replace("W = T", "H = T").replace("  y", "  W = Cast <to = 1> (H)  y")
        yield case(f"cast_{where}-{consumer}", text=text, w=half, tolerance=HALF)
    yield case("gemm-transb", "gemm_transb", Q((6, 3, 32), "int4", 2))
    yield case("rank3", w=Q((6, 4, 16), axis=2, block=16), x=(2, 3, 64))
    yield case("reshape_that_splits_rows", w=Q((4, 4, 32), axis=2), shape=(8, 64), x=(3, 64))
    # Codes [blocks, block, N], scales [blocks, 1, N].
    text = "V = $w  W = Reshape (V, shape)  y = MatMul (x, W)"
    yield case("blocks_first", text=text, w=Q((2, 32, 6), axis=1), shape=(64, 6), x=(3, 64))


# Gemm and bias.


def _bias(kind: str, n: int = N) -> tuple[str, dict[str, object]]:
    """Nodes before the one with the bias b, and what the case has besides."""
    shapes = {"n": (n,), "1_n": (1, n), "1": (1,), "scalar": (), "m_n": (3, n), "m_1": (3, 1)}
    if kind == "absent":
        return "", {}
    if kind == "runtime":
        return "", {"inputs": {"b": (n,)}}
    if kind in shapes:
        return "", {"constants": {"b": shapes[kind]}}
    # A dequantised one, which is added.
    scale = np.float32(0.0125)
    constants = {"bias": np.linspace(-100, 90, n).astype(kind), "bias_scale": scale}
    return "b = DequantizeLinear (bias, bias_scale)", {"constants": constants}


def _gemm(
    name: str, bias: str = "absent", w: Quantized | None = None, **attributes: float
) -> LayoutCase:
    before, more = _bias(bias)
    operands = "x, W" if bias == "absent" else "x, W, b"
    text = f"{before}  W = $w  y = Gemm {attribute_text(**attributes)} ({operands})"
    w = w or _stored(FORMS[int(attributes.get("transB", 0))], K, N)
    if attributes.get("transA"):
        return Case(name, text, w, (K, 3), **left_alone("transposes its other"), **more)
    expect = {**FUSED_GEMM, "DequantizeLinear": int(bias == "int32")}
    return Case(name, text, w, (3, K), expect, **more)


def _row_4() -> Iterator[LayoutCase]:
    for storage, zero_points, trans_b in product(STORAGES, ("none", "random"), (0, 1)):
        w = _stored(FORMS[trans_b], K, N, storage, zero_points=zero_points)
        yield _gemm(f"transb{trans_b}-{storage}-zp_{zero_points}", "n", w, transB=trans_b)
    for alpha, trans_b, bias in product((0.5, 2.0, 0.3, -1.7), (0, 1), ("absent", "n")):
        name = f"alpha_{alpha}-transb{trans_b}-bias_{bias}"
        yield _gemm(name, bias, alpha=alpha, transB=trans_b)
    choices = product((1.0, 0.0, 0.5, 0.3), ("n", "1_n", "1", "scalar"))
    for number, (beta, bias) in enumerate(choices):
        yield _gemm(f"beta_{beta}-bias_{bias}", bias, beta=beta, transB=number % 2)
    for beta, bias in product((1.0, 0.5, 0.0), ("m_n", "m_1", "runtime")):
        yield _gemm(f"beta_{beta}-bias_{bias}", bias, beta=beta, transB=1)
    yield _gemm("transa", "n", transA=1, transB=1)
    for beta, trans_b in product((1.0, 0.5), (0, 1)):
        yield _gemm(
            f"bias_int32-beta_{beta}-transb{trans_b}", "int32", beta=beta, transB=trans_b
        )
    for scaled, trans_b in product(("tensor", "tensor1", "channel"), (0, 1)):
        w = Q((N, K) if trans_b else (K, N), "uint8", 1 - trans_b, scaled=scaled)
        yield _gemm(f"{scaled}-transb{trans_b}", "n", w, transB=trans_b)
    text = "V = $v  a = Gemm (x, V, b)  W = $w  c = Gemm <beta = 0.5> (x, W, b)"
    weights = dict.fromkeys("vw", Q((K, N), "int4", zero_points="none"))
    expect = {**FUSED_GEMM, "MatMulNBits": 2}
    more = {"constants": {"b": (N,)}, "outputs": ("a", "c")}
    yield Case("shared_bias", text, weights, (3, K), expect, **more)


def _row_5() -> Iterator[LayoutCase]:
    kept = {"1", "scalar", "runtime"}  # shapes that MatMulNBits' bias [N] does not take as is
    kinds = ("n", "1_n", "1", "scalar", "runtime")
    orders = {"product_first": "p, b", "bias_first": "b, p"}
    for bias, (order, operands), form in product(kinds, orders.items(), FORMS):
        before, more = _bias(bias)
        text = f"{before}  W = $w  p = MatMul (x, W)  y = Add ({operands})"
        expect = FUSED if bias in kept else WITHOUT_ADD
        name = f"bias_{bias}-{order}-{form}"
        yield Case(name, _written(form, text), _stored(form, K, N), (3, K), expect, **more)

    def added(
        name: str, shape: tuple[int, ...] = (N,), lead: tuple[int, ...] = (3,), **more
    ) -> LayoutCase:
        text = f"W = $w  p = MatMul (x, W)  y = Add (p, b)  {more.pop('text', '')}"
        more = {"weights": Q((K, N)), "expect": WITH_ADD} | more
        return Case(name, text, x=(*lead, K), constants={"b": shape}, **more)

    for storage in STORAGES:
        yield added(f"bias_n-{storage}", expect=WITHOUT_ADD, weights=Q((K, N), storage))
    for shape in ((1, N), (1, 1, N)):
        name = f"rank3-bias_{'_'.join(map(str, shape))}"
        yield added(name, shape, (2, 3), expect=WITHOUT_ADD)
    # Where the bias would change the shape or differs by row, the Add is not a bias.
    for shape, lead in (
        ((1, 1, N), (3,)),
        ((1, N), ()),
        ((3, N), (3,)),
        ((3, 1), (3,)),
        ((N, 1), (N,)),
        ((N, 1, 1), (N,)),
        ((2, 1, N), (2, 3)),
        ((2, 3, N), (3,)),
    ):
        name = f"add_stays-rank{len(lead) + 1}-bias_{'_'.join(map(str, shape))}"
        yield added(name, shape, lead)
    yield added("add_stays-one_column-bias_5", (5,), weights=Q((K, 1)))
    second = {"text": "other = Relu (p)", "outputs": ("other", "y")}
    yield added("add_stays-second_consumer", **second)
    yield added("add_stays-graph_output", outputs=("p", "y"))
    text = "V = $v  p = MatMul (x, V)  W = $w  q = MatMul (x, W)  y = Add (p, q)"
    plain = Q((K, N), "int4", zero_points="none")
    expect = {**WITH_ADD, "MatMulNBits": 2}
    yield Case("sum_of_two_products", text, dict.fromkeys("vw", plain), (3, K), expect)


def _row_6() -> Iterator[LayoutCase]:
    """Types that differ between scales and activations."""
    half, single = np.float16, np.float32
    types = {half: 10, single: 1}
    cast = "D = $w  W = Cast <to = {}> (D)  y = MatMul (x, W)"

    def case(
        name: str, scale_dtype: type, dtype: type, text: str = MATMUL, form: str = "axis0", *,
        storage: str = "uint4", zero_points: str = "random", **more,
    ) -> LayoutCase:  # fmt: skip
        w = _stored(form, K, N, storage, 32, zero_points, scale_dtype=scale_dtype)
        more.setdefault("weights", w)
        more.setdefault("tolerance", HALF)
        return Case(name, text.format(types[dtype]), dtype=dtype, **more)

    for storage, zero_points in product(STORAGES, ("none", "random")):
        codes = {"storage": storage, "zero_points": zero_points}
        name = f"{storage}-zp_{zero_points}"
        for form in FORMS:
            text = _written(form, MATMUL)
            yield case(f"float16-{form}-{name}", half, half, text, form, **codes)
        yield case(f"float16_cast_float32-{name}", half, single, cast, **codes)
        yield case(f"float32_cast_float16-{name}", single, half, cast, **codes)
    through = "<perm = [1, 0]>"
    orders = {
        "cast_transpose": f"D = $w  C = Cast <to = {{}}> (D)  W = Transpose {through} (C)",
        "transpose_cast": f"D = $w  C = Transpose {through} (D)  W = Cast <to = {{}}> (C)",
    }
    for (order, text), (scales, dtype) in product(
        orders.items(), ((half, single), (single, half))
    ):
        name = f"{order}-to_{np.dtype(dtype).name}"
        yield case(name, scales, dtype, f"{text}  y = MatMul (x, W)", "transposed")
    yield case(
        "cast_that_keeps_the_type", single, single, cast, storage="int4", tolerance=EXACT
    )
    for scales, dtype in ((single, half), (half, single), (single, single)):
        w = Q((K, N), scale_dtype=scales, output_dtype=types[dtype])
        name = f"output_dtype-{np.dtype(scales).name}-{np.dtype(dtype).name}"
        tolerance = EXACT if scales is dtype else HALF
        yield case(name, scales, dtype, weights=w, opset=23, tolerance=tolerance)
    bias = {"constants": {"b": (N,)}}
    text = "W = $w  p = MatMul (x, W)  y = Add (p, b)"
    yield case("float16-bias", half, half, text, expect=WITHOUT_ADD, **bias)
    text = "W = $w  y = Gemm <alpha = 0.5> (x, W, b)"
    yield case("float16-gemm", half, half, text, expect=FUSED_GEMM, **bias)
    w = Q((K, N), "int8", None, 0, "none", "channel", half)
    yield case("float16-channel", half, half, weights=w)


def _row_7() -> Iterator[LayoutCase]:
    """One scale, or one for each column."""
    sizes = ((256, 6), (128, 5), (70, 6), (33, 3), (1, 4), (300, 1))
    choices = product(STORAGES, ("tensor", "tensor1", "channel"), ZERO_POINTS, FORMS)
    for number, (storage, scaled, zero_points, form) in enumerate(choices):
        k, n = sizes[number % len(sizes)]
        w = _stored(form, k, n, storage, 0, zero_points, scaled=scaled)
        axis = None
        if scaled == "channel":
            axis = 0 if form == "transposed" else (1, None, -1)[number % 3]
        w = dataclasses.replace(w, axis=axis)
        yield Case(
            f"{scaled}-{form}-{storage}-k{k}-n{n}-zp_{zero_points}",
            _written(form, MATMUL),
            w,
            (3, k),
            zero_points=w.needs_zero_points,
            block_sizes=(128, 256) if k % 128 == 0 else (),
        )
    for storage, form in product(("int4", "uint8"), FORMS):
        w = dataclasses.replace(_stored(form, 64, 6, storage, 0), scaled="channel")
        name = f"channels_along_k-{form}-{storage}"
        yield Case(name, _written(form, MATMUL), w, (3, 64), **left_alone("matmul"))
    for name, w in {
        "square": Q((64, 64), "uint8", scaled="channel"),
        "axis_minus_2": Q((64, 6), "int8", -2, zero_points="none", scaled="channel"),
    }.items():
        yield Case(f"channels_along_k-{name}", MATMUL, w, (3, 64), **left_alone("matmul"))


# Sharing, embeddings.


def _row_8() -> Iterator[LayoutCase]:
    for storage, form in product(("int4", "uint4", "uint8"), FORMS):
        w = _stored(form, 70, 6, storage)
        cases = {
            "one_dequantize_two_matmuls": "r = Relu (x)  b = MatMul (r, W)",
            "two_dequantizes_one_weight": "V = $w  b = MatMul (x, V)",
            "one_scale_two_weights": "V = $v/w_scale  b = MatMul (x, V)",
        }
        for name, text in cases.items():
            yield Case(
                f"{name}-{storage}-{form}",
                _written(form, f"W = $w  a = MatMul (x, W)  {text}"),
                {"w": w, "v": w},
                (3, 70),
                TWO,
                stored_weights=2 if "$v" in text else 1,
                outputs=("a", "b"),
            )
    text = "D = $w  V = Transpose <perm = [1, 0]> (D)  a = MatMul (x, V)"
    text += "  W = Transpose <perm = [1, 0]> (D)  b = MatMul (x, W)"
    more = {"outputs": ("a", "b"), "stored_weights": 1}
    yield Case("two_transposes", text, Q((6, 70), axis=1), (3, 70), TWO, **more)
    text = "W = $w  a = MatMul (x, W)  b = Gemm (x, W, c)"
    gemm = {**TWO, "Gemm": 0}
    w = Q((70, 6))
    yield Case("matmul_and_gemm", text, w, (3, 70), gemm, constants={"c": (6,)}, **more)
    expect = {"MatMulNBits": 1, "DequantizeLinear": 1}
    name = "dequantize_is_an_output_too"
    yield Case(name, MATMUL, w, (3, 70), expect, "dequantizelinear", outputs=("W", "y"))
    # The same bytes as [K, N] and as [N, K]: two different weights.
    plain = Q((32, 32), "int4", zero_points="none")
    text = "V = $w  a = MatMul (x, V)  D = DequantizeLinear <axis = 1, block_size = 32> (w, s)"
    text += "  W = Transpose <perm = [1, 0]> (D)  b = MatMul (x, W)"
    more = {"outputs": ("a", "b"), "constants": {"s": (32, 1)}}
    yield Case("one_square_weight_both_ways", text, plain, (3, 32), TWO, **more)
    heads = {
        "matmul": "V = Transpose <perm = [1, 0]> (W)  logits = MatMul (x, V)",
        "gemm": "logits = Gemm <transB = 1> (x, W)",
    }
    more = {"inputs": {"ids": np.int64([[0, 8, 3]])}, "outputs": ("embedded", "logits")}
    expect = {**GATHERED, "MatMulNBits": 1}
    for storage, head, scaled in product(STORAGES, heads, ("blocks", "channel")):
        w = Q((9, 64), storage, 0 if scaled == "channel" else 1, scaled=scaled)
        text = f"W = $w  embedded = Gather (W, ids)  {heads[head]}"
        name = f"tied_embedding-{head}-{scaled}-{storage}"
        yield Case(name, text, w, (3, 64), expect, **more)


def _gather(
    name: str,
    w: Quantized,
    axis: int = 0,
    indices: npt.NDArray | None = None,
    fused: bool = True,
    cast: bool = False,
    **more: object,
) -> LayoutCase:
    size = w.shape[axis]
    if indices is None:
        indices = np.int64([[0, size - 1, 2], [1, 1, size // 2]])
    text = f"W = $w  y = Gather {attribute_text(axis=axis or None)} (W, ids)"
    if cast:
        text = text.replace("y =", "h =") + "  y = Cast <to = 1> (h)"
    more |= {"expect": GATHERED} if fused else left_alone("gather")
    return Case(name, text, w, None, inputs={"ids": np.asarray(indices)}, **more)


def _row_9() -> Iterator[LayoutCase]:
    """Embeddings, [rows, columns]: rows gathered, blocks along them, in whole bytes."""
    shape, case = (40, 72), _gather
    for storage, zero_points in product(STORAGES, ZERO_POINTS):
        w = Q(shape, storage, 1, zero_points=zero_points)
        yield case(f"axis0-last-{storage}-zp_{zero_points}", w)
    for storage, (blocked, axis) in product(("uint4", "int8"), ((0, 0), (0, 1), (1, -1))):
        name = f"axis{axis}-blocked{blocked}-{storage}".replace("-1", "_minus_1")
        yield case(name, Q(shape, storage, blocked, 16), axis, fused=False)
    for storage, scaled in product(STORAGES, ("tensor", "tensor1", "rows", "columns")):
        kind = "channel" if scaled in ("rows", "columns") else scaled
        w = Q((40, 64), storage, 0 if scaled == "rows" else None, scaled=kind)
        yield case(f"{scaled}-{storage}", w, fused=scaled != "columns")
    for block, storage in product((64, 128, 256), ("uint4", "int8")):
        yield case(f"block{block}-{storage}", Q((9, 300), storage, -1, block))
    for storage in ("int4", "uint8"):
        yield case(f"block8-{storage}", Q((9, 32), storage, 1, 8), fused=False)
        for block in (512, 1024):
            yield case(f"block{block}-{storage}", Q((9, 600), storage, 1, block))
    for storage in ("int4", "uint4", "uint8"):
        w = Q(shape, storage, 1, scale_dtype=np.float16)
        yield case(f"float16-{storage}", w, dtype=np.float16, tolerance=HALF)
        yield case(f"float16_cast-{storage}", w, cast=True, tolerance=HALF)
    indices = {
        "scalar": np.int64(7),
        "rank1_int32": np.int32([3, 0, 39]),
        "negative": np.int64([[-1, 2], [-40, -7]]),
        "negative_int32": np.int32([-1]),
        "repeated": np.int64([5, 5, 5]),
    }
    for columns, storage in product((48, 70, 24), ("int4", "uint8")):  # half a row's scale
        w = Q((40, columns), storage, 0, scaled="channel")
        constants = {"shape": np.int64([20, 2 * columns])}
        text = "V = $w  W = Reshape (V, shape)  y = Gather (W, ids)"
        more = {"constants": constants, "inputs": {"ids": np.int64([0, 19, 7])}}
        fused = GATHERED if columns == 48 else {}
        name = f"two_scales_of_{columns}-{storage}"
        yield Case(name, text, w, None, fused, None if fused else "gather", **more)
    for name, storage in product(indices, ("uint4", "int8")):
        yield case(f"indices_{name}-{storage}", Q(shape, storage, 1), indices=indices[name])
    for storage in STORAGES:
        w, fused = Q((5, 33), storage, 1), STORAGE[storage][0] == 8
        yield case(f"odd_columns-{storage}", w, indices=np.int64([0, 4, 2]), fused=fused)
    yield case("three_dimensional", Q((4, 6, 64), axis=2), 0, np.int64([3, 0]), fused=False)
    text = "W = $w  y = Gather (W, ids)  z = Gather (W, others)"
    inputs = {"ids": np.int64([3, 0, 39]), "others": np.int64([1, 2, 0])}
    expect = {**GATHERED, "GatherBlockQuantized": 2}
    outputs = ("y", "z")
    w = Q(shape, axis=1)
    yield Case("two_gathers", text, w, None, expect, inputs=inputs, outputs=outputs)


# Where the weight is.

PLACES = {
    "body": "body",
    "body_constants": "nodes",
    "outer": "graph",
    "outer_dequantize": "graph",
}
BODIES = {
    "if": """{w}{v} y = If (condition) <
        then_branch = then () => (y_then) {{ {t} y_then = MatMul (x, W) }},
        else_branch = other () => (y_else) {{ {e} p = MatMul (x, V) y_else = Relu (p) }}>""",
    "loop": """{w} y = Loop (trips, , x) <
        body = body (int64 i, bool go_in, float[rows, 32] state) => (go_on, state_out)
        {{ {t} go_on = Identity (go_in) state_out = MatMul (state, W) }}>""",
    "scan": """{w} total_sum, products = Scan (zeros, x) <num_scan_inputs = 1,
        body = body (float[3, 32] total, float[3, 32] element) => (total_out, product)
        {{ {t} p = MatMul (element, W) total_out = Add (total, p) product = Identity (p) }}
    >""",
}


def _body(operator: str, where: str, w: Quantized, **more: object) -> LayoutCase:
    """``x @ W`` in each branch, twice in a loop, or for each element and summed up."""
    inside = where != "outer_dequantize"
    second = "$v" if operator == "if" and where.startswith("body") else "$w"
    wholes = {"w": "W = $w", "v": f"V = {second}"}
    if w.axis == 1:
        wholes = {name: _transposed(text) for name, text in wholes.items()}
    parts = {"w": "", "v": "", "t": wholes["w"], "e": wholes["v"]}
    if not inside:
        parts = {"w": wholes["w"], "v": "", "t": "", "e": ""}
    text = BODIES[operator].format(**parts)
    if not inside:
        text = text.replace("(x, V)", "(x, W)")
    given: dict[str, object] = {"place": PLACES[where]}
    if operator == "if":
        given["inputs"] = {"condition": np.array(len(w.storage) % 2 == 0)}
        given["expect"] = {"MatMulNBits": 2, "DequantizeLinear": 0}
    elif operator == "loop":
        given["constants"] = {"trips": np.int64(2)}
    else:
        given |= {"constants": {"zeros": np.zeros((3, 32), np.float32)}, "x": (2, 3, 32)}
        given["outputs"] = ("total_sum", "products")
    weights = {"w": w, "v": w} if second == "$v" else {"w": w}
    given = {"x": (3, 32)} | given | more
    return Case("", text, weights, **given)


FUNCTION = f'<domain: "{FUNCTIONS}", opset_import: ["" : OPSET]>'


def _row_10() -> Iterator[LayoutCase]:
    for storage, form in product(STORAGES, FORMS):
        w = _stored(form, 70, 6, storage)
        text = _written(form, MATMUL)
        yield Case(f"constant_nodes-{storage}-{form}", text, w, place="nodes")
    parts = {"codes": "w", "scale": "w_scale", "zero_point": "w_zero_point"}
    for storage, where in product(("int4", "uint4", "uint8"), (*parts, "output")):
        w = Q((70, 6), storage)
        node = w.node("w")
        text = "D = $w  W = Identity (D)  y = MatMul (x, W)"
        if where in parts:
            read = node.replace(f'"{parts[where]}"', "part")
            text = f"part = Identity ({parts[where]})  W = {read}  y = MatMul (x, W)"
        # onnxruntime has no Identity kernel for less than 8 bits.
        runs = storage == "uint8" or where in ("scale", "output")
        yield Case(f"identity_of_{where}-{storage}", text, w, runs=runs)
    choices = product(BODIES, ("int4", "uint4", "uint8"), PLACES)
    for operator, storage, where in choices:
        case = _body(operator, where, Q((32, 32), storage, 0, 16))
        yield dataclasses.replace(case, name=f"{operator}-{where}-{storage}")
    case = _body("loop", "outer", Q((32, 32), "uint4", 1, 16))
    yield dataclasses.replace(case, name="loop-outer-transposed")
    text = """y = Loop (trips, , x) <
        body = body (int64 i, bool go_in, float[rows, 32] state) => (go_on, state_out) {
          state_out = If (condition) <
            then_branch = then () => (a) { W = $w a = MatMul (state, W) },
            else_branch = other () => (b) { b = Identity (state) }>
          go_on = Identity (go_in) }>"""
    more = {"inputs": {"condition": np.array(True)}, "constants": {"trips": np.int64(2)}}
    yield Case("if_inside_loop", text, Q((32, 32), block=16), (3, 32), **more)
    text = """W = $w y_outer = MatMul (x, W) y = If (condition) <
        then_branch = then () => (a) { T = $w r = Relu (x) a = MatMul (r, T) },
        else_branch = otherwise () => (b) { E = $w s = Relu (x) b = MatMul (s, E) }>"""
    more = {"inputs": {"condition": np.array(False)}, "outputs": ("y_outer", "y")}
    expect = {**FUSED, "MatMulNBits": 3}
    yield Case("if_shares_with_graph", text, Q((32, 6), block=16), (3, 32), expect, **more)
    call, arguments = f"y = {FUNCTIONS}.Linear", "w, w_scale, w_zero_point"
    for storage, form in product(("int4", "uint4", "int8"), FORMS):
        w, text = _stored(form, 70, 6, storage), _written(form, MATMUL)
        linear = f"{FUNCTION} Linear (x, {arguments}) => (y) {{ {text} }}"
        name = f"function_of_weights-{storage}-{form}"
        yield Case(name, f"{call} (x, {arguments})", w, functions=linear)
        linear = f"{FUNCTION} Linear (x) => (y) {{ {text} }}"
        name = f"function_with_constants-{storage}-{form}"
        yield Case(name, f"{call} (x)", w, functions=linear, place="nodes")
    linear = f"{FUNCTION} Linear (x, {arguments}) => (y) {{ {MATMUL} }}"
    others = arguments.replace("w", "v")
    text = f"{call} (x, {arguments})  z = {FUNCTIONS}.Linear (x, {others})"
    weights = dict.fromkeys("wv", Q((70, 6)))
    more = {"outputs": ("y", "z"), "functions": linear}
    yield Case("function_called_twice", text, weights, (3, 70), TWO, **more)
    linear = f"{FUNCTION} Linear (x, W) => (y) {{ y = MatMul (x, W) }}"
    text = f"W = $w  {call} (x, W)"
    yield Case("function_of_a_dequantized_weight", text, Q((70, 6)), functions=linear)
    # A function in a function takes no 4-bit argument in onnxruntime.
    outer = FUNCTION.replace("]", f', "{FUNCTIONS}" : 1]')
    functions = f"""{FUNCTION} Linear (x, {arguments}) => (y) {{ {MATMUL} }}
        {outer} Block (x, {arguments}) => (z) {{ {call} (x, {arguments}) z = Relu (y) }}"""
    text = f"y = {FUNCTIONS}.Block (x, {arguments})"
    yield Case("function_in_function", text, Q((70, 6), "uint8"), functions=functions)


# Products that have no kernel.


def _row_11() -> Iterator[LayoutCase]:
    left = Q((6, 64), axis=1)
    text = "W = $w  y = MatMul (W, x)"
    yield Case("left", text, left, (64, 3), **left_alone("feeds input 0 of MatMul"))
    w = Q((3, 48, 6), "uint4", 1, 16)
    yield Case("batched", MATMUL, w, (3, 2, 48), static=range(3), **left_alone("rank 2 fuses"))
    yield Case("vector_and_matrix", MATMUL, Q((64, 6), zero_points="none"), (64,))


# Corners.


def _row_12() -> Iterator[LayoutCase]:
    legal = (16, 32, 64, 128, 256)
    for block, storage, number in product((512, 1024), STORAGES, range(3)):
        k, form = (100, block, block + 300)[number], FORMS[(block // 512 + number) % 2]
        w = _stored(form, k, 3, storage, block)
        name = f"block{block}-k{k}-{storage}"
        yield Case(name, _written(form, MATMUL), w, (3, k), block_sizes=legal)
    for block, k in ((8, 32), (24, 48), (48, 96)):
        left = left_alone(f"block_size {block}")
        for storage in ("int4", "uint8"):
            w = Q((k, 6), storage, 0, block)
            yield Case(f"block{block}-{storage}", MATMUL, w, (3, k), **left)
        w = Q((6, k), "int4", 1, block)
        yield Case(f"block{block}-transposed", _transposed(MATMUL), w, (3, k), **left)
    for storage in ("int4", "uint8"):
        bfloat16 = ml_dtypes.bfloat16
        w = Q((64, 6), storage, zero_points="none", scale_dtype=bfloat16)
        more = {**left_alone("bfloat16"), "dtype": bfloat16, "runs": False}
        yield Case(f"bfloat16-{storage}", MATMUL, w, (3, 64), **more)
    for storage, activation in product(("int4", "uint4", "int8"), ACTIVATIONS):
        case = _chain(storage, activation, stored_weights=4)
        yield dataclasses.replace(case, name=f"chain_of_{activation.lower()}-{storage}")
    for layer, name in (("Gemm", "gemm_relu"), ("Add", "matmul_add_relu")):
        yield dataclasses.replace(_chain("uint4", "Relu", layer), name=f"chain_of_{name}")


ACTIVATIONS = {"Relu": "Relu ({})", "Clip": "Clip ({}, low, high)", "Tanh": "Tanh ({})"}


def _chain(storage: str, activation: str, layer: str = "MatMul", **more: int) -> LayoutCase:
    """Four layers; native fusion skips those whose only consumer is Relu or Clip."""
    layers = {
        "MatMul": "p{0} = MatMul ({1}, W{0})",
        "Gemm": "p{0} = Gemm ({1}, W{0}, c{0})",
        "Add": "m{0} = MatMul ({1}, W{0})  p{0} = Add (m{0}, c{0})",
    }
    text, value = "", "x"
    for name in "abcd":
        text += f"W{name} = ${name}  {layers[layer].format(name, value)}  "
        value = "y" if name == "d" else f"r{name}"
        text += f"{value} = {ACTIVATIONS[activation].format('p' + name)}  "
    # Not far below what the layers give: what is left of larger sums would be their rounding.
    constants: dict[str, npt.NDArray | tuple[int, ...]] = {
        "low": np.float32(-30),
        "high": np.float32(30),
    }
    if layer != "MatMul":
        constants |= {f"c{name}": (32,) for name in "abcd"}
    weights = dict.fromkeys("abcd", Q((32, 32), storage, 0, 16))
    more |= {"constants": constants, "tolerance": 3 * EXACT}
    return Case("", text, weights, (3, 32), {**FUSED, "MatMulNBits": 4}, **more)


@functools.cache
def layout_cases() -> tuple[LayoutCase, ...]:
    rows = (
        _row_1, _row_2, _row_3, _row_4, _row_5, _row_6, _row_7, _row_8, _row_9, _row_10,
        _row_11, _row_12,
    )  # fmt: skip
    return tuple(
        dataclasses.replace(case, name=f"{number:02d}-{case.name}")
        for number, row in enumerate(rows, 1)
        for case in row()
    )


# Which cases of a large table run: with ``make test-exhaustive`` every one.
EXHAUSTIVE = bool(os.environ.get("ORTPLUGINS_EXHAUSTIVE"))
AnyCase = TypeVar("AnyCase")


def pairwise(cases: Iterable[AnyCase], name: Callable[[AnyCase], str]) -> list[AnyCase]:
    """Return the cases whose name, split at hyphens, has a pair of parts not met before."""
    chosen, met = [], set()
    for case in cases:
        pairs = set(itertools.combinations(name(case).split("-"), 2))
        if EXHAUSTIVE or not pairs <= met:
            chosen.append(case)
        met |= pairs
    return chosen
