# SPDX-License-Identifier: MIT
"""The child process that packs weights: onnxruntime's arenas and peaks go with it.

Reads a job as JSON from its first argument, writes files into the job's folder, and prints the
result as one line of JSON, the last one. Before each run of a model it prints what it would be
without that run: onnxruntime may end the process. Run by :mod:`.prepack`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rewrite_rules.prepacked_weights.packed_operands import Key, readings
from rewrite_rules.prepacked_weights.records import (
    drop_records,
    lay_out,
    places,
    read_records,
    restore_order,
    same_bytes,
    stored,
)

if TYPE_CHECKING:
    import onnx
    import onnxruntime

# In a result, which model was about to run; the original, or the one with packed weights.
RUNNING, ORIGINAL, PACKED_ONE = "running", "original", "packed"
PACKED, FINAL, AGAIN = "packed.onnx", "final.onnx", "again.onnx"
# Of what onnxruntime saves; the model's own data file, whatever it is called, has another.
_SAVED_SUFFIX = ".tensors"
# Sizes tried for dimensions that the model leaves open, until one runs: a model may want them
# to agree, or its cache to be empty.
_SIZES = ({"": 2}, {"": 1}, {"": 1, "past": 0}, {"": 2, "past": 0}, {"": 4})


def main() -> None:
    """Do the job of ``sys.argv[1]``; leaves with an exception where it can't."""
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    job = json.loads(sys.argv[1])
    source, folder = Path(job["model"]), Path(job["folder"])
    result = _pack(source, folder, job["data_name"])
    if not result["damaged"]:
        result.update(_verify(source, folder, result))
    print(json.dumps(result), flush=True)


def _leave_with_parent() -> None:
    """End when the other end of the standard input is gone: a killed parent holds no lock."""
    os.read(0, 1)
    os._exit(1)


def _pack(source: Path, folder: Path, data_name: str) -> dict[str, Any]:
    """Pack into ``folder``: FINAL and its data; return what it takes and what changed."""
    import onnx

    _open(source, save_to=folder / PACKED)
    model = onnx.load(folder / PACKED, load_external_data=False)
    before = onnx.load(source, load_external_data=False)
    restore_order(model, before)
    packed = read_records(model).keys()
    rows = {found.key for found in readings(model.graph) if found.has_row}
    drop_records(model, rows)
    records = read_records(model)
    # Its own bytes are those of the source, whatever onnxruntime saved.
    was = stored(model, folder) | stored(before, source.parent)
    size = lay_out(model, folder, data_name, places(before))
    onnx.save(model, folder / FINAL)
    now = stored(model, folder).items()
    damaged = [name for name, piece in now if name in was and not same_bytes(was[name], piece)]
    _remove_saved(folder / PACKED)
    blobs = [blob for found in records.values() for one in found for blob in one.blobs]
    return {
        "weights": len(records),
        "blob_bytes": sum(length for _, length, _ in blobs),
        "data_bytes": size,
        "damaged": damaged,
        "without_row": ["/".join(key) for key in packed if key not in rows],
    }


def _verify(source: Path, folder: Path, packed: dict[str, Any]) -> dict[str, Any]:
    """Compare FINAL with the model it was made from; see which blobs a session takes."""
    import onnx

    wanted = _kernels(onnx.load(folder / FINAL, load_external_data=False))
    # A session packs each weight and takes the blob of equal hash, if there is one. Asked to
    # save, it writes records of those that it had to keep itself (measured, 1.31).
    session = _open(folder / FINAL, save_to=folder / AGAIN)
    kept = {way for way, _ in _kernels(onnx.load(folder / AGAIN, load_external_data=False))}
    _remove_saved(folder / AGAIN)
    used = {"in_use": sum(way not in kept for way, _ in wanted), "recorded": len(wanted)}

    def before(model: str) -> None:
        untested = {"compared": 0, "different": [], RUNNING: model}
        print(json.dumps({**packed, **used, **untested}), flush=True)

    compared, different = _compare(session, _open(source), before)
    return {**used, "compared": compared, "different": different}


def _kernels(model: onnx.ModelProto) -> set[tuple[Key, str]]:
    return {(way, one.kernel) for way, found in read_records(model).items() for one in found}


def _open(model: Path, save_to: Path | None = None) -> onnxruntime.InferenceSession:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.enable_cpu_mem_arena = False
    # A plan for reusing buffers takes most of the start of a large graph without shapes.
    options.enable_mem_reuse = False
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    if save_to is not None:
        options.optimized_model_filepath = os.fspath(save_to)
        for key, text in (
            (
                "session.optimized_model_external_initializers_file_name",
                save_to.name + _SAVED_SUFFIX,
            ),
            ("session.optimized_model_external_initializers_min_size_in_bytes", "1024"),
            ("session.save_external_prepacked_constant_initializers", "1"),
        ):
            options.add_session_config_entry(key, text)
    return onnxruntime.InferenceSession(
        os.fspath(model), options, providers=["CPUExecutionProvider"], enable_fallback=0
    )


def _remove_saved(model: Path) -> None:
    for path in (model, model.with_name(model.name + _SAVED_SUFFIX)):
        path.unlink(missing_ok=True)


def _compare(
    one: onnxruntime.InferenceSession,
    other: onnxruntime.InferenceSession,
    before: Callable[[str], None] = lambda model: None,
) -> tuple[int, list[str]]:
    """Run both on equal inputs; return the outputs compared and the names that differ.

    ``before`` is called before a run, with which of the two it is.
    """
    error: Exception | None = None
    names = [item.name for item in one.get_outputs()]
    compared: set[str] = set()
    different: set[str] = set()
    # A flag may choose between two branches, each with weights of its own.
    flags = any("bool" in item.type for item in one.get_inputs())
    for flag in (1, 0) if flags else (1,):
        for sizes in _SIZES:
            try:
                feeds = {item.name: _feed(item, sizes, flag) for item in one.get_inputs()}
                before(ORIGINAL)
                expected = other.run(None, feeds)
            except Exception as failure:  # whatever it is, other sizes may do
                error = failure
                continue
            compared.update(names)
            before(PACKED_ONE)
            for name, a, b in zip(names, one.run(None, feeds), expected, strict=True):
                if not _same(a, b):
                    different.add(name)
            break
    if not compared:
        print(f"no inputs were found that the model runs on: {error}", file=sys.stderr)
    return len(compared), sorted(different)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    if not isinstance(a, np.ndarray) or a.dtype == object:
        return str(a) == str(b)
    return bool(a.shape == b.shape and a.tobytes() == b.tobytes())


def _feed(item: Any, sizes: dict[str, int], flag: int) -> npt.NDArray[Any]:
    shape = [size if isinstance(size, int) else _size(str(size), sizes) for size in item.shape]
    kind = item.type.removeprefix("tensor(").removesuffix(")")
    if kind == "string":
        return np.full(shape, "", object)
    dtype = np.dtype({"float": "float32", "double": "float64"}.get(kind, kind))
    rng = np.random.default_rng(0)
    if dtype.kind == "f":
        return rng.standard_normal(shape).astype(dtype)
    return np.full(shape, flag if dtype.kind == "b" else 1, dtype)


def _size(name: str, sizes: dict[str, int]) -> int:
    return next((size for part, size in sizes.items() if part and part in name), sizes[""])
