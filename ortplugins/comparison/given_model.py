# SPDX-License-Identifier: MIT
"""One kind of model to work on, a file, from whatever kind a model was given as."""

from __future__ import annotations

__all__ = [
    "ModelSource",
    "as_file",
    "as_ir",
    "is_session",
    "quiet_about_packed_weights",
    "report_of",
]

import contextlib
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ortplugins.errors import ModelFileError

if TYPE_CHECKING:
    import onnx_ir as ir
    import onnxruntime

    from ortplugins.model_io.loading import ModelLike
    from ortplugins.optimization.optimize import OptimizeResult
    from ortplugins.report import Report

    ModelSource: TypeAlias = ModelLike | bytes | OptimizeResult | onnxruntime.InferenceSession


def as_file(model: ModelSource, scratch: Path) -> Path:
    """Return the file of a model; what lies in memory is written to ``scratch``.

    Args:
        model: A path, serialized bytes, an object, what ``optimize`` returned, or a session,
            which stands for the model that it opened: before onnxruntime's own fusions.
        scratch: An existing folder, to be kept as long as the file is used.

    Raises:
        MissingFileError, ModelFileError: If it cannot be used.
        TypeError: If it is no model.
    """
    import onnx
    import onnx_ir as ir

    from ortplugins.model_io.loading import from_memory, load_bytes
    from ortplugins.model_io.saving import save_with_data
    from ortplugins.optimization.optimize import OptimizeResult

    if isinstance(model, str | os.PathLike):
        return Path(model)
    if is_session(model):
        return as_file(_opened_by(model), scratch)
    if isinstance(model, OptimizeResult):
        return as_file(model.model if model.path is None else model.path, scratch)
    if isinstance(model, bytes):
        loaded = load_bytes(model, None)
    elif isinstance(model, onnx.ModelProto | ir.Model):
        loaded = from_memory(model)
    else:
        raise _no_model(model)
    path = Path(tempfile.mkdtemp(dir=scratch)) / "model.onnx"
    save_with_data(loaded.model, path)
    return path


def as_ir(model: ModelSource) -> ir.Model:
    """Return the graph of a model, for the caller to change; its tensors stay where they are.

    Args:
        model: As for :func:`as_file`.

    Raises:
        MissingFileError, ModelFileError: If it cannot be used.
        TypeError: If it is no model.
    """
    import onnx
    import onnx_ir as ir

    from ortplugins.model_io.loading import from_memory, load_bytes, load_path
    from ortplugins.optimization.optimize import OptimizeResult

    if isinstance(model, str | os.PathLike):
        with quiet_about_packed_weights():
            return load_path(model).model
    if is_session(model):
        return as_ir(_opened_by(model))
    if isinstance(model, OptimizeResult):
        return as_ir(model.model if model.path is None else model.path)
    if isinstance(model, bytes):
        return load_bytes(model, None).model
    if isinstance(model, onnx.ModelProto | ir.Model):
        return from_memory(model).model
    raise _no_model(model)


@contextlib.contextmanager
def quiet_about_packed_weights() -> Iterator[None]:
    """Keep onnx from warning of records of packed weights, which it has no place for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Ignoring unknown external data")
        yield


def is_session(model: object) -> bool:
    """Whether a model was given as a session."""
    import onnxruntime

    return isinstance(model, onnxruntime.InferenceSession)


def report_of(model: object) -> Report | None:
    """Return the report of what ``optimize`` returned or of a session; None of all else."""
    from ortplugins.optimization.optimize import OptimizeResult

    if isinstance(model, OptimizeResult):
        return model.report
    report: Report | None = getattr(model, "ortplugins_report", None)
    return report if report is not None and report.passes else None


def _opened_by(session: Any) -> str | bytes:
    """What onnxruntime was given when the session was created: our file, or the user's own."""
    report = getattr(session, "ortplugins_report", None)
    path, content = session._model_path, session._model_bytes
    if report is not None and report.artifact:
        path = report.artifact  # where passes are switched on, the session says what was asked
    if path is None:
        return bytes(content)
    if not os.path.exists(path):
        raise ModelFileError(
            f"{path}: the model that the session opened is there no more: it was built "
            "without a cache, or the cache was emptied meanwhile"
        )
    return str(path)


def _no_model(model: object) -> TypeError:
    return TypeError(
        f"a {type(model).__name__} is no model: a path, bytes, an onnx.ModelProto, an "
        "onnx_ir.Model, an OptimizeResult or a session is expected"
    )
