# SPDX-License-Identifier: MIT
"""The order in which onnxruntime really runs nodes, read from its profile.

The order of a file is not that of a run: onnxruntime sorts the nodes itself.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
import onnxruntime

from ortplugins.errors import ModelFileError
from ortplugins.runtime.stock_session import opened
from ortplugins.samples.sources import Feed

_SUFFIX = "_kernel_time"


@dataclasses.dataclass(frozen=True)
class ProfiledNode:
    """A node that ran, in a subgraph or not."""

    name: str
    # Type, in onnxruntime's word, and bytes of each output that is a tensor; the bytes of all
    # where its type has none of numpy's.
    outputs: tuple[tuple[str, int], ...]


def profiled_run(
    source: str | bytes,
    options: onnxruntime.SessionOptions,
    feed: Feed,
    providers: Sequence[Any] = ("CPUExecutionProvider",),
    *,
    name: str = "the model",
) -> list[ProfiledNode]:
    """Run a model once and return its nodes in the order in which they started."""
    before = options.enable_profiling, options.profile_file_prefix
    with tempfile.TemporaryDirectory(prefix="ortplugins-") as folder:
        options.enable_profiling = True
        options.profile_file_prefix = os.path.join(folder, "profile")
        try:
            session = opened(source, options, providers, name)
        finally:
            options.enable_profiling, options.profile_file_prefix = before
        taken = {item.name for item in session.get_inputs()}
        try:
            # Without numpy's arrays, which not every type has.
            values = {
                k: onnxruntime.OrtValue.ortvalue_from_numpy(v)
                for k, v in feed.items()
                if k in taken and v.dtype.kind in "biufc"
            }
            if len(values) == len(taken & feed.keys()):
                session.run_with_ort_values(None, values)
            else:  # texts have no OrtValue of their own
                session.run(None, {k: v for k, v in feed.items() if k in taken})
        except Exception as error:
            raise ModelFileError(f"{name}: onnxruntime failed to run it: {error}") from error
        finally:
            path = Path(session.end_profiling())
        events = json.loads(path.read_text(encoding="utf-8"))
        del session  # Windows removes no file that is open
    ran = sorted(filter(_is_node, events), key=lambda event: int(event["ts"]))
    return [_node(event) for event in ran]


def _is_node(event: Mapping[str, Any]) -> bool:
    return event.get("cat") == "Node" and str(event["name"]).endswith(_SUFFIX)


def _node(event: Mapping[str, Any]) -> ProfiledNode:
    args = event["args"]
    described = (pair for item in args.get("output_type_shape", ()) for pair in item.items())
    outputs = []
    for kind, shape in described:
        try:
            size = int(ir.DataType[kind.upper()].itemsize * math.prod(shape))
        except (KeyError, TypeError):
            size = int(args.get("output_size", 0))
        outputs.append((kind, size))
    return ProfiledNode(str(event["name"]).removesuffix(_SUFFIX), tuple(outputs))
