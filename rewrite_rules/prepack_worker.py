# SPDX-License-Identifier: MIT
"""The child process that packs weights: onnxruntime's arenas and peaks go with it.

Reads a job as JSON from its first argument, writes files into the job's folder, and prints the
result as one line of JSON. Run by :mod:`rewrite_rules.prepacked_weights`.
"""

from __future__ import annotations

__all__ = ["main"]

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rewrite_rules.prepacked_records import lay_out, places, read_records, strip_records

if TYPE_CHECKING:
    import onnx
    import onnxruntime

PACKED, FINAL, PLAIN, AGAIN = "packed.onnx", "final.onnx", "plain.onnx", "again.onnx"
# Sizes tried for dimensions that the model leaves open, until one runs: a model may want them
# to agree, or its cache to be empty.
_SIZES = ({"": 2}, {"": 1}, {"": 1, "past": 0}, {"": 2, "past": 0}, {"": 4})


def main() -> None:
    """Do the job of ``sys.argv[1]``; leaves with an exception where it can't."""
    job = json.loads(sys.argv[1])
    folder = Path(job["folder"])
    result = _pack(Path(job["model"]), folder, job["data_name"])
    result.update(_verify(folder))
    print(json.dumps(result), flush=True)


def _pack(source: Path, folder: Path, data_name: str) -> dict[str, Any]:
    """Pack into ``folder``: FINAL and its data; return what it takes."""
    import onnx

    _open(source, save_to=folder / PACKED)
    model = onnx.load(folder / PACKED, load_external_data=False)
    records = read_records(model)
    size = lay_out(
        model, folder, data_name, places(onnx.load(source, load_external_data=False))
    )
    onnx.save(model, folder / FINAL)
    for file in folder.glob(f"{PACKED}*"):
        file.unlink()
    blobs = [blob for found in records.values() for one in found for blob in one.blobs]
    return {
        "weights": len(records),
        "blob_bytes": sum(length for _, length, _ in blobs),
        "data_bytes": size,
    }


def _verify(folder: Path) -> dict[str, Any]:
    """Compare FINAL with the same graph without blobs, and see which blobs a session takes."""
    import onnx

    model = onnx.load(folder / FINAL, load_external_data=False)
    wanted = _kernels(model)
    # A session packs each weight and takes the blob of equal hash, if there is one. Asked to
    # save, it writes records of those that it had to keep itself (measured, 1.31).
    session = _open(folder / FINAL, save_to=folder / AGAIN)
    kept = {name for name, _ in _kernels(onnx.load(folder / AGAIN, load_external_data=False))}
    for file in folder.glob(f"{AGAIN}*"):
        file.unlink()
    strip_records(model)
    onnx.save(model, folder / PLAIN)
    plain = _open(folder / PLAIN)
    (folder / PLAIN).unlink()
    compared, worst = _compare(session, plain)
    return {
        "in_use": sum(name not in kept for name, _ in wanted),
        "recorded": len(wanted),
        "compared": compared,
        "different": worst,
    }


def _kernels(model: onnx.ModelProto) -> set[tuple[str, str]]:
    return {(name, one.kernel) for name, found in read_records(model).items() for one in found}


def _open(model: Path, save_to: Path | None = None) -> onnxruntime.InferenceSession:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.enable_cpu_mem_arena = False
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    if save_to is not None:
        options.optimized_model_filepath = os.fspath(save_to)
        for key, text in (
            (
                "session.optimized_model_external_initializers_file_name",
                f"{save_to.name}.data",
            ),
            ("session.optimized_model_external_initializers_min_size_in_bytes", "1024"),
            ("session.save_external_prepacked_constant_initializers", "1"),
        ):
            options.add_session_config_entry(key, text)
    return onnxruntime.InferenceSession(
        os.fspath(model), options, providers=["CPUExecutionProvider"], enable_fallback=0
    )


def _compare(
    one: onnxruntime.InferenceSession, other: onnxruntime.InferenceSession
) -> tuple[int, list[str]]:
    """Run both on equal inputs; return the outputs compared and the names that differ."""
    error: Exception | None = None
    for sizes in _SIZES:
        try:
            feeds = {item.name: _feed(item, sizes) for item in one.get_inputs()}
            expected = other.run(None, feeds)
        except Exception as failure:  # whatever it is, other sizes may do
            error = failure
            continue
        names = [item.name for item in one.get_outputs()]
        different = [
            name
            for name, a, b in zip(names, one.run(None, feeds), expected, strict=True)
            if not _same(a, b)
        ]
        return len(names), different
    print(f"no inputs were found that the model runs on: {error}", file=sys.stderr)
    return 0, []


def _same(a: Any, b: Any) -> bool:
    if not isinstance(a, np.ndarray) or a.dtype == object:
        return str(a) == str(b)
    return bool(a.shape == b.shape and a.tobytes() == b.tobytes())


def _feed(item: Any, sizes: dict[str, int]) -> npt.NDArray[Any]:
    shape = [size if isinstance(size, int) else _size(str(size), sizes) for size in item.shape]
    kind = item.type.removeprefix("tensor(").removesuffix(")")
    dtype = np.dtype({"float": "float32", "double": "float64"}.get(kind, kind))
    rng = np.random.default_rng(0)
    if dtype.kind == "f":
        return rng.standard_normal(shape).astype(dtype)
    return np.ones(shape, dtype)


def _size(name: str, sizes: dict[str, int]) -> int:
    return next((size for part, size in sizes.items() if part and part in name), sizes[""])
