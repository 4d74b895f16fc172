# SPDX-License-Identifier: MIT
"""A folder with a model and a tokenizer, and a text: what is quantised is evaluated."""

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from builders.command_line import as_json, ortplugins_command, printed
from builders.decoders import genai_decoder
from builders.samples import write_tokenizer

from ortplugins.errors import MissingFileError, ModelFileError
from ortplugins.quantization import quantize

WORDS = ["[BOS]", "[EOS]", "[UNK]", *(f"w{number}" for number in range(20))]


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Hold ``float``, a folder with a model and a tokenizer, and a text."""
    monkeypatch.chdir(tmp_path)
    folder = Path("float")
    (folder / "onnx").mkdir(parents=True)
    onnx.save(
        genai_decoder(),
        folder / "onnx/model.onnx",
        save_as_external_data=True,
        location="weights",
        size_threshold=0,
    )
    write_tokenizer(folder / "tokenizer.json", WORDS)
    words = np.random.default_rng(0).choice(WORDS[3:], 1800)
    Path("text.txt").write_text(" ".join(words))
    return folder


def test_a_folder_stands_for_the_one_model_in_it(source):
    assert quantize(source, "one.onnx", block_size=16).path == Path("one.onnx")
    quantize(source / "onnx/model.onnx", "two.onnx", block_size=16)
    assert Path("one.onnx.data").read_bytes() == Path("two.onnx.data").read_bytes()
    shutil.copy(source / "onnx/model.onnx", source / "onnx/other.onnx")
    with pytest.raises(ModelFileError, match=r"2 models, onnx/model\.onnx, onnx/other\.onnx"):
        quantize(source, "three.onnx")
    shutil.rmtree(source / "onnx")
    with pytest.raises(MissingFileError, match=r"no \.onnx file"):
        quantize(source, "three.onnx")


def test_the_command_ends_with_figures_where_there_is_a_text(source, monkeypatch):
    arguments = ["quantize", source, "--block-size", "16", "--text", "text.txt", "-o"]
    shown = printed(*arguments, "int4.onnx")
    assert "perplexity" in shown and "top-1 agreement" in shown
    assert "float: Gather, 1 weights, " in shown
    assert "refused" not in shown  # a table that nobody asked for
    planned = printed("quantize", source, "--block-size", "16", "--dry-run")
    assert "float: Gather, 1 weights, " in planned
    result = as_json(*arguments, "more.onnx", "--method", "gptq")
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
        done = ortplugins_command(*arguments, "stopped.onnx")
    assert done.returncode != 0 and "wrote stopped.onnx" in done.stdout
    (source / "hf/tokenizer.json").rename(source / "tokenizer.json")
    Path("text.txt").write_text("w1 w2 w3 w4")
    expected = "not evaluated: text.txt: has "
    assert expected in printed(*arguments, "short.onnx")
