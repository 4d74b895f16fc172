# SPDX-License-Identifier: MIT
"""Finds out what ``SessionOptions`` cannot be asked: it has no getters in Python for these.

Dimensions and initializers set by hand change a model when its session is created, and an
artifact was made without them. A session on the artifact shows the dimensions that its inputs
got, and its copy of the options refuses an initializer that it has already. A library of
custom operators is loaded as long as options name it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import onnxruntime

if TYPE_CHECKING:
    import onnx_ir as ir

# Stands for providers that were set by device or by policy.
PROVIDERS_OF_OPTIONS = "those of the SessionOptions"


def describe_model(model: ir.Model) -> dict[str, Any]:
    """Return what the functions below compare with, as JSON."""
    fixed = {
        str(value.name): [isinstance(size, int) for size in value.shape]
        for value in model.graph.inputs
        if value.shape is not None
    }
    names = {name for graph in model.graphs() for name in graph.initializers}
    return {"fixed_dimensions": fixed, "initializers": sorted(names)}


def overrides_dimensions(
    session: onnxruntime.InferenceSession, described: Mapping[str, Any]
) -> bool:
    """Whether a free dimension of the model's inputs is overridden in a session."""
    fixed = described["fixed_dimensions"]
    return any(
        isinstance(size, int) and not was_fixed
        for meta in session.get_inputs()
        for size, was_fixed in zip(meta.shape, fixed.get(meta.name, ()), strict=False)
    )


def added_initializer(
    session: onnxruntime.InferenceSession, described: Mapping[str, Any]
) -> str | None:
    """Return the name of an initializer of the model that was added by hand, or None."""
    import numpy as np

    value = onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(1, np.float32))
    # get_session_options() returns one object each time: what is added here would stay.
    copy = session._sess.session_options
    for name in described["initializers"]:
        try:
            copy.add_initializer(name, value)
        except RuntimeError:  # "has already been added"
            return str(name)
    return None


def custom_op_libraries() -> tuple[str, ...]:
    """Return the paths of the loaded libraries that operators can be registered from.

    Those of every session of this process; none where the system has no /proc.
    """
    import ctypes

    try:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
            lines = [line.split(maxsplit=5) for line in maps]
    except OSError:
        return ()
    found = []
    for path in dict.fromkeys(line[5].rstrip("\n") for line in lines if len(line) > 5):
        try:
            library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        except OSError:  # a mapped file that is not a library
            continue
        if hasattr(library, "RegisterCustomOps"):  # what onnxruntime calls
            found.append(path)
    return tuple(found)
