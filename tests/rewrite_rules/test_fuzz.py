# SPDX-License-Identifier: MIT
"""Random models around a dequantised constant: no crash, no hang, no wrong number.

DequantizeLinear, whatever renames its numbers, several readers; any shapes, axes, blocks and
types that ONNX allows, in the graph or in a loop. What onnxruntime runs, it must run after the
fusion too, with the same numbers. What is wrong in a model is test_bad_input's.

``ORTPLUGINS_FUZZ=50`` looks at 50 times as many, other ones for each ``ORTPLUGINS_FUZZ_SEED``;
the model that is being looked at is then in ``ortplugins-fuzz.onnx`` in the temporary folder.
"""

import contextlib
import dataclasses
import math
import os
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
import onnx
import onnx.printer
import onnx_ir as ir
import pytest
from builders.dequantized_models import STORAGE, Quantized, attribute_text
from builders.same_numbers import (
    feeds_of,
    holds_halves,
    run_all,
    serialised,
    session,
    time_limit,
    wrong_numbers,
)
from builders.text_models import quoted, text_model
from onnx import numpy_helper

from rewrite_rules.dq_matmulnbits_fusion.fuse import FusionOptions, fuse
from rewrite_rules.remarks import PassContext, Remark, Remarks

TIMES = int(os.environ.get("ORTPLUGINS_FUZZ", "1"))
FIRST_SEED = int(os.environ.get("ORTPLUGINS_FUZZ_SEED", "0"))
PARTS, MODELS, SECONDS = 4, 100, 5
T = onnx.TensorProto
DTYPES = {T.FLOAT: np.float32, T.FLOAT16: np.float16, T.BFLOAT16: ml_dtypes.bfloat16}
SIZES = (1, 2, 3, 4, 5, 6, 8, 15, 16, 17, 24, 32, 33, 48, 64, 65, 70, 96, 128, 300)


SINCE = {2: 25, 4: 21, 8: 11}  # opset of types of so many bits


class Value(NamedTuple):
    name: str
    shape: list[int]
    dtype: int


