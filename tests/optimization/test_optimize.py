# SPDX-License-Identifier: MIT
"""optimize(): one model in, one file or object out."""

import dataclasses
import os
import shutil
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from builders.dequantized_models import (
    STORAGE,
    DequantizedMatMul,
    assert_same_outputs,
    op_types,
    relative_error,
    run,
)
from builders.same_numbers import session
from builders.sessions import EXACT, files
from builders.text_cases import text_cases
from builders.text_models import model_of, normal, proto_of
from hypothesis import given, settings
from hypothesis import strategies as st

import ortplugins
from ortplugins import DqMatMulNBitsFusion, ModelFileError
from ortplugins.optimization import offline_optimizers
from ortplugins.optimization.request import BuildRequest
from rewrite_rules.remarks import PassContext
from session_options import Plan

ALIASABLE = DequantizedMatMul(128, 64, 32, "uint4", "transposed", "random")


def save(case: DequantizedMatMul, folder: Path, **kwargs: object) -> Path:
    ir.save(case.model(), folder / "model.onnx", **kwargs)
    return folder / "model.onnx"


def check(path: Path | None, case: DequantizedMatMul) -> None:
    feed = case.feed()
    # float16 activations are converted at the kernel's edge: half a unit of 11 bits.
    bound = 1e-5 if case.scale_dtype is np.float32 else 1e-3
    assert relative_error(run(str(path), {"x": feed})[0], case.reference(feed)) <= bound


def test_bytes_that_fit_are_relabelled_where_they_lie(tmp_path):
    path = save(ALIASABLE, tmp_path, external_data="model.data", size_threshold_bytes=0)
    ortplugins.optimize(path, tmp_path / "out.onnx", passes=[EXACT])
    assert sorted(os.listdir(tmp_path)) == ["model.data", "model.onnx", "out.onnx"]
    check(tmp_path / "out.onnx", ALIASABLE)


WRITTEN = DequantizedMatMul(128, 256, 32)


@pytest.mark.parametrize("packs", [False, True])
def test_what_is_overwritten_is_whole_whenever_a_writer_is_cut(tmp_path, monkeypatch, packs):
    """The old model reads the old data until the new model is in its place."""
    output, real = tmp_path / "out.onnx", os.replace
    passes = [EXACT, ortplugins.PrepackedWeights()] if packs else [EXACT]
    cases = [dataclasses.replace(WRITTEN, seed=seed) for seed in range(3)]

    def write(case: DequantizedMatMul) -> None:
        model = ir.to_proto(case.model())
        ortplugins.optimize(
            model, output, passes=passes, bake=packs, external_data=True, overwrite=True
        )

    def cut(source: object, target: object) -> None:
        real(source, target) if Path(str(target)) != output else 1 / 0

    write(cases[0])
    assert sorted(os.listdir(tmp_path)) == ["out.onnx", "out.onnx.data"]
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(os, "replace", cut)
        write(cases[1])
    check(output, cases[0])
    abandoned = {*tmp_path.glob("*.data")} - {tmp_path / "out.onnx.data"}
    write(cases[2])
    check(output, cases[2])
    (data,) = {*tmp_path.glob("*.data")} - abandoned  # not the old one
    write(cases[1])
    check(output, cases[1])
    assert not data.exists()


def test_outputs_that_were_renamed_keep_their_data(tmp_path):
    cases = [dataclasses.replace(WRITTEN, seed=seed) for seed in range(4)]
    output = tmp_path / "out.onnx"
    for case in cases:
        for _ in range(2):  # the second replaces the first, and its data
            model = ir.to_proto(case.model())
            ortplugins.optimize(
                model, output, passes=[EXACT], external_data=True, overwrite=True
            )
        output.rename(tmp_path / f"{case.seed}.onnx")
    for case in cases:
        check(tmp_path / f"{case.seed}.onnx", case)
    assert len([*tmp_path.glob("*.data")]) == len(cases)


@pytest.mark.parametrize("before", [b"a model without data", b""])
def test_data_that_the_output_does_not_read_stays(tmp_path, before):
    (tmp_path / "out.onnx").write_bytes(before)
    (tmp_path / "out.onnx.data").write_bytes(b"mine")
    model = ir.to_proto(WRITTEN.model())
    ortplugins.optimize(model, tmp_path / "out.onnx", external_data=True, overwrite=True)
    assert (tmp_path / "out.onnx.data").read_bytes() == b"mine"


