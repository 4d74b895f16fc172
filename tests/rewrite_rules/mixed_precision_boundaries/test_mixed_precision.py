# SPDX-License-Identifier: MIT
"""Regions of other types: which follow, and conversions at their borders, to every code."""

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from builders.dequantized_models import run
from builders.qdq_models import chains, grid, parse, place, quantized, serialized
from builders.text_cases import assert_laws_on_page, text_cases
from hypothesis import given, settings
from hypothesis import strategies as st

from rewrite_rules.graph.nodes import is_quantize_linear
from rewrite_rules.mixed_precision_boundaries import boundary_rules, float_region_constants
from rewrite_rules.mixed_precision_boundaries.float_region_constants import unpack_constants
from rewrite_rules.mixed_precision_boundaries.place import place_boundaries
from rewrite_rules.mixed_precision_boundaries.quantization_grid import QuantizationGrid
from rewrite_rules.mixed_precision_boundaries.quantized_graph import QuantizedGraph
from rewrite_rules.mixed_precision_boundaries.tensor_overrides import (
    OverrideError,
    read_overrides,
)
from rewrite_rules.remarks import Outcome, PassContext, Remarks

FIRED = Outcome.FIRED
U8, I8, U16, I16 = (ir.DataType.UINT8, ir.DataType.INT8, ir.DataType.UINT16, ir.DataType.INT16)
REGIONS = text_cases(Path(__file__).with_name("regions.txt"))
PAGE = Path(__file__).parents[3] / "docs" / "mixed-precision.md"
CHAIN = REGIONS["all tensors are promoted"].nodes


def read_grid(text: str) -> QuantizationGrid:
    scale, zero_point, *dtype = text.split()
    return grid(float(scale), int(zero_point), ir.DataType[dtype[0]] if dtype else U8)


@pytest.mark.parametrize("name", REGIONS)
def test_regions(name: str):
    """A case has the paths between operators and the grids; or codes of refusals, or an error.

    ``grid`` is that of all activations, ``grid_NAME`` of one; with ``quantized: no`` the text
    has pairs of its own.
    """
    case, options = REGIONS[name], {**REGIONS[name].settings}
    opset = int(options.pop("opset", 21))
    grids = {key: read_grid(options.pop(key)) for key in [*options] if key.startswith("grid")}
    default = grids.pop("grid", None)
    if options.pop("quantized", "yes") == "no":
        model = parse(case.nodes)
    else:
        named = {key.removeprefix("grid_"): each for key, each in grids.items()}
        model = quantized(case.nodes, named, opset, default)
    if (law := options.pop("law", None)) is not None:
        shown = {"constants": law in ("Constant", "UnpackedConstant")}
        assert " ".join(sorted(chains(model, **shown))) == options.pop("before")
        if law == "UnpackedConstant":
            unpack_constants(model, 1, PassContext(Remarks("mixed_precision_boundaries")))
        else:
            place(model, promote=options.pop("promote").split(", "), **options)
        case.expect(" ".join(sorted(chains(model, **shown))))
        return
    before = serialized(model)
    options["promote"] = [*filter(None, options.pop("promote", "").split(", "))]
    options["overrides"] = read_overrides(options.pop("overrides", "{}"))
    try:
        remarks = place(model, **options)
    except OverrideError as error:
        assert serialized(model) == before
        case.expect(f"error: {error}")
        return
    codes = sorted({each.code for each in remarks if each.outcome is not FIRED})
    if serialized(model) == before:
        case.expect(" ".join(["stays", *filter(None, codes)]))
        return
    found = {str(tensor.grid) for tensor in QuantizedGraph(model).tensors}
    paths = " ".join([*sorted(chains(model)), *codes])
    case.expect("\n".join(filter(None, (paths, ", ".join(sorted(found))))))
    feeds = {v.name: np.ones(v.shape.numpy(), v.dtype.numpy()) for v in model.graph.inputs}
    run(model, feeds)
    run(model, feeds, optimised=True)


