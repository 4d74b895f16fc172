# SPDX-License-Identifier: MIT
"""Two models side by side: measures, inputs, outputs, times."""

import math
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from builders.command_line import as_json, ortplugins_command, printed
from builders.dequantized_models import DequantizedMatMul
from builders.sessions import EXACT
from builders.text_models import proto_of

import ortplugins
from ortplugins.measurement import compare as comparison
from ortplugins.measurement import difference as value_difference
from ortplugins.measurement.difference import Difference, DifferenceSum
from ortplugins.measurement.measure import Candidate, Measurement, Spread
from ortplugins.measurement.models import comparison_feeds
from ortplugins.testing import assert_same_outputs

FUSION = "dq_matmulnbits_fusion"


def difference(*pairs: tuple[npt.ArrayLike, npt.ArrayLike]) -> Difference:
    total = DifferenceSum("v")
    for a, b in pairs:
        total.add(np.asarray(a), np.asarray(b))
    return total.result()


def constant(kind: str, value: int | str) -> onnx.ModelProto:
    return proto_of(f"""g (float[1] x) => ({kind}[1] y, float[1] z)
        {{ y = Constant<value = {kind}[1] {{{value}}}>() z = Neg(x) }}""")


# The measures


@pytest.mark.parametrize("at_a_time", [1 << 20, 7])
def test_measures_are_their_formulas(at_a_time, monkeypatch):
    monkeypatch.setattr(value_difference, "_SLICE", at_a_time)
    rng = np.random.default_rng(0)
    samples = rng.normal(size=(2, 5, 9))
    others = samples + rng.normal(scale=0.1, size=samples.shape)
    found = difference(*zip(samples, others, strict=True))
    a, b = samples.ravel(), others.ravel()
    assert found.max_abs == np.abs(b - a).max()
    assert math.isclose(found.relative_rms, np.linalg.norm(b - a) / np.linalg.norm(a))
    assert math.isclose(found.cosine, a @ b / np.linalg.norm(a) / np.linalg.norm(b))


INF = math.inf
ODD = [np.nan, INF, -INF, 0.0, 3.0]
EQUAL = [ODD, [], np.zeros((0, 3)), [0, 0], [True, False], ["a", "b"]]


@pytest.mark.parametrize(
    ("a", "b", "measures"),
    [
        # What is not finite alone is infinitely far.
        ([INF, 1.0], [np.nan, 1.0], (INF, INF, 0)),
        ([INF, 1.0], [-INF, 1.0], (INF, INF, 0)),
        ([INF, 1.0], [0.0, 1.0], (INF, INF, 0)),
        # A reference of zeros has no relative error.
        ([0.0, 0.0], [3.0, 4.0], (4, 5, 0)),
        # Integers are not subtracted in their own type.
        (np.uint8([3]), np.uint8([5]), (2, 2 / 3, 1)),
        # Other shapes are no numbers.
        (np.zeros((2, 3)), np.zeros((3, 2)), "shape [2, 3] in a, [3, 2] in b"),
        # Equal is no difference, whatever it is.
        *((equal, equal, (0, 0, 1)) for equal in EQUAL),
    ],
)
def test_measures_of_special_numbers(a, b, measures):
    found = difference((a, b))
    if isinstance(measures, str):
        assert (found.mismatch, found.max_abs) == (measures, INF)
    else:
        found_measures = found.max_abs, found.relative_rms, found.cosine
        assert found_measures == pytest.approx(measures)


# Neighbours in their own type, and equal, or nearly, as float64.
NEIGHBORS = [
    ("int64", 2**53, 2**53 + 1),
    ("int64", -(2**63), -(2**63) + 1),
    ("uint64", 2**64 - 2, 2**64 - 1),
    ("int32", 200_000, 200_001),
    ("uint32", 2**32 - 2, 2**32 - 1),
    ("bool", 0, 1),
    ("string", '"a"', '"b"'),
]


