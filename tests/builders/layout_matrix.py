# SPDX-License-Identifier: MIT
"""Every layout of a quantised weight that exporters write, with the numbers it must give.

``layout_cases()`` returns the matrix. In the text of a case, ``$w`` stands for
DequantizeLinear of the weight ``w``, ``$v/w_scale`` for that of v with w's scales, and ``@w``
for the same through a Transpose. A case of ``layouts.txt`` is a line, and nodes below it:

    name | types, zero points, shape, axis/block | x | left, or ! refusal | others

``*`` are all types; ``?`` are all kinds of zero points, ``-`` none, ``r`` random ones; an axis
without a block has a scale for each index, ``.`` is one scale, ``[]`` one of shape [1]. Others
are constants (``b=6``: random, of that shape) and inputs (``ids<``), and ``half`` for float16
activations, ``s16`` for float16 scales.
"""

import dataclasses
import functools
import itertools
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
from onnx import helper, numpy_helper

from .dequantized_models import STORAGE, Quantized
from .text_models import FUNCTIONS, float64_outputs, text_model

EXACT = 1e-5  # float32 throughout
HALF = 2e-3  # float16 somewhere
STORAGES = tuple(STORAGE)
ZERO_POINTS = ("none", "random", "default", "one_other")

FUSED = {"MatMulNBits": 1, "DequantizeLinear": 0}
MACRO = r"\$(\w+)(?:/(\w+))?"


@dataclasses.dataclass(frozen=True, eq=False)
class LayoutCase:
    """One model, its numbers, and what must become of it."""

    name: str
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
    stored_weights: int | None = None  # different tensors of codes, where counted

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
        through = r"\1_t = $\2  \1 = Transpose <perm = [1, 0]> (\1_t)"
        turned = re.sub(r"(\w+) = @(\w+)", through, self.text)
        nodes, functions = (re.sub(MACRO, write, text) for text in (turned, self.functions))
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


Q, Case, product = Quantized, LayoutCase, itertools.product
MATMUL = "W = $w  y = MatMul (x, W)"
FORMS = {"axis0": MATMUL, "transposed": MATMUL.replace("$", "@")}
_TYPES = {"*": STORAGES, "4": ("int4", "uint4"), "2": ("uint4", "int8")}
_POINTS = {"?": ZERO_POINTS, "-": ("none",), "r": ("random",), "-r": ("none", "random")}
TABLE = Path(__file__).with_name("layouts.txt")


def _array(text: str) -> npt.NDArray | tuple[int, ...]:
    """An array of integers, or the shape of a random one."""
    kind, bracket, numbers = text.partition("[")
    if bracket:
        dtype = {"i": np.int64, "i32": np.int32}[kind]
        return np.array(json.loads(f"[{numbers}"), dtype)
    return tuple(map(int, filter(None, text.split("x"))))


def _table() -> Iterator[LayoutCase]:
    for block in re.split(r"\n(?=\S)", TABLE.read_text()):
        line, *nodes = block.splitlines()
        name, weight, x, left, others = (*map(str.strip, line.split("|")), "", "")[:5]
        text = " ".join(map(str.strip, nodes))
        types, points, shape, place = weight.split()
        axis, _, size = place.partition("/")
        scaled = "blocks" if size else {".": "tensor", "[]": "tensor1"}.get(place, "channel")
        options = others.split()
        half = "half" in options
        given = {
            sign: dict(each.split(sign) for each in options if sign in each) for sign in "=<"
        }
        more: dict[str, object] = {
            "constants": {key: _array(each) for key, each in given["="].items()},
            "inputs": {key: _array(each) for key, each in given["<"].items()},
            "tolerance": HALF if half or "s16" in options else EXACT,
            "dtype": np.float16 if half else np.float32,
            "static": range(3) if name == "stack" else (-1,),
        }
        counts = dict(each.split("=") for each in left.split()) if "=" in left else {}
        stored = counts.pop("stored", None)
        more["stored_weights"] = stored and int(stored)
        gathers = "Gather " in text and "MatMul" not in text and "Gemm" not in text
        expect = {"DequantizeLinear": int("Dequantize" in text and "int32" in name)}
        expect |= {} if gathers else {"MatMulNBits": 1}
        expect |= {key: int(each) for key, each in counts.items()}
        if left.startswith("!"):
            expect, more["refusal"] = {}, left[2:]
        for storage, zero_points in product(
            _TYPES.get(types) or types.split(","), _POINTS[points]
        ):
            spec = Q(
                _array(shape), storage, None if scaled[0] == "t" else int(axis),
                int(size or 0), zero_points, scaled,
                np.float16 if "s16" in options else np.float32,
            )  # fmt: skip
            weights = dict.fromkeys(re.findall(r"[$@](\w)", text), spec)
            yield Case(
                f"{name}-{storage}-zp_{zero_points}",
                text, weights, None if x == "-" else _array(x), expect, **more,
            )  # fmt: skip


