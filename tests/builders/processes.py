# SPDX-License-Identifier: MIT
"""Processes of their own, sessions in them that say what they did, and a small disk."""

import contextlib
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

ROOT = Path(__file__).parents[2]


def python(
    *arguments: object, cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run this interpreter, with more environment variables; return what it printed."""
    return call(sys.executable, *arguments, cwd=cwd, **variables)


def call(
    *command: object, cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run any program so; Python in it imports this checkout before an installed one."""
    path = variables.get("PYTHONPATH") or os.environ.get("PYTHONPATH")
    own = os.pathsep.join([*filter(None, [path]), str(ROOT)])
    return subprocess.run(
        [*map(str, command)],
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
        cwd=cwd,
        env={**os.environ, **variables, "PYTHONPATH": own},
    )


FEED = {"x": np.linspace(-1, 1, 1024, dtype=np.float32).reshape(2, 512)}

_START = """
import hashlib, json, sys, warnings
import numpy as np, onnxruntime as ort, ortplugins
so = ort.SessionOptions()
so.intra_op_num_threads = 1
for name in sys.argv[2:]:
    so.add_session_config_entry(f"ortplugins.enable_{name}", "1")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    session = ortplugins.InferenceSession(sys.argv[1], so, providers=["CPUExecutionProvider"])
x = np.linspace(-1, 1, 1024, dtype=np.float32).reshape(2, 512)
report = session.ortplugins_report
print(json.dumps({
    "source": report.source,
    "digest": hashlib.sha256(session.run(None, {"x": x})[0].tobytes()).hexdigest(),
    "text": report.to_text(),
    "warnings": [str(item.message) for item in caught],
}))
"""


def spawn(
    model: Path, *passes: str, prelude: str = "", **options: Any
) -> subprocess.Popen[str]:
    """Start a process that runs FEED through a session, by default fused and packed."""
    variables = options.pop("variables", {})
    names = passes or ("dq_matmulnbits_fusion", "prepacked_weights")
    return subprocess.Popen(
        [sys.executable, "-c", prelude + _START, str(model), *names],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **variables},
        **options,
    )


def result_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Wait for a process; return source, digest, text of the report, and warnings."""
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    return dict(json.loads(out.splitlines()[-1]))


def digest_of(output: npt.NDArray[Any]) -> str:
    return hashlib.sha256(output.tobytes()).hexdigest()


@contextlib.contextmanager
def disk(folder: Path, size: int) -> Iterator[Path]:
    """A small file system of its own."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        pytest.skip(f"no mount: {error}")
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
