# SPDX-License-Identifier: MIT
"""Opens sessions on parts of a model and runs samples through them; weights stay in files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
import onnxruntime

from ortplugins.errors import CalibrationError
from ortplugins.model_io.data_in_place import in_place
from ortplugins.model_io.loading import (
    initializer_tensors,
    lift_constants,
    relocated,
    stored_bytes,
)
from ortplugins.model_io.saving import DATA_THRESHOLD
from ortplugins.runtime.stock_session import open_model
from session_options.entries import DATA_FOLDER_KEY


def detach_tensors(model: ir.Model, scratch: Path) -> Path:
    """Leave no large tensor in the graph; return the folder above all files with tensors.

    A serialized graph is limited to 2 GB, and onnxruntime keeps what is in it on the heap,
    while it maps files. onnxruntime reads no files outside of the one folder that it is given;
    a parent of all of them will do.
    """
    lift_constants(model)
    owners = {
        value: tensor
        for value, tensor in initializer_tensors(model)
        if isinstance(tensor, ir.ExternalTensor) or stored_bytes(tensor) >= DATA_THRESHOLD
    }
    in_memory = {id(t): t for t in owners.values() if not isinstance(t, ir.ExternalTensor)}
    written = ir.external_data.convert_tensors_to_external(
        list(in_memory.values()), scratch, "tensors.data"
    )
    files: dict[int, Any] = dict(zip(in_memory, written, strict=True))
    externals = {value: files.get(id(tensor), tensor) for value, tensor in owners.items()}
    if not externals:
        return scratch
    given = {os.fspath(each.path) for each in externals.values()}
    paths = {path: Path(os.path.realpath(path)) for path in given}
    if (placed := in_place(paths)) is None:
        raise CalibrationError(
            f"the model's data and the scratch folder {str(scratch)!r} have no parent folder "
            "in common, which onnxruntime needs: use a scratch folder on the model's drive"
        )
    for value, external in externals.items():
        name = Path(placed.names[os.fspath(external.path)]).as_posix()
        value.const_value = relocated(external, name, str(placed.folder))
    return placed.folder


def open_for_samples(
    model: ir.Model, folder: Path, providers: Sequence[Any]
) -> onnxruntime.InferenceSession:
    """Open a session on a graph that :func:`detach_tensors` left; weights stay in their files.

    - No optimisation: what it fuses depends on the values that are outputs, and so would the
      statistics. Folded constants (transposed or cast weights) would move to the heap besides.
    - Weights packed for the kernels make runs 12 % faster and take the model's size of heap.

    Threads do not spin after a run, while numpy multiplies on the same cores.
    """
    settings = {
        "session.disable_prepacking": "1",
        "session.intra_op.allow_spinning": "0",
        DATA_FOLDER_KEY: str(folder),
    }
    content = ir.to_proto(model).SerializeToString()
    return open_model(content, "disable", providers, settings)
