# SPDX-License-Identifier: MIT
"""Plain onnxruntime sessions at an optimisation level given by a short name."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy.typing as npt
import onnxruntime

from ortplugins.errors import ModelFileError, UsageError
from ortplugins.runtime.copied_options import apply_settings
from session_options.entries import DATA_FOLDER_KEY

LEVELS = {
    "disable": "ORT_DISABLE_ALL",
    "basic": "ORT_ENABLE_BASIC",
    "extended": "ORT_ENABLE_EXTENDED",
    "layout": "ORT_ENABLE_LAYOUT",
    "all": "ORT_ENABLE_ALL",
}
"""onnxruntime's optimisation levels by the names that our options use."""


NUMPY_TYPES = frozenset({
    "bool", "double", "float", "float16", "int16", "int32", "int64", "int8", "string",
    "uint16", "uint32", "uint64", "uint8",
})  # fmt: skip
"""Element types, in onnxruntime's spelling, that exist in numpy and so can be returned."""


def optimization_level_of(name: str) -> onnxruntime.GraphOptimizationLevel:
    """Return an optimisation level by its key in :data:`LEVELS`."""
    levels = onnxruntime.GraphOptimizationLevel
    known = {short: member for short, member in LEVELS.items() if hasattr(levels, member)}
    if name not in known:
        raise UsageError(f"unknown level {name!r}; expected one of {', '.join(known)}")
    return getattr(levels, known[name])


def open_model(
    model: str | os.PathLike[str] | bytes,
    level: str,
    providers: Sequence[Any] = ("CPUExecutionProvider",),
    settings: Mapping[str, str | int | bool] | None = None,
    disabled: Iterable[str] = (),
) -> onnxruntime.InferenceSession:
    """Open a quiet session on a file or on bytes, without onnxruntime's fallback.

    ``settings``, as of :func:`apply_settings`, take precedence over the level; ``disabled``
    are names of optimisers.
    """
    options, settings = onnxruntime.SessionOptions(), settings or {}
    options.log_severity_level = 3
    options.graph_optimization_level = optimization_level_of(level)
    name = "the model" if isinstance(model, bytes) else os.fspath(model)
    if not isinstance(model, bytes) and not os.path.isfile(model):
        from ortplugins.model_io.loading import read_model_file

        read_model_file(model)
    if DATA_FOLDER_KEY in settings and not isinstance(model, bytes):
        with open(model, "rb") as file:  # older versions heed it for bytes only
            model = file.read()
    apply_settings(options, settings)
    source = model if isinstance(model, bytes) else name
    given = {"disabled_optimizers": [*disabled], "enable_fallback": 0}
    try:
        return onnxruntime.InferenceSession(source, options, list(providers), **given)
    except Exception as error:  # onnxruntime's own classes, none of which is documented
        text = " ".join(str(error).split())
        raise ModelFileError(f"{name}: onnxruntime refuses it: {text}") from error


def quiet_runner(
    session: onnxruntime.InferenceSession,
) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Return a function that runs a session and does not log inputs that do not fit."""
    options = onnxruntime.RunOptions()
    options.log_severity_level = 4
    names = [item.name for item in session.get_outputs() if type_of(item) in NUMPY_TYPES]
    if not names:  # [] would fetch all outputs, which numpy cannot represent
        return lambda feed: {}
    return lambda feed: dict(zip(names, session.run(names, feed, options), strict=True))


def fetch(
    session: onnxruntime.InferenceSession,
    names: Sequence[str | None],
    feed: Mapping[str, npt.NDArray[Any]],
    what: str,
) -> list[npt.NDArray[Any]]:
    """Run a session on those arrays of a feed that it takes; return outputs, all for no name.

    Raises:
        ModelFileError: If the run fails; names ``what`` and the shapes.
    """
    inputs = (*session.get_inputs(), *session.get_overridable_initializers())
    taken = {item.name: feed[item.name] for item in inputs if item.name in feed}
    try:
        arrays: list[npt.NDArray[Any]] = session.run(list(names), taken)
    except Exception as error:  # onnxruntime's own classes, none of which is documented
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in taken.items())
        raise ModelFileError(
            f"{what}: onnxruntime failed to run it ({shapes}): {error}"
        ) from error
    return arrays


def type_of(item: Any) -> str:
    """Return ``float`` for an input or output that is ``tensor(float)``."""
    return str(item.type).removeprefix("tensor(").removesuffix(")")
