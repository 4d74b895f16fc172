# SPDX-License-Identifier: MIT
"""ortplugins.InferenceSession: stock without our entries, optimised and cached with them."""

import dataclasses
import shutil
import sys
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from builders.dequantized_models import DequantizedMatMul
from builders.processes import python
from builders.sessions import CPU, EXACT, check, options, save, source, start
from builders.text_models import proto_of
from onnxruntime.capi.onnxruntime_pybind11_state import NoSuchFile

import ortplugins
from ortplugins import OrtpluginsWarning
from ortplugins.cache.artifact import Artifact
from ortplugins.cache.folder import digest_of
from ortplugins.runtime.copied_options import running_options
from ortplugins.session import opening
from rewrite_rules.remarks import PassContext
from session_options.entries import stored

CASE = DequantizedMatMul(128, 64, 32, "int4", "transposed")


@pytest.mark.parametrize("declared", [None, [None, None], ["rows", None], [None, 64]])
def test_outputs_have_the_sizes_that_stock_reports(tmp_path, declared):
    nodes = "z = Relu (dq_out)  h = MatMul (x, z)  y = Reshape (h, both)  n = NonZero (h)"
    proto = ir.to_proto(CASE.model_of(f"{nodes}  both = Shape (h)", ["y", "n"]))
    for output, shape in zip(proto.graph.output, (declared, None), strict=True):
        kind = onnx.TensorProto.FLOAT if output.name == "y" else onnx.TensorProto.INT64
        output.CopyFrom(onnx.helper.make_tensor_value_info(output.name, kind, shape))
    onnx.save(proto, tmp_path / "m.onnx")
    stock = ort.InferenceSession(tmp_path / "m.onnx", providers=CPU)
    mine = start(tmp_path / "m.onnx")
    assert [v.shape for v in mine.get_outputs()] == [v.shape for v in stock.get_outputs()]


def test_untouched_options_give_the_stock_session(model_path, cache_dir):
    for so in (None, ort.SessionOptions()):
        session = ortplugins.InferenceSession(model_path, so, providers=CPU)
        assert str(session.ortplugins_report) == "stock: no pass ran"
    assert not cache_dir.exists()


def test_bytes_with_data_in_a_folder_of_the_options(model_path):
    key, so = "session.model_external_initializers_file_folder_path", options()
    so.add_session_config_entry(key, str(model_path.parent))
    for expected in ("built", "cache"):
        session = start(model_path.read_bytes(), so)
        assert session.ortplugins_report.source == expected
        check(session, CASE)