@pytest.mark.parametrize(("kind", "one", "other"), NEIGHBORS)
def test_integers_are_compared_as_integers(kind, one, other):
    a, b = constant(kind, one), constant(kind, other)
    for first, second in ((a, b), (b, a)):
        assert ortplugins.compare(first, second).outputs[0].max_abs == 1
        with pytest.raises(AssertionError, match="output 'y' of sample 0: 1 of 1 elements"):
            assert_same_outputs(first, second, rtol=1)
        assert_same_outputs(first, second, atol=1)
    assert_same_outputs(a, a, rtol=0, atol=0)


def test_rtol_is_for_what_is_rounded():
    codes = constant("uint8", 100), constant("uint8", 101)  # codes of a quantised value
    assert_same_outputs(*codes, rtol=0.02)
    with pytest.raises(AssertionError, match="a = 100, b = 101"):
        assert_same_outputs(*codes)
    whole, half = constant("int64", 100), constant("float", "100.5")
    assert_same_outputs(whole, half, rtol=0.02)
    assert ortplugins.compare(whole, half).outputs[0].max_abs == 0.5


def test_the_worst_of_several_samples_is_named():
    a, b = (
        proto_of(f"g (float[n] x) => (float[n] y) {{ y = {op}(x) }}") for op in ("Abs", "Neg")
    )
    samples = [{"x": np.array(x, np.float32)} for x in ([1, 0], [1, 1], [1, 0])]
    (failure,) = ortplugins.compare(a, b, inputs=samples, atol=0.0).failures
    assert failure.startswith("output 'y' of sample 1: 2 of 2 elements")


# Inputs


def test_dimensions_have_the_sizes_that_are_given():
    model = proto_of("""g (float[batch, seq] x, float[n, ?] o) => (float[batch, seq] y)
        { y = Relu(x) }""")
    session = ort.InferenceSession(model.SerializeToString())

    def shapes(**dims: int) -> dict[str, tuple[int, ...]]:
        feeds = comparison_feeds(session, dims=dims)
        return {name: array.shape for name, array in feeds[0].items()}

    assert shapes(batch=2, seq=5)["x"] == (2, 5)
    assert shapes(seq=0)["x"] == (1, 0)
    assert shapes(**{"o[1]": 7})["o"] == (32, 7)
    with pytest.raises(ValueError, match=r"dimension 'sek' .*; did you mean 'seq'"):
        shapes(sek=5)
    with pytest.raises(ValueError, match=r"it has .*'n', 'o\[1\]'"):
        shapes(rows=5)
    for size in (-1, True):
        with pytest.raises(ValueError, match=f"'seq' is {size}; expected 0 or a positive int"):
            shapes(seq=size)


def test_an_initializer_among_the_inputs_may_be_left_out():
    model = proto_of("""g (float[2] x, float[2] w) => (float[2] y)
        <float[2] w = {1, 2}> { y = Mul(x, w) }""")
    ones = np.ones(2, np.float32)
    found = ortplugins.compare(model, model, inputs=[{"x": ones}, {"x": ones, "w": ones}])
    assert (found.samples, found.outputs[0].max_abs) == (2, 0)


# Outputs


@pytest.mark.parametrize("external", [False, True], ids=["one file", "external data"])
def test_a_model_is_compared_with_what_passes_make_of_it(external, tmp_path):
    path = tmp_path / "model.onnx"
    location = "model.data" if external else None
    model = DequantizedMatMul(64, 32, 32).model()
    ir.save(model, path, external_data=location, size_threshold_bytes=0)
    before = {item.name for item in tmp_path.iterdir()}
    found = ortplugins.compare(path, passes=[EXACT], dims={"rows": 3})
    assert found.outputs[0].shape == (3, 32)
    assert found.outputs[0].relative_rms < 1e-6
    assert found.report is not None and len(found.report.fired) == 1
    assert {item.name for item in tmp_path.iterdir()} == before