def test_tensors_of_a_kibibyte_or_more_go_to_the_data_file(tmp_path):
    text = "g (float x) => (float[256] y, float[255] z) { y = Add(x, a) z = Add(x, b) }"
    model = model_of(text, {"a": normal(256), "b": normal(255)})
    result = ortplugins.optimize(model, tmp_path / "out.onnx", external_data=True)
    tensors = ir.load(result.path).graph.initializers
    kinds = [isinstance(tensors[name].const_value, ir.ExternalTensor) for name in "ab"]
    assert kinds == [True, False]
    assert (tmp_path / "out.onnx.data").stat().st_size == 1024


def tied(case: DequantizedMatMul) -> ir.Model:
    """A table for Gather whose rows are the columns of a head's weight."""
    nodes = "[embed] rows = Gather (dq_rows, ids)  [head] y = MatMul (x, dq_out)"
    ids = onnx.TensorProto.INT64, ["ids"]
    return case.model_of(nodes, ("rows", "y"), ids=ids)


@pytest.mark.parametrize("zero_points", ["none", "random"])
@pytest.mark.parametrize("storage", ["int4", "uint4", "int8", "uint8"])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_tied_embedding_and_head_are_stored_once(elsewhere, storage, zero_points, tmp_path):
    case = DequantizedMatMul(256, 64, 32, storage, "transposed", zero_points)
    ir.save(tied(case), tmp_path / "model.onnx", external_data="model.data")
    output = tmp_path / "out.onnx"
    if elsewhere:
        output = tmp_path / "there" / "out.onnx"
        output.parent.mkdir()
    fusion = DqMatMulNBitsFusion(slow_kernels="fuse")
    ortplugins.optimize(tmp_path / "model.onnx", output, passes=[fusion])
    proto = onnx.load(output, load_external_data=False)
    places = {
        tensor.name: tuple(
            (entry.key, entry.value)
            for entry in tensor.external_data
            if entry.key in ("location", "offset")
        )
        for tensor in proto.graph.initializer
    }
    by_op = {node.op_type: node for node in proto.graph.node}
    assert set(by_op) == {"GatherBlockQuantized", "MatMulNBits"}
    data, codes = by_op["GatherBlockQuantized"].input[0], by_op["MatMulNBits"].input[1]
    assert data != codes
    assert places[data] == places[codes] != ()
    ids, feed = np.array([0, 63, -1, 7]), case.feed()
    rows, y = run(str(output), {"x": feed, "ids": ids})
    assert relative_error(rows, case.reference(np.eye(case.k)).T[ids]) <= 1e-6
    assert relative_error(y, case.reference(feed)) <= 1e-5


