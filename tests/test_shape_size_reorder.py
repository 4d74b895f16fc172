# SPDX-License-Identifier: MIT
"""The pass in real sessions: what runs is what was computed, and the numbers stay."""

import json
import re
import xml.etree.ElementTree
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from builders.command_line import printed
from builders.sessions import CPU
from builders.text_models import proto_of

import ortplugins
from benchmarks.models.branching_graphs import GRAPHS
from ortplugins.artifacts.find_or_build import find_or_build
from ortplugins.html_report.charts import Curve, memory_bars, memory_chart
from ortplugins.html_report.facts import order_of
from ortplugins.optimization.request import read_request
from ortplugins.report import Report

# Eight branches that grow large and then small, level by level in the file. The Shape of the
# first is read at the very end.
BRANCHES = range(8)
BRANCHING = f"""branching (float[rows, 1] x) => (float[rows, 1] y)
<int64[2] wide = {{1, 4096}}, int64[1] last = {{1}}, int64[1] second = {{1}}> {{
    {" ".join(f"c{i} = Constant<value_float = {i}.5>()" for i in BRANCHES)}
    {" ".join(f"m{i} = Mul(x, c{i})" for i in BRANCHES)}
    {" ".join(f"w{i} = Expand(m{i}, wide)" for i in BRANCHES)}
    {" ".join(f"e{i} = Exp(w{i})" for i in BRANCHES)}
    [shape] sizes = Shape(e0)
    {" ".join(f"r{i} = ReduceSum<keepdims = 1>(e{i}, last)" for i in BRANCHES)}
    sum = Sum({", ".join(f"r{i}" for i in BRANCHES)})
    size = Gather(sizes, second)
    number = Cast<to = 1>(size)
    y = Div(sum, number)
}}"""


def saved(folder: Path, text: str) -> Path:
    onnx.save(proto_of(text), folder / "model.onnx")
    return folder / "model.onnx"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return saved(tmp_path, BRANCHING)


def start(path: Path, folder: Path, **options) -> ortplugins.InferenceSession:
    so = onnxruntime.SessionOptions()
    so.enable_profiling = True
    so.profile_file_prefix = str(folder / "profile")
    ortplugins.configure(so, ortplugins.ShapeSizeReorder(**options))
    return ortplugins.InferenceSession(path, so, providers=CPU)


def ran(session) -> list[str]:
    """Names of the nodes in the order in which they ran, from onnxruntime's profile."""
    suffix = "_kernel_time"
    with open(session.end_profiling(), encoding="utf-8") as file:
        events = [event["name"] for event in json.load(file) if event.get("cat") == "Node"]
    return [name.removesuffix(suffix) for name in events if name.endswith(suffix)]


@pytest.fixture
def gradient(tmp_path: Path) -> Path:
    """A graph whose late half needs only the shapes of tensors of the early one."""
    onnx.save(GRAPHS["gradient"](), tmp_path / "gradient.onnx")
    return tmp_path / "gradient.onnx"


def test_nodes_run_in_the_order_of_the_artifact(gradient, tmp_path):
    path = gradient
    plain = onnxruntime.InferenceSession(path, providers=CPU)
    (fed,) = plain.get_inputs()
    feed = {fed.name: np.random.default_rng(0).normal(size=fed.shape).astype(np.float32)}
    expected = plain.run(None, feed)
    for source in ("built", "cache"):
        session = start(path, tmp_path)
        assert session.ortplugins_report.source == source
        for ours, plain in zip(session.run(None, feed), expected, strict=True):
            np.testing.assert_array_equal(ours, plain)
        artifact = ir.load(session.ortplugins_report.artifact)
        assert ran(session) == [n.name for n in artifact.graph if n.op_type != "Constant"]


def test_the_report_tells_the_peaks(gradient, tmp_path):
    report = start(gradient, tmp_path).ortplugins_report
    (remark,) = (remark for remark in report.fired if remark.node == "graph")
    peaks = [float(peak) for peak in re.findall(r"([0-9.]+) MB", remark.reason)]
    assert len(peaks) == 3
    assert peaks[0] < 0.5 * min(peaks[1:])


