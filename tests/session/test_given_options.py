# SPDX-License-Identifier: MIT
"""What a caller's ``SessionOptions`` hold counts as in a stock session, and stays theirs."""

import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from builders.dequantized_models import DequantizedMatMul
from builders.sessions import CPU, EXACT, options, source, start
from builders.text_models import model_of
from onnx import helper, numpy_helper

import ortplugins
from ortplugins.runtime.copied_options import CopiedOptions
from session_options.entries import stored

CASE = DequantizedMatMul(128, 64, 32, "int4", "transposed")
FEED = {"x": np.zeros((1, 128), np.float32)}
FILE = "m.onnx.data"


def folding_model(path: Path, size: int = 64) -> Path:
    """Zeros from a fused weight; added to them, three times ``c``, which is all ones."""
    codes, scales, _ = DequantizedMatMul(128, size, 32).arrays()
    model = model_of(
        f"""g (float[rows, 128] x) => (float[rows, {size}] y) {{
            w = DequantizeLinear <axis = 0, block_size = 32> (codes, scales)
            zeros = MatMul(x, w)
            threefold = Mul(c, three)
            y = Add(zeros, threefold)
        }}""",
        {
            "codes": codes.astype(ml_dtypes.int4),
            "scales": scales,
            "c": np.ones((1, size), np.float32),
            "three": np.full(1, 3, np.float32),
        },
    )
    ir.save(model, path, external_data=path.name + ".data", size_threshold_bytes=100)
    return path


SEVEN = np.full((1, 64), 7, np.float32)
KEPT = [onnxruntime.OrtValue.ortvalue_from_numpy(SEVEN)]


def add_external(so: onnxruntime.SessionOptions, path: Path) -> None:
    so.add_external_initializers(["c"], KEPT)


def sevens(path: Path) -> bytes:
    """The content of a file with sevens for ``c``."""
    ones = np.ones((1, 64), np.float32).tobytes()
    return path.read_bytes().replace(ones, SEVEN.tobytes())


def add_file(so: onnxruntime.SessionOptions, path: Path) -> None:
    changed = sevens(path.with_name(FILE))
    so.add_external_initializers_from_files_in_memory([FILE], [changed], [len(changed)])
    _buffers.append(changed)


_buffers: list[bytes] = []
GIVEN = pytest.mark.parametrize("give", [add_external, add_file])


def first(session: onnxruntime.InferenceSession) -> float:
    return float(session.run(None, FEED)[0][0, 0])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return folding_model(tmp_path / "m.onnx")


@GIVEN
@pytest.mark.parametrize("warmed", [False, True])
def test_weights_given_by_hand_count(path, give, warmed):
    """Also in a second session on the same options; others keep the artifact."""
    if warmed:
        assert first(start(path)) == 3
    so = options()
    give(so, path)
    for _ in range(2):
        session = start(path, so)
        assert first(session) == first(onnxruntime.InferenceSession(path, so, providers=CPU))
        assert first(session) == 21
        assert session.ortplugins_report.source == "untouched"
    assert first(start(path)) == 3
    assert start(path).ortplugins_report.source == "cache"


@GIVEN
def test_weights_given_to_sessions_of_others(path, give):
    so = onnxruntime.SessionOptions()
    give(so, path)
    with ortplugins.enabled(EXACT):
        assert first(onnxruntime.InferenceSession(path, providers=CPU)) == 3
        assert first(onnxruntime.InferenceSession(path, so, providers=CPU)) == 21


def test_data_that_is_in_memory_alone(path):
    so = options()
    add_file(so, path)
    os.remove(path.with_name(FILE))
    assert first(start(path, so)) == 21


ENTRIES = {
    "session.intra_op_thread_affinities": "1",
    "session.disable_cpu_ep_fallback": "1",
    "session.model_external_initializers_file_folder_path": "{folder}",
    "session.set_denormal_as_zero": "1",
    "ep.context_enable": "1",
    "ep.context_file_path": "{folder}/context.onnx",
}


def test_no_other_entry_is_taken_for_external_weights(tmp_path):
    """Nor does asking for them write what the entries ask for."""
    so = onnxruntime.SessionOptions()
    so.intra_op_num_threads = 2
    so.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    for key, text in ENTRIES.items():
        so.add_session_config_entry(key, text.format(folder=tmp_path))
    assert not CopiedOptions(so).have_external_weights()
    add_external(so, tmp_path)
    assert CopiedOptions(so).have_external_weights()
    assert list(tmp_path.iterdir()) == []