@pytest.mark.parametrize("asked", [None, True])
@pytest.mark.parametrize("external", [False, True])
def test_in_another_folder_the_output_stands_alone(external, asked, tmp_path):
    """Its data is inside or outside as the source has it, unless said otherwise."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    path = save(ALIASABLE, tmp_path / "a", external_data="model.data" if external else None)
    ortplugins.optimize(path, tmp_path / "b" / "out.onnx", external_data=asked, passes=[EXACT])
    for file in (tmp_path / "a").iterdir():
        file.unlink()
    assert len(os.listdir(tmp_path / "b")) == (2 if external or asked else 1)
    check(tmp_path / "b" / "out.onnx", ALIASABLE)


def test_without_output_each_kind_of_model_gives_its_own_and_is_not_changed(tmp_path):
    model = ALIASABLE.model()
    proto = ir.to_proto(model)
    path = save(ALIASABLE, tmp_path, external_data="model.data")
    before, files_before = proto.SerializeToString(), files(tmp_path)
    single = {"passes": "dq_matmulnbits_fusion", "providers": "CPUExecutionProvider"}
    for source, kind in ((model, ir.Model), (proto, onnx.ModelProto), (path, ir.Model)):
        result = ortplugins.optimize(source, **single if source is path else {})
        assert result.path is None
        assert isinstance(result.model, kind)
        made = result.model if kind is ir.Model else ir.from_proto(result.model)
        assert op_types(made) == ["MatMulNBits"]
    assert proto.SerializeToString() == ir.to_proto(model).SerializeToString() == before
    assert files(tmp_path) == files_before


def test_the_oldest_onnxruntime_that_a_result_runs_on():
    ortplugins.optimize(ALIASABLE.model(), onnxruntime_version="1.24")
    for text, words in (("1.23", "run on 1.24 and newer"), ("new", "'new'")):
        with pytest.raises(ortplugins.OptionError, match=words):
            ortplugins.optimize(ALIASABLE.model(), onnxruntime_version=text)


QDQ, LEVEL = "QDQSelectorActionTransformer", "session.qdq_matmulnbits_accuracy_level"


@pytest.mark.parametrize(
    ("fields", "level"),
    [
        ({}, 4),
        ({"level": "ORT_ENABLE_EXTENDED", "entries": ((LEVEL, "1"),)}, 1),
        ({"level": "ORT_ENABLE_BASIC"}, None),
        ({"level": "ORT_DISABLE_ALL"}, None),
        ({"entries": ((LEVEL, "9"),)}, None),
        ({"entries": (("session.disable_quant_qdq", "1"),)}, None),
        ({"entries": (("optimization.disable_specified_optimizers", f"A; {QDQ}"),)}, None),
        ({"disabled": (QDQ,)}, None),
    ],
)
def test_the_accuracy_level_that_onnxruntimes_own_fusion_would_choose(fields, level):
    request = BuildRequest(b"", Plan(), **fields)
    assert request.native_accuracy_level == level
    assert request.final_graph == (fields.get("level") == "ORT_DISABLE_ALL")


def test_an_existing_output_is_kept_unless_said_otherwise(tmp_path):
    path = save(ALIASABLE, tmp_path, external_data="model.data")
    output, data = tmp_path / "out" / "out.onnx", tmp_path / "out" / "out.onnx.data"
    output.parent.mkdir()
    for there in (output, data):
        there.write_text("mine")
        with pytest.raises(FileExistsError, match=f"{there.name}: exists"):
            ortplugins.optimize(path, output)
        assert {file.name: file.read_text() for file in output.parent.iterdir()} == {
            there.name: "mine"
        }
        there.unlink()
    output.write_text("mine")
    ortplugins.optimize(path, output, overwrite=True, passes=[EXACT])
    check(output, ALIASABLE)
    with pytest.raises(ModelFileError, match="is the model itself"):
        ortplugins.optimize(path, path, overwrite=True)
    with pytest.raises(IsADirectoryError, match="is a folder"):
        ortplugins.optimize(path, output.parent, overwrite=True)
    with pytest.raises(ModelFileError, match=r"\.onnx: is not UTF-8"):
        ortplugins.optimize(path, output.with_name(os.fsdecode(b"\xff.onnx")))
    os.mkfifo(pipe := output.with_name("pipe"))
    with pytest.raises(FileExistsError, match="pipe: is a device or a pipe"):
        ortplugins.optimize(path, pipe, overwrite=True)


def test_the_models_own_data_file_is_never_overwritten(tmp_path):
    path = save(ALIASABLE, tmp_path, external_data="out.onnx.data")
    before = (tmp_path / "out.onnx.data").read_bytes()
    ortplugins.optimize(path, tmp_path / "out.onnx", passes=[EXACT])
    assert (tmp_path / "out.onnx.data").read_bytes() == before
    check(tmp_path / "out.onnx", ALIASABLE)
    check(path, ALIASABLE)


def test_the_models_own_data_file_is_never_lost(tmp_path):
    output, data = tmp_path / "out.onnx", tmp_path / "out.onnx.data"
    path = save(WRITTEN, tmp_path, external_data=data.name)
    with pytest.raises(ModelFileError, match=r"\.data: is the model itself, or its data"):
        ortplugins.optimize(path, data, overwrite=True)
    shutil.copy(path, output)  # which reads the data too, but is to be replaced
    ortplugins.optimize(path, output, passes=[EXACT], external_data=True, overwrite=True)
    for model in (path, output):
        check(model, WRITTEN)


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    path = save(ALIASABLE, tmp_path, external_data="model.data")
    (tmp_path / "out").mkdir()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ir, "save", full)
    with pytest.raises(OSError, match="No space left"):
        ortplugins.optimize(path, tmp_path / "out" / "model.onnx")
    assert os.listdir(tmp_path / "out") == []


@dataclasses.dataclass(frozen=True)
class Rearranging(ortplugins.Pass):
    """Works on the graph that onnxruntime's optimisers leave."""

    name = "rearranging"
    summary = "rearranges"

    def rearrange(self, model: ir.Model, context: PassContext) -> None:
        context.remarks.fired("model", "rearranged")


@pytest.mark.parametrize("bake", [False, True])
def test_passes_run_in_order_and_tensors_are_counted(tmp_path, bake):
    path = save(DequantizedMatMul(128, 64, 32), tmp_path, external_data="model.data")
    tensors = []
    result = ortplugins.optimize(
        path,
        tmp_path / "out.onnx",
        passes=[EXACT, Rearranging()],
        bake=bake,
        progress=lambda done, total, name: tensors.append((done, total)),
    )
    assert [item.name for item in result.report.passes] == [EXACT.name, "rearranging"]
    assert op_types(result.model) == ["MatMulNBits"]
    assert bake or tensors == [(0, 2), (1, 2)]


