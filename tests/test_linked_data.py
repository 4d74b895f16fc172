# SPDX-License-Identifier: MIT
"""Entries find their model by content, and link its data in place of copying it."""

from __future__ import annotations

import os
import shutil
import stat
import warnings
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from builders.dequantized_models import DequantizedMatMul

import ortplugins
from ortplugins.artifacts.manifest import Entry
from ortplugins.artifacts.store import ArtifactCache
from ortplugins.artifacts.warming import warm
from ortplugins.model_io import linked_data

CPU = ["CPUExecutionProvider"]


def write_model(folder: Path, seed: int = 0) -> Path:
    """A float layer, which no rule touches, before a quantised one, which is fused."""
    folder.mkdir(exist_ok=True)
    model = DequantizedMatMul(512, 512, 32).model()
    x = model.graph.inputs[0]
    weight = np.random.default_rng(seed).normal(size=(512, 512)).astype(np.float32)
    value = ir.Value(name="float_weight", const_value=ir.tensor(weight, name="float_weight"))
    model.graph.register_initializer(value)
    users = list(x.uses())
    node = ir.node("MatMul", [x, value], name="float_layer")
    node.outputs[0].name = "hidden"
    for user, index in users:
        user.replace_input_with(index, node.outputs[0])
    model.graph.insert_before(model.graph[0], node)
    ir.save(model, folder / "model.onnx", external_data="model.onnx.data")
    return folder / "model.onnx"


def start(path: Path) -> ortplugins.InferenceSession:
    so = ort.SessionOptions()
    ortplugins.configure(so, ortplugins.DqMatMulNBitsFusion(accuracy_level=0))
    return ortplugins.InferenceSession(path, so, providers=CPU)


def output(path: Path | ort.InferenceSession) -> np.ndarray:
    session = path if isinstance(path, ort.InferenceSession) else start(path)
    x = np.linspace(-1, 1, 1024, dtype=np.float32).reshape(2, 512)
    return session.run(None, {"x": x})[0]


def source(path: Path) -> str:
    return start(path).ortplugins_report.source


def only_entry(cache_dir: Path) -> Entry:
    (entry,) = ArtifactCache(cache_dir).entries()
    return entry


@pytest.fixture
def hard_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system that can't clone files."""
    monkeypatch.setattr(linked_data, "_clone", lambda *_: False)


def cut_times(folder: Path) -> None:
    """Cut times to seconds, as a tar archive or an image layer does."""
    for path in folder.rglob("*"):
        os.utime(path, (int(path.stat().st_mtime) - 100,) * 2)


def test_a_model_is_found_wherever_it_lies(tmp_path: Path):
    first = write_model(tmp_path / "a")
    expected = output(first)
    shutil.copytree(first.parent, tmp_path / "b")
    cut_times(tmp_path / "b")
    assert source(tmp_path / "b/model.onnx") == "cache"
    first.parent.rename(tmp_path / "c")
    assert source(tmp_path / "c/model.onnx") == "cache"
    shutil.make_archive(str(tmp_path / "d"), "tar", tmp_path / "c")
    shutil.unpack_archive(tmp_path / "d.tar", tmp_path / "d")
    assert source(tmp_path / "d/model.onnx") == "cache"
    np.testing.assert_array_equal(output(tmp_path / "d/model.onnx"), expected)