def test_outputs_that_numpy_cannot_hold_are_named_and_the_others_compared():
    model = proto_of("""g (float[2] x) => (float[2] y, seq(float[2]) s, bfloat16[2] h)
        { y = Relu(x) s = SequenceConstruct(x) h = Cast<to = 16>(x) }""")
    found = ortplugins.compare(model, model)
    assert (found.samples, found.timings) == (1, None)
    assert [item.name for item in found.outputs] == ["y"]
    assert found.not_compared["s"].startswith("is seq(tensor(float))")
    assert found.not_compared["h"].startswith("is tensor(bfloat16)")
    alone = proto_of("g (float[2] x) => (float[2] y) { y = Relu(x) }")
    bounded = ortplugins.compare(model, alone, rtol=0)
    assert [text.partition(": ")[0] for text in bounded.failures] == [
        "output 's' not compared", "output 'h' not compared",
    ]  # fmt: skip
    assert bounded.not_compared["s"] == "model b has no such output"
    only = proto_of("g (float[2] x) => (seq(float[2]) s) { s = SequenceConstruct(x) }")
    with pytest.raises(ortplugins.ModelFileError, match="no output to compare: 's': is seq"):
        ortplugins.compare(only, only)


def test_models_of_other_inputs_are_refused():
    a = proto_of("g (float[2] x, float[2] z) => (float[2] y) { y = Add(x, z) }")
    b = proto_of("g (float[2] x) => (float[2] y) { y = Neg(x) }")
    assert ortplugins.compare(a, b).outputs[0].max_abs > 0  # b needs no z
    with pytest.raises(ortplugins.ModelFileError, match="model b takes input 'z', which"):
        ortplugins.compare(b, a)
    c = proto_of("g (double[2] x) => (double[2] y) { y = Neg(x) }")
    with pytest.raises(ortplugins.ModelFileError, match=r"input 'x' is tensor\(float\) in"):
        ortplugins.compare(b, c)


def test_what_makes_no_sense_is_refused(tmp_path):
    model = proto_of("g (float[2] x) => (float[2] y) { y = Neg(x) }")
    for arguments in ({}, {"b": model, "passes": [FUSION]}):
        with pytest.raises(ValueError, match="a second model, or passes"):
            ortplugins.compare(model, **arguments)
    for arguments, text in (
        ({"samples": 0}, "samples is 0"),
        ({"runs": -1}, "runs is -1"),
        ({"rounds": 0}, "rounds is 0"),
        ({"rtol": np.nan}, "rtol is nan"),
        ({"inputs": {"x": np.zeros(2, np.float32)}, "dims": {"n": 1}}, "dims are for random"),
    ):
        with pytest.raises(ValueError, match=text):
            ortplugins.compare(model, model, **arguments)
    with pytest.raises(TypeError, match="a int is not a model"):
        ortplugins.compare(model, 3)
    with pytest.raises(ortplugins.ModelFileError, match="cannot be read: Is a directory"):
        ortplugins.compare(model, tmp_path)


# Times


def test_runs_have_the_settings_that_passes_ask_for(tmp_path, monkeypatch):
    given = []

    def measured(candidates: list[Candidate], *_: object, **how: object) -> list[Measurement]:
        assert how == {"rounds": 5, "runs": 1, "lockstep": True, "progress": None}
        given.extend(candidate.settings for candidate in candidates)
        return [Measurement(start=Spread((1.0,)), run=Spread((1.0,)))] * 2

    monkeypatch.setattr(comparison, "measure", measured)
    model = DequantizedMatMul(64, 32, 32).model()
    fused = ortplugins.optimize(model, tmp_path / "fused.onnx", bake=True)
    ortplugins.compare(model, passes=[FUSION], runs=1)
    ortplugins.compare(model, fused, runs=1)
    assert given == [{}, {}, {}, {"graph_optimization_level": "ORT_DISABLE_ALL"}]
    options = ort.SessionOptions()
    options.execution_order = ort.ExecutionOrder.PRIORITY_BASED
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    session = ort.InferenceSession(tmp_path / "fused.onnx", options)
    ortplugins.compare(model, session, runs=1)
    assert given[-1] == {
        "graph_optimization_level": "ORT_ENABLE_BASIC",
        "execution_order": "PRIORITY_BASED",
        "enable_mem_pattern": "1",
        "enable_mem_reuse": "1",
    }


def test_models_are_called_what_their_users_know(tmp_path):
    model = proto_of("g (float[n] x) => (float[n] y) { y = Neg(x) }")
    onnx.save(model, path := tmp_path / "m.onnx")
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    written = tmp_path / "o.onnx"
    names = {
        str(path): path,
        "the model": model,
        "the model given as bytes": path.read_bytes(),
        "the session's model": session,
        "the optimised model": ortplugins.optimize(model),
        str(written): ortplugins.optimize(model, written),
    }
    for name, source in names.items():
        assert ortplugins.compare(source, model).a == name