@pytest.mark.skipif(sys.platform == "win32", reason="keeps a folder that is in use")
def test_where_the_working_directory_is_gone(model_path, tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    check(start(model_path), CASE)
    with pytest.raises(NoSuchFile):
        start("model.onnx")
    with pytest.warns(OrtpluginsWarning, match="the untouched model runs"):
        check(start(model_path, options(cache_dir="relative")), CASE)


@pytest.mark.parametrize("bake", [True, False])
@pytest.mark.parametrize("level", list(ort.GraphOptimizationLevel.__members__))
def test_every_optimisation_level(model_path, level, bake):
    so = options(bake=bake)
    so.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    for _ in range(2):
        check(start(model_path, so), CASE)
        assert so.graph_optimization_level.name == level


def test_the_report_is_text_and_json(model_path):
    report = start(model_path).ortplugins_report
    assert str(report) == "built: fired 1, refused 0"
    fate = "matmul: DequantizeLinear 'dq': int4 [64, 128], axis 1, block 32 -> MatMulNBits"
    assert fate in report.to_text()
    assert ortplugins.Report.from_json(report.to_json()) == report
    again = start(model_path).ortplugins_report
    assert (again.source, again.remarks) == ("cache", report.remarks)


def test_a_refusal_is_reported_and_the_original_runs(tmp_path, cache_dir):
    case = DequantizedMatMul(1024, 8, 24)
    path = save(case, tmp_path / "m.onnx")
    for _ in range(2):
        session = start(path)
        report = session.ortplugins_report
        assert (report.source, len(report.fired)) == ("untouched", 0)
        assert "block_size 24 of weight 'w' is not a power of 2" in str(report)
        check(session, case)
    # What is not rewritten is not copied either.
    assert [p.name for p in cache_dir.rglob("model.onnx*")] == []


def test_an_entry_whose_file_says_nonsense_is_built_anew(model_path, cache_dir):
    """With a digest that is right."""
    start(model_path)
    (artifact,) = cache_dir.glob("entries/*/artifact")
    artifact.write_bytes(digest_of(b"3\0x\x000").encode() + b"\n3\0x\x000")
    assert [source(model_path) for _ in range(2)] == ["built", "cache"]


@dataclasses.dataclass(frozen=True)
class Failing(ortplugins.Pass):
    """Fails at a node, when it has changed something."""

    name = "failing"
    summary = "fails"
    position = 10

    def rewrite(self, model: ir.Model, context: PassContext) -> None:
        model.graph.remove(model.graph[0])
        with context.remarks.at("the_node"):
            raise KeyError("surprise")


FAILED = "pass 'failing' failed at node 'the_node': KeyError: 'surprise'"


@pytest.mark.parametrize("others", [(), (EXACT,)])
def test_a_pass_that_fails_is_left_out_with_one_warning(model_path, others):
    """The others get the model as it was."""
    so = options(Failing(), *others)
    with pytest.warns(OrtpluginsWarning) as caught:
        sessions = [ortplugins.InferenceSession(model_path, so, providers=CPU)]
    assert [FAILED in str(warning.message) for warning in caught] == [True]
    assert caught[0].filename == __file__
    # Nothing is tried again, and nobody warns again.
    sessions.append(start(model_path, so))
    for session, expected in zip(sessions, ("built", "cache"), strict=True):
        report = session.ortplugins_report
        assert report.source == (expected if others else "untouched")
        assert len(report.fired) == len(others)
        assert FAILED in str(report)
        check(session, CASE)


def test_strict_raises_chained(model_path):
    with pytest.raises(
        ortplugins.PassError, match="'failing' failed at node 'the_node'"
    ) as info:
        start(model_path, options(Failing(), strict=True))
    assert isinstance(info.value.__cause__.__cause__, KeyError)


def test_an_entry_removed_while_a_session_opens_is_built_again(model_path, monkeypatch):
    real = opening.find_entry

    def find_entry(*args: Any) -> Artifact | None:
        artifact = real(*args)
        if artifact is not None:
            shutil.rmtree(artifact.folder)
        return artifact

    assert source(model_path) == "built"
    monkeypatch.setattr(opening, "find_entry", find_entry)
    session = start(model_path)
    assert session.ortplugins_report.source == "built"
    check(session, CASE)


HEAVY = {"onnx", "onnx_ir", "onnxscript", "sympy", "ml_dtypes", "json"}
START = """
so = onnxruntime.SessionOptions()
so.add_session_config_entry("ortplugins.enable_dq_matmulnbits_fusion", "1")
session = ortplugins.InferenceSession(sys.argv[1], so, providers=["CPUExecutionProvider"])
"""
CAUGHT = """
with ortplugins.enabled():
    session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
"""


def imported(start_of_a_session: str, *arguments: object) -> tuple[str, set[str]]:
    """Open a session in a process; return its source, and what that imported."""
    code = f"""import sys, onnxruntime
before, constructor = {{*sys.modules}}, onnxruntime.InferenceSession.__init__
import ortplugins
assert onnxruntime.InferenceSession.__init__ is constructor  # whatever the variable says
{start_of_a_session}
made = {{*sys.modules}} - before
print(session.ortplugins_report.source, *made)"""
    done = python("-c", code, *arguments, ORTPLUGINS="dq_matmulnbits_fusion")
    source, *modules = done.stdout.split()
    return source, set(modules)


def test_hits_and_starts_with_nothing_to_do_import_little(model_path, tmp_path):
    source, modules = imported(START, model_path)
    assert source == "built" and {*HEAVY, "session_options.registry"} & modules
    source, modules = imported(START, model_path)
    assert (source, HEAVY & modules) == ("cache", set())
    ours = {name for name in modules if name.startswith("session_options.")}
    assert ours == {"session_options.entries"} and "ortplugins.cache.build" not in modules
    source, modules = imported(CAUGHT, model_path)
    assert (source, (HEAVY - {"json"}) & modules) == ("cache", set())
    source, modules = imported(START.replace('"1"', '"0"'), model_path)
    assert (source, HEAVY & modules) == ("stock", set())
    path = tmp_path / "float.onnx"
    onnx.save(proto_of("float (float[n] x) => (float[n] y) { y = Relu(x) }"), path)
    imported(START, path)
    source, modules = imported(START, path)
    assert (source, HEAVY & modules) == ("untouched", set())


def test_overridden_dimensions_are_respected(model_path):
    for _ in range(2):
        so = options()
        so.add_free_dimension_override_by_name("rows", 3)
        session = start(model_path, so)
        assert session.get_inputs()[0].shape == [3, 128]
        assert len(session.ortplugins_report.fired) == 1
        assert "free dimensions are overridden" in str(session.ortplugins_report)
        check(session, CASE)
    assert source(model_path) == "cache"


@pytest.mark.parametrize("entry", ["strict", "prepacked_weights.verify"])
def test_a_start_from_the_cache_refuses_invalid_entries_too(model_path, entry):
    so = options(EXACT, ortplugins.PrepackedWeights())
    assert source(model_path, so) == "built"
    so.add_session_config_entry(f"ortplugins.{entry}", "true")
    with pytest.raises(ortplugins.OptionError, match=f"{entry} is 'true'"):
        start(model_path, so)


def test_an_initializer_added_by_hand_is_respected(model_path):
    assert source(model_path) == "built"
    scales = np.ascontiguousarray(dataclasses.replace(CASE, seed=9).arrays()[1].T)
    so = options()
    value = ort.OrtValue.ortvalue_from_numpy(scales)
    so.add_initializer("w_scale", value)
    stock, session = ort.InferenceSession(model_path, so, providers=CPU), start(model_path, so)
    added = "initializer 'w_scale' was added to the SessionOptions"
    assert added in str(session.ortplugins_report)
    feed = {"x": CASE.feed()}
    np.testing.assert_array_equal(session.run(None, feed)[0], stock.run(None, feed)[0])


def test_the_options_of_a_session_can_open_another(model_path):
    opened = start(model_path)
    value = ort.OrtValue.ortvalue_from_numpy(np.zeros(1, np.float32))
    for name in ir.load(model_path).graph.initializers:
        # Refuses a name that is there already.
        opened.get_session_options().add_initializer(name, value)


@pytest.mark.parametrize(
    ("hint", "name", "default", "expected"),
    [
        ("memory", "enable_cpu_mem_arena", True, False),
        ("throughput", "session.intra_op.allow_spinning", None, "0"),
    ],
)
def test_a_hint_sets_what_the_user_has_not(
    model_path, tmp_path, hint, name, default, expected
):
    def value(so: ort.SessionOptions) -> object:
        return stored(so, name) if "." in name else getattr(so, name)

    no_weights = tmp_path / "none.onnx"
    onnx.save(proto_of("g (float[N] x) => (float[N] y) { y = Relu(x) }"), no_weights)
    for model in (model_path, no_weights):
        for _ in range(3):
            so = ort.SessionOptions()
            ortplugins.configure(so, hint=hint)
            assert value(running_options(start(model, so))) == expected
            assert value(so) == default
    if "." in name:
        so.add_session_config_entry(name, "1")
        assert value(running_options(start(model_path, so))) == "1"