# The object stays as it is.


def test_constructing_changes_no_options(path, monkeypatch):
    """Not even while onnxruntime's own constructor runs."""
    so, seen, objects = options(ortplugins.PrepackedWeights(), EXACT), [], []
    real = onnxruntime.InferenceSession.__init__

    def spy(self: object, model: object, used: object, *args: object, **more: object) -> None:
        seen.append(so.graph_optimization_level.name)
        seen.append(stored(so, "session.disable_prepacking"))
        objects.append(used)
        real(self, model, used, *args, **more)

    monkeypatch.setattr(onnxruntime.InferenceSession, "__init__", spy)
    session = start(path, so)
    assert set(seen) == {"ORT_ENABLE_ALL", None} and so not in objects
    own = session.get_session_options()
    assert own.graph_optimization_level.name == "ORT_ENABLE_ALL"
    assert stored(own, "session.disable_prepacking") is None
    assert session._sess_options_initial is so


@pytest.mark.parametrize("overridden", [False, True])
def test_one_profile_for_one_session(path, tmp_path, overridden):
    so = options()
    so.enable_profiling, so.profile_file_prefix = True, str(tmp_path / "profile")
    if overridden:
        so.add_free_dimension_override_by_name("rows", 1)
    session = start(path, so)
    session.run(None, FEED)
    (profile,) = tmp_path.glob("profile*")
    assert str(profile) == session.end_profiling()
    assert "MatMulNBits" in profile.read_text()
    assert so.enable_profiling


WRITTEN_DATA = "session.optimized_model_external_initializers_file_name"


@pytest.mark.parametrize("kind", ["onnx", "ort"])
@pytest.mark.parametrize("in_place", [False, True])
def test_the_optimised_model_that_a_session_writes_opens(
    path, tmp_path, monkeypatch, kind, in_place
):
    if in_place:
        monkeypatch.setattr("ortplugins.optimization.build.LEAST_BYTES", 1)
    for expected in ("built", "cache"):
        so, written = options(), tmp_path / expected / f"written.{kind}"
        written.parent.mkdir()
        so.optimized_model_filepath = str(written)
        if kind == "ort":
            so.add_session_config_entry("session.save_model_format", "ORT")
        elif expected == "cache":
            so.add_session_config_entry(WRITTEN_DATA, "mine.data")
        assert source(path, so) == expected
        named = kind == "onnx" and expected == "cache"
        assert written.with_name("mine.data").exists() == named
        assert first(onnxruntime.InferenceSession(written, providers=CPU)) == 3


def test_optimisers_named_by_an_iterator_are_left_out(path, tmp_path):
    so = options()
    so.optimized_model_filepath = str(tmp_path / "written.onnx")
    ortplugins.InferenceSession(
        path, so, providers=CPU, disabled_optimizers=iter(["ConstantFolding"])
    )
    written = ir.load(tmp_path / "written.onnx")
    assert "Mul" in {node.op_type for node in written.graph}


def test_a_cancelled_start_builds_nothing(path, cache_dir):
    so = options()
    so.set_load_cancellation_flag(True)
    same_for_callers(path, sess_options=so, providers=CPU)
    assert not cache_dir.exists()


def test_a_file_about_nodes_is_about_those_of_the_original(path, tmp_path):
    so = options()
    so.add_session_config_entry("session.node_partition_config_file", str(tmp_path / "n"))
    assert source(path, so) == "untouched"


# Restarts.


class WithOwnArguments(ortplugins.InferenceSession):
    def __init__(self, path: Path) -> None:
        super().__init__(path, options(), providers=CPU)


def test_set_providers_of_a_subclass_with_other_arguments(path):
    session = WithOwnArguments(path)
    session.disable_fallback()
    session.set_providers(CPU)
    assert session.ortplugins_report.source == "cache"
    assert not session._enable_fallback
    assert first(session) == 3


def test_set_providers_names_what_is_wrong_as_onnxruntime_does(path):
    for session in (onnxruntime.InferenceSession(path, providers=CPU), start(path)):
        session.disable_fallback()
        with pytest.raises(ValueError, match="must be either strings or"):
            session.set_providers([3])
        assert not session._enable_fallback