def test_a_model_that_can_not_be_timed_is_an_error(monkeypatch):
    failed = Measurement(failed="m.onnx: took more than 1 s")
    monkeypatch.setattr(comparison, "measure", lambda *_, **__: [failed, failed])
    model = proto_of("g (float[2] x) => (float[2] y) { y = Neg(x) }")
    with pytest.raises(ortplugins.ModelFileError, match=r"m\.onnx: took more than 1 s"):
        ortplugins.compare(model, model, runs=1)


# The command


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, kind in (("a", "Exp"), ("b", "Log")):  # -inf and NaN
        model = proto_of(f"g (float[64] x) => (float[64] y) {{ u = Relu(x) y = {kind}(u) }}")
        onnx.save(model, f"{name}.onnx")
    ir.save(DequantizedMatMul(64, 32, 32).model(), "qdq.onnx")


@pytest.mark.usefixtures("files")
def test_the_command_prints_what_the_json_says():
    arguments = "compare", "a.onnx", "b.onnx", "--runs", "0"
    content = as_json(*arguments)
    assert (content["a"], content["b"], content["timings"]) == ("a.onnx", "b.onnx", None)
    assert content["outputs"][0]["max_abs"] == "inf"
    assert "output 'y': max abs error inf" in ortplugins_command(*arguments).stdout


@pytest.mark.usefixtures("files")
def test_the_command_makes_up_as_many_samples_as_it_is_asked_for(monkeypatch):
    given, real = [], comparison.compare

    def compare(*models: Path, **settings: object) -> ortplugins.Comparison:
        given.append((settings["samples"], settings["seed"]))
        return real(*models, **settings)

    monkeypatch.setattr(comparison, "compare", compare)
    for more in ((), ("--count", 3, "--seed", 7)):
        printed("compare", "a.onnx", "a.onnx", "--runs", 0, *more)
    assert given == [(1, 0), (3, 7)]


@pytest.mark.usefixtures("files")
def test_the_command_shows_figures_side_by_side(monkeypatch):
    a, b = (
        Measurement(
            Spread(start), Spread(run), private=Spread(held), peak_private=Spread(peak)
        )
        for start, run, held, peak in (
            ((0.001, 0.003), (0.002, 0.002), (5e6,), (4e6,)),
            ((0.002, 0.004), (0.001, 0.001), (5e6,), (0.0,)),
        )
    )
    monkeypatch.setattr(comparison, "measure", lambda *_, **__: [a, b])
    shown = printed("compare", "a.onnx", "a.onnx", "--runs", 1).splitlines()[-5:]
    assert shown == [
        "median (range)\ta\tb\ta / b",
        "run\t2 ms (2 to 2)\t1 ms (1 to 1)\t2.00",
        "start\t2 ms (1 to 3)\t3 ms (2 to 4)\tno difference",
        "peak of private memory\t4 MB (4 to 4)\t0 MB (0 to 0)\t",
        "private memory after the runs\t5 MB (5 to 5)\t5 MB (5 to 5)\tno difference",
    ]


@pytest.mark.usefixtures("files")
def test_the_command_runs_passes_and_times_them():
    arguments = f"compare qdq.onnx --pass {FUSION} --dims rows=3 --runs 3 --rounds".split()
    content = as_json(*arguments, "2")
    shown = printed(*arguments, "1")
    assert "fired 1, refused 0" in shown
    shown = {line.split("\t")[0] for line in shown.splitlines()}
    assert {cost["what"] for cost in content["costs"]} <= shown
    for cost in content["costs"]:
        assert len(cost["a"]["values"]) == len(cost["b"]["values"]) == 2
    for timing in content["timings"]:
        assert all(seconds > 0 for seconds in timing["run"]["values"])
        assert all(seconds > 0 for seconds in timing["start"]["values"])
        if sys.platform == "linux":
            held, peak = timing["private"]["values"], timing["peak_resident"]["values"]
            assert max(held) < min(peak)
