# SPDX-License-Identifier: MIT
"""Runs models on whatever onnxruntime it finds, and tells how far off the numbers are.

    python run_models.py FOLDER < models

where each line of ``models`` is ``<subfolder>/<stem>``: FOLDER holds the model as
``<subfolder>/<stem>.onnx`` and, for all models of the subfolder, ``<subfolder>/numbers.npz``
with the feeds ("feed:<input>") and the expected outputs ("output:<index>"). Each model runs
without and with onnxruntime's optimisers, and each time a line of JSON is printed:

    {"model": ..., "level": "plain" | "optimised", "error": ..., "off": ...}

``error`` is short, and null where it ran; ``off`` is then the greatest error over the greatest
expected number, null for a wrong shape, NaN or infinity. A crash shows as a missing line. It
needs numpy and onnxruntime only, of any version.
"""

import functools
import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort

LEVELS = {
    "plain": ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "optimised": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
}
_ERROR_CHARACTERS = 250


@functools.lru_cache(maxsize=1)
def _numbers(path: Path) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
    """Feeds by name, and the expected outputs."""
    with np.load(path) as arrays:
        feeds = {name[5:]: arrays[name] for name in arrays if name.startswith("feed:")}
        count = sum(name.startswith("output:") for name in arrays)
        return feeds, [arrays[f"output:{index}"] for index in range(count)]


def _run(path: Path, level: ort.GraphOptimizationLevel) -> dict[str, object]:
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    # What is left unfused must not get rounded activations from onnxruntime's own fusion.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "0")
    feeds, expected = _numbers(path.parent / "numbers.npz")
    try:
        session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        # Twice: what reads memory that nothing wrote may be lucky at first.
        errors = [_error(session.run(None, feeds), expected) for _ in range(2)]
    except Exception as error:  # each version has kinds of its own
        text = " ".join(str(error).replace(str(path), path.name).split())
        return {"error": text[-_ERROR_CHARACTERS:], "off": None}
    off = None if None in errors else max(error for error in errors if error is not None)
    return {"error": None, "off": off}


def _error(outputs: list[np.ndarray], expected: list[np.ndarray]) -> float | None:
    """Greatest relative error of all outputs; None where they can't be compared."""
    errors = [0.0]
    for actual, right in zip(outputs, expected, strict=True):
        numbers = actual.astype(np.float64)
        if numbers.shape != right.shape or not np.isfinite(numbers).all():
            return None
        if right.size:
            scale = max(np.abs(right).max(), 1e-30)
            errors.append(float(np.abs(numbers - right.astype(np.float64)).max() / scale))
    return max(errors)


def main() -> None:
    folder = Path(sys.argv[1])
    for model in sys.stdin.read().split():
        for name, level in LEVELS.items():
            outcome = _run(folder / f"{model}.onnx", level)
            print(json.dumps({"model": model, "level": name, **outcome}), flush=True)


if __name__ == "__main__":
    main()