def test_a_dimension_without_a_number_is_reported(path, tmp_path):
    report = start(path, tmp_path).ortplugins_report
    reported = [r.reason for r in report.remarks if r.outcome.value == "note"]
    assert any("counted as 128: rows" in reason for reason in reported)


def test_tensors_of_unknown_size_are_named(tmp_path):
    text = """g (float[4] x) => (float[n] y) {
        i = NonZero(x)  z = Squeeze(i)  u = Gather(x, z)  y = Neg(u) }"""
    report = start(saved(tmp_path, text), tmp_path).ortplugins_report
    notes = [r.reason for r in report.remarks if r.outcome.value == "note"]
    assert any("the largest input of their node: i, " in note for note in notes)


def test_a_file_for_default_sessions_needs_no_setting(path, tmp_path):
    output = tmp_path / "out.onnx"
    options = {"shape_size_reorder.for_default_order": True}
    result = ortplugins.optimize(path, output, passes=["shape_size_reorder"], options=options)
    assert not any("execution_order" in note for note in result.report.notes)
    assert "by default it now runs" in next(
        r.reason for r in result.report.remarks if r.node == "graph"
    )


def test_a_file_for_others_says_what_sessions_need(path, tmp_path):
    result = ortplugins.optimize(path, tmp_path / "o.onnx", passes=["shape_size_reorder"])
    note = "sessions on this file need execution_order = PRIORITY_BASED"
    assert note in result.report.notes


@pytest.mark.parametrize("dims", ["rows", "rows=", "=3", "rows=-1", "rows=a,b=2"])
def test_dims_without_a_size_are_reported(dims):
    with pytest.raises(ortplugins.OptionError, match="is not NAME=SIZE, as in batch"):
        ortplugins.ShapeSizeReorder(dims=dims)


def test_a_cycle_is_refused_by_name(tmp_path):
    text = "[a] u = Add(x, v)  [b] v = Relu(u)  y = Neg(v)"
    path = saved(tmp_path, f"g (float[n] x) => (float[n] y) {{ {text} }}")
    with pytest.raises(ortplugins.ModelFileError, match="can't be put in order"):
        order_of(path, {})


def test_outputs_that_are_left_out_have_no_place_in_the_order(tmp_path):
    model = proto_of(
        """g (float[b, s, 8] x, float[8] scale, float[8, 8] w) => (float[b, s, 8] y) {
            n, , , sum = com.microsoft.SkipSimplifiedLayerNormalization(x, x, scale)
            p = MatMul(n, w)
            y = Add(p, sum)
        }"""
    )
    result = ortplugins.optimize(model, tmp_path / "o.onnx", passes=["shape_size_reorder"])
    assert any("peak of live bytes" in remark.reason for remark in result.report.remarks)


def test_memory_shows_the_orders(path, tmp_path):
    svg = tmp_path / "order.svg"
    lines = printed("memory", path, "--svg", svg, "--dims", "rows=64").splitlines()
    assert [line.split("  ")[0].split(" (")[0] for line in lines[:3]] == [
        "computed",
        "onnxruntime's default",
        "PRIORITY_BASED",
    ]
    peaks = [curve.peak for curve in order_of(path, {"rows": 64})[0]]
    assert peaks[0] <= min(peaks)
    assert xml.etree.ElementTree.fromstring(svg.read_text(encoding="utf-8")).tag.endswith(
        "svg"
    )


def test_pictures_keep_the_greatest_of_each_stretch():
    (line,) = memory_bars([Curve("one", [0, 0, 8, 0, 4, 4])], width=3)
    assert line.endswith(" █▄")
    assert "A &amp; B" in memory_chart([Curve("A & B", [1])], "t")


