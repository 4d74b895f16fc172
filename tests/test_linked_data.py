# SPDX-License-Identifier: MIT
"""Entries find their model by content, and link its data in place of copying it."""

from __future__ import annotations

import os
import shutil
import stat
import warnings
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from builders.dequantized_models import DequantizedMatMul, run
from builders.session_process import FEED
from builders.sessions import source, start
from builders.text_models import model_of, normal

from ortplugins.artifacts import source_index
from ortplugins.artifacts.manifest import Entry
from ortplugins.artifacts.store import ArtifactCache
from ortplugins.artifacts.warming import warm
from ortplugins.model_io import linked_data


def write_model(folder: Path, seed: int = 0) -> Path:
    """A float layer, which no rule touches, before a quantised one, which is fused."""
    folder.mkdir(exist_ok=True)
    codes, scales, _ = DequantizedMatMul(512, 512, 32).arrays()
    model = model_of(
        """g (float[rows, 512] x) => (float[rows, 512] y) {
            hidden = MatMul(x, float_weight)
            w = DequantizeLinear <axis = 0, block_size = 32> (codes, scales)
            y = MatMul(hidden, w)
        }""",
        {
            "float_weight": normal(512, 512, seed=seed),
            "codes": codes.astype(ml_dtypes.int4),
            "scales": scales,
        },
    )
    ir.save(model, folder / "model.onnx", external_data="model.onnx.data")
    return folder / "model.onnx"


def output(path: Path) -> np.ndarray:
    return start(path).run(None, FEED)[0]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_model(tmp_path / "a")


def entry_of(cache_dir: Path, model: Path) -> Entry:
    entries = ArtifactCache(cache_dir).entries()
    (entry,) = (entry for entry in entries if entry.manifest["model"] == str(model))
    return entry


@pytest.fixture
def hard_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system that can't clone files."""
    monkeypatch.setattr(linked_data, "_clone", lambda *_: False)


def cut_times(folder: Path) -> None:
    """Cut times to seconds, as a tar archive or an image layer does."""
    for path in folder.rglob("*"):
        os.utime(path, (int(path.stat().st_mtime) - 100,) * 2)


def test_a_model_is_found_wherever_it_lies(path: Path, tmp_path: Path):
    expected = output(path)
    shutil.copytree(path.parent, tmp_path / "b")
    cut_times(tmp_path / "b")
    assert source(tmp_path / "b/model.onnx") == "cache"
    path.parent.rename(tmp_path / "c")
    assert source(tmp_path / "c/model.onnx") == "cache"
    shutil.make_archive(str(tmp_path / "d"), "tar", tmp_path / "c")
    shutil.unpack_archive(tmp_path / "d.tar", tmp_path / "d")
    assert source(tmp_path / "d/model.onnx") == "cache"
    np.testing.assert_array_equal(output(tmp_path / "d/model.onnx"), expected)


