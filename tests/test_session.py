# SPDX-License-Identifier: MIT
"""ortplugins.InferenceSession: stock without our entries, optimised and cached with them."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from builders.dequantized_models import DequantizedMatMul, relative_error, run

import ortplugins
import session_options.registry
from ortplugins import DqMatMulNBitsFusion, OrtpluginsWarning
from rewrite_rules.remarks import PassContext

CASE = DequantizedMatMul(128, 64, 32, "int4", "transposed")
CPU = ["CPUExecutionProvider"]


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    ir.save(CASE.model(), path, external_data="model.onnx.data")
    return path


def options(*passes: ortplugins.Pass, **general: bool | str) -> ort.SessionOptions:
    so = ort.SessionOptions()
    so.intra_op_num_threads = 1
    ortplugins.configure(so, *(passes or (DqMatMulNBitsFusion(),)), **general)
    return so


def check(session: ort.InferenceSession, case: DequantizedMatMul = CASE) -> None:
    feed = case.feed()
    (y,) = session.run(None, {"x": feed})
    assert relative_error(y, case.reference(feed)) <= 1e-5


# What a user sees.


def test_first_start_builds_and_second_takes_it_from_the_cache(
    model_path: Path, cache_dir: Path
):
    first = ortplugins.InferenceSession(model_path, options(), providers=CPU)
    second = ortplugins.InferenceSession(model_path, options(), providers=CPU)
    assert first.ortplugins_report.source == "built"
    assert second.ortplugins_report.source == "cache"
    assert len(second.ortplugins_report.fired) == 1
    assert second.ortplugins_report.remarks == first.ortplugins_report.remarks
    feed = {"x": CASE.feed()}
    np.testing.assert_array_equal(first.run(None, feed)[0], second.run(None, feed)[0])
    check(second)
    assert len(list((cache_dir / "entries").iterdir())) == 1


def test_it_is_a_stock_session_in_every_other_respect(model_path: Path):
    session = ortplugins.InferenceSession(model_path, options(), providers=CPU)
    stock = ort.InferenceSession(model_path, providers=CPU)
    assert isinstance(session, ort.InferenceSession)
    for mine, theirs in zip(session.get_inputs(), stock.get_inputs(), strict=True):
        assert (mine.name, mine.shape, mine.type) == (theirs.name, theirs.shape, theirs.type)
    for mine, theirs in zip(session.get_outputs(), stock.get_outputs(), strict=True):
        assert (mine.name, mine.shape, mine.type) == (theirs.name, theirs.shape, theirs.type)
    assert session.get_providers() == stock.get_providers()


def test_metadata_survives(tmp_path: Path):
    model = CASE.model()
    model.metadata_props["author"] = "me"
    model.producer_name = "exporter"
    ir.save(model, tmp_path / "m.onnx")
    for _ in range(2):
        session = ortplugins.InferenceSession(tmp_path / "m.onnx", options(), providers=CPU)
        assert session.get_modelmeta().custom_metadata_map["author"] == "me"
        assert session.get_modelmeta().producer_name == "exporter"
        assert session.get_modelmeta().graph_name == "test"


@pytest.mark.parametrize("bake", [True, False])
def test_baked_and_not_baked_give_the_same_numbers(model_path: Path, bake: bool):
    for _ in range(2):
        check(ortplugins.InferenceSession(model_path, options(bake=bake), providers=CPU))


def test_untouched_options_give_the_stock_session(model_path: Path, cache_dir: Path):
    for so in (None, ort.SessionOptions()):
        session = ortplugins.InferenceSession(model_path, so, providers=CPU)
        assert session.ortplugins_report.source == "stock"
        assert str(session.ortplugins_report) == "stock: no pass ran"
    assert not cache_dir.exists()


def test_arguments_by_position_as_onnxruntime_has_them(model_path: Path):
    session = ortplugins.InferenceSession(
        str(model_path), options(), CPU, [{}], enable_fallback=0
    )
    check(session)


def test_bytes_without_external_data():
    content = ir.to_proto(CASE.model()).SerializeToString()
    for source in ("built", "cache"):
        session = ortplugins.InferenceSession(content, options(), providers=CPU)
        assert session.ortplugins_report.source == source
        check(session)


def test_bytes_with_external_data(model_path: Path):
    so = options()
    key = "session.model_external_initializers_file_folder_path"
    so.add_session_config_entry(key, str(model_path.parent))
    for source in ("built", "cache"):
        session = ortplugins.InferenceSession(model_path.read_bytes(), so, providers=CPU)
        assert session.ortplugins_report.source == source
        check(session)


def test_options_come_back_as_they_went_in(model_path: Path):
    so = options()
    so.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    for _ in range(2):
        ortplugins.InferenceSession(model_path, so, providers=CPU)
        assert so.graph_optimization_level == ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED


def test_the_sessions_own_options_reach_the_session(model_path: Path, tmp_path: Path):
    so = options()
    so.enable_profiling = True
    so.profile_file_prefix = str(tmp_path / "profile")
    session = ortplugins.InferenceSession(model_path, so, providers=CPU)
    check(session)
    profile = json.loads(Path(session.end_profiling()).read_text())
    assert any(event.get("args", {}).get("op_name") == "MatMulNBits" for event in profile)


@pytest.mark.parametrize("level", list(ort.GraphOptimizationLevel.__members__))
def test_every_optimisation_level(model_path: Path, level: str):
    so = options()
    so.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    for _ in range(2):
        check(ortplugins.InferenceSession(model_path, so, providers=CPU))


def test_the_report_is_text_and_json(model_path: Path):
    report = ortplugins.InferenceSession(
        model_path, options(), providers=CPU
    ).ortplugins_report
    assert str(report) == "built: fired 1, refused 0"
    fate = "matmul: DequantizeLinear 'dq': int4 [64, 128], axis 1, block 32 -> MatMulNBits"
    assert fate in report.to_text()
    assert ortplugins.Report.from_json(report.to_json()) == report


def test_a_refusal_is_told_and_the_original_runs(tmp_path: Path, cache_dir: Path):
    case = DequantizedMatMul(1024, 8, 24)
    ir.save(case.model(), tmp_path / "m.onnx", external_data="m.data")
    for _ in range(2):
        session = ortplugins.InferenceSession(tmp_path / "m.onnx", options(), providers=CPU)
        report = session.ortplugins_report
        assert (report.source, len(report.fired)) == ("untouched", 0)
        assert "block_size 24 of weight 'w' is no power of 2" in str(report)
        check(session, case)
    # What is not rewritten is not copied either.
    assert [p.name for p in cache_dir.rglob("model.onnx*")] == []


def test_set_providers_starts_again_from_the_model(model_path: Path):
    session = ortplugins.InferenceSession(model_path, options(), providers=CPU)
    session.set_providers(CPU)
    assert session.ortplugins_report.source == "cache"
    check(session)


def test_threads_that_share_options(tmp_path: Path, cache_dir: Path):
    """Two models, one options object: none of the threads sees what another one borrowed."""
    cases = [CASE, dataclasses.replace(CASE, seed=7)]
    contents = []
    for number, case in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        ir.save(case.model(), folder / "model.onnx", external_data="model.onnx.data")
        contents.append((case, folder))
    so = options()

    def start(which: int) -> None:
        case, folder = contents[which % 2]
        for _ in range(10):
            session = ortplugins.InferenceSession(folder / "model.onnx", so, providers=CPU)
            assert session.ortplugins_report.source in ("built", "cache")
            check(session, case)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(start, range(8)))
    assert so.graph_optimization_level == ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    manifests = [json.loads(p.read_text()) for p in cache_dir.glob("entries/*/manifest.json")]
    assert sorted(manifest["model"] for manifest in manifests) == sorted(
        str(folder / "model.onnx") for _, folder in contents
    )


def test_a_session_outlives_the_models_file(model_path: Path):
    session = ortplugins.InferenceSession(model_path, options(), providers=CPU)
    for file in model_path.parent.iterdir():
        file.unlink()
    check(session)


# What decides about an entry.


def start(path: Path, so: ort.SessionOptions | None = None, **kwargs: object) -> str:
    session = ortplugins.InferenceSession(path, so or options(), providers=CPU, **kwargs)
    return session.ortplugins_report.source


def test_another_model_in_the_same_place_is_built_anew(model_path: Path):
    assert start(model_path) == "built"
    other = dataclasses.replace(CASE, seed=5)
    ir.save(other.model(), model_path, external_data="model.onnx.data")
    session = ortplugins.InferenceSession(model_path, options(), providers=CPU)
    assert session.ortplugins_report.source == "built"
    check(session, other)


def test_other_options_are_built_anew(model_path: Path):
    assert start(model_path) == "built"
    assert start(model_path, options(DqMatMulNBitsFusion(accuracy_level=4))) == "built"
    so = options()
    so.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    assert start(model_path, so) == "built"
    so = options()
    so.add_session_config_entry("session.disable_quant_qdq", "1")
    assert start(model_path, so) == "built"
    assert start(model_path, disabled_optimizers=["ConstantFolding"]) == "built"
    assert start(model_path) == "cache"


@pytest.mark.parametrize("damage", ["truncate", "empty", "delete"])
def test_a_damaged_entry_is_built_anew(model_path: Path, cache_dir: Path, damage: str):
    assert start(model_path) == "built"
    (data,) = cache_dir.glob("entries/*/model.onnx.data")
    if damage == "delete":
        data.unlink()
    else:
        data.write_bytes(data.read_bytes()[: -100 if damage == "truncate" else 0])
    session = ortplugins.InferenceSession(model_path, options(), providers=CPU)
    assert session.ortplugins_report.source == "built"
    check(session)
    assert start(model_path) == "cache"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"files": {"../x": 1}}', '{"files": 3}'])
def test_a_damaged_manifest_is_built_anew(model_path: Path, cache_dir: Path, content: str):
    assert start(model_path) == "built"
    (manifest,) = cache_dir.glob("entries/*/manifest.json")
    manifest.write_text(content)
    assert start(model_path) == "built"
    assert start(model_path) == "cache"


# When something goes wrong.


@dataclasses.dataclass(frozen=True)
class Failing(ortplugins.Pass):
    """Fails at a node."""

    name = "failing"
    summary = "fails"

    def rewrite(self, model: ir.Model, context: PassContext) -> None:
        with context.remarks.at("the_node"):
            raise KeyError("surprise")


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    builtin = (*session_options.registry.BUILTIN_PASSES, Failing)
    monkeypatch.setattr(session_options.registry, "BUILTIN_PASSES", builtin)


FAILED = "pass 'failing' failed at node 'the_node': KeyError: 'surprise'"


@pytest.mark.usefixtures("failing")
@pytest.mark.parametrize("others", [(), (DqMatMulNBitsFusion(),)])
def test_a_pass_that_fails_is_left_out_with_one_warning(
    model_path: Path, others: tuple[ortplugins.Pass, ...]
):
    so = options(Failing(), *others)
    with pytest.warns(OrtpluginsWarning) as caught:
        sessions = [ortplugins.InferenceSession(model_path, so, providers=CPU)]
    assert [FAILED in str(warning.message) for warning in caught] == [True]
    assert caught[0].filename == __file__
    # Nothing is tried again, and nobody warns again.
    sessions.append(ortplugins.InferenceSession(model_path, so, providers=CPU))
    for session, source in zip(sessions, ("built", "cache"), strict=True):
        report = session.ortplugins_report
        assert report.source == (source if others else "untouched")
        assert len(report.fired) == len(others)
        assert FAILED in str(report)
        check(session)


@pytest.mark.usefixtures("failing")
def test_a_failed_pass_is_tried_again_on_demand(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with pytest.warns(OrtpluginsWarning, match="surprise"):
        ortplugins.InferenceSession(model_path, options(Failing()), providers=CPU)
    monkeypatch.setattr(Failing, "rewrite", lambda *_: False)
    so = options(Failing())
    assert FAILED in str(
        ortplugins.InferenceSession(model_path, so, providers=CPU).ortplugins_report
    )
    so.add_session_config_entry("ortplugins.retry_failed", "1")
    for _ in range(2):
        session = ortplugins.InferenceSession(model_path, so, providers=CPU)
        assert FAILED not in str(session.ortplugins_report)


@dataclasses.dataclass(frozen=True)
class HalfDone(ortplugins.Pass):
    """Fails when it has changed something."""

    name = "half_done"
    summary = "fails late"
    position = 10

    def rewrite(self, model: ir.Model, context: PassContext) -> None:
        for node in list(model.graph)[:1]:
            model.graph.remove(node)
        raise ValueError("too late")


def test_the_others_get_the_model_as_it_was(model_path: Path, monkeypatch: pytest.MonkeyPatch):
    builtin = (*session_options.registry.BUILTIN_PASSES, HalfDone)
    monkeypatch.setattr(session_options.registry, "BUILTIN_PASSES", builtin)
    so = options(HalfDone(), DqMatMulNBitsFusion())
    with pytest.warns(OrtpluginsWarning, match="too late"):
        session = ortplugins.InferenceSession(model_path, so, providers=CPU)
    assert len(session.ortplugins_report.fired) == 1
    check(session)


@pytest.mark.usefixtures("failing")
def test_strict_raises_chained(model_path: Path):
    with pytest.raises(
        ortplugins.PassError, match="'failing' failed at node 'the_node'"
    ) as info:
        ortplugins.InferenceSession(model_path, options(Failing(), strict=True), providers=CPU)
    assert isinstance(info.value.__cause__.__cause__, KeyError)


def test_an_entry_removed_between_look_up_and_start(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
):
    import ortplugins.session.opening as module

    real = module.find_or_build

    def find_or_build(*args: object) -> object:
        artifact = real(*args)
        Path(artifact.model).unlink()
        return artifact

    monkeypatch.setattr(module, "find_or_build", find_or_build)
    with pytest.warns(OrtpluginsWarning, match="cannot be opened.*the untouched model runs"):
        session = ortplugins.InferenceSession(model_path, options(), providers=CPU)
    check(session)


def test_an_unknown_value_names_key_and_value(model_path: Path):
    so = options()
    so.add_session_config_entry("ortplugins.dq_matmulnbits_fusion.accuracy_level", "7")
    with pytest.raises(
        ortplugins.OptionError,
        match=r"ortplugins\.dq_matmulnbits_fusion\.accuracy_level is '7'",
    ):
        ortplugins.InferenceSession(model_path, so, providers=CPU)


# What is imported.


def modules_after(script: str, *args: str) -> set[str]:
    code = f"import sys\n{script}\nprint('MODULES', *sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, check=True
    )
    line = next(line for line in done.stdout.splitlines() if line.startswith("MODULES"))
    return {name.partition(".")[0] for name in line.split()[1:]}


HEAVY = {"onnx", "onnx_ir", "onnxscript", "sympy", "ml_dtypes"}
START = """
import onnxruntime as ort, ortplugins
so = ort.SessionOptions()
if sys.argv[2] == "on":
    so.add_session_config_entry("ortplugins.enable_dq_matmulnbits_fusion", "1")
