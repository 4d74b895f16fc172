# SPDX-License-Identifier: MIT
"""Kernels' packed weights in the model's data file, mapped and shared instead of on the heap.

    initializer, packed by each process at its start
        -> initializer, original and packed bytes in the file, records that say where

onnxruntime packs (in a child process: its peak is never this one's), the file is rearranged
(:mod:`.records`) and opened. What comes out holds for this processor and this onnxruntime;
elsewhere a session packs for itself and drops the blobs.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from rewrite_rules.prepacked_weights.child import FINAL
from rewrite_rules.prepacked_weights.packed_operands import readings
from rewrite_rules.prepacked_weights.records import places
from rewrite_rules.remarks import PassContext, Refusal

_DATA_SUFFIX = ".data"
_NOTHING = "no kernel of this model packs weights that can be kept"
# Of a child's error output, in a remark.
_ERROR_CHARACTERS = 300
_SECONDS = 3600  # that packing may take


class PackingError(RuntimeError):
    """The child made no model, and might another time: killed, too slow, no room."""

    def __init__(self, text: str) -> None:
        super().__init__(f"{text} [ORP705]")


def prepack(model_path: Path, context: PassContext) -> None:
    """Pack the weights of a saved model, in place.

    Raises:
        PackingError: If the process that packs is killed, or takes more than an hour.
    """
    name = "model"
    try:
        outcome = _prepack(model_path, context)
    except Refusal as refusal:
        context.remarks.refused(name, refusal)
    else:
        context.remarks.fired(name, outcome)


def _prepack(model_path: Path, context: PassContext) -> str:
    import onnx

    if not context.cpu_only:
        raise Refusal(
            "ORP701", f"packs weights only for the CPU, not for {', '.join(context.providers)}"
        )
    if not context.final_graph:
        raise Refusal(
            "ORP701",
            "onnxruntime's optimisers would replace the nodes whose weights are packed: they "
            "have to run first (ortplugins.bake=1; optimize(..., bake=True); --bake)",
        )
    model = onnx.load(model_path, load_external_data=False)
    if not any(found.has_row for found in readings(model.graph)):
        raise Refusal("ORP703", _NOTHING)
    before = sum(file.stat().st_size for file in model_path.parent.iterdir())
    with tempfile.TemporaryDirectory(prefix=".prepack-", dir=model_path.parent) as scratch:
        folder = Path(scratch)
        result = _run_child(model_path, folder, context)
        _check(result)
        _replace(model_path, folder)
    if others := result["without_row"]:
        context.remarks.note(
            "model",
            f"{len(others)} packed weights stay on the heap, {others[0]!r} first: their "
            "operands are not in packed_operands.py",
        )
    return (
        f"{result['weights']} weights packed, {result['in_use']} of {result['recorded']} "
        f"blobs in use ({result['blob_bytes'] / 1e6:.0f} MB); file {before / 1e6:.0f} -> "
        f"{result['data_bytes'] / 1e6:.0f} MB"
    )


def _run_child(model_path: Path, folder: Path, context: PassContext) -> dict[str, Any]:
    if context.child_python is None:
        raise Refusal(
            "ORP706", "no Python interpreter to pack with: set ORTPLUGINS_PYTHON to one"
        )
    python, environment = context.child_python
    job = {
        "model": os.fspath(model_path.absolute()),
        "folder": os.fspath(folder.absolute()),
        "data_name": model_path.name + _DATA_SUFFIX,
    }
    code = "from rewrite_rules.prepacked_weights.child import main; main()"
    # Nothing is written to the pipe: its end, at the latest with this process, ends the child.
    theirs, ours = os.pipe()
    try:
        done = subprocess.run(
            # -P: not what lies in the working directory under the name of a module.
            [python, "-P", "-c", code, json.dumps(job)],
            capture_output=True,
            stdin=theirs,
            encoding="utf-8",
            errors="replace",
            timeout=_SECONDS,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise PackingError(f"packing took more than {_SECONDS} s and was stopped") from None
    except OSError as error:
        raise PackingError(f"the packing process could not be started: {error}") from error
    finally:
        os.close(theirs)
        os.close(ours)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        text = last[0][:_ERROR_CHARACTERS]
        raise PackingError(f"the packing process ended with {done.returncode}: {text}")
    try:
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, ValueError, TypeError):
        raise PackingError("the packing process gave no result") from None


def _check(result: dict[str, Any]) -> None:
    if not result["weights"]:
        raise Refusal("ORP703", _NOTHING)
    if not result["in_use"]:
        raise Refusal("ORP704", f"a session uses none of {result['recorded']} blobs")


def _replace(model_path: Path, folder: Path) -> None:
    """Put the new files in the place of the old ones; other files of the folder stay."""
    import onnx

    model = onnx.load(model_path, load_external_data=False)
    for location in {str(place[0]) for place in places(model).values()}:
        (model_path.parent / location).unlink(missing_ok=True)
    for file in folder.iterdir():
        name = model_path.name if file.name == FINAL else file.name
        shutil.move(file, model_path.with_name(name))
