# SPDX-License-Identifier: MIT
"""The order in which onnxruntime really runs nodes, read from its profile.

The order of a file is not that of a run: onnxruntime sorts the nodes itself.
"""

from __future__ import annotations

__all__ = ["ProfiledNode", "profiled_run"]

import dataclasses
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
import onnxruntime

from ortplugins.errors import ModelFileError
from ortplugins.samples.sources import Feed

_SUFFIX = "_kernel_time"


@dataclasses.dataclass(frozen=True)
class ProfiledNode:
    """A node that ran, bodies' nodes among them.

    Attributes:
        name: Of the node.
        op_type: Of the node.
        start: When it started, in microseconds.
        output_bytes: What its outputs take, all together.
        outputs: Type, in onnxruntime's word, and shape of each output that is a tensor.
    """

    name: str
    op_type: str
    start: int
    output_bytes: int
    outputs: tuple[tuple[str, tuple[int, ...]], ...]

    def bytes_of(self, index: int) -> int:
        """Bytes of one output; where its type has none of numpy's, those of all."""
        if index >= len(self.outputs):
            return self.output_bytes
        kind, shape = self.outputs[index]
        try:
            item = ir.DataType[kind.upper()].itemsize
        except (KeyError, TypeError):
            return self.output_bytes
        size = item
        for dim in shape:
            size *= dim
        return int(size)


def profiled_run(
    source: str | bytes,
    options: onnxruntime.SessionOptions,
    feed: Feed,
    providers: Sequence[Any] = ("CPUExecutionProvider",),
    *,
    name: str = "the model",
) -> list[ProfiledNode]:
    """Run a model once and return its nodes in the order in which they started.

    Args:
        source: Path or serialized model.
        options: Of the session; they come back as they were.
        feed: Inputs.
        providers: Execution providers.
        name: How messages call the model.

    Raises:
        ModelFileError: If onnxruntime refuses the model or fails to run it, chained.
    """
    before = options.enable_profiling, options.profile_file_prefix
    with tempfile.TemporaryDirectory(prefix="ortplugins-") as folder:
        options.enable_profiling = True
        options.profile_file_prefix = os.path.join(folder, "profile")
        try:
            session = onnxruntime.InferenceSession(
                source, options, providers=list(providers), enable_fallback=0
            )
        except Exception as error:  # onnxruntime's own classes, none of which is documented
            raise ModelFileError(f"{name}: onnxruntime refuses it: {error}") from error
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
    nodes = [_node(event) for event in events if _is_node(event)]
    return sorted(nodes, key=lambda node: node.start)


def _is_node(event: Mapping[str, Any]) -> bool:
    return event.get("cat") == "Node" and str(event["name"]).endswith(_SUFFIX)


def _node(event: Mapping[str, Any]) -> ProfiledNode:
    args = event["args"]
    outputs = [
        (kind, tuple(shape))
        for item in args.get("output_type_shape", ())
        for kind, shape in item.items()
    ]
    return ProfiledNode(
        name=str(event["name"]).removesuffix(_SUFFIX),
        op_type=str(args.get("op_name", "")),
        start=int(event["ts"]),
        output_bytes=int(args.get("output_size", 0)),
        outputs=tuple(outputs),
    )
