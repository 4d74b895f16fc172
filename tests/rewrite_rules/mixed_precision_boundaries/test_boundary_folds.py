# SPDX-License-Identifier: MIT
"""Boundaries: folds of DQ -> Q, for every code bit for bit; and graphs that are damaged."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest
from builders.dequantized_models import run
from builders.qdq_models import chains, count, place, refused, serialized
from builders.text_cases import assert_laws_on_page, text_cases
from builders.text_models import model_of

import ortplugins
from rewrite_rules.mixed_precision_boundaries import fold_rules
from rewrite_rules.mixed_precision_boundaries.fold_rules import fold_pairs
from rewrite_rules.mixed_precision_boundaries.place import place_boundaries
from rewrite_rules.remarks import Outcome, PassContext, Remarks
from session_options import MixedPrecisionBoundaries

# Parameters of one name are the same; t differs from s by less than what moves a code.
PARAMETERS = """float s = {0.02}, float t = {0.0200001}, float far = {0.03},
    uint8 z = {100}, uint8 z_other = {101}, int8 zi = {-28},
    uint16 z16 = {25600}"""


# 7.8125e-5 is not 0.02 / 256 as float32.
EXACT = {"s16": np.float32(0.02) / np.float32(256), "zi16": np.int16(-7168)}


def fold(model: ir.Model) -> Remarks:
    remarks = Remarks("mixed_precision_boundaries")
    fold_pairs(model, PassContext(remarks))
    model.graph.sort()
    return remarks


def all_of(dtype: ir.DataType) -> npt.NDArray[np.generic]:
    if dtype in (ir.DataType.FLOAT, ir.DataType.FLOAT16):
        return np.linspace(-8, 8, 4001).astype(dtype.numpy())
    info = np.iinfo(dtype.numpy())
    return np.arange(info.min, info.max + 1).astype(dtype.numpy())


FOLDS = text_cases(Path(__file__).with_name("folds.txt"))
PAGE = Path(__file__).parents[3] / "docs" / "mixed-precision.md"


@pytest.mark.parametrize("name", FOLDS)
def test_folds(name: str):
    """A case has the operators that are left, of the domain of each, with what they read."""
    case = FOLDS[name]
    inputs = case.settings.get("inputs", "uint8[n] c")
    outputs = case.settings.get("outputs", "float[n] y")
    text = f"g ({inputs}) => ({outputs}) <{PARAMETERS}> {{ {case.nodes} }}"
    before, after = (model_of(text, EXACT) for _ in range(2))
    remarks = fold(after)
    assert [v.name for v in before.graph.outputs] == [v.name for v in after.graph.outputs]
    fed = {value.name: value.dtype for value in before.graph.inputs}
    branches = (True, False) if ir.DataType.BOOL in fed.values() else (True,)
    for flag in branches:
        feeds = {
            name: np.array(flag) if dtype is ir.DataType.BOOL else all_of(dtype)
            for name, dtype in fed.items()
        }
        for expected, found in zip(run(before, feeds), run(after, feeds), strict=True):
            assert found.dtype == expected.dtype
            assert found.tobytes() == expected.tobytes()
    assert bool(list(remarks)) == (serialized(before) != serialized(after))
    case.expect("\n".join([*written(after), *(f"fired: {remark.node}" for remark in remarks)]))


def test_the_page_has_a_case_of_each_rule():
    def left(expected: str) -> str:
        return "; ".join(x for x in expected.splitlines() if not x.startswith("fired"))

    assert_laws_on_page(PAGE, [fold_rules], FOLDS, left)


def written(model: ir.Model) -> Iterator[str]:
    """Yield each node: Q and DQ with all that they read, others by their operators."""
    for node in model.graph.all_nodes():
        kind = f"{node.domain}.{node.op_type}".removeprefix(".")
        read = ", ".join(value.name for value in node.inputs if value and value.name)
        yield f"{kind}({read})" if "Linear" in kind or kind == "Identity" else kind


@pytest.mark.parametrize(
    ("inputs", "scale", "words"),
    [
        ("uint8[2] c", "float[2] k = {0.1, 0.2}", "shape [2]"),
        ("uint8[2] c", "float k = {1e-38}", "positive and normal"),
        ("uint8[2] c, float k", "float unused = {0}", "'k' is a graph input"),
    ],
)
def test_grids_that_cannot_be_read_are_reported(inputs: str, scale: str, words: str):
    model = model_of(f"""g ({inputs}) => (float[2] y) <{scale}> {{
            d = DequantizeLinear<axis = 0>(c, k)  [second] q = QuantizeLinear<axis = 0>(d, k)
            [last] y = DequantizeLinear<axis = 0>(q, k) }}""")
    before = serialized(model)
    remarks = fold(model)
    assert serialized(model) == before
    reported = [remark for remark in remarks if remark.outcome is Outcome.REFUSED]
    assert reported
    assert all(words in remark.reason for remark in reported)


# Graphs that are damaged, oddly named, or break onnxruntime when rewritten.


CHAIN = """
    [Q] q = QuantizeLinear(x, s, z)
    [D] y = DequantizeLinear(q, s, z)
    [N] n = Neg(y)
    [QN] nq = QuantizeLinear(n, k, g)
    [DN] w = DequantizeLinear(nq, k, g)
