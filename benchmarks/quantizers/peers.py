# SPDX-License-Identifier: MIT
"""An environment of their own for the packages that ours is compared with, and a way in.

``.cache/quantizer-peers/venv`` is made at the first call; ORTPLUGINS_PEERS names the Python of
one that is there already. ModelOpt's own extra [onnx] asks for onnxruntime-gpu 1.24, onnx 1.21
and CUDA: what it imports on a CPU is listed here instead, with the versions that ours uses.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.models.corpus import CACHE
from benchmarks.quantizers.quantizer_peers import Job
from ortplugins.runtime.machine import process_memory

# torch comes first and alone: the wheel for CPUs satisfies the requirement of those after it.
# Where pip finds only the one with CUDA, PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
# spares 3 GB.
_REQUIREMENTS = (
    ("torch==2.13.0",),
    ("nvidia-modelopt==0.47.0", "onnx==1.23.2", "onnxruntime==1.31.1", "numpy==2.4.6"),
    (
        "--no-deps",
        "onnx-graphsurgeon==0.6.1",
        "onnxconverter-common==1.16.0",
        "onnxslim==0.1.98",
        "onnxscript==0.7.2",
        "onnx-ir==1.1.0",
        "polygraphy==0.53.6",
        "lief==1.0.0",
        # With these and a C++ compiler it packs codes in C++; in Python that takes minutes.
        "cppimport==26.4.17",
        "pybind11==3.1.0",
        "mako==1.4.3",
        "markupsafe==3.0.4",
    ),
    ("--no-deps", "olive-ai==0.13.0"),
    # What its passes on ONNX files import.
    (
        "opentelemetry-sdk==1.45.2",
        "optuna==5.0.0",
        "pandas==3.1.1",
        "psutil==7.2.2",
        "pydantic==2.14.3",
        "requests==2.34.2",
        "torchmetrics==1.9.0",
        "transformers==5.23.0",
    ),
)
_THREADS = 2
_WATCH_SECONDS = 0.002
# Becomes another program without becoming another process, whose memory is watched.
_EXEC = """
import os, sys
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(sys.argv[1])])
os.execv(sys.argv[2], sys.argv[2:])
"""
_OURS = """
import json, sys, time
from benchmarks.quantizers.quantizer_peers import Samples
from ortplugins.quantization import quantize
job = json.loads(sys.argv[1])
if path := job["calibration_data_reader"]:
    job["calibration_data_reader"] = Samples(path)
start = time.perf_counter()
quantize(**job)
print(json.dumps({"seconds": time.perf_counter() - start, "versions": {}}))
"""


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a quantizer did.

    Attributes:
        result: The JSON value that it printed last.
        peak_private_mb: Peak of its private memory, imports included.
    """

    result: Any
    peak_private_mb: float


def run_peer(job: Job) -> Cost:
    """Run another quantizer in a fresh process, on two cores.

    Raises:
        RuntimeError: If the environment can't be made or the quantizer fails.
    """
    script = Path(__file__).with_name("quantizer_peers.py")
    return run_script(script, dataclasses.asdict(job))


def run_script(script: Path, job: Mapping[str, Any]) -> Cost:
    """Run a script that takes its job as JSON in the environment of the peers, on two cores.

    Raises:
        RuntimeError: If the environment can't be made or the script fails.
    """
    return _on_two_cores(str(_python()), str(script), json.dumps(job))


def run_ours(**arguments: Any) -> Cost:
    """Run ``ortplugins.quantization.quantize`` in the same way; arguments are JSON's types."""
    return _on_two_cores(sys.executable, "-c", _OURS, json.dumps(arguments))


def run_modelopt_on_smollm2(floats: Path, samples: Path, block_size: int) -> Cost:
    """Run ModelOpt's AWQ-lite and keep its model: it takes long, and perplexity reads it."""
    path, seconds = _kept(floats, block_size)
    path.parent.mkdir(parents=True, exist_ok=True)
    for file in (seconds, path.with_name("model.onnx.data")):  # onnx appends to data
        file.unlink(missing_ok=True)
    cost = run_peer(
        Job(
            "modelopt_awq_lite",
            str(floats),
            str(path),
            calibration=str(samples),
            block_size=block_size,
            exclude=("lm_head",),
            fast=True,
        )
    )
    seconds.write_text(json.dumps(cost.result["seconds"]))
    return cost


def modelopt_smollm2(floats: Path, samples: Path, block_size: int) -> tuple[Path, float]:
    """Return the model that it keeps, and how long it took; made if it is not there yet."""
    path, seconds = _kept(floats, block_size)
    if not seconds.exists():
        run_modelopt_on_smollm2(floats, samples, block_size)
    return path, json.loads(seconds.read_text())


def _kept(floats: Path, block_size: int) -> tuple[Path, Path]:
    folder = CACHE / f"modelopt-{floats.parent.name}-{block_size}"
    return folder / "model.onnx", folder / "seconds.json"


def _on_two_cores(*command: str) -> Cost:
    # For thread pools that ignore the affinity.
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    env = os.environ | dict.fromkeys(names, str(_THREADS)) | {"OLIVE_DISABLE_TELEMETRY": "1"}
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            [sys.executable, "-c", _EXEC, str(_THREADS), *command],
            stdout=output,
            stderr=errors,
            env=env,
        )
        peak = 0
        while child.poll() is None:
            peak = max(peak, process_memory(child.pid).private or 0)
            time.sleep(_WATCH_SECONDS)
        output.seek(0)
        errors.seek(0)
        if child.returncode:
            raise RuntimeError(f"the child failed:\n{errors.read().decode(errors='replace')}")
        return Cost(json.loads(output.read().splitlines()[-1]), peak / 1e6)


def _python() -> Path:
    if given := os.environ.get("ORTPLUGINS_PEERS"):
        return Path(given)
    folder = CACHE.with_name("quantizer-peers") / "venv"
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    done = folder / "installed.json"
    if done.exists() and json.loads(done.read_text()) == [list(r) for r in _REQUIREMENTS]:
        return python
    print(f"Making {folder} for the other quantizers ...", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    for requirements in _REQUIREMENTS:
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        run = subprocess.run(
            [*pip, *requirements], capture_output=True, text=True, check=False
        )
        if run.returncode:
            raise RuntimeError(f"pip install {' '.join(requirements)}:\n{run.stderr.strip()}")
    done.write_text(json.dumps(_REQUIREMENTS))
    return python
