# SPDX-License-Identifier: MIT
"""PrepackedWeights: records, the data file's layout, and sessions that map what was packed."""

import itertools
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import pytest
from builders.dequantized_models import DequantizedMatMul, relative_error, run
from builders.sessions import CPU, EXACT, options, start
from builders.text_cases import assert_page_has, markdown
from builders.text_models import Array, add_weights, graphs, normal, proto_of
from onnx import helper

import ortplugins
from benchmarks.models.int4_chain import write_chain
from ortplugins import DqMatMulNBitsFusion, PrepackedWeights
from ortplugins.measurement.measure import Candidate, measure
from ortplugins.runtime.child_process import child_environment
from rewrite_rules.prepacked_weights import prepack as prepack_module
from rewrite_rules.prepacked_weights.packed_operands import PACKED_OPERANDS
from rewrite_rules.prepacked_weights.prepack import prepack
from rewrite_rules.prepacked_weights.records import (
    Record,
    drop_records,
    read_records,
    restore_order,
)
from rewrite_rules.prepacked_weights.records import places as places_of
from rewrite_rules.remarks import Outcome, PassContext, Remark, Remarks
from session_options.plan import entries_of

CASE = DequantizedMatMul(128, 64, 32)
MIB = 1 << 20
node = helper.make_node


# The layout.


def graph_of(nodes: Sequence[onnx.NodeProto] = ()) -> onnx.GraphProto:
    return helper.make_graph(nodes, "test", [], [])


def model_of(graph: onnx.GraphProto) -> onnx.ModelProto:
    return helper.make_model(graph)


Pieces = list[tuple[str, int, int]]


def pieces(model: onnx.ModelProto) -> Pieces:
    """Every tensor and blob: a name for it, offset and length, in the order of the model."""
    found: Pieces = []
    for number, graph in enumerate(graphs(model)):
        for tensor in graph.initializer:
            name = f"{number}/{tensor.name}"
            entries = {entry.key: entry.value for entry in tensor.external_data}
            if not entries:
                continue
            found.append((name, int(entries["offset"]), int(entries["length"])))
            for key, text in entries.items():
                if key.startswith("prepacked_"):
                    blobs = Record.parse(key, text).blobs
                    found += [(f"{name}.{key}.{i}", b[0], b[1]) for i, b in enumerate(blobs)]
    return found


def tensors_by_offset(model: onnx.ModelProto) -> list[str]:
    """Those that have blobs, in their order in the file; each is followed by its blobs."""
    found = sorted(pieces(model), key=lambda piece: piece[1])
    names = [name for name, *_ in found]
    blobs = [name for name in names if "prepacked" in name]
    assert all(
        before.partition(".prepacked")[0] == name.partition(".prepacked")[0]
        for before, name in itertools.pairwise(names)
        if name in blobs
    )
    return list(dict.fromkeys(name.partition(".prepacked")[0] for name in blobs))


def test_nodes_go_back_to_their_order():
    def model(order: str, body: str) -> onnx.ModelProto:
        nodes = [node("Op", ["x"], [name]) for name in order]
        inner = graph_of(nodes=[node("Op", ["x"], [name]) for name in body])
        nodes.append(node("If", ["c"], ["y"], then_branch=inner, else_branch=graph_of()))
        return model_of(graph_of(nodes=nodes))

    source = model("abc", "def")
    changed = model("cab", "fed")
    restore_order(changed, source)
    assert changed == source
    # Nodes that onnxruntime put in are where it wants them.
    changed = model("cNab", "fed")
    restore_order(changed, source)
    assert changed == model("cNab", "def")


# The pass on files.


