# SPDX-License-Identifier: MIT
"""Boundaries: folds of DQ -> Q, for every code bit for bit; and graphs that are damaged."""

import collections
import warnings

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest
from builders.dequantized_models import run
from builders.qdq_models import chains, count, grid, of, place, refused, serialized, to
from builders.text_models import model_of

import ortplugins
from rewrite_rules.mixed_precision_boundaries.fold_rules import fold_pairs
from rewrite_rules.mixed_precision_boundaries.place import BoundaryOptions, place_boundaries
from rewrite_rules.remarks import Outcome, PassContext, Remarks
from session_options import MixedPrecisionBoundaries

U8, U16, I16 = ir.DataType.UINT8, ir.DataType.UINT16, ir.DataType.INT16
# Parameters of one name are the same; t differs from s by less than what moves a code.
PARAMETERS = """float s = {0.02}, float t = {0.0200001}, float far = {0.03},
    uint8 z = {100}, uint8 z_other = {101}, int8 zi = {-28},
    uint16 z16 = {25600}, float s257 = {7.782101e-5}"""


def graph(
    text: str,
    inputs: str = "uint8[n] c",
    outputs: str = "float[n] y",
    opset: int = 21,
) -> ir.Model:
    # 7.8125e-5 is not 0.02 / 256 as float32.
    exact = {
        "s16": np.float32(0.02) / np.float32(256),
        "zi16": np.int16(-7168),
        "half": np.float16(0.03),
    }
    text = f"g ({inputs}) => ({outputs}) <{PARAMETERS}> {{ {text} }}"
    return model_of(text, exact, opset=opset)


def fold(model: ir.Model, target: str = "cpu") -> Remarks:
    remarks = Remarks("mixed_precision_boundaries")
    fold_pairs(model, target, PassContext(remarks))
    model.graph.sort()
    return remarks


def operators(model: ir.Model) -> collections.Counter[str]:
    short = {"QuantizeLinear": "Q", "DequantizeLinear": "DQ"}
    return collections.Counter(
        short.get(node.op_type, node.op_type) for node in model.graph.all_nodes()
    )


def check(
    text: str,
    left: str,
    target: str = "cpu",
    *,
    inputs: str = "uint8[n] c",
    outputs: str = "float[n] y",
    opset: int = 21,
) -> tuple[ir.Model, Remarks]:
    """Fold; compare the operators that are left, and the outputs for every code."""
    before, after = (graph(text, inputs, outputs, opset) for _ in range(2))
    remarks = fold(after, target)
    assert operators(after) == collections.Counter(left.split())
    assert [value.name for value in after.graph.outputs] == [
        value.name for value in before.graph.outputs
    ]
    feeds = {}
    for value in before.graph.inputs:
        assert value.dtype is not None
        feeds[value.name] = all_of(value.dtype)
    for expected, found in zip(run(before, feeds), run(after, feeds), strict=True):
        assert found.dtype == expected.dtype
        assert found.tobytes() == expected.tobytes()
    fired = [remark for remark in remarks if remark.outcome is Outcome.FIRED]
    assert bool(fired) == (serialized(before) != serialized(after))
    return after, remarks


def all_of(dtype: ir.DataType) -> npt.NDArray[np.generic]:
    if dtype is ir.DataType.BOOL:
        return np.array(True)
    if dtype in (ir.DataType.FLOAT, ir.DataType.FLOAT16):
        return np.linspace(-8, 8, 4001).astype(dtype.numpy())
    info = np.iinfo(dtype.numpy())
    return np.arange(info.min, info.max + 1).astype(dtype.numpy())


# Nodes, the operators that are left, and further arguments of check().
X = {"inputs": "float[n] x"}
ENTRY = """[before] d = DequantizeLinear(c, s, {z8})  [into] q = QuantizeLinear(d, s16, {z16})
    [last] w = DequantizeLinear(q, s16, {z16})  y = Sigmoid(w)"""
PLAIN_ENTRY = ENTRY.format(z8="z", z16="z16")
FIVE = [f"q{i} = QuantizeLinear({'d' + str(i - 1) if i else 'x'}, s, z)"
        f" d{i} = DequantizeLinear(q{i}, s, z)" for i in range(5)]  # fmt: skip
MOVING = """d1 = DequantizeLinear(c, s, z)  q2 = QuantizeLinear(d1, {0})
    y = DequantizeLinear(q2, {0})"""
WITHOUT = """q1 = QuantizeLinear{0}(x, s)  d1 = DequantizeLinear(q1, s)
    q2 = QuantizeLinear{0}(d1, s)  y = DequantizeLinear(q2, s)"""