def arena_held(session: onnxruntime.InferenceSession, feed: dict, runs: int) -> list[int]:
    """Bytes that the arena has from the system at the end of each run."""
    for _ in range(runs):
        session.run(None, feed)
    with open(session.end_profiling(), encoding="utf-8") as file:
        events = [event for event in json.load(file) if event["name"].endswith("_kernel_time")]
    held = [int(event["args"]["mem_arena_held"]) for event in events]
    return held[len(held) // runs - 1 :: len(held) // runs]


@pytest.mark.skipif(
    tuple(map(int, onnxruntime.__version__.split(".")[:2])) < (1, 31),
    reason="profiles of older releases do not tell what the arena holds",
)
def test_an_arena_holds_the_peak_once(gradient, tmp_path):
    session = start(gradient, tmp_path)
    (fed,) = session.get_inputs()
    feed = {fed.name: np.zeros(fed.shape, np.float32)}
    first, *later = arena_held(session, feed, runs=3)
    # A pattern's block would lie beside what the first run left in the arena.
    assert later[-1] == first


# Each tensor is a little larger than the one before, so that no chunk serves again.
GROWING = """growing (float[1, 1] x) => (float[1, 1] y)
<int64[2] one = {6, 65536}, int64[2] two = {7, 65536}, int64[2] three = {9, 65536},
 int64[2] all = {0, 1}> {
    [a] a = Expand(x, one)      [b] b = ReduceMax<keepdims = 1>(a, all)
    [c] c = Expand(b, two)      [d] d = ReduceMax<keepdims = 1>(c, all)
    [e] e = Expand(d, three)     [y] y = ReduceMax<keepdims = 1>(e, all)
}"""


def test_patterns_stay_on_where_tensors_would_spread(tmp_path):
    report = start(saved(tmp_path, GROWING), tmp_path).ortplugins_report
    (remark,) = (remark for remark in report.remarks if remark.node == "session")
    assert remark.outcome.value == "refused"
    assert "tensors would lie on 5.8 MB for a peak of 2.4 MB" in remark.reason


# The first and the last large tensor have one shape, so the last takes the buffer of the
# first: it is held while the two others are there, and these make the peak.
HELD_BETWEEN = """held (float[1, 1] x) => (float[1, 1] y)
<int64[2] one = {600, 1024}, int64[2] other = {1024, 599}, int64[2] all = {0, 1}> {
    [a] a = Expand(x, one)      [b] b = ReduceMax<keepdims = 1>(a, all)
    [c] c = Expand(b, other)    [d] d = Sign(c)    [e] e = ReduceMax<keepdims = 1>(d, all)
    [f] f = Expand(e, one)      [y] y = ReduceMax<keepdims = 1>(f, all)
}"""


def test_buffers_are_not_reused_where_that_holds_them(tmp_path):
    path = saved(tmp_path, HELD_BETWEEN)
    so = onnxruntime.SessionOptions()
    ortplugins.configure(so, ortplugins.ShapeSizeReorder(), cache_dir=str(tmp_path / "cache"))

    def settings_and_peak(arena: bool) -> tuple[dict[str, str], str]:
        so.enable_cpu_mem_arena = arena
        request = read_request(path, ortplugins.read(so), so, CPU, None)
        artifact = find_or_build(request)
        (graph,) = (
            r.reason for r in Report.from_dict(artifact.report).remarks if r.node == "graph"
        )
        return dict(artifact.settings), re.search(r"computed ([0-9.]+ MB)", graph)[1]

    in_file_order = {"execution_order": "PRIORITY_BASED"}
    without_arena = {**in_file_order, "enable_mem_reuse": "0"}
    # Each kind of session has an entry of its own.
    with_arena = {**without_arena, "enable_mem_pattern": "0"}
    assert settings_and_peak(arena=True) == (with_arena, "4.9 MB")
    assert settings_and_peak(arena=False) == (without_arena, "4.9 MB")
    assert settings_and_peak(arena=True) == (with_arena, "4.9 MB")
    session = ortplugins.InferenceSession(path, so, providers=CPU)
    assert not session.get_session_options().enable_mem_pattern
    assert so.enable_mem_pattern
    (y,) = session.run(None, {"x": np.array([[3.0]], np.float32)})
    assert y == 1.0
