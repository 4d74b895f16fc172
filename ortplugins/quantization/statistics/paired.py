# SPDX-License-Identifier: MIT
"""Runs a model and its quantised copy side by side, from one activation to the next.

A weight that is quantised for the inputs X which it gets behind quantised weights, and for the
outputs of the float model, makes up for the errors of those weights, too (see
:mod:`~ortplugins.quantization.methods.gptq`). That needs the order of the graph: with the
inputs of a model that was quantised before, all weights at once, SmolLM2-135M got worse.

Every node runs once in each of the two models. What later nodes read of it is kept in files
until the last of them has run; one sample is in memory at a time.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime

from ortplugins.quantization.statistics.accumulator import (
    ActivationRequest,
    StatisticsAccumulator,
    unit_for,
)
from ortplugins.quantization.statistics.collect import (
    Calibration,
    appended,
    detach_tensors,
    open_for_samples,
    run_sample,
    without_padding,
)
from ortplugins.quantization.tensor_reference import ScratchWriter, TensorReference
from ortplugins.samples.sources import Feed
from rewrite_rules.facts.token_rows import TokenRows
from rewrite_rules.graph.nodes import captures, drop_unused_initializers

Array = npt.NDArray[Any]

_FLOAT, _QUANTIZED = 0, 1
_PLACE = "ortplugins.place"  # of a node, among all of the model
# Rows of the drift at a time.
_DRIFT_ROWS = 384


class PairedModels:
    """A model and its quantised copy, both run up to the same node.

    Attributes:
        places: How many nodes have to run for a value to be there, by its name; inputs of the
            model are not in it.
    """

    def __init__(self, model: ir.Model, calibration: Calibration) -> None:
        """Start before the first node; the samples are gone through for every activation."""
        self._samples, self._providers = calibration.samples, calibration.providers
        self._scratch = Path(tempfile.mkdtemp(dir=calibration.scratch))
        self._model = model.clone()
        # Not by name: nodes of sibling subgraphs may have one, and so may their outputs.
        self._places_of: dict[ir.Node, str] = {}
        both = zip(model.graph.all_nodes(), self._model.graph.all_nodes(), strict=True)
        for place, (node, ours) in enumerate(both):
            self._places_of[node] = ours.metadata_props[_PLACE] = str(place)
        self._folder = detach_tensors(self._model, self._scratch)
        self._rows = TokenRows(self._model)
        self._nodes = list(self._model.graph)
        self.places: dict[str, int] = {}
        self._last_reads: dict[str, int] = {}
        for place, node in enumerate(self._nodes, 1):
            self.places.update((value.name or "", place) for value in node.outputs)
            self._last_reads.update(dict.fromkeys(_reads([node]), place))
        self._place = 0
        self._numbers = itertools.count()
        self._kept: dict[str, Path] = {}  # folders by name of the value
        self._halved: set[str] = set()  # of these, what is bfloat16 and kept in float32
        self._weights: dict[str, dict[int, Callable[[], Array]]] = {}

    def replace(self, node: ir.Node, index: int, weight: Callable[[], Array]) -> None:
        """Have what is a node of the model read another weight in the quantised one.

        ``weight`` returns it, and is called when the node is to run.
        """
        self._weights.setdefault(self._places_of[node], {})[index] = weight

    def statistics(
        self, request: ActivationRequest, writer: ScratchWriter
    ) -> dict[str, TensorReference]:
        """Run both models up to an activation; write what is known of its X.

        Return the arrays of ActivationStatistics; nothing without tokens. Activations are
        asked for in the order of the graph.
        """
        name, k = request.name, request.k
        self._run_to(self.places.get(name, 0))
        quantized = StatisticsAccumulator(request)
        floats = StatisticsAccumulator(dataclasses.replace(request, gram=False))
        # In its file from the start: a second matrix of this size is not held in memory.
        drift = writer.reserve((k, k), np.float32)
        sums, unit = drift.map("r+"), 1.0
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            for index, feed in enumerate(self._samples):
                both = [
                    (name, self._value(m, index, name, feed)) for m in (_FLOAT, _QUANTIZED)
                ]
                rows = [each for _, each in without_padding(both, self._rows, feed)]
                if not rows:
                    continue
                larger = max(unit_for(float(abs(each).max())) for each in rows)
                if larger > unit:
                    quantized.rescale(larger)
                    floats.rescale(larger)
                    for _ in range(2):
                        sums *= np.float32(unit / larger)
                    unit = larger
                updates = [
                    pool.submit(quantized.update, rows[_QUANTIZED]),
                    pool.submit(floats.update, rows[_FLOAT]),
                    pool.submit(_add_drift, rows[_QUANTIZED], rows[_FLOAT], sums, unit),
                ]
                for update in updates:
                    update.result()
        found, expected = quantized.finish(), floats.finish()
        if found is None or expected is None:
            return {}
        sums /= np.float32(found.count)
        arrays = dataclasses.replace(found, float_tokens=expected.tokens).arrays()
        return {key: writer.append(array) for key, array in arrays.items()} | {"drift": drift}

    def _run_to(self, place: int) -> None:
        """Run what is left of the nodes before a place, in both models."""
        nodes = self._nodes[self._place : place]
        if not nodes:
            return
        outputs = (value.name or "" for node in nodes for value in node.outputs)
        made = [name for name in outputs if self._last_reads.get(name, 0) > place]
        folders = {name: self._scratch / f"value{next(self._numbers)}" for name in made}
        for folder in folders.values():
            folder.mkdir()
        for model in (_FLOAT, _QUANTIZED):
            path, weights = self._scratch / "weights", dict[str, Array]()
            session, reads = None, _reads(nodes)
            for index, feed in enumerate(self._samples):
                names = reads & (self._kept.keys() | feed.keys())
                inputs = {name: self._value(model, index, name, feed) for name in names}
                if session is None:
                    part = ir.convenience.extract(self._model.graph, sorted(names), made)
                    if model == _QUANTIZED:
                        weights = self._put_in_weights(part, ScratchWriter(path))
                    session = self._open(part, inputs | weights)
                arrays = run_sample(session, (), inputs | weights, f"sample {index}")
                for folder, array in zip(folders.values(), arrays, strict=True):
                    np.save(folder / f"{model}-{index}.npy", array, allow_pickle=False)
            path.unlink(missing_ok=True)
        self._place = place
        self._kept |= folders
        for name in [name for name in self._kept if self._last_reads[name] <= place]:
            shutil.rmtree(self._kept.pop(name))

    def _value(self, model: int, index: int, name: str, feed: Feed) -> Array:
        if name in self._kept:
            path = self._kept[name] / f"{model}-{index}.npy"
            kept: Array = np.load(path, allow_pickle=False)
            return kept
        default = self._model.graph.initializers.get(name)
        if name in feed or default is None or default.const_value is None:
            return feed[name]
        return default.const_value.numpy()

    def _put_in_weights(self, part: ir.Graph, writer: ScratchWriter) -> dict[str, Array]:
        """Have nodes read quantised weights; return those, mapped, by their new names."""
        weights: dict[str, Array] = {}
        for node in part.all_nodes():
            place = node.metadata_props.get(_PLACE, "")
            for index, weight in self._weights.pop(place, {}).items():
                name = f"ortplugins.weight{next(self._numbers)}"
                weights[name] = writer.append(weight()).map()
                part.inputs.append(ir.Value(name=name))
                node.replace_input_with(index, part.inputs[-1])
        drop_unused_initializers(list(part.initializers.values()))
        return weights

    def _open(
        self, part: ir.Graph, inputs: Mapping[str, Array]
    ) -> onnxruntime.InferenceSession:
        """Open a session on a part of the model, for inputs like these."""
        for value in part.inputs:
            array = inputs[value.name or ""]
            value.type = ir.TensorType(ir.DataType.from_numpy(array.dtype))
            value.shape = ir.Shape([None] * array.ndim)
        for value in [value for value in part.inputs if value.name in self._halved]:
            _cast_input(part, value)
        functions = list(self._model.functions.values())
        model = ir.Model(part, ir_version=self._model.ir_version, functions=functions)
        session = open_for_samples(model, self._folder, self._providers)
        # onnxruntime has no numpy arrays of bfloat16, and knows now which outputs are.
        halved = {o.name for o in session.get_outputs() if o.type == "tensor(bfloat16)"}
        if not halved:
            return session
        self._halved |= halved
        for place, value in enumerate(part.outputs):
            if value.name in halved:
                to = {"to": ir.DataType.FLOAT.value}
                part.outputs[place] = appended(model, "Cast", value, to)
        return open_for_samples(model, self._folder, self._providers)


def _cast_input(part: ir.Graph, value: ir.Value) -> None:
    """Feed a value of bfloat16 in float32."""
    node = ir.node("Cast", [None], {"to": ir.DataType.BFLOAT16.value})
    ir.convenience.replace_all_uses_with(value, node.outputs[0])
    node.replace_input_with(0, value)
    node.outputs[0].name = f"{value.name}.bfloat16"
    part.insert_before(part[0], node)


def _add_drift(quantized: Array, floats: Array, sums: Array, unit: float) -> None:
    """Add X^T (X_float - X) to the sums, in place; both divided by the unit."""
    k = quantized.shape[-1]
    rows = quantized.reshape(-1, k).astype(np.float32, copy=False)
    difference = floats.reshape(-1, k).astype(np.float32, copy=False) - rows
    if unit != 1:
        rows, difference = rows / np.float32(unit), difference / np.float32(unit)
    for start in range(0, k, _DRIFT_ROWS):
        block = slice(start, start + _DRIFT_ROWS)
        sums[block] += rows[:, block].T @ difference


def _reads(nodes: Sequence[ir.Node]) -> set[str]:
    """Return the names that nodes read, from within their subgraphs as well."""
    values = (value for node in nodes for value in (*node.inputs, *captures(node)))
    return {value.name for value in values if value is not None and value.name}
