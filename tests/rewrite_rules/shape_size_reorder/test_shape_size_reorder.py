# SPDX-License-Identifier: MIT
"""ShapeSizeReorder in sessions; and orders, live bytes and arena, which are onnxruntime's."""

import random
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from builders import order_graphs
from builders.sessions import CPU
from builders.text_models import proto_of
from hypothesis import given, settings
from hypothesis import strategies as st

import ortplugins
from benchmarks.models.branching_graphs import GRAPHS
from ortplugins.cache.artifact import Artifact
from ortplugins.runtime.copied_options import running_options
from rewrite_rules.graph.nodes import is_constant
from rewrite_rules.remarks import PassContext, Remarks
from rewrite_rules.shape_size_reorder.memory_order import GraphOrder
from rewrite_rules.shape_size_reorder.onnxruntime_orders import Dependencies
from rewrite_rules.shape_size_reorder.reorder import put_in_order, reorder
from rewrite_rules.shapes.proved_shapes import DEFAULT_DIM, ProvedShapes

# Branches that grow large and then small, level by level in the file. The Shape of the first
# is read at the very end.
BRANCHING = """
    g (float[rows] x, float[rows] w) => (float[n] y)
    <int64[1] zero = {0}, int64[2] wide = {100, 1}> {
        a0 = Expand (x, wide)  b0 = Expand (w, wide)  c0 = Expand (x, wide)
        sa = Shape (a0)  first = Gather (sa, zero)  twice = Add (first, first)
        a = ReduceSum <keepdims = 0> (a0)  b = ReduceSum <keepdims = 0> (b0)
        c = ReduceSum <keepdims = 0> (c0)
        ab = Add (a, b)  abc = Add (ab, c)  y = Expand (abc, twice)
    }"""


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
        assert order_graphs.ran(order_graphs.events_of(session)) == [
            n.name for n in artifact.graph if n.op_type != "Constant"
        ]


def test_the_report_tells_the_peaks(tmp_path):
    onnx.save(GRAPHS["unet"](), tmp_path / "unet.onnx")
    report = start(tmp_path / "unet.onnx", tmp_path).ortplugins_report
    (remark,) = (remark for remark in report.fired if remark.node == "graph")
    peaks = [float(peak) for peak in re.findall(r"([0-9.]+) MB", remark.reason)]
    assert len(peaks) == 3
    assert peaks[0] == min(peaks) < max(peaks)


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


def test_a_file_says_what_sessions_need(gradient, tmp_path):
    report = ortplugins.optimize(
        gradient, tmp_path / "o.onnx", passes=["shape_size_reorder"]
    ).report
    notes = [note for note in report.notes if "execution_order" in note]
    assert notes == ["sessions on this file need execution_order = PRIORITY_BASED"]


@pytest.mark.parametrize("dims", ["rows", "rows=", "=3", "rows=-1", "rows=a,b=2"])
def test_dims_without_a_size_are_reported(dims):
    with pytest.raises(ortplugins.OptionError, match="is not NAME=SIZE, as in batch"):
        ortplugins.ShapeSizeReorder(dims=dims)


def test_a_cycle_is_refused_by_name(tmp_path):
    text = "[a] u = Add(x, v)  [b] v = Relu(u)  y = Neg(v)"
    path = saved(tmp_path, f"g (float[n] x) => (float[n] y) {{ {text} }}")
    with pytest.raises(ortplugins.ModelFileError, match="can't be put in order"):
        ortplugins.optimize(path, passes=["shape_size_reorder"])


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


def arena_held(session: onnxruntime.InferenceSession, feed: dict, runs: int) -> list[int]:
    """Bytes that the arena has from the system at the end of each run."""
    for _ in range(runs):
        session.run(None, feed)
    held = [int(event["args"]["mem_arena_held"]) for event in order_graphs.events_of(session)]
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


def test_buffers_are_not_reused(gradient, tmp_path):
    so = onnxruntime.SessionOptions()
    ortplugins.configure(so, ortplugins.ShapeSizeReorder(), cache_dir=str(tmp_path / "cache"))
    # Each kind of session has an entry of its own.
    for arena in (True, False, True):
        so.enable_cpu_mem_arena = arena
        session = ortplugins.InferenceSession(gradient, so, providers=CPU)
        artifact = Artifact.read(Path(session.ortplugins_report.artifact).parent)
        assert artifact is not None
        expected = {"execution_order": "PRIORITY_BASED", "enable_mem_reuse": "0"}
        expected |= {"enable_mem_pattern": "0"} if arena else {}
        assert dict(artifact.settings) == expected
        assert running_options(session).enable_mem_pattern is not arena
        assert so.enable_mem_pattern


