# SPDX-License-Identifier: MIT
"""Processor time that a start adds to onnxruntime's constructor, imports included."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from benchmarks.figures.bounds import Figure
from benchmarks.models.int4_chain import write_chain
from ortplugins.known_starts import SETTLED_SECONDS
from ortplugins.runtime.child_process import child_environment

_PAIRS, _WIDTH = 6, 64
_PROCESSES = 20
# Milliseconds that the first session of a process may add, and a later one.
_BOUNDS = {"hit": (3.0, 1.0), "packed weights": (3.0, 1.0), "nothing fires": (2.0, 0.5)}
# A process of a user, who has imported onnxruntime and nothing else. What the constructor of
# onnxruntime takes within ours counts for onnxruntime.
_STARTS = """
import sys, time
import onnxruntime
construct, native = onnxruntime.InferenceSession.__init__, []
def timed(*args, **kwargs):
    start = time.thread_time()
    construct(*args, **kwargs)
    native.append(time.thread_time() - start)
onnxruntime.InferenceSession.__init__ = timed
for number in range(3):
    start = time.thread_time()
    import ortplugins
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.add_session_config_entry("ortplugins.cache_dir", sys.argv[2])
    for name in sys.argv[3].split():
        options.add_session_config_entry("ortplugins.enable_" + name, "1")
    providers = ["CPUExecutionProvider"]
    session = ortplugins.InferenceSession(sys.argv[1], options, providers=providers)
    print(time.thread_time() - start - sum(native))
    native.clear()
assert session.ortplugins_report.source == sys.argv[4], session.ortplugins_report
"""


def measure_processor_time(folder: Path, rounds: int) -> list[Figure]:
    """Measure first and later sessions of fresh processes, on starts that are known."""
    model = folder / "chain.onnx"
    write_chain(model, _PAIRS, _WIDTH, _WIDTH, "axis0")
    time.sleep(SETTLED_SECONDS)
    figures = []
    for what, arguments in {
        "hit": ("dq_matmulnbits_fusion", "cache"),
        "packed weights": ("dq_matmulnbits_fusion prepacked_weights", "cache"),
        "nothing fires": ("trim_padding", "untouched"),
    }.items():
        found = [_starts(model, folder / "cache", *arguments) for _ in range(_PROCESSES + 2)]
        first, later = (min(times) for times in zip(*found[2:], strict=True))
        for name, least, bound in zip(
            ("first", "later"), (first, later), _BOUNDS[what], strict=True
        ):
            text = f"{what}, {name} session of a process"
            figures.append(Figure(text, 1e3 * least, unit="ms", bound=bound))
    return figures


def _starts(model: Path, cache: Path, name: str, source: str) -> tuple[float, float]:
    """Return the seconds of the first session of a process, and of a later one."""
    environment = child_environment("benchmark")
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(
        [sys.executable, "-c", _STARTS, str(model), str(cache), name, source],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    first, *others = map(float, done.stdout.split())
    return first, min(others)
