# SPDX-License-Identifier: MIT
"""Wherever the work on weights runs, the files are the same, bit for bit."""

from __future__ import annotations

import concurrent.futures
import itertools
import multiprocessing
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from ortplugins.quantization import quantize

# Processes are started in the middle of these; one worker of pytest-xdist runs them all.
pytestmark = pytest.mark.xdist_group("scale_out")

WIDTHS = (64, 96, 70, 64)
METHODS = ["rtn", "awq_full", "awq_gptq"]


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chain of MatMuls and Tanhs, its weights in a data file."""
    random = np.random.default_rng(0)
    text = "y0 = Identity(x)"
    tensors = []
    for i, (k, n) in enumerate(itertools.pairwise(WIDTHS)):
        weight = random.normal(size=(k, n)).astype(np.float32) / k**0.5
        tensors.append(ir.tensor(weight, name=f"W{i}"))
        text += f"\n[mm{i}] m{i} = MatMul(y{i}, W{i})\ny{i + 1} = Tanh(m{i})"
    model = ir.from_onnx_text(
        f"""<ir_version: 10, opset_import: ["": 21]>
        chain (float[b, {WIDTHS[0]}] x) => (float[b, {WIDTHS[-1]}] y3) {{
            {text}
        }}""",
        initializers=tensors,
    )
    path = tmp_path_factory.mktemp("float") / "model.onnx"
    ir.save(model, path, external_data="model.onnx.data")
    return path


def samples():
    random = np.random.default_rng(1)
    return [{"x": random.normal(size=(40, 64)).astype(np.float32)} for _ in range(3)]


def files(output: Path) -> list[bytes]:
    return [output.read_bytes(), output.with_name(f"{output.name}.data").read_bytes()]


@pytest.fixture(scope="module")
def expected(floats: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[bytes]]:
    """What one thread writes, by method."""
    folder = tmp_path_factory.mktemp("expected")
    written = {}
    for method in METHODS:
        output = folder / method / "q.onnx"
        output.parent.mkdir()
        with concurrent.futures.ThreadPoolExecutor(1) as executor:
            quantize(
                floats,
                output,
                method=method,
                calibration_data_reader=samples(),
                executor=executor,
            )
        written[method] = files(output)
    return written


def check(executor, floats, expected, folder):
    for method in METHODS:
        output = folder / method / "q.onnx"
        output.parent.mkdir()
        quantize(
            floats,
            output,
            method=method,
            calibration_data_reader=samples(),
            executor=executor,
        )
        assert files(output) == expected[method], method
        assert sorted(p.name for p in output.parent.iterdir()) == ["q.onnx", "q.onnx.data"]


def test_the_default_threads(floats, expected, tmp_path):
    check(None, floats, expected, tmp_path)


def test_other_processes(floats, expected, tmp_path):
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=spawn) as executor:
        check(executor, floats, expected, tmp_path)


@pytest.fixture(scope="module")
def scheduler():
    """Address of a real Dask cluster of two processes on this machine."""
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(
        n_workers=2,
        threads_per_worker=1,
        processes=True,
        dashboard_address=None,
        host="127.0.0.1",
    ) as cluster:
        yield cluster.scheduler_address


def test_workers_of_a_dask_cluster(floats, expected, tmp_path, scheduler):
    from distributed import Client

    with Client(scheduler) as client, client.get_executor() as executor:
        check(executor, floats, expected, tmp_path)


def test_the_command_line_finds_a_scheduler(floats, expected, tmp_path, scheduler):
    np.savez(tmp_path / "samples.npz", x=np.concatenate([s["x"][None] for s in samples()]))
    output = tmp_path / "q.onnx"
    command = [sys.executable, "-m", "ortplugins", "quantize", str(floats), "-o", str(output)]
    command += ["--method", "awq_full", "--samples", str(tmp_path / "samples.npz")]
    done = subprocess.run(
        [*command, "--scheduler", scheduler], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert files(output) == expected["awq_full"]


def test_a_scheduler_that_is_not_there_is_told(floats, tmp_path):
    pytest.importorskip("distributed")
    command = [sys.executable, "-m", "ortplugins", "quantize", str(floats)]
    command += ["-o", str(tmp_path / "q.onnx"), "--scheduler", "tcp://127.0.0.1:9"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: tcp://127.0.0.1:9: no scheduler answers")
    assert not list(tmp_path.iterdir())


def test_an_error_in_a_worker_names_the_weight(tmp_path):
    weight = np.ones((64, 4), np.float32)
    weight[3, 3] = np.nan
    model = ir.from_onnx_text(
        """<ir_version: 10, opset_import: ["": 21]>
        bad (float[b, 64] x) => (float[b, 4] y) { [mm] y = MatMul(x, W) }""",
        initializers=[ir.tensor(weight, name="W")],
    )
    spawn = multiprocessing.get_context("spawn")
    with (
        concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as executor,
        pytest.raises(ValueError, match="weight 'W' cannot be quantised: it holds NaN"),
    ):
        quantize(model, tmp_path / "q.onnx", executor=executor)
    assert not list(tmp_path.iterdir())