# Orders, live bytes and arena are onnxruntime's own; the computed order is never worse.


RANDOM_GRAPHS = 60


def inferred(proto: onnx.ModelProto) -> ir.Model:
    return ir.from_proto(onnx.shape_inference.infer_shapes(proto))


def model_of(text: str) -> ir.Model:
    return inferred(proto_of(text))


def held_by_onnxruntime(model: onnx.ModelProto, folder: Path, **settings: Any) -> list[int]:
    """Bytes held after each node of the graph, from its profile; without initializers."""
    options = onnxruntime.SessionOptions()
    # A pattern allocates everything at once.
    options.enable_mem_pattern = False
    options.enable_mem_reuse = False
    events = order_graphs.profile(model, folder, options=options, **settings)
    held = [int(event["args"]["mem_bytes_requested_in_use"]) for event in events]
    before = held[0] - int(events[0]["args"]["mem_requested_in_use_delta"])
    return [number - before for number in held]


def ordered(model: ir.Model, **dims: int) -> GraphOrder:
    return GraphOrder(model.graph, ProvedShapes(model, dims))


def simulated(model: ir.Model, *, priority: bool) -> list[int]:
    found = ordered(model)
    return found.live((found.priority if priority else found.default).order)


@pytest.mark.parametrize("seed", range(RANDOM_GRAPHS // 3))
def test_every_step_holds_what_the_profile_says(seed: int, tmp_path: Path):
    model = order_graphs.random_model(seed, nodes=20 + seed % 40)
    graph = inferred(model)
    for priority in (False, True):
        held = held_by_onnxruntime(model, tmp_path, priority=priority)
        assert simulated(graph, priority=priority) == held


def test_what_is_not_the_graphs_is_not_written_over(tmp_path: Path):
    """A Clip may write over its input, if that is not the caller's in another shape."""
    text = """g (float[16, 64] x) => (float[64, 16] y) <int64[2] turned = {64, 16}> {
        r = Reshape (x, turned)  c = Relu (r)  d = Sigmoid (c)  y = Neg (d) }"""
    model = onnx.shape_inference.infer_shapes(proto_of(text))
    held = held_by_onnxruntime(model, tmp_path)
    assert simulated(ir.from_proto(model), priority=False) == held == [0, 4096, 4096, 8192]


def default_order(graph: ir.Graph) -> list[int]:
    return Dependencies.of(graph).default()


def priority_order(graph: ir.Graph) -> list[int]:
    return Dependencies.of(graph).priority()


def named(graph: ir.Graph, order: Sequence[int]) -> list[str]:
    nodes = [node for node in graph if not is_constant(node)]
    return [nodes[index].name for index in order]


def ran_in(
    orders: Iterable[list[str]], model: onnx.ModelProto, folder: Path, *, priority: bool
) -> int:
    """Compare the order of each graph that ran with the profile; return how many did."""
    orders, compared = list(orders), 0
    for cond in (True, False):
        events = order_graphs.profile(model, folder, priority=priority, cond=cond)
        place = {name: index for index, name in enumerate(order_graphs.ran(events))}
        for order in orders:
            steps = [place.get(name) for name in order]
            if None in steps:  # a branch that was not taken; nothing of it ran
                assert steps == [None] * len(steps)
                continue
            assert steps == sorted(steps)
            compared += 1
    return compared


@pytest.mark.parametrize("seed", range(RANDOM_GRAPHS))
def test_random_graphs_run_in_the_orders_that_are_computed(seed: int, tmp_path: Path):
    proto = order_graphs.random_model(seed, 12 + seed % 40, subgraphs=seed % 3)
    for priority, simulate in ((False, default_order), (True, priority_order)):
        orders = [named(graph, simulate(graph)) for graph in ir.from_proto(proto).graphs()]
        assert ran_in(orders, proto, tmp_path, priority=priority)
    model = inferred(proto)
    found = ordered(model)
    orders = [named(part.graph, part.ours.order) for part in every(found)]
    put_in_order(model, found)
    for part, order in zip(every(found), orders, strict=True):
        assert [node.name for node in part.graph if not is_constant(node)] == order
    assert ran_in(orders, ir.to_proto(model), tmp_path, priority=True)


def is_order(order: Sequence[int], dependencies: Dependencies) -> bool:
    """Whether every node is there once, and after all that it reads."""
    step = {node: step for step, node in enumerate(order)}
    edges = ((p, node) for node, all_of in enumerate(dependencies.producers) for p in all_of)
    return sorted(order) == list(range(len(dependencies.nodes))) and all(
        step[producer] < step[node] for producer, node in edges
    )


def every(found: GraphOrder):
    yield found
    for body in found.subgraphs:
        yield from every(body)


@pytest.mark.parametrize("domain", ["maker", "ai.onnx.contrib", "com.microsoft.extensions"])
@pytest.mark.parametrize("seed", [265, 271, 330])
def test_custom_operators_run_in_the_order_that_they_ran_in(domain, seed):
    """What holds state would count in another order, be it that of simpler shapes."""
    model, rng = ir.from_proto(order_graphs.random_model(seed, 30)), random.Random(seed)
    unary = ("Relu", "Neg", "Sigmoid", "Tanh", "Abs", "Exp")
    for node in rng.sample([node for node in model.graph if node.op_type in unary], 3):
        node.domain = domain
    before, context = ir.to_proto(model), PassContext(Remarks("shape_size_reorder"))
    reorder(model, context, dims={})
    (remark,) = context.remarks
    assert "several custom operators" in remark.reason
    assert ir.to_proto(model) == before
    assert not context.session_settings


def test_a_custom_operator_in_a_function_runs_at_each_call():
    model = ir.from_onnx_text("""<ir_version: 10, opset_import: ["": 21, "local": 1]>
        g (float[n] x) => (float[n] y, float[n] z) {
            h = Relu (x)  y = local.F (h)  s = Shape (h)  e = Expand (x, s)  z = local.F (e) }
        <domain: "local", opset_import: ["": 21, "maker": 1]> F (t) => (u) {
            u = maker.Log (t) }""")
    remarks = Remarks("shape_size_reorder")
    reorder(model, PassContext(remarks), dims={})
    assert ["may hold state" in remark.reason for remark in remarks] == [True]


def test_a_custom_operator_alone_keeps_nothing_in_place():
    for seed in range(99):
        model = ir.from_proto(order_graphs.random_model(seed, 30))
        next(node for node in model.graph if not is_constant(node)).domain = "maker"
        context = PassContext(Remarks("shape_size_reorder"))
        reorder(model, context, dims={})
        if context.session_settings:
            return
    pytest.fail("no order was set")


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 60), st.integers(0, 2))
def test_never_worse_and_always_an_order(seed: int, nodes: int, subgraphs: int):
    model = inferred(order_graphs.random_model(seed, nodes, subgraphs))
    found = ordered(model)
    best = min(found.default.peak, found.priority.peak)
    # A Shape of two axes may lie there earlier than it did.
    shapes = sum(node.op_type in ("Shape", "Size") for node in model.graph.all_nodes())
    assert found.ours.peak <= best + 16 * shapes
    for part in every(found):
        dependencies = Dependencies.of(part.graph)
        assert is_order(part.ours.order, dependencies)
    again = ordered(inferred(order_graphs.random_model(seed, nodes, subgraphs)))
    assert again.ours.order == found.ours.order
    put_in_order(model, found)
    for part in every(found):
        # What PRIORITY_BASED makes of the file is the file.
        again = Dependencies.of(part.graph)
        assert again.priority() == list(range(len(again.nodes)))