session = ortplugins.InferenceSession(sys.argv[1], so, providers=["CPUExecutionProvider"])
assert session.ortplugins_report.source == sys.argv[3], session.ortplugins_report
"""


def test_a_hit_imports_none_of_onnx(model_path: Path):
    assert HEAVY & modules_after(START, str(model_path), "on", "built")
    assert not HEAVY & modules_after(START, str(model_path), "on", "cache")


def test_untouched_options_import_nothing(model_path: Path):
    assert not HEAVY & modules_after(START, str(model_path), "off", "stock")


def test_without_any_onnxruntime_there_is_one_clear_sentence():
    code = """
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name == "onnxruntime" else real(name)
import ortplugins
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (
        "ImportError: ortplugins needs one of the onnxruntime wheels: pip install"
        in done.stderr
    )


def test_the_stock_file_says_the_same_without_us(model_path: Path):
    # The toggles are harmless where the plug-ins are not installed.
    session = ort.InferenceSession(model_path, options(), providers=CPU)
    feed = CASE.feed()
    assert relative_error(session.run(None, {"x": feed})[0], CASE.reference(feed)) <= 1e-5
    assert run(onnx.load(model_path), {"x": feed})[0].shape == (3, 64)


# Options that cannot be read back.


def test_overridden_dimensions_are_respected(model_path: Path):
    for _ in range(2):
        so = options()
        so.add_free_dimension_override_by_name("rows", 3)
        session = ortplugins.InferenceSession(model_path, so, providers=CPU)
        assert session.get_inputs()[0].shape == [3, 128]
        assert len(session.ortplugins_report.fired) == 1
        assert "free dimensions are overridden" in str(session.ortplugins_report)
        check(session)
    assert start(model_path) == "cache"


def test_an_initializer_added_by_hand_is_respected(model_path: Path):
    assert start(model_path) == "built"
    other = dataclasses.replace(CASE, seed=9)
    scales = np.ascontiguousarray(other.arrays()[1].T)
    so = options()
    value = ort.OrtValue.ortvalue_from_numpy(scales)
    so.add_initializer("w_scale", value)
    stock = ort.InferenceSession(model_path, so, providers=CPU)
    session = ortplugins.InferenceSession(model_path, so, providers=CPU)
    assert "initializer 'w_scale' was added to the SessionOptions" in str(
        session.ortplugins_report
    )
    feed = {"x": CASE.feed()}
    np.testing.assert_array_equal(session.run(None, feed)[0], stock.run(None, feed)[0])


def test_looking_leaves_no_profile_behind(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    so = options()
    so.enable_profiling = True
    session = ortplugins.InferenceSession(model_path, so, providers=CPU)
    profile = Path(session.end_profiling())
    assert [path.name for path in tmp_path.glob("*.json")] == [profile.name]
    assert so.enable_profiling
