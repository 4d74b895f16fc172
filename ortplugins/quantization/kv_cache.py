# SPDX-License-Identifier: MIT
"""Caches of keys and values in 8 bits, in which GroupQueryAttention keeps them itself.

    GroupQueryAttention(q, k, v, past float [B, G, T, D], ...)
        -> GroupQueryAttention(q, k, v, past int8, ..., k_scale [G * D], v_scale [G * D])

A number is stored as ``clip(rint(x / scale), -128, 127)``, with one scale for each channel of
each head: the greatest magnitude in the samples over 127. onnxruntime has the kernel from 1.27
on. It attends to what is stored, new tokens included.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime

from ortplugins.errors import CalibrationError, ModelFileError
from ortplugins.model_io.loading import ModelLike
from ortplugins.model_io.saving import Progress
from ortplugins.quantization.calibration import detach_tensors, open_for_samples
from ortplugins.quantization.files import QuantizedFile, QuantizeResult
from ortplugins.quantization.methods.nearest import Floats
from ortplugins.quantization.weights.report import QuantizeReport
from ortplugins.runtime.stock_session import fetch
from ortplugins.samples.made_up import Feed
from ortplugins.samples.sources import read_samples
from rewrite_rules.graph.initializers import FreshNames, new_initializer
from rewrite_rules.graph.nodes import input_of, label

_PAST, _SCALES = (3, 4), {"k": 12, "v": 13}  # inputs of the operator
_HIGHEST = 127
_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16)
_ADVICE = (
    "optimize the model first, by the pass TransformerFusion with kv_cache='shared', or take "
    "one from onnxruntime-genai's builder"
)


@dataclasses.dataclass(frozen=True, eq=False)
class Cache:
    """The keys or the values of one attention."""

    node: ir.Node
    kind: str  # k or v
    past: ir.Value  # an input of the graph
    present: ir.Value  # an output


def find_caches(model: ir.Model) -> list[Cache]:
    """Return the caches of a model, keys and values in turns.

    Raises:
        ModelFileError: If there is none, or one that cannot be kept in 8 bits.
    """
    found: list[Cache] = []
    for node in model.graph.all_nodes():
        if (node.domain, node.op_type) != ("com.microsoft", "GroupQueryAttention"):
            continue
        for kind, index, present in zip("kv", _PAST, node.outputs[1:3], strict=False):
            if (past := input_of(node, index)) is None:
                continue
            if reason := _refusal(node, past, present, model.graph):
                where = f"the cache of {label(node)!r} stays in float"
                raise ModelFileError(f"{where}: {reason}; {_ADVICE}")
            found.append(Cache(node, kind, past, present))
    if not found:
        raise ModelFileError(f"no GroupQueryAttention has a cache: {_ADVICE}")
    return found


def _refusal(node: ir.Node, past: ir.Value, present: ir.Value, main: ir.Graph) -> str:
    """Say why a cache can't be int8; nothing if it can."""
    if node.graph is not main or not past.is_graph_input() or not present.is_graph_output():
        return "it does not go from an input of the model to an output"
    if past.dtype not in _FLOATS:
        return f"it is {past.dtype.name.lower() if past.dtype else 'of no type'}"
    for value in (past, present):
        for reader in value.consumers():
            if reader.op_type != "Shape" and reader is not node:
                return f"{label(reader)!r} reads {value.name!r} as well"
    return ""


def quantize_kv_cache(
    model: ModelLike,
    output: str | os.PathLike[str] | None = None,
    *,
    calibration_data_reader: Any = None,
    calibration_providers: Sequence[Any] = ("CPUExecutionProvider",),
    overwrite: bool = False,
    progress: Progress | None = None,
) -> QuantizeResult:
    """Keep the cache of GroupQueryAttention in int8; arguments as of :func:`.quantize`.

    Samples have float caches, empty ones mostly: ranges are those of what the model makes.

    Raises:
        CalibrationError: If a sample is bad, or a cache holds NaN, infinity or only zeros.
        ModelFileError: If no cache can be kept in int8.
    """
    file = QuantizedFile(model, output, overwrite=overwrite, progress=progress)
    caches = find_caches(file.model)
    with file.scratch() as scratch:
        samples = read_samples(calibration_data_reader, file.model)
        copy = file.model.clone()
        folder = detach_tensors(copy, scratch)
        session = open_for_samples(copy, folder, calibration_providers)
        names = [cache.present.name or "" for cache in caches]
        scales = _scales(session, names, samples, progress)
        _quantize(file.model, caches, scales)
        note = (
            f"{len(caches)} caches are int8 now: bind int8 arrays to {caches[0].past.name!r}"
        )
        return file.saved(QuantizeReport("kv_cache", notes=[note]))


def _quantize(model: ir.Model, caches: Sequence[Cache], scales: Sequence[Floats]) -> None:
    """Keep caches in 8 bits, in place."""
    names = FreshNames(model)
    for cache, scale in zip(caches, scales, strict=True):
        node, name = cache.node, names.take(f"{cache.past.name}.scale")
        value = new_initializer(model.graph, ir.tensor(scale, name=name))
        node.resize_inputs(max(len(node.inputs), _SCALES["v"] + 1))
        node.replace_input_with(_SCALES[cache.kind], value)
        for attribute in (
            ir.AttrString(f"{cache.kind}_quant_type", "PER_CHANNEL"),
            ir.AttrInt64("kv_cache_bit_width", 8),
        ):
            node.attributes[attribute.name] = attribute
        for end in (cache.past, cache.present):
            end.type = ir.TensorType(ir.DataType.INT8)


def _scales(
    session: onnxruntime.InferenceSession,
    names: Sequence[str],
    samples: Sequence[Feed],
    progress: Progress | None,
) -> list[Floats]:
    """Return the scale of each channel ``[G * D]`` of caches ``[B, G, T, D]``."""
    found = []
    for index, feed in enumerate(samples):
        what = f"sample {index}"
        if progress is not None:
            progress(index, len(samples), f"calibration, {what}")
        arrays = fetch(session, names, feed, what)
        found.append([abs(array.astype(np.float32)).max(axis=(0, 2)) for array in arrays])
    scales = []
    for name, greatest in zip(names, zip(*found, strict=True), strict=True):
        if not 0 < (most := np.max(greatest, axis=0).reshape(-1)).max() < np.inf:
            raise CalibrationError(
                f"cache {name!r} holds NaN, infinity or only zeros: give other samples"
            )
        scales.append(np.maximum(most / np.float32(_HIGHEST), np.finfo(np.float32).tiny))
    return scales