def test_branches_are_finished_one_after_another_and_shapes_read_at_once():
    found = ordered(model_of(BRANCHING), rows=1000)
    assert found.priority.peak > 1_200_000
    assert found.ours.peak < 401_000
    nodes = list(found.graph)
    order = [nodes[i].outputs[0].name for i in found.ours.order]
    start = order.index("a0")
    assert order[start : start + 2] == ["a0", "sa"]


def test_dims_are_used_and_unknown_ones_reported():
    graph = model_of(
        "g (float[b, s, 64] x) => (float[b, s, 64] y) { a = Neg (x) y = Sin (a) }"
    )
    assert ProvedShapes(graph, {}).guessed == {"b", "s"}
    assert ordered(graph).ours.peak == 2 * DEFAULT_DIM**2 * 64 * 4
    found = ordered(graph, b=1, s=512)
    assert ProvedShapes(graph, {"b": 1, "s": 512}).guessed == set()
    assert found.ours.peak == 2 * 512 * 64 * 4


def test_zero_size_unknown_rank_and_sequences():
    model = model_of("""
        g (float[0, 4] x, seq(float[4]) q, float[4] w) => (float[0, 4] y, float[k] z) {
            y = Neg (x)
            n = SequenceLength (q)
            s = SequenceInsert (q, w, n)
            e = SequenceAt (s, n)
            u = Neg (e)
            h = Shape (u)
            z = Reshape (u, h)
        }""")
    for name in ("e", "u"):
        next(v for node in model.graph for v in node.outputs if v.name == name).shape = None
    found = ordered(model)
    assert {"s", "e", "u"} <= set(found.unknown_values)
    assert is_order(found.ours.order, Dependencies.of(model.graph))


