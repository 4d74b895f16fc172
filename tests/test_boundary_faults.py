# SPDX-License-Identifier: MIT
"""Boundaries in graphs that are damaged, oddly named, or break onnxruntime when rewritten."""

import warnings

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from builders.dequantized_models import run
from builders.qdq_models import chains, count, grid, place, quantized, refused, serialized

import ortplugins
from rewrite_rules.mixed_precision_boundaries.fold_rules import fold_pairs
from rewrite_rules.mixed_precision_boundaries.place import BoundaryOptions, place_boundaries
from rewrite_rules.mixed_precision_boundaries.tensor_overrides import (
    OverrideError,
    TensorOverride,
)
from rewrite_rules.remarks import Outcome, PassContext, Remarks
from session_options import MixedPrecisionBoundaries

U8, U16, I16 = ir.DataType.UINT8, ir.DataType.UINT16, ir.DataType.INT16
CHAIN = """
    [Q] q = QuantizeLinear(x, s, z)
    [D] y = DequantizeLinear(q, s, z)
    [N] n = Neg(y)
    [QN] nq = QuantizeLinear(n, k, g)
    [DN] w = DequantizeLinear(nq, k, g)
"""
CONSTANTS = "float s = {0.02}, uint8 z = {121}, float k = {0.5}, uint8 g = {1}"
X = np.float32([-1, 0.1, 0.5, 2])


def build(
    body: str = CHAIN,
    signature: str = "g (float[4] x) => (float[4] w)",
    constants: str = CONSTANTS,
    opset: int = 21,
) -> ir.Model:
    head = f'<ir_version: 10, opset_import: ["": {opset}, "com.microsoft": 1]>'
    text = f"{head} {signature} <{constants}> {{ {body} }}"
    return ir.from_proto(onnx.parser.parse_model(text))


def converted(dtype: ir.DataType, *nodes: str) -> tuple[TensorOverride, ...]:
    convert = TensorOverride(quant_type=dtype, recv_nodes=frozenset(nodes) or None)
    return (TensorOverride(quant_type=U8, convert=convert),)


Q, DQ = "QuantizeLinear(x, s, z)", "DequantizeLinear(q, s, z)"
SCALE = "float s = {0.02}"
DAMAGED = {
    "no input": (Q, "QuantizeLinear()", "has no input"),
    "empty input": (Q, "QuantizeLinear(, s, z)", "has no input"),
    "no scale": (Q, "QuantizeLinear(x)", "has no scale"),
    "empty scale": (Q, "QuantizeLinear(x, , z)", "has no scale"),
    "no such type": (
        Q,
        "QuantizeLinear<output_dtype = 77>(x, s)",
        "output_dtype of 'Q' is 77, which is not a type",
    ),
    "in blocks": (DQ, "DequantizeLinear<block_size = 2>(q, s, z)", "in blocks"),
    "an attribute of another kind": (
        DQ,
        'DequantizeLinear<block_size = "2">(q, s, z)',
        "is string, not int",
    ),
    "per axis": (SCALE, "float[4] s = {0.02, 0.02, 0.02, 0.02}", "shape [4]"),
    "zero": (SCALE, "float s = {0.0}", "scale is 0.0"),
    "negative": (SCALE, "float s = {-1.0}", "scale is -1.0"),
    "4 bits": ("uint8 z = {121}", "uint4 z = {12}", "uint4 are not activations"),
    "at run time": (f"[Q] q = {Q}", "r = Abs(s) [Q] q = QuantizeLinear(x, r, z)", "run time"),
    "other grid": (DQ, "DequantizeLinear(q, k, z)", "different grids"),
}


@pytest.mark.parametrize("case", DAMAGED)
@pytest.mark.parametrize("mode", ["int16", "float"])
@pytest.mark.parametrize("name", ["y", "N"])
def test_damaged_nodes_are_reported_and_left(case, mode, name):
    old, new, words = DAMAGED[case]
    assert (old in CHAIN) != (old in CONSTANTS)
    model = build(CHAIN.replace(old, new, 1), constants=CONSTANTS.replace(old, new))
    before = serialized(model)
    remarks = Remarks("mixed_precision_boundaries")
    options = BoundaryOptions(promote=frozenset({name}), mode=mode)
    place_boundaries(model, options, PassContext(remarks))
    fold_pairs(model, "cpu", PassContext(remarks))
    (remark,) = remarks
    assert (remark.node, remark.outcome) == (name, Outcome.REFUSED)
    assert words in remark.reason
    assert serialized(model) == before


