# SPDX-License-Identifier: MIT
"""Bad models are refused by name, before anything is built from them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from builders.dequantized_models import DequantizedMatMul, relative_error, run

import ortplugins
from ortplugins import MissingFileError, ModelFileError

CASE = DequantizedMatMul(128, 64, 32)


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    ir.save(CASE.model(), folder / "model.onnx", external_data="model.data")
    return folder / "model.onnx"


def set_external(path: Path, **entries: str | int) -> None:
    """Change what the first external tensor says of its data."""
    proto = onnx.load(path, load_external_data=False)
    tensor = next(t for t in proto.graph.initializer if t.external_data)
    for entry in tensor.external_data:
        if entry.key in entries:
            entry.value = str(entries[entry.key])
    onnx.save(proto, path)


def missing(path: Path) -> Path:
    return path.with_name("nowhere.onnx")


def truncated(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[:-40])
    return path


def empty(path: Path) -> Path:
    path.write_bytes(b"")
    return path


def text(path: Path) -> Path:
    path.write_text("hello, I am a readme")
    return path


def without_data(path: Path) -> Path:
    path.with_name("model.data").unlink()
    return path


def short_data(path: Path) -> Path:
    data = path.with_name("model.data")
    data.write_bytes(data.read_bytes()[:-1])
    return path


def wrong_length(path: Path) -> Path:
    set_external(path, length=17)
    return path


def huge_offset(path: Path) -> Path:
    set_external(path, offset=1 << 40)
    return path


def parent_folder(path: Path) -> Path:
    (path.parent.parent / "secret").write_bytes(bytes(1 << 16))
    set_external(path, location="../secret")
    return path


def absolute(path: Path) -> Path:
    set_external(path, location=str(path.with_name("model.data")))
    return path


def link_outside(path: Path) -> Path:
    (path.parent.parent / "secret").write_bytes(bytes(1 << 16))
    data = path.with_name("model.data")
    data.unlink()
    data.symlink_to(path.parent.parent / "secret")
    return path


def folder_as_data(path: Path) -> Path:
    data = path.with_name("model.data")
    data.unlink()
    data.mkdir()
    return path


def ort_format(path: Path) -> Path:
    path.write_bytes(b"\x00\x00\x00\x00ORTM" + bytes(64))
    return path


BAD = {
    missing: (MissingFileError, r"nowhere\.onnx: there is no such model file"),
    truncated: (ModelFileError, r"model\.onnx: is no ONNX model, or was cut off"),
    empty: (
        ModelFileError,
        r"model\.onnx: the file is empty|model\.onnx: has no graph outputs",
    ),
    text: (ModelFileError, r"model\.onnx: is no ONNX model"),
    without_data: (
        MissingFileError,
        r"tensor 'w.*': external data file '.*model\.data' is missing",
    ),
    short_data: (ModelFileError, r"tensor 'w.*': needs bytes .* is the file complete\?"),
    wrong_length: (ModelFileError, r"tensor 'w': external data is 17 bytes long, but shape"),
    huge_offset: (ModelFileError, r"tensor 'w': needs bytes 1099511627776"),
    parent_folder: (ModelFileError, r"location '\.\./secret' leaves the model's folder"),
    absolute: (ModelFileError, r"leaves the model's folder"),
    link_outside: (ModelFileError, r"is a link to '.*secret', outside the model's folder"),
    folder_as_data: (ModelFileError, r"is not a regular file"),
    ort_format: (ModelFileError, r"is in ORT format"),
}


@pytest.mark.parametrize("spoil", BAD, ids=lambda f: f.__name__)
def test_optimize_refuses_and_writes_nothing(
    model_path: Path, spoil: Callable[[Path], Path], tmp_path: Path
):
    error, message = BAD[spoil]
    path = spoil(model_path)
    output = tmp_path / "out"
    output.mkdir()
    with pytest.raises(error, match=message):
        ortplugins.optimize(path, output / "model.onnx")
    assert list(output.iterdir()) == []


@pytest.mark.parametrize("spoil", BAD, ids=lambda f: f.__name__)
def test_a_session_refuses_and_caches_nothing(
    model_path: Path, spoil: Callable[[Path], Path], cache_dir: Path
):
    error, message = BAD[spoil]
    path = spoil(model_path)
    so = ort.SessionOptions()
    ortplugins.configure(so, ortplugins.DqMatMulNBitsFusion())
    with pytest.raises(error, match=message):
        ortplugins.InferenceSession(path, so, providers=["CPUExecutionProvider"])
    assert list(cache_dir.glob("entries/*")) == []
    assert list(cache_dir.glob("building/*")) == []


def test_data_that_goes_missing_after_a_hit_is_told(model_path: Path):
    so = ort.SessionOptions()
    ortplugins.configure(so, ortplugins.DqMatMulNBitsFusion())
    ortplugins.InferenceSession(model_path, so, providers=["CPUExecutionProvider"])
    without_data(model_path)
    with pytest.raises(MissingFileError, match="is missing"):
        ortplugins.InferenceSession(model_path, so, providers=["CPUExecutionProvider"])


def test_a_hugging_face_cache_of_links_is_read(model_path: Path, tmp_path: Path):
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    snapshot = tmp_path / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    for file in list(model_path.parent.iterdir()):
        os.replace(file, blobs / f"digest-of-{file.name}")
        (snapshot / file.name).symlink_to(f"../../blobs/digest-of-{file.name}")
    feed = CASE.feed()
    so = ort.SessionOptions()
    ortplugins.configure(so, ortplugins.DqMatMulNBitsFusion(accuracy_level="0"))
    for source in ("built", "cache"):
        session = ortplugins.InferenceSession(
            snapshot / "model.onnx", so, providers=["CPUExecutionProvider"]
        )
        assert session.ortplugins_report.source == source
        (y,) = session.run(None, {"x": feed})
        assert relative_error(y, CASE.reference(feed)) <= 1e-5


def test_hard_linked_data_is_read(model_path: Path, tmp_path: Path):
    os.link(model_path.with_name("model.data"), tmp_path / "another name")
    exact = ortplugins.DqMatMulNBitsFusion(accuracy_level="0")
    result = ortplugins.optimize(model_path, tmp_path / "out.onnx", passes=[exact])
    feed = CASE.feed()
    (y,) = run(str(result.path), {"x": feed})
    assert relative_error(y, CASE.reference(feed)) <= 1e-5