ESTIMATED = {
    # By the annotation, of which no operator says more.
    "g (float[4] x) => (int64[1, 4] y) <int64[1, 4] i> { i = NonZero(x)  y = Neg(i) }": 64,
    # As tf2onnx computes shapes.
    """g (float[9, 8] x) => (float[a, b] y) <float[1] k = {1}> {
        s = Shape(x)  i = Cast<to = 6>(s)  t = Cast<to = 7>(i)  y = Expand(k, t) }""": 304,
    # The outputs of an If's branches are its own.
    """g (bool c, float[9, 8] x) => (float[9, 8] y) {
        y = If (c) <then_branch = t () => (float[9, 8] d) { a = Exp(x)  d = Neg(a) },
            else_branch = f () => (float[9, 8] e) { e = Neg(x) }> }""": 2 * 288,
}


@pytest.mark.parametrize("text", ESTIMATED)
def test_sizes_are_estimated_by(text):
    found = ordered(model_of(text))
    assert (found.ours.peak, found.unknown_values) == (ESTIMATED[text], [])


def test_shapes_of_inputs_initializers_and_as_outputs():
    graph = model_of("""
        g (float[4, n] x) => (int64[2] s, int64 z, float[4, n] y)
        <float[3] w = {1, 2, 3}> {
            y = Neg (x)  s = Shape (x)  z = Size (w)
        }""")
    found = ordered(graph)
    assert found.ours.order[:2] == (1, 2)


def test_a_file_that_is_not_sorted(tmp_path: Path):
    model = model_of("""
        g (float[4, 4] x) => (float[a, b] y) {
            a = Relu (x)  b = Neg (a)  s = Shape (b)  c = Exp (b)  d = Neg (c)
            y = Reshape (d, s)
        }""")
    for node, name in zip(model.graph, "abscdy", strict=True):
        node.name = name
    proto = ir.to_proto(model)
    nodes = [proto.graph.node[index] for index in (5, 2, 0, 4, 1, 3)]
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    inputs = {"x": order_graphs.feeds(True)["x"][:4, :4]}
    for priority, simulate in ((False, default_order), (True, priority_order)):
        events = order_graphs.profile(proto, tmp_path, priority=priority, inputs=inputs)
        order = simulate(ir.from_proto(proto).graph)
        assert order_graphs.ran(events) == [nodes[i].name for i in order]


def test_empty_graph():
    graph = model_of("g (float[4] x) => (float[4] x) {}").graph
    assert default_order(graph) == priority_order(graph) == []


def test_tensors_of_more_than_2_to_the_63_bytes_have_a_place():
    """Nine dimensions without a number, 128 each."""
    axes = ", ".join(f"d{i}" for i in range(9))
    model = proto_of(
        f"g (float[{axes}] x) => (float[{axes}] y) {{ h = Add(x, x) y = Relu(h) }}"
    )
    report = ortplugins.optimize(model, passes=["shape_size_reorder"]).report
    assert not any(
        "failed" in str(remark.reason) for item in report.passes for remark in item.remarks
    )


@pytest.mark.parametrize("bake", [False, True])
def test_the_order_of_the_file_is_not_lost_where_onnxruntime_optimises_it(tmp_path, bake):
    onnx.save(GRAPHS["gradient"](), tmp_path / "model.onnx")
    so = onnxruntime.SessionOptions()
    ortplugins.configure(so, ortplugins.ShapeSizeReorder(), bake=bake)
    session = ortplugins.InferenceSession(tmp_path / "model.onnx", so, providers=CPU)
    (peaks,) = (x.reason for x in session.ortplugins_report.fired if x.node == "graph")
    ours, default, _ = map(float, re.findall(r"([0-9.]+) MB", peaks))
    assert ours < 0.5 * default
