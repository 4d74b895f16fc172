# SPDX-License-Identifier: MIT
"""The folder of a run: what goes on after an interruption, and what is not found in it."""

import errno
from pathlib import Path

import filelock
import numpy as np
import onnx_ir as ir
import pytest
from builders.command_line import ortplugins_command
from builders.text_models import matmul_chain, normal

from ortplugins.errors import UsageError
from ortplugins.quantization import Rule, quantize
from ortplugins.quantization.weights import run_folder, work

D, LAYERS = 32, 5
SAMPLES = [{"x": normal(100, D, seed=7)}]


def save(path: str, seed: int = 0) -> None:
    names = [f"m{number}" for number in range(LAYERS)]
    ir.save(matmul_chain(names, [D] * (LAYERS + 1), "Tanh", seed), path)


@pytest.fixture(autouse=True)
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

    counted(work, "collect")
    counted(work, "quantize_group")
    return found


def made(calls: dict[str, int], method: str = "awq_full", **options) -> tuple[bytes, int, int]:
    """Return the result, and how often samples were run and groups quantised for it."""
    calls.update(collect=0, quantize_group=0)
    given = {"model": "model.onnx", "calibration_data_reader": SAMPLES, "run_folder": "run"}
    given |= {"block_size": 16, "overwrite": True} | options
    quantize(given.pop("model"), "out.onnx", method=method, **given)
    return Path("out.onnx").read_bytes(), calls["collect"], calls["quantize_group"]


@pytest.mark.parametrize("quantized_inputs", [False, True])
@pytest.mark.parametrize("method", ["rtn", "awq_full", "gptq", "awq_gptq"])
def test_a_run_that_was_interrupted_goes_on(method, quantized_inputs, calls, monkeypatch):
    options = {"method": method, "share_of_8_bits": 0.3, "quantized_inputs": quantized_inputs}
    tasks = 2 * LAYERS if quantized_inputs and "gptq" in method else LAYERS
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
    for pattern in ("codes-*.bin", "codes-*.json"):  # cut off when the machine went down
        for path in Path("run").glob(pattern):
            path.write_bytes(path.read_bytes()[:-1])
        assert made(calls, **options) == (expected, 0, tasks)


def test_another_method_finds_the_statistics(calls):
    expected = {name: made(calls, name, run_folder=name)[0] for name in ("gptq", "awq_clip")}
    assert made(calls, "awq_lite")[1:] == (1, LAYERS)
    for name, content in expected.items():
        assert made(calls, name) == (content, 0, LAYERS)
    # Rules change the groups that they mean, and no others.
    rules = (Rule("m0", bits=8), Rule("m1", method="awq_lite"))
    assert made(calls, "gptq", rules=rules)[1:] == (0, 1)


@pytest.mark.parametrize("change", ["model", "samples", "version"])
def test_what_belongs_to_something_else_is_not_found(change, calls, monkeypatch):
    made(calls, "gptq")
    options = {}
    if change == "model":
        save("model.onnx", seed=1)
    elif change == "samples":
        options["calibration_data_reader"] = [{"x": SAMPLES[0]["x"] + np.float32(0.5)}]
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


def test_the_command_has_it(calls):
    np.savez("x.npz", **SAMPLES[0])
    arguments = ["quantize", "model.onnx", "--samples", "x.npz", "--run-folder", "run"]
    for method, passes in (("gptq", 1), ("awq_lite", 0)):
        calls["collect"] = 0
        done = ortplugins_command(*arguments, "--method", method, "-o", f"{method}.onnx")
        assert (done.returncode, done.stderr, calls["collect"]) == (0, "", passes)