def test_baking_without_an_output_gives_the_baked_model():
    """Its optimisers, passes that rearrange and those that finish a file have run."""
    text = "g (float[n, 4] x) => (float[n, 4] y) { a = Identity(x) b = Relu(a) y = Neg(b) }"
    passes = [Rearranging(), ortplugins.PrepackedWeights()]
    result = ortplugins.optimize(proto_of(text), passes=passes, bake=True)
    assert [node.op_type for node in result.model.graph.node] == ["Relu", "Neg"]
    fired, refused = result.report.remarks
    assert (fired.pass_name, fired.outcome.value) == ("rearranging", "fired")
    assert "no kernel of this model packs weights" in refused.reason
    assert result.session_settings["graph_optimization_level"] == "ORT_DISABLE_ALL"
    (y,) = run(result.model, {"x": np.array([[-1, 0, 2, 3]], np.float32)})
    np.testing.assert_array_equal(y, [[0, 0, -2, -3]])


@pytest.mark.parametrize("bake", [False, True])
def test_a_file_names_no_more_sizes_than_its_model(bake, tmp_path):
    """Values of like sizes share a buffer, held from the first of them to the last."""
    model = ALIASABLE.model_of("s = Relu (x)  m = MatMul (s, dq_out)  y = Relu (m)", ("y",))
    result = ortplugins.optimize(model, tmp_path / "out.onnx", passes=[EXACT], bake=bake)
    assert len(result.report.fired) == 1
    between = [node.outputs[0] for node in ir.load(result.path).graph][:-1]
    assert [value.shape for value in between] == [None] * len(between)


@pytest.mark.parametrize(("perm", "shape"), [([0, 2, 1], [2, 4, 3]), ([1, 0, 2], None)])
def test_a_baked_value_has_its_shape_back_where_its_node_is_the_same(perm, shape):
    """A node of that name with other values of its attributes makes another tensor."""
    text = """g (float[2, 3, 4] x) => (float[a, b, c] z) {}
        {{ [t] y = Transpose <perm = {}> (x) z = Neg(y) }}"""
    before = ir.from_proto(proto_of(text.format("<float[2, 4, 3] y>", [0, 2, 1])))
    after = ir.from_proto(proto_of(text.format("", perm)))
    offline_optimizers.give_shapes_back(before, after)
    found = after.graph.node("t").outputs[0].shape
    assert found == (shape if shape is None else ir.Shape(shape))


@given(
    k=st.integers(1, 300),
    n=st.integers(1, 50),
    block_size=st.sampled_from([16, 32, 64, 128, 256]),
    storage=st.sampled_from(list(STORAGE)),
    layout=st.sampled_from(["axis0", "transposed"]),
    zero_points=st.sampled_from(["none", "random", "default"]),
    scale_dtype=st.sampled_from([np.float32, np.float16]),
    slow_kernels=st.sampled_from(["fuse", "float"]),
    external=st.booleans(),
)
@settings(max_examples=40)
def test_what_is_saved_is_what_was_meant(tmp_path_factory, external, slow_kernels, **shape):
    case = DequantizedMatMul(**shape)  # type: ignore[arg-type]
    folder = tmp_path_factory.mktemp("saved")
    path = save(case, folder, external_data="d" if external else None, size_threshold_bytes=0)
    before = {file: file.read_bytes() for file in folder.iterdir()}
    fusion = DqMatMulNBitsFusion(accuracy_level=0, slow_kernels=slow_kernels)
    result = ortplugins.optimize(path, folder / "out.onnx", passes=[fusion])
    assert len(result.report.fired) == 1
    assert {file: file.read_bytes() for file in before} == before
    check(result.path, case)


def test_tiles_of_a_large_weight_join_without_a_seam(tmp_path, monkeypatch):
    monkeypatch.setattr("rewrite_rules.weights.bit_packing._TILE_BYTES", 1 << 10)
    monkeypatch.setattr("rewrite_rules.weights.bit_packing._BLOCK_ROWS", 1 << 6)
    monkeypatch.setattr("rewrite_rules.weights.dequantized_operand._CHUNK_ELEMENTS", 1 << 9)
    for storage in ("int4", "uint8"):
        for layout in ("axis0", "transposed"):
            for n in (300, 301):
                case = DequantizedMatMul(130, n, 32, storage, layout, "random")
                for kernels in ("fuse", "float"):
                    fusion = DqMatMulNBitsFusion(accuracy_level="0", slow_kernels=kernels)
                    result = ortplugins.optimize(case.model(), passes=[fusion])
                    feed = case.feed()
                    (y,) = run(result.model, {"x": feed})
                    assert relative_error(y, case.reference(feed)) <= 1e-5
    assert np.isfinite(y).all()