@pytest.mark.parametrize("file", ["model.onnx", "model.onnx.data"])
def test_another_content_under_the_same_path_and_times_is_another_model(path: Path, file: str):
    start(path)
    changed = path.with_name(file)
    content, status = changed.read_bytes(), changed.stat()
    if file == "model.onnx":
        content = content.replace(b"hidden", b"HIDDEN")
    else:
        content = bytes([content[0] ^ 1]) + content[1:]
    changed.write_bytes(content)
    os.utime(changed, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert source(path) == "built"


@pytest.mark.usefixtures("hard_links")
def test_original_data_is_linked_and_only_what_is_new_is_written(path: Path, cache_dir: Path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = output(path)
    entry = entry_of(cache_dir, path)
    (name,) = entry.manifest["links"]
    assert os.path.samefile(entry.folder / name, path.with_name("model.onnx.data"))
    assert entry.linked_size == path.with_name("model.onnx.data").stat().st_size
    # The fused weight: 512 * 512 / 2 bytes of codes and 512 * 16 scales.
    assert entry.size < 512 * 512 / 2 + 4 * 512 * 16 + (1 << 16)
    assert entry.damage() == {}
    np.testing.assert_array_equal(output(path), expected)
    (reference,) = run(str(path), FEED)
    np.testing.assert_allclose(reference, expected, rtol=1e-4, atol=1e-2)


@pytest.mark.usefixtures("hard_links")
def test_a_source_written_to_in_place_is_noticed(path: Path, tmp_path: Path, cache_dir: Path):
    expected = output(path)
    shutil.copytree(path.parent, tmp_path / "copy")
    data = path.with_name("model.onnx.data")
    with data.open("r+b") as file:
        file.write(os.urandom(4096))
    # The copy has the content that the entry was made from; the entry's link has not.
    copy = tmp_path / "copy/model.onnx"
    np.testing.assert_array_equal(output(copy), expected)
    assert source(copy) == "cache"
    entry = entry_of(cache_dir, copy)
    (name,) = entry.manifest["links"]
    assert os.path.samefile(entry.folder / name, tmp_path / "copy" / "model.onnx.data")


@pytest.mark.usefixtures("hard_links")
def test_a_cache_and_a_model_that_were_copied_together_are_used(
    path: Path, tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    start(path)
    image = tmp_path / "image"
    shutil.copytree(path.parent, image / "a")
    shutil.copytree(cache_dir, image / "cache")
    cut_times(image)
    (image / "cache").chmod(0o700)
    monkeypatch.setenv("ORTPLUGINS_CACHE_DIR", str(image / "cache"))
    assert source(image / "a/model.onnx") == "cache"


@pytest.mark.usefixtures("hard_links")
def test_removing_the_model_leaves_the_entry_whole(path: Path, tmp_path: Path):
    expected = output(path)
    shutil.copytree(path.parent, tmp_path / "copy")
    shutil.rmtree(path.parent)
    assert source(tmp_path / "copy/model.onnx") == "cache"
    np.testing.assert_array_equal(output(tmp_path / "copy/model.onnx"), expected)


@pytest.mark.skipif(os.name == "nt", reason="has no such modes")
@pytest.mark.usefixtures("hard_links")
@pytest.mark.parametrize("reason", ["Invalid cross-device link", "others may write to it"])
def test_data_is_copied_with_a_note_where_it_cannot_be_linked(
    reason: str, path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: object) -> None:
        raise OSError(18, reason)

    data = path.with_name("model.onnx.data")
    if reason.startswith("others"):
        data.chmod(0o666)
    else:
        monkeypatch.setattr(os, "link", refuse)
    (note,) = start(path).ortplugins_report.notes
    assert note == f"{data} is copied, not linked: {reason}"
    entry = entry_of(cache_dir, path)
    assert entry.linked_size == 0
    assert entry.size > 512 * 512 * 4


@pytest.mark.skipif(os.name == "nt", reason="has no such modes")
@pytest.mark.usefixtures("hard_links")
@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_sharing_changes_no_mode_of_the_source(path: Path, tmp_path: Path, mode: int):
    data = path.with_name("model.onnx.data")
    data.chmod(mode)
    (result,) = warm([path], ["dq_matmulnbits_fusion"], cache_dir=tmp_path / "shared")
    assert result.error == ""
    assert stat.S_IMODE(data.stat().st_mode) == mode
    entry = entry_of(tmp_path / "shared", path)
    assert bool(entry.linked_size) == (mode == 0o644)
    for file in entry.folder.iterdir():
        assert file.stat().st_mode & 0o044 == 0o044, file
    assert entry.damage() == {}


@pytest.mark.usefixtures("hard_links")
def test_a_linked_large_file_is_read_once(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(source_index, "SETTLED_SECONDS", -1)
    monkeypatch.setattr(source_index, "_MEMO_SIZE", 0)
    read = []
    real = source_index.hashlib.file_digest

    def file_digest(file, *arguments):
        read.append(Path(str(file.name)))
        return real(file, *arguments)

    monkeypatch.setattr(source_index.hashlib, "file_digest", file_digest)
    for _ in range(3):
        start(path)
    assert read.count(path.with_name("model.onnx.data")) == 1
    assert not [file for file in read if file.name.startswith("linked")]
