# SPDX-License-Identifier: MIT
"""Wherever the work on weights runs, the files are the same, bit for bit."""

import concurrent.futures
import multiprocessing
import os
import tracemalloc
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from builders.quantized_files import read
from builders.text_models import matmul_chain, model_of, normal

from ortplugins.quantization import quantize

# Processes are started in the middle of these; one worker of pytest-xdist runs them all.
pytestmark = pytest.mark.xdist_group("scale_out")

WIDTHS = (64, 96, 70, 64)
METHODS = ["rtn", "awq_lite", "gptq"]


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chain of MatMuls and Tanhs, its weights in a data file."""
    model = matmul_chain(["mm0", "mm1", "mm2"], WIDTHS, "Tanh")
    path = tmp_path_factory.mktemp("float") / "model.onnx"
    ir.save(model, path, external_data="model.onnx.data")
    return path


def samples():
    return [{"x": normal(40, 64, seed=seed)} for seed in range(3)]


def files(output: Path) -> list[bytes]:
    return [output.read_bytes(), output.with_name(f"{output.name}.data").read_bytes()]


def written(executor, floats: Path, folder: Path) -> dict[str, list[bytes]]:
    """What an executor writes, by method."""
    found = {}
    for method in METHODS:
        output = folder / method / "q.onnx"
        output.parent.mkdir()
        data = {"calibration_data_reader": samples()}
        quantize(floats, output, method=method, executor=executor, **data)
        found[method] = files(output)
        assert sorted(p.name for p in output.parent.iterdir()) == ["q.onnx", "q.onnx.data"]
    return found


@pytest.fixture(scope="module")
def expected(floats: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[bytes]]:
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        return written(executor, floats, tmp_path_factory.mktemp("expected"))


def test_the_default_threads_and_other_processes(floats, expected, tmp_path):
    assert written(None, floats, tmp_path) == expected
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=spawn) as executor:
        (tmp_path / "processes").mkdir()
        assert written(executor, floats, tmp_path / "processes") == expected


def test_threads_share_the_columns_of_one_weight(monkeypatch):
    text = "g (float[T, 40] x) => (float[T, 1200] y) { [m] y = MatMul(x, W) }"
    model = model_of(text, {"W": normal(40, 1200)})
    samples = [{"x": normal(99, 40, seed=1)}]
    options = {"method": "gptq", "block_size": 16, "calibration_data_reader": samples}
    found = []
    for cores in (1, 3):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        found.append(quantize(model, **options))
    ours, theirs = (read(result.model).SerializeToString() for result in found)
    assert ours == theirs
    assert found[0].report.to_dict() == found[1].report.to_dict()


def test_two_processes_of_dask(floats, expected, tmp_path):
    distributed = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            processes=True,
            dashboard_address=None,
            host="127.0.0.1",
        ) as cluster,
        distributed.Client(cluster) as client,
        client.get_executor() as executor,
    ):
        assert written(executor, floats, tmp_path) == expected


class RayExecutor(concurrent.futures.Executor):
    """As docs/quantization.md has it."""

    def submit(self, function, /, *args, **kwargs):
        import ray

        return ray.remote(function).remote(*args, **kwargs).future()


def test_two_processes_of_ray(floats, expected, tmp_path):
    ray = pytest.importorskip("ray", reason="ray is not installed")
    ray.init(num_cpus=2, include_dashboard=False)
    try:
        assert written(RayExecutor(), floats, tmp_path) == expected
    finally:
        ray.shutdown()


def test_an_error_in_a_worker_names_the_weight(tmp_path):
    text = "bad (float[b, 64] x) => (float[b, 4] y) { [mm] y = MatMul(x, W) }"
    model = model_of(text, {"W": np.full((64, 4), np.nan, np.float32)})
    spawn = multiprocessing.get_context("spawn")
    with (
        concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as executor,
        pytest.raises(ValueError, match="weight 'W' cannot be quantised: it holds NaN"),
    ):
        quantize(model, tmp_path / "q.onnx", executor=executor)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("form", ["MatMul(x, W)", "Gemm <transB = 1> (x, W)"])
def test_a_wide_weight_is_never_in_float32_as_a_whole(form, tmp_path):
    k, n = 512, 65536
    weight = normal(k, n, dtype=np.float16)
    weight = np.ascontiguousarray(weight.T) if "transB" in form else weight
    text = f"g (float16[T, {k}] x) => (float16[T, {n}] y) {{ y = {form} }}"
    ir.save(model_of(text, {"W": weight}), tmp_path / "f.onnx", external_data="f.data")
    samples = [{"x": normal(64, k, dtype=np.float16)}]
    tracemalloc.start()
    options = {"method": "awq_lite", "calibration_data_reader": samples}
    quantize(tmp_path / "f.onnx", tmp_path / "q.onnx", **options)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    strips = (6 * 4 << 20) * (os.cpu_count() or 1)
    assert peak < k * n * 1.5 + strips  # a byte for each code, and parts of it