def constant_node_model(folder: Path, elements: int) -> Path:
    """y = x + c, c a Constant node with external data."""
    data = np.arange(elements, dtype=np.float32)
    (folder / "c.data").write_bytes(data.tobytes())
    size = f"float[{elements}]"
    model = proto_of(
        f"g ({size} x) => ({size} y) {{ [constant] c = Constant() y = Add(x, c) }}"
    )
    tensor = onnx.TensorProto(name="c", data_type=1, dims=[elements], data_location=1)
    for key, value in (("location", "c.data"), ("offset", "0"), ("length", str(data.nbytes))):
        tensor.external_data.add(key=key, value=value)
    model.graph.node[0].attribute.append(onnx.helper.make_attribute("value", tensor))
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    return folder / "model.onnx"


def test_constant_nodes_with_external_data_move_along(tmp_path):
    path = constant_node_model(tmp_path, 512)
    (tmp_path / "out").mkdir()
    result = ortplugins.optimize(path, tmp_path / "out" / "model.onnx")
    (tmp_path / "c.data").unlink()
    (y,) = run(str(result.path), {"x": np.zeros(512, np.float32)})
    np.testing.assert_array_equal(y, np.arange(512))


def test_external_data_in_other_attributes_is_refused(tmp_path):
    path = constant_node_model(tmp_path, 4)
    with pytest.raises(
        ModelFileError, match=r"attribute 'value' of node 'constant' .* external"
    ):
        ortplugins.optimize(path)


@pytest.mark.parametrize(
    "text",
    [
        """seq (float[2, 4] x) => (float[4, 4] y) {
            s = SequenceConstruct(x, x)
            y = ConcatFromSequence<axis = 0>(s)
        }""",
        """given (seq(float[2, 4]) x) => (float[a, 4] y) {
            s = Identity(x)
            y = ConcatFromSequence<axis = 0>(s)
        }""",
    ],
)
def test_sequences_stay_sequences(text, tmp_path):
    ortplugins.optimize(model_of(text, {}), tmp_path / "out.onnx")
    ones = np.ones((2, 4), np.float32)
    fed = [ones, ones] if text.startswith("given") else ones
    assert run(str(tmp_path / "out.onnx"), {"x": fed})[0].shape == (4, 4)


def test_a_sum_is_not_merged_into_the_norm_behind_it(tmp_path):
    """onnxruntime's own optimiser does that, for a kernel that is slower."""
    model = model_of(
        """g (float[2, 3, 64] x, float[2, 3, 64] y) => (float[2, 3, 64] z) {
            total = Add(x, y)
            z = LayerNormalization <axis = -1> (total, weight, bias)
        }""",
        {"weight": normal(64), "bias": normal(64, seed=1)},
    )
    ir.save(model, tmp_path / "model.onnx")
    session(str(tmp_path / "model.onnx"), optimised=True, final=tmp_path / "plain.onnx")
    # Whatever the file is called.
    ortplugins.optimize(tmp_path / "model.onnx", tmp_path / "baked.model", bake=True)
    models = [ir.load(tmp_path / name) for name in ("plain.onnx", "baked.model")]
    merged = ["SkipLayerNormalization" in op_types(model) for model in models]
    assert merged == [True, False]


READ_TWICE = text_cases(Path(__file__).with_name("read_twice.txt"))


@pytest.mark.parametrize("name", READ_TWICE)
def test_outputs_stay_where_one_constant_is_read_in_two_ways(name: str):
    case = READ_TWICE[name]
    chosen, shape, rows = (case.settings.get(key, "") for key in ("pass", "x", "i"))
    feeds = {"i": np.array([*map(int, rows.split(","))])} if rows else {}
    if shape:
        feeds = {"x": np.ones([*map(int, shape.split(","))], np.float32)}
    codes = np.random.default_rng(0).integers(0, 256, (64, 64), np.uint8)
    model = proto_of(case.nodes, {"w": codes} if "(w, s, " in case.nodes else {})
    if chosen == "shape_size_reorder":
        model.opset_import[0].domain = "ai.onnx"  # the default domain under its other name
    options = {
        "dq_matmulnbits_fusion": {"dq_matmulnbits_fusion.slow_kernels": "fuse"},
        "mixed_precision_boundaries": {"mixed_precision_boundaries.mode": "float"},
    }
    result = ortplugins.optimize(model, passes=[chosen], options=options.get(chosen, {}))
    assert_same_outputs(result.model, model, feeds, rtol=1e-5)
