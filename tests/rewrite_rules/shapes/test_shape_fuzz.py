# SPDX-License-Identifier: MIT
"""Random graphs over every operator whose shapes are proved, run by onnxruntime.

What is proved of each value holds in every run, and Shape and Size that were moved give the
same numbers. 300 graphs; ``ORTPLUGINS_FUZZ=20`` looks at 20,000, others for each
``ORTPLUGINS_FUZZ_SEED``. Run as a program (PYTHONPATH=tests) with a seed it repeats one graph.
"""

import collections
import contextlib
import faulthandler
import math
import multiprocessing
import os
import resource
import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import numpy as np
import onnx
import onnx.printer
import onnx_ir as ir
import pytest
from builders.random_graphs import RandomModel, operators, random_model
from builders.same_numbers import session

from ortplugins.optimization.shape_inference import infer_shapes
from rewrite_rules.remarks import PassContext, Remarks
from rewrite_rules.shape_size_reorder.simplify import simplify_shapes
from rewrite_rules.shapes import operator_shapes
from rewrite_rules.shapes.dimensions import Dim, Shape
from rewrite_rules.shapes.proved_shapes import ProvedShapes

TIMES = int(os.environ.get("ORTPLUGINS_FUZZ", "1"))
FIRST_SEED = int(os.environ.get("ORTPLUGINS_FUZZ_SEED", "0"))
GRAPHS = 300 if TIMES == 1 else 1000 * TIMES
AT_ONCE = 25
# Of processor time for one graph; a child that takes four times as long dies.
SECONDS = 5
ADDRESS_SPACE = 6 << 30
CRASHED = "the process crashed or hung"
# They die of sizes of 0, or in chains.
NOT_DRAWN = {
    "Einsum", "com.microsoft.GroupQueryAttention", "com.microsoft.EmbedLayerNormalization",
}  # fmt: skip


class Child:
    """Calls functions in a process with limits, in another one after a crash."""

    def __init__(self) -> None:
        self.pool = self._started()

    def __call__(self, function: Callable[..., Any], *arguments: object) -> Any:
        try:
            return self.pool.submit(limited, function, *arguments).result()
        except BrokenProcessPool:
            self.pool = self._started()
            return CRASHED

    def _started(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


def limited(function: Callable[..., Any], *arguments: object) -> Any:
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.dump_traceback_later(4 * SECONDS, exit=True)
    try:
        return function(*arguments)
    finally:
        faulthandler.cancel_dump_traceback_later()


def assert_proved(
    facts: ProvedShapes, values: Iterable[ir.Value], arrays: Mapping[str, np.ndarray]
) -> None:
    """Each unknown must stand for one number, and each proved shape be the array's."""
    sizes: dict[int, tuple[int, str]] = {}
    wholes: dict[Shape, tuple[int, ...]] = {}
    products: list[tuple[Dim, int, str]] = []
    for value in values:
        name = str(value.name)
        if not isinstance(arrays.get(name), np.ndarray):
            continue
        shape, real = facts.shape(value), arrays[name].shape
        assert wholes.setdefault(shape, real) == real, f"{name}: {shape} is {real}"
        if isinstance(shape, tuple):
            assert len(shape) == len(real), f"{name}: {shape} is {real}"
            products += [(dim, size, name) for dim, size in zip(shape, real, strict=True)]
        products.append((facts.count(value), math.prod(real), f"the count of {name}"))
        integers = facts.integers(value)
        if integers is not None:
            assert integers.shape == real, f"{name}: {integers} is {real}"
            numbers = zip(integers.numbers, arrays[name].reshape(-1), strict=True)
            products += [(dim, int(n), name) for dim, n in numbers if dim is not None]
    for dim, real, name in products:
        if dim[0] == 1 and len(dim[1]) == 1:
            first = sizes.setdefault(dim[1][0], (real, name))
            assert first[0] == real, f"{name}: {dim} is {real}, and {first[0]} in {first[1]}"
    for dim, real, name in products:
        if all(unknown in sizes for unknown in dim[1]):
            said = dim[0] * math.prod(sizes[unknown][0] for unknown in dim[1])
            assert said == real, f"{name}: {dim} is {real}, not {said}"


def test_every_operator_of_the_table_is_drawn():
    tables = {
        "": (
            *operator_shapes._KEEPS,
            *operator_shapes.BROADCASTS,
            *operator_shapes._STANDARD,
        ),
        "com.microsoft.": (*operator_shapes._MICROSOFT_KEEPS, *operator_shapes._CONTRIBUTED),
    }
    listed = {domain + name for domain, names in tables.items() for name in names}
    assert listed - NOT_DRAWN <= operators()


def run(
    model: onnx.ModelProto, feeds: Mapping[str, np.ndarray], *, reuse: bool = True
) -> dict[str, np.ndarray] | None:
    """The outputs by name; None where onnxruntime refuses the model or the sizes."""
    with contextlib.suppress(Exception):
        opened = session(model, settings={"enable_mem_reuse": str(int(reuse))})
        names = [value.name for value in opened.get_outputs()]
        return dict(zip(names, opened.run(names, dict(feeds)), strict=True))
    return None


def originals(seed: int) -> bool:
    """Whether onnxruntime survives the graph itself, however it is looked at."""
    drawn = random_model(seed)
    for proto in (drawn.model, with_outputs(drawn, seed)):
        for feeds in drawn.runs:
            run(proto, feeds)
    return True


def with_outputs(drawn: RandomModel, seed: int) -> onnx.ModelProto:
    """The model with some outputs only, so that not every value is kept."""
    rng = np.random.default_rng(seed)
    proto = onnx.ModelProto.FromString(drawn.model.SerializeToString())
    read = {name for node in proto.graph.node for name in node.input}
    kept = [name for name in drawn.values if name not in read or rng.random() < 0.2]
    del proto.graph.output[:]
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in kept)
    return proto


