# SPDX-License-Identifier: MIT
"""The child process that packs weights: onnxruntime's arenas and peaks go with it.

Reads a job as JSON from its first argument, writes files into the job's folder, and prints the
result as one line of JSON. Run by :mod:`.prepack`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rewrite_rules.prepacked_weights.packed_operands import Key, readings
from rewrite_rules.prepacked_weights.records import (
    drop_records,
    lay_out,
    places,
    read_records,
    restore_order,
)

if TYPE_CHECKING:
    import onnx

PACKED, FINAL, AGAIN = "packed.onnx", "final.onnx", "again.onnx"
# Of what onnxruntime saves; the model's own data file, whatever it is called, has another.
_SAVED_SUFFIX = ".tensors"


def main() -> None:
    """Do the job of ``sys.argv[1]``; leaves with an exception where it can't."""
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    job = json.loads(sys.argv[1])
    source, folder = Path(job["model"]), Path(job["folder"])
    result = _pack(source, folder, job["data_name"]) | _in_use(folder)
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
    size = lay_out(model, folder, data_name, places(before))
    onnx.save(model, folder / FINAL)
    _remove_saved(folder / PACKED)
    blobs = [blob for found in records.values() for one in found for blob in one.blobs]
    return {
        "weights": len(records),
        "blob_bytes": sum(length for _, length, _ in blobs),
        "data_bytes": size,
        "without_row": ["/".join(key) for key in packed if key not in rows],
    }


def _in_use(folder: Path) -> dict[str, int]:
    """See which blobs of FINAL a session takes."""
    import onnx

    wanted = _kernels(onnx.load(folder / FINAL, load_external_data=False))
    # A session packs each weight and takes the blob of equal hash, if there is one. Asked to
    # save, it writes records of those that it had to keep itself (measured, 1.31).
    _open(folder / FINAL, save_to=folder / AGAIN)
    kept = {way for way, _ in _kernels(onnx.load(folder / AGAIN, load_external_data=False))}
    _remove_saved(folder / AGAIN)
    return {"in_use": sum(way not in kept for way, _ in wanted), "recorded": len(wanted)}


def _kernels(model: onnx.ModelProto) -> set[tuple[Key, str]]:
    return {(way, one.kernel) for way, found in read_records(model).items() for one in found}


def _open(model: Path, save_to: Path) -> None:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.enable_cpu_mem_arena = False
    # A plan for reusing buffers takes most of the start of a large graph without shapes.
    options.enable_mem_reuse = False
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
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
    onnxruntime.InferenceSession(
        os.fspath(model), options, providers=["CPUExecutionProvider"], enable_fallback=False
    )


def _remove_saved(model: Path) -> None:
    for path in (model, model.with_name(model.name + _SAVED_SUFFIX)):
        path.unlink(missing_ok=True)