def test_the_page_has_a_case_of_each_rule():
    assert_laws_on_page(PAGE, [boundary_rules, float_region_constants], REGIONS, str)


@pytest.mark.parametrize("domain", ["", "com.microsoft"])
def test_domains_of_16_bits_below_opset_21(domain: str):
    model = quantized(CHAIN, opset=17)
    pairs = ("QuantizeLinear", "DequantizeLinear")
    for node in model.graph:
        node.domain = domain if node.op_type in pairs else ""
    place(model, promote=["B"])
    assert chains(model) == {"x>u8>A", "A>u8>u16>B", "B>u16>u8>C", "C>u8>y"}
    domains = {
        (node.domain, (node.outputs if is_quantize_linear(node) else node.inputs)[0].dtype)
        for node in model.graph
        if node.op_type in pairs
    }
    assert domains == {(domain, U8), ("com.microsoft", U16)}
    assert model.opset_imports == {"": 17, "com.microsoft": 1}
    # What is converted has new parameters; in 8 bits it keeps those that it has.
    made = {name for name in model.graph.initializers if "convert" in name}
    assert made == {
        f"{tensor}_{k}_convert" for tensor in "ab" for k in ("scale", "zero_point")
    }
    run(model, {"x": np.ones((2, 3), np.float32)})


@pytest.mark.parametrize("kind", ["u", "i"])
def test_pairs_without_zero_point_get_one_or_the_type_of_an_attribute(kind: str):
    model = quantized(CHAIN, default=grid(0.01, 0), zero_points=False)
    for node in filter(is_quantize_linear, model.graph if kind == "i" else ()):
        node.attributes["output_dtype"] = ir.AttrInt64("output_dtype", int(I8))
        node.outputs[0].dtype = I8
    place(model, promote=["b"])
    expected = {"x>u8>A", "A>u8>u16>B", "B>u16>C", "C>u16>y"}
    assert chains(model) == {chain.replace("u", kind) for chain in expected}
    wide = [n for n in model.graph if is_quantize_linear(n) and n.outputs[0].dtype == U16]
    assert all(node.inputs[2].const_value.numpy() == 0 for node in wide)
    run(model, {"x": np.linspace(0, 2, 6, dtype=np.float32).reshape(2, 3)})


def test_elementwise_constants_follow_exactly():
    model = quantized(
        """g (float[4] x) => (float[4] y, float[4] w)
        <int8[4] k = {-128, -1, 0, 127}, float t = {0.01}, int8 o = {3}> {
            [K] kf = DequantizeLinear(k, t, o)
            [A] y = Add(x, kf)
            [B] w = Mul(x, kf)
        }"""
    )
    place(model, promote=["A"])
    added, multiplied = map(model.graph.node, "AB")
    fine, coarse = added.inputs[1].producer(), multiplied.inputs[1].producer()
    assert coarse.name == "K" and coarse.inputs[0].dtype == I8
    codes, scale, zero_point = (value.const_value.numpy() for value in fine.inputs)
    assert codes.dtype == np.uint16 and codes.tolist() == [0, 127 * 256, 128 * 256, 255 * 256]
    assert scale == np.float32(0.01) / 256 and zero_point == (3 + 128) * 256
    place(model, promote=["B"])
    assert "k" not in model.graph.initializers  # nobody reads it any more
    assert all(node.name != "K" for node in model.graph)
    run(model, {"x": np.ones(4, np.float32)})


CONV = """g (float[1,1,4,4] x) => (float[1,2,4,4] y)
<int8[2,1,1,1] w = {{5, -7}}, float[2] sw = {{0.5, 0.25}}, int8[2] zw = {{0, 0}},
 int32[2] b = {{{bias}, -2000}}, float[2] sb = {{0.01, 0.005}}, int32[2] zb = {{0, 0}}> {{
    [W] wf = DequantizeLinear <axis = 0> (w, sw, zw)
    [BIAS] bf = DequantizeLinear <axis = 0> (b, sb, zb)
    [A] y = Conv(x, wf, bf)
}}"""


