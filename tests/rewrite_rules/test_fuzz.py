# SPDX-License-Identifier: MIT
"""Random models around a dequantised constant: no crash, no hang, no wrong number.

DequantizeLinear, whatever renames its numbers, several readers; any shapes, axes, blocks and
types that ONNX allows. What onnxruntime runs, it must run after the fusion too, with the same
numbers. What is wrong in a model is test_bad_input's; where it stands, test_layout_matrix's.

``ORTPLUGINS_FUZZ=50`` looks at 50 times as many, other ones for each ``ORTPLUGINS_FUZZ_SEED``;
the model that is being looked at is then in ``ortplugins-fuzz.onnx`` in the temporary folder.
"""

import contextlib
import itertools
import os
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx.printer
import onnx_ir as ir
import pytest
from builders.dequantized_models import STORAGE, Quantized
from builders.random_graphs import Discarded, Drawer, F, model_of_arrays
from builders.same_numbers import (
    feeds_of,
    holds_halves,
    run_all,
    serialised,
    session,
    time_limit,
    wrong_numbers,
)

from rewrite_rules.dq_matmulnbits_fusion.fuse import FusionOptions, fuse
from rewrite_rules.remarks import PassContext, Remark, Remarks

TIMES = int(os.environ.get("ORTPLUGINS_FUZZ", "1"))
FIRST_SEED = int(os.environ.get("ORTPLUGINS_FUZZ_SEED", "0"))
PARTS, MODELS, SECONDS = 4, 100, 5
SIZES = (1, 2, 3, 4, 5, 6, 8, 15, 16, 17, 24, 32, 33, 48, 64, 65, 70, 96, 128, 300)
SINCE = {4: 21, 8: 11}  # opset of types of so many bits
RARELY = (True, *[False] * 4)

# d is what is renamed of the weight, y what is computed; both() an input and d that may fit.
RENAMES = """
Cast(d(), to={1|1|1|10|6})
Identity(d())
Transpose(d(){|, perm=shuffled(s)})
Transpose(d(), perm=shuffled(s))
Reshape(d(), n(reshaped(s)))
Reshape(d(), n([{-1, s[-1]|0, -1|2, -1|-1, 16}]))
{Squeeze|Unsqueeze}(d(), {n([{0|1|-1|-2}])|axes=[{0|1}]})
""".strip().splitlines()
READERS = """
MatMul(*both({1|2|2|3}))
MatMul(*both({1|2|2|3})[::-1])
{Gemm|ms_FusedMatMul}(*both(), transA={0|1}, transB={0|1}, alpha={1.0|0.5|-2.5|0.1})
{Gemm|ms_FusedMatMul}(*both()[::-1], transA={0|1}, transB={0|1}, alpha={1.0|0.5|-2.5|0.1})
Gemm(*both(), more(), transB={0|1}, beta={1.0|0.5|-3.0|0.0})
Add(*{(y(), more())|(y(), more())[::-1]})
Gather(d(), at({|3|1|0|2, 2}), axis={0|1|-1|-2})
""".strip().splitlines()


