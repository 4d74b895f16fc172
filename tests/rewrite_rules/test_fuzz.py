# SPDX-License-Identifier: MIT
"""Random models, and damaged files: no crash, no hang, no wrong number.

Two searches, each small by default (some 20 seconds together):

* ``test_random_chains``: DequantizeLinear, whatever renames its numbers, a consumer; any
  shapes, axes, blocks and types that ONNX allows. What onnxruntime runs, it must run after the
  fusion too, with the same numbers. What is wrong in a model is test_bad_input's.
* ``test_damaged_files``: saved models with bytes changed, optimised in a child process with
  limits on time and memory. A result, or an error that ``optimize`` documents.

``ORTPLUGINS_FUZZ=50`` looks at 50 times as many of both (about 10 minutes), at other ones for
each ``ORTPLUGINS_FUZZ_SEED``; the chain that is being looked at is then in
``ortplugins-fuzz-chain.onnx`` in the temporary folder. Run as a program (PYTHONPATH=tests)
with a seed it repeats one damaged file.
"""

import collections
import contextlib
import dataclasses
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import numpy.typing as npt
import onnx
import onnx.printer
import onnx_ir as ir
import pytest
from builders.dequantized_models import STORAGE
from builders.layout_matrix import Quantized, attribute_text, layout_cases
from builders.limited_child import CRASHED, SECONDS, Child, limited
from builders.same_numbers import (
    TooSlow,
    feeds_of,
    holds_halves,
    run_all,
    serialised,
    session,
    time_limit,
    wrong_numbers,
)
from builders.text_models import quoted, text_model
from hypothesis import strategies as st
from onnx import numpy_helper

import ortplugins
from rewrite_rules.dq_matmulnbits_fusion.fuse import FusionOptions, fuse
from rewrite_rules.remarks import PassContext, Remark, Remarks

TIMES = int(os.environ.get("ORTPLUGINS_FUZZ", "1"))
FIRST_SEED = int(os.environ.get("ORTPLUGINS_FUZZ_SEED", "0"))
CHAINS = 200
FILES = 300

T = onnx.TensorProto


# Random chains.


@st.composite
def models(draw: st.DrawFn) -> onnx.ModelProto:
    """A dequantised constant, what renames its numbers, and what reads them."""
    return _Chain(draw).model()