def test_a_bias_takes_the_scale_of_its_input():
    model = quantized(CONV.format(bias=1000))
    place(model, promote=["A"])
    convolution = model.graph.node("A")
    bias, weight = convolution.inputs[2].producer(), convolution.inputs[1].producer()
    assert weight.name == "W" and weight.inputs[0].dtype == I8
    codes, scale, _ = (value.const_value.numpy() for value in bias.inputs)
    assert codes.tolist() == [256_000, -512_000] and codes.dtype == np.int32
    assert scale.tolist() == (np.float32([0.01, 0.005]) / 256).tolist()
    assert bias.attributes.get_int("axis") == 0
    run(model, {"x": np.ones((1, 1, 4, 4), np.float32)})


def test_a_bias_that_would_overflow_stays():
    model = quantized(CONV.format(bias=2**31 // 256))
    remarks = place(model, promote=["A"])
    assert model.graph.node("A").inputs[2].producer().name == "BIAS"
    (remark,) = [remark for remark in remarks if remark.outcome is Outcome.REFUSED]
    assert "2147483648, beyond int32" in remark.reason


# Quantisers remove the Relu or Clip between two tensors; the range stands for it. Operators,
# the zero points of steps of 0.02 that a and y have, what is clipped, and y of -3, 0.5 and 3.
CLIPPED = {
    "from 0, exactly": ("a = Add(x, x)  y = Identity(a)", (0, 0), "a", (0, 1, 5.1)),
    "around 0": ("a = Add(x, x)  y = Identity(a)", (100, 100), "a", (-2.01, 1, 3.11)),
    "what Tanh writes": ("a = Tanh(x)  y = Neg(a)", (128, 128), "y", (0.995, -0.462, -0.995)),
    "less than Tanh": ("a = Tanh(x)  y = Neg(a)", (220, 128), "ay", (0.995, -0.462, -0.71)),
    "less than Relu": ("a = Relu(x)  y = Neg(a)", (100, 255), "ay", (0, -0.5, -3)),
    "another Tanh": ("a = com.microsoft.Tanh(x)  y = Neg(a)", (128, 128), "ay", None),
    "more than Pad reads": (
        "u = Neg(x)  a = Pad(u, around, nine)  y = Slice(a, zero, three)",
        (121, 121),
        "au",
        (2.69, 2.69, -0.5),
    ),
}


@pytest.mark.parametrize(("text", "points", "clipped", "ends"), CLIPPED.values(), ids=CLIPPED)
def test_mode_float_keeps_what_a_range_clips(text, points, clipped, ends):
    constants = """float[n] a, int64[2] around = {1, 1}, float nine = {9}, int64[1] zero = {0},
        int64[1] three = {3}"""
    model = quantized(
        f"g (float[3] x) => (float[3] y) <{constants}> {{ {text} }}",
        {"x": grid(0.1, 128), "a": grid(0.02, points[0]), "y": grid(0.02, points[1])},
    )
    context = PassContext(Remarks("test"))
    place_boundaries(model, context, promote=["a", "y"], in_float=True)
    clips = [node for node in model.graph if node.op_type == "Clip"]
    assert {node.name.removesuffix("_Clip") for node in clips} == set(clipped)
    if ends is not None:
        (y,) = run(model, {"x": np.float32([-3, 0.5, 3])})
        assert y == pytest.approx(ends, abs=1e-3)


UNARY = ("Sigmoid", "Tanh", "Neg", "Relu")
BINARY = ("Add", "Sub", "Mul", "Max")
STEP = 8 / 255
# Half a step of 8 bits, and what two roundings to 16 bits add.
ROUNDING = STEP * (0.5 + 2 / 256)


@st.composite
def random_graphs(draw: st.DrawFn) -> list[tuple[str, str, list[str]]]:
    """Operators, each with its output and inputs, as far as they may be drawn."""
    tensors, steps = ["x"], []
    for index in range(draw(st.integers(2, 9))):
        op = draw(st.sampled_from([*UNARY, *BINARY, "Transpose", "Split"]))
        inputs = [draw(st.sampled_from(tensors)) for _ in range(2 if op in BINARY else 1)]
        steps.append((op, f"t{index}", inputs))
        tensors.append(f"t{index}")
    return steps


def _text(steps: list[tuple[str, str, list[str]]], outputs: list[str]) -> str:
    lines = []
    for op, out, inputs in steps:
        read = ", ".join(inputs)
        if op == "Split":
            lines.append(f"[n{out}] {out}a, {out}b = Split <num_outputs = 2> ({read})")
            lines.append(f"[m{out}] {out} = Concat <axis = 0> ({out}b, {out}a)")
        else:
            lines.append(f"[n{out}] {out} = {op}({read})")
    declared = ", ".join(f"float[4,4] {name}" for name in outputs)
    return f"g (float[4,4] x) => ({declared}) {{ {chr(10).join(lines)} }}"


def _bounds(
    steps: list[tuple[str, str, list[str]]], exact: dict[str, np.ndarray]
) -> dict[str, float]:
    """How far a tensor of the 8-bit model is from the exact one, at most."""
    found = {"x": ROUNDING}
    for op, out, inputs in steps:
        errors = [found[name] for name in inputs]
        if op == "Mul":
            first, second = (np.abs(exact[name]).max() for name in inputs)
            error = first * errors[1] + second * errors[0] + errors[0] * errors[1]
        else:
            error = sum(errors) if op in ("Add", "Sub") else max(errors)
        if op == "Split":
            error += ROUNDING  # of the parts
        found[out] = error + ROUNDING
        # Beyond the range there is no bound.
        found[out] += max(0.0, float(np.abs(exact[out]).max()) + found[out] - 127 * STEP)
    return found


@settings(max_examples=40)
@given(random_graphs(), st.data())
def test_random_regions(steps, data):
    tensors = ["x", *(out for _, out, _ in steps)]
    outputs = data.draw(st.lists(st.sampled_from(tensors[1:]), unique=True, max_size=2))
    outputs = list(dict.fromkeys([tensors[-1], *outputs]))
    text = _text(steps, outputs)
    default = data.draw(st.sampled_from([grid(STEP, 128), grid(STEP, 0, I8)]))
    model = quantized(text, default=default)
    labels = [node.name for node in model.graph if node.name[:1] in "nm"]
    promote = data.draw(st.sets(st.sampled_from(tensors + labels), min_size=1))
    in_float = data.draw(st.booleans())
    remarks = place(model, promote=promote, in_float=in_float)
    if not in_float:
        assert all(remark.outcome is Outcome.FIRED for remark in remarks)
        _check_types(model)
    feeds = {"x": np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4)}
    every = run(parse(_text(steps, tensors[1:])), feeds)
    exact = dict(zip(tensors[1:], every, strict=True)) | feeds
    bounds = _bounds(steps, exact)
    for name, value in zip(outputs, run(model, feeds), strict=True):
        assert value.shape == (4, 4) and value.dtype == np.float32
        assert np.abs(value - exact[name]).max() <= bounds[name] + 1e-5


def _check_types(model: ir.Model) -> None:
    """Every operator reads and writes activations of one type."""
    graph = QuantizedGraph(model)
    for node in model.graph:
        if is_quantize_linear(node) or node.op_type == "DequantizeLinear":
            continue
        types = {t.grid.dtype for t in [*graph.read_by(node), *graph.written_by(node)]}
        assert len(types) == 1, (node.name, types)
