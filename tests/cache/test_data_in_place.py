# SPDX-License-Identifier: MIT
"""Entries find their model by content, and read its data where it lies."""

import os
import shutil
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from builders.dequantized_models import DequantizedMatMul
from builders.processes import FEED
from builders.sessions import CPU, check, files, options, save, start
from builders.text_models import model_of, normal

import ortplugins
from ortplugins.cache.artifact import changed_files
from ortplugins.cache.store import ArtifactCache, Entry
from ortplugins.model_io.data_in_place import folder_of
from ortplugins.optimization import build
from session_options import enable_key
from session_options.entries import DATA_FOLDER_KEY, stored

CASE = DequantizedMatMul(512, 512, 32)


def entry_of(cache_dir: Path, model: Path) -> Entry:
    entries = ArtifactCache(cache_dir).entries()
    (entry,) = (entry for entry in entries if entry.model == str(model))
    return entry


def test_a_model_is_found_wherever_it_lies(tmp_path):
    path = save(CASE, tmp_path / "a" / "model.onnx")
    start(path)
    shutil.copytree(path.parent, tmp_path / "b")
    for copy in (tmp_path / "b").iterdir():  # times in seconds, as of a tar or an image layer
        os.utime(copy, (int(copy.stat().st_mtime) - 100,) * 2)
    path.parent.rename(tmp_path / "c")
    for folder in ("b", "c"):
        session = start(tmp_path / folder / "model.onnx")
        assert session.ortplugins_report.source == "cache"
        check(session, CASE)


def float_model(folder: Path, *, folds: int = 0) -> Path:
    """Two uses of one shape, and a weight of ``folds`` columns that onnxruntime transposes."""
    folder.mkdir(exist_ok=True)
    arrays = {"w": normal(512, 512), "t": normal(folds or 1, 512)}
    model = model_of(
        """g (float[rows, 512] x) => (float[rows, 512] y, float[rows, folded] z) {
            hidden = MatMul(x, w)
            relu = Relu(hidden)
            shape = Shape(relu)
            y = Reshape(relu, shape)
            t_transposed = Transpose <perm = [1, 0]> (t)
            z = MatMul(relu, t_transposed)
        }""",
        arrays,
    )
    ir.save(model, folder / "model.onnx", external_data="model.onnx.data")
    return folder / "model.onnx"


@pytest.fixture(autouse=True)
def all_data_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "LEAST_BYTES", 1)


REORDER = "shape_size_reorder"


def opened(path: Path, *names: str) -> ortplugins.InferenceSession:
    so = onnxruntime.SessionOptions()
    for name in names or (REORDER,):
        so.add_session_config_entry(enable_key(name), "1")
    return start(path, so)


def test_data_stays_where_it_is_and_other_tools_can_still_read_it(tmp_path, cache_dir):
    path, so = float_model(tmp_path / "a"), options(ortplugins.ShapeSizeReorder())
    plain = onnxruntime.InferenceSession(path, providers=CPU)
    for origin in ("built", "cache"):
        session = start(path, so)
        assert stored(so, DATA_FOLDER_KEY) is None
        assert session.ortplugins_report.source == origin
        for a, b in zip(plain.run(None, FEED), session.run(None, FEED), strict=True):
            np.testing.assert_array_equal(a, b)
    entry = entry_of(cache_dir, path)
    assert entry.artifact.data == {"model.onnx.data": "model.onnx.data"}
    assert entry.size < 1 << 16
    assert not changed_files(entry.artifact, reads_files=True)
    # What reads sessions finds the data, too.
    so = onnxruntime.SessionOptions()
    so.add_session_config_entry(DATA_FOLDER_KEY, str(path.parent))
    for other in (session, onnxruntime.InferenceSession(path.read_bytes(), so, CPU)):
        assert ortplugins.compare(path, other, runs=1, rounds=1).outputs[0].max_abs == 0


def test_data_at_the_root_of_a_container():
    for names in ({"m.data": "m.data"}, {"d/m.data": "d/m.data"}):
        assert folder_of(names, "/m.onnx", None) == "/"


@pytest.mark.skipif(os.name == "nt", reason="links want a privilege there")
@pytest.mark.parametrize("data_is_linked", [True, False])
def test_files_behind_links_are_read_where_they_are(tmp_path, cache_dir, data_is_linked):
    """As in Hugging Face's cache: the names of the files are hashes of their content.

    onnxruntime also finds data beside the file linked to.
    """
    path = float_model(tmp_path / "a")
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    path.with_name("model.onnx.data").rename(blobs / "model.onnx.data")
    for index, name in enumerate(("model.onnx", "model.onnx.data")[: 1 + data_is_linked]):
        (path if not index else blobs / name).rename(blobs / f"blob{index}")
        (snapshot / name).symlink_to(blobs / f"blob{index}")
    before = sorted(files(tmp_path))
    for origin in ("built", "cache"):
        session = opened(snapshot / "model.onnx")
        assert session.ortplugins_report.source == origin
        assert np.isfinite(session.run(None, FEED)[0]).all()
    entry = entry_of(cache_dir, snapshot / "model.onnx")
    place = "blob1" if data_is_linked else "model.onnx.data"
    assert entry.artifact.data == {"model.onnx.data": place}
    assert sorted(files(tmp_path)) == before


@pytest.mark.parametrize(
    "reason", ["new tensors", "folded constants", "a pass over files", "little data"]
)
def test_data_is_copied_where_it_cannot_stay(reason, tmp_path, cache_dir, monkeypatch):
    path, passes = float_model(tmp_path / "a", folds=512), [REORDER]
    if reason == "folded constants":
        monkeypatch.setattr(build, "NEW_BYTES", 1 << 19)
    elif reason == "little data":
        monkeypatch.setattr(build, "LEAST_BYTES", 1 << 30)
    elif reason == "new tensors":
        path, passes = save(CASE, tmp_path / "b" / "model.onnx"), ["dq_matmulnbits_fusion"]
        monkeypatch.setattr(build, "NEW_BYTES", 1 << 16)
    else:
        passes = [REORDER, "prepacked_weights"]
    session = opened(path, *passes)
    entry = entry_of(cache_dir, path)
    assert entry.artifact.data == {}
    assert entry.size > 1 << 17
    plain = onnxruntime.InferenceSession(path, providers=CPU)
    for a, b in zip(plain.run(None, FEED), session.run(None, FEED), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-2)
    shutil.rmtree(path.parent)
    assert np.isfinite(session.run(None, FEED)[0]).all()