FOLDS = {
    "any number of equal pairs": (" ".join(FIVE) + " y = Sigmoid(d4)", "Q DQ Sigmoid", X),
    **{
        f"codes that move: {moved}": (MOVING.format(moved), "DQ Q DQ", {"target": "qnn"})
        for moved in ("far, z", "s, z_other", "s, zi", "s16, z", "s")
    },
    "no zero point is 0 of uint8": (WITHOUT.format(""), "Q DQ", X),
    "no zero point behind codes": (
        "d = DequantizeLinear(c, s) q = QuantizeLinear(d, s) y = DequantizeLinear(q, s)",
        "DQ",
        {},
    ),
    "types by an attribute": (WITHOUT.format("<output_dtype = 4>"), "Q DQ", X),
    "values that others read": (
        """d1 = DequantizeLinear(c, s, z)  y1 = Sigmoid(d1)
        q2 = QuantizeLinear(d1, s, z)  y2 = DequantizeLinear(q2, s, z)""",
        "DQ Sigmoid DQ",
        {"outputs": "float[n] y1, float[n] y2, float[n] d1"},
    ),
    **{
        f"values that move: {scale}": (
            PLAIN_ENTRY.replace("s16", scale),
            "DQ Q DQ Sigmoid",
            {},
        )
        for scale in ("s257", "far")
    },
    "each reader of an entry": (
        """d = DequantizeLinear(c, s, z)  plain = Relu(d)
        q = QuantizeLinear(d, s16, z16)
        w1 = DequantizeLinear(q, s16, z16)  y1 = Sigmoid(w1)
        w2 = DequantizeLinear(q, s16, z16)  y2 = Mul(w2, w2)
        y = Add(plain, y1)""",
        "DQ Relu DQ Sigmoid DQ Mul Add",
        {"outputs": "float[n] y, float[n] y2"},
    ),
    "an entry whose codes are an output": (
        PLAIN_ENTRY,
        "DQ Q DQ Sigmoid",
        {"outputs": "float[n] y, uint16[n] q"},
    ),
    "an output keeps its name": (
        """d = DequantizeLinear(c, s, z)  q = QuantizeLinear(d, s16, z16)
        y = DequantizeLinear(q, s16, z16)""",
        "DQ",
        {},
    ),
    "codes that move where the division is one of float16": (
        """d = DequantizeLinear(c, half, z16)  q = QuantizeLinear(d, half, z16)
        y = DequantizeLinear(q, half, z16)""",
        "DQ Q DQ",
        {"inputs": "uint16[n] c", "outputs": "float16[n] y", "opset": 23},
    ),
    "an exit to 8 bits": (
        """d = DequantizeLinear(c, s16, z16)  q = QuantizeLinear(d, s, z)
        y = DequantizeLinear(q, s, z)""",
        "DQ Q DQ",
        {"inputs": "uint16[n] c"},
    ),
    "a pair behind an operator": (
        """q1 = QuantizeLinear(x, s, z)  d1 = DequantizeLinear(q1, s, z)  r = Relu(d1)
        q2 = QuantizeLinear(r, s, z)  y = DequantizeLinear(q2, s, z)""",
        "Q DQ Relu Q DQ",
        X,
    ),
    "a constant": (
        """k = Constant<value = uint8[3] {0, 7, 255}>()
        d = DequantizeLinear(k, s, z)  q = QuantizeLinear(d, s16, z16)
        w = DequantizeLinear(q, s16, z16)  e = Relu(x)  y = Neg(w)""",
        "Constant DQ Relu Neg",
        {**X, "outputs": "float[n] e, float[3] y"},
    ),
}


@pytest.mark.parametrize(("text", "left", "more"), FOLDS.values(), ids=FOLDS)
def test_folds(text: str, left: str, more: dict[str, str]):
    check(text, left, **more)


@pytest.mark.parametrize("target", ["cpu", "qnn"])
def test_equal_pairs_become_one(target: str):
    after, remarks = check(
        """q1 = QuantizeLinear(x, s, z)  d1 = DequantizeLinear(q1, s, z)
        [second] q2 = QuantizeLinear(d1, s, z)  [last] y = DequantizeLinear(q2, s, z)""",
        "Q DQ",
        target,
        inputs="float[n] x",
    )
    last = after.graph.node("last")
    assert last.outputs[0].name == "y"
    assert last.inputs[0].name == "q1"
    assert [str(remark) for remark in remarks] == [
        "second: gives back each code of 'd1': folded"
    ]


def test_codes_are_what_counts_and_stay_codes_for_others():
    after, _ = check(
        """d1 = DequantizeLinear(c, s, z)  q2 = QuantizeLinear(d1, t, z)
        [last] y = DequantizeLinear(q2, far, z_other)""",
        "DQ",
    )
    # What decodes is the last node's grid.
    assert [value.name for value in after.graph.node("last").inputs] == ["c", "far", "z_other"]
    after, _ = check(
        """d1 = DequantizeLinear(c, s, z)  q2 = QuantizeLinear(d1, s, z)
        y = DequantizeLinear(q2, s, z)  i = Cast<to = 6>(q2)""",
        "DQ Identity Cast",
        outputs="float[n] y, int32[n] i, uint8[n] q2",
    )
    reader = after.graph.outputs[0].producer()
    assert reader is not None
    assert reader.inputs[0] is after.graph.inputs[0]


