# SPDX-License-Identifier: MIT
"""Folders for servers: complete, consistent, and written whole or not at all."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from builders.command_line import ortplugins_command, printed, refused
from builders.decoders import HEAD_SIZE, HEADS, VOCABULARY, decoder, genai_feeds
from builders.dequantized_models import DequantizedMatMul, run
from builders.sessions import CPU

from ortplugins import DqMatMulNBitsFusion
from ortplugins.quantization import quantize

CASE = DequantizedMatMul(64, 48, 32)
CONFIG: dict[str, Any] = {
    "model": {
        "context_length": 64,
        "decoder": {
            "filename": "model.onnx",
            "session_options": {"log_id": "mine", "session.intra_op.allow_spinning": "0"},
            "inputs": {
                "past_key_names": "past_key_values_%d_key",
                "past_value_names": "past_key_values_%d_value",
                "seqlens_k": "seqlens_k",
                "total_sequence_length": "total_sequence_length",
            },
            "outputs": {
                "present_key_names": "present_%d_key",
                "present_value_names": "present_%d_value",
            },
            "num_hidden_layers": 1,
            "num_key_value_heads": HEADS,
            "head_size": HEAD_SIZE,
        },
        "vocab_size": VOCABULARY,
    },
    "search": {"max_length": 64},
}

Change = Callable[[dict[str, Any]], object]  # of a genai_config.json


@pytest.fixture(autouse=True)
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Hold ``given``, a folder of onnxruntime-genai whose data has a name of its own."""
    monkeypatch.chdir(tmp_path)
    folder = Path("given")
    folder.mkdir()
    options = {"save_as_external_data": True, "location": "weights", "size_threshold": 0}
    # Of weights, the head alone is dequantised.
    head = {"rules": {"*": "float", "logits": {"keep_float": False}}, "block_size": 16}
    model = quantize(decoder("genai"), **head).model
    onnx.save(model, folder / "model.onnx", **options)
    (folder / "genai_config.json").write_text(json.dumps(CONFIG))
    for name in ("tokenizer.json", "chat_template.jinja", "model.safetensors"):
        (folder / name).write_text("{}")
    return folder


def pack(*arguments: object) -> str:
    return printed("pack", *arguments)


def files(folder: str) -> list[str]:
    root = Path(folder)
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


@pytest.mark.parametrize("level", ["4", "0"])
def test_a_genai_folder_computes_what_its_sessions_did(source, level):
    """At the level of the sessions that genai_config.json describes."""
    config = json.loads((source / "genai_config.json").read_text())
    entry = {"session.qdq_matmulnbits_accuracy_level": level}
    config["model"]["decoder"]["session_options"] |= entry
    (source / "genai_config.json").write_text(json.dumps(config))
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry(*entry.popitem())
    session = onnxruntime.InferenceSession(source / "model.onnx", options, providers=CPU)
    feeds = genai_feeds([1, 2, 3])
    (expected,) = session.run(["logits"], feeds)
    shutil.copy(source / "model.onnx", source / "other.onnx")
    printed = pack(source, "--for", "genai", "-o", "packed", "--verbose")
    assert f"accuracy_level {level} (auto: as onnxruntime fuses it)" in printed
    shutil.rmtree(source)
    assert files("packed") == [
        "chat_template.jinja",
        "genai_config.json",
        "model.onnx",
        "model.onnx.data",
        "tokenizer.json",
    ]
    assert all(path.stat().st_nlink == 1 for path in Path("packed").iterdir())
    assert json.loads(Path("packed/genai_config.json").read_text()) == config
    (found,) = run("packed/model.onnx", feeds)[:1]
    np.testing.assert_array_equal(found, expected)


def test_genai_config_names_the_model_that_was_given(source):
    shutil.copy(source / "model.onnx", source / "decoder.onnx")
    pack(source / "decoder.onnx", "--for", "genai", "-o", "packed")
    written = json.loads(Path("packed/genai_config.json").read_text())
    assert written["model"]["decoder"]["filename"] == "decoder.onnx"
    assert "decoder.onnx.data" in files("packed")


def test_plain_takes_what_belongs_to_a_folder_and_nothing_beside_a_file(source):
    pack(source, "-o", "folder")
    assert {"tokenizer.json", "model.onnx.data"} < set(files("folder"))
    printed = json.loads(pack(source / "model.onnx", "-o", "alone", "--format", "json"))
    assert files("alone") == ["model.onnx", "model.onnx.data"]
    assert printed["artifact"] == "alone/model.onnx" and printed["fired"] == 1
    assert "--force" in refused("pack", source, "-o", "alone")
    pack(source / "model.onnx", "-o", "alone", "--force")


def changed(change: Change) -> Callable[[Path], object]:
    def spoil(folder: Path) -> None:
        config = json.loads((folder / "genai_config.json").read_text())
        change(config["model"])
        (folder / "genai_config.json").write_text(json.dumps(config))

    return spoil


