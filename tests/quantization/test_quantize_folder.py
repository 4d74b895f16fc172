# SPDX-License-Identifier: MIT
"""Folders: one in, one out, with all that goes along."""

import errno
import os
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from builders.command_line import as_json, ortplugins_command, printed
from builders.decoders import decoder
from builders.samples import write_tokenizer

from ortplugins.errors import MissingFileError, ModelFileError
from ortplugins.quantization import quantize

WORDS = ["[BOS]", "[EOS]", "[UNK]", *(f"w{number}" for number in range(20))]
GOES_ALONG = ["genai_config.json", "templates/chat.jinja", "tokenizer.json"]


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Hold ``float``, a folder with all that such folders have, and a text."""
    monkeypatch.chdir(tmp_path)
    folder = Path("float")
    for name in ("onnx", "templates", ".git"):
        (folder / name).mkdir(parents=True)
    onnx.save(
        decoder("genai"),
        folder / "onnx/model.onnx",
        save_as_external_data=True,
        location="weights",
        size_threshold=0,
    )
    write_tokenizer(folder / "tokenizer.json", WORDS)
    for name in (*GOES_ALONG[:2], ".git/HEAD", "model.safetensors"):
        (folder / name).write_text("{}")
    os.mkfifo(folder / "pipe")
    words = np.random.default_rng(0).choice(WORDS[3:], 1800)
    Path("text.txt").write_text(" ".join(words))
    return folder


def files(folder: str | Path) -> list[str]:
    root = Path(folder)
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if not p.is_dir())


def test_what_belongs_to_the_model_goes_along(source):
    result = quantize(source, "int4", block_size=16)
    assert result.path == Path("int4/onnx/model.onnx")
    model = ["onnx/model.onnx", "onnx/model.onnx.data"]
    assert files("int4") == sorted([*GOES_ALONG, *model])
    assert Path("int4").stat().st_mode == Path("float").stat().st_mode
    quantize(source / "onnx/model.onnx", "file.onnx", block_size=16)
    expected, written = onnx.load("file.onnx"), onnx.load("int4/onnx/model.onnx")
    for ours, other in zip(written.graph.initializer, expected.graph.initializer, strict=True):
        np.testing.assert_array_equal(
            onnx.numpy_helper.to_array(ours), onnx.numpy_helper.to_array(other)
        )
    # The model that is returned lies in the new folder, not in the one that became it.
    tensors = [value.const_value for value in result.model.graph.initializers.values()]
    assert [tensor.numpy().size for tensor in tensors]
    # A single file of a folder's model, when that is asked for.
    assert quantize(source, "one.onnx", block_size=16).path == Path("one.onnx")


def test_a_folder_appears_whole_or_not_at_all(source, monkeypatch):
    Path("int4").mkdir()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(shutil, "copy", full)
        quantize(source, "int4", block_size=16)
    assert not files("int4")
    quantize(source, "int4", block_size=16)
    before = Path("int4/onnx/model.onnx").read_bytes()
    with pytest.raises(FileExistsError, match="int4: exists; remove it, or choose another"):
        quantize(source, "int4", bits=8, block_size=16, overwrite=True)
    assert Path("int4/onnx/model.onnx").read_bytes() == before
    assert sorted(os.listdir()) == ["float", "int4", "text.txt"]


def test_folders_that_cannot_be_are_refused(source):
    for output in ("float", "float/int4", "."):
        with pytest.raises(ModelFileError, match="the model's own folder"):
            quantize(source, output)
    with pytest.raises(ModelFileError, match="the folder above it does not exist"):
        quantize(source, "no/where")
    with pytest.raises(FileExistsError, match=r"text\.txt: exists"):
        quantize(source, "text.txt", overwrite=True)
    shutil.copy(source / "onnx/model.onnx", source / "onnx/other.onnx")
    with pytest.raises(ModelFileError, match=r"2 models, onnx/model\.onnx, onnx/other\.onnx"):
        quantize(source, "int4")
    shutil.rmtree(source / "onnx")
    with pytest.raises(MissingFileError, match=r"no \.onnx file"):
        quantize(source, "int4")
    assert sorted(os.listdir()) == ["float", "text.txt"]


def test_the_command_ends_with_figures_where_there_is_a_text(source, monkeypatch):
    arguments = ["quantize", source, "--block-size", "16", "--text", "text.txt", "-o"]
    shown = printed(*arguments, "int4")
    assert "perplexity" in shown and "top-1 agreement" in shown
    assert "float: Gather, 1 weights, " in shown
    assert "refused" not in shown  # a table that nobody asked for
    planned = printed("quantize", source, "--block-size", "16", "--dry-run")
    assert "float: Gather, 1 weights, " in planned
    result = as_json(*arguments, "more", "--method", "gptq")
    found = result["evaluation"]
    (table, *_) = result["floats"]
    assert (table["op_type"], table["reason"]) == ("Gather", "Gather is not among op_types")
    # A third of the text is more than a window.
    assert found["count"] == 511 and found["kl_divergence"] > 0 and found["held_back"]
    assert "evaluated on what calibration left of the text" in shown
    # A tokenizer in a subfolder does as well, as some exports have it.
    (source / "hf").mkdir()
    (source / "tokenizer.json").rename(source / "hf/tokenizer.json")

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("ortplugins.evaluation.evaluate", interrupted)
        done = ortplugins_command(*arguments, "stopped")
    assert done.returncode != 0 and "wrote stopped/onnx/model.onnx" in done.stdout
    (source / "hf/tokenizer.json").rename(source / "tokenizer.json")
    Path("text.txt").write_text("w1 w2 w3 w4")
    expected = "not evaluated: text.txt: has "
    assert expected in printed(*arguments, "short")
    assert Path("short/tokenizer.json").exists()