def save(model: onnx.ModelProto, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = f"{path.name}.data"
    ir.save(ir.from_proto(model), path, external_data=data, size_threshold_bytes=1024)
    return path


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A model of one MatMul of 64 inputs, alone in its folder."""
    text = "g (float[r, 64] x) => (float[r, 64] y) { [matmul] y = MatMul(x, w) }"
    return save(proto_of(text, {"w": normal(64, 64)}), tmp_path / "m" / "model.onnx")


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def pack(
    path: Path, *, providers: Sequence[str] = CPU, final: bool = True
) -> tuple[Outcome, str]:
    """Run the pass; return its last remark."""
    remark = remarks_of(path, providers=providers, final=final)[-1]
    return remark.outcome, remark.reason


def remarks_of(path: Path, providers: Sequence[str] = CPU, final: bool = True) -> list[Remark]:
    remarks = Remarks("prepacked_weights")
    child = sys.executable, child_environment("prepacked_weights")
    context = PassContext(remarks, providers, final_graph=final, child_python=child)
    prepack(path, context)
    assert not list(path.parent.glob(".*")), "scratch files are gone"
    return [*remarks]


def all_in_use(reason: str) -> int:
    match = re.search(r"(\d+) of (\d+) blobs in use", reason)
    assert match is not None, reason
    assert match[1] == match[2], reason
    return int(match[2])


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"providers": ["CUDAExecutionProvider", *CPU]}, "only for the CPU, not for CUDA"),
        ({"final": False}, "ortplugins.bake=1"),
    ],
)
def test_models_that_are_left_alone(small, arguments, reason):
    before = contents(small.parent)
    outcome, said = pack(small, **arguments)
    assert outcome is Outcome.REFUSED
    assert reason in said
    assert contents(small.parent) == before


def test_what_no_session_uses_is_not_kept(small, monkeypatch):
    before = contents(small.parent)
    real, unused = prepack_module._run_child, {"in_use": 0, "recorded": 2}
    monkeypatch.setattr(prepack_module, "_run_child", lambda *a: {**real(*a), **unused})
    assert "a session uses none of 2 blobs" in pack(small)[1]
    assert contents(small.parent) == before


def test_what_has_no_row_stays_on_the_heap(small, monkeypatch):
    real, others = prepack_module._run_child, {"without_row": ["moe/w1", "moe/w2"]}
    monkeypatch.setattr(prepack_module, "_run_child", lambda *a: {**real(*a), **others})
    note, fired = remarks_of(small)
    assert (note.outcome, fired.outcome) == (Outcome.NOTE, Outcome.FIRED)
    assert "2 packed weights stay on the heap, 'moe/w1' first" in note.reason
    packed = onnx.load(small, load_external_data=False)
    places = places_of(packed)
    drop_records(packed, kept=[("w",)])
    assert read_records(packed).keys() == {("w",)}
    drop_records(packed, kept=[])
    assert read_records(packed) == {} and places_of(packed) == places


def codes(*shape: int, dtype: type = np.uint8) -> Array:
    return np.random.default_rng(0).integers(0, 100, shape).astype(dtype)


def int8(*shape: int) -> Array:
    return codes(*shape, dtype=np.int8)


PAGE = Path(__file__).parents[3] / "docs" / "prepacked-weights.md"
MS = "com.microsoft."
RECURRENT = "<hidden_size = 32> (sequence, {w}, {r})"
# One of each kernel that onnxruntime packs weights for (1.31 on x64): its call, the weights.
KERNELS: dict[str, tuple[str, dict[str, Array]]] = {
    "MatMul": ("(x, {w})", {"w": normal(64, 48)}),
    "Gemm": ("<transB = 1> (x, {w}, {b})", {"w": normal(48, 64), "b": normal(48)}),
    f"{MS}FusedMatMul": ("<alpha = 0.5> (x, {w})", {"w": normal(64, 48)}),
    f"{MS}FusedGemm": ('<activation = "Relu"> (x, {w})', {"w": normal(64, 48)}),
    "Conv": ("(image, {w})", {"w": normal(16, 8, 3, 3)}),
    "ConvTranspose": ("(image, {w})", {"w": normal(8, 16, 3, 3)}),
    "LSTM": (RECURRENT, {"w": normal(1, 128, 64), "r": normal(1, 128, 32)}),
    "GRU": (RECURRENT, {"w": normal(1, 96, 64), "r": normal(1, 96, 32)}),
    f"{MS}DynamicQuantizeMatMul": ("(x, {w}, s, z)", {"w": codes(64, 48)}),
    "MatMulInteger": ("(q, {w}, qz)", {"w": codes(64, 48)}),
    f"{MS}MatMulIntegerToFloat": ("(q, {w}, qs, s, qz)", {"w": codes(64, 48)}),
    "QLinearMatMul": ("(q, qs, qz, {w}, s, z, s, z)", {"w": codes(64, 48)}),
    f"{MS}QGemm": ("(q, qs, qz, {w}, s, z, , s, z)", {"w": codes(64, 48)}),
    "QLinearConv": ("(i, s, z, {w}, s, z, s, z)", {"w": codes(16, 8, 3, 3)}),
    f"{MS}DynamicQuantizeLSTM": (
        "<hidden_size = 32> (sequence, {w}, {r}, , , , , , s1, z1, s1, z1)",
        {"w": int8(1, 64, 128), "r": int8(1, 32, 128)},
    ),
    f"{MS}Attention": (
        "<num_heads = 4> (sequence, {w}, {b})",
        {"w": normal(64, 96), "b": normal(96)},
    ),
    f"{MS}QAttention": (
        "<num_heads = 4> (p, {w}, {b}, ps, s, , pz, z8)",
        {"w": int8(64, 96), "b": normal(96)},
    ),
    f"{MS}MatMulNBits": (
        "<K = 64, N = 48, block_size = 32, bits = 4> (x, {w}, {s})",
        {"w": codes(48, 2, 16), "s": normal(48, 2)},
    ),
}
OUTPUT_TYPES = {"MatMulInteger": "int32"} | dict.fromkeys(
    ("QLinearMatMul", f"{MS}QGemm", "QLinearConv"), "uint8"
)


def kernels() -> onnx.ModelProto:
    weights: dict[str, npt.ArrayLike] = {"s": np.float32(0.01), "z": np.uint8(128)}
    weights |= {"s1": np.full(1, 0.01, np.float32), "z1": int8(1) * 0, "z8": np.int8(0)}
    lines, outputs = [], []
    for kernel, (call, own) in KERNELS.items():
        op_type = kernel.removeprefix(MS)
        places = {name: f"{op_type}_{name}" for name in own}
        weights |= {places[name]: array for name, array in own.items()}
        lines.append(f"[{op_type}] y_{op_type} = {kernel} {call.format(**places)}")
        outputs.append(f"{OUTPUT_TYPES.get(kernel, 'float')}[] y_{op_type}")
    # Another kernel of the same weight.
    lines.append("[shared] y_shared = Gemm (x, MatMul_w)")
    outputs.append("float[] y_shared")
    inputs = "float[2, 64] x, float[1, 8, 9, 9] image, float[3, 2, 64] sequence"
    return proto_of(
        f"""g ({inputs}) => ({", ".join(outputs)}) {{
            q, qs, qz = DynamicQuantizeLinear(x)
            p, ps, pz = DynamicQuantizeLinear(sequence)
            i = QuantizeLinear(image, s, z)
            {" ".join(lines)}
        }}""",
        weights,
    )


# Of every onnxruntime that we know, on every processor.
_ALWAYS_PACKED = {"MatMul", "Gemm", "LSTM", "GRU"}


def test_each_row_is_packed_and_on_the_page():
    built = {(kernel.removeprefix(MS), MS[:-1] * (MS in kernel)) for kernel in KERNELS}
    # Convolutions are packed in float16, by processors that have it.
    assert PACKED_OPERANDS.keys() - built == {("FusedConv", "com.microsoft")}
    assert built <= PACKED_OPERANDS.keys()
    rows = [
        (f"`{domain + '.' * bool(domain)}{op_type}`", ", ".join(map(str, inputs)))
        for (op_type, domain), inputs in PACKED_OPERANDS.items()
    ]
    assert_page_has(PAGE, markdown(rows))


def test_everything_that_onnxruntime_packs(tmp_path):
    model = kernels()
    path = save(model, tmp_path / "m" / "model.onnx")
    shapes = {"x": (2, 64), "image": (1, 8, 9, 9), "sequence": (3, 2, 64)}
    feeds = {name: normal(*shape) for name, shape in shapes.items()}
    expected = run(str(path), feeds)
    order = [n.name for n in model.graph.node]
    outcome, reason = pack(path)
    assert outcome is Outcome.FIRED
    packed = onnx.load(path, load_external_data=False)
    records = read_records(packed)
    assert all_in_use(reason) == sum(map(len, records.values()))
    assert len(records["MatMul_w",]) == 2
    found = {r.kernel.partition("+")[0] for each in records.values() for r in each}
    assert found >= _ALWAYS_PACKED
    if sys.platform == "linux" and os.uname().machine == "x86_64":
        assert found >= {n.op_type for n in model.graph.node if n.name} - {"Conv"}
    assert [n.name for n in packed.graph.node] == order
    assert sorted(contents(path.parent)) == ["model.onnx", "model.onnx.data"]
    for name, offset, length in pieces(packed):
        assert offset % (4096 if length >= MIB else 64) == 0, name
    used = dict.fromkeys(name for node in packed.graph.node for name in node.input)
    assert tensors_by_offset(packed) == [f"0/{name}" for name in used if (name,) in records]
    np.testing.assert_equal(run(str(path), feeds), expected)
    for actual, wanted in zip(run(str(path), feeds, optimised=True), expected, strict=True):
        # Other optimisers, other kernels: as close as integers in between allow.
        np.testing.assert_allclose(
            actual.astype(np.float64), wanted.astype(np.float64), rtol=1e-3, atol=1e-3
        )


# Both branches have a weight of this name, and read one of the outer graph.
BRANCHES = """g (float[r, 64] x, bool flag) => (float[r, 64] y) {
    h = If (flag) <
        then_branch = t () => (float[r, 64] u) { a = MatMul(x, w) u = MatMul(a, shared) },
        else_branch = e () => (float[r, 64] v) { b = MatMul(x, w) v = MatMul(b, shared) }
    >
    i = MatMul(h, shared)
    y = MatMul(i, shared)
}"""
LOOP = """g (float[2, 64] x, bool flag) => (float[2, 64] y) {
    y = Loop (times, , x) <body = b (int64 i, bool c, float[2, 64] v)
        => (bool k, float[2, 64] n) { n = MatMul(v, w) k = Identity(c) }>
}"""


@pytest.mark.parametrize(
    ("text", "tensors"), [(BRANCHES, ["1/w", "0/shared", "2/w"]), (LOOP, ["1/w"])]
)
def test_weights_of_bodies_and_of_the_graph_around_them(text, tensors, tmp_path):
    model = proto_of(text, {"shared": normal(64, 64, seed=3), "times": np.array(3)})
    for seed, attribute in enumerate(model.graph.node[0].attribute):
        add_weights(attribute.g, {"w": normal(64, 64, seed=seed) / 8})
    path = save(model, tmp_path / "m" / "model.onnx")
    outcome, reason = pack(path)
    assert outcome is Outcome.FIRED
    assert all_in_use(reason) == len(tensors)
    assert tensors_by_offset(onnx.load(path, load_external_data=False)) == tensors
    for flag in (True, False):
        feeds = {"x": normal(2, 64, seed=9), "flag": np.array(flag)}
        np.testing.assert_equal(run(str(path), feeds), run(model, feeds))


@pytest.mark.parametrize("with_length", [True, False])
def test_a_tensor_that_is_the_beginning_of_another_stays_one(with_length, tmp_path):
    text = """g (float[r, 64] x) => (float[r, 72] y) {
        a = MatMul(x, start)  b = MatMul(x, w)  y = Concat <axis = 1> (a, b) }"""
    path = save(proto_of(text, {"w": normal(64, 64)}), tmp_path / "m" / "model.onnx")
    model = onnx.load(path, load_external_data=False)
    (whole,) = model.graph.initializer
    start = onnx.TensorProto()
    start.CopyFrom(whole)
    start.name, start.dims[:] = "start", [64, 8]
    next(e for e in start.external_data if e.key == "length").value = str(4 * 64 * 8)
    model.graph.initializer.append(start)
    for tensor in [] if with_length else model.graph.initializer:
        tensor.external_data.remove(next(e for e in tensor.external_data if e.key == "length"))
    path.write_bytes(model.SerializeToString())
    feeds = {"x": normal(2, 64, seed=9)}
    expected = run(str(path), feeds)
    assert pack(path)[0] is Outcome.FIRED
    np.testing.assert_equal(run(str(path), feeds), expected)


# The pass in sessions.


BOTH = EXACT, PrepackedWeights()


def said(session: ortplugins.InferenceSession) -> tuple[Outcome, str]:
    remarks = session.ortplugins_report.remarks
    (remark,) = (r for r in remarks if r.pass_name == PrepackedWeights.name)
    return remark.outcome, remark.reason


@pytest.mark.parametrize("accuracy_level", [0, 4])
def test_outputs_are_those_without_blobs(model_path, accuracy_level):
    fusion = DqMatMulNBitsFusion(accuracy_level=accuracy_level)
    plain = start(model_path, options(fusion))
    so = options(fusion, PrepackedWeights())
    for source in ("built", "cache"):
        session = start(model_path, so)
        assert session.ortplugins_report.source == source
        outcome, reason = said(session)
        assert outcome is Outcome.FIRED
        assert all_in_use(reason) == 1
        feeds = {"x": CASE.feed()}
        np.testing.assert_equal(session.run(None, feeds), plain.run(None, feeds))
    path = Path(session.ortplugins_report.artifact)
    assert all(read_records(onnx.load(path, load_external_data=False)).values())


# optimize().


# The last three are names of scratch files.
@pytest.mark.parametrize("name", ["out", "packed", "final", "again"])
def test_a_file_says_what_its_sessions_need(model_path, tmp_path, name):
    output = tmp_path / "out" / f"{name}.onnx"
    output.parent.mkdir()
    result = ortplugins.optimize(model_path, output, passes=BOTH, bake=True)
    (note,) = (item for item in result.report.notes if "graph_optimization_level" in item)
    assert "need graph_optimization_level = ORT_DISABLE_ALL" in note
    (remark,) = (r for r in result.report.remarks if r.pass_name == PrepackedWeights.name)
    assert all_in_use(remark.reason) == 1
    assert sorted(contents(output.parent)) == [f"{name}.onnx", f"{name}.onnx.data"]
    feeds = {"x": CASE.feed()}
    for optimised in (False, True):
        (y,) = run(str(output), feeds, optimised=optimised)
        assert relative_error(y, CASE.reference(feeds["x"])) <= 1e-5


# Memory.


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="no /proc to measure with")
def test_packed_weights_are_not_on_the_heap(tmp_path):
    path = tmp_path / "chain.onnx"
    assert write_chain(path, 5, 1024, 4096, "axis0") > 20e6

    fusion, packing = DqMatMulNBitsFusion.name, PrepackedWeights.name
    options, cache = {f"{fusion}.accuracy_level": "0"}, str(tmp_path / "cache")
    plain, packed = measure(
        [
            Candidate(path, settings=entries_of(names, options, cache_dir=cache))
            for names in ([fusion], [fusion, packing])
        ],
        rounds=4,
        warmed=True,
    )
    assert plain.started_private and packed.started_private and packed.report
    artifact = packed.report["artifact"]
    records = read_records(onnx.load(artifact, load_external_data=False))
    blob_bytes = sum(b[1] for found in records.values() for r in found for b in r.blobs)
    assert blob_bytes > 20e6
    # Packing frees what it has compared; in some processes glibc keeps that for who asks next.
    saved = min(plain.started_private.values) - min(packed.started_private.values)
    assert saved >= 0.5 * blob_bytes