def too_new(folder: Path) -> None:
    proto = onnx.load(folder / "model.onnx", load_external_data=False)
    proto.opset_import[0].version = 999
    onnx.save(proto, folder / "model.onnx")


def removed(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def written(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


CONFIGURED = "genai_config.json"
# The server, what is done to the folder, and what is said of it.
BAD = {
    "no model": ("plain", removed("model.onnx"), "no .onnx file in this folder"),
    "no folder": ("genai", shutil.rmtree, f"{CONFIGURED}: is missing"),
    "two decoders": (
        "plain",
        lambda folder: shutil.copy(folder / "model.onnx", folder / "decoder.onnx"),
        "holds 2 models, decoder.onnx, model.onnx: give the path of one",
    ),
    "no configuration": ("genai", removed(CONFIGURED), f"{CONFIGURED}: is missing"),
    "not JSON": ("genai", written(CONFIGURED, "{"), f"{CONFIGURED}: is not JSON"),
    "missing file": (
        "genai",
        changed(lambda model: model["decoder"].update(filename="gone.onnx")),
        "model.decoder.filename is 'gone.onnx', which is not there",
    ),
    "several models": (
        "genai",
        changed(lambda model: model.update(vision={"filename": "vision.onnx"})),
        "names several models (decoder, vision)",
    ),
    "context length": (
        "genai",
        changed(lambda model: model.pop("context_length")),
        "model.context_length is None; a number of tokens is expected",
    ),
    "unnamed input": (
        "genai",
        changed(lambda model: model["decoder"]["inputs"].pop("seqlens_k")),
        "model.decoder.inputs does not name input 'seqlens_k' of the graph",
    ),
    "layers": (
        "genai",
        changed(lambda model: model["decoder"].update(num_hidden_layers=2)),
        "past_key_names names 'past_key_values_1_key', which the graph lacks",
    ),
    "vocabulary": (
        "genai",
        changed(lambda model: model.update(vocab_size=7)),
        f"vocab_size is 7, but 'logits' has {VOCABULARY}",
    ),
    "no vocabulary": (
        "genai",
        changed(lambda model: model.pop("vocab_size")),
        f"vocab_size is None, but 'logits' has {VOCABULARY}",
    ),
    "older onnxruntime": ("plain", too_new, "onnxruntime refuses it"),
    "missing data": ("plain", removed("weights"), "external data file"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_one_line_and_leaves_nothing(source, what):
    server, spoil, message = BAD[what]
    spoil(source)
    done = ortplugins_command("pack", source, "--for", server, "-o", "packed")
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert [name for name in os.listdir() if name != "given"] == []


def test_a_server_with_an_older_onnxruntime_is_named(source):
    printed("pack", source, "-o", "packed", "--onnxruntime", "1.22.1")
    proto = onnx.load(source / "model.onnx", load_external_data=False)
    proto.ir_version = 11
    onnx.save(proto, source / "model.onnx")
    done = ortplugins_command("pack", source, "-o", "other", "--onnxruntime", "1.22.1")
    text = "has opset 21 and IR version 11; onnxruntime 1.22.1 opens 22 and 10 at most"
    assert (done.returncode, done.stderr) == (2, f"error: given/model.onnx: {text}\n")


def test_settings_that_a_server_cannot_have_are_refused(source, monkeypatch):
    needs = {"enable_mem_pattern": "0", "session.x": "1"}
    monkeypatch.setattr(DqMatMulNBitsFusion, "session_settings", lambda _: needs)
    pack(source, "--for", "genai", "-o", "genai")
    written = json.loads(Path("genai/genai_config.json").read_text())["model"]["decoder"]
    given = CONFIG["model"]["decoder"]["session_options"]
    settings = {**given, "enable_mem_pattern": False, "session.x": "1"}
    assert written["session_options"] == settings
    needs["execution_order"] = "PRIORITY_BASED"
    done = ortplugins_command("pack", source, "--for", "genai", "-o", "other")
    assert "genai_config.json cannot set execution_order" in done.stderr


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no user ids")
@pytest.mark.parametrize("command", ["pack", "optimize", "quantize"])
def test_folders_that_cannot_be_written(source, command):
    if command == "quantize":
        onnx.save(decoder("genai"), source / "model.onnx")
    model = source if command == "pack" else source / "model.onnx"
    # What it imports, nobody may be unable to read.
    assert ortplugins_command(command, model, "-o", "before").returncode == 0
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(source, Path(folder, "given"))
        for path in (Path(folder), *Path(folder).rglob("*")):
            path.chmod(0o555)
        user = os.geteuid()
        try:
            if user == 0:
                os.seteuid(65534)
            done = ortplugins_command(command, f"{folder}/{model}", "-o", f"{folder}/new")
        finally:
            os.seteuid(user)
            Path(folder).chmod(0o755)
        refused = f"error: {folder}: cannot be written to (Permission denied)"
        assert done.stderr == f"{refused}; choose another output\n"
    # A model's folder may be read-only.
    source.chmod(0o555)
    pack(source, "-o", "packed")
    source.chmod(0o755)
