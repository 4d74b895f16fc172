# SPDX-License-Identifier: MIT
"""How far a quantised model is from the float one, for those who did not ask to measure it."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from ortplugins.errors import ModelFileError, UsageError
from ortplugins.model_io.loading import initializer_tensors, stored_bytes
from ortplugins.optimization.trials import save_both
from ortplugins.runtime.stock_session import open_model, quiet_runner
from ortplugins.samples.made_up import MadeUpInputs

_SAMPLES = 4
# Both models are written once to be run.
_MAX_BYTES = 2 << 30


def describe_change(before: ir.Model, after: ir.Model, providers: Sequence[str]) -> str:
    """Return what a quantised model's user should know, in one sentence.

    The cosine is that of the first output with float elements, flattened, and the mean over
    made-up samples.
    """
    stored = "vectors stored with the float model are not comparable with new ones"
    try:
        return f"outputs change: {_measured(before, after, providers)}; {stored}"
    except (ModelFileError, UsageError) as error:
        return f"outputs change, by how much was not measured ({error}); {stored}"


def _measured(before: ir.Model, after: ir.Model, providers: Sequence[str]) -> str:
    size = sum(stored_bytes(tensor) for _, tensor in initializer_tensors(before))
    if size > _MAX_BYTES:
        raise UsageError(f"it has {size / 1e9:.1f} GB of weights; ortplugins compare does")
    made = MadeUpInputs(before.graph.inputs)
    with tempfile.TemporaryDirectory(prefix="ortplugins-") as name:
        paths = save_both(before, after, Path(name))
        runs = [quiet_runner(open_model(path, "all", providers)) for path in paths]
        made.fit(runs[0])
        cosines = []
        for feed in made.feeds(_SAMPLES):
            expected, found = (_first_floats(run(feed)) for run in runs)
            scale = np.linalg.norm(expected) * np.linalg.norm(found)
            cosines.append(float(expected @ found / scale) if scale else 1.0)
    return f"cosine {np.mean(cosines):.4f} to the float model on {_SAMPLES} made-up samples"


def _first_floats(outputs: dict[str, Any]) -> Any:
    """Return the first output of floats, flattened."""
    for array in outputs.values():
        if array.dtype.kind == "f":
            return array.astype(np.float64).reshape(-1)
    raise UsageError("no output has floats")