@pytest.mark.parametrize("domains", ["MMM", "MM-", "-M-", "M--", "--M"])
def test_onnxruntimes_own_operators_count_as_well(domains: str):
    a, b, c = ("com.microsoft." if domain == "M" else "" for domain in domains)
    after, _ = check(
        f"""d1 = {a}DequantizeLinear(c, s, z)  q2 = {b}QuantizeLinear(d1, s, z)
        [last] y = {c}DequantizeLinear(q2, s, z)""",
        "DQ",
    )
    assert after.graph.node("last").domain == c.rstrip(".")


@pytest.mark.parametrize("fine", ["z16", "zi16"])
@pytest.mark.parametrize(("kind", "coarse"), [("uint8", "z"), ("int8", "zi")])
def test_an_exact_refinement_folds_on_cpus_only(kind: str, coarse: str, fine: str):
    text = ENTRY.format(z8=coarse, z16=fine)
    after, remarks = check(text, "DQ Sigmoid", inputs=f"{kind}[n] c")
    assert [value.name for value in after.graph.node("last").inputs] == ["c", "s", coarse]
    (remark,) = remarks
    assert remark.node == "into"
    assert "7.8125e-05" in remark.reason
    assert "gives back each value of 'before'" in remark.reason
    _, kept = check(text, "DQ Q DQ Sigmoid", "qnn", inputs=f"{kind}[n] c")
    assert not list(kept)


def test_bodies_are_folded_and_may_read_codes_from_outside():
    text = """d = DequantizeLinear(c, s, z)
        y = If (b) <then_branch = t () => (float[n] y1) {
            q1 = QuantizeLinear(d, s, z)  y1 = DequantizeLinear(q1, s, z) },
          else_branch = e () => (float[n] y2) {
            q2 = QuantizeLinear(d, s16, z16)  w = DequantizeLinear(q2, s16, z16)
            y2 = Neg(w) }>"""
    inputs = "uint8[n] c, bool b"
    before, after = graph(text, inputs), graph(text, inputs)
    fold(after)
    assert operators(after) == {"If": 1, "DQ": 2, "Neg": 1}
    for flag in (True, False):
        feeds = {"c": all_of(U8), "b": np.array(flag)}
        assert run(after, feeds)[0].tobytes() == run(before, feeds)[0].tobytes()


@pytest.mark.parametrize(
    ("inputs", "scale", "words"),
    [
        ("uint8[2] c", "float[2] k = {0.1, 0.2}", "shape [2]"),
        ("uint8[2] c", "float k = {0}", "scale is 0.0"),
        ("uint8[2] c", "float k = {-0.5}", "scale is -0.5"),
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


def test_nothing_to_fold_leaves_even_unused_nodes():
    model = graph("q = QuantizeLinear(x, s, z)  y = DequantizeLinear(q, s, z)  u = Relu(x)",
                  "float[n] x")  # fmt: skip
    before = serialized(model)
    assert not list(fold(model))
    assert serialized(model) == before


def test_the_pass_folds_entries_for_cpus_and_keeps_them_for_qnn():
    model = graph(
        """[relu] r = Relu(d0)  rq = QuantizeLinear(r, s, z)  d1 = DequantizeLinear(rq, s, z)
        [sigmoid] a = Sigmoid(d1)  aq = QuantizeLinear(a, far, z)
        y = DequantizeLinear(aq, far, z)  d0 = DequantizeLinear(c, s, z)"""
    )
    model.graph.sort()
    made = {}
    for target in ("cpu", "qnn"):
        chosen = MixedPrecisionBoundaries(promote="a", target=target)
        made[target] = ortplugins.optimize(model, passes=[chosen]).model
    feeds = {"c": all_of(U8)}
    on_cpu, on_qnn = (run(made[target], feeds)[0] for target in ("cpu", "qnn"))
    assert on_cpu.tobytes() == on_qnn.tobytes()
    entry = operators(made["qnn"])
    entry.subtract(operators(made["cpu"]))
    assert +entry == {"Q": 1, "DQ": 1}
    assert not -entry


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
    feeds = [{"x": FED, "c": np.array(taken)} for taken in (True, False)]
    before = [run(model, each)[0] for each in feeds]
    # This checks that names are single, too.
    place(model, overrides={"x": of(U8, convert=to(U16, *nodes))})
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
    before = run(model, {"x": FED})
    remarks = place(model, promote=frozenset(names), mode=mode)
    fold_pairs(model, target, PassContext(remarks))
    if mode == "int16":
        assert any(remark.outcome is Outcome.FIRED for remark in remarks)
    for old, new in zip(before, run(model, {"x": FED}), strict=True):
        assert np.abs(old - new).max() <= 0.5  # half a step of n


def test_a_pass_that_is_asked_for_nothing_says_so_and_keeps_nodes():
    model = ir.to_proto(build())
    result = ortplugins.optimize(model, passes=[MixedPrecisionBoundaries()])
    (remark,) = result.report.remarks
    assert remark.outcome is Outcome.NOTE and "promote" in remark.reason
    assert list(result.model.graph.node) == list(model.graph.node)
    assert list(result.model.graph.initializer) == list(model.graph.initializer)