def test_nodes_without_outputs_or_inputs_are_nobodys():
    model = build(CHAIN + "[Q2] = QuantizeLinear(x, s, z)\n [D2] v = DequantizeLinear()")
    remarks = Remarks("mixed_precision_boundaries")
    options = BoundaryOptions(promote=frozenset({"N"}))
    place_boundaries(model, options, PassContext(remarks))
    fold_pairs(model, "qnn", PassContext(remarks))
    assert {str(remark) for remark in remarks} == {
        "n: uint8 -> uint16",
        "x: uint8 -> uint16 for 'N'",
    }


def test_all_nodes_of_a_repeated_name_are_promoted():
    model = build(CHAIN + "[N] a = Abs(y)", "g (float[4] x) => (float[4] w, float[4] a)")
    place(model, promote=frozenset({"N"}))
    assert chains(model) == {"x>u8>u16>N", "N>u16>w", "N>a"}
    # A name that Q, DQ and an operator share means the operator.
    model = build(CHAIN.replace("[Q]", "[N]").replace("[DN]", "[N]"))
    place(model, promote=frozenset({"N"}))
    assert chains(model) == {"x>u8>u16>N", "N>u16>w"}


@pytest.mark.parametrize(
    ("name", "words"),
    [("Q", "is a QuantizeLinear"), ("DN", "name its tensor"), ("s", "constant")],
)
def test_a_name_that_is_neither_tensor_nor_operator_is_reported(name, words):
    model = build()
    refused(model, words, promote=frozenset({name}))


@pytest.mark.parametrize("nodes", [(), ("T",), ("E",), ("T", "E")])
def test_bodies_beside_each_other_keep_their_equal_names(nodes):
    model = build(
        """[Q] q = QuantizeLinear(x, s, z)
        w = If (c) <
            then_branch = then () => (float[4] o) {
                [D] d = DequantizeLinear(q, s, z)
                [T] o = Neg(d)
            },
            else_branch = otherwise () => (float[4] o) {
                [D] d = DequantizeLinear(q, s, z)
                [E] o = Abs(d)
            }>""",
        "g (float[4] x, bool c) => (float[4] w)",
    )
    feeds = [{"x": X, "c": np.array(taken)} for taken in (True, False)]
    before = [run(model, each)[0] for each in feeds]
    place(model, overrides={"x": converted(U16, *nodes)})  # checks that names are single
    reached = nodes or ("T", "E")
    assert chains(model) >= {f"x>u8>{'u16>' * (n in reached)}{n}" for n in "TE"}
    for each, old in zip(feeds, before, strict=True):
        assert run(model, each)[0].tobytes() == old.tobytes()


# onnxruntime 1.31 aborts, and pytest with it, where a body reads what is moved behind a
# DequantizeLinear; of int8 codes at opset 21 it loads no such model, body or not.
@pytest.mark.parametrize("into_a_body", [False, True])
@pytest.mark.parametrize("opset", [13, 21])
@pytest.mark.parametrize("kind", ["uint8", "int8"])
@pytest.mark.parametrize("move", ["Transpose<perm = [1, 0]>(y)", "Identity(u)"])
def test_onnxruntime_takes_data_movement_to_floats(kind, opset, into_a_body, move):
    reader = "[R] w = Neg(td)"
    if into_a_body:
        reader = """w = If (c) <
            then_branch = then () => (float[2, 2] o) { [T] o = Neg(td) },
            else_branch = otherwise () => (float[2, 2] o) { [E] o = Abs(td) }>"""
    model = build(
        f"""[D] y = DequantizeLinear(q, s, z)
        u = Transpose<perm = [1, 0]>(y)
        [M] t = {move}
        [QT] tq = QuantizeLinear(t, s, z)
        [DT] td = DequantizeLinear(tq, s, z)
        {reader}""",
        f"g ({kind}[2, 2] q, bool c) => (float[2, 2] w)",
        f"float s = {{0.02}}, {kind} z = {{7}}",
        opset,
    )
    feeds = {"q": np.arange(4, dtype=kind).reshape(2, 2), "c": np.array(True)}
    place(model, promote=frozenset({"t"}), mode="float")
    assert count(model, "QuantizeLinear") == 0
    # What a quantiser may have removed is only ruled out right behind equal parameters.
    clips = move.startswith("Identity") + (into_a_body or (kind, opset) == ("int8", 21))
    assert count(model, "Clip") == clips
    exact = run(model, feeds)[0]
    assert run(model, feeds, optimised=True)[0] == pytest.approx(exact, abs=1e-6)