class _Chain:
    """Draws a model node by node, following the shape of the weight."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.rng = np.random.default_rng(draw(st.integers(0, 1 << 16)))
        self.lines: list[str] = []
        self.tensors: list[onnx.TensorProto] = []
        self.inputs: dict[str, tuple[int, list[int | None]]] = {}
        self.opset = 21
        self.shape: list[int] = []
        self.value = ""
        self.dtype = T.FLOAT

    def one_of(self, *choices: object):  # type: ignore[no-untyped-def]
        return self.draw(st.sampled_from(choices))

    def constant(self, name: str, array: npt.NDArray) -> str:
        self.tensors.append(numpy_helper.from_array(array, name))
        return name

    def node(self, op_type: str, inputs: Sequence[str], **more: object) -> str:
        call = f"{op_type} {attribute_text(**more)} ({quoted(inputs)})"
        return self.write(op_type.rpartition(".")[2], call)

    def write(self, op_type: str, call: str) -> str:
        name = f"{op_type}_{len(self.lines)}"
        self.lines.append(f"[{name}] {name}_out = {call}")
        return f"{name}_out"

    def model(self) -> onnx.ModelProto:
        self.dequantize()
        for _ in range(self.draw(st.integers(0, 3))):
            self.rename()
        outputs = [self.consume()]
        if self.one_of(False, False, False, True):
            self.rename()
            outputs.append(self.consume())
        place = self.one_of("graph", "graph", "nodes")
        text = "  ".join(self.lines)
        model = text_model(
            text, self.tensors, self.inputs, outputs, opset=self.opset, place=place
        )
        for value in model.graph.output:
            value.ClearField("type")
        return model

    def dequantize(self) -> None:
        sizes = st.sampled_from([1, 2, 3, 4, 5, 6, 8, 15, 16, 17, 24, 32, 33, 64, 96])
        rank = self.one_of(2, 2, 2, 2, 3, 3, 1, 4)
        small = st.sampled_from([1, 2, 3, 4])
        shape = [self.draw(sizes if i >= rank - 2 else small) for i in range(rank)]
        scale_dtype = self.one_of(np.float32, np.float32, np.float32, np.float16)
        weight = Quantized(
            tuple(shape),
            storage=self.one_of(*STORAGE, "int4", "uint4"),
            axis=self.draw(st.integers(-rank, rank - 1)),
            block=self.one_of(16, 32, 16, 32, 64, 128, 8, 2, 1, 4, 256),
            zero_points=self.one_of("none", "random", "default", "none"),
            scaled=self.one_of("blocks", "blocks", "blocks", "channel", "tensor", "tensor1"),
            scale_dtype=scale_dtype,
        )
        if weight.storage.endswith("2"):
            self.opset = 25
        elif weight.scaled != "blocks" and weight.storage.endswith("8"):
            self.opset = self.one_of(21, 23, 13, 11 if weight.scaled == "tensor" else 13)
        else:
            self.opset = self.one_of(21, 21, 23)
        if self.opset == 11:  # DequantizeLinear has no axis yet
            weight = dataclasses.replace(weight, axis=None)
        self.dtype = T.FLOAT if scale_dtype is np.float32 else T.FLOAT16
        if self.opset >= 23 and self.one_of(False, False, True):
            self.dtype = self.one_of(T.FLOAT, T.FLOAT16)
            weight = dataclasses.replace(weight, output_dtype=self.dtype)
        self.tensors += weight.tensors("w", self.rng)
        self.value = self.write("DequantizeLinear", weight.node("w"))
        self.shape = shape

    # Nodes that rename.

    def rename(self) -> None:
        kinds = ("Transpose", "Reshape", "Squeeze", "Unsqueeze", "Identity", "Cast", "Reshape")
        getattr(self, f"_{self.one_of(*kinds).lower()}")()

    def _identity(self) -> None:
        self.value = self.node("Identity", [self.value])

    def _cast(self) -> None:
        rounding = (T.INT32, T.INT8, T.DOUBLE, T.BFLOAT16, T.BOOL, T.INT64)
        if self.one_of(False, False, False, False, True):  # what was rounded stays so
            self.value = self.node("Cast", [self.value], to=self.one_of(*rounding))
            self.dtype = T.FLOAT
        else:
            self.dtype = self.one_of(T.FLOAT, T.FLOAT16, T.FLOAT)
        self.value = self.node("Cast", [self.value], to=self.dtype)

    def _transpose(self) -> None:
        rank = len(self.shape)
        perm = list(self.draw(st.permutations(range(rank))))
        given = {"perm": perm} if perm else {}
        if self.one_of(False, False, False, True):
            perm, given = list(range(rank))[::-1], {}
        self.value = self.node("Transpose", [self.value], **given)
        self.shape = [self.shape[i] for i in perm]

    def _reshape(self) -> None:
        """Merge or split axes; sometimes with 0 or -1."""
        shape = list(self.shape)
        for _ in range(self.draw(st.integers(0, 2))):
            if self.one_of(True, False) and len(shape) > 1:
                at = self.draw(st.integers(0, len(shape) - 2))
                shape[at : at + 2] = [shape[at] * shape[at + 1]]
            elif shape:
                at = self.draw(st.integers(0, len(shape) - 1))
                divisors = [d for d in range(1, shape[at] + 1) if shape[at] % d == 0]
                d = self.draw(st.sampled_from(divisors))
                shape[at : at + 1] = [d, shape[at] // d]
        written = list(shape)
        if written and self.one_of(False, True):
            written[self.draw(st.integers(0, len(written) - 1))] = -1
        for i in range(min(len(shape), len(self.shape))):
            if shape[i] == self.shape[i] and written[i] != -1 and self.one_of(False, True):
                written[i] = 0
        target = self.constant(f"shape_{len(self.lines)}", np.int64(written))
        self.value = self.node("Reshape", [self.value, target])
        self.shape = shape

    def _squeeze(self) -> None:
        ones = [i for i, size in enumerate(self.shape) if size == 1]
        axes = [i for i in ones if self.one_of(True, False)]
        if axes:
            written = [i - self.one_of(0, len(self.shape)) for i in axes]
            self.value = self._with_axes("Squeeze", written)
        else:
            axes = ones
            self.value = self.node("Squeeze", [self.value])
        self.shape = [size for i, size in enumerate(self.shape) if i not in axes]

    def _unsqueeze(self) -> None:
        rank = len(self.shape) + 1
        axis = self.draw(st.integers(0, rank - 1))
        self.value = self._with_axes("Unsqueeze", [axis - self.one_of(0, rank)])
        self.shape.insert(axis, 1)

    def _with_axes(self, op_type: str, axes: list[int]) -> str:
        if self.opset < 13:
            return self.node(op_type, [self.value], axes=axes)
        name = self.constant(f"axes_{len(self.lines)}", np.array(axes, np.int64))
        return self.node(op_type, [self.value, name])

    # Consumers.

    def consume(self) -> str:
        kinds = ("MatMul", "MatMul", "Gemm", "com.microsoft.FusedMatMul", "Gather", "MatMul")
        if not self.shape or (len(self.shape) == 1 and self.one_of(True, True, False)):
            self._unsqueeze()
        kind = self.one_of(*kinds)
        y = self._gather() if kind == "Gather" else self._product(kind)
        if self.one_of(False, False, True):
            n = self.shape[-1] if self.shape else 1
            name = self.bias(self.one_of([n], [1, n], [1], [], [1, 1], [3, n]))
            y = self.node("Add", self.one_of([y, name], [name, y]))
        return y

    def bias(self, shape: Sequence[int]) -> str:
        dtype = np.float16 if self.dtype == T.FLOAT16 else np.float32
        numbers = np.asarray(self.rng.standard_normal(shape)).astype(dtype)
        return self.constant(f"bias_{len(self.lines)}", numbers)

    def input(self, shape: Sequence[int], dtype: int | None = None) -> str:
        """Its first sizes are sometimes not declared."""
        name = f"x_{len(self.lines)}"
        hidden = self.draw(st.integers(0, max(len(shape) - 1, 0)))
        dims = [None if i < hidden and size == 3 else size for i, size in enumerate(shape)]
        self.inputs[name] = dtype or self.dtype, dims
        return name

    def _product(self, op_type: str) -> str:
        """The weight and an input, either of them first, either transposed."""
        left, trans_w, trans_x = (self.one_of(False, False, True) for _ in range(3))
        if op_type == "MatMul":
            trans_w = trans_x = False
        rows, columns = (self.shape * 2 if len(self.shape) == 1 else [1, 1, *self.shape])[-2:]
        k, n = (columns, rows) if left != trans_w else (rows, columns)
        m = self.one_of(3, 3, 1)
        shape = [k, m] if left != trans_x else [m, k]
        if op_type != "Gemm":
            groups = self.shape[:-2]
            lead = groups if self.one_of(True, False) else self.one_of([], [], [3], [1])
            # With transA, onnxruntime 1.31 takes the bytes of W[K, N] for those of [N, K]
            # where x has rank 1.
            vector = not (lead or groups or (left and trans_w))
            shape = [k] if vector and self.one_of(False, False, False, True) else lead + shape
        x = self.input(shape)
        if self.one_of(False, False, True):
            x = self.node("Relu", [x])
        operands = [self.value, x] if left else [x, self.value]
        given: dict[str, object] = {}
        if op_type != "MatMul":
            flags = (trans_w, trans_x) if left else (trans_x, trans_w)
            given = dict(zip(("transA", "transB"), map(int, flags), strict=True))
            if self.one_of(False, True):
                given["alpha"] = self.one_of(1.0, 0.5, -2.5, 3.0, 0.1)
        if op_type == "Gemm":
            if self.one_of(False, True):
                given["beta"] = self.one_of(1.0, 1.0, 0.5, -3.0, 0.1, 0.0)
            if self.one_of(False, True):
                rows, columns = y = [n, m] if left else [m, n]
                choices = ([columns], [1, columns], [1], [], y, [rows, 1], [1, 1])
                operands.append(self.bias(self.one_of(*choices)))
        return self.node(op_type, operands, **given)

    def _gather(self) -> str:
        rank = len(self.shape)
        axis = self.draw(st.integers(-rank, rank - 1)) if self.one_of(False, True) else 0
        low = -self.shape[axis] if self.one_of(False, True) else 0
        shape = self.one_of([], [3], [2, 2], [1], [0])
        indices = np.asarray(self.rng.integers(low, self.shape[axis], shape))
        kind = self.one_of(np.int64, np.int64, np.int32)
        name = self.constant(f"indices_{len(self.lines)}", indices.astype(kind))
        if self.one_of(True, True, False):
            # Indices that are known, and yet no constant.
            name = self.node(
                "Add", [name, self.input([1], T.INT64 if kind is np.int64 else T.INT32)]
            )
        given = {"axis": axis} if axis or self.one_of(True, False) else {}
        return self.node("Gather", [self.value, name], **given)


OPTIONS = st.builds(
    FusionOptions,
    accuracy_level=st.just(0),
    slow_kernels=st.sampled_from(["fuse", "float", "float", "keep"]),
    float_limit_mb=st.sampled_from([1024, 1024, 0]),
)


@hypothesis.given(proto=models(), options=OPTIONS)
@hypothesis.settings(
    max_examples=CHAINS * TIMES,
    deadline=None,
    derandomize=TIMES == 1,
    suppress_health_check=list(hypothesis.HealthCheck),
    print_blob=True,
)
def test_random_chains(proto: onnx.ModelProto, options: FusionOptions):
    content = proto.SerializeToString()
    hypothesis.note(onnx.printer.to_text(proto))
    if TIMES > 1:  # should onnxruntime crash on it
        Path(tempfile.gettempdir(), "ortplugins-fuzz-chain.onnx").write_bytes(content)
    feeds = expected = None
    with contextlib.suppress(Exception):  # some it has no kernel for
        opened = session(content)
        feeds = feeds_of(opened)
        expected = run_all(opened, feeds)
    model = ir.from_proto(onnx.ModelProto.FromString(content))
    before = serialised(model)
    remarks = Remarks("dq_matmulnbits_fusion")
    with time_limit(SECONDS):
        fuse(model, options, PassContext(remarks))
    check_remarks(proto, list(remarks))
    unchanged = serialised(model) == before
    assert unchanged or any(remark.outcome in ("fired", "note") for remark in remarks)
    if expected is None or unchanged:  # some models give other numbers at each run
        return
    actual = run_all(session(ir.to_proto(model).SerializeToString()), feeds)
    wrong = wrong_numbers(expected, actual, halves=holds_halves(proto))
    assert not wrong, (wrong, [str(remark) for remark in remarks])


def check_remarks(proto: onnx.ModelProto, remarks: Sequence[Remark]) -> None:
    """Each use of a dequantised constant has its outcome reported."""
    for node in proto.graph.node:
        if node.op_type == "DequantizeLinear" and not node.domain:
            assert any(
                node.name in (remark.node, *remark.reason.replace("'", " ").split())
                for remark in remarks
            ), f"no remark on {node.name}"


# Damaged files.


def damaged(seed: int, folder: Path) -> Path:
    """Save a layout, with or without a data file, and change bytes; the seed decides which."""
    rng = random.Random(seed)
    path, data = folder / "model.onnx", folder / "model.data"
    external = rng.random() < 0.5
    onnx.save_model(
        ir.to_proto(rng.choice(layout_cases()).build()),
        path,
        save_as_external_data=external,
        location=data.name,
        size_threshold=0,
    )
    for _ in range(rng.choice((1, 1, 1, 2, 4, 8))):
        target = data if data.exists() and rng.random() < 0.3 else path
        target.write_bytes(changed(target.read_bytes(), rng))
    return path


def changed(content: bytes, rng: random.Random) -> bytes:
    made = bytearray(content)
    at = rng.randrange(len(made)) if made else 0
    span = rng.choice((1, 1, 2, 4, 8, 32))
    how = rng.randrange(8)
    if how <= 1 and made:
        made[at] ^= 1 << rng.randrange(8)
    elif how == 2 and made:
        made[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
    elif how == 3:
        made[at:at] = rng.randbytes(span)
    elif how == 4:
        del made[at : at + span]
    elif how == 5:
        del made[at:]
    elif how == 6:
        other = rng.randrange(len(made)) if made else 0
        made[at:at] = made[other : other + span]
    else:  # the longest number that protobuf writes
        made[at : at + 1] = b"\xff" * 9 + b"\x01"
    return bytes(made)


def optimise(path: Path, output: Path | None, slow: str) -> str:
    """Optimise a file; what is wrong, other than the file."""
    options = {"slow_kernels": slow, "accuracy_level": 0}
    options = {f"dq_matmulnbits_fusion.{key}": value for key, value in options.items()}
    try:
        with time_limit(SECONDS):
            ortplugins.optimize(path, output, options=options)
    except (ortplugins.ModelFileError, ortplugins.PassError) as error:
        if isinstance(error.__cause__, MemoryError) or "MemoryError" in str(error):
            return f"MemoryError: {error}"
        # A node, the function that cannot be inlined, or a cycle.
        named = ("failed at node", "function", "clone_node", "cycle")
        if isinstance(error, ortplugins.PassError) and not any(n in str(error) for n in named):
            return f"no node named: {error}"
    except (TooSlow, Exception) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def run_original(path: Path) -> tuple[Any, ...] | None:
    """Feeds and outputs, and whether anything rounds to float16; None if it does not run."""
    with contextlib.suppress(Exception), time_limit(SECONDS):
        opened = session(str(path))
        feeds = feeds_of(opened)
        halves = holds_halves(onnx.load(path, load_external_data=False))
        return feeds, run_all(opened, feeds), halves
    return None


def compare(output: Path, feeds: Any, expected: Any, halves: bool) -> str:
    try:
        actual = run_all(session(str(output)), feeds)
    except Exception as error:
        return f"onnxruntime ran the original, not the optimised: {error}"
    return wrong_numbers(expected, actual, halves=halves)


def look_at(seed: int, folder: Path, call: Callable[..., Any]) -> Iterator[str]:
    """Yield complaints about a damaged file."""
    path, output = damaged(seed, folder), folder / "optimised" / "out.onnx"
    output.parent.mkdir()
    slow = random.Random(seed).choice(("float", "fuse", "keep"))
    for target in (None, output):
        if complaint := call(optimise, path, target, slow):
            yield f"to {target and target.name}: {complaint}"
    # onnxruntime's own crashes on a damaged model are not ours.
    original = call(run_original, path) if output.exists() else None
    if original not in (None, CRASHED) and (complaint := call(compare, output, *original)):
        yield complaint


@pytest.mark.parametrize("part", range(2))
def test_damaged_files(part: int):
    count = FILES * TIMES // 2
    first = (FIRST_SEED * 2 + part) * count
    complaints = collections.defaultdict[str, list[int]](list)
    child = Child()
    for seed in range(first, first + count):
        with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
            for complaint in look_at(seed, Path(folder), child):
                complaints[complaint].append(seed)
    child.pool.shutdown()
    text = [f"{len(seeds)} x {what}, seeds {seeds[:5]}" for what, seeds in complaints.items()]
    assert not complaints, "\n".join(text)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(*look_at(int(sys.argv[1]), Path(folder), limited), sep="\n")
