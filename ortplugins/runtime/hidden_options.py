# SPDX-License-Identifier: MIT
"""Finds out what ``SessionOptions`` cannot be asked: dimensions and initializers set by hand.

Both change a model when its session is created, and an artifact was made without them. Python
has no getters, but a session of onnxruntime that is never run gives a copy of its options, a
copy refuses an initializer that it has already, and a tiny model with the inputs' dimensions
shows what they are overridden to. Takes about a millisecond.
"""

from __future__ import annotations

__all__ = ["PROBE", "HiddenOptions", "find_hidden_options"]

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnxruntime

from ortplugins.runtime.temporary_settings import temporarily_set

PROBE = "probe.onnx"

# A session opens its profile, and starts its threads, as soon as it is constructed.
_QUIET = {"enable_profiling": False, "intra_op_num_threads": 1, "inter_op_num_threads": 1}


@dataclasses.dataclass(frozen=True)
class HiddenOptions:
    """What was found.

    Attributes:
        overrides_dimensions: Whether a free dimension of the model's inputs is overridden.
        added_initializer: Name of an initializer of the model that was added by hand, or None.
    """

    overrides_dimensions: bool
    added_initializer: str | None


def find_hidden_options(
    options: onnxruntime.SessionOptions, folder: Path, manifest: Mapping[str, Any]
) -> HiddenOptions:
    """Look for options that an artifact was made without.

    Args:
        options: The session's options; as they were afterwards.
        folder: Folder with ``probe.onnx``.
        manifest: Has what ``ortplugins.optimization.probe.write_probe`` returned.
    """
    state = onnxruntime.capi._pybind_state
    probe = str(folder / PROBE)
    with temporarily_set(options, _QUIET):
        copy = state.InferenceSession(options, probe, True, False).session_options
    copy.optimized_model_filepath = ""
    copy.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    session = state.InferenceSession(copy, probe, True, False)
    before = [list(meta.shape) for meta in session.inputs_meta]
    session.initialize_session(["CPUExecutionProvider"], [{}], set())
    after = [list(meta.shape) for meta in session.inputs_meta]
    return HiddenOptions(before != after, _added(copy, manifest["initializers"]))


def _added(copy: onnxruntime.SessionOptions, names: list[str]) -> str | None:
    import numpy as np

    value = onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(1, np.float32))
    for name in names:
        try:
            copy.add_initializer(name, value)
        except RuntimeError:  # "has already been added"
            return name
    return None
