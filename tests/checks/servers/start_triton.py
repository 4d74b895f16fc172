# SPDX-License-Identifier: MIT
"""``FOLDER PORT``: Triton on examples/triton. The wheel of PyTriton brings its programs."""

import os
import shutil
import sys
import sysconfig
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
folder, port = Path(sys.argv[1]), sys.argv[2]
site = Path(sysconfig.get_path("purelib"))
programs = site / "pytriton" / "tritonserver"
# As in Triton's container: the stub, which runs the model, beside the backend.
shutil.copytree(programs / "backends", folder / "backends", dirs_exist_ok=True)
stub = programs / "python_backend_stubs" / f"{sys.version_info[0]}.{sys.version_info[1]}"
shutil.copy(stub / "triton_python_backend_stub", folder / "backends" / "python")
models = shutil.copytree(EXAMPLES / "triton" / "models", folder / "models", dirs_exist_ok=True)
shutil.copy(EXAMPLES / "embedder.py", models / "embedder" / "1")
os.environ["LD_LIBRARY_PATH"] = str(site / "nvidia_pytriton.libs")
os.environ["EMBEDDER_FOLDER"] = str(EXAMPLES.parent / ".cache" / "embedder")
arguments = {
    "model-repository": models,
    "backend-directory": folder / "backends",
    "http-address": "127.0.0.1",
    "http-port": port,
    "model-control-mode": "explicit",  # so that a request may load the model again
    "load-model": "embedder",
    "allow-grpc": "false",
    "allow-metrics": "false",
}
program = str(programs / "bin" / "tritonserver")
os.execv(program, [program, *(f"--{name}={value}" for name, value in arguments.items())])
