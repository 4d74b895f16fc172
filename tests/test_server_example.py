# SPDX-License-Identifier: MIT
"""The example server, in this process and as two workers, on a model of one weight."""

from __future__ import annotations

import math
import os
import sys
import time
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from builders.dequantized_models import DequantizedMatMul, relative_error

for needed in ("fastapi", "httpx2", "uvicorn", "tokenizers"):
    pytest.importorskip(needed, reason=f"the server example needs {needed}: [server]")

from fastapi.testclient import TestClient  # noqa: E402

from examples.server import load, server  # noqa: E402

MATMUL = DequantizedMatMul(64, 32, 32)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The model that the environment tells the server to run."""
    path = tmp_path / "model.onnx"
    ir.save(MATMUL.model(), path)
    for name in [name for name in os.environ if name.startswith("ORTPLUGINS_SERVER_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("ORTPLUGINS_SERVER_MODEL", str(path))
    return path


def test_run_gives_the_numbers_and_health_tells_what_was_done(model: Path) -> None:
    for source in ("built", "cache"):
        with TestClient(server.app) as client:
            health = client.get("/health").json()
            assert health["source"] == source
            assert health["report"].startswith(f"{source}: fired 2, refused 0")
            assert "\n" not in health["report"]
            assert (health["model"], health["pid"]) == (str(model), os.getpid())
            if sys.platform == "linux":
                assert health["pss_mb"] > 0
                assert health["private_mb"] > 0
            answer = client.post("/run", json={"inputs": {"x": MATMUL.feed().tolist()}})
            y = np.asarray(answer.json()["outputs"]["y"])
            assert relative_error(y, MATMUL.reference(MATMUL.feed())) <= 1e-5
            assert client.get("/metrics").json()["requests"] == 1


def test_plain_is_onnxruntime_alone(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTPLUGINS_SERVER_MODE", "plain")
    with TestClient(server.app) as client:
        health = client.get("/health").json()
        assert (health["mode"], health["source"]) == ("plain", "stock")
        assert client.post("/run", json={"inputs": {"x": [[1.0] * 64]}}).status_code == 200


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ({"z": [[1.0]]}, "no input 'z'; the model has x"),
        ({"x": [[1.0], [1.0, 2.0]]}, "input 'x' is not a tensor(float)"),
        ({"x": [[1.0, 2.0]]}, "invalid dimensions"),
        ({}, "x"),
    ],
)
def test_a_wrong_tensor_is_the_clients_fault(
    model: Path, inputs: dict[str, object], reason: str
) -> None:
    with TestClient(server.app) as client:
        answer = client.post("/run", json={"inputs": inputs})
    assert answer.status_code == 400
    assert reason in answer.json()["detail"]


def test_infinity_and_nan_come_back_as_null(model: Path) -> None:
    with TestClient(server.app) as client:
        answer = client.post("/run", json={"inputs": {"x": [[None] * 64]}})
    assert math.isnan(np.asarray(answer.json()["outputs"]["y"], np.float32)[0, 0])


def test_a_model_that_is_no_decoder_generates_nothing(model: Path) -> None:
    with TestClient(server.app) as client:
        answer = client.post("/generate", json={"prompt": "Hello"})
    assert answer.status_code == 409
    assert "use /run" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("MODEL", None, "`make demo` makes it"),
        ("MODEL", "nowhere.onnx", "nowhere.onnx: there is no such model"),
        ("MODE", "fast", "MODE is 'fast': one of ortplugins, plain"),
        ("THREADS", "0", "THREADS is '0': a number from 1"),
    ],
)
def test_what_is_wrong_with_the_settings_is_one_sentence(
    model: Path,
    name: str,
    value: str | None,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(server, "DEMO_MODEL", model.with_name("not-made-yet.onnx"))
    monkeypatch.delenv("ORTPLUGINS_SERVER_MODEL")
    if value is not None:
        if name != "MODEL":
            monkeypatch.setenv("ORTPLUGINS_SERVER_MODEL", str(model))
        monkeypatch.setenv(f"ORTPLUGINS_SERVER_{name}", value)
    assert server.main([]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert reason in line


@pytest.mark.skipif(os.name == "nt", reason="load.py stops a process group")
def test_two_workers_share_one_build_and_none_is_left_behind(
    model: Path, tmp_path: Path
) -> None:
    with load.serve({}, 2, tmp_path) as running:
        workers = running.workers(2, 300)
        assert {worker["report"].partition("; ")[0] for worker in workers} <= {
            "built: fired 2, refused 0",
            "cache: fired 2, refused 0",
        }
    assert len(list((tmp_path / "cache" / "entries").iterdir())) == 1
    deadline = time.monotonic() + 10
    while _alive(workers[0]["pid"]) or _alive(workers[1]["pid"]):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