"""
CONSTANTS = "float s = {0.02}, uint8 z = {121}, float k = {0.5}, uint8 g = {1}"
FED = np.float32([-1, 0.1, 0.5, 2])


def build(
    body: str = CHAIN,
    signature: str = "g (float[4] x) => (float[4] w)",
    constants: str = CONSTANTS,
    opset: int = 21,
) -> ir.Model:
    return model_of(f"{signature} <{constants}> {{ {body} }}", opset=opset)


DAMAGED = text_cases(Path(__file__).with_name("damaged.txt"))


@pytest.mark.parametrize("case", DAMAGED)
@pytest.mark.parametrize("in_float", [False, True])
@pytest.mark.parametrize("name", ["y", "N"])
def test_damaged_nodes_are_reported_and_left(case, in_float, name):
    old, new = DAMAGED[case].nodes.split("\n")
    assert (old in CHAIN) != (old in CONSTANTS)
    model = build(CHAIN.replace(old, new, 1), constants=CONSTANTS.replace(old, new))
    before = serialized(model)
    remarks = Remarks("mixed_precision_boundaries")
    context = PassContext(remarks)
    place_boundaries(model, context, promote=[name], in_float=in_float)
    fold_pairs(model, context)
    (remark,) = remarks
    assert (remark.node, remark.outcome) == (name, Outcome.REFUSED)
    assert DAMAGED[case].expected in remark.reason
    assert serialized(model) == before


def test_nodes_without_outputs_or_inputs_are_nobodys():
    model = build(CHAIN + "[Q2] = QuantizeLinear(x, s, z)\n [D2] v = DequantizeLinear()")
    remarks = Remarks("mixed_precision_boundaries")
    context = PassContext(remarks)
    place_boundaries(model, context, promote=["N"])
    fold_pairs(model, context)
    assert {str(remark) for remark in remarks} == {
        "n: uint8 -> uint16",
        "x: uint8 -> uint16 for 'N'",
    }


def test_all_nodes_of_a_repeated_name_are_promoted():
    model = build(CHAIN + "[N] a = Abs(y)", "g (float[4] x) => (float[4] w, float[4] a)")
    place(model, promote=["N"])
    assert chains(model) == {"x>u8>u16>N", "N>u16>w", "N>a"}
    # A name that Q, DQ and an operator share means the operator.
    model = build(CHAIN.replace("[Q]", "[N]").replace("[DN]", "[N]"))
    place(model, promote=["N"])
    assert chains(model) == {"x>u8>u16>N", "N>u16>w"}


@pytest.mark.parametrize(
    ("name", "words"),
    [("Q", "is a QuantizeLinear"), ("DN", "name its tensor"), ("s", "constant")],
)
def test_a_name_that_is_neither_tensor_nor_operator_is_reported(name, words):
    model = build()
    refused(model, words, promote=[name])


def test_what_bodies_dequantise_keeps_its_codes():
    model = build(
        """[Q] q = QuantizeLinear(x, s, z)  [D] d = DequantizeLinear(q, s, z)  [A] a = Abs(d)
        w = If (c) <
            then_branch = then () => (float[4] o) {
                [D] d1 = DequantizeLinear(q, s, z)  [T] o = Neg(d1) },
            else_branch = otherwise () => (float[4] o) { [E] o = Add(d, a) }>""",
        "g (float[4] x, bool c) => (float[4] w)",
    )
    feeds = [{"x": FED, "c": np.array(taken)} for taken in (True, False)]
    before = [run(model, each)[0] for each in feeds]
    place(model, promote=["x"])
    assert chains(model) >= {"x>u16>u8>T", "x>u16>A", "x>u16>E"}
    for each, old in zip(feeds, before, strict=True):
        assert run(model, each)[0] == pytest.approx(old, abs=0.02)


# onnxruntime 1.31 aborts, and pytest with it, where a body reads what is moved behind a
# DequantizeLinear; of int8 codes at opset 21 it loads no such model: the codes move instead.
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
    place(model, promote=["t"], in_float=True)
    # What a quantiser may have removed is only ruled out right behind equal parameters.
    clipped = move.startswith("Identity")
    assert count(model, "Clip") == clipped
    # Where nothing else stands before the body, a QuantizeLinear stays.
    assert count(model, "QuantizeLinear") == (into_a_body and not clipped)
    exact = run(model, feeds)[0]
    assert run(model, feeds, optimised=True)[0] == pytest.approx(exact, abs=1e-6)


def test_a_pair_beside_what_a_body_reads_stays():
    """onnxruntime's quantiser leaves it, and its optimisers abort without."""
    model = build(
        """[Q] q = QuantizeLinear(x, s, z)  [D] y = DequantizeLinear(q, s, z)
        [M] t = Reshape(y, shape)
        [QT] tq = QuantizeLinear(t, s, z)  [DT] td = DequantizeLinear(tq, s, z)
        w = If (c) <
            then_branch = then () => (float[2, 2] o) { o = Neg(t) },
            else_branch = otherwise () => (float[2, 2] o) { o = Abs(t) }>""",
        "g (float[4] x, bool c) => (float[2, 2] w)",
        "float s = {0.02}, uint8 z = {121}, int64[2] shape = {2, 2}",
    )
    asked = MixedPrecisionBoundaries(promote="x")
    model = ortplugins.optimize(model, passes=[asked]).model
    (w,) = run(model, {"x": FED, "c": np.array(False)}, optimised=True)
    assert w.ravel() == pytest.approx(np.abs(FED), abs=1e-4)


def test_a_pass_that_is_asked_for_nothing_says_so_and_keeps_nodes():
    model = ir.to_proto(build())
    result = ortplugins.optimize(model, passes=[MixedPrecisionBoundaries()])
    (remark,) = result.report.remarks
    assert remark.outcome is Outcome.NOTE and "promote" in remark.reason
    assert list(result.model.graph.node) == list(model.graph.node)
    assert list(result.model.graph.initializer) == list(model.graph.initializer)
