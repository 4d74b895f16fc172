# SPDX-License-Identifier: MIT
"""Folders: one in, one out, with all that goes along; and that of a run, which can go on."""

import errno
import os
import shutil
from pathlib import Path

import filelock
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from builders.command_line import as_json, ortplugins_command, printed
from builders.decoders import decoder
from builders.samples import write_tokenizer
from builders.text_models import matmul_chain, normal

from ortplugins.errors import MissingFileError, ModelFileError, UsageError
from ortplugins.quantization import Rule, quantize
from ortplugins.quantization.weights import run, run_folder

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
    words = np.random.default_rng(0).choice(WORDS[3:], 1200)
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


def test_a_folder_is_replaced_whole_or_not_at_all(source, monkeypatch):
    quantize(source, "int4", block_size=16)
    before = Path("int4/onnx/model.onnx").read_bytes()
    with pytest.raises(FileExistsError, match="int4: exists"):
        quantize(source, "int4", bits=8, block_size=16)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(shutil, "copy", full)
        quantize(source, "int4", bits=8, block_size=16, overwrite=True)
    Path("int4/notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"notes\.txt: would be lost"):
        quantize(source, "int4", bits=8, block_size=16, overwrite=True)
    assert Path("int4/onnx/model.onnx").read_bytes() == before
    Path("int4/notes.txt").unlink()
    quantize(source, "int4", bits=8, block_size=16, overwrite=True)
    assert Path("int4/onnx/model.onnx").read_bytes() != before
    assert sorted(os.listdir()) == ["float", "int4", "text.txt"]


def test_folders_that_cannot_be_are_refused(source):
    for output in ("float", "float/int4", "."):
        with pytest.raises(ModelFileError, match="the model's own folder"):
            quantize(source, output)
    with pytest.raises(ModelFileError, match="the folder above it does not exist"):
        quantize(source, "no/where")
    with pytest.raises(NotADirectoryError, match=r"text\.txt: is a file"):
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
    assert "quantised weights" in shown and "float: Gather, 1 weights, " in shown
    assert "refused" not in shown  # a table that nobody asked for
    planned = printed("quantize", source, "--block-size", "16", "--dry-run")
    assert "float: Gather, 1 weights, " in planned
    result = as_json(*arguments, "more", "--method", "gptq")
    found = result["evaluation"]
    (table, *_) = result["coverage"]["rest"]
    assert (table["op_type"], table["reason"]) == ("Gather", "Gather is not among op_types")
    # A third of four windows is more than one: two are left, and the rest of the text.
    assert found["count"] == 511 and found["kl_divergence"] > 0 and found["held_back"]
    assert "evaluated on the part of text.txt that calibration did not read" in shown
    judged = found["model"]["coverage"]
    assert judged["quantized_elements"] == result["coverage"]["quantized_elements"] > 0
    assert judged["elements"] == result["coverage"]["elements"]
    assert found["against"]["coverage"]["quantized_elements"] == 0
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
    expected = "not evaluated: what calibration left of text.txt: "
    assert expected in printed(*arguments, "short")
    assert Path("short/tokenizer.json").exists()


# The folder of a run: what goes on after an interruption, and what is not found in it.


D, LAYERS = 32, 5
SAMPLES = [{"x": normal(100, D, seed=7)}]


def save(path: str, seed: int = 0) -> None:
    names = [f"m{number}" for number in range(LAYERS)]
    ir.save(matmul_chain(names, [D] * (LAYERS + 1), "Tanh", seed), path)


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Count the passes over samples and the groups that are worked on, from here on."""
    monkeypatch.chdir(tmp_path)
    save("model.onnx")
    found = {"collect": 0, "quantize_group": 0}

    def counted(module, name):
        function = getattr(module, name)

        def call(*args, **kwargs):
            found[name] += 1
            return function(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    counted(run, "collect")
    counted(run, "quantize_group")
    return found


def made(calls: dict[str, int], method: str = "awq_clip", **options) -> tuple[bytes, int, int]:
    """Return the result, and how often samples were run and groups quantised for it."""
    calls.update(collect=0, quantize_group=0)
    given = {"model": "model.onnx", "calibration_data_reader": SAMPLES, "run_folder": "run"}
    given |= {"block_size": 16, "overwrite": True} | options
    quantize(given.pop("model"), "out.onnx", method=method, **given)
    return Path("out.onnx").read_bytes(), calls["collect"], calls["quantize_group"]


@pytest.mark.parametrize("quantized_inputs", [False, True])
@pytest.mark.parametrize("method", ["rtn", "awq_clip", "gptq", "awq_gptq"])
def test_a_run_that_was_interrupted_goes_on(method, quantized_inputs, calls, monkeypatch):
    options = {"method": method, "share_of_8_bits": 0.3, "quantized_inputs": quantized_inputs}
    options["is_symmetric"] = quantized_inputs
    # One layer of five gets 8 bits; those that are quantised again get them then.
    tasks = 2 * LAYERS if quantized_inputs and "gptq" in method else LAYERS + 1
    expected, *_ = made(calls, **options, run_folder="other")
    keep, written = run_folder.RunFolder.keep_codes, []

    def full(*args):
        if len(written) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(args)
        keep(*args)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(run_folder.RunFolder, "keep_codes", full)
        made(calls, **options)
    assert made(calls, **options) == (expected, 0, tasks - 2)
    assert made(calls, **options) == (expected, 0, 0)
    # Cut off, or not written whole, when the machine went down.
    for pattern in ("codes-*.bin", "codes-*.json"):
        for damaged in (lambda content: content[:-1], lambda content: bytes(len(content))):
            for path in Path("run").glob(pattern):
                path.write_bytes(damaged(path.read_bytes()))
            assert made(calls, **options) == (expected, 0, tasks)


def test_another_method_finds_the_statistics(calls):
    expected = {name: made(calls, name, run_folder=name)[0] for name in ("gptq", "awq_clip")}
    assert made(calls, "awq_lite")[1:] == (1, LAYERS)
    for name, content in expected.items():
        assert made(calls, name) == (content, 0, LAYERS)
    # Rules change the groups that they mean, and no others.
    rules = (Rule("m0", bits=8), Rule("m1", method="awq_lite"))
    assert made(calls, "gptq", rules=rules)[1:] == (0, 1)


@pytest.mark.parametrize("change", ["model", "samples", "providers", "version"])
def test_what_belongs_to_something_else_is_not_found(change, calls, monkeypatch):
    made(calls, "gptq")
    options = {}
    if change == "model":
        save("model.onnx", seed=1)
    elif change == "samples":
        options["calibration_data_reader"] = [{"x": SAMPLES[0]["x"] + np.float32(0.5)}]
    elif change == "providers":
        options["calibration_providers"] = [("CPUExecutionProvider", {"use_arena": "0"})]
    else:
        monkeypatch.setattr(run_folder, "__version__", "0")
    assert made(calls, "gptq", **options)[1:] == (1, LAYERS)


def test_folders_that_are_not_a_run_s_are_refused(calls):
    Path("mine").mkdir()
    Path("mine/notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="mine: holds other files"):
        made(calls, run_folder="mine")
    assert [path.name for path in Path("mine").iterdir()] == ["notes.txt"]
    with pytest.raises(UsageError, match="needs the path of a model"):
        made(calls, model=ir.load("model.onnx"))
    made(calls)
    with filelock.FileLock("run/lock"), pytest.raises(UsageError, match="another run uses it"):
        made(calls)
