# SPDX-License-Identifier: MIT
"""Runs a model and its copy, quantised so far, side by side, from one activation to the next.

A weight that is quantised for the inputs X which it gets behind quantised weights, and for the
outputs of the float model, makes up for the errors of those weights, too (see
:mod:`~ortplugins.quantization.methods.gptq`). That needs the order of the graph: with the
inputs of a model that was quantised before, all weights at once, SmolLM2-135M got worse.

Every node runs once for each sample, in each of the two models. What later nodes read of it is
kept in files until the last of them has run; one sample is in memory at a time.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime

from ortplugins.errors import CalibrationError
from ortplugins.model_io.saving import Progress
from ortplugins.quantization.calibration import detach_tensors, open_for_samples
from ortplugins.quantization.statistics import ActivationStatistics, statistics_of
from ortplugins.runtime.stock_session import fetch
from ortplugins.samples.made_up import Feed
from rewrite_rules.facts.token_rows import TokenRows
from rewrite_rules.graph.nodes import captures, drop_unused_initializers

Array = npt.NDArray[Any]

UNREACHED = "no token of the samples reaches it"
"""Why an activation has no statistics."""

_FLOAT, _QUANTIZED = 0, 1
_PLACE = "ortplugins.place"  # of a node, among all of the model
# Rows of the drift at a time.
_DRIFT_ROWS = 384


class Walk:
    """A model and its quantised copy, both run up to the same node.

    Attributes:
        model: The float model that was given; :meth:`replace` takes its nodes.
        places: How many nodes have to run for a value to be there, by its name; inputs of the
            model are not in it.
    """

    def __init__(
        self,
        model: ir.Model,
        samples: Sequence[Feed],
        scratch: Path,
        providers: Sequence[Any] = ("CPUExecutionProvider",),
        progress: Progress | None = None,
    ) -> None:
        """Start before the first node; files in a folder of ``scratch`` are the walk's."""
        self.model, self._samples = model, samples
        self._providers, self._progress = providers, progress
        self._scratch = Path(tempfile.mkdtemp(dir=scratch))
        self._model = model.clone()
        # Not by name: nodes of sibling subgraphs may have one, and so may their outputs.
        self._places_of: dict[ir.Node, str] = {}
        both = zip(model.graph.all_nodes(), self._model.graph.all_nodes(), strict=True)
        for place, (node, ours) in enumerate(both):
            self._places_of[node] = ours.metadata_props[_PLACE] = str(place)
        self._folder = detach_tensors(self._model, self._scratch)
        self._rows = TokenRows(model.graph)
        self._nodes = list(self._model.graph)
        self.places: dict[str, int] = {}
        self._last_reads: dict[str, int] = {}
        for place, node in enumerate(self._nodes, 1):
            self.places.update((value.name or "", place) for value in node.outputs)
            self._last_reads.update(dict.fromkeys(_reads([node]), place))
        self._place = 0
        self._numbers = itertools.count()
        self._kept: dict[str, Path] = {}  # folders by name of the value
        self._forms: dict[Path, tuple[np.dtype[Any], tuple[int, ...]]] = {}
        self._differs = False  # whether the copy has run a quantised weight
        self._weights: dict[str, dict[int, Callable[[], Array]]] = {}

    def replace(self, node: ir.Node, index: int, weight: Callable[[], Array]) -> None:
        """Have a node of the copy read another weight, which is asked for when it is to run.

        A node that has run already keeps what it had.
        """
        self._weights.setdefault(self._places_of[node], {})[index] = weight

    def statistics(
        self, name: str, k: int, axes: int = 0, **limits: Any
    ) -> ActivationStatistics | None:
        """Return statistics of an activation in the float model; None without tokens.

        Activations are asked for in the order of the graph; arguments are those of
        :func:`statistics_of`.
        """
        self._run_to(self.places.get(name, 0))
        given = functools.partial(self._tokens, _FLOAT, name)
        return statistics_of(given, name, k, axes, zeros=self._zeros, **limits)

    def paired(self, name: str, k: int) -> ActivationStatistics | None:
        """Return statistics of an activation in the copy, and of how it drifted.

        All its tokens count.
        """
        self._run_to(self.places.get(name, 0))
        given = functools.partial(self._tokens, _FLOAT, name)
        copied = functools.partial(self._tokens, _QUANTIZED, name)
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            copy = pool.submit(statistics_of, copied, name, k, 2, zeros=self._zeros)
            floats = pool.submit(statistics_of, given, name, k)
            drift = pool.submit(_drift, copied(), given(), self._zeros((k, k)))
            found, expected = copy.result(), floats.result()
        if found is None or expected is None:
            return None
        sums = drift.result()
        sums /= np.float32(found.count)
        return dataclasses.replace(found, float_tokens=expected.tokens, drift=sums)

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
            weights, session, reads = dict[str, Array](), None, _reads(nodes)
            for index, feed in enumerate(self._samples):
                names = reads & (self._kept.keys() | feed.keys())
                inputs = {name: self._value(model, index, name, feed) for name in names}
                if session is None:
                    part = ir.convenience.extract(self._model.graph, sorted(names), made)
                    if model == _QUANTIZED:
                        weights = self._put_in_weights(part)
                        self._differs |= bool(weights)
                        if not self._differs:
                            break
                    session = self._open(part, inputs | weights)
                what = f"sample {index}"
                if self._progress is not None:
                    self._progress(index, len(self._samples), f"calibration, {what}")
                arrays = fetch(session, (), inputs | weights, what)
                for (name, folder), array in zip(folders.items(), arrays, strict=True):
                    if not isinstance(array, np.ndarray):
                        raise CalibrationError(f"{name!r} is not a tensor: it cannot be kept")
                    stored = array.astype(str) if array.dtype == object else array
                    path = folder / f"{model}-{index}"
                    # Without numpy's header, which is parsed as Python when it is read:
                    # Python 3.11 fails at that now and then where several threads parse
                    # (python/cpython#106905).
                    path.write_bytes(stored.tobytes())
                    self._forms[path] = stored.dtype, stored.shape
        self._place = place
        self._kept |= folders
        for name in [name for name in self._kept if self._last_reads[name] <= place]:
            shutil.rmtree(self._kept.pop(name))

    def _zeros(self, shape: tuple[int, ...]) -> Array:
        """Return a mapped matrix: several of 11,008 x 11,008 are not to be in memory."""
        with tempfile.TemporaryFile(dir=self._scratch) as file:
            # Writing to a mapping of a full disk would kill the process.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, 4 * math.prod(shape))
            return np.asarray(np.memmap(file, np.float32, "w+", shape=shape))

    def _tokens(self, model: int, name: str) -> Iterator[Array]:
        """Yield the rows of an activation for each sample, without padding."""
        for index, feed in enumerate(self._samples):
            array = self._value(model, index, name, feed)
            real = self._rows.real(array.shape, feed)
            yield array if real is None else array[real]

    def _value(self, model: int, index: int, name: str, feed: Feed) -> Array:
        if name in self._kept:
            paths = [self._kept[name] / f"{m}-{index}" for m in (model, _FLOAT)]
            # As long as the copy is the same, the float model alone is run.
            path = next(path for path in paths if path in self._forms)
            dtype, shape = self._forms[path]
            return np.fromfile(path, dtype).reshape(shape)
        default = self._model.graph.initializers.get(name)
        if name in feed or default is None or default.const_value is None:
            return feed[name]
        return default.const_value.numpy()

    def _put_in_weights(self, part: ir.Graph) -> dict[str, Array]:
        """Have nodes read quantised weights; return those by their new names."""
        weights: dict[str, Array] = {}
        for node in part.all_nodes():
            place = node.metadata_props.get(_PLACE, "")
            for index, weight in self._weights.pop(place, {}).items():
                name = f"ortplugins.weight{next(self._numbers)}"
                weights[name] = weight()
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
        functions = list(self._model.functions.values())
        model = ir.Model(part, ir_version=self._model.ir_version, functions=functions)
        return open_for_samples(model, self._folder, self._providers)


def _drift(quantized: Iterable[Array], floats: Iterable[Array], sums: Array) -> Array:
    """Add X^T (X_float - X) of all tokens to the sums, in place."""
    k = len(sums)
    for ours, given in zip(quantized, floats, strict=True):
        rows = ours.reshape(-1, k).astype(np.float32, copy=False)
        difference = given.reshape(-1, k).astype(np.float32, copy=False) - rows
        for start in range(0, k, _DRIFT_ROWS):
            block = slice(start, start + _DRIFT_ROWS)
            sums[block] += rows[:, block].T @ difference
    return sums


def _reads(nodes: Sequence[ir.Node]) -> set[str]:
    """Return the names that nodes read, from within their subgraphs as well."""
    values = (value for node in nodes for value in (*node.inputs, *captures(node)))
    return {value.name for value in values if value is not None and value.name}