def look_at(seed: int) -> str:
    """Say what is wrong with a graph; empty if nothing is."""
    drawn = random_model(seed)
    model = ir.from_proto(drawn.model)
    values = [v for n in model.graph for v in n.outputs if v.name in drawn.values]
    facts = ProvedShapes(model)
    on_demand = ProvedShapes(model, on_demand=True)
    proto = with_outputs(drawn, seed)
    after = ir.from_proto(proto)
    infer_shapes(after)
    simplify_shapes(after, PassContext(Remarks("shape_size_reorder")))
    simplified = ir.to_proto(after)
    for feeds in drawn.runs:
        arrays = run(drawn.model, feeds)
        if arrays is not None:
            for found in (facts, on_demand):
                assert_proved(found, (*model.graph.inputs, *values), arrays | dict(feeds))
        expected = run(proto, feeds)
        if expected is None:
            continue
        actual = run(simplified, feeds)
        if actual is None and any(node.op_type == "PRelu" for node in simplified.graph.node):
            # Of a slope that is larger than x, which ONNX forbids, onnxruntime computes more
            # than it plans buffers for: some orders fail.
            actual = run(simplified, feeds, reuse=False)
        assert actual is not None, "onnxruntime refuses the simplified one only"
        if not same(actual, expected):
            again = [(run(simplified, feeds), run(proto, feeds)) for _ in range(3)]
            # Some kernels read memory that nothing has written.
            if all(same(a, actual) and same(b, expected) for a, b in again):
                return f"{difference(actual, expected)} differ"
    return ""


def difference(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> list[str]:
    return [name for name, array in a.items() if not is_equal(array, b[name])]


def is_equal(a: np.ndarray, b: np.ndarray) -> bool:
    # What no trip of a loop stacks has the sizes that shape inference found, else 0.
    nothing = a.size == b.size == 0 and a.ndim == b.ndim
    return a.dtype == b.dtype and (nothing or np.array_equal(a, b, equal_nan=True))


def same(a: Mapping[str, np.ndarray] | None, b: Mapping[str, np.ndarray] | None) -> bool:
    return a is not None and b is not None and not difference(a, b)


def complaint(seed: int) -> str:
    try:
        return look_at(seed)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip()[:300]}"


def look_at_all(first: int, last: int) -> dict[int, str]:
    return {seed: found for seed in range(first, last) if (found := complaint(seed))}


def look_apart(child: Child, seed: int) -> str:
    """Look at a graph in a process of its own; its crash is the original's, or ours."""
    found = child(complaint, seed)
    if found == CRASHED:
        return "" if child(originals, seed) == CRASHED else "only the simplified one crashes"
    return str(found)


@pytest.mark.parametrize("part", range(2))
def test_random_graphs(part: int):
    count = GRAPHS // 2
    start = (FIRST_SEED * 2 + part) * count
    complaints = collections.defaultdict[str, list[int]](list)
    child = Child()
    for first in range(start, start + count, AT_ONCE):
        last = min(first + AT_ONCE, start + count)
        found = child(look_at_all, first, last)
        if found == CRASHED:
            found = {seed: look_apart(child, seed) for seed in range(first, last)}
        for seed, text in found.items():
            if text:
                complaints[text].append(seed)
    child.pool.shutdown()
    text = [f"seeds {seeds[:5]}: {what}" for what, seeds in complaints.items()]
    assert not complaints, "\n".join(text)


if __name__ == "__main__":
    print(onnx.printer.to_text(random_model(int(sys.argv[1])).model))
    print(limited(complaint, int(sys.argv[1])))
