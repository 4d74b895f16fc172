# SPDX-License-Identifier: MIT
"""Scales, offsets and hard swishes fold into convolutions where nothing else changes."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import hypothesis
import numpy as np
import onnx
import pytest
from builders.same_numbers import session
from builders.text_cases import codes_of, text_cases
from builders.text_models import T, graphs, normal, text_model
from hypothesis import given, settings
from hypothesis import strategies as st

import ortplugins

CASES = text_cases(Path(__file__).with_name("cases.txt"))
IMAGE = "N, 8, H, W"
SIZES = {"N": 2, "H": 6, "W": 8, "T": 3, "C": 8}
# Constants by name. As wide as there are channels: sizes alone say nothing about axes.
CONSTANTS = {
    "w": normal(8, 8, 1, 1),
    "w3": normal(8, 8, 3, 3),
    "wide": normal(16, 8, 1, 1),
    "depth": normal(8, 1, 3, 3),
    "half": normal(8, 4, 3, 3),  # of two groups
    "up": normal(8, 4, 2, 2),  # of a ConvTranspose with two groups
    "line": normal(8, 8, 3),
    "cube": normal(8, 8, 1, 1, 1),
    "m": normal(8, 8, seed=3),
    "b": normal(8),
    "one": np.float32(1),
    "two": np.float32(2),
    "three": np.float32(3),
    "three1": np.array([3], np.float32),
    "zero": np.float32(0),
    "six": np.float32(6),
    "sixth": np.float32(1 / 6),
    "deep": np.full((1, 1, 1, 1, 1), 2, np.float32),
    "c": np.abs(normal(8, 1, 1)) + 0.5,
    "c4": np.abs(normal(1, 8, 1, 1)) + 0.5,
    "v": np.abs(normal(8, seed=1)) + 0.5,
    "rows": normal(8, 1, 1, 1),
    "column": normal(6, 1),
    "signs": np.array([1, -1, 0, 2, -2, 0.5, 0, 1], np.float32).reshape(8, 1, 1),
    "nan": np.array([1, 1, 1, np.nan, 1, 1, 1, 1], np.float32).reshape(8, 1, 1),
    "infinite": np.full((8, 1, 1), np.inf, np.float32),
    "huge": np.full((8, 1, 1), 3e38, np.float32),
    "tiny": np.full((8, 1, 1), 1e-38, np.float32),
    "magic": np.float32(12582912),
    "magic8": np.float32(49152),  # rounds to 8 bits behind the point
    "hundred": np.float32(100),
    "almost": np.float32(99.99),
    "balanced": normal(8, 1, 1, 1) * np.float32([1, -1] * 4).reshape(1, 8, 1, 1),
    "faint": normal(8, 8, 1, 1) * np.float32(1e-4),
    "double": np.ones((8, 1, 1)),
    "kept": np.array([0, 0, 0, -1]),
    "true": np.array(True),
    "axis3": np.int64(3),
    "half1": np.float32(0.5),
    "x8": normal(8, seed=9),
    "sizes": np.array([1, 8, 1, 1]),
    "lines": normal(32, 1, 7),
    "lines3": normal(32, 1, 3),
    "pairs": normal(32, 2, 7),
    "b32": normal(32),
    "b16": normal(16),
    "tall": normal(16, 1, 1),
    "wide3": normal(8, 16, 3, 3),
    "step": np.int64(5),
    "each": np.int64(1),
    "frame": np.int64(12),
    "frame64": np.int64(64),
    "window": np.hanning(20).astype(np.float32),
    "power": np.hanning(1024).astype(np.float32),
}
CONSTANTS |= {
    "column8": normal(8, 1, seed=2),
    "v8": normal(8, 1, 1, seed=5),
    "single": normal(1, 8, 1, 1),
    "bias": normal(8, 1),
    "neg": -np.abs(normal(8, 1, 1, seed=7)) - 0.5,
    "level": normal(8) + 20,
    "zeros": np.zeros(8, np.float32),
    "sums": np.abs(normal(8, 2048, 1, 1)),
    "c2048": np.full((1, 2048, 1, 1), 1.2345, np.float32),
    "level8": np.full(8, 260, np.float32),
    "level16": np.full(8, 130, np.float32),
    "shape": np.array([3, 8, 1, 1]),
    # Of attacks on proofs.
    "nan1": np.float32(np.nan),
    "zw": np.zeros((8, 8, 1, 1), np.float32),
    "nanw": np.where(normal(8, 8, 1, 1) > 2, np.nan, normal(8, 8, 1, 1)).astype(np.float32),
    "infw": np.where(normal(8, 8, 1, 1) > 2, np.inf, normal(8, 8, 1, 1)).astype(np.float32),
    "infb": np.float32([1, 2, np.inf, 4, 5, 6, 7, 8]),
    "w16": normal(8, 8, 1, 1).astype(np.float16),
    "c16": normal(8, 1, 1).astype(np.float16),
    "cn": normal(2, 8, 1, 1),
    "chw": normal(8, 6, 8),
    "up3": normal(8, 4, 3, 3),
    "one5": np.ones((1, 1, 1, 1, 1), np.float32),
    "empty": np.zeros((0, 8, 1, 1), np.float32),
    "nothing": np.zeros((8, 0, 1), np.float32),
    "vneg": -np.abs(normal(8)) - 0.5,
    "great": np.float32(1e30),
    # Of quantised graphs.
    "q": np.float32(0.05),
    "z0": np.uint8(128),
    "z8": np.int8(0),
    "codes": np.clip(normal(8, 8, 1, 1) * 30, -127, 127).astype(np.int8),
    "k8": np.clip(normal(8, 1, 3, 3) * 50, -128, 127).astype(np.int8),
    "k8z": np.int8(-3),
    "dense8": np.clip(normal(8, 8, 3, 3) * 50, -128, 127).astype(np.int8),
    "ks": np.float32(0.02),
}


def model_of(
    nodes: str,
    constants: Mapping[str, np.ndarray] = CONSTANTS,
    *,
    x: str = IMAGE,
    opset: int = 17,
    outputs: str = "y",
    dtype: int = T.FLOAT,
) -> onnx.ModelProto:
    """Return nodes that make y of x, with the constants that they read."""
    shape = [int(dim) if dim.isdigit() else dim for dim in x.split(", ")]
    inputs = {"x": (T.FLOAT, shape)}
    model = text_model(nodes, (), inputs, outputs.split(", "), opset=opset, output_type=dtype)
    every = [node for graph in graphs(model) for node in graph.node]
    read = {name for node in every for name in node.input}
    made = {name for node in every for name in node.output}
    for name in constants.keys() & read - made:
        model.graph.initializer.append(
            onnx.numpy_helper.from_array(np.asarray(constants[name]), name)
        )
    return model


def fused(model: onnx.ModelProto) -> tuple[onnx.ModelProto, ortplugins.Report]:
    result = ortplugins.optimize(model, passes=["conv_fusion"])
    onnx.checker.check_model(result.model)
    return result.model, result.report


def op_types(graph: onnx.GraphProto) -> Iterator[str]:
    """Yield what a graph and its subgraphs compute."""
    for node in graph.node:
        if node.op_type != "Constant":
            yield node.op_type
        for attribute in node.attribute:
            yield from op_types(attribute.g)


def feeds(model: onnx.ModelProto, near: str = "") -> Iterator[dict[str, np.ndarray]]:
    """Yield activations of both signs; or such as are close to the negative of a constant."""
    dims = model.graph.input[0].type.tensor_type.shape.dim
    shape = (SIZES[dim.dim_param] if dim.dim_param else dim.dim_value for dim in dims)
    noise = normal(*shape, seed=9)
    every = [noise, np.abs(noise), -np.abs(noise)]
    if near:
        every = [size * noise - CONSTANTS[near] for size in (1e-5, 1e-3, 0.1)]
    return ({"x": each.astype(np.float32)} for each in every)


def check_numbers(
    before: onnx.ModelProto, after: onnx.ModelProto, near: str = "", bound: float = 1e-5
) -> None:
    """Compare with the original without optimisation: as written, and as it runs."""
    exact, *ours = (session(before), session(after), session(after, optimised=True))
    for feed in feeds(before, near):
        expected = exact.run(None, feed)
        for opened in ours:
            for value, found in zip(expected, opened.run(None, feed), strict=True):
                assert found.shape == value.shape
                atol = bound * np.abs(value[np.isfinite(value)]).max(initial=0)
                np.testing.assert_allclose(found, value, rtol=0, atol=atol)


@pytest.mark.parametrize("name", CASES)
def test_it_folds_or_stays(name: str):
    """A case names the operators that are left, or has codes of refusals alone."""
    case = CASES[name]
    given = {**case.settings}
    near = given.pop("near", "")
    opset = int(given.pop("opset", "17"))
    dtype = T.DataType.Value(given.pop("dtype", "FLOAT"))
    model = model_of(case.nodes, opset=opset, dtype=dtype, **given)
    result, report = fused(model)
    left = " ".join(op_types(result.graph))
    if report.fired:
        check_numbers(model, result, near)
    else:
        assert left == " ".join(op_types(model.graph))
    found = [left if report.fired else "stays", *codes_of(report)]
    case.expect(" ".join(found))


def scaled_with_inputs(*names: str, opset: int = 17) -> onnx.ModelProto:
    """Return a scaled convolution of which some constants are inputs as well."""
    model = model_of("a = Conv(x, w, b) y = Mul(a, c)", opset=opset)
    for name in names:
        shape = CONSTANTS[name].shape
        model.graph.input.append(onnx.helper.make_tensor_value_info(name, T.FLOAT, shape))
    return model


def test_what_old_files_list_as_inputs_folds():
    """Before version 4 of the format all initializers are inputs, which no caller may feed."""
    model = scaled_with_inputs("w", "b", "c", opset=9)
    model.ir_version = 3
    result, _ = fused(model)
    assert [*op_types(result.graph)] == ["Conv"]
    assert [value.name for value in result.graph.input] == ["x"]
    check_numbers(model, result)


@pytest.mark.parametrize("name", ["w", "c", "b"])
def test_what_a_caller_may_feed_stays(name: str):
    result, report = fused(scaled_with_inputs(name))
    assert [*op_types(result.graph)] == ["Conv", "Mul"]
    (remark,) = report.refused
    assert f"{name!r} is a graph input" in remark.reason


DYNAMIC = "q8, s, z = DynamicQuantizeLinear(x)"
SCALED = "f = Cast<to = 1>(i) t = Mul(s, ks) y = Mul(f, t)"


@pytest.mark.parametrize(
    "convolution",
    ["i = ConvInteger(q8, dense8, z, k8z)", "i = ConvInteger<group = 8>(q8, k8, z)"],
)
def test_weights_of_integers_lose_their_sign(convolution: str):
    model = model_of(f"{DYNAMIC} {convolution} {SCALED}")
    result, _ = fused(model)
    (node,) = (node for node in result.graph.node if node.op_type == "ConvInteger")
    constants = {tensor.name: tensor.data_type for tensor in result.graph.initializer}
    assert [constants[node.input[index]] for index in (1, 3)] == [T.UINT8] * 2
    check_numbers(model, result, bound=0)


# Each makes {o} of {a}; {e} is an earlier value.
STEPS = (
    "{o} = Mul({a}, c)",
    "{o} = Mul(two, {a})",
    "{o} = Mul({a}, signs)",
    "{o} = Mul({a}, v)",
    "{o} = Div({a}, c)",
    "{o} = Add({a}, c4)",
    "{o} = Add(v8, {a})",
    "{o} = Sub({a}, three1)",
    "{o} = Sub(c, {a})",
    "{o} = BatchNormalization({a}, v, b, b, v)",
    "{o} = Identity({a})",
    "{o} = Relu({a})",
    "{o} = HardSwish({a})",
    "{o} = Add({a}, {e})",
    "{o} = Conv({a}, w, b)",
    "{o} = Conv<pads = [1, 1, 1, 1]>({a}, w3)",
    "{o} = Conv<group = 8, pads = [0, 1, 2, 1]>({a}, depth, b)",
    "{o} = ConvTranspose<group = 2, strides = [1, 2]>({a}, up)",
    """{o}t = Add({a}, three) {o}u = Clip({o}t, zero, six) {o}p = Mul({a}, {o}u)
    {o} = Div({o}p, six)""",
    """{o}t = Transpose<perm = [0, 2, 3, 1]>({a}) {o}m = Mul({o}t, v) {o}n = Add({o}m, b)
    {o} = Transpose<perm = [0, 3, 1, 2]>({o}n)""",
    """{o}g = GlobalAveragePool({a}) {o}s = Sigmoid({o}g) {o}p = Mul({a}, {o}s)
    {o} = Add({o}p, {a})""",
)


def chain(steps: list[str], shown: int) -> str:
    """Return a net of steps; one of its values is read once more at the end."""
    values, lines = ["x"], []
    for number, step in enumerate(steps):
        earlier = values[(shown + number) % len(values)]
        lines.append(step.format(a=values[-1], o=f"s{number}", e=earlier))
        values.append(f"s{number}")
    again = f"again = ReduceMean<keepdims = 0>({values[shown % len(values)]})"
    return f"{' '.join(lines)} {again} y = Add({values[-1]}, again)"


@settings(max_examples=40)
@given(st.lists(st.sampled_from(STEPS), min_size=1, max_size=9), st.integers(0, 9))
def test_chains_give_the_same_numbers(steps: list[str], shown: int):
    model = model_of(chain(steps, shown))
    x = {"x": normal(2, 8, 8, 8, seed=4)}
    try:
        (expected,) = session(model).run(None, x)
    except Exception:  # sizes that do not broadcast
        hypothesis.assume(False)
    result, _ = fused(model)
    for optimised in (False, True):
        (found,) = session(result, optimised=optimised).run(None, x)
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * np.abs(expected).max())