@pytest.mark.parametrize("file", ["model.onnx", "model.onnx.data"])
def test_another_content_under_the_same_path_and_times_is_another_model(
    tmp_path: Path, file: str
):
    path = write_model(tmp_path / "a")
    status = (path.parent / file).stat()
    start(path)
    content = bytearray((path.parent / file).read_bytes())
    position = content.find(b"hidden") if file == "model.onnx" else len(content) // 2
    while (at := content.find(b"hidden", position)) >= 0 and file == "model.onnx":
        content[at : at + 6] = b"HIDDEN"
    content[position] ^= 1 if file != "model.onnx" else 0
    (path.parent / file).write_bytes(content)
    os.utime(path.parent / file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert source(path) == "built"


@pytest.mark.usefixtures("hard_links")
def test_original_data_is_linked_and_only_what_is_new_is_written(
    tmp_path: Path, cache_dir: Path
):
    path = write_model(tmp_path / "a")
    expected = output(path)
    entry = only_entry(cache_dir)
    (name,) = entry.manifest["links"]
    assert os.path.samefile(entry.folder / name, path.with_name("model.onnx.data"))
    assert entry.linked_size == path.with_name("model.onnx.data").stat().st_size
    # The fused weight: 512 * 512 / 2 bytes of codes and 512 * 16 scales.
    assert entry.size < 512 * 512 / 2 + 4 * 512 * 16 + (1 << 16)
    assert entry.damage() == {}
    np.testing.assert_array_equal(output(path), expected)
    so = ort.SessionOptions()
    so.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    reference = output(ort.InferenceSession(path, so, providers=CPU))
    np.testing.assert_allclose(reference, expected, rtol=1e-4, atol=1e-2)


@pytest.mark.usefixtures("hard_links")
def test_a_source_written_to_in_place_is_noticed(tmp_path: Path, cache_dir: Path):
    path = write_model(tmp_path / "a")
    expected = output(path)
    shutil.copytree(path.parent, tmp_path / "copy")
    data = path.with_name("model.onnx.data")
    with data.open("r+b") as file:
        file.write(os.urandom(4096))
    # The copy has the content that the entry was made from; the entry's link has not.
    copy = tmp_path / "copy/model.onnx"
    np.testing.assert_array_equal(output(copy), expected)
    assert source(copy) == "cache"
    assert os.path.samefile(only_link(cache_dir, copy), tmp_path / "copy" / "model.onnx.data")


def only_link(cache_dir: Path, model: Path) -> Path:
    (entry,) = (
        entry
        for entry in ArtifactCache(cache_dir).entries()
        if entry.manifest["model"] == str(model)
    )
    (name,) = entry.manifest["links"]
    return entry.folder / name


@pytest.mark.usefixtures("hard_links")
def test_a_cache_and_a_model_that_were_copied_together_are_used(
    tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    path = write_model(tmp_path / "a")
    start(path)
    image = tmp_path / "image"
    shutil.copytree(path.parent, image / "a")
    shutil.copytree(cache_dir, image / "cache")
    cut_times(image)
    (image / "cache").chmod(0o700)
    monkeypatch.setenv("ORTPLUGINS_CACHE_DIR", str(image / "cache"))
    assert source(image / "a/model.onnx") == "cache"


@pytest.mark.usefixtures("hard_links")
def test_removing_the_model_leaves_the_entry_whole(tmp_path: Path, cache_dir: Path):
    path = write_model(tmp_path / "a")
    expected = output(path)
    shutil.copytree(path.parent, tmp_path / "copy")
    shutil.rmtree(path.parent)
    assert source(tmp_path / "copy/model.onnx") == "cache"
    np.testing.assert_array_equal(output(tmp_path / "copy/model.onnx"), expected)


def refuse_links(*_: object) -> None:
    raise OSError(18, "Invalid cross-device link")


@pytest.mark.usefixtures("hard_links")
def test_data_is_copied_with_a_note_where_it_cannot_be_linked(
    tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    path = write_model(tmp_path / "a")
    monkeypatch.setattr(os, "link", refuse_links)
    session = start(path)
    data = path.with_name("model.onnx.data")
    (note,) = session.ortplugins_report.notes
    assert note == f"{data} is copied, not linked: Invalid cross-device link"
    entry = only_entry(cache_dir)
    assert entry.linked_size == 0
    assert entry.size > 512 * 512 * 4


@pytest.mark.skipif(os.name == "nt", reason="has no such modes")
@pytest.mark.usefixtures("hard_links")
def test_data_that_others_may_write_to_is_copied(tmp_path: Path, cache_dir: Path):
    path = write_model(tmp_path / "a")
    path.with_name("model.onnx.data").chmod(0o666)
    (note,) = start(path).ortplugins_report.notes
    assert note.endswith("is copied, not linked: others may write to it")
    assert only_entry(cache_dir).linked_size == 0


@pytest.mark.skipif(os.name == "nt", reason="has no such modes")
@pytest.mark.usefixtures("hard_links")
@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_sharing_changes_no_mode_of_the_source(tmp_path: Path, mode: int):
    path = write_model(tmp_path / "a")
    data = path.with_name("model.onnx.data")
    data.chmod(mode)
    (result,) = warm([path], ["dq_matmulnbits_fusion"], cache_dir=tmp_path / "shared")
    assert result.error == ""
    assert stat.S_IMODE(data.stat().st_mode) == mode
    entry = only_entry(tmp_path / "shared")
    assert bool(entry.linked_size) == (mode == 0o644)
    for file in entry.folder.iterdir():
        assert file.stat().st_mode & 0o044 == 0o044, file
    assert entry.damage() == {}


@pytest.mark.usefixtures("hard_links")
def test_a_linked_large_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from ortplugins.artifacts import source_index

    path = write_model(tmp_path / "a")
    monkeypatch.setattr(source_index, "_SETTLED_SECONDS", -1)
    monkeypatch.setattr(source_index, "_MEMO_SIZE", 0)
    read = []
    real = source_index.hashlib.file_digest

    def file_digest(file, *arguments):
        read.append(file.name)
        return real(file, *arguments)

    monkeypatch.setattr(source_index.hashlib, "file_digest", file_digest)
    for _ in range(3):
        start(path)
    data = str(path.with_name("model.onnx.data"))
    assert [str(name) for name in read].count(data) == 1
    assert not [name for name in read if Path(str(name)).name.startswith("linked")]


def test_an_output_whose_data_file_exists_is_named(tmp_path: Path):
    path = write_model(tmp_path / "a")
    (tmp_path / "out.onnx.data").write_bytes(b"mine")
    with pytest.raises(FileExistsError, match=r"out\.onnx\.data: exists"):
        ortplugins.optimize(path, tmp_path / "out.onnx")
    assert (tmp_path / "out.onnx.data").read_bytes() == b"mine"
    assert not (tmp_path / "out.onnx").exists()


def test_no_warning_of_ours_on_an_ordinary_file_system(tmp_path: Path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        start(write_model(tmp_path / "a"))