# Models that onnxruntime opens.


def sparse(
    indices: list[int] | list[list[int]], dims: tuple[int, ...]
) -> onnx.SparseTensorProto:
    values = numpy_helper.from_array(np.array([3, 4], np.float32), "c")
    return helper.make_sparse_tensor(
        values, numpy_helper.from_array(np.array(indices, np.int64)), dims
    )


SPARSE = {
    "elements": sparse([1, 63], (1, 64)),
    "rows of indices": sparse([[0, 1], [0, 63]], (1, 64)),
}


@pytest.mark.parametrize("place", ["initializer", "constant", "constant of a branch"])
@pytest.mark.parametrize("form", SPARSE)
def test_sparse_weights_are_made_dense(path, place, form):
    model = onnx.load(path)
    (ones,) = (item for item in model.graph.initializer if item.name == "c")
    model.graph.initializer.remove(ones)
    constant = helper.make_node("Constant", [], ["c"], sparse_value=SPARSE[form])
    if place == "initializer":
        model.graph.sparse_initializer.append(SPARSE[form])
    elif place == "constant":
        model.graph.node.insert(0, constant)
    else:
        constant.output[0] = "inner"
        output = helper.make_tensor_value_info("inner", onnx.TensorProto.FLOAT, (1, 64))
        branch = helper.make_graph([constant], "branch", [], [output])
        yes = numpy_helper.from_array(np.array(True), "yes")
        model.graph.initializer.append(yes)
        model.graph.node.insert(
            0, helper.make_node("If", ["yes"], ["c"], then_branch=branch, else_branch=branch)
        )
    onnx.save(model, path)
    session, stock = start(path), onnxruntime.InferenceSession(path, providers=CPU)
    assert len(session.ortplugins_report.fired) == 1
    np.testing.assert_array_equal(session.run(None, FEED)[0], stock.run(None, FEED)[0])
    assert session.run(None, FEED)[0][0, 63] == 12


@pytest.mark.parametrize(
    ("weight", "words"),
    [
        (SPARSE["elements"], "initializer 'c' is there twice"),
        (sparse([0, 1], (1 << 40,)), r"has shape \[1099511627776\]"),
        (sparse([0, -1], (1, 64)), "has no valid indices"),
        (sparse([0], (1, 64)), "has no valid indices"),
    ],
)
def test_a_sparse_weight_that_cannot_be_made_dense_is_refused(path, weight, words):
    model = onnx.load(path)
    model.graph.sparse_initializer.append(weight)
    onnx.save(model, path)
    with pytest.raises(ortplugins.ModelFileError, match=words):
        ortplugins.optimize(path)


def test_a_model_in_ort_format_is_opened_as_it_is(path, tmp_path, cache_dir):
    so, written = onnxruntime.SessionOptions(), tmp_path / "m.ort"
    so.optimized_model_filepath = str(written)
    so.add_session_config_entry("session.save_model_format", "ORT")
    text = "g (float[rows, 128] x) => (float[rows, 128] y) { y = Add(x, three) }"
    ir.save(model_of(text, {"three": np.full(1, 3, np.float32)}), path)
    onnxruntime.InferenceSession(path, so, providers=CPU)
    path.unlink()
    for model in (written, written.read_bytes()):
        for passes in ((EXACT,), (ortplugins.ShapeSizeReorder(),)):
            session = start(model, options(*passes))
            assert first(session) == 3
            assert "ORT format" in str(session.ortplugins_report)
    assert not cache_dir.exists()


@pytest.mark.parametrize("in_place", [False, True])
def test_bytes_with_data_in_the_current_folder(path, tmp_path, monkeypatch, in_place):
    """Another folder has other data under the same name."""
    if in_place:
        monkeypatch.setattr("ortplugins.optimization.build.LEAST_BYTES", 1)
    content, other = path.read_bytes(), tmp_path / "other"
    other.mkdir()
    (other / FILE).write_bytes(sevens(path.with_name(FILE)))
    for expected in ("built", "cache"):
        for folder, value in ((tmp_path, 3), (other, 21)):
            monkeypatch.chdir(folder)
            session = start(content)
            assert (first(session), session.ortplugins_report.source) == (value, expected)


# Arguments of every kind.


class Named:
    """A path by its protocol alone."""

    def __init__(self, path: object) -> None:
        self._path = path

    def __fspath__(self) -> object:
        return self._path


