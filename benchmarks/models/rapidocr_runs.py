# SPDX-License-Identifier: MIT
"""Runs rapidocr's own pipeline, plain and under ``ortplugins run``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.models.corpus import CACHE

_ROOT = Path(__file__).resolve().parents[2]
_PROGRAM = Path(__file__).with_name("read_page.py")
# In addition to the onnxruntime and numpy of this environment.
_REQUIREMENTS = (
    "rapidocr-onnxruntime==1.4.4",
    "opencv-python-headless==5.0.0.93",
    "pillow==13.0.0",
    "pyclipper==1.4.0",
    "pyyaml==6.0.4",
    "shapely==2.2.0",
    "six==1.17.0",
    "tqdm==4.70.1",
)


def read_page(cache: Path, passes: Sequence[str] = ()) -> dict[str, Any]:
    """Read a page in a process of its own, under ``ortplugins run`` if passes are given.

    Returns what :mod:`.read_page` prints.

    Raises:
        RuntimeError: If the packages can't be installed, or the program fails.
    """
    path = os.pathsep.join((str(_packages()), str(_ROOT)))
    env = {**os.environ, "PYTHONPATH": path, "ORTPLUGINS_CACHE_DIR": str(cache)}
    chosen = [argument for name in passes for argument in ("--pass", name)]
    start = ["-m", "ortplugins", "run", *chosen] if passes else []
    return dict(json.loads(_run([*start, str(_PROGRAM)], env).splitlines()[-1]))


def _packages() -> Path:
    """Return a folder with rapidocr and what it imports, made at the first call."""
    folder = CACHE.with_name("rapidocr")
    done = folder / "installed.json"
    if not done.exists() or json.loads(done.read_text()) != [*_REQUIREMENTS]:
        pip = ["-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target"]
        _run([*pip, str(folder), *_REQUIREMENTS], dict(os.environ))
        done.write_text(json.dumps(_REQUIREMENTS))
    return folder


def _run(arguments: Sequence[str], env: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=env, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)}:\n{done.stderr.strip()}")
    return done.stdout