class Chains(Drawer):
    """Draws a model around one weight."""

    most_elements = 1 << 20

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        super().__init__(rng, rng.choice((11, 13, 13, 17, 19, *[21] * 5, 23, 23, 25)), {})
        self.numbers, self.results = np.random.default_rng(seed), list[str]()
        self.update(d=lambda: self._one_of(self.weights), y=lambda: self._one_of(self.results))
        self.update(both=self._both, more=self._more, at=self._places)
        self.update(reshaped=self._reshaped)
        self.update(shuffled=lambda shape: rng.sample(range(len(shape)), len(shape)))
        self.weights = list[str]()
        while not self.weights:
            with contextlib.suppress(Discarded):  # onnxruntime has no kernel
                self.weights.append(self._dequantized())
        for _ in range(rng.choice((1, 1, 2, 3))):
            rows = [rng.choice(RENAMES) for _ in range(rng.randrange(4))]
            for row in (*rows, *rng.choices(READERS, k=rng.choice((1, 2, 3)))):
                if (made := self.draw([row])) is not None:
                    (self.weights if row in RENAMES else self.results).append(made)

    def model(self) -> onnx.ModelProto:
        read = {name for node in self.nodes for name in node.input}
        ends = [name for node in self.nodes for name in node.output if name not in read]
        inputs = {name: array for name, array in self.arrays.items() if name in read}
        inputs = {name: inputs[name] for name in inputs if name.startswith("x")}
        # Sizes that are not declared are 3.
        is_open = {
            name: [size == 3 and self.rng.random() < 0.7 for size in array.shape]
            for name, array in inputs.items()
        }
        constants = {name: array for name, array in self.constants.items() if name in read}
        return model_of_arrays(self.nodes, inputs, constants, ends, self.opset, is_open)

    def _dequantized(self) -> str:
        pick, opset = self.rng.choice, self.opset
        rank = pick((2, 2, 2, 2, 3, 3, 1, 4))
        shape = [pick(SIZES[: 3 if i < rank - 2 else None]) for i in range(rank)]
        kinds = ("blocks", "blocks", "channel", "tensor", "tensor1")
        weight = Quantized(
            tuple(shape),
            storage=pick(
                [name for name, (bits, *_) in STORAGE.items() if opset >= SINCE[bits]]
            ),
            axis=None if opset == 11 else self.rng.randrange(-rank, rank),
            block=pick((16, 32, 64, 128, 256, 512, 8, 2, 1)),
            zero_points=pick(("none", "random", "default")),
            scaled=pick(kinds[0 if opset >= 21 else 2 if opset > 11 else 3 :]),
            scale_dtype=pick((np.float32, np.float32, np.float16) if opset >= 19 else (F,)),
            output_dtype=pick((0, 0, 0, 1, 10)) if opset >= 23 else 0,
        )
        names = "w", "w_scale", "w_zero_point"
        self.constants.update(zip(names, weight.arrays(self.numbers), strict=True))
        scale = (
            self["Cast"]("w_scale", to=pick((1, 10))) if opset >= 21 and pick(RARELY) else None
        )
        return self.add(onnx.parser.parse_node(f"[dq] d = {weight.node('w', scale)}"))

    def _one_of(self, names: Sequence[str]) -> str:
        if not names:
            raise Discarded("nothing is computed yet")
        self.first = names[-1] if self.rng.random() < 0.7 else self.rng.choice(names)
        return self.first

    def _input(self, shape: Sequence[int], kind: np.dtype) -> str:
        name = f"x{len(self.arrays)}"
        self.arrays[name] = np.asarray(self.numbers.standard_normal(shape)).astype(kind)
        return name

    def _both(self, rank: int = 2) -> list[str]:
        """Return an input and a weight: those that do not fit are drawn again."""
        pick, weight = self.rng.choice, self._one_of(self.weights)
        array = self.arrays[weight]
        k, m = pick(array.shape or (1,)), pick((3, 3, 1))
        lead = pick((array.shape[:-2], (3,), (1,))) if rank > 2 else ()
        shape = (k,) if rank < 2 else (*lead, *pick(((m, k), (k, m))))
        return [self._input(shape, array.dtype), weight]

    def _more(self) -> str:
        """Return a bias, or what looks like one."""
        array, pick = self.arrays[self.first], self.rng.choice
        n = pick(array.shape or (1,))
        shape = pick(((n,), (n,), (1, n), (1,), (), (1, 1, n), (3, n)))
        name = self._input(shape, array.dtype)
        return name if pick(RARELY) else self._constant(self.arrays.pop(name))

    def _places(self, *shape: int) -> str:
        """Return indices, which only a run knows as a rule."""
        kind, most = self.rng.choice((np.int64, np.int32)), min(self.arrays[self.first].shape)
        low = self.rng.choice((0, -most))
        name = self._constant(np.asarray(self.numbers.integers(low, most, shape)).astype(kind))
        if self.rng.choice(RARELY):
            return name
        zero = self._input((1,), np.dtype(kind))
        self.arrays[zero][:] = 0
        return str(self["Add"](name, zero))

    def _reshaped(self, before: Sequence[int]) -> list[int]:
        """Merge or split axes; sometimes with 0 or -1."""
        shape, pick = list(before), self.rng.choice
        at = self.rng.randrange(len(shape))
        if at and pick((True, False)):
            shape[at - 1 : at + 1] = [shape[at - 1] * shape[at]]
        else:
            size = pick([d for d in range(1, shape[at] + 1) if shape[at] % d == 0])
            shape[at : at + 1] = [size, shape[at] // size]
        if pick((True, False)):
            shape[self.rng.randrange(len(shape))] = -1
        pairs = itertools.zip_longest(shape, before[: len(shape)])
        return [0 if new == old and pick(RARELY) else new for new, old in pairs]


@pytest.mark.parametrize("part", range(PARTS))
def test_random_models(part: int):
    count = MODELS * TIMES
    first = (FIRST_SEED * PARTS + part) * count
    for seed in range(first, first + count):
        proto = Chains(seed).model()
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
    """The DequantizeLinear of the constant has its outcome reported."""
    assert any("dq" in str(remark) for remark in remarks), proto.graph.node[0]