def _sizes() -> Iterator[LayoutCase]:
    """Blocks as kernels take them, with [K, N] that one may get wrong: ragged, odd, short."""
    choices = product(FORMS, (16, 32, 64, 128, 256), STORAGES, ZERO_POINTS)
    for number, (form, block, storage, zero_points) in enumerate(choices):
        k, n = (
            (2 * block, 8), (block + 7, 5), (block - 3, 6), (3 * block, 7), (1, 4),
            (2 * block + 1, 1), (1, 1),
        )[number % 7]  # fmt: skip
        shape, axis = ((n, k), 1) if form == "transposed" else ((k, n), 0)
        w = Q(shape, storage, axis, block, zero_points)
        name = f"{form}-{storage}-block{block}-k{k}-n{n}-zp_{zero_points}"
        checks = {"zero_points": w.needs_zero_points, "stored_weights": 1}
        yield Case(name, FORMS[form], w, (3, k), **checks)


# Where the weight is: nodes, place of the constants, and what is made.
FUNCTION = f'<domain: "{FUNCTIONS}", opset_import: ["" : OPSET]>'
CALL, WEIGHTS = f"y = {FUNCTIONS}.Linear", "w, w_scale, w_zero_point"
IF = """{0} y = If (condition) <
    then_branch = then () => (a) {{ {1} a = MatMul (x, W) }},
    else_branch = other () => (b) {{ {2} p = MatMul (x, V) b = Relu (p) }}>"""
LOOP = """{0} y = Loop (trips, , x) <
    body = body (int64 i, bool go_in, float[rows, 32] state) => (go_on, state_out)
    {{ {1} go_on = Identity (go_in) state_out = MatMul (state, W) }}>"""
SCAN = """{0} total, products = Scan (zeros, x) <num_scan_inputs = 1,
    body = body (float[3, 32] before, float[3, 32] element) => (after, product)
    {{ {1} p = MatMul (element, W) after = Add (before, p) product = Identity (p) }}>"""
SHARED = f"U = $w o = MatMul (x, U) z = {IF.format('', 'W = $w', 'V = $w')[4:]} y = Add (o, z)"
BODIES = {
    "if": (IF.format("", "W = $w", "V = $v"), "body"),
    "if-outer": (IF.format("", "W = $w", "V = $w"), "graph"),
    "loop": (LOOP.format("", "W = $w"), "body"),
    "loop-outer": (LOOP.format("", "W = @w"), "graph"),
    "scan": (SCAN.format("", "W = $w"), "body"),
    "shared": (SHARED, "graph"),
    "constants": (MATMUL, "nodes"),
    "identity": ("D = $w W = Identity (D) y = MatMul (x, W)", "graph"),
    "function": (f"{CALL} (x, {WEIGHTS})", "graph"),
    "function-constants": (f"{CALL} (x)", "nodes"),
    "function-of_a_dequantized_weight": (f"W = $w {CALL} (x, W)", "graph"),
}
CODE_OF = {
    "function": f"{FUNCTION} Linear (x, {WEIGHTS}) => (y) {{ {MATMUL} }}",
    "function-constants": f"{FUNCTION} Linear (x) => (y) {{ {MATMUL} }}",
    "function-of_a_dequantized_weight": f"{FUNCTION} Linear (x, W) => (y) "
    "{ y = MatMul (x, W) }",
}


def _places() -> Iterator[LayoutCase]:
    for (name, (text, place)), storage in product(BODIES.items(), ("int4", "uint4", "uint8")):
        axis = int("@" in text)
        w = Q((32, 32), storage, axis, 16)
        weights = dict.fromkeys(re.findall(r"[$@](\w+)", text) or "w", w)
        constants = {"trips": np.int64(2), "zeros": np.zeros((3, 32), np.float32)}
        yield Case(
            f"{name}-{storage}",
            text,
            weights,
            (2, 3, 32) if "Scan" in text else (3, 32),
            {**FUSED, "MatMulNBits": text.count("MatMul") or 1},
            constants={key: each for key, each in constants.items() if key in text},
            inputs={"condition": np.array(True)} if "condition" in text else {},
            outputs=("total", "products") if "Scan" in text else ("y",),
            functions=CODE_OF.get(name, ""),
            place=place,
        )


@functools.cache
def layout_cases() -> tuple[LayoutCase, ...]:
    return (*_sizes(), *_table(), *_places())


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