def across_a_link(path: Path) -> Path:
    """A path that leads to ``path`` only where ".." is taken as text."""
    (folder := path.parent / "a" / "b").mkdir(parents=True)
    (link := path.with_name("link")).symlink_to(folder)
    (folder.parent / path.name).write_bytes(sevens(path))
    return link / ".." / path.name


MODELS: dict[str, Callable[[Path], object]] = {
    "behind a link": across_a_link,
    "text": str,
    "path": Path,
    "protocol": Named,
    "protocol of bytes": lambda path: Named(os.fsencode(path)),
    "protocol of a number": lambda path: Named(3),
    "content": Path.read_bytes,
    "each initializer twice": lambda path: (
        path.read_bytes()
        + onnx.ModelProto(
            graph=onnx.GraphProto(initializer=onnx.load(path).graph.initializer)
        ).SerializeToString()
    ),
    "an operator that is no text": lambda path: path.read_bytes().replace(b"Add", b"A\xffd"),
    "bytearray": lambda path: bytearray(path.read_bytes()),
    "name in bytes": os.fsencode,
    "folder": lambda path: path.parent,
    "missing": lambda path: path.with_name("gone.onnx"),
    **{
        f"literal {item!r}": lambda path, item=item: item
        for item in (None, 5, "", b"", "a\0b")
    },
}
CPU_NAME = CPU[0]
ARGUMENTS: dict[str, dict[str, object]] = {
    **{
        f"providers {item!r}": {"providers": item}
        for item in (
            None, (), (CPU_NAME,), CPU * 2, CPU_NAME, 5, [5], [None], {CPU_NAME}, ["Other"],
            ["Other", CPU_NAME], [(CPU_NAME, {"use_arena": 1})], [[CPU_NAME, {}]],
            [(CPU_NAME, {}, 1)],
        )
    },
    **{
        f"provider_options {item!r}": {"providers": CPU, "provider_options": item}
        for item in ([{}], [{"use_arena": "1"}], [{1: 2}], [{}, {}], [], {}, 5, [5])
    },
    **{
        f"{name} {item!r}": {name: item}
        for name, items in {
            "enable_fallback": (0, False, "0", "x", None),
            "read_config_from_model": (0, 1, "x"),
            "disabled_optimizers": (None, "ConstantFolding", {"ConstantFolding"}, 5, [5]),
            "sess_options": (None, 5, {}, onnxruntime.SessionOptions),
            "unknown": (1,),
        }.items()
        for item in items
    },
}  # fmt: skip


@pytest.fixture
def inline(path: Path) -> Path:
    onnx.save(onnx.load(path), path)
    return path


def seen(open_session: Callable[..., object], *args: object, **kwargs: object) -> object:
    """What a caller gets, and is told: of a session its facts, else the error."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            session: Any = open_session(*args, **kwargs)
        except Exception as error:
            return error, [str(item.message) for item in caught]
    facts = session.get_providers(), session.get_provider_options(), session._enable_fallback
    given = session._model_path, session._model_bytes, session._read_config_from_model
    return (*facts, *given, first(session)), [str(item.message) for item in caught]


def patched(*args: Any, **kwargs: Any) -> onnxruntime.InferenceSession:
    with ortplugins.enabled(EXACT):
        return onnxruntime.InferenceSession(*args, **kwargs)


def same_for_callers(*args: object, **kwargs: object) -> None:
    kwargs = {"sess_options": options(), **kwargs}
    plain, told = seen(onnxruntime.InferenceSession, *args, **kwargs)
    for open_session in (ortplugins.InferenceSession, patched):
        ours, told_too = seen(open_session, *args, **kwargs)
        assert told_too == told
        if isinstance(plain, Exception):
            assert isinstance(ours, type(plain)), ours
            words = [re.sub("0x[0-9a-f]+", "", str(error)) for error in (ours, plain)]
            assert words[0] == words[1]
        else:
            assert ours == plain


@pytest.mark.parametrize("form", MODELS)
def test_every_form_of_a_model_is_taken_as_onnxruntime_takes_it(inline, form):
    same_for_callers(MODELS[form](inline), providers=CPU)


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_every_argument_is_taken_as_onnxruntime_takes_it(inline, arguments):
    same_for_callers(inline, **ARGUMENTS[arguments])
