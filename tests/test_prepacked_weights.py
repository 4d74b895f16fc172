# SPDX-License-Identifier: MIT
"""PrepackedWeights: records, the data file's layout, and sessions that map what was packed."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from builders.dequantized_models import DequantizedMatMul, make_model, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

import ortplugins
from benchmarks.models.int4_chain import write_chain
from ortplugins import DqMatMulNBitsFusion, PrepackedWeights
from ortplugins.runtime.child_process import child_environment
from rewrite_rules.prepacked_weights.prepack import PrepackOptions, prepack
from rewrite_rules.prepacked_weights.records import (
    Record,
    lay_out,
    places,
    read_records,
    restore_order,
)
from rewrite_rules.remarks import Outcome, PassContext, Remarks
from session_options.keys import stored

CASE = DequantizedMatMul(128, 64, 32)
CPU = ["CPUExecutionProvider"]
MIB = 1 << 20
node = helper.make_node


def floats(*shape: int, seed: int = 0) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def value(name: str, shape: Sequence[Any] | None, dtype: int = TensorProto.FLOAT) -> Any:
    return helper.make_tensor_value_info(name, dtype, shape)


def make_proto(
    nodes: Sequence[onnx.NodeProto],
    initializers: dict[str, npt.NDArray[Any]],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
) -> onnx.ModelProto:
    tensors = [numpy_helper.from_array(array, name) for name, array in initializers.items()]
    graph = helper.make_graph(nodes, "test", inputs, outputs, tensors)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


# Records.


def test_a_record_as_onnxruntime_writes_it():
    record = Record.parse("prepacked_3", "MatMulNBits+118472|16384;24702;0|65536;8;7")
    assert record.key == "prepacked_3"
    assert record.kernel == "MatMulNBits+118472"
    assert record.blobs == ((16384, 24702, "0"), (65536, 8, "7"))


_PLAIN = st.text(st.characters(exclude_characters="|;", exclude_categories=["Cs"]))


@given(
    st.text(st.characters(exclude_characters="|"), min_size=1),
    st.lists(st.tuples(st.integers(0, 2**64), st.integers(0, 2**64), _PLAIN), min_size=1).map(
        tuple
    ),
)
def test_a_records_text_is_read_back(kernel: str, blobs: tuple[tuple[int, int, str], ...]):
    record = Record("prepacked_0", kernel, blobs)
    assert Record.parse("prepacked_0", str(record)) == record


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Op+1",
        "Op+1|",
        "|1;2;0",
        "Op+1|1;2",
        "Op+1|1;2;0;4",
        "Op+1|1;2;0|",
        "Op+1|a;2;0",
        "Op+1|1;;0",
        "Op+1|1.5;2;0",
        "Op+1|-1;2;0",
        "Op+1|1;-2;0",
    ],
)
def test_a_malformed_record(text: str):
    with pytest.raises(ValueError):
        Record.parse("prepacked_0", text)


# The layout.


class Source:
    """A data file in the making; remembers what it holds, for comparison."""

    def __init__(self, folder: Path, name: str = "old.data") -> None:
        self.folder, self.name, self.content = folder, name, bytearray(b"?")
        self._random = np.random.default_rng(0)

    def put(self, size: int) -> int:
        """Append bytes, wherever the file ends; return their offset."""
        offset = len(self.content)
        self.content += self._random.bytes(size) + b"?"
        return offset

    def tensor(
        self, name: str, size: int = 40, *blobs: int, place: tuple[int, int] | None = None
    ) -> onnx.TensorProto:
        """An initializer of bytes in this file, with one record of blobs of these sizes."""
        offset, size = place or (self.put(size), size)
        entries = {"location": self.name, "offset": str(offset), "length": str(size)}
        if blobs:
            found = tuple((self.put(length), length, "0") for length in blobs)
            entries["prepacked_0"] = str(Record("prepacked_0", f"MatMul+{name}", found))
        return external(name, size, entries)

    def save(self) -> None:
        (self.folder / self.name).write_bytes(self.content)


def external(name: str, size: int, entries: dict[str, str]) -> onnx.TensorProto:
    tensor = TensorProto(name=name, data_type=TensorProto.UINT8, dims=[size])
    tensor.data_location = TensorProto.EXTERNAL
    for key, text in entries.items():
        tensor.external_data.add(key=key, value=text)
    return tensor


def graph_of(
    *tensors: onnx.TensorProto, nodes: Sequence[onnx.NodeProto] = ()
) -> onnx.GraphProto:
    return helper.make_graph(nodes, "test", [], [], tensors)


def model_of(graph: onnx.GraphProto) -> onnx.ModelProto:
    return helper.make_model(graph)


def graphs(graph: onnx.GraphProto) -> list[onnx.GraphProto]:
    bodies = [a.g for n in graph.node for a in n.attribute if a.HasField("g")]
    return [graph, *itertools.chain.from_iterable(map(graphs, bodies))]


Pieces = list[tuple[str, int, int]]


def pieces(model: onnx.ModelProto) -> Pieces:
    """Every tensor and blob: a name for it, offset and length, in the order of the model."""
    found: Pieces = []
    for number, graph in enumerate(graphs(model.graph)):
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


def check_layout(
    model: onnx.ModelProto, source: Source, same: dict[Any, object] | None = None
) -> Pieces:
    """Lay out, compare all bytes and alignments; return the pieces by their new offsets."""
    source.save()
    before = pieces(model)
    size = lay_out(model, source.folder, "new.data", places(model) if same is None else same)
    content = (source.folder / "new.data").read_bytes()
    assert len(content) == size
    after = pieces(model)
    assert [piece[0] for piece in after] == [piece[0] for piece in before]
    for (name, old, length), (_, new, new_length) in zip(before, after, strict=True):
        assert new_length == length
        assert content[new : new + length] == source.content[old : old + length], name
        assert new % (4096 if length >= MIB else 64) == 0, name
    spans = sorted({(new, length) for _, new, length in after if length})
    for (start, length), (following, _) in itertools.pairwise(spans):
        assert start + length <= following, "pieces overlap"
    return sorted(after, key=lambda piece: (piece[1], piece[2]))


def names(found: Pieces) -> list[str]:
    return [name for name, _, _ in found]


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_every_piece_is_aligned_and_holds_what_it_did(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
):
    source = Source(tmp_path_factory.mktemp("layout"))
    size = st.one_of(st.integers(1, 300), st.sampled_from([MIB - 1, MIB, MIB + 1]))
    sizes = data.draw(st.lists(st.lists(size, min_size=1, max_size=3), max_size=5))
    tensors = [source.tensor(f"t{i}", *each) for i, each in enumerate(sizes)]
    order = data.draw(st.permutations([tensor.name for tensor in tensors]))
    nodes = [node("Op", [name], [f"out{name}"]) for name in order]
    found = check_layout(model_of(graph_of(*tensors, nodes=nodes)), source)
    assert [name for name in names(found) if "." not in name] == [f"0/{n}" for n in order]


def test_a_tensor_is_followed_by_its_blobs(tmp_path: Path):
    source = Source(tmp_path)
    tensors = [source.tensor("a", 10, 20, 30), source.tensor("b", 10, 20)]
    nodes = [node("Op", ["b", "", "x"], ["y"]), node("Op", ["a", "b", "a"], ["z"])]
    found = check_layout(model_of(graph_of(*tensors, nodes=nodes)), source)
    assert names(found) == [
        "0/b",
        "0/b.prepacked_0.0",
        "0/a",
        "0/a.prepacked_0.0",
        "0/a.prepacked_0.1",
    ]


def test_several_records_of_one_tensor(tmp_path: Path):
    source = Source(tmp_path)
    tensor = source.tensor("a", 10, 20)
    record = Record("prepacked_1", "Gemm+7", ((source.put(33), 33, "0"),))
    tensor.external_data.add(key=record.key, value=str(record))
    model = model_of(graph_of(tensor))
    check_layout(model, source)
    (records,) = read_records(model).values()
    assert [record.kernel for record in records] == ["MatMul+a", "Gemm+7"]
    assert list(read_records(model)) == [("a",)]


def test_a_record_without_bytes_is_left_out(tmp_path: Path):
    source = Source(tmp_path)
    tensor = source.tensor("a", 10, 20)
    record = Record("prepacked_1", "QLinearConv+7", ((source.put(33), 33, "0"), (0, 0, "0")))
    tensor.external_data.add(key=record.key, value=str(record))
    model = model_of(graph_of(tensor))
    source.save()
    lay_out(model, source.folder, "new.data", places(model))
    (records,) = read_records(model).values()
    assert [record.kernel for record in records] == ["MatMul+a"]
    (kept,) = model.graph.initializer
    assert "prepacked_1" not in {entry.key for entry in kept.external_data}


def test_equal_places_are_written_once(tmp_path: Path):
    source = Source(tmp_path)
    first = source.tensor("a", 1000)
    offset = int(first.external_data[1].value)
    model = model_of(
        graph_of(
            first,
            source.tensor("b", place=(offset, 1000)),
            source.tensor("part", place=(offset, 900)),
        )
    )
    found = check_layout(model, source)
    offsets = {name: offset for name, offset, _ in found}
    assert offsets["0/a"] == offsets["0/b"] != offsets["0/part"]
    # Of what is not known to be equal, each has a place of its own.
    source = Source(tmp_path)
    model = model_of(graph_of(source.tensor("a", 1000), source.tensor("b", 1000)))
    assert len({offset for _, offset, _ in check_layout(model, source, {})}) == 2


def test_names_that_bodies_share_are_not_taken_for_one_another(tmp_path: Path):
    source = Source(tmp_path)
    bodies = [
        graph_of(source.tensor("w", 100, 50), nodes=[node("Op", ["w", "outer"], ["o"])])
        for _ in range(2)
    ]
    choice = node("If", ["c"], ["y"], then_branch=bodies[0], else_branch=bodies[1])
    again = node("If", ["c"], ["z"], then_branch=bodies[1], else_branch=bodies[0])
    # The second If holds the same two tensors: four initializers, two places.
    model = model_of(graph_of(source.tensor("outer"), nodes=[choice, again]))
    found = check_layout(model, source)
    assert names(found).index("0/outer") < names(found).index("2/w")
    assert len({offset for name, offset, _ in found if name.endswith("/w")}) == 2
    assert len(read_records(model)) == 4


def test_bodies_are_laid_out_at_their_node(tmp_path: Path):
    source = Source(tmp_path)
    inner = graph_of(source.tensor("in"), nodes=[node("Op", ["in", "late"], ["o"])])
    body = graph_of(
        source.tensor("unused_in_body"),
        source.tensor("w"),
        nodes=[node("Op", ["w"], ["p"]), node("Loop", ["m", "c"], ["q"], body=inner)],
    )
    model = model_of(
        graph_of(
            *(source.tensor(name) for name in ("unused", "w", "late", "first")),
            nodes=[
                node("Op", ["first"], ["a"]),
                node("If", ["c"], ["b"], then_branch=body, else_branch=graph_of()),
                node("Op", ["late", "w"], ["d"]),
            ],
        )
    )
    found = check_layout(model, source)
    assert names(found) == [  # the empty else_branch is body 1
        "0/first",
        "2/w",
        "3/in",
        "0/late",
        "2/unused_in_body",
        "0/w",
        "0/unused",
    ]


def test_what_lies_in_the_model_stays_there(tmp_path: Path):
    source = Source(tmp_path)
    inline = numpy_helper.from_array(floats(3), "inline")
    model = model_of(graph_of(inline, source.tensor("a")))
    check_layout(model, source)
    assert model.graph.initializer[0] == inline


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("offset", "2"),
        ("offset", "-1"),
        ("offset", "x"),
        ("length", "41"),
        ("length", "-1"),
        ("length", None),
        ("location", None),
        ("prepacked_0", "Op+1|0;99;0"),
        ("prepacked_0", "Op+1|41;1;0"),
        ("prepacked_0", "Op+1|-1;1;0"),
        ("prepacked_0", "garbage"),
    ],
)
def test_places_outside_the_file_are_refused(tmp_path: Path, key: str, text: str | None):
    (tmp_path / "old.data").write_bytes(bytes(41))
    entries = {"location": "old.data", "offset": "1", "length": "40", key: text}
    present = {name: entry for name, entry in entries.items() if entry is not None}
    model = model_of(graph_of(external("w", 40, present)))
    with pytest.raises(ValueError):
        lay_out(model, tmp_path, "new.data", {})


def test_a_missing_file(tmp_path: Path):
    model = model_of(graph_of(external("w", 40, {"location": "no", "length": "40"})))
    with pytest.raises(FileNotFoundError):
        lay_out(model, tmp_path, "new.data", {})


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
    ir.save(
        ir.from_proto(model),
        path,
        external_data=f"{path.name}.data",
        size_threshold_bytes=1024,
    )
    return path


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def pack(
    path: Path, *, limit_mb: int = 0, providers: Sequence[str] = CPU, final: bool = True
) -> tuple[Outcome, str]:
    """Run the pass; return its only remark."""
    remarks = Remarks("prepacked_weights")
    context = PassContext(
        remarks,
        providers,
        final_graph=final,
        child_python=(sys.executable, child_environment("prepacked_weights")),
    )
    prepack(path, PrepackOptions(limit_mb, 120), context)
    (remark,) = remarks
    assert not list(path.parent.glob(".*")), "scratch files are gone"
    return remark.outcome, remark.reason


def run_as_is(
    model: Path | onnx.ModelProto, feeds: dict[str, Any], level: str = "ORT_DISABLE_ALL"
) -> list[Any]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    source = str(model) if isinstance(model, Path) else model.SerializeToString()
    return ort.InferenceSession(source, options, providers=CPU).run(None, feeds)


def assert_equal(actual: Sequence[Any], expected: Sequence[Any]) -> None:
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def all_in_use(reason: str) -> int:
    match = re.search(r"(\d+) of (\d+) blobs in use", reason)
    assert match is not None, reason
    assert match[1] == match[2], reason
    return int(match[2])


def small() -> onnx.ModelProto:
    nodes = [node("MatMul", ["x", "w"], ["y"], name="matmul")]
    return make_proto(
        nodes, {"w": floats(64, 64)}, [value("x", ["r", 64])], [value("y", None)]
    )


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"providers": ["CUDAExecutionProvider", *CPU]}, "for the CPU only, not for CUDA"),
        ({"final": False}, "ortplugins.bake=1"),
    ],
)
def test_models_that_are_left_alone(tmp_path: Path, arguments: dict[str, Any], reason: str):
    path = save(small(), tmp_path / "m" / "model.onnx")
    before = files(path.parent)
    outcome, said = pack(path, **arguments)
    assert outcome is Outcome.REFUSED
    assert reason in said
    assert files(path.parent) == before


def test_the_limit_is_looked_at_before_and_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = save(small(), tmp_path / "m" / "model.onnx")
    with (path.parent / "model.onnx.data").open("ab") as file:
        file.truncate(MIB)  # a hole: counted, but not copied
    before = files(path.parent)
    assert "would take about 2 MB of disk, above limit_mb=2" in pack(path, limit_mb=2)[1]
    assert files(path.parent) == before
    import rewrite_rules.prepacked_weights.prepack as module

    real = module._run_child
    monkeypatch.setattr(module, "_run_child", lambda *a: {**real(*a), "data_bytes": 3_100_000})
    assert "takes 3.1 MB of disk, above limit_mb=3" in pack(path, limit_mb=3)[1]
    assert files(path.parent) == before


def kernels() -> onnx.ModelProto:
    """One of each kernel that onnxruntime packs weights for (1.31 on x64), side by side."""
    rng = np.random.default_rng(0)

    def codes(*shape: int, dtype: type = np.uint8) -> npt.NDArray[Any]:
        return rng.integers(0, 100, shape).astype(dtype)

    step, zero = np.array(0.01, np.float32), np.array(128, np.uint8)
    one_step, one_zero = np.full(1, 0.01, np.float32), np.zeros(1, np.int8)
    x, image, sequence = "x", "image", "sequence"
    ms = {"domain": "com.microsoft"}
    nodes, inits = [], {"s": step, "z": zero, "s1": one_step, "z1": one_zero}

    def add(op: str, inputs: str, weights: dict[str, Any], **attributes: Any) -> None:
        inits.update({f"{op}_{name}": array for name, array in weights.items()})
        read = [f"{op}_{name}" if name in weights else name for name in inputs.split(" ")]
        nodes.append(node(op, read, [f"y_{op}"], name=op, **attributes))

    add("MatMul", f"{x} w", {"w": floats(64, 48)})
    add("Gemm", f"{x} w b", {"w": floats(48, 64), "b": floats(48)}, transB=1)
    add("FusedMatMul", f"{x} w", {"w": floats(64, 48)}, alpha=0.5, **ms)
    add("FusedGemm", f"{x} w", {"w": floats(64, 48)}, activation="Relu", **ms)
    add("Conv", f"{image} w", {"w": floats(16, 8, 3, 3)})
    add("ConvTranspose", f"{image} w", {"w": floats(8, 16, 3, 3)})
    add("LSTM", f"{sequence} w r", {"w": floats(1, 128, 64), "r": floats(1, 128, 32)})
    add("GRU", f"{sequence} w r", {"w": floats(1, 96, 64), "r": floats(1, 96, 32)})
    for recurrent in nodes[-2:]:
        recurrent.attribute.add().CopyFrom(helper.make_attribute("hidden_size", 32))
    nodes.append(node("DynamicQuantizeLinear", [x], ["q", "qs", "qz"]))
    nodes.append(node("DynamicQuantizeLinear", [sequence], ["p", "ps", "pz"]))
    nodes.append(node("QuantizeLinear", [image, "s", "z"], ["i"]))
    add("DynamicQuantizeMatMul", f"{x} w s z", {"w": codes(64, 48)}, **ms)
    add("MatMulInteger", "q w qz", {"w": codes(64, 48)})
    add("MatMulIntegerToFloat", "q w qs s qz", {"w": codes(64, 48)}, **ms)
    add("QLinearMatMul", "q qs qz w s z s z", {"w": codes(64, 48)})
    add("QGemm", "q qs qz w s z  s z", {"w": codes(64, 48)}, **ms)
    add("QLinearConv", "i s z w s z s z", {"w": codes(16, 8, 3, 3)})
    add(
        "DynamicQuantizeLSTM",
        "sequence w r      s1 z1 s1 z1",
        {"w": codes(1, 64, 128, dtype=np.int8), "r": codes(1, 32, 128, dtype=np.int8)},
        hidden_size=32,
        **ms,
    )
    add(
        "Attention",
        f"{sequence} w b",
        {"w": floats(64, 96), "b": floats(96)},
        num_heads=4,
        **ms,
    )
    add(
        "QAttention",
        "p w b ps s  pz z8",
        {"w": codes(64, 96, dtype=np.int8), "b": floats(96)},
        num_heads=4,
        **ms,
    )
    inits["z8"] = np.zeros((), np.int8)
    add(
        "MatMulNBits",
        f"{x} w s",
        {"w": codes(48, 2, 16), "s": floats(48, 2)},
        K=64,
        N=48,
        block_size=32,
        bits=4,
        **ms,
    )
    inputs = [value(x, [2, 64]), value(image, [1, 8, 9, 9]), value(sequence, [3, 2, 64])]
    outputs = [
        value(n.output[0], None, _OUTPUT_TYPES.get(n.op_type, TensorProto.FLOAT))
        for n in nodes
        if n.output[0].startswith("y_")
    ]
    return make_proto(nodes, inits, inputs, outputs)


_OUTPUT_TYPES = {
    "MatMulInteger": TensorProto.INT32,
    "QLinearMatMul": TensorProto.UINT8,
    "QGemm": TensorProto.UINT8,
    "QLinearConv": TensorProto.UINT8,
}
# Of every onnxruntime that we know, on every processor.
_ALWAYS_PACKED = {"MatMul", "Gemm", "LSTM", "GRU"}


def test_everything_that_onnxruntime_packs(tmp_path: Path):
    model = kernels()
    path = save(model, tmp_path / "m" / "model.onnx")
    feeds = {
        "x": floats(2, 64),
        "image": floats(1, 8, 9, 9),
        "sequence": floats(3, 2, 64),
    }
    expected = run_as_is(path, feeds)
    order = [n.name for n in model.graph.node]
    outcome, reason = pack(path)
    assert outcome is Outcome.FIRED
    assert f"{len(expected)} outputs bit-equal" in reason
    packed = onnx.load(path, load_external_data=False)
    records = read_records(packed)
    assert all_in_use(reason) == sum(map(len, records.values()))
    found = {r.kernel.partition("+")[0] for each in records.values() for r in each}
    assert found >= _ALWAYS_PACKED
    if sys.platform == "linux" and os.uname().machine == "x86_64":
        assert found >= {n.op_type for n in model.graph.node if n.name} - {"Conv"}
    assert [n.name for n in packed.graph.node] == order
    assert sorted(files(path.parent)) == ["model.onnx", "model.onnx.data"]
    for name, offset, length in pieces(packed):
        assert offset % (4096 if length >= MIB else 64) == 0, name
    assert_equal(run_as_is(path, feeds), expected)
    for actual, wanted in zip(run_as_is(path, feeds, "ORT_ENABLE_ALL"), expected, strict=True):
        # Other optimisers, other kernels: as close as integers in between allow.
        np.testing.assert_allclose(
            actual.astype(np.float64), wanted.astype(np.float64), rtol=1e-3, atol=1e-3
        )


def test_weights_of_bodies_and_of_the_graph_around_them(tmp_path: Path):
    def branch(seed: int) -> onnx.GraphProto:
        # Both branches have a weight of this name, and read one of the outer graph.
        nodes = [
            node("MatMul", ["x", "w"], [f"a{seed}"]),
            node("MatMul", [f"a{seed}", "shared"], [f"o{seed}"]),
        ]
        tensor = numpy_helper.from_array(floats(64, 64, seed=seed), "w")
        return helper.make_graph(
            nodes, f"b{seed}", [], [value(f"o{seed}", ["r", 64])], [tensor]
        )

    nodes = [
        node("If", ["flag"], ["h"], then_branch=branch(1), else_branch=branch(2)),
        node("MatMul", ["h", "shared"], ["i"]),
        node("MatMul", ["i", "shared"], ["y"]),
    ]
    model = make_proto(
        nodes,
        {"shared": floats(64, 64, seed=3)},
        [value("x", ["r", 64]), value("flag", [], TensorProto.BOOL)],
        [value("y", ["r", 64])],
    )
    path = save(model, tmp_path / "m" / "model.onnx")
    outcome, reason = pack(path)
    assert outcome is Outcome.FIRED
    assert all_in_use(reason) == 3
    for flag in (True, False):
        feeds = {"x": floats(2, 64, seed=9), "flag": np.array(flag)}
        assert_equal(run_as_is(path, feeds), run_as_is(model, feeds))


def test_a_loop(tmp_path: Path):
    body = helper.make_graph(
        [node("MatMul", ["v", "w"], ["n"]), node("Identity", ["c"], ["k"])],
        "body",
        [
            value("i", [], TensorProto.INT64),
            value("c", [], TensorProto.BOOL),
            value("v", [2, 64]),
        ],
        [value("k", [], TensorProto.BOOL), value("n", [2, 64])],
        [numpy_helper.from_array(floats(64, 64) / 8, "w")],
    )
    nodes = [node("Loop", ["times", "", "x"], ["y"], body=body)]
    times = {"times": np.array(3, np.int64)}
    model = make_proto(nodes, times, [value("x", [2, 64])], [value("y", [2, 64])])
    path = save(model, tmp_path / "m" / "model.onnx")
    assert all_in_use(pack(path)[1]) == 1
    feeds = {"x": floats(2, 64, seed=9)}
    assert_equal(run_as_is(path, feeds), run_as_is(model, feeds))


def test_a_packing_that_computes_something_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # The child gets a lay_out that mixes up two tensors of equal size.
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import rewrite_rules.prepacked_weights.records as r\n"
        "real = r.lay_out\n"
        "r.lay_out = lambda m, f, n, same: real(m, f, n, dict.fromkeys(same, 'one'))\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "site")
    nodes = [node("MatMul", ["x", "w"], ["h"]), node("MatMul", ["h", "v"], ["y"])]
    weights = {"w": floats(64, 64), "v": floats(64, 64, seed=1)}
    model = make_proto(nodes, weights, [value("x", [2, 64])], [value("y", None)])
    path = save(model, tmp_path / "m" / "model.onnx")
    before = files(path.parent)
    outcome, reason = pack(path)
    assert outcome is Outcome.REFUSED
    assert "outputs ['y'] differ" in reason
    assert files(path.parent) == before


# The pass in sessions.


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    ir.save(CASE.model(), path, external_data="model.onnx.data")
    return path


def options(*passes: ortplugins.Pass, **general: Any) -> ort.SessionOptions:
    so = ort.SessionOptions()
    so.intra_op_num_threads = 1
    ortplugins.configure(
        so, *(passes or (DqMatMulNBitsFusion(accuracy_level=0), PrepackedWeights())), **general
    )
    return so


def start(
    source: Path | bytes, so: ort.SessionOptions | None = None
) -> ortplugins.InferenceSession:
    return ortplugins.InferenceSession(source, so or options(), providers=CPU)


def said(session: ortplugins.InferenceSession) -> tuple[Outcome, str]:
    """What PrepackedWeights did."""
    remarks = session.ortplugins_report.remarks
    (remark,) = (r for r in remarks if r.pass_name == PrepackedWeights.name)
    return remark.outcome, remark.reason


def check(session: ort.InferenceSession, case: DequantizedMatMul = CASE) -> None:
    feed = case.feed()
    (y,) = session.run(None, {"x": feed})
    assert relative_error(y, case.reference(feed)) <= 1e-5


@pytest.mark.parametrize("accuracy_level", [0, 4])
def test_outputs_are_those_without_blobs(model_path: Path, accuracy_level: int):
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
        assert_equal(session.run(None, feeds), plain.run(None, feeds))
    path = Path(session.ortplugins_report.artifact)
    assert all(read_records(onnx.load(path, load_external_data=False)).values())


def shared_weight() -> ir.Model:
    """Three products with one dequantised weight: three MatMulNBits on one initializer."""
    values, x = CASE.initializers(), CASE.input()
    nodes = CASE.dequantize(values)
    weight = nodes[-1].outputs[0]
    others = [ir.val(f"x{i}", ir.DataType.FLOAT, ["rows", CASE.k]) for i in range(2)]
    products = [
        ir.node("MatMul", [item, weight], name=f"m{i}") for i, item in enumerate([x, *others])
    ]
    outputs = {f"y{i}": item.outputs[0] for i, item in enumerate(products)}
    return make_model([x, *others], [*nodes, *products], values, outputs)


def test_a_weight_of_several_products_is_packed_once(tmp_path: Path):
    ir.save(shared_weight(), tmp_path / "m.onnx", external_data="m.data")
    session = start(tmp_path / "m.onnx")
    assert all_in_use(said(session)[1]) == 1
    feeds = {name: CASE.feed(i + 1) for i, name in enumerate(("x", "x0", "x1"))}
    for y, feed in zip(session.run(None, feeds), feeds.values(), strict=True):
        assert relative_error(y, CASE.reference(feed)) <= 1e-5


def test_bytes_and_a_file_of_one_model():
    content = ir.to_proto(CASE.model()).SerializeToString()
    for source in ("built", "cache"):
        session = start(content)
        assert session.ortplugins_report.source == source
        assert all_in_use(said(session)[1]) == 1
        check(session)


def test_bytes_with_external_data(model_path: Path):
    so = options()
    key = "session.model_external_initializers_file_folder_path"
    so.add_session_config_entry(key, str(model_path.parent))
    for source in ("built", "cache"):
        session = start(model_path.read_bytes(), so)
        assert session.ortplugins_report.source == source
        assert all_in_use(said(session)[1]) == 1
        check(session)
    assert stored(so, key) == str(model_path.parent)


def test_a_float_model_without_other_passes(tmp_path: Path):
    path = save(small(), tmp_path / "model.onnx")
    session = start(path, options(PrepackedWeights()))
    assert all_in_use(said(session)[1]) == 1
    feeds = {"x": floats(2, 64)}
    assert_equal(session.run(None, feeds), run_as_is(path, feeds, "ORT_ENABLE_ALL"))


def test_a_model_without_weights_to_pack(tmp_path: Path, cache_dir: Path):
    x = {"x": floats(2, 512)}
    model = make_proto(
        [node("Mul", ["x", "w"], ["y"])],
        {"w": floats(512)},
        [value("x", ["r", 512])],
        [value("y", None)],
    )
    path = save(model, tmp_path / "model.onnx")
    for _ in range(2):
        session = start(path, options(PrepackedWeights()))
        outcome, reason = said(session)
        assert outcome is Outcome.REFUSED
        assert "no kernel of this model packs weights that can be kept" in reason
        assert session.ortplugins_report.source == "untouched"
        assert_equal(session.run(None, x), run_as_is(path, x))
    assert list(cache_dir.rglob("model.onnx*")) == []


def test_without_baking_there_is_a_remark(model_path: Path):
    session = start(
        model_path,
        options(DqMatMulNBitsFusion(accuracy_level=0), PrepackedWeights(), bake=False),
    )
    outcome, reason = said(session)
    assert outcome is Outcome.REFUSED
    assert "ortplugins.bake=1" in reason
    check(session)


def test_above_the_limit_nothing_is_written(tmp_path: Path, cache_dir: Path):
    weights = {"w": floats(1024, 1024)}
    model = make_proto(
        [node("MatMul", ["x", "w"], ["y"])],
        weights,
        [value("x", [1, 1024])],
        [value("y", None)],
    )
    path = save(model, tmp_path / "model.onnx")
    session = start(path, options(PrepackedWeights(limit_mb=4)))
    outcome, reason = said(session)
    assert outcome is Outcome.REFUSED
    assert "above limit_mb=4" in reason
    assert session.ortplugins_report.source == "untouched"
    assert list(cache_dir.rglob("model.onnx*")) == []
    feeds = {"x": floats(1, 1024)}
    assert_equal(session.run(None, feeds), run_as_is(path, feeds))


@pytest.mark.parametrize("bake", [True, False])
def test_sessions_that_disable_all_optimisers(model_path: Path, bake: bool):
    so = options(DqMatMulNBitsFusion(accuracy_level=0), PrepackedWeights(), bake=bake)
    so.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = start(model_path, so)
    assert all_in_use(said(session)[1]) == 1
    check(session)


def test_overridden_dimensions(model_path: Path):
    # onnxruntime optimises again at the start: blobs or not, the numbers are right.
    so = options()
    so.add_free_dimension_override_by_name("rows", 3)
    session = start(model_path, so)
    assert session.get_inputs()[0].shape == [3, 128]
    check(session)


def test_another_processor_has_an_entry_of_its_own(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
):
    import ortplugins.optimization.request as module

    assert start(model_path).ortplugins_report.source == "built"
    monkeypatch.setattr(module, "cpu_features", lambda: "another")
    session = start(model_path)
    assert session.ortplugins_report.source == "built"
    check(session)
    monkeypatch.undo()


def attributes(so: ort.SessionOptions) -> dict[str, Any]:
    found = {name: getattr(so, name) for name in dir(so) if not name.startswith("_")}
    return {name: item for name, item in found.items() if not callable(item)}


ENTRIES = (
    "session.prepack.enable_parallel",
    "session.save_external_prepacked_constant_initializers",
    "session.optimized_model_external_initializers_file_name",
    "session.optimized_model_external_initializers_min_size_in_bytes",
    "session.model_external_initializers_file_folder_path",
    "session.disable_prepacking",
    "session.intra_op.allow_spinning",
    "ortplugins.enable_prepacked_weights",
    "ortplugins.prepacked_weights.parallel",
)


@pytest.mark.parametrize("parallel", [True, False])
def test_options_come_back_as_they_went_in(model_path: Path, parallel: bool):
    so = options(DqMatMulNBitsFusion(accuracy_level=0), PrepackedWeights(parallel=parallel))
    so.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    so.intra_op_num_threads = 2
    so.enable_mem_pattern = False
    so.add_session_config_entry("session.intra_op.allow_spinning", "0")
    before = attributes(so), {key: stored(so, key) for key in ENTRIES}
    if parallel:
        # Entries can't be removed again: "0" is onnxruntime's default.
        before[1]["session.prepack.enable_parallel"] = "0"
    for _ in range(2):
        session = start(model_path, so)
        assert all_in_use(said(session)[1]) == 1
        check(session)
        assert (attributes(so), {key: stored(so, key) for key in ENTRIES}) == before


def test_an_intact_entry_passes_the_check_of_digests(model_path: Path):
    so = options(DqMatMulNBitsFusion(accuracy_level=0), PrepackedWeights(verify="digest"))
    assert [start(model_path, so).ortplugins_report.source for _ in range(2)] == [
        "built",
        "cache",
    ]


# optimize().


@pytest.mark.parametrize(
    "name", ["out", "packed", "final", "again"]
)  # the last three: of scratch files
def test_a_file_says_what_its_sessions_need(model_path: Path, tmp_path: Path, name: str):
    output = tmp_path / "out" / f"{name}.onnx"
    output.parent.mkdir()
    result = ortplugins.optimize(
        model_path,
        output,
        passes=[DqMatMulNBitsFusion(accuracy_level=0), PrepackedWeights()],
        bake=True,
    )
    (note,) = (item for item in result.report.notes if "graph_optimization_level" in item)
    assert "need graph_optimization_level = ORT_DISABLE_ALL" in note
    (remark,) = (r for r in result.report.remarks if r.pass_name == PrepackedWeights.name)
    assert all_in_use(remark.reason) == 1
    assert sorted(files(output.parent)) == [f"{name}.onnx", f"{name}.onnx.data"]
    feeds = {"x": CASE.feed()}
    for level in ("ORT_DISABLE_ALL", "ORT_ENABLE_ALL"):
        (y,) = run_as_is(output, feeds, level)
        assert relative_error(y, CASE.reference(feeds["x"])) <= 1e-5
    check(ort.InferenceSession(output, providers=CPU))


def test_a_file_that_is_not_baked_has_no_blobs(model_path: Path, tmp_path: Path):
    output = tmp_path / "out.onnx"
    result = ortplugins.optimize(
        model_path, output, passes=[DqMatMulNBitsFusion(accuracy_level=0), PrepackedWeights()]
    )
    assert "have to run first" in str(result.report.to_text())
    assert read_records(onnx.load(output, load_external_data=False)) == {}
    check(ort.InferenceSession(output, providers=CPU))


# Memory.

RSS = """
import ctypes, json, re, sys, warnings
import onnxruntime as ort, ortplugins
so = ort.SessionOptions()
so.intra_op_num_threads = 1
passes = [ortplugins.DqMatMulNBitsFusion(accuracy_level=0)]
if sys.argv[2] == "blobs":
    passes.append(ortplugins.PrepackedWeights())
ortplugins.configure(so, *passes)
session = ortplugins.InferenceSession(sys.argv[1], so, providers=["CPUExecutionProvider"])
try:
    ctypes.CDLL(None).malloc_trim(0)
except AttributeError:
    pass
rss = int(re.search(r"RssAnon:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
print(session.ortplugins_report.source, rss * 1024, session.ortplugins_report.artifact)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="no /proc to measure with")
def test_packed_weights_are_not_on_the_heap(tmp_path: Path):
    path = tmp_path / "chain.onnx"
    assert write_chain(path, 15, 1024, 4096, "axis0") > 60e6

    def measure(kind: str) -> tuple[int, str]:
        for expected in ("built", "cache"):  # the second start is the one to measure
            command = [sys.executable, "-c", RSS, str(path), kind]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            source, rss, artifact = done.stdout.split()
            assert source == expected
        return int(rss), artifact

    without, _ = measure("plain")
    with_blobs, artifact = measure("blobs")
    records = read_records(onnx.load(artifact, load_external_data=False))
    blob_bytes = sum(b[1] for found in records.values() for r in found for b in r.blobs)
    assert blob_bytes > 60e6
    assert without - with_blobs >= 0.8 * blob_bytes