def test_remarks_tell_only_what_happens():
    # What the promoted node writes is read outside of the region: its pair stays.
    model = build(
        CHAIN.replace("[DN] w", "[DN] v") + "[E] w = Exp(v)", "g (float[4] x) => (float[4] w)"
    )
    before = serialized(model)
    (remark,) = place(model, promote=frozenset({"N"}), mode="float")
    assert (remark.node, remark.outcome) == ("N", Outcome.NOTE)
    assert serialized(model) == before


def test_the_range_of_a_grid():
    assert grid(0.1, 0).range == (0, pytest.approx(25.5))
    assert grid(0.1, 255).range == (pytest.approx(-25.5), 0)
    # Calibrated from -1 to 1, and moved by the rounding of 127.5.
    assert grid(2 / 255, 128).range == (pytest.approx(-128.5 / 127.5), pytest.approx(1))
    assert grid(0.1, 0, real=np.float16).range[1].dtype == np.float16
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert grid(3e38, 0).range == (0, np.inf)


@pytest.mark.parametrize("target", ["cpu", "qnn"])
@pytest.mark.parametrize("opset", [13, 21])
@pytest.mark.parametrize("mode", ["int16", "float"])
@pytest.mark.parametrize("names", [("N",), ("C7",), ("x",), ("N", "C0", "n")])
def test_fifty_consumers_and_two_domains(target, opset, mode, names):
    others = "\n".join(
        f"[C{i}] o{i} = {op}({'y' if i % 2 else 'y2'})"
        for i, op in enumerate(["Abs", "Tanh"] * 25)
    )
    outputs = ", ".join(f"float[4] o{i}" for i in range(50))
    model = build(
        f"{CHAIN} [D2] y2 = com.microsoft.DequantizeLinear(q, s, z)\n {others}",
        f"g (float[4] x) => (float[4] w, {outputs})",
        "float[1] s = {0.02}, uint8[1] z = {121}, float k = {0.5}, uint8 g = {1}",
        opset,
    )
    before = run(model, {"x": X})
    remarks = place(model, promote=frozenset(names), mode=mode)
    fold_pairs(model, target, PassContext(remarks))
    if mode == "int16":
        assert any(remark.outcome is Outcome.FIRED for remark in remarks)
    for old, new in zip(before, run(model, {"x": X}), strict=True):
        assert np.abs(old - new).max() <= 0.5  # half a step of n


def test_the_pass_takes_merge():
    text = "g (float[3] x) => (float[3] y) { [A] a = Add(x, x)\n [B] y = Sigmoid(a) }"
    model = ir.to_proto(quantized(text))
    first = ortplugins.optimize(
        model, passes=[MixedPrecisionBoundaries(promote="A", target="qnn")]
    ).model
    left = {}
    for merge in (True, False):
        wanted = MixedPrecisionBoundaries(promote="B", target="qnn", merge=merge)
        result = ortplugins.optimize(first, passes=[wanted])
        left[merge] = "A>u16>B" in chains(ir.from_proto(result.model))
    assert left == {True: True, False: False}


def test_a_pass_that_is_asked_for_nothing_says_so_and_keeps_nodes():
    model = ir.to_proto(build())
    result = ortplugins.optimize(model, passes=[MixedPrecisionBoundaries()])
    (remark,) = result.report.remarks
    assert remark.outcome is Outcome.NOTE and "promote" in remark.reason
    assert list(result.model.graph.node) == list(model.graph.node)
    assert list(result.model.graph.initializer) == list(model.graph.initializer)


def test_what_is_neither_8_nor_16_bits_changes_nothing():
    for options in (
        {"overrides": {"x": (TensorOverride(quant_type=ir.DataType.UINT4),)}},
        {"overrides": {"x": (TensorOverride(quant_type=I16),)}, "promote": frozenset("x")},
        {"overrides": {"x": (TensorOverride(axis=0),)}},
        {"overrides": {"q": (TensorOverride(quant_type=U16),), "x": converted(U16)}},
    ):
        model = build()
        before = serialized(model)
        with pytest.raises(OverrideError, match="'x'"):
            place(model, **options)
        assert serialized(model) == before
