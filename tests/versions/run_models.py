# SPDX-License-Identifier: MIT
"""Runs models on whatever onnxruntime it finds, and tells how far off the numbers are.

    python run_models.py FOLDER < names

where FOLDER holds, for each name, a model NAME.onnx, and beside it numbers.npz: feeds as
"feed:<input>", expected outputs as "output:<index>". Models of one subfolder share theirs. For
each name it prints a line of JSON:

    {"name": ..., "plain": <outcome>, "optimised": <outcome>}

without and with onnxruntime's optimisers; an outcome is the greatest error over the greatest
expected number, or the first line of the error. A crash shows as a missing line. Needs numpy
and onnxruntime only, of any version.
"""

from __future__ import annotations

import functools
import json
import math
import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort

_ERROR_CHARACTERS = 300
_LEVELS = {
    "plain": ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "optimised": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
}


@functools.lru_cache(maxsize=1)
def _numbers(path: Path) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
    """Feeds by name, and the expected outputs."""
    with np.load(path) as arrays:
        feeds = {name[5:]: arrays[name] for name in arrays if name.startswith("feed:")}
        count = sum(name.startswith("output:") for name in arrays)
        return feeds, [arrays[f"output:{index}"] for index in range(count)]


def _run(model: Path, level: ort.GraphOptimizationLevel) -> float | str:
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    # What is left unfused is not to be fused with rounded activations by onnxruntime.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "0")
    feeds, expected = _numbers(model.parent / "numbers.npz")
    try:
        session = ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
        # Twice: what reads memory that it has not written may be lucky at first.
        runs = [session.run(None, feeds) for _ in range(2)]
    except Exception as error:  # each version has its own kinds
        return f"{type(error).__name__}: {error}".splitlines()[0][:_ERROR_CHARACTERS]
    return max(_error(outputs, expected) for outputs in runs)


def _error(outputs: list[np.ndarray], expected: list[np.ndarray]) -> float:
    """Greatest error over all outputs; infinite for a wrong shape, NaN or infinity."""
    if [item.shape for item in outputs] != [item.shape for item in expected]:
        return math.inf
    errors = [0.0]
    for actual, right in zip(outputs, expected, strict=True):
        if not np.isfinite(actual.astype(np.float64)).all():
            return math.inf
        if right.size:
            difference = np.abs(actual.astype(np.float64) - right.astype(np.float64)).max()
            errors.append(float(difference / max(np.abs(right).max(), 1e-30)))
    return max(errors)


def main() -> None:
    """Run the models that standard input names."""
    folder = Path(sys.argv[1])
    for name in sys.stdin.read().split("\n"):
        if name:
            model = folder / f"{name}.onnx"
            outcomes = {kind: _run(model, level) for kind, level in _LEVELS.items()}
            print(json.dumps({"name": name, **outcomes}), flush=True)


if __name__ == "__main__":
    main()