class Chain:
    """Draws a model node by node, following the shape of the weight."""

    def __init__(self, seed: int) -> None:
        self.random, self.rng = random.Random(seed), np.random.default_rng(seed)
        self.lines: list[str] = []
        self.tensors: list[onnx.TensorProto] = []
        self.inputs: dict[str, tuple[int, list[int | None]]] = {}
        self.columns = 1  # of what the last node made
        self.opset = self.one_of(11, 13, 13, 17, 19, *[21] * 5, 23, 23, 25)

    def one_of(self, *choices):  # type: ignore[no-untyped-def]
        return self.random.choice(choices)

    def rarely(self) -> bool:
        return self.random.random() < 0.2

    def constant(self, array: np.ndarray, dtype: int | None = None) -> str:
        name = f"constant_{len(self.tensors)}"
        array = array if dtype is None else np.asarray(array).astype(DTYPES[dtype])
        self.tensors.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def node(self, op_type: str, *inputs: str, **given: object) -> str:
        return self.write(op_type, f"{op_type} {attribute_text(**given)} ({quoted(inputs)})")

    def write(self, op_type: str, call: str) -> str:
        name = f"{op_type.rpartition('.')[2]}_{len(self.lines)}"
        self.lines.append(f"[{name}] {name}_out = {call}")
        return f"{name}_out"

    def model(self) -> onnx.ModelProto:
        source = self.dequantize()
        values, outputs = [source], list[str]()
        for _ in range(self.one_of(1, 1, 2, 3)):
            value = self.one_of(*values)
            for _ in range(self.one_of(0, 1, 2, 3)):
                value = self.rename(value)
            values.append(value)
            outputs.append(self.consume(value))
        text = "  ".join(self.lines)
        if self.rarely():
            self.tensors.append(numpy_helper.from_array(np.int64(2), "trips"))
            self.tensors.append(numpy_helper.from_array(np.array(True), "yes"))
            made = ", ".join(outputs)
            body = f"body (int64 i, bool go) => (on, {made}) {{ {text} on = Identity (go) }}"
            outputs = [f"{name}_all" for name in outputs]
            text = f"{', '.join(outputs)} = Loop (trips, yes) <body = {body}>"
        model = text_model(
            text, self.tensors, self.inputs, outputs,
            opset=self.opset, place=self.one_of("graph", "graph", "nodes", "body"),
        )  # fmt: skip
        for output in model.graph.output:
            output.ClearField("type")
        return model

    def dequantize(self) -> Value:
        rank = self.one_of(2, 2, 2, 2, 3, 3, 1, 4)
        shape = [self.one_of(*SIZES[: 3 if i < rank - 2 else None]) for i in range(rank)]
        storages = [name for name, (bits, *_) in STORAGE.items() if self.opset >= SINCE[bits]]
        dtype = self.one_of(T.FLOAT, T.FLOAT, T.FLOAT16) if self.opset >= 19 else T.FLOAT
        kinds = ("blocks", "blocks", "channel", "tensor", "tensor1")
        first = 0 if self.opset >= 21 else 2 if self.opset > 11 else 3
        stored = dtype
        if self.rarely() and self.opset >= 21:  # the scales are cast
            stored = self.one_of(*DTYPES)
        weight = Quantized(
            tuple(shape),
            storage=self.one_of(*storages),
            axis=None if self.opset == 11 else self.random.randrange(-rank, rank),
            block=self.one_of(16, 32, 64, 128, 256, 512, 8, 2, 1),
            zero_points=self.one_of("none", "random", "default"),
            scaled=self.one_of(*kinds[first:]),
            scale_dtype=DTYPES[stored],
        )
        if self.opset >= 23 and self.rarely():
            dtype = self.one_of(T.FLOAT, T.FLOAT16)
            weight = dataclasses.replace(weight, output_dtype=dtype)
        self.tensors += weight.tensors("w", self.rng)
        scale = None
        if stored != dtype and not weight.output_dtype:
            scale = self.node("Cast", "w_scale", to=dtype)
        return Value(self.write("DequantizeLinear", weight.node("w", scale)), shape, dtype)

    def rename(self, value: Value) -> Value:
        name, shape, dtype = value.name, list(value.shape), value.dtype
        ones = [i for i, size in enumerate(shape) if size == 1]
        kind = self.one_of("Transpose", "Transpose", "Reshape", "Reshape", "Axis", "Cast")
        if kind == "Cast":
            if self.rarely():  # what was rounded stays so
                name = self.node("Cast", name, to=self.one_of(T.INT32, T.INT8, T.BFLOAT16))
            dtype = self.one_of(T.FLOAT, T.FLOAT, T.FLOAT16)
            return Value(self.node("Cast", name, to=dtype), shape, dtype)
        if kind == "Transpose":
            perm = self.random.sample(range(len(shape)), len(shape))
            given = {"perm": perm} if perm != sorted(perm)[::-1] else {}
            return Value(self.node(kind, name, **given), [shape[i] for i in perm], dtype)
        if kind == "Reshape":
            return self.reshape(value)
        rank = len(shape) + (not ones)
        axis = self.one_of(*ones) if ones else self.random.randrange(rank)
        written = axis - self.one_of(0, rank)
        if self.opset < 13:
            inputs, given = [name], {"axes": [axis]}
        else:
            inputs, given = [name, self.constant(np.array([written]))], {}
        shape[axis : axis + bool(ones)] = [] if ones else [1]
        op_type = "Squeeze" if ones else "Unsqueeze"
        return Value(self.node(op_type, *inputs, **given), shape, dtype)

    def reshape(self, value: Value) -> Value:
        """Merge or split axes; sometimes with 0 or -1."""
        shape = list(value.shape)
        at = self.random.randrange(len(shape)) if shape else 0
        if at and self.one_of(True, False):
            shape[at - 1 : at + 1] = [shape[at - 1] * shape[at]]
        elif shape:
            size = self.one_of(*(d for d in range(1, shape[at] + 1) if shape[at] % d == 0))
            shape[at : at + 1] = [size, shape[at] // size]
        written = list(shape)
        if written and self.one_of(True, False):
            written[self.random.randrange(len(written))] = -1
        for i, (new, old) in enumerate(zip(shape, value.shape, strict=False)):
            if new == old and written[i] != -1 and self.rarely():
                written[i] = 0
        name = self.node("Reshape", value.name, self.constant(np.array(written, np.int64)))
        return Value(name, shape, value.dtype)

    def consume(self, value: Value) -> str:
        kind = self.one_of("MatMul", "MatMul", "Gemm", "com.microsoft.FusedMatMul", "Gather")
        if not value.shape or (kind == "Gemm" and len(value.shape) != 2):
            shape = [math.prod(value.shape[:-1]), *value.shape[-1:]]
            name = self.node("Reshape", value.name, self.constant(np.array(shape)))
            value = Value(name, shape, value.dtype)
        y = self.gather(value) if kind == "Gather" else self.multiply(kind, value)
        for _ in range(self.one_of(0, 0, 1, 2)):
            n = self.columns
            bias = self.bias(value, self.one_of([n], [1, n], [1], [], [1, 1, n], [3, n]))
            y = self.node("Add", *self.one_of((y, bias), (bias, y)))
        return y

    def bias(self, value: Value, shape: Sequence[int]) -> str:
        if self.rarely():
            return self.input(shape, value.dtype)
        return self.constant(self.rng.standard_normal(shape), value.dtype)

    def input(self, shape: Sequence[int], dtype: int) -> str:
        """Its first sizes are sometimes not declared."""
        name, known = f"x_{len(self.inputs)}", self.random.randrange(len(shape) + 1)
        dims = [None if i < known and size == 3 else size for i, size in enumerate(shape)]
        self.inputs[name] = dtype, dims
        return name

    def multiply(self, op_type: str, value: Value) -> str:
        """The weight and an input, either of them first, either transposed."""
        left, trans_w, trans_x = self.rarely(), self.rarely(), self.rarely()
        if op_type == "MatMul" or len(value.shape) == 1:
            trans_w = trans_x = False
        rows, columns = [1, 1, *value.shape][-2:] if value.shape[1:] else value.shape * 2
        k, n = (columns, rows) if left != trans_w else (rows, columns)
        m, groups = self.one_of(3, 3, 1), value.shape[:-2]
        shape = [k, m] if left != trans_x else [m, k]
        if op_type != "Gemm":
            lead = self.one_of(groups, groups, [], [3], [1])
            # With transA, onnxruntime 1.31 takes the bytes of W[K, N] for those of [N, K]
            # where x has rank 1.
            vector = self.rarely() and not (lead or groups or trans_w or trans_x)
            shape = [k] if vector else lead + shape
        self.columns = m if left else n
        x = self.input(shape, value.dtype)
        x = self.node("Relu", x) if self.rarely() else x
        operands, given = [x, value.name], {}
        if op_type != "MatMul":
            given = {"transA": int(trans_x), "transB": int(trans_w)}
            if left:
                given = {"transA": int(trans_w), "transB": int(trans_x)}
            given["alpha"] = self.one_of(None, 1.0, 0.5, -2.5, 0.1)
        if left:
            operands.reverse()
        if op_type == "Gemm" and self.one_of(True, False):
            given["beta"] = self.one_of(None, 1.0, 0.5, -3.0, 0.0)
            r, c = [n, m] if left else [m, n]
            shape = self.one_of([c], [1, c], [1], [], [r, c], [r, 1])
            operands.append(self.bias(value, shape))
        return self.node(op_type, *operands, **given)

    def gather(self, value: Value) -> str:
        axis = self.random.randrange(-len(value.shape), len(value.shape))
        low, kind = self.one_of(0, -1) * value.shape[axis], self.one_of(np.int64, np.int32)
        shape = self.one_of([], [3], [2, 2], [1], [0])
        self.columns = value.shape[-1]
        indices = self.rng.integers(low, value.shape[axis], shape)
        name = self.constant(np.asarray(indices).astype(kind))
        if not self.rarely():  # known, and yet no constant
            zero = self.input([1], T.INT64 if kind is np.int64 else T.INT32)
            name = self.node("Add", name, zero)
        return self.node("Gather", value.name, name, axis=axis)


@pytest.mark.parametrize("part", range(PARTS))
def test_random_models(part: int):
    count = MODELS * TIMES
    first = (FIRST_SEED * PARTS + part) * count
    for seed in range(first, first + count):
        proto = Chain(seed).model()
        content = proto.SerializeToString()
        if TIMES > 1:  # should onnxruntime crash on it
            Path(tempfile.gettempdir(), "ortplugins-fuzz.onnx").write_bytes(content)
        wrong = wrong_after_fusion(proto, random.Random(seed))
        assert not wrong, f"seed {seed}: {wrong}\n{onnx.printer.to_text(proto)}"


def wrong_after_fusion(proto: onnx.ModelProto, rng: random.Random) -> str:
    feeds = expected = None
    with contextlib.suppress(Exception):  # some it has no kernel for
        opened = session(proto)
        feeds = feeds_of(opened)
        expected = run_all(opened, feeds)
    model = ir.from_proto(onnx.ModelProto.FromString(proto.SerializeToString()))
    before, remarks = serialised(model), Remarks("dq_matmulnbits_fusion")
    options = FusionOptions(
        0, rng.choice(("fuse", "float", "float", "keep")), rng.choice((1024, 0))
    )
    with time_limit(SECONDS):
        fuse(model, options, PassContext(remarks))
    check_remarks(proto, list(remarks))
    unchanged = serialised(model) == before
    assert unchanged or any(remark.outcome in ("fired", "note") for remark in remarks)
    if expected is None or unchanged:  # some models give other numbers at each run
        return ""
    actual = run_all(session(model), feeds)
    wrong = wrong_numbers(expected, actual, halves=holds_halves(proto))
    return wrong and f"{wrong}, {[str(remark) for remark in remarks]}"


def check_remarks(proto: onnx.ModelProto, remarks: Sequence[Remark]) -> None:
    """Each DequantizeLinear of a constant has its outcome reported."""
    nodes = [node for attribute in proto.graph.node[0].attribute for node in attribute.g.node]
    for node in (*proto.graph.node, *nodes):
        if node.op_type == "DequantizeLinear":
            assert any(node.name in str(remark) for remark in remarks), node.name
