# SPDX-License-Identifier: MIT
"""Which interpreter builds a model, in what process, and what it says when it cannot."""

import multiprocessing.spawn
import os
import sys
from pathlib import Path

import pytest
from builders.dequantized_models import DequantizedMatMul
from builders.sessions import start

import ortplugins
from ortplugins.runtime.child_process import child_environment, child_python

CASE = DequantizedMatMul(128, 64, 32, "int4", "transposed")
OWN = "/usr/bin/python3.11"


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ORTPLUGINS_BUILD_IN_PROCESS", "ORTPLUGINS_PYTHON", "ORTPLUGINS_CHILD_OF"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("executable", "frozen", "python", "setting", "expected"),
    [
        (OWN, False, OWN, "", OWN),
        ("/opt/app/app", True, "/opt/app/app", "", None),  # PyInstaller
        ("/opt/app/python-tool", True, "/opt/app/python-tool", "", None),
        ("/usr/bin/uwsgi", False, "/usr/bin/uwsgi", "", None),
        ("/usr/bin/uwsgi", False, "/usr/bin/uwsgi", OWN, OWN),
        ("/opt/app/app", True, OWN, "", OWN),  # multiprocessing.set_executable
        ("", False, "", "", None),
    ],
)
def test_the_interpreter(executable, frozen, python, setting, expected, monkeypatch):
    monkeypatch.setattr(sys, "executable", executable)
    monkeypatch.setattr(sys, "frozen", frozen, raising=False)
    monkeypatch.setattr(multiprocessing.spawn, "_python_exe", python)
    if setting:
        monkeypatch.setenv("ORTPLUGINS_PYTHON", setting)
    assert child_python("build") == expected


def test_a_child_starts_none_for_the_same_purpose(monkeypatch):
    monkeypatch.setenv("ORTPLUGINS", "conv_fusion")
    made = child_environment("build")
    assert os.environ.keys() - made.keys() == {"ORTPLUGINS"}
    for name, value in made.items():
        monkeypatch.setenv(name, value)
    assert child_python("build") is None
    assert child_python("prepacked_weights") == sys.executable


def test_a_program_taken_for_an_interpreter_is_started_once(model_path, tmp_path, monkeypatch):
    program, log = tmp_path / "python", tmp_path / "log"
    program.write_text(f"#!/bin/sh\necho started >> {log}\nexec false\n")
    program.chmod(0o755)
    monkeypatch.setenv("ORTPLUGINS_PYTHON", str(program))
    with pytest.warns(ortplugins.OrtpluginsWarning, match="ended with 1"):
        start(model_path)
    assert log.read_text() == "started\n"


@pytest.mark.filterwarnings("ignore:cannot write the cache")
@pytest.mark.parametrize("cache_is_usable", [True, False])
def test_missing_data_keeps_its_error(model_path, cache_dir, cache_is_usable):
    if not cache_is_usable:
        cache_dir.write_text("no directory")
    model_path.with_name("model.onnx.data").unlink()
    with pytest.raises(Exception, match=r"(?s)model\.onnx\.data") as caught:
        start(model_path)
    assert "is missing" in caught.value.__notes__[0]


@pytest.mark.parametrize("entry", [Path("a folder"), b"a folder", None])
def test_what_python_ignores_on_its_path_is_ignored(model_path, monkeypatch, entry):
    monkeypatch.setattr(sys, "path", [*sys.path, entry])
    assert start(model_path).ortplugins_report.source == "built"
